"""Replays that pages ask for: `python -m agentrl.replay` as a child process, one at a time, which ends with the viewer.

The command does all of the work, in a process of its own. This process stays without torch, and objects named in a
run's config are loaded in the command's process alone.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, TypeAlias, cast

from agentrl.checkpoint.manifest import CHECKPOINTS, steps_in
from agentrl.engines.servers.starter import STARTER
from agentrl.errors import DataError, UserError
from agentrl.system.json_value import JSON, as_list, as_object
from agentrl.system.owner import new_folder, remove, remove_left_folders
from agentrl.trajectory.files import TRAJECTORIES
from agentrl.trajectory.parquet import valid_unicode
from agentrl.view.record import Record
from agentrl.view.run import Run, open_run
from agentrl.view.viewer import Place, Viewer

NICE = 10
MOST_SAID = 1 << 16
"""Characters of the command's output that are kept, the last ones."""
MOST_TEXT = 1 << 20
"""Characters of a text that is put in another's place."""
GRACE = 5.0
"""Seconds from SIGTERM to SIGKILL: in them the command closes the run's tools."""
State: TypeAlias = Literal["running", "done", "failed", "cancelled"]


@dataclass(frozen=True, slots=True)
class Wanted:
    """A page's request for a replay."""

    place: Place
    turn: int | None = None
    """Number of the turn that `text` is put in the place of; None: all is sampled again."""
    call: int | None = None
    text: str = ""
    checkpoint: str | None = None
    """Name of one of the run's checkpoints; None: the weights that sampled the trajectory."""
    own_device: bool = False
    """Compute on the device of the run's config, which a live run may want for itself; else on the CPU."""


class Replay:
    """One child process, and its outcome."""

    def __init__(self, wanted: Wanted, uid: str, window: int, command: list[str], environment: dict[str, str]) -> None:
        """window: number of the context window shown next to the result's."""
        self.wanted, self.uid, self.window = wanted, uid, window
        self.state: State = "running"
        self.result: Place | None = None
        self.error: str | None = None
        self.differs: bool | None = None
        self._begun, self._ended = time.monotonic(), 0.0
        self._said = ""
        self._process = subprocess.Popen(
            command,
            env=environment,
            stdin=subprocess.PIPE,  # the child ends when this end of it is gone
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            errors="replace",
            start_new_session=True,
        )
        with suppress(OSError):  # it may have ended already
            os.setpriority(os.PRIO_PGRP, self._process.pid, NICE)

    def wait(self) -> int:
        """Wait for the process's end, reading its output; return its exit status."""
        reader = threading.Thread(target=self._read, daemon=True)
        reader.start()
        os.waitid(os.P_PID, self._process.pid, os.WEXITED | os.WNOWAIT)
        self._kill(signal.SIGKILL)  # its children may hold its output open; its id is still its own
        reader.join()
        return self._process.wait()

    def _read(self) -> None:
        assert self._process.stdout is not None
        while text := self._process.stdout.readline(MOST_SAID):
            self._said = (self._said + text)[-MOST_SAID:]

    def cancel(self) -> None:
        """End the process, by force where it takes long."""
        if self.goes_on:
            self.state = "cancelled"
            self._kill(signal.SIGTERM)
            threading.Timer(GRACE, self._end_by_force).start()

    def _end_by_force(self) -> None:
        if self.goes_on:
            self._kill(signal.SIGKILL)

    def _kill(self, number: signal.Signals) -> None:
        with suppress(ProcessLookupError):
            os.killpg(self._process.pid, number)

    @property
    def goes_on(self) -> bool:
        """True until the process has ended, and its result is there."""
        return not self._ended

    def end(self) -> None:
        """Note that it has ended."""
        self._ended = time.monotonic()

    def answer(self) -> Record:
        """Return its state for its page."""
        return {
            "state": self.state,
            "goes_on": self.goes_on,
            "uid": self.uid,
            "place": self.wanted.place,
            "turn": self.wanted.turn,
            "checkpoint": self.wanted.checkpoint,
            "seconds": (self._ended or time.monotonic()) - self._begun,
            "said": self._said,
            "error": self.error,
            "differs": self.differs,
            "result": self.result,
            "window": self.window,
        }

    def complaint(self, status: int) -> str:
        """Return the command's own sentence, or the end of its output."""
        _, found, sentence = f"\n{self._said}".rpartition("\nerror: ")
        return sentence.strip() if found else self._said[-2000:].strip() or f"the command ended with status {status}"


