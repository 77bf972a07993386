"""The faults: where each is injected, which loops can meet it, and how a run has to take it."""

from __future__ import annotations

import errno
import json
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, suppress
from dataclasses import dataclass, replace
from functools import partial
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any, Literal
from unittest.mock import patch

import torch

import agentrl.engines.servers.start
import agentrl.workers.policy
from agentrl.agent_loop.scheduler import Scheduler
from agentrl.engines.contract import EngineError
from agentrl.engines.embedded.engine import EmbeddedEngine
from agentrl.engines.servers.fleet import Timings
from agentrl.engines.weights import Weights
from agentrl.environments.sidecar import Fields, Play
from agentrl.trainer.observer import Step
from agentrl.trainer.step import Trainer
from labs.fault_matrix import engine_server, tool_server
from labs.fault_matrix.assets import IN_SIDECARS, PROMPTS, SCORER, TURNS, Loop, N
from labs.fault_matrix.engine_server import EngineFault
from labs.fault_matrix.mark import mark, marked
from labs.fault_matrix.scene import CellFailed, Scene, steps_logged
from labs.fault_matrix.tool_server import ToolFault

ROLLOUT = "actor_rollout_ref.rollout"
STEP = 2
"""The step in which a fault of the driver happens."""
DOWN = 0.5
"""Seconds that a killed server is away."""
HUNG = 6.0
"""Seconds after which a server that hung goes on."""
OWN_TOOLS = "an agent behind the endpoint calls tools of its own"
NO_TOOLS = "the loop calls no tool"
NO_SIDECAR = "the loop has no sidecar"
NO_SCORER = "the environment scores"


@dataclass(frozen=True, slots=True)
class Fault:
    """One row of the matrix."""

    name: str
    scene: Callable[[Scene], AbstractContextManager[None]]
    """Sets the scene: starts servers, adds words, says what is injected."""
    ends: str | None = None
    """Words of the error that the run has to end with, empty for a signal; the same command then goes on."""
    between: Callable[[Scene], None] = lambda scene: None
    """Called before the run goes on."""
    all_survive: bool = True
    """No trajectory may be left out: what failed is tried again."""
    needs_root: bool = False
    slow: bool = False
    """Starts Ray: most of a minute."""
    tool: str = "search"
    """Name of the tool that the policy calls."""
    judged: bool = False
    """A model scores."""
    does_not_apply: Callable[[Loop], str | None] = lambda loop: None
    """Why a loop cannot meet it; None: it can."""


def calls_our_tools(loop: Loop) -> str | None:
    return OWN_TOOLS if loop == "openai_proxy" else calls_a_tool(loop)


def calls_a_tool(loop: Loop) -> str | None:
    return NO_TOOLS if loop in ("single_turn", *IN_SIDECARS) else None


def has_a_sidecar(loop: Loop) -> str | None:
    return None if loop in IN_SIDECARS else NO_SIDECAR


def has_a_scorer(loop: Loop) -> str | None:
    return NO_SCORER if loop == "self_play" else None


def free_port() -> int:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port: int = free.getsockname()[1]
    return port


# Engine servers


@contextmanager
def two_engines(scene: Scene, fault: EngineFault) -> Iterator[None]:
    """Attach the run to two engine servers, of which one meets the fault."""
    ports = [free_port(), free_port()]
    urls = [f"http://127.0.0.1:{port}" for port in ports]

    def start(number: int, fault: EngineFault | None) -> BaseProcess:
        work = partial(engine_server.serve, scene.policy, scene.folder, fault, ports[number])
        return scene.serve(work, f"{urls[number]}/model_info", f"engine-{number}.log")

    processes = [start(number, fault) for number in range(2)]
    scene.words += [
        f"{ROLLOUT}.name=sglang",
        f"{ROLLOUT}.server_urls=[{','.join(urls)}]",
        f"{ROLLOUT}.update_weights_transport=disk",
        f"{ROLLOUT}.health_check_interval=0.5",
    ]
    scene.inject = quick_checks
    came_back = False

    def watch(scene: Scene) -> None:
        nonlocal came_back
        at = marked(scene.folder)
        if at is None or came_back:
            return
        since = time.monotonic() - at
        if fault == "killed" and since > DOWN:
            came_back = True
            start(next(number for number in range(2) if not processes[number].is_alive()), None)
        elif fault == "hung" and since > HUNG:
            came_back = True
            for process in processes:
                assert process.pid is not None
                os.kill(process.pid, signal.SIGCONT)  # one that runs ignores it

    scene.watch = watch
    yield


