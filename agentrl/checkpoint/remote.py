"""A run's checkpoints and its policy in an object store, or elsewhere through fsspec: s3://, gs://, hdfs://, file://.

A checkpoint there is whole or does not count: its `state.json` comes last when it is uploaded, and goes first when it
is removed.
"""

from __future__ import annotations

import tempfile
import threading
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path, PurePosixPath
from typing import ParamSpec, TypeVar

import fsspec
import tenacity

from agentrl.checkpoint.manifest import STATE_FILE, DamagedCheckpointError, name_of, read_record, step_of
from agentrl.errors import CheckpointError, ConfigError, first_line, install_extra
from agentrl.observe.display import Display, Stage

TRIES = 5
WAITS = tenacity.wait_random_exponential(multiplier=1, max=30)
"""Seconds between the tries of one transfer."""
AT_ONCE = 8
"""Files that travel at the same time."""

BUCKETS = frozenset({"s3", "gs", "abfs", "oss", "oci"})
"""Stores without folders, where making one would make a bucket, also of a misspelt name."""

PROBE = ".writable"
"""A file that is written to see whether one can be, and removed."""

_FINAL = (PermissionError, FileNotFoundError, IsADirectoryError)  # no try after them would end otherwise
P = ParamSpec("P")
T = TypeVar("T")


