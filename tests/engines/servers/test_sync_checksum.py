"""Which checksums servers are expected to answer, and who is to blame when they differ."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from agentrl.engines.servers.sync.buckets import buckets
from agentrl.engines.servers.sync.checksum import Expectation, compare
from agentrl.engines.servers.sync.update import Update

PREFIX = "model.layers.0.self_attn."


def expected(*tensors: tuple[str, torch.Tensor], bucket_bytes: int = 4096) -> Expectation:
    expectation = Expectation()
    buffer = torch.empty(4096, dtype=torch.uint8)
    for bucket in buckets(tensors, buffer, bucket_bytes, torch.float32):
        expectation.add(bucket)
    return expectation


def sha(*tensors: torch.Tensor) -> str:
    return hashlib.sha256(b"".join(tensor.numpy().tobytes() for tensor in tensors)).hexdigest()[:16]


@pytest.mark.parametrize("order", ["qkv", "vkq", "kqv"])
@pytest.mark.parametrize("bucket_bytes", [16, 4096])
def test_fused_parameters_are_hashed_in_their_own_order(order: str, bucket_bytes: int) -> None:
    part = {letter: torch.randn(2, 2) for letter in "qkv"}
    tensors = [(f"{PREFIX}{letter}_proj.weight", part[letter]) for letter in order]
    found = expected(*tensors, bucket_bytes=bucket_bytes).checksums()
    assert found == {f"{PREFIX}qkv_proj.weight": sha(part["q"], part["k"], part["v"])}


def test_rows_of_the_vocabulary_are_padded_and_other_names_are_kept() -> None:
    embedding, norm, bias = torch.randn(65, 2), torch.randn(2), torch.randn(3)
    gate, up = torch.randn(3, 2), torch.randn(3, 2)
    assert expected(
        ("model.embed_tokens.weight", embedding),
        ("model.norm.weight", norm),
        ("model.layers.1.mlp.gate_proj.weight", gate),
        ("model.layers.1.mlp.up_proj.weight", up),
        ("model.layers.1.mlp.down_proj.bias", bias),
        ("scale", bias),
    ).checksums() == {
        "model.embed_tokens.weight": sha(embedding, torch.zeros(63, 2)),
        "model.norm.weight": sha(norm),
        "model.layers.1.mlp.gate_up_proj.weight": sha(gate, up),
        "model.layers.1.mlp.down_proj.bias": sha(bias),
        "scale": sha(bias),
    }


class AnswersChecksums:
    """A server of which only the checksums count: those that a broken one answers, too."""

    def __init__(self, name: str, checksums: Mapping[str, str], device: str = "cpu") -> None:
        self.url = f"http://{name}"
        self._checksums, self._device = checksums, device

    async def post(self, path: str, body: Mapping[str, Any], *, timeout: float | None) -> Any:
        place = {"role": "target", "tp_rank": 0, "pp_rank": 0}
        return {"success": True, "ranks": [{"checksums": self._checksums, "parallelism_info": [place]}]}

    async def info(self) -> Any:
        return SimpleNamespace(device=self._device, tensor_parallel=1)


async def compared(expectation: Expectation, *servers: AnswersChecksums) -> tuple[str, dict[str, str]]:
    update = Update(servers, 3, 1.0)
    kind = await compare(update, expectation)
    assert {server.url for server in update.servers} | update.faults.keys() == {server.url for server in servers}
    return kind, {url.removeprefix("http://"): str(fault) for url, fault in update.faults.items()}


NORM = ("norm.weight", torch.ones(2))
RIGHT = sha(NORM[1])


async def test_each_server_is_held_to_what_was_sent() -> None:
    good, bad = AnswersChecksums("good", {"norm.weight": RIGHT}), AnswersChecksums("bad", {"norm.weight": "0"})
    kind, faults = await compared(expected(NORM), good, bad)
    assert kind == "sent"
    assert list(faults) == ["bad"] and "1 parameters differ from what was sent: norm.weight" in faults["bad"]


async def test_another_layout_or_device_is_compared_among_servers_and_the_odd_one_out_is_to_blame() -> None:
    for name, device in (("experts.w13", "cpu"), ("norm.weight", "cuda")):
        servers = [AnswersChecksums(str(i), {name: "b" if i == 1 else "a"}, device) for i in range(3)]
        kind, faults = await compared(expected(NORM), *servers)
        assert kind == "servers"
        assert list(faults) == ["1"] and f"differ from those of the other servers: target/0/0:{name}" in faults["1"]


async def test_without_a_majority_all_are_to_blame_and_one_server_alone_is_compared_with_nothing() -> None:
    servers = [AnswersChecksums(value, {"experts.w13": value}) for value in "ab"]
    kind, faults = await compared(expected(NORM), *servers)
    assert (kind, list(faults)) == ("servers", ["a", "b"])
    assert await compared(expected(NORM), servers[0]) == ("none", {})


async def test_a_tied_head_need_not_be_a_parameter_of_the_server() -> None:
    head = ("lm_head.weight", torch.ones(64, 1))
    assert await compared(expected(NORM, head), AnswersChecksums("a", {"norm.weight": RIGHT})) == ("sent", {})