def quick_checks(folder: Path) -> None:
    """Have servers given up within seconds, not half a minute: what is waited for is the same."""
    quick = partial(Timings, check_timeout=1.0, recheck_interval=0.2, backoff=0.2, update_timeout=20.0)
    patch.object(agentrl.engines.servers.start, "Timings", quick).start()


# Tools and their servers


def tools(scene: Scene, class_name: str, config: dict[str, Any], schema: dict[str, Any] | None = None) -> None:
    entry = {"class_name": class_name, "config": config} | ({} if schema is None else {"tool_schema": schema})
    path = scene.write("tools.yaml", json.dumps({"tools": [entry]}))
    scene.words.append(f"{ROLLOUT}.multi_turn.tool_config_path={path}")


@contextmanager
def http_tool(scene: Scene, fault: ToolFault) -> Iterator[None]:
    port = free_port()
    url = f"http://127.0.0.1:{port}"
    scene.serve(partial(tool_server.serve, scene.folder, fault, port), f"{url}/v1/models", "tool.log")
    if scene.loop == "openai_proxy":
        scene.agent_tool = f"{url}/search"
    else:
        parameters = {"type": "object", "properties": {"query": {"type": "string"}}, "required": ["query"]}
        function = {"name": "search", "description": "Search the documents.", "parameters": parameters}
        tools(
            scene,
            "tools.http_endpoint.HttpTool",
            {"method": "GET", "url": f"{url}/search", "response_path": "text", "timeout": 10, "attempt_timeout": 1},
            {"type": "function", "function": function},
        )
    yield


@contextmanager
def killed_program(scene: Scene, words: list[str], url: str, class_name: str, config: dict[str, Any]) -> Iterator[None]:
    """Kill a real server when the first step is logged, and start it again."""
    tools(scene, class_name, {"url": url, "timeout": 20, "attempt_timeout": 3, **config})
    with ExitStack() as stack:
        server = stack.enter_context(scene.program(words, f"{url}/health", "server.log"))
        came_back = False

        def watch(scene: Scene) -> None:
            nonlocal came_back
            if steps_logged(scene.run) >= 1 and mark(scene.folder):
                server.kill()
            at = marked(scene.folder)
            if at is not None and not came_back and time.monotonic() > at + DOWN:
                came_back = True
                stack.enter_context(scene.program(words, f"{url}/health", "server.log"))

        scene.watch = watch
        yield


@contextmanager
def retriever_killed(scene: Scene) -> Iterator[None]:
    port, index = free_port(), scene.folder / "index"
    command = [sys.executable, "-m", "tools.retriever", "index", str(scene.assets / "corpus.jsonl"), str(index)]
    subprocess.run(command, check=True, capture_output=True)
    words = ["-m", "tools.retriever", "serve", str(index), "--port", str(port)]
    with killed_program(scene, words, f"http://127.0.0.1:{port}", "tools.remote_search.RemoteSearchTool", {}):
        yield


@contextmanager
def sandbox_killed(scene: Scene) -> Iterator[None]:
    port = free_port()
    words = ["-m", "sandbox.server", "--port", str(port)]
    name, config = "tools.code_interpreter.CodeInterpreterTool", {"run_timeout": 2}
    with killed_program(scene, words, f"http://127.0.0.1:{port}", name, config):
        yield


@contextmanager
def mcp_killed(scene: Scene) -> Iterator[None]:
    command = [sys.executable, "-m", "labs.fault_matrix.mcp_server", str(scene.folder)]
    tools(scene, "tools.mcp.MCPTools", {"command": command, "timeout": 20})
    yield


