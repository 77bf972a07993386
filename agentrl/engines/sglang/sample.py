"""A sample of the parameters that SGLang's servers hold, compared with the sent weights.

On a CPU a checksum is known beforehand (see `Expectation`). On a GPU it is another hash, of a part of the parameter on
each rank. Then it must change exactly when the sent weight changes, and be the same at all servers.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import TypeAlias

import torch

from agentrl.engines.contract import EngineError, RequestError
from agentrl.engines.inspection import Comparison, Difference
from agentrl.engines.servers.client import ServerClient, WeightChecksums
from agentrl.engines.servers.sync.buckets import buckets, buffer_bytes
from agentrl.engines.sglang.checksums import Expectation, parameter_of

TIMEOUT = 60.0
"""Seconds that a server has for the checksums of a sample."""
Held: TypeAlias = tuple[str, ...]
"""Checksums of one parameter, of each rank that has it or a part of it."""


class WeightSample:
    """Knows the parameters of servers that are not sent, and the last checksums.

    `notify` gets the reason, once for each server, why its weights are not compared.
    """

    def __init__(self, dtype: torch.dtype, notify: Callable[[str], None]) -> None:
        self._dtype = dtype
        self._notify = notify
        self._others: set[str] = set()
        """Parameters of servers that no weight is sent for under their name; their checksums are not asked for."""
        self._absent: set[str] = set()
        """Names of parameters that no server has."""
        self._known: dict[str, tuple[str, Held]] = {}
        """By parameter, the sent weight's checksum and the servers' answers, when both were last found right."""
        self._silent: set[str] = set()
        """Servers that were not compared."""

    def held_in(self, name: str) -> str | None:
        parameter, _ = parameter_of(name)
        return None if parameter in self._absent else parameter

    async def compare(
        self, servers: Sequence[ServerClient], sent: Mapping[str, torch.Tensor], names: Collection[str]
    ) -> Comparison:
        """Compare weights [S] as `InspectableEngine.compare` says, without servers that do not answer."""
        wanted = self._checksums(sent)
        unasked = {parameter_of(name)[0] for name in names} - wanted.keys()
        # What holds one of these in its name is left out.
        left_out = [one for one in sorted(unasked | self._others) if not any(one in name for name in wanted)]
        answers = await asyncio.gather(*[self._ask(server, left_out) for server in servers])
        found, compared = list[Difference](), 0
        for server, answer in zip(servers, answers, strict=True):
            if answer is None:
                continue
            held: dict[str, Held] = {}
            for rank in sorted(answer.ranks):
                for name, value in answer.ranks[rank].items():
                    held[name] = (*held.get(name, ()), value)
            self._others |= held.keys() - wanted.keys() - unasked
            self._absent |= wanted.keys() - held.keys()
            for parameter in sorted(wanted.keys() & held.keys()):
                is_right = self._is_right(parameter, wanted[parameter], held[parameter])
                compared += is_right is not None
                if is_right is False:
                    found.append(Difference(parameter, f"{parameter} at {server.url}"))
        return Comparison(compared, found)

    def _checksums(self, sent: Mapping[str, torch.Tensor]) -> dict[str, str]:
        """Compute the checksums of parameters as SGLang's servers do on a CPU."""
        expected = Expectation()
        for name, tensor in sent.items():
            size = buffer_bytes({name: tuple(tensor.shape)}, self._dtype, 0)
            for bucket in buckets([(name, tensor)], torch.empty(size, dtype=torch.uint8), size, self._dtype):
                expected.add(bucket)
        return expected.checksums()

    async def _ask(self, server: ServerClient, left_out: Sequence[str]) -> WeightChecksums | None:
        why = "it holds them rounded"
        try:
            answer = await server.weight_checksums(TIMEOUT, left_out)
            if not answer.quantized:
                return answer
        except (EngineError, RequestError) as error:
            why = str(error)
        if server.url not in self._silent:
            self._silent.add(server.url)
            self._notify(f"{server.url}: its weights are not compared with those that it was sent: {why}")
        return None

    def _is_right(self, parameter: str, wanted: str, held: Held) -> bool | None:
        """Judge one server's parameter, and remember it where it is right. None: there is nothing to judge it by."""
        before = self._known.get(parameter)
        if held != (wanted,) and before is not None:
            last, answered = before
            if answered == (last,) or (last == wanted) != (answered == held):
                return False
        self._known[parameter] = wanted, held
        return True if held == (wanted,) or before is not None else None
