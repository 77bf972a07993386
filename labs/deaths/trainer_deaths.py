"""Trainings that are killed again and again, at any moment, with each bound of staleness: is every prompt trained once?

    python -m labs.deaths.trainer_deaths --out runs/deaths [--kills 36] [--bounds 0 1 2 3 4]
    .venv-sglang/bin/python -m labs.deaths.trainer_deaths --out runs/deaths --engine attached

For each bound a training on the quickstart's tasks is begun, and gets SIGKILL at a random moment; the same command goes
on with it, and is killed again. After the last kill it is left alone for three steps more, or four: up to a checkpoint.
Counted are prompts that are neither in the ledger of what was trained on nor open at the end, or there twice, prompts
that are not the data's at their place, and sampled tokens in the files of trajectories that are older than the bound.
Turns that the engine had ended, and was asked for again after a kill, are counted beside that, from the first
checkpoint on: with a bound above 0 there are none but those that ended as the kill came, before they were written down.

The engine is the embedded one, or real SGLang servers on the CPU: `attached`, two that the script starts once and that
go on while trainings come and go, or `own`, one that each training starts and that ends with it. With `ray` it is the
embedded one in two rollout workers with devices of their own, beside a rank: the driver alone is killed, the next
training begins at once, and the processes of the one before have to end by themselves. With an embedded engine and a
bound of 0, where rollouts and updates take turns, the final weights are compared with those of a training of as many
steps that nobody killed. Begun again, the script goes on with the kills that are left. Exits with 1 where anything was
lost, repeated or too old.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import random
import re
import signal
import sys
import threading
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory

import psutil
from safetensors.torch import load_file

import agentrl
from agentrl.config.overrides import as_config
from agentrl.data.loader import make_loader
from agentrl.engines.servers.start import start_all
from agentrl.engines.sglang.options import SGLangArguments
from agentrl.engines.sglang.process import SGLangProcess
from agentrl.observe.plain import PlainDisplay
from agentrl.observe.tracking import read_metrics
from agentrl.quickstart.assets import with_quickstart_data, with_quickstart_policy
from agentrl.system.json_value import JSON
from agentrl.trainer.inputs import open_inputs
from agentrl.trajectory import Message
from agentrl.trajectory.parquet import read_trajectories, trajectory_files
from benchmarks.forked import forked, started
from labs.deaths.ended_turns import LEFT_ALONE, EndedTurn, NotingTurns, read_turns

PROMPTS = 4
"""Prompts of a step."""
TURNS = 120
"""Most turns of the policy that end before a training is killed, drawn evenly; a step has about 30. Only those that are
killed while they start may end before the first checkpoint."""
FURTHER = 1.5
"""Most seconds for which it then goes on, drawn evenly."""
STARTING = {"embedded": (0.2, 8.0), "attached": (0.2, 8.0), "own": (0.2, 8.0), "ray": (0.2, 25.0)}
"""Seconds after which every fifth is killed, drawn evenly: most of them while they start."""
SAVE_FREQ = 2
OUTLIVED = 60.0
"""Seconds that the processes of a killed training have to end by themselves: a worker of Ray's that is just starting
looks for Ray's server for 26."""
MANAGER = "torch_shm_manager"
"""Keeps the names of a bucket of weights on a CPU, until the servers that mapped it end: attached ones go on."""
AGENT = re.compile(r"^ray::\w+Agent|^\S+ (-u )?\S+/agent(/main)?\.py ")
"""Command lines of Ray's agents, the second while they start."""
AGENTS_OUTLIVED = 180.0
"""The same for Ray's agents, which do nothing of the training's; they want to tell Ray's server, which is gone, why."""
ENDLESS = 100_000
LENGTH = 512
"""Tokens of the longest context, prompt and response."""
URLS = tuple(f"http://127.0.0.1:{port}" for port in (30611, 30612))
"""Addresses of attached servers, the same in every call, as a journal is of one config."""


