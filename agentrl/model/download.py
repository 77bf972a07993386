"""Weights of a model on the Hugging Face hub, downloaded with their progress."""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from typing import Self

import httpx

from agentrl.system.reporter import Progress, Reporter

WEIGHTS = "model*.safetensors"
"""Files that transformers reads weights from; repositories have other copies of them, too."""
AT_ONCE = 8
"""Files that are downloaded at a time, as by huggingface_hub."""


def download_weights(path: str, reporter: Reporter) -> None:
    """Download a model's weights into the hub's cache, as a stage in megabytes.

    Nothing happens for a folder, for weights that the cache has, and where the hub does not answer or does not give
    them: reading the model fails then, and says why.
    """
    if Path(path).exists():
        return
    from huggingface_hub import hf_hub_download, snapshot_download

    # Reading the model meets the same error, resumes what has arrived, and says what fails.
    with suppress(OSError, ValueError, httpx.HTTPError):
        files = snapshot_download(path, allow_patterns=[WEIGHTS], dry_run=True)
        missing = [one for one in files if one.will_download]
        if not missing:
            return
        megabytes = sum(one.file_size or 0 for one in missing) >> 20
        with (
            reporter.stage(f"download {path} (MB)", total=megabytes) as stage,
            ThreadPoolExecutor(AT_ONCE, "download") as threads,
        ):
            bar = type("Bar", (_Bar,), {"count": _Megabytes(stage)})
            arriving = [
                threads.submit(hf_hub_download, path, one.filename, revision=one.commit_hash, tqdm_class=bar)
                for one in missing
            ]
            for one in arriving:
                one.result()


class _Megabytes:
    """Counter that advances a stage by whole megabytes, from any thread."""

    def __init__(self, stage: Progress) -> None:
        self._stage, self._rest, self._lock = stage, 0, threading.Lock()

    def __call__(self, size: int) -> None:
        with self._lock:
            megabytes, self._rest = divmod(self._rest + size, 1 << 20)
        if megabytes:
            self._stage.advance(megabytes)


class _Bar:
    """The bar of a file, as huggingface_hub calls it. `update_transfer` asks for one bar a file instead of two."""

    count: Callable[[int], None]

    def __init__(self, *given: object, initial: int = 0, **named: object) -> None:
        self.count(initial)

    def update(self, size: float | None = 1) -> None:
        self.count(int(size or 0))

    def update_transfer(self, size: float | None = 1) -> None:
        """Pass over bytes that are not on the disk yet."""

    def set_postfix_str(self, text: str = "", refresh: bool = False) -> None:
        """Pass over a text."""

    set_transfer_postfix_str = set_postfix_str

    def close(self) -> None:
        """Keep the stage open for the other files."""

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()
