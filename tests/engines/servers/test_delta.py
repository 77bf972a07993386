"""Weights of which only the changed elements are sent: the servers hold what a full update would have brought."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import cast

import pytest
import torch
from safetensors.torch import load_file

from agentrl.engines.contract import EngineError, RequestError
from agentrl.engines.servers.client import WeightChecksums, WeightReceiver
from agentrl.engines.servers.delta import GAP, DeltaReceiver, decode, differing, encode
from agentrl.engines.servers.sync import DeltaSender, DiskSender
from agentrl.engines.servers.sync.buckets import Bucket, Entry
from agentrl.engines.servers.sync.update import Comparison
from agentrl.engines.sglang.checksums import Expectation
from agentrl.engines.weights import Weights
from agentrl.system.metrics import Metrics
from tests.naming import assert_names

DTYPES = (torch.float32, torch.bfloat16)


class PlainServer:
    """A server in this process: the receiving half, and parameters that it answers the checksums of."""

    url = "http://in-this-process"

    def __init__(self, dtype: torch.dtype) -> None:
        self.held: dict[str, torch.Tensor] = {}
        self.dtype = dtype
        self.receiver = DeltaReceiver(self.load, lambda: self.held.values())

    def load(self, named: Iterable[tuple[str, torch.Tensor]]) -> None:
        for name, tensor in named:
            self.held.setdefault(name, torch.empty(tensor.shape, dtype=self.dtype)).copy_(tensor)

    async def held_weights(self, timeout: float) -> str:
        return self.receiver.held

    async def weight_checksums(self, timeout: float, leave_out: Sequence[str] = ()) -> WeightChecksums:
        expected = Expectation()
        for name, tensor in self.held.items():
            content = tensor.view(-1).view(torch.uint8)
            expected.add(Bucket([Entry(name, tuple(tensor.shape), self.dtype, 0, len(content))], content, last=False))
        return WeightChecksums({"target/0/0": expected.checksums()}, predictable=True)


class InMemory:
    """A WeightSender that calls the receiving half."""

    compared: Comparison = "none"

    def __init__(self, dtype: torch.dtype) -> None:
        self.dtype, self.bytes_sent = dtype, 0

    async def send(self, servers: Sequence[WeightReceiver], weights: Weights, version: int) -> dict[str, Exception]:
        self.bytes_sent = sum(tensor.nbytes for _, tensor in weights.read())
        for server in servers:
            cast(PlainServer, server).receiver(weights.read())
        return {}

    async def close(self) -> None:
        return


def bits(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.contiguous().view(torch.uint8)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("places", [[], [0], [1, 2], [0, 5, 9], [GAP], [3, 4 * GAP + 1]])
def test_changed_elements_come_out_where_they_went_in(dtype: torch.dtype, places: list[int]) -> None:
    old = torch.randn(5 * GAP, 1).to(dtype)
    new = old.clone()
    new[places] = 1000.0 + torch.arange(len(places)).to(dtype)[:, None]
    entry = encode(new, differing(new, old))
    assert entry is not None and entry.nbytes <= (len(places) + 6) * (dtype.itemsize + 2) + 2
    old[:] = decode(entry, (5 * GAP, 1))
    assert torch.equal(bits(old), bits(new))


def test_signs_of_zero_differ_and_equal_nans_do_not() -> None:
    old, new = torch.tensor([0.0, torch.nan, 1.0]), torch.tensor([-0.0, torch.nan, 1.0])
    assert differing(new, old).tolist() == [0]


@pytest.mark.parametrize(
    ("new", "places"),
    [
        (torch.zeros(8), [1]),  # a loader may compute with it, or fill it
        (torch.zeros(2, 3), [0, 1, 2, 3]),  # not smaller
        (torch.full((2, 8), torch.nan), [1]),
    ],
)
def test_other_tensors_are_sent_whole(new: torch.Tensor, places: list[int]) -> None:
    assert encode(new, torch.tensor(places)) is None


class Stacks:
    """A model whose loader, as those of servers do, stacks, slices, transposes and pads what it loads."""

    def __init__(self, dtype: torch.dtype) -> None:
        self.qkv, self.moved, self.head = (torch.zeros(shape, dtype=dtype) for shape in ((6, 4), (4, 3), (8, 4)))
        self.norm = torch.zeros(4, dtype=dtype)

    def parameters(self) -> list[torch.Tensor]:
        return [self.qkv, self.moved, self.head, self.norm]

    def load(self, named: Iterable[tuple[str, torch.Tensor]]) -> None:
        for name, tensor in named:
            if name in "qkv":
                self.qkv.data.narrow(0, 2 * "qkv".index(name), 2).copy_(tensor)
            elif name == "moved":
                self.moved[1:, :] = torch.cat([tensor[:, 1:], tensor[:, :1]], 1).t()
            elif name == "head":
                self.head.data[: len(tensor)].copy_(tensor)
            else:
                self.norm.copy_(tensor + 1)


def weights(dtype: torch.dtype = torch.float32, seed: int = 0) -> dict[str, torch.Tensor]:
    shapes = {"q": (2, 4), "k": (2, 4), "v": (2, 4), "moved": (3, 3), "head": (5, 4), "norm": (4,)}
    generator = torch.Generator().manual_seed(seed)
    return {name: torch.randn(shape, generator=generator).to(dtype) for name, shape in shapes.items()}


class Server:
    """A server that reads files into a model, as SGLang does; its words are those of a real half of ours."""

    def __init__(self, url: str, model: Stacks, *, able: bool = True) -> None:
        self.url, self.model, self.able = url, model, able
        self.version, self.read_bytes, self.fails = -1, 0, False
        self.restart()

    def restart(self) -> None:
        self.receiver = DeltaReceiver(self.model.load, self.model.parameters)
        for tensor in self.model.parameters():
            tensor.zero_()

    async def held_weights(self, timeout: float) -> str:
        if not self.able:
            raise RequestError("no loader")
        return self.receiver.held

    async def update_from_disk(self, folder: Path, version: int, timeout: float) -> None:
        named = {name: tensor for file in sorted(folder.iterdir()) for name, tensor in load_file(file).items()}
        self.read_bytes = sum(tensor.nbytes for tensor in named.values())
        if self.fails:
            named = dict([*named.items()][: len(named) // 2])
        (self.receiver if self.able else self.model.load)(named.items())
        if self.fails:
            raise EngineError("gone")
        self.version = version


class Fleet:
    """Servers, the sender, and what it said."""

    def __init__(self, folder: Path, dtype: torch.dtype = torch.float32, count: int = 2) -> None:
        self.servers = [Server(f"http://{number}", Stacks(dtype)) for number in range(count)]
        self.said: list[str] = []
        self.sender = DeltaSender(DiskSender(dtype, 1 << 20, folder), notify=self.said.append)
        self.version = 0

    async def send(self, new: dict[str, torch.Tensor], *servers: Server) -> dict[str, Exception]:
        self.version += 1
        chosen = cast(list[WeightReceiver], servers or self.servers)
        return await self.sender.send(chosen, Weights.from_tensors(new.items()), self.version)

    def expect(self, new: dict[str, torch.Tensor], *servers: Server) -> None:
        for server in servers or self.servers:
            wanted = Stacks(server.model.qkv.dtype)
            wanted.load((name, tensor.to(wanted.qkv.dtype)) for name, tensor in new.items())
            for own, other in zip(server.model.parameters(), wanted.parameters(), strict=True):
                assert torch.equal(bits(own), bits(other))
            assert server.version == self.version

    def numbers(self) -> dict[str, float]:
        metrics = Metrics()
        self.sender.add_metrics(metrics)
        return dict(metrics)


async def test_only_changes_travel_and_a_loader_puts_them_into_place(tmp_path: Path) -> None:
    fleet, new = Fleet(tmp_path / "w"), weights()
    assert await fleet.send(new) == {}
    fleet.expect(new)
    assert fleet.numbers() == {"delta_changed_share": 1.0, "delta_full": 2.0, "delta_full_first": 2.0}
    whole = fleet.sender.bytes_sent
    for step in range(5):
        new["q"][0, step % 4] = step + 0.5
        new["moved"][2, step % 3] = -0.0
        new["head"][4, 0] = step
        assert await fleet.send(new) == {}
        fleet.expect(new)
        assert fleet.sender.bytes_sent < whole / 2
    assert fleet.numbers()["delta_full"] == 2.0
    assert fleet.numbers()["delta_changed_share"] == pytest.approx(2 / 57)  # one was set before
    assert fleet.said == []


async def test_an_update_below_the_precision_of_servers_sends_marks_only(tmp_path: Path) -> None:
    fleet, new = Fleet(tmp_path / "w", torch.bfloat16), {name: 1 + tensor for name, tensor in weights().items()}
    await fleet.send(new)
    for tensor in new.values():
        tensor.copy_(tensor.bfloat16().float() * (1 + 2.0**-20))
    assert await fleet.send(new) == {}
    fleet.expect(new)
    assert fleet.sender.bytes_sent == 2 * 2
    assert fleet.numbers()["delta_changed_share"] == 0.0


async def test_waves_of_one_version_both_get_the_changes(tmp_path: Path) -> None:
    fleet, new = Fleet(tmp_path / "w"), weights()
    await fleet.send(new)
    new["k"][1, 1] = 9.0
    first, second = fleet.servers
    await fleet.send(new, first)
    fleet.version -= 1
    await fleet.send(new, second)
    fleet.expect(new)
    assert fleet.numbers()["delta_full"] == 2.0 and fleet.numbers()["delta_changed_share"] == pytest.approx(1 / 57)


async def test_servers_without_the_base_are_sent_all_weights_and_that_is_said_once(tmp_path: Path) -> None:
    fleet, new = Fleet(tmp_path / "w", count=4), weights()
    kept, restarted, late, unable = fleet.servers
    unable.able = False
    await fleet.send(new)
    for step in range(3):
        restarted.restart()
        new["v"][0, step] = step
        await fleet.send(new, kept, restarted, unable)
        fleet.expect(new, kept, restarted, unable)
        assert kept.read_bytes < restarted.read_bytes
    await fleet.send(new)  # `late` missed three versions
    fleet.expect(new)
    counts = fleet.numbers()
    assert counts.pop("delta_changed_share") == 0.0
    assert counts == {"delta_full": 12.0, "delta_full_first": 3.0, "delta_full_lost": 4.0, "delta_full_unable": 5.0}
    assert len(fleet.said) == 3
    assert sum("takes no delta weights" in line and "no loader" in line for line in fleet.said) == 1
    assert sum("does not hold the weights" in line and restarted.url in line for line in fleet.said) == 1
    assert sum("does not hold the weights" in line and late.url in line for line in fleet.said) == 1


async def test_a_server_that_broke_off_in_an_update_is_sent_all_weights(tmp_path: Path) -> None:
    fleet, new = Fleet(tmp_path / "w"), weights()
    good, bad = fleet.servers
    await fleet.send(new)
    new["q"][0, 0], bad.fails = 7.0, True
    assert list(await fleet.send(new)) == [bad.url]
    fleet.expect(new, good)
    bad.fails = False
    new["q"][0, 1] = 8.0
    assert await fleet.send(new) == {}
    fleet.expect(new)
    assert good.read_bytes < bad.read_bytes


async def test_too_many_changes_are_a_full_update(tmp_path: Path) -> None:
    fleet = Fleet(tmp_path / "w", count=1)
    await fleet.send(weights())
    await fleet.send(weights(seed=1))
    fleet.expect(weights(seed=1))
    assert fleet.numbers()["delta_full_changed"] == 1.0 and "100% of the elements changed" in fleet.said[0]


async def test_a_reader_that_fails_leaves_nothing_to_build_on(tmp_path: Path) -> None:
    fleet, new = Fleet(tmp_path / "w", count=1), weights()
    await fleet.send(new)
    new["q"][0, 0] = new["head"][0, 0] = 5.0

    def read() -> Iterator[tuple[str, torch.Tensor]]:
        yield from [*new.items()][:3]
        raise RuntimeError("a gather failed")

    shapes = {name: tuple(tensor.shape) for name, tensor in new.items()}
    with pytest.raises(RuntimeError, match="a gather failed"):
        await fleet.sender.send(cast(list[WeightReceiver], fleet.servers), Weights(shapes, read), 2)
    assert await fleet.send(new) == {}
    fleet.expect(new)


async def test_changes_of_other_weights_than_a_server_holds_are_refused(tmp_path: Path) -> None:
    """Another trainer has sent the server weights in the meantime, after it was asked."""
    fleet, new = Fleet(tmp_path / "w", count=1), weights()
    [server] = fleet.servers
    await fleet.send(new)
    new["q"][0, 0] = 5.0
    held, server.receiver.held = server.receiver.held, "another"
    asked: list[str] = []

    async def held_weights(timeout: float) -> str:
        asked.append(server.receiver.held)
        return held if len(asked) == 1 else server.receiver.held

    server.held_weights = held_weights  # type: ignore[method-assign]
    assert await fleet.send(new) == {}
    assert asked == ["another", ""]
    fleet.expect(new)
    assert fleet.numbers()["delta_full_lost"] == 1.0


async def test_a_model_that_does_not_copy_its_weights_takes_none_of_them(tmp_path: Path) -> None:
    model = Stacks(torch.float32)
    holder: dict[str, torch.Tensor] = {}
    receiver = DeltaReceiver(holder.update, lambda: holder.values())
    fleet, new = Fleet(tmp_path / "w", count=1), weights()
    fleet.servers = [Server("http://a", model)]
    fleet.servers[0].receiver = receiver
    await fleet.send(new)
    assert receiver.held and receiver.works is None
    new["q"][0, 0] = 5.0
    await fleet.send(new)
    assert receiver.works is False and receiver.held == ""
    assert all(torch.equal(holder[name], tensor) for name, tensor in new.items())


@pytest.mark.parametrize("dtype", DTYPES)
async def test_updates_of_a_policy_are_what_full_updates_bring(dtype: torch.dtype) -> None:
    await follow(dtype, 10)


@pytest.mark.slice(0, "long run")
@pytest.mark.parametrize("dtype", DTYPES)
async def test_200_updates_of_a_policy_are_what_full_updates_bring(dtype: torch.dtype) -> None:
    await follow(dtype, 200)


async def follow(dtype: torch.dtype, updates: int) -> None:
    """By AdamW in float32, at a rate of fine-tuning; each is compared by the checksum of every parameter."""
    generator = torch.Generator().manual_seed(0)
    shapes: dict[str, tuple[int, ...]] = {
        "embed_tokens.weight": (500, 32),
        "q_proj.weight": (32, 32),
        "up_proj.weight": (96, 32),
    }
    shapes |= {"down_proj.weight": (32, 96), "norm.weight": (32,)}
    policy = {name: torch.randn(shape, generator=generator) * 0.02 for name, shape in shapes.items()}
    optimizer = torch.optim.AdamW(policy.values(), lr=1e-6, weight_decay=0.0)
    server = PlainServer(dtype)
    sender = DeltaSender(InMemory(dtype), Expectation)
    whole = sum(tensor.numel() for tensor in policy.values()) * dtype.itemsize
    for version in range(updates + 1):
        assert (
            await sender.send(cast(list[WeightReceiver], [server]), Weights.from_tensors(policy.items()), version) == {}
        )
        assert sender.compared == "sent"
        assert all(torch.equal(bits(server.held[name]), bits(tensor.to(dtype))) for name, tensor in policy.items())
        if dtype is torch.bfloat16 and version:
            assert sender.bytes_sent < 0.3 * whole
        for tensor in policy.values():
            tensor.grad = torch.randn(tensor.shape, generator=generator) * 1e-3
        optimizer.step()
    metrics = Metrics()
    sender.add_metrics(metrics)
    assert metrics["delta_full"] == (1 if dtype is torch.bfloat16 else 1 + updates)


class Flipped(PlainServer):
    """A server that answers the checksums of other weights than it has."""

    flipped = False

    async def weight_checksums(self, timeout: float, leave_out: Sequence[str] = ()) -> WeightChecksums:
        answer = await super().weight_checksums(timeout, leave_out)
        others = {"q": "0"} if self.flipped else {}
        return WeightChecksums({rank: {**sums, **others} for rank, sums in answer.ranks.items()}, predictable=True)


async def test_a_server_with_other_weights_than_it_was_sent_is_found_and_sent_all() -> None:
    server, new, inner = Flipped(torch.float32), weights(), InMemory(torch.float32)
    sender, servers = DeltaSender(inner, Expectation), cast(list[WeightReceiver], [server])
    await sender.send(servers, Weights.from_tensors(new.items()), 1)
    new["q"][0, 0], server.flipped = 4.0, True
    [fault] = (await sender.send(servers, Weights.from_tensors(new.items()), 2)).values()
    assert_names(fault, "1 parameters")
    server.flipped = False
    assert await sender.send(servers, Weights.from_tensors(new.items()), 2) == {}
    assert sender.bytes_sent > sum(tensor.nbytes for tensor in new.values())