@dataclass(frozen=True, slots=True)
class Case:
    """The trainings with a bound."""

    folder: Path
    assets: Path
    bound: int
    engine: str
    """`embedded`, `attached`, `own` or `ray`."""

    @property
    def log(self) -> Path:
        return self.folder.with_suffix(".log")

    def keys(self) -> dict[str, JSON]:
        """Return the keys of a training."""
        ahead = {"async_training.max_staleness": self.bound, "async_training.depth": self.bound}
        servers: dict[str, dict[str, JSON]] = {
            "embedded": {},
            "attached": {"actor_rollout_ref.rollout.server_urls": list(URLS)},
            "own": {},
            "ray": {"actor_rollout_ref.rollout.nnodes": 2},
        }
        name = "sglang" if self.engine in ("attached", "own") else "embedded"
        return {
            **(ahead if self.bound else {}),
            **servers[self.engine],
            "actor_rollout_ref.rollout.name": name,
            "data.train_batch_size": PROMPTS,
            "data.val_files": None,
            "algorithm.filter_groups.enable": False,  # every step makes a version
            "actor_rollout_ref.rollout.n": 4,
            "actor_rollout_ref.actor.ppo_mini_batch_size": 2,
            "actor_rollout_ref.actor.optim.lr": 1e-4,
            "actor_rollout_ref.actor.optim.lr_scheduler_type": "constant",
            "quickstart.dir": str(self.assets.absolute()),
            "trainer.device": "cpu",
            "trainer.logger": ["jsonl"],
            "trainer.save_freq": SAVE_FREQ,
            "trainer.total_training_steps": ENDLESS,  # always the same: a journal is of one config
            "trainer.default_local_dir": str(self.folder),
        }

    def steps(self) -> int:
        """Count the steps whose metrics are written."""
        file = self.folder / "metrics.jsonl"
        return max((int(str(line["step"])) for line in read_metrics(file)), default=0) if file.exists() else 0

    @property
    def ended(self) -> Path:
        """File of the turns that ended."""
        return self.folder.with_suffix(".turns")

    @property
    def killed(self) -> list[float]:
        """Times of the kills so far."""
        file = self.folder.with_suffix(".kills")
        return [float(line) for line in file.read_text().split()] if file.exists() else []

    def was_killed(self, at: float) -> None:
        """Take down a kill."""
        with self.folder.with_suffix(".kills").open("a") as file:
            file.write(f"{at}\n")

    def checkpoint(self, step: int) -> Path:
        """Name the folder of a checkpoint."""
        return self.folder / "checkpoints" / f"step_{step:06}"

    @property
    def has_checkpoint(self) -> bool:
        """True where a training can be gone on with."""
        return any((self.folder / "checkpoints").glob("step_*"))

    def turns(self) -> int:
        """Count the turns that ended so far, in all processes."""
        return self.ended.read_bytes().count(b"\n") if self.ended.exists() else 0


@dataclass(slots=True)
class Found:
    """Result for a bound."""

    steps: int
    lost: int
    repeated: int
    others: int
    """Prompts that are not the data's at their place."""
    too_old: int
    """Sampled tokens."""
    again: int
    """Turns that were sampled again after they had ended."""
    turns: int
    """Turns that were sampled, each once."""
    same_weights: bool | None = None
    """Only with a bound of 0 and the embedded engine."""

    @property
    def is_right(self) -> bool:
        """True where nothing is wrong."""
        return not (self.lost or self.repeated or self.others or self.too_old or self.same_weights is False)


def train(case: Case, steps: int, kill: int = LEFT_ALONE) -> None:
    """Train until that many steps are done and a checkpoint is made, from where a process before ended.

    `kill`: number of the kill that is to end it.
    """
    noting = NotingTurns(case.ended, kill)
    with agentrl.training(case.keys(), loops={"noting_turns": noting}) as run:
        for _ in run:
            if run.step >= steps and run.step % SAVE_FREQ == 0:
                break


class Remains:
    """Processes that trainings left behind when they were killed."""

    def __init__(self) -> None:
        self.outlived: list[str] = []
        """Names of processes that did not end by themselves."""
        self._watching: list[threading.Thread] = []
        self._managers: list[psutil.Process] = []

    def watch(self, family: Sequence[psutil.Process], killed: float, what: str) -> None:
        """Wait beside all else for processes of a training that was killed at that time."""
        self._watching.append(threading.Thread(target=self._wait, args=(family, killed, what)))
        self._watching[-1].start()

    def join(self) -> None:
        """Wait until it is known of all; servers that keep something of a training have ended before."""
        for thread in self._watching:
            thread.join()
        since = time.monotonic()
        while any(map(_words, self._managers)) and time.monotonic() - since < OUTLIVED:
            time.sleep(0.1)
        self.outlived += [f"{one.pid} {MANAGER}" for one in self._managers if _words(one)]

    def _wait(self, family: Sequence[psutil.Process], killed: float, what: str) -> None:
        names = {one: " ".join(_words(one)).strip() for one in family}
        managers = [one for one in family if names[one].partition(" ")[0] == MANAGER]
        self._managers += managers
        family = [one for one in family if one not in managers]
        agents = {one for one, name in names.items() if AGENT.search(name)}
        seconds, last, left = [0.0, 0.0], "", list(family)
        while left and (passed := time.time() - killed) < (OUTLIVED if set(left) - agents else AGENTS_OUTLIVED):
            if works := [one for one in left if one not in agents]:
                last, seconds[0] = names[works[-1]], passed
            seconds[1] = passed
            time.sleep(0.1)
            left = [one for one in left if _words(one)]
        self.outlived += [f"{one.pid} {names[one]}" for one in left]
        told = f"the last of {len(family) - len(agents)} processes was gone after {seconds[0]:.1f} s ({last[:150]})"
        told += f", of {len(agents)} agents of Ray after {seconds[1]:.1f} s" if agents else ""
        print(f"{what}: {f'{len(left)} processes are left' if left else told}", flush=True)


