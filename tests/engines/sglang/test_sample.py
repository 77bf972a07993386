"""What is told of servers whose parameters are not what they were sent, where checksums are not known beforehand."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence

import pytest
import torch

from agentrl.engines.servers.client import ServerFailed, WeightChecksums
from agentrl.engines.sglang.sample import WeightSample

NORM, HEAD = "model.norm.weight", "lm_head.weight"
ATTENTION = [f"model.layers.0.self_attn.{letter}_proj.weight" for letter in "qkv"]
FUSED = "model.layers.0.self_attn.qkv_proj.weight"


class OnGpus:
    """A server of two ranks that halves what it is sent, and hashes the halves in a way of its own."""

    def __init__(self, name: str = "a") -> None:
        self.url = f"http://{name}"
        self.held: dict[str, torch.Tensor] = {"rotary": torch.ones(2)}
        self.asked: list[str] = []
        self.refuses: Exception | None = None
        self.quantized = False

    def take(self, sent: Mapping[str, torch.Tensor], *, but: str = "") -> None:
        parts = [sent[name] for name in ATTENTION if name in sent and name != but]
        whole = {name: tensor.clone() for name, tensor in sent.items() if name not in (but, HEAD, *ATTENTION)}
        self.held |= whole | ({FUSED: torch.cat(parts)} if len(parts) == 3 else {})

    async def weight_checksums(self, timeout: float, leave_out: Sequence[str] = ()) -> WeightChecksums:
        if self.refuses is not None:
            raise self.refuses
        kept = {name: held for name, held in self.held.items() if not any(one in name for one in leave_out)}
        self.asked = sorted(kept)

        def ranks(rank: int) -> dict[str, str]:
            return {name: hashlib.md5(held.chunk(2)[rank].numpy().tobytes()).hexdigest() for name, held in kept.items()}

        return WeightChecksums({f"target/{rank}/0": ranks(rank) for rank in (0, 1)}, False, self.quantized)


def drawn(version: int) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(version)
    return {name: torch.randn(4, 2, generator=generator) for name in (NORM, HEAD, *ATTENTION)}


class Comparing:
    """A sample, its servers, and what was told."""

    def __init__(self, *servers: OnGpus) -> None:
        self.servers, self.told = servers, list[str]()
        self.sample, self.compared = WeightSample(torch.float32, self.told.append), list[int]()

    async def update(self, version: int, *, names: Sequence[str] = (), **but: str) -> list[str]:
        """Send all weights, each server's without one, and say where those of `names` (all) are found to differ."""
        sent = drawn(version)
        for server in self.servers:
            server.take(sent, but=but.get(server.url.removeprefix("http://"), ""))
        chosen = {name: tensor for name, tensor in sent.items() if not names or name in names}
        found = await self.sample.compare(self.servers, chosen, sent.keys())  # type: ignore[arg-type]
        self.compared.append(found.compared)
        return [one.place for one in found.differences]


async def test_sound_servers_are_right_whatever_is_sent_again() -> None:
    both = Comparing(OnGpus("a"), OnGpus("b"))
    assert [await both.update(version) for version in (1, 2, 2, 3, 1)] == [[]] * 5
    assert both.told == []
    # The first answer to a parameter on a GPU has nothing that it could be held against but the other server's.
    assert both.compared == [2, 4, 4, 4, 4]


@pytest.mark.parametrize(("lost", "place"), [(NORM, NORM), (ATTENTION[1], FUSED)])
async def test_a_tensor_that_one_server_was_not_sent_is_named_until_it_is_there(lost: str, place: str) -> None:
    both = Comparing(OnGpus("a"), OnGpus("b"))
    assert await both.update(1) == []
    assert await both.update(2, b=lost) == [f"{place} at http://b"]
    assert await both.update(3, b=lost) == [f"{place} at http://b"]
    assert await both.update(4) == []


async def test_one_server_alone_is_held_against_its_own_past() -> None:
    one = Comparing(OnGpus())
    assert await one.update(1) == []
    assert await one.update(2, a=NORM) == [f"{NORM} at http://a"]
    assert await one.update(3) == []
    one.servers[0].held[NORM][0, 0] += 1
    assert await one.update(3, a=NORM) == [f"{NORM} at http://a"], "it changed, and nothing new was sent"


async def test_only_the_sample_is_asked_for_and_what_servers_do_not_have_is_chosen_no_more() -> None:
    one = Comparing(server := OnGpus())
    server.held[f"draft.{NORM}"] = torch.ones(2)
    await one.update(1, names=[NORM, HEAD])
    assert server.asked == [f"draft.{NORM}", NORM, "rotary"]
    assert one.sample.held_in(HEAD) is None and {one.sample.held_in(name) for name in ATTENTION} == {FUSED}
    await one.update(2, names=ATTENTION)
    assert server.asked == [FUSED]
    await one.update(3, names=[NORM])
    assert server.asked == [NORM]
    longer = {f"draft.{NORM}": server.held[f"draft.{NORM}"]}
    assert (await one.sample.compare([server], longer, [*drawn(1), *longer])).differences == []  # type: ignore[list-item]
    assert server.asked == [f"draft.{NORM}", NORM], "a name within another cannot be left out"


async def test_a_server_that_cannot_be_compared_is_told_of_once() -> None:
    one = Comparing(server := OnGpus())
    server.refuses = ServerFailed(server.url, "status 404")
    assert [await one.update(version, a=NORM) for version in (1, 2)] == [[], []]
    [told] = one.told
    assert "its weights are not compared" in told and "status 404" in told
    one = Comparing(server := OnGpus())
    server.quantized = True
    assert [await one.update(version, a=NORM) for version in (1, 2)] == [[], []]
    assert len(one.told) == 1 and "rounded" in one.told[0]
    assert one.compared == [0, 0], "a server that is not compared counts as none"