def sidecar_killed(turns: int, folder: Path) -> None:
    """Have the sidecar killed in the second step, when trajectories have had their first turn or wait for it."""
    healthy, steps = Play.step, 0

    async def step(play: Play, text: str, calls: Sequence[Fields]) -> Fields:
        nonlocal steps
        steps += 1
        if steps > turns * PROMPTS * N + 2 and mark(folder):
            assert play.address.process is not None
            play.address.process.kill()
        return await healthy(play, text, calls)

    patch.object(Play, "step", step).start()


# Scorers

BAD_SCORER = """
calls = 0

def compute_score(data_source, solution_str, ground_truth, extra_info=None):
    global calls
    calls += 1
    if FIRST <= calls < FIRST + 3:
        from pathlib import Path
        from labs.fault_matrix.mark import mark
        mark(Path(FOLDER))
        FAULT
    return HEALTHY(data_source, solution_str, ground_truth)
"""


@contextmanager
def scorer(scene: Scene, fault: str, *words: str) -> Iterator[None]:
    """Have three calls of the scorer, in the second step, do what the statement `fault` says."""
    healthy = SCORER.replace("compute_score", "healthy")
    bad = BAD_SCORER.replace("FIRST", str(PROMPTS * N + 2)).replace("FOLDER", repr(str(scene.folder)))
    scene.scorer = healthy + bad.replace("FAULT", fault).replace("HEALTHY", "healthy")
    scene.words += words
    yield


def mend_scorer(scene: Scene) -> None:
    scene.scorer = SCORER


@contextmanager
def judge_rubbish(scene: Scene) -> Iterator[None]:
    port = free_port()
    url = f"http://127.0.0.1:{port}"
    scene.serve(partial(tool_server.serve, scene.folder, "rubbish", port), f"{url}/v1/models", "judge.log")
    keys = {"base_url": f"{url}/v1", "model": "judge", "data_sources": "[faults]", "timeout": "5"}
    scene.words += [f"reward_model.judge.{name}={value}" for name, value in keys.items()]
    yield


# The driver


@contextmanager
def injected(scene: Scene, inject: Callable[[Path], None], *words: str) -> Iterator[None]:
    scene.inject = inject
    scene.words += words
    yield


@contextmanager
def nothing(scene: Scene) -> Iterator[None]:
    yield


def die(folder: Path, number: int = signal.SIGKILL) -> None:
    if mark(folder):
        os.kill(os.getpid(), number)


def killed_in(stage: str, when: Literal["begins", "ends"], step: int, folder: Path) -> None:
    """Have the process killed where a stage of a step begins, or has ended."""
    met_in(stage, when, step, partial(die, folder))


def met_in(stage: str, when: Literal["begins", "ends"], step: int, meet: Callable[[], None]) -> None:
    """Have something happen where a stage of a step begins, or has ended."""
    healthy = Trainer.timed

    @contextmanager
    def timed(trainer: Trainer, name: str, *, shown: bool = True) -> Iterator[None]:
        hit = name == stage and trainer.step == step
        if hit and when == "begins":
            meet()
        with healthy(trainer, name, shown=shown):
            yield
        if hit and when == "ends":
            meet()

    patch.object(Trainer, "timed", timed).start()


def killed_while_sampling(folder: Path, number: int = signal.SIGKILL) -> None:
    """Have the process killed when the third trajectory of the second step is to be scored."""
    healthy, scored = Scheduler._score, 0

    async def score(scheduler: Scheduler, *args: Any) -> None:
        nonlocal scored
        scored += 1
        if scored == PROMPTS * N + 3:
            die(folder, number)
        await healthy(scheduler, *args)

    patch.object(Scheduler, "_score", score).start()


def clock_jumps(folder: Path) -> None:
    """Have the wall clock an hour ahead from the second step on, and a day behind from the third."""
    healthy, step, now = Trainer.train_step, [0], time.time

    def train_step(trainer: Trainer) -> Step:
        step[0] = trainer.step
        if trainer.step == STEP:
            mark(folder)
        return healthy(trainer)

    patch.object(Trainer, "train_step", train_step).start()
    time.time = lambda: now() + (0 if step[0] < STEP else 3600 if step[0] == STEP else -86400)