def _words(process: psutil.Process) -> list[str]:
    """Return the command line of a process; empty where it has ended."""
    try:
        return process.cmdline() if process.is_running() else []
    except psutil.Error:  # of a zombie, too
        return []


def kill_until(case: Case, kills: int, seed: int, remains: Remains) -> None:
    """Begin and kill the training until it was killed `kills` times; those of an earlier call count."""
    while (done := len(case.killed)) < kills:
        drawn = random.Random(f"{seed}/{case.bound}/{done}")
        process = started(partial(train, case, ENDLESS, done), case.log)
        try:
            if done % 5:
                turns = case.turns() + drawn.randint(0, TURNS)
                while process.exitcode is None and (case.turns() < turns or not case.has_checkpoint):
                    process.join(0.05)
                process.join(drawn.uniform(0, FURTHER))
            else:
                process.join(drawn.uniform(*STARTING[case.engine]))
            if process.exitcode is not None:
                raise SystemExit(f"the training with bound {case.bound} ended by itself, see {case.log}")
            family = psutil.Process(process.pid).children(recursive=True)
        finally:
            at = time.time()
            process.kill()  # also where this script is ended: two trainings in one folder would be in each other's way
        process.join()
        if family:
            remains.watch(family, at, f"bound {case.bound}: kill {done + 1}")
        if not case.has_checkpoint:
            case.ended.unlink(missing_ok=True)  # there is nothing to go on from: all begins anew
        case.was_killed(at)
        print(f"bound {case.bound}: kill {done + 1} in step {case.steps() + 1}, after {case.turns()} turns", flush=True)


def judge(case: Case) -> Found:
    """Leave the training alone until three steps more are done, and look at what it recorded."""
    if forked(partial(train, case, case.steps() + 3), case.log) != 0:
        raise SystemExit(f"the training with bound {case.bound} failed, see {case.log}")
    done = case.steps()
    trained, others, old = in_files(case)
    begun, still_open = PROMPTS * done, set[int]()
    if case.bound:
        flow = json.loads((case.checkpoint(done) / "state.json").read_text())["state"]["flow"]
        begun, still_open = flow["next_ordinal"], {group[0] for group in flow["groups"]}
        batches = [json.loads(line) for line in (case.folder / "ledger.jsonl").read_text().splitlines()]
        trained = Counter(one for batch in batches for first, end in batch["trained"] for one in range(first, end))
    again, turns, before = sampled_again(read_turns(case.ended), case.killed)
    found = Found(
        steps=done,
        lost=sum(one not in trained and one not in still_open for one in range(begun)),
        repeated=trained.total() - len(trained),
        others=others,
        too_old=old,
        again=again,
        turns=turns,
    )
    if again:
        print(f"bound {case.bound}: turns that were sampled again had ended up to {before:.3f} s before a kill")
    if case.bound == 0 and case.engine in ("embedded", "ray"):
        alone = replace(case, folder=case.folder.with_name(case.folder.name + "-alone"))
        if forked(partial(train, alone, done), alone.log) != 0:
            raise SystemExit(f"the training that nobody killed failed, see {alone.log}")
        found.same_weights = same_policy(case.checkpoint(done), alone.checkpoint(done))
    return found


def same_policy(one: Path, other: Path) -> bool:
    """Compare two checkpoints: True where all bits of weights and optimizer are the same; neither is sharded."""
    found = []
    for checkpoint in (one, other):
        (file,) = (checkpoint / "policy").glob("*.safetensors")
        found.append({name: tensor.numpy().tobytes() for name, tensor in load_file(file).items()})
    return found[0] == found[1]


def sampled_again(ended: Sequence[EndedTurn], kills: Sequence[float]) -> tuple[int, int, float]:
    """Count the turns that were sampled again after they had ended, and all turns, each once.

    What ended after its training's driver was killed, in a worker that lived on for a moment, does not count: nobody
    was told of it. Returns the most seconds before a kill at which one of the former had ended, too.
    """
    again, before, last = 0, 0.0, dict[tuple[str, str], EndedTurn]()
    killed = dict(enumerate(kills))
    for one in ended:
        if one.at > killed.get(one.kill, one.at):
            continue
        if (first := last.get((one.uid, one.key))) is not None:
            again += 1
            before = max(before, killed.get(first.kill, first.at) - first.at)
        last[one.uid, one.key] = one
    return again, len(last), before


