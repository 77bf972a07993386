"""Cells of the matrix, each played in a process of its own, and what came of them."""

from __future__ import annotations

import json
import multiprocessing
import os
import shutil
import signal
import subprocess
import time
from collections.abc import Collection, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from functools import cache
from pathlib import Path
from typing import Literal

from labs.fault_matrix.assets import LOOPS, Loop, make_policy, make_rows
from labs.fault_matrix.faults import FAULTS, Fault, check_end
from labs.fault_matrix.mark import marked
from labs.fault_matrix.scene import PROJECT, TORN_SERVED, CellFailed, Scene
from labs.fault_matrix.verdict import judge

LIMIT, SLOW_LIMIT = 900.0, 1800.0
"""Seconds after which a cell is ended, and has failed: long ones, for a busy machine is no fault of the run."""
RESULT = "result.json"
BOUNDS = {"synchronous": 0, "asynchronous": 1}
State = Literal["passed", "failed", "does not apply", "not run"]

_context = multiprocessing.get_context("forkserver")
_context.set_forkserver_preload(
    [
        "labs.fault_matrix.cells",
        "agentrl.trainer.step",
        "agentrl.workers.roles",
        "agentrl.openai_api.agent_loop",
        "agentrl.openai_api.endpoint",
        "agentrl.engines.embedded.build",
        "renderers",
        "openai",
        "pyarrow.dataset",
        "hydra",
    ]
)

_running: set[int] = set()
"""Processes of cells, each of which leads a group."""


@dataclass(frozen=True, slots=True)
class Cell:
    """A fault, met by a loop in a mode."""

    fault: Fault
    loop: Loop
    mode: str

    @property
    def name(self) -> str:
        return f"{self.fault.name}, {self.loop}, {self.mode}"

    def folder(self, out: Path) -> Path:
        return out / self.name.replace(", ", "/").replace(": ", "-").replace(" ", "_")


@dataclass(frozen=True, slots=True)
class Result:
    """Outcome of a cell."""

    state: State
    why: str = ""
    seconds: float = 0.0
    recovery: float = 0.0
    """Seconds of the longest wait for a new step from the fault on."""
    left_out: int = 0
    """Trajectories that are not trained on."""
    commit: str = ""
    """The project's commit, as it was played; with a `+` where files differed from it."""


def cells() -> list[Cell]:
    """List all cells, fault by fault."""
    return [Cell(fault, loop, mode) for fault in FAULTS for loop in LOOPS for mode in BOUNDS]


def outcome(cell: Cell, out: Path) -> Result:
    """Say what came of a cell, or why nothing did."""
    if (why := cell.fault.does_not_apply(cell.loop)) is not None:
        return Result("does not apply", why)
    if cell.fault.needs_root and os.geteuid() != 0:
        return Result("not run", "mounting a disk needs root")
    file = cell.folder(out) / RESULT
    return Result(**json.loads(file.read_text())) if file.exists() else Result("not run")


def run(chosen: Sequence[Cell], out: Path, processes: int) -> None:
    """Play the cells that have not passed yet."""
    waiting = [one for one in chosen if outcome(one, out).state in ("failed", "not run")]
    waiting = [one for one in waiting if not (one.fault.needs_root and os.geteuid() != 0)]
    if not waiting:
        return
    assets = out / "assets"
    assets.mkdir(parents=True, exist_ok=True)
    policies = {(one.loop, one.fault.tool) for one in waiting}
    if _ended(_context.Process(target=_prepare, args=(assets, policies)), LIMIT) != 0:
        raise SystemExit("the policies could not be made")
    threads = ThreadPoolExecutor(processes)
    try:
        list(threads.map(lambda cell: _run(cell, out), waiting))
    finally:  # where this process is interrupted, too, none of a cell is left
        threads.shutdown(wait=False, cancel_futures=True)
        for pid in list(_running):
            _end(pid)


def _prepare(assets: Path, policies: Collection[tuple[Loop, str]]) -> None:
    os.setsid()
    make_rows(assets)
    for loop, tool in sorted(policies):
        make_policy(assets, loop, tool)


def _run(cell: Cell, out: Path) -> None:
    folder = cell.folder(out)
    shutil.rmtree(folder, ignore_errors=True)  # what was interrupted begins anew
    folder.mkdir(parents=True)
    limit = SLOW_LIMIT if cell.fault.slow else LIMIT
    index = cells().index(cell)
    status = _ended(_context.Process(target=_play, args=(index, out)), limit)
    if os.path.ismount(folder / "run"):  # of a cell that was ended
        subprocess.run(["umount", "-l", str(folder / "run")], check=True)
    if not (folder / RESULT).exists():
        text = f"it takes more than {limit:g} s" if status is None else f"its process ended with status {status}"
        _write(folder, Result("failed", text, limit if status is None else 0.0))
    found = outcome(cell, out)
    told = f"{found.seconds:5.1f} s, recovered in {found.recovery:.1f} s, {found.left_out} left out"
    print(f"{cell.name}: {found.state}, {told}{' - ' * bool(found.why)}{found.why}", flush=True)


def _ended(process: multiprocessing.process.BaseProcess, limit: float) -> int | None:
    """Wait for a process and end its group; None: it took longer than `limit` seconds."""
    process.start()
    assert process.pid is not None
    _running.add(process.pid)
    process.join(limit)
    status = process.exitcode
    _running.discard(process.pid)
    _end(process.pid)
    process.join()
    return status


def _end(group: int) -> None:
    with suppress(ProcessLookupError):
        os.killpg(group, signal.SIGKILL)


def _play(index: int, out: Path) -> None:
    os.setsid()
    cell = cells()[index]
    folder, began = cell.folder(out), time.monotonic()
    scene = Scene(cell.loop, BOUNDS[cell.mode], folder, out / "assets", cell.fault.tool)
    left_out, why = 0, ""
    try:
        with cell.fault.scene(scene):
            left_out, why = _through(cell, scene)
    except CellFailed as failure:
        why = str(failure)
    finally:
        scene.close()
    recovery = scene.recovery() or 0.0
    state: State = "failed" if why else "passed"
    _write(folder, Result(state, why, round(time.monotonic() - began, 1), round(recovery, 2), left_out))


def _through(cell: Cell, scene: Scene) -> tuple[int, str]:
    """Play the run through; returns (trajectories left out, what is wrong with it)."""
    fault = cell.fault
    check_end(fault, *scene.train(injected=True))
    if fault.ends is not None:
        fault.between(scene)
        status, said = scene.train(injected=False)
        if status != 0:
            raise CellFailed(f"it does not go on: status {status}: {said[-600:]}")
    if fault.name != "none" and marked(scene.folder) is None:
        raise CellFailed("the fault did not happen")
    if scene.recovery() is None:
        raise CellFailed("no step was logged after the fault")
    verdict = judge(scene.run, scene.policy, scene.bound, judged=fault.judged)
    problems = list(verdict.problems)
    if (scene.folder / TORN_SERVED).exists():
        problems.append("a server whose update failed went on before it had all weights")
    if fault.all_survive and verdict.left_out:
        problems.append(f"{verdict.left_out} trajectories were left out")
    return verdict.left_out, "; ".join(problems)[:2000]


def _write(folder: Path, result: Result) -> None:
    (folder / RESULT).write_text(json.dumps(asdict(replace(result, commit=commit()))))


@cache
def commit() -> str:
    """Name the project's commit."""
    words = ["git", "describe", "--always", "--abbrev=7", "--exclude=*", "--dirty=+"]
    return subprocess.run(words, cwd=PROJECT, capture_output=True, text=True).stdout.strip()
