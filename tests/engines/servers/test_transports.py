"""Weight transports by name: the built-in ones, where servers run, and a user's file."""

from __future__ import annotations

import importlib
import re
from collections.abc import Iterator
from pathlib import Path
from typing import cast

import pytest
import torch
from safetensors.torch import load_file as load_tensors

from agentrl.config import load_config
from agentrl.engines.contract import EngineError
from agentrl.engines.servers.client import WeightReceiver
from agentrl.engines.servers.start import ROLLOUT, weight_sender
from agentrl.engines.servers.sync import DeltaSender, DiskSender, DistributedSender, TensorSender, WeightSender
from agentrl.engines.sglang.checksums import Expectation
from agentrl.engines.sglang.delta_loader import LOADER
from agentrl.engines.sglang.options import SGLangArguments
from agentrl.engines.weights import Weights
from agentrl.errors import CodeError, ConfigError
from tests.conftest import PROJECT
from tests.naming import naming

HERE, ELSEWHERE = "http://127.0.0.1:30000", "http://192.0.2.7:30000"
KEY = "actor_rollout_ref.rollout.update_weights_transport"
SERVERS = ["actor_rollout_ref.rollout.name=sglang", f"actor_rollout_ref.rollout.server_urls=[{HERE}]"]
MINE = """
from agentrl.engines.servers.sync import DiskSender

class Mine(DiskSender):
    pass

def build(setting):
    return Mine(setting.dtype, setting.bucket_bytes, setting.folder / "mine", checksums=setting.checksums)

def broken(setting):
    return setting.absent
"""


def sender(folder: Path, transport: str, *urls: str) -> WeightSender:
    config = load_config([*SERVERS, f"{KEY}={transport}"])
    return weight_sender(config, "cpu", urls, folder, Expectation)


@pytest.mark.parametrize(
    ("transport", "urls", "expected"),
    [
        ("auto", [HERE], TensorSender),
        ("auto", [HERE, ELSEWHERE], DistributedSender),
        ("tensor", [HERE], TensorSender),
        ("distributed", [HERE], DistributedSender),
        ("disk", [HERE, ELSEWHERE], DiskSender),
    ],
)
def test_the_built_in_ones(tmp_path: Path, transport: str, urls: list[str], expected: type[WeightSender]) -> None:
    assert type(sender(tmp_path, transport, *urls)) is expected


@pytest.mark.parametrize("transport", ["tensor", "disk"])
def test_delta_weights_go_by_any_of_them_and_are_verified_once(tmp_path: Path, transport: str) -> None:
    keys = [f"{KEY}={transport}", f"{ROLLOUT}.update_weights_delta=true", f"{ROLLOUT}.update_weights_checksum=true"]
    made = weight_sender(load_config([*SERVERS, *keys]), "cpu", [HERE], tmp_path, Expectation)
    assert isinstance(made, DeltaSender) and made._checksums is Expectation
    assert isinstance(made._inner, TensorSender if transport == "tensor" else DiskSender)
    assert made._inner._checksums is None


def test_servers_of_ours_are_started_with_their_half() -> None:
    assert LOADER not in SGLangArguments("model").argv(1)
    argv = SGLangArguments("model", takes_deltas=True).argv(1)
    assert argv[argv.index("--custom-weight-loader") + 1] == LOADER
    module, _, function = LOADER.rpartition(".")
    assert callable(getattr(importlib.import_module(module), function))


def test_memory_is_handed_over_on_one_machine_only(tmp_path: Path) -> None:
    with naming(ConfigError, f"{KEY}=tensor", HERE, ELSEWHERE):
        sender(tmp_path, "tensor", HERE, ELSEWHERE)


def test_a_file_of_the_users(tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text(MINE)
    made = sender(tmp_path, f"{tmp_path}/mine.py:build", HERE)
    assert type(made).__name__ == "Mine" and isinstance(made, DiskSender)
    with pytest.raises(CodeError, match=r"weight transport .*mine.py:broken .*AttributeError: .*absent"):
        sender(tmp_path, f"{tmp_path}/mine.py:broken", HERE)


def test_an_unknown_name_is_refused_with_the_known_ones(tmp_path: Path) -> None:
    with naming(ConfigError, KEY, "'nccl'", "unknown"):
        sender(tmp_path, "nccl", HERE)


class Reads:
    """A server that reads files, or refuses."""

    def __init__(self, url: str, refuses: bool = False) -> None:
        self.url, self.refuses = url, refuses
        self.has: tuple[int, dict[str, torch.Tensor]] | None = None

    async def update_from_disk(self, folder: Path, version: int, timeout: float) -> None:
        if self.refuses:
            raise EngineError("no room")
        self.has = version, load_tensors(folder / "model.safetensors")


async def test_the_transport_of_the_page(tmp_path: Path) -> None:
    found = re.search(
        r"```python\n(# my_transport\.py\n.*?)```", (PROJECT / "docs/extending.md").read_text(), re.DOTALL
    )
    assert found
    (tmp_path / "my_transport.py").write_text(found.group(1))
    made = sender(tmp_path, f"{tmp_path}/my_transport.py:build", HERE)
    weight = torch.arange(6.0, dtype=torch.float64).view(2, 3)

    def read() -> Iterator[tuple[str, torch.Tensor]]:
        yield "a.weight", weight

    good, full = Reads(HERE), Reads(ELSEWHERE, refuses=True)
    try:
        faults = await made.send(cast(list[WeightReceiver], [good, full]), Weights({"a.weight": (2, 3)}, read), 7)
    finally:
        await made.close()
    assert list(faults) == [ELSEWHERE] and "version 7, reading" in str(faults[ELSEWHERE])
    assert good.has is not None and good.has[0] == 7 and made.bytes_sent == 24
    torch.testing.assert_close(good.has[1], {"a.weight": weight.float()}, rtol=0, atol=0)