def in_files(case: Case) -> tuple[Counter[int], int, int]:
    """Look at the trajectories that were trained on.

    Returns the prompts by their places in the data, how many of them have another question than the data there, and
    the sampled tokens that are older than the bound; the policy of step s is s - 1 old.
    """
    config = as_config(case.keys())
    loader = make_loader(open_inputs(with_quickstart_data(config, PlainDisplay("data"))).train, config.data)
    asked: list[str] = []
    trained, others, old = Counter[int](), 0, 0
    for file in trajectory_files(case.folder / "trajectories"):  # of each rollout worker its own
        step = int(file.name.split("_")[1].split(".")[0])
        found: dict[int, str] = {}
        for trajectory in read_trajectories(file):
            _, of_step, number, _ = trajectory.uid.split("/")
            found[(int(of_step) - 1) * PROMPTS + int(number)] = question(trajectory.messages)
            for transcript in trajectory.transcripts:
                spans = transcript.versions
                old += sum(span.end - span.start for span in spans if step - 1 - span.version > case.bound)
        trained.update(list(found))
        while len(asked) <= max(found):
            asked.extend(question(sample.prompt) for sample in next(loader))
        others += sum(asked[ordinal] != text for ordinal, text in found.items())
    return trained, others, old


def question(messages: Sequence[Message]) -> str:
    """Return what the user asks."""
    return next(str(message["content"]) for message in messages if message["role"] == "user")


@contextmanager
def attached(given: argparse.Namespace, place: str | Path) -> Iterator[list[SGLangProcess]]:
    """Servers that trainings are attached to, if they are to be; they serve the warmed-up policy at first.

    place: folder of their logs, made if it is not there.
    """
    (out := Path(place).absolute()).mkdir(parents=True, exist_ok=True)
    if given.engine != "attached":
        yield []
        return
    display = PlainDisplay("servers")
    config = as_config(Case(out, given.assets, 0, given.engine).keys())
    model = with_quickstart_policy(with_quickstart_data(config, display), display).actor_rollout_ref.model.path
    arguments = SGLangArguments(model, device="cpu", context_length=LENGTH)
    ports = [int(url.rpartition(":")[2]) for url in URLS]
    servers = [SGLangProcess(arguments, port, out / f"server-{port}.log") for port in ports]
    try:
        asyncio.run(start_all(servers, 600.0, print))
        yield servers
    finally:
        for server in servers:
            server.stop()


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, help="folder in which the runs stay")
    parser.add_argument("--assets", type=Path, default=Path("runs/quickstart-assets"))
    parser.add_argument("--engine", choices=("embedded", "attached", "own", "ray"), default="embedded")
    parser.add_argument("--kills", type=int, default=36, help="of each bound")
    parser.add_argument("--bounds", type=int, nargs="+", default=[0, 1, 2, 3, 4])
    parser.add_argument("--seed", type=int, default=1)
    given = parser.parse_args()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))
    columns = ["bound", "kills", "steps", "lost", "repeated", "others", "too old", "turns again", "turns", "weights"]
    rows = ["| " + " | ".join(columns) + " |", "|---" * len(columns) + "|"]
    right = True
    remains = Remains()
    with nullcontext(given.out) if given.out else TemporaryDirectory() as place, attached(given, place) as servers:
        for bound in given.bounds:
            began = time.monotonic()
            case = Case(Path(place, f"{given.engine}-{bound}").absolute(), given.assets, bound, given.engine)
            kill_until(case, given.kills, given.seed, remains)
            found = judge(case)
            right &= found.is_right and all(server.exited is None for server in servers)
            weights = {True: "the same", False: "**others**", None: ""}[found.same_weights]
            counts = [found.lost, found.repeated, found.others, found.too_old, found.again, found.turns, weights]
            rows.append("| " + " | ".join(map(str, [bound, given.kills, found.steps, *counts])) + " |")
            print(f"bound {bound}: {time.monotonic() - began:.0f} s\n{rows[-1]}", flush=True)
        if any(server.exited is not None for server in servers):
            print("a server ended, which was to go on")
    remains.join()
    for left in remains.outlived:
        print(f"a killed training left a process behind: {left}")
    right &= not remains.outlived
    print("\n".join(rows))
    return 0 if right else 1


if __name__ == "__main__":
    sys.exit(main())
