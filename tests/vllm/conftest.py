"""A real vLLM server on this CPU, which all tests share: `make test-vllm`."""

from __future__ import annotations

import asyncio
import importlib.util
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import pytest

from agentrl.engines.vllm.options import VLLMArguments
from agentrl.engines.vllm.process import VLLMProcess
from agentrl.system.json_value import JSON
from tests.engines.conftest import model_dir, reference, tokenizer
from tests.engines.contract import MAX_MODEL_LEN, MAX_NUM_SEQS

__all__ = ["model_dir", "reference", "tokenizer"]

STARTUP = 500.0  # seconds; 40 where nothing else runs


def pytest_runtest_setup(item: pytest.Item) -> None:
    if importlib.util.find_spec("vllm") is None:
        pytest.skip("needs vLLM: make test-vllm")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Give the first test time for the start of the server."""
    for item in items:
        item.add_marker(pytest.mark.timeout(2 * STARTUP))


@dataclass(frozen=True, slots=True)
class PacedArguments(VLLMArguments):
    """Arguments of a server with the worker of `tests.vllm.paced`."""

    def own(self, port: int) -> dict[str, JSON]:
        return {**VLLMArguments.own(self, port), "worker_extension_cls": "tests.vllm.paced.Extension"}


@contextmanager
def running(arguments: VLLMArguments, folder: Path) -> Iterator[VLLMProcess]:
    """A server that is ready, whose output is in the folder."""
    process = VLLMProcess(arguments, None, folder / "0.log", key="secret")
    try:
        process.start()
        asyncio.run(process.ready(STARTUP))
        yield process
    finally:
        process.stop()


@pytest.fixture(scope="session")
def server_arguments(model_dir: Path) -> VLLMArguments:
    """Arguments of the shared server."""
    return PacedArguments(str(model_dir), "cpu", "float32", context_length=MAX_MODEL_LEN, max_num_seqs=MAX_NUM_SEQS)


@pytest.fixture(scope="session")
def server(server_arguments: VLLMArguments, tmp_path_factory: pytest.TempPathFactory) -> Iterator[VLLMProcess]:
    """A server for all tests, with the weights of `model_dir` at first. Tests leave it running, idle and not paused."""
    with running(server_arguments, tmp_path_factory.mktemp("server")) as process:
        yield process


@pytest.fixture(scope="session")
def sglang_python(pytestconfig: pytest.Config) -> Path:
    """The interpreter of an environment with SGLang, which shares none with vLLM."""
    python = Path(pytestconfig.getoption("--sglang-python"))
    if not python.exists():
        pytest.skip(f"needs SGLang, too: make setup-sglang VENV=.venv-sglang, or --sglang-python ({python})")
    return python