class ObjectStore:
    """The folder `url`: `checkpoints/step_000012/...` and `policy/...` below it. Keys and endpoints are up to fsspec.

    Transfers are tried TRIES times. Raises ConfigError when nothing can be written there.
    """

    def __init__(self, url: str, *, warn: Callable[[str], None]) -> None:
        if "://" not in url:
            raise ConfigError(f"trainer.default_remote_dir={url} is no URL: give one such as s3://bucket/run")
        try:
            self._fs, root = fsspec.url_to_fs(url)
        except (ImportError, ValueError, OSError) as error:
            raise ConfigError(
                f"trainer.default_remote_dir={url}: {first_line(error)}. S3 needs: {install_extra('s3')}; HDFS: "
                "Java and Hadoop's libhdfs (JAVA_HOME, HADOOP_HOME); other stores: fsspec's package for them"
            ) from error
        self._has_no_folders = not BUCKETS.isdisjoint(self._fs.protocol)
        self.url = url.rstrip("/")
        self._root = root.rstrip("/")
        self._warn = warn

    def check(self) -> None:
        """Raises ConfigError when nothing can be written there."""
        with tempfile.NamedTemporaryFile() as empty:
            self._begin(Path(empty.name), PROBE)
        with suppress(Exception):  # it is written over the next time
            self._fs.rm_file(f"{self._root}/{PROBE}")

    def begin(self, config: Path) -> None:
        """Leave the run's config there. Raises ConfigError when that fails."""
        self._begin(config, "config.yaml")

    def _begin(self, file: Path, name: str) -> None:
        try:
            self._put(file, f"{self._root}/{name}")
        except Exception as error:
            raise ConfigError(
                f"trainer.default_remote_dir={self.url} cannot be written: {_said(error)}. Look at the address and at "
                "the keys (for S3 those of ~/.aws or AWS_*; an endpoint: AWS_ENDPOINT_URL)"
            ) from error

    def steps(self) -> list[int]:
        """List the steps of the whole checkpoints, ascending. Raises CheckpointError when the store does not answer."""
        try:
            return sorted(step for step, path in self._folders().items() if self._try(self._fs.exists, _state(path)))
        except Exception as error:
            raise CheckpointError(f"{self.url} cannot be read: {_said(error)}") from error

    def upload(self, checkpoint: Path, step: int, keep: int | None, best: int | None = None) -> None:
        """Upload the checkpoint of `step`, then remove checkpoints of later steps and, except for step `best`, too old
        ones. Warns when it fails."""
        try:
            for found, path in self._folders().items():
                if found > step:
                    self._remove(path)
            self._put_folder(checkpoint, f"{self._root}/checkpoints/{name_of(step)}", STATE_FILE)
            whole = self.steps()
            for found, path in self._folders().items():
                if found not in (whole if keep is None else whole[-keep:]) and not (found == best and found in whole):
                    self._remove(path)
        except Exception as error:
            self._warn(
                f"{checkpoint} could not be uploaded to {self.url}: {_said(error)}. It is intact here; the next "
                "checkpoint is uploaded again"
            )

    def upload_policy(self, policy: Path, last: str) -> None:
        """Upload the exported policy, its file `last` last. Warns when it fails."""
        try:
            self._put_folder(policy, f"{self._root}/policy", last)
        except Exception as error:
            self._warn(f"{policy} could not be uploaded to {self.url}: {_said(error)}. Copy it by hand")

    def download(self, step: int, into: Path, display: Display) -> None:
        """Download the checkpoint of `step` into the empty folder `into`.

        Raises DamagedCheckpointError when it lacks a file or its record differs from the written one, CheckpointError
        when the store does not answer.
        """
        name = name_of(step)
        there = f"{self._root}/checkpoints/{name}"
        try:
            text: bytes = self._try(self._fs.cat_file, _state(there))
            files = read_record(text, f"{self.url}/checkpoints/{name}/{STATE_FILE}").files
            megabytes = sum(file.bytes for file in files.values()) >> 20
            with display.stage(f"download {name} (MB)", total=megabytes) as stage:
                progress = _Megabytes(stage)

                def get(file: str) -> None:
                    (into / file).parent.mkdir(parents=True, exist_ok=True)
                    self._try(self._fs.get_file, f"{there}/{file}", str(into / file), callback=progress)

                _at_once(get, files)
            (into / STATE_FILE).write_bytes(text)
        except CheckpointError:
            raise
        except FileNotFoundError as error:
            raise DamagedCheckpointError(
                f"{self.url}/checkpoints/{name} is half-written: {error} is missing"
            ) from error
        except Exception as error:
            raise CheckpointError(f"{self.url}/checkpoints/{name} could not be downloaded: {_said(error)}") from error

    def _put_folder(self, folder: Path, there: str, last: str) -> None:
        """Replace the files at `there`; without the file `last` the folder does not count."""
        files = sorted(str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file())
        older = self._files(there)
        if last in older:
            self._try(self._fs.rm_file, f"{there}/{last}")
        _at_once(lambda file: self._put(folder / file, f"{there}/{file}"), [file for file in files if file != last])
        for file in older - set(files):
            self._try(self._fs.rm_file, f"{there}/{file}")
        self._put(folder / last, f"{there}/{last}")

    def _put(self, file: Path, there: str) -> None:
        if not self._has_no_folders:
            self._try(self._fs.makedirs, there.rpartition("/")[0], exist_ok=True)
        self._try(self._fs.put_file, str(file), there)

    def _remove(self, folder: str) -> None:
        if self._try(self._fs.exists, _state(folder)):
            self._try(self._fs.rm_file, _state(folder))
        with suppress(FileNotFoundError):
            self._try(self._fs.rm, folder, recursive=True)

    def _folders(self) -> dict[int, str]:
        """Checkpoints, whole or not, by step."""
        self._fs.invalidate_cache()
        try:
            paths = self._try(self._fs.ls, f"{self._root}/checkpoints", detail=False)
        except FileNotFoundError:
            return {}
        named = ((step_of(PurePosixPath(path).name), path) for path in paths)
        return {step: path for step, path in named if step is not None}

    def _files(self, folder: str) -> set[str]:
        self._fs.invalidate_cache()
        return {path.removeprefix(folder).lstrip("/") for path in self._try(self._fs.find, folder)}

    def _try(self, function: Callable[P, T], *arguments: P.args, **keywords: P.kwargs) -> T:
        retrying = tenacity.Retrying(
            stop=tenacity.stop_after_attempt(TRIES),
            wait=WAITS,
            retry=tenacity.retry_if_not_exception_type(_FINAL),
            reraise=True,
        )
        return retrying(function, *arguments, **keywords)


class _Megabytes(fsspec.Callback):
    """Progress of a transfer: advances a stage by the megabytes that arrived, from any thread."""

    def __init__(self, stage: Stage) -> None:
        super().__init__()
        self._stage, self._rest, self._lock = stage, 0, threading.Lock()

    def relative_update(self, inc: int = 1) -> None:
        with self._lock:
            megabytes, self._rest = divmod(self._rest + inc, 1 << 20)
        if megabytes:
            self._stage.advance(megabytes)


def _at_once(transfer: Callable[[str], None], files: Iterable[str]) -> None:
    with ThreadPoolExecutor(AT_ONCE, "transfer") as threads:
        for _ in threads.map(transfer, files):
            pass


def _state(folder: str) -> str:
    return f"{folder}/{STATE_FILE}"


def _said(error: Exception) -> str:
    return f"{type(error).__name__}: {error}"