def nan_gradient(folder: Path) -> None:
    """Have one loss of the policy be no number."""
    healthy, calls = agentrl.workers.policy.aggregate, 0  # type: ignore[attr-defined]

    def aggregate(*args: Any, **kwargs: Any) -> Any:
        nonlocal calls
        calls += 1
        loss = healthy(*args, **kwargs)
        return loss * float("nan") if calls == STEP and mark(folder) else loss

    patch.object(agentrl.workers.policy, "aggregate", aggregate).start()


def nan_log_prob(folder: Path) -> None:
    """Have one answer of the embedded engine hold a log-prob that is no number."""
    healthy = EmbeddedEngine.generate
    answers = 0

    async def generate(engine: EmbeddedEngine, *args: Any, **kwargs: Any) -> Any:
        nonlocal answers
        found = await healthy(engine, *args, **kwargs)
        answers += 1
        if answers > PROMPTS * N + 2 and mark(folder):
            return replace(found, logprobs=[float("nan"), *found.logprobs[1:]])
        return found

    patch.object(EmbeddedEngine, "generate", generate).start()


def failed_update(folder: Path) -> None:
    """Have the embedded engine refuse the second step's weights."""
    healthy = EmbeddedEngine.update_weights

    async def update(engine: EmbeddedEngine, weights: Any, version: int) -> Any:
        if version == STEP and mark(folder):
            raise EngineError("injected: the weights are not taken")
        return await healthy(engine, weights, version)

    patch.object(EmbeddedEngine, "update_weights", update).start()


