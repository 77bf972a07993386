"""Who is to blame when the checksums of weights differ."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence

from agentrl.engines.servers.client import WeightChecksums
from agentrl.engines.servers.sync.buckets import Bucket
from agentrl.engines.servers.sync.checksum import compare
from agentrl.engines.servers.sync.update import Update


class AnswersChecksums:
    """A server of which only the checksums count: those that a broken one answers, too."""

    def __init__(self, name: str, checksums: Mapping[str, str], *, predictable: bool = True) -> None:
        self.url = f"http://{name}"
        self._answer = WeightChecksums({"target/0/0": checksums}, predictable)

    async def weight_checksums(self, timeout: float, leave_out: Sequence[str] = ()) -> WeightChecksums:
        return self._answer


class Expected:
    """Knows the parameters that it is given."""

    def __init__(self, **checksums: str) -> None:
        self._checksums = checksums

    def add(self, bucket: Bucket) -> None: ...

    def for_parameters(self, parameters: Collection[str]) -> Mapping[str, str] | None:
        return self._checksums if set(parameters) == self._checksums.keys() else None


async def compared(*servers: AnswersChecksums) -> tuple[str, dict[str, str]]:
    """Where the norm's checksum should be "right"."""
    update = Update(servers, 3, 1.0)  # type: ignore[arg-type]
    kind = await compare(update, Expected(norm="right"))
    assert {server.url for server in update.servers} | update.faults.keys() == {server.url for server in servers}
    return kind, {url.removeprefix("http://"): str(fault) for url, fault in update.faults.items()}


async def test_each_server_is_held_to_what_was_sent() -> None:
    good, bad = AnswersChecksums("good", {"norm": "right"}), AnswersChecksums("bad", {"norm": "0"})
    kind, faults = await compared(good, bad)
    assert kind == "sent"
    assert list(faults) == ["bad"] and "1 parameters differ from what was sent: norm" in faults["bad"]


async def test_another_layout_or_algorithm_is_compared_among_servers_and_the_odd_one_out_is_to_blame() -> None:
    for name, predictable in (("experts.w13", True), ("norm", False)):
        servers = [AnswersChecksums(str(i), {name: "b" if i == 1 else "a"}, predictable=predictable) for i in range(3)]
        kind, faults = await compared(*servers)
        assert kind == "servers"
        assert list(faults) == ["1"] and f"differ from those of the other servers: target/0/0:{name}" in faults["1"]


async def test_without_a_majority_all_are_to_blame_and_one_server_alone_is_compared_with_nothing() -> None:
    servers = [AnswersChecksums(value, {"experts.w13": value}) for value in "ab"]
    kind, faults = await compared(*servers)
    assert (kind, list(faults)) == ("servers", ["a", "b"])
    assert await compared(servers[0]) == ("none", {})
