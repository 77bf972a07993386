"""The folder of a run. Its contents change only after a command has passed all checks, including the checks of
resuming.

SGLang's own logs are the exception: with resume_mode=disable the older run is moved aside before servers that log into
it start.
"""

from __future__ import annotations

import fcntl
import os
import shlex
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from agentrl.checkpoint.manager import CheckpointManager
from agentrl.checkpoint.manifest import STATE_FILE
from agentrl.checkpoint.remote import ObjectStore
from agentrl.config import Config, TuningConfig, write_config
from agentrl.errors import CheckpointError, ConfigError
from agentrl.observe.display import Display
from agentrl.rollouts.saving import Retention
from agentrl.system.file_lock import FileLock, Locked
from agentrl.system.parts import of_annexes
from agentrl.system.publish import is_disk_full
from agentrl.system.versions import check_folder, sign

LOCK = "running.lock"
"""File that a process has locked while it trains in the folder; it names the last process that began."""


class RunFolder:
    """`trainer.default_local_dir` (with val_only `val_only/` in it), and the run's folder in an object store."""

    def __init__(self, config: Config | TuningConfig, store: ObjectStore | None, display: Display) -> None:
        """Raises ConfigError where nothing can be written, or another process trains, CheckpointError when
        resume_from_path is no checkpoint, DataError when another version's run is there that cannot be continued."""
        self.path = Path(config.trainer.default_local_dir)
        if isinstance(config, Config) and config.trainer.val_only:
            self.path /= "val_only"  # a run's own files tell of what it trained
        self._config, self._store, self._display = config, store, display
        self.retention = Retention(
            self.path, config.trainer.trajectories_to_keep_gb if isinstance(config, Config) else None
        )
        self._is_cleared = config.trainer.resume_mode != "disable"
        if self._is_cleared:
            check_folder(self.path)
        given = config.trainer.resume_from_path
        if given is not None and not (Path(given) / STATE_FILE).is_file():
            raise CheckpointError(
                f"trainer.resume_from_path={given} is no whole checkpoint: it has no {STATE_FILE}. Name a folder such "
                f"as {self.path}/checkpoints/step_000012 (one of verl's is gone on with by its weights alone: "
                "docs/verl.md)"
            )
        existing = next(folder for folder in (self.path, *self.path.absolute().parents) if folder.exists())
        if not existing.is_dir() or not os.access(existing, os.W_OK | os.X_OK):
            raise self._refused(f"{existing} is no folder that may be written to")
        self._lock: FileLock | None = None
        if (self.path / LOCK).is_file():
            self._hold()

    def is_owned(self) -> bool:
        """Say whether no other process trains in the run's folder; the lock of a val_only is in its own, below."""
        run = Path(self._config.trainer.default_local_dir)
        if run == self.path or not (run / LOCK).is_file():
            return True
        try:
            FileLock(run / LOCK).close()
        except (Locked, PermissionError):
            return False
        return True

    def clear(self) -> None:
        """With resume_mode=disable move the run that is there aside, before anything of this one is written there.

        Raises ConfigError where another command has begun there since this one was checked.
        """
        if not self._is_cleared:
            self._take()

    def _take(self) -> None:
        """Make the folder this process's own; commands that come at once take their turns."""
        with self._one_by_one():
            path = self.path
            if not self._is_cleared and path.exists():
                self._hold()
                number = next(n for n in range(1, 10**6) if not path.with_name(f"{path.name}.{n}").exists())
                aside = path.with_name(f"{path.name}.{number}")
                path.rename(aside)
                self.close()
                self._display.note(f"resume_mode=disable: the run that was in {path} is now in {aside}")
            self._is_cleared = True
            path.mkdir(parents=True, exist_ok=True)
            self._hold()

    @contextmanager
    def _one_by_one(self) -> Iterator[None]:
        """Lock the folder that holds this one: the lock of a new run's folder can only be taken when it is there."""
        parent = self.path.absolute().parent
        parent.mkdir(parents=True, exist_ok=True)
        descriptor = os.open(parent, os.O_RDONLY)
        try:
            with suppress(OSError):  # a file system without locks
                fcntl.flock(descriptor, fcntl.LOCK_EX)
            yield
        finally:
            os.close(descriptor)

    def begin(self, forget_after: Callable[[int], None], checkpoints: CheckpointManager, after: int | None) -> None:
        """After every check has passed: write the config, forget the reports of steps `after` this one, and remove the
        files of a killed save. `after` is None where no step is trained: only the config is written then.

        The store comes after the folder: it has the config of no run that could not begin here. Raises ConfigError
        where one of them cannot be written.
        """
        try:
            self._take()
            self._sign()
            if after is not None:
                forget_after(after)
            write_config(self._config, file := self.path / "config.yaml")
            sign(self.path, max(after or 0, 0))
            if after is None:
                return
            if self._store is not None:
                self._store.begin(file)
            checkpoints.clean_up()
        except OSError as error:
            if is_disk_full(error):
                raise
            raise self._refused(str(error.strerror)) from error

    def close(self) -> None:
        """Let another process train in the folder."""
        if self._lock is not None:
            self._lock.close()
            self._lock = None

    def _hold(self) -> None:
        """Lock the folder until `close`, as two that write one ledger would lose and repeat prompts."""
        if self._lock is not None:
            return
        try:
            self._lock = FileLock(self.path / LOCK)
        except Locked as locked:
            if locked.last is None:
                raise ConfigError(
                    f"trainer.default_local_dir={self.path}: a training of this process is open there. Leave its "
                    "`with`, or name another trainer.experiment_name or folder"
                ) from None
            raise ConfigError(
                f"trainer.default_local_dir={self.path}: another command trains there (the last one that began was "
                f"{locked.last}). End it, or name another folder"
            ) from None

    def _sign(self) -> None:
        """Write the holder of the lock: only once a command has begun, as a refused command changes nothing."""
        if self._lock is not None:
            self._lock.sign()

    def _refused(self, why: str) -> ConfigError:
        return ConfigError(
            f"trainer.default_local_dir={self.path} cannot be written ({why}): name a folder in which this user may "
            "make files"
        )


def view_command(dir: Path) -> str | None:
    """Write the command that shows the run in `dir` in a browser, with this interpreter; None where it has none."""
    if (viewer := of_annexes("commands").get("view")) is None:
        return None
    python = Path(sys.executable)
    if python.is_relative_to(Path.cwd()):
        python = python.relative_to(Path.cwd())
    return shlex.join([str(python), "-m", viewer.partition(":")[0].removesuffix(".__main__"), str(dir)])
