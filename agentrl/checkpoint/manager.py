"""Checkpoints: directories `step_000012/` that are there whole or not at all.

A save writes into a hidden directory next to its place, flushes every file to the disk, and is published by one rename.
Only then are older checkpoints removed, each by a rename out of the way first. So whenever the process is killed, every
`step_*` is complete. The newest is from the last save that returned, or from the save that was being published.
Checkpoints of later steps, of a continuation that was given up, are moved out of the way just before that rename.
"""

from __future__ import annotations

import json
import logging
import shutil
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

from agentrl.checkpoint.best import BestBy, BestStep
from agentrl.checkpoint.manifest import (
    STATE_FILE,
    Best,
    DamagedCheckpointError,
    Record,
    listing,
    name_of,
    seal,
    step_of,
    steps_in,
    verified,
)
from agentrl.checkpoint.remote import ObjectStore
from agentrl.errors import CheckpointError
from agentrl.observe.display import Display
from agentrl.system.json_value import JSON
from agentrl.system.publish import flush_to_disk, is_disk_full, remove
from agentrl.system.versions import package_versions

# A save that is not published; a checkpoint that a new one of its step is about to replace; one being removed.
_PARTIAL, _REPLACED, _REMOVED = ".partial", ".replaced", ".removed"

_NO_ROOM = 1 << 20
"""A disk with fewer free bytes is full."""

logger = logging.getLogger(__name__)

Finish = Callable[[bool], bool]
"""Answers True when the files are written; waits for them when given True, and raises the error of writing them."""
Writer = Callable[[Path], Finish | None]
"""Fills a directory. A writer that continues in the background returns how to finish."""


@dataclass(slots=True)
class _Save:
    """A save that is going on."""

    step: int
    partial: Path
    final: Path
    state: Mapping[str, JSON]
    best: Best | None
    free: int
    unfinished: list[Finish | None] = field(default_factory=list)
    publishing: Future[None] | None = None