def tear_checkpoint(scene: Scene) -> None:
    """Cut the largest file of the newest checkpoint in half."""
    newest = max(path for path in (scene.run / "checkpoints").glob("step_*") if path.is_dir())
    largest = max((path for path in newest.rglob("*") if path.is_file()), key=lambda path: path.stat().st_size)
    os.truncate(largest, largest.stat().st_size // 2)


@contextmanager
def disk_full(scene: Scene) -> Iterator[None]:
    """Fill the run's disk, of its own, when the first step is logged."""
    scene.run.mkdir()
    subprocess.run(["mount", "-t", "tmpfs", "-o", "size=64m", "tmpfs", str(scene.run)], check=True)

    def watch(scene: Scene) -> None:
        if steps_logged(scene.run) >= 1 and mark(scene.folder):
            fill(scene.run / "filler")

    scene.watch = watch
    try:
        yield
    finally:
        subprocess.run(["umount", "-l", str(scene.run)], check=True)


def fill(path: Path) -> None:
    size = 1 << 20
    with path.open("wb", buffering=0) as file:
        while size:
            try:
                file.write(b"\0" * size)
            except OSError as error:
                if error.errno != errno.ENOSPC:
                    raise
                size //= 2


def empty_disk(scene: Scene) -> None:
    (scene.run / "filler").unlink()


# Ray


def in_workers(scene: Scene, inject: Callable[[Path], None]) -> None:
    """Have rollout workers call a function of this module with the cell's folder: each loads the scorer's file."""
    call = f"faults.{inject.__name__}(Path({str(scene.folder)!r}))"
    scene.scorer += f"\nfrom pathlib import Path\nfrom labs.fault_matrix import faults\n{call}\n"


@contextmanager
def worker_fails_update(scene: Scene) -> Iterator[None]:
    """Have one of the two engine servers of a rollout worker fail the second step's weights."""
    with two_engines(scene, "failed update"):
        scene.words.append(f"{ROLLOUT}.nnodes=1")
        in_workers(scene, quick_checks)
        yield


@contextmanager
def worker_refuses_update(scene: Scene) -> Iterator[None]:
    """Have the engine of one of two rollout workers refuse the second step's weights, which the other one takes."""
    scene.words.append(f"{ROLLOUT}.nnodes=2")
    in_workers(scene, failed_update)
    yield


def killed_while_reading(folder: Path) -> None:
    """Have the process killed when it has read a part of the second step's weights."""
    healthy = EmbeddedEngine.update_weights

    def die_after_one(read: Callable[[], Iterator[tuple[str, torch.Tensor]]]) -> Iterator[tuple[str, torch.Tensor]]:
        for one in read():
            yield one
            die(folder)

    async def update(engine: EmbeddedEngine, weights: Weights, version: int) -> Any:
        given = replace(weights, read=partial(die_after_one, weights.read)) if version == STEP else weights
        return await healthy(engine, given, version)

    patch.object(EmbeddedEngine, "update_weights", update).start()


@contextmanager
def worker_killed_while_reading(scene: Scene) -> Iterator[None]:
    """Kill one of two rollout workers while it reads the second step's weights from a rank; the other one waits."""
    scene.words += [f"{ROLLOUT}.nnodes=2", "trainer.max_worker_restarts=4"]
    in_workers(scene, killed_while_reading)
    yield


@contextmanager
def ray_process_killed(scene: Scene, kind: str) -> Iterator[None]:
    """Kill a rank, or the rollout worker, when the first step is logged."""
    import psutil

    scene.words += ["trainer.n_gpus_per_node=2", "trainer.max_worker_restarts=4"]
    if kind == "ray::RolloutWorker" and scene.bound:
        scene.words += [f"{ROLLOUT}.nnodes=1"]

    def watch(scene: Scene) -> None:
        if steps_logged(scene.run) < 1 or marked(scene.folder) is not None:
            return
        assert scene.training is not None and scene.training.pid is not None
        for child in psutil.Process(scene.training.pid).children(recursive=True):
            try:
                if kind in " ".join(child.cmdline()) and mark(scene.folder):
                    child.kill()
                    return
            except psutil.NoSuchProcess:
                continue

    scene.watch = watch
    yield


def process_signalled(kind: str, stage: str, number: int, folder: Path) -> None:
    """Have a process of Ray's signalled where a stage of the second step begins; a moment later where it is long."""
    import psutil

    import agentrl.rollouts.ray_groups
    import agentrl.rollouts.ray_workers

    for module in (agentrl.rollouts.ray_workers, agentrl.rollouts.ray_groups):  # of one that is stopped
        patch.multiple(module, SILENT_TOLD=1.0, SILENT_FOR=5.0).start()

    def meet() -> None:
        for child in psutil.Process().children(recursive=True):
            with suppress(psutil.NoSuchProcess):
                if kind in " ".join(child.cmdline()) and mark(folder):
                    child.send_signal(number)
                    return

    def meet_later() -> None:
        threading.Timer(0.1, meet).start()

    met_in(stage, "begins", STEP, meet_later if stage == "rollout" else meet)


def _process(name: str, kind: str, stage: str, number: int = signal.SIGKILL) -> Fault:
    inject = partial(process_signalled, f"ray::{kind}", stage, number)

    @contextmanager
    def begin(scene: Scene) -> Iterator[None]:
        scene.inject = inject
        scene.words += ["trainer.n_gpus_per_node=2", "trainer.max_worker_restarts=4"]
        if kind == "RolloutWorker":
            scene.words += [f"{ROLLOUT}.nnodes=2"]
        yield

    return Fault(name, begin, slow=True)


def _stage(name: str, stage: str, when: Literal["begins", "ends"], *words: str) -> Fault:
    inject = partial(killed_in, stage, when, STEP)
    return Fault(f"driver killed: {name}", lambda scene: injected(scene, inject, *words), ends="")


COUNTED = f"{ROLLOUT}.agent.on_code_error=count"
BACKGROUND = "actor_rollout_ref.actor.checkpoint.async_save=true"
ENGINE: tuple[EngineFault, ...] = ("killed", "hung", "slow", "wrong version", "garbage", "failed update")
TOOL: dict[ToolFault, Callable[[Loop], str | None]] = {
    "500": calls_a_tool,
    "hang": calls_a_tool,
    "garbage": calls_our_tools,
    "flood": calls_our_tools,
}

FAULTS: tuple[Fault, ...] = (
    Fault("none", nothing),
    *(Fault(f"engine server: {one}", partial(two_engines, fault=one)) for one in ENGINE),
    Fault("engine: NaN log-prob", lambda scene: injected(scene, nan_log_prob)),
    Fault("engine: refused update", lambda scene: injected(scene, failed_update), ends="injected"),
    *(Fault(f"tool: {one}", partial(http_tool, fault=one), does_not_apply=why) for one, why in TOOL.items()),
    Fault("retriever killed", retriever_killed, does_not_apply=calls_our_tools),
    Fault("sandbox killed", sandbox_killed, tool="code_interpreter", does_not_apply=calls_our_tools),
    Fault("MCP server killed", mcp_killed, does_not_apply=calls_our_tools),
    Fault(
        "sidecar killed",
        lambda scene: injected(scene, partial(sidecar_killed, TURNS.get(scene.loop, 2))),
        does_not_apply=has_a_sidecar,
    ),
    Fault(
        "scorer raises",
        partial(scorer, fault='raise KeyError("injected")'),
        ends="injected",
        between=mend_scorer,
        does_not_apply=has_a_scorer,
    ),
    Fault(
        "scorer raises and is counted",
        lambda scene: scorer(scene, 'raise KeyError("injected")', COUNTED),
        all_survive=False,
        does_not_apply=has_a_scorer,
    ),
    Fault(
        "scorer: no server",
        partial(scorer, fault='raise ConnectionError("injected")'),
        all_survive=False,
        does_not_apply=has_a_scorer,
    ),
    Fault(
        "scorer hangs",
        lambda scene: scorer(scene, "import time; time.sleep(4)", "reward_model.timeout=0.5"),
        all_survive=False,
        does_not_apply=has_a_scorer,
    ),
    Fault(
        "scorer: NaN",
        lambda scene: scorer(scene, 'return float("nan")', COUNTED),
        all_survive=False,
        does_not_apply=has_a_scorer,
    ),
    Fault("judge: rubbish", judge_rubbish, all_survive=False, judged=True, does_not_apply=has_a_scorer),
    Fault("driver killed: sampling", lambda scene: injected(scene, killed_while_sampling), ends=""),
    _stage("log-probs", "old_log_prob", "begins"),
    _stage("advantages", "advantages", "ends"),
    _stage("record", "record", "ends"),
    _stage("update", "update_actor", "ends"),
    _stage("weights to the engine", "sync_weights", "ends"),
    _stage("checkpoint begun", "save", "begins"),
    _stage("checkpoint being written", "save", "ends", BACKGROUND),
    Fault(
        "driver: SIGTERM",
        lambda scene: injected(scene, partial(killed_while_sampling, number=signal.SIGTERM)),
        ends="",
    ),
    Fault(
        "checkpoint torn",
        lambda scene: injected(scene, partial(killed_in, "rollout", "begins", STEP + 1)),
        ends="",
        between=tear_checkpoint,
    ),
    Fault("disk full", disk_full, ends="full", between=empty_disk, needs_root=True),
    Fault("clock jumps", lambda scene: injected(scene, clock_jumps)),
    Fault("NaN gradient", lambda scene: injected(scene, nan_gradient)),
    Fault("rank killed", lambda scene: ray_process_killed(scene, "ray::Rank"), slow=True),
    Fault("rollout worker killed", lambda scene: ray_process_killed(scene, "ray::RolloutWorker"), slow=True),
    _process("rank killed: log-probs", "Rank", "old_log_prob"),
    _process("rank killed: update", "Rank", "update_actor"),
    _process("rank killed: weights to the engine", "Rank", "sync_weights"),
    _process("rank killed: checkpoint", "Rank", "save"),
    _process("rollout worker killed: sampling", "RolloutWorker", "rollout"),
    _process("rollout worker hung", "RolloutWorker", "rollout", signal.SIGSTOP),
    Fault(
        "rollout worker killed: reading weights", worker_killed_while_reading, slow=True, does_not_apply=has_a_scorer
    ),
    Fault("rollout worker: failed update", worker_fails_update, slow=True, does_not_apply=has_a_scorer),
    Fault(
        "rollout worker: refused update",
        worker_refuses_update,
        ends="injected",
        between=mend_scorer,
        slow=True,
        does_not_apply=has_a_scorer,
    ),
)


def check_end(fault: Fault, status: int, said: str) -> None:
    """Raise CellFailed where the first process ended in another way than it has to."""
    if fault.ends is None and status != 0:
        raise CellFailed(f"the run ended with status {status}: {said[-600:]}")
    if fault.ends is not None and (status == 0 or fault.ends not in said):
        raise CellFailed(f"the run ended with status {status} and does not say {fault.ends!r}: {said[-600:]}")
