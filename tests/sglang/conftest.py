"""Real SGLang servers on this CPU: one that all tests share, and more for tests that break theirs."""

from __future__ import annotations

import asyncio
import dataclasses
import importlib.util
import os
from collections.abc import AsyncIterator, Awaitable, Callable, Generator, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from agentrl.engines.sglang.options import SGLangArguments
from agentrl.engines.sglang.process import SGLangProcess
from tests.engines.conftest import model_dir, reference, tokenizer
from tests.engines.contract import MAX_MODEL_LEN, MAX_NUM_SEQS

# Fixtures: the same as those of the embedded engine's tests, and of whole runs.
__all__ = ["model_dir", "reference", "tokenizer"]

STARTUP = 170.0  # seconds; 15 where nothing else runs, and a minute where much does

StartServer = Callable[..., Awaitable[SGLangProcess]]
"""Of fields of SGLangArguments that differ from those of the shared server."""


def pytest_runtest_setup(item: pytest.Item) -> None:
    if importlib.util.find_spec("sglang") is None:
        pytest.skip("needs SGLang: make test-sglang")


@pytest.hookimpl(hookwrapper=True)
def pytest_runtest_makereport(item: pytest.Item) -> Generator[None, Any, None]:
    """Under .ci/run no test of SGLang may be skipped, but for those that need a GPU."""
    outcome = yield
    report: pytest.TestReport = outcome.get_result()
    if report.skipped and os.environ.get("AGENTRL_CI") == "1" and item.get_closest_marker("gpu") is None:
        report.outcome = "failed"
        report.longrepr = f"skipped in continuous integration: {report.longrepr}"


@pytest.fixture(scope="session")
def server_arguments(model_dir: Path) -> SGLangArguments:
    """What the shared server is started with."""
    return SGLangArguments(
        str(model_dir),
        device="cpu",
        context_length=MAX_MODEL_LEN,
        max_num_seqs=MAX_NUM_SEQS,
        dtype="float32",
        takes_deltas=True,
    )


@contextmanager
def running(arguments: SGLangArguments, folder: Path) -> Iterator[SGLangProcess]:
    """A server that is ready, whose output is in the folder."""
    process = SGLangProcess(arguments, None, folder / "0.log")
    try:
        process.start()
        asyncio.run(process.ready(STARTUP))
        yield process
    finally:
        process.stop()


@pytest.fixture(scope="session")
def server(server_arguments: SGLangArguments, tmp_path_factory: pytest.TempPathFactory) -> Iterator[SGLangProcess]:
    """A server for all tests, with the weights of `model_dir` at first. Tests leave it running, idle and not paused."""
    with running(server_arguments, tmp_path_factory.mktemp("server")) as process:
        yield process


@pytest.fixture
async def start_server(server_arguments: SGLangArguments, tmp_path: Path) -> AsyncIterator[StartServer]:
    """`await start_server(**changes)`: a server of the test's own, ready. Several can start at once. Stopped after."""
    started: list[SGLangProcess] = []

    async def start(**changes: Any) -> SGLangProcess:
        log = tmp_path / f"server{len(started)}.log"
        process = SGLangProcess(dataclasses.replace(server_arguments, **changes), None, log)
        started.append(process)
        process.start()
        await process.ready(STARTUP)
        return process

    yield start
    for process in started:
        process.stop()
