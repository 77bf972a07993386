"""Python programs in processes of their own, forked from one that has imported what they import.

Importing torch and transformers takes a new process seven CPU-seconds, which is most of what a small run takes.
"""

from __future__ import annotations

import atexit
import gc
import multiprocessing
import os
import runpy
import signal
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from multiprocessing.context import ForkServerProcess
from pathlib import Path

PROJECT = Path(__file__).resolve().parent.parent
PRELOADED = ("agentrl.trainer.step", "agentrl.workers.roles", "agentrl.parallel.tensor_parallel")
_context = multiprocessing.get_context("forkserver")
_context.set_forkserver_preload(list(PRELOADED))


class ForkedPython:
    """`python WORDS...`: a module (`-m`) or a script, with the checkout on its path and no terminal."""

    def __init__(self, words: Sequence[object], cwd: Path = PROJECT, environment: Mapping[str, str] | None = None):
        """`environment`: added to this process's."""
        self.words = [str(word) for word in words]
        self._said = tempfile.TemporaryDirectory()
        self._files = [Path(self._said.name) / name for name in ("stdout", "stderr")]
        own = {**os.environ, "PYTHONPATH": str(PROJECT), **(environment or {})}
        arguments = (self.words, str(cwd), own, [str(file) for file in self._files])
        self.process: ForkServerProcess = _context.Process(target=become, args=arguments)
        self.process.start()

    def said(self, number: int) -> str:
        """Standard output (0) or error (1), as far as it has come."""
        return self._files[number].read_text() if self._files[number].exists() else ""

    def wait(self, timeout: float) -> subprocess.CompletedProcess[str]:
        """Its exit status and what it said. Raises TimeoutError, and ends it, when it takes longer."""
        self.process.join(timeout)
        late = self.process.is_alive()
        self.process.kill()
        self.process.join()
        out, err = self.said(0), self.said(1)
        self._said.cleanup()
        if late:
            raise TimeoutError(f"{self.words} took more than {timeout} s\n{out[-2000:]}\n{err[-4000:]}")
        status = self.process.exitcode
        assert status is not None
        return subprocess.CompletedProcess(self.words, status, out, err)


def forked(words: Sequence[object], cwd: Path = PROJECT, timeout: float = 170) -> subprocess.CompletedProcess[str]:
    """Run it to its end."""
    return ForkedPython(words, cwd).wait(timeout)


def become(words: list[str], cwd: str, environment: dict[str, str], files: list[str]) -> None:
    """Run a program in this process: its standard output and error go to the two files."""
    gc.freeze()  # or its full collections would visit, and thereby copy, all that was imported before the fork
    os.environ.clear()
    os.environ.update(environment)
    os.chdir(cwd)
    for number, file in enumerate(files, 1):
        opened = os.open(file, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
        os.dup2(opened, number)
        os.close(opened)
    module = words[0] == "-m"
    sys.argv = words[1:] if module else words
    start = cwd if module else str(Path(words[0]).resolve().parent)
    sys.path[:0] = [start, *environment["PYTHONPATH"].split(os.pathsep)]
    signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell's background job ignores it
    try:
        if module:
            runpy.run_module(words[1], run_name="__main__", alter_sys=True)
        else:
            runpy.run_path(words[0], run_name="__main__")
    finally:
        atexit._run_exitfuncs()  # which multiprocessing leaves out