class Replays:
    """All replays since the viewer began; at most one of them runs."""

    def __init__(self, viewer: Viewer, *, trust: bool = False) -> None:
        """trust: take code, commands and hosts, too, from the configs of runs."""
        self._viewer, self._trust = viewer, trust
        remove_left_folders()  # of a viewer that was killed
        self._folder = new_folder()
        self._lock = threading.Lock()
        self._all: list[Replay] = []
        self._threads: list[threading.Thread] = []

    def options(self, number: int) -> Record:
        """List the possible options of a replay of a run's trajectory, and the tools that it would call."""
        run = self._viewer.run(number)
        config, turns = run.config, "actor_rollout_ref.rollout.multi_turn"
        return {
            "checkpoints": sorted(_checkpoints(run)),
            "tools": config.get(f"{turns}.tool_config_path"),
            "cassette": config.get("tools.cassette"),
            "device": config.get("trainer.device", "auto"),
        }

    def start(self, wanted: Wanted) -> int:
        """Start a replay, and return its number. Raises UserError where that cannot be, or another replay runs."""
        run = self._viewer.run(wanted.place[0])
        if not run.can_replay:
            raise DataError(f"{run.url}: want a run's folder on this machine, with its config.yaml and checkpoints")
        if wanted.checkpoint is not None and wanted.checkpoint not in _checkpoints(run):
            raise DataError(f"{run.url}: there is no checkpoint {wanted.checkpoint!r}")
        if len(wanted.text) > MOST_TEXT:
            raise DataError(f"want a text of at most {MOST_TEXT} characters, not {len(wanted.text)}")
        record = self._viewer.trajectory(wanted.place)
        turns = as_list(cast(JSON, record["turns"]))
        window = 0
        if wanted.turn is not None:
            if not 0 <= wanted.turn < len(turns):
                raise DataError(
                    f"turn={wanted.turn}: want the number of one of the trajectory's {len(turns)} turns, from 0"
                )
            window = cast(int, as_object(turns[wanted.turn])["transcript"])
        with self._lock:
            if busy := next((one for one in self._all if one.goes_on), None):
                raise UserError(f"a replay of {busy.uid} goes on: one is run at a time. Wait for it, or cancel it")
            out = self._folder / str(len(self._all))
            out.mkdir()
            command = _command(run, str(record["uid"]), wanted, out, trust=self._trust)
            replay = Replay(wanted, str(record["uid"]), window, command, _environment(wanted))
            self._all.append(replay)
            self._threads.append(threading.Thread(target=self._watch, args=(replay, run, out), daemon=True))
            self._threads[-1].start()
            return len(self._all) - 1

    def _watch(self, replay: Replay, run: Run, out: Path) -> None:
        """Wait for the replay's end, and take its result."""
        status = replay.wait()
        try:
            if replay.state == "cancelled":
                return
            if (out / TRAJECTORIES).is_dir() and status in (0, 1):
                made = open_run(str(out), run.tokens)
                replay.result = (self._viewer.keep(made), made.parts[0].name, 0)
                replay.differs = status == 1
                if replay.wanted.turn is None:
                    replay.window = self._viewer.first_other_window(replay.wanted.place, replay.result)
                replay.state = "done"
            else:
                replay.error, replay.state = replay.complaint(status), "failed"
        except UserError as error:
            replay.error, replay.state = str(error), "failed"
        finally:
            replay.end()

    def answer(self, number: int) -> Record:
        """State of a replay for its page. Raises DataError for an unknown number."""
        return self._one(number).answer()

    def cancel(self, number: int) -> None:
        """End a replay. Raises DataError for an unknown number."""
        self._one(number).cancel()

    def close(self) -> None:
        """End the running replay, and remove the files of all replays."""
        for replay in self._all:
            replay.cancel()
        for thread in self._threads:
            thread.join(2 * GRACE)
        remove(self._folder)

    def _one(self, number: int) -> Replay:
        if not 0 <= number < len(self._all):
            raise DataError(f"there is no replay {number} since this viewer began: {len(self._all)} were asked for")
        return self._all[number]


def _checkpoints(run: Run) -> dict[str, Path]:
    """Find a run's checkpoints by their names."""
    return {path.name: path for path in steps_in(Path(run.folder.path) / CHECKPOINTS).values()}


def _command(run: Run, uid: str, wanted: Wanted, out: Path, *, trust: bool) -> list[str]:
    """Return the command's words. Each value is joined to its option, so that no value is taken for another option."""
    words = [sys.executable, "-m", "agentrl.replay", str(Path(run.folder.path).absolute())]
    words += [f"--uid={uid}", f"--out={out}"]
    if wanted.turn is not None:
        text = out / "text"
        text.write_bytes(valid_unicode(wanted.text).encode())
        words += [f"--turn={wanted.turn}", f"--tool-answer={text}"]
        words += [] if wanted.call is None else [f"--call={wanted.call}"]
    if wanted.checkpoint is not None:
        words.append(f"--checkpoint={_checkpoints(run)[wanted.checkpoint]}")
    words += ["--trust"] if trust else []
    return words if wanted.own_device else [*words, "--device=cpu"]


def _environment(wanted: Wanted) -> dict[str, str]:
    """Return the child's environment.

    Without the run's own device the child sees no GPU, since a run may still use it.
    """
    hidden = {} if wanted.own_device else {"CUDA_VISIBLE_DEVICES": ""}
    return {**os.environ, **hidden, STARTER: str(os.getpid()), "PYTHONUNBUFFERED": "1"}