class CheckpointManager:
    """The checkpoints of one run, in `dir`. Only one process at a time may own a directory."""

    def __init__(
        self,
        dir: Path,
        *,
        keep: int | None,
        fingerprint: Mapping[str, JSON] | None = None,
        background: bool = False,
        store: ObjectStore | None = None,
        best_by: BestBy | None = None,
        warn: Callable[[str], None] = logger.warning,
        owned: bool = True,
    ) -> None:
        """`keep`: how many are kept (None: all). `fingerprint`: config keys with their values (JSON) that a checkpoint
        must share to be loaded, such as the model's shape. `background`: `save` does not wait for the disk. `store`:
        where each is uploaded when it is published. `best_by`: keep the best step's, too. `owned`: checkpoints that a
        killed save had moved away are put back, and newer ones of the store are downloaded. Without it nothing changes
        in `dir`, where another process saves."""
        self.dir = dir
        self.keep = keep
        self.background = background
        self.store = store
        self.best = BestStep(best_by, warn)
        self.published = False
        """True when a save of this process is published."""
        self.fingerprint: Mapping[str, JSON] = json.loads(json.dumps(dict(fingerprint or {})))
        self._warn, self._owned = warn, owned
        self._told: set[tuple[Path, str]] = set()
        """Checkpoints and packages of other versions that were warned of."""
        self._going_on: _Save | None = None
        self._checked: tuple[object, Record] | None = None
        """The checkpoint that was last read whole: its files at that time, and its record."""
        self._thread = ThreadPoolExecutor(1, "checkpoints")
        for path in self.dir.glob(f".step_*{_REPLACED}") if owned else ():
            original = self.dir / path.stem.removeprefix(".")
            if not original.exists():
                path.rename(original)

    def save(self, step: int, writers: Mapping[str, Writer], state: Mapping[str, JSON]) -> Path:
        """Write `step_<step>/`: each writer fills the subdirectory of its name, `load` returns `state` (JSON).

        Waits for the save before it. In the background this returns when the writers have; `settle` does the rest.
        Returns where the checkpoint is, or will be. Checkpoints of later steps belong to a continuation that was given
        up, and are removed with the old ones. Raises CheckpointError on a full disk, with the earlier ones intact.
        """
        self.settle()
        final = self.dir / name_of(step)
        partial = self.dir / f".{final.name}{_PARTIAL}"
        self.dir.mkdir(parents=True, exist_ok=True)
        free = self._check_room(final)
        self._going_on = going_on = _Save(step, partial, final, state, self.best.found, free)
        with self._undone_on_error(going_on):
            shutil.rmtree(partial, ignore_errors=True)
            partial.mkdir()
            for name, write in writers.items():
                (partial / name).mkdir()
                going_on.unfinished.append(write(partial / name))
        if not self.background:
            self.settle()
        return final

    def settle(self, *, wait: bool = True) -> None:
        """Publish the running save when its files are written, or `wait` for it. Raises the error of the save."""
        going_on = self._going_on
        if going_on is None:
            return
        with self._undone_on_error(going_on):
            if going_on.publishing is None:
                if not all(finish is None or finish(wait) for finish in going_on.unfinished):
                    return
                going_on.publishing = self._thread.submit(self._seal_and_publish, going_on)
            if not (wait or going_on.publishing.done()):
                return
            going_on.publishing.result()
        self._going_on = None

    def give_up(self) -> None:
        """Forget the running save, whose writers are gone; a save that they had all written before is published."""
        going_on, self._going_on = self._going_on, None
        if going_on is not None and going_on.publishing is not None:
            with self._undone_on_error(going_on):
                going_on.publishing.result()
        elif going_on is not None:
            shutil.rmtree(going_on.partial, ignore_errors=True)

    def latest(self) -> Path | None:
        """The newest checkpoint that is undamaged; the user is warned of damaged ones. None without any checkpoint.

        Raises CheckpointError when there are checkpoints but no usable one.
        """
        steps, faults = steps_in(self.dir), list[str]()
        for step in sorted(steps, reverse=True):
            try:
                self._verified(steps[step])
            except DamagedCheckpointError as error:
                faults.append(str(error))
                self._warn(f"{error}; looking for an older one")
            else:
                return steps[step]
        if steps:
            raise CheckpointError(
                f"{self.dir} holds {len(steps)} checkpoints, and every one is damaged. The newest: {faults[0]}. "
                "Copy one again, or start over with trainer.resume_mode=disable"
            )
        return None

    def steps_kept(self) -> list[int]:
        """List the steps of the checkpoints that are there, whether or not they are undamaged."""
        return sorted(steps_in(self.dir))

    def newest(self) -> Path | None:
        """The newest checkpoint by its name, whether or not it is undamaged; None without any."""
        steps = steps_in(self.dir)
        return steps[max(steps)] if steps else None

    def fetch(self, display: Display) -> None:
        """Download the newest checkpoint of the store when no local checkpoint is as new, and undamaged.

        Nothing is downloaded where another process saves. Raises CheckpointError when the store does not answer.
        """
        if self.store is None or not self._owned:
            return
        here = max((step for step, path in steps_in(self.dir).items() if self._is_whole(path)), default=-1)
        for step in sorted((step for step in self.store.steps() if step > here), reverse=True):
            if self._download(self.store, step, display):
                display.note(f"{name_of(step)} comes from {self.store.url}; what is here is older")
                return

    def best_checkpoint(self, display: Display) -> Path | None:
        """Find the checkpoint of the best step, here or in the store; None where neither has it undamaged."""
        found = self.best.found
        if found is None:
            return None
        path = self.dir / name_of(found.step)
        if path.is_dir() and self._is_whole(path):
            return path
        if self.store is not None and found.step in self.store.steps():
            return path if self._download(self.store, found.step, display) else None
        return None

    def _download(self, store: ObjectStore, step: int, display: Display) -> bool:
        """Download a checkpoint of the store. Returns false, after a warning, when it is damaged."""
        final = self.dir / name_of(step)
        partial = self.dir / f".{final.name}{_PARTIAL}"
        shutil.rmtree(partial, ignore_errors=True)
        partial.mkdir(parents=True)
        try:
            store.download(step, partial, display)
            # The folder that was downloaded is removed: the store's is the one to look at.
            verified(partial, step, f"{store.url}/checkpoints/{final.name}")
        except DamagedCheckpointError as error:
            self._warn(f"{error}; looking for an older one")
            shutil.rmtree(partial)
            return False
        remove(final)
        partial.rename(final)
        return True

    def load(self, path: Path) -> Mapping[str, JSON]:
        """Check the checkpoint whole and return its `state`; the writers' files are in its subdirectories.

        Raises CheckpointError when it is missing, damaged, of another format, or of another fingerprint.
        """
        if not path.is_dir():
            there = ", ".join(found.name for _, found in sorted(steps_in(self.dir).items())) or "none"
            raise CheckpointError(f"{path}: there is no such checkpoint. In {self.dir} there are: {there}")
        record = self._verified(path)
        self.best.set(record.best)
        theirs = record.fingerprint
        differing = [
            f"{key}: {_shown(theirs, key)} in the checkpoint, {_shown(self.fingerprint, key)} in this run"
            for key in sorted({*theirs, *self.fingerprint})
            if _shown(theirs, key) != _shown(self.fingerprint, key)
        ]
        if differing:
            raise CheckpointError(
                f"{path} is of another model or config: {'; '.join(differing)}. Set the keys as they were, or start "
                "another run (trainer.experiment_name)"
            )
        for package, found in package_versions().items():
            wrote = record.versions.get(package, found)
            if wrote != found and (path, package) not in self._told:
                self._told.add((path, package))
                self._warn(f"{path} was written with {package} {wrote}, this is {found}: numbers may differ")
        return record.state

    def _verified(self, path: Path) -> Record:
        """Check a checkpoint whole, unless it is as it was when that was last done: one start reads it three times."""
        entries = sorted(listing(path).items())
        seen = (path, [(name, entry.st_ino, entry.st_size, entry.st_mtime_ns) for name, entry in entries])
        if self._checked is None or self._checked[0] != seen:
            self._checked = (seen, verified(path, step_of(path.name)))
        return self._checked[1]

    def _is_whole(self, path: Path) -> bool:
        try:
            self._verified(path)
        except DamagedCheckpointError:
            return False
        return True

    def clean_up(self) -> None:
        """Remove the leftovers of a killed process's saves. Called before the first save."""
        for path in self.dir.glob(".step_*"):
            if path.suffix in (_PARTIAL, _REPLACED, _REMOVED):
                remove(path)

    @contextmanager
    def _undone_on_error(self, going_on: _Save) -> Iterator[None]:
        try:
            yield
        except BaseException as error:
            self._going_on = None
            if going_on.publishing is not None and not going_on.publishing.done():
                raise  # Ctrl-C: the thread goes on with these files, and the process ends when it has published them
            full = is_disk_full(error) or shutil.disk_usage(self.dir).free < _NO_ROOM
            written = sum(path.stat().st_size for path in going_on.partial.rglob("*") if path.is_file())
            shutil.rmtree(going_on.partial, ignore_errors=True)
            if full and isinstance(error, Exception):
                free = going_on.free
                found = f"needs more than {written:,} bytes and {free:,} were free"
                if not written:
                    found = f"could not begin its first file, and {free:,} bytes were free before"
                raise self._no_room(going_on.final, found) from error
            raise

    def _seal_and_publish(self, going_on: _Save) -> None:
        seal(going_on.partial, going_on.step, self.fingerprint, going_on.state, going_on.best)
        best = None if going_on.best is None else going_on.best.step
        self._publish(going_on.partial, going_on.final, going_on.step, best)
        if self.store is not None:
            self.store.upload(going_on.final, going_on.step, self.keep, best)

    def _publish(self, partial: Path, final: Path, step: int, best: int | None) -> None:
        """Rename into place. Checkpoints that must never be resumed from again are removed first, merely old ones last.

        best: a step whose checkpoint stays.
        """
        steps = steps_in(self.dir)
        abandoned = sorted(found for found in steps if found > step)
        if abandoned:
            self._warn(f"removing checkpoints of steps {abandoned}: the run went on from an earlier one")
        removed = [self._set_aside(steps[found], _REMOVED) for found in abandoned]
        if final.exists():
            removed.append(self._set_aside(final, _REPLACED))
        partial.rename(final)
        flush_to_disk(self.dir)
        self.published = True
        if self.keep is not None:
            kept = sorted(steps_in(self.dir).items())
            removed += [self._set_aside(path, _REMOVED) for found, path in kept[: -self.keep] if found != best]
        for path in removed:
            remove(path)

    def _set_aside(self, path: Path, suffix: str) -> Path:
        return path.rename(self.dir / f".{path.name}{suffix}")

    def _check_room(self, final: Path) -> int:
        """Free bytes. Raises CheckpointError when they are fewer than the newest checkpoint's size."""
        free = shutil.disk_usage(self.dir).free
        steps = steps_in(self.dir)
        if steps:
            newest = steps[max(steps)]
            needed = sum(path.stat().st_size for path in newest.rglob("*") if path.is_file())
            if free < needed:
                raise self._no_room(final, f"needs about {needed:,} bytes and {free:,} were free")
        return free

    def _no_room(self, final: Path, found: str) -> CheckpointError:
        return CheckpointError(
            f"the disk is full: {final} {found}. Earlier checkpoints are intact. "
            "Make room (trainer.max_actor_ckpt_to_keep limits how many are kept) and start again: the run goes on from "
            "the last one"
        )


@contextmanager
def reading_state(path: Path) -> Iterator[None]:
    """Raise CheckpointError where the block meets a state that is not of the form that it reads."""
    try:
        yield
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise CheckpointError(
            f"{path / STATE_FILE}: its state is not that of this training ({type(error).__name__}: {error}). Use the "
            "agentrl that wrote it, or another checkpoint"
        ) from error


def step_in(state: Mapping[str, JSON]) -> int:
    """Return the step of a training's state. Raises CheckpointError for a state without one."""
    step = state.get("step")
    if type(step) is not int or step < 0:
        raise CheckpointError(f"the checkpoint's state names no step: expected a whole number, found {step!r:.200}")
    return step


def _shown(fingerprint: Mapping[str, JSON], key: str) -> str:
    return json.dumps(fingerprint[key], sort_keys=True) if key in fingerprint else "not set"
