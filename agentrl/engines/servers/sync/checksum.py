"""Did the weights arrive as they were sent? Every server is asked for checksums of the parameters that it has.

On a CPU SGLang's checksum of a parameter is the beginning of the SHA-256 of its bytes, which `Expectation` can tell
beforehand for models whose parameters it knows how SGLang lays out; then every byte is held to what was sent. Otherwise
(hash on a GPU, several ranks, other layouts) servers are compared with one another.
"""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from agentrl.engines.contract import EngineError
from agentrl.engines.servers.sync.buckets import Bucket
from agentrl.engines.servers.sync.update import Comparison, Server, Update

VOCABULARY_MULTIPLE = 64
"""SGLang pads the rows of embeddings and of the head with zeros to a multiple of this."""

FUSED: Mapping[str, tuple[str, int]] = {
    "q_proj": ("qkv_proj", 0),
    "k_proj": ("qkv_proj", 1),
    "v_proj": ("qkv_proj", 2),
    "gate_proj": ("gate_up_proj", 0),
    "up_proj": ("gate_up_proj", 1),
}
"""Rows of several tensors are one parameter of SGLang's: its name, and which of its parts a tensor is."""


class Expectation:
    """The checksums that a server on a CPU must answer, taken while buckets are sent."""

    def __init__(self) -> None:
        self._hashes: dict[str, _Hash] = {}

    def add(self, bucket: Bucket) -> None:
        """Take note of a bucket before it is sent."""
        for entry in bucket.entries:
            *path, module, kind = ["", *entry.name.split(".")]
            fused, part = FUSED.get(module, (module, 0))
            name = ".".join([*path, fused, kind]).lstrip(".")
            content = bucket.data[entry.start : entry.end].cpu().numpy().tobytes()
            padding = 0
            if module in ("embed_tokens", "lm_head"):
                rows = entry.shape[0]
                padding = -rows % VOCABULARY_MULTIPLE * (len(content) // rows)
            self._hashes.setdefault(name, _Hash()).add(part, content + bytes(padding))

    def checksums(self) -> dict[str, str]:
        """By SGLang's parameter name."""
        return {name: state.hash.hexdigest()[:16] for name, state in self._hashes.items() if not state.waiting}


@dataclass(slots=True)
class _Hash:
    hash: Any = field(default_factory=hashlib.sha256)
    turn: int = 0
    waiting: dict[int, bytes] = field(default_factory=dict)
    """Parts that came before their turn."""

    def add(self, part: int, content: bytes) -> None:
        self.waiting[part] = content
        while self.turn in self.waiting:
            self.hash.update(self.waiting.pop(self.turn))
            self.turn += 1


async def compare(update: Update, expectation: Expectation) -> Comparison:
    """Ask all servers that are still in the update; those whose weights differ are dropped from it with a fault."""
    answers: dict[str, dict[str, str]] = {}
    exact: dict[str, bool] = {}
    expected = expectation.checksums()

    async def ask(server: Server) -> None:
        answer = await update.post_one(server, "/weights_checker", {"action": "checksum"})
        try:
            ranks = answer["ranks"]
            sums = {_key(rank, name): value for rank in ranks for name, value in rank["checksums"].items()}
        except (KeyError, IndexError, TypeError) as error:
            raise EngineError(f"{server.url}: /weights_checker: unexpected answer {answer!r:.500}") from error
        answers[server.url] = sums
        plain = (await server.info()).device == "cpu" and len(ranks) == 1
        exact[server.url] = plain and _same_layout(
            {name for rank in ranks for name in rank["checksums"]}, set(expected)
        )

    await update.each("checksum", ask)
    if not answers:
        return "none"
    if all(exact.values()):
        for server in list(update.servers):
            sums = {key.partition(":")[2]: value for key, value in answers[server.url].items()}
            _fail_if(update, server, [n for n, value in sums.items() if expected[n] != value], "what was sent")
        return "sent"
    majority = _majority(answers)
    for server in list(update.servers):
        sums = answers[server.url]
        differing = [key for key in sums.keys() | majority.keys() if sums.get(key) != majority.get(key)]
        _fail_if(update, server, differing, "those of the other servers")
    return "servers" if len(answers) > 1 else "none"


def _same_layout(theirs: set[str], ours: set[str]) -> bool:
    """A head that is tied to the embedding is no parameter of SGLang's, but may have been sent."""
    return theirs | {"lm_head.weight"} == ours | {"lm_head.weight"} and theirs <= ours


def _majority(answers: Mapping[str, Mapping[str, str]]) -> dict[str, str | None]:
    """The value of each parameter that more than half of the servers have; None where there is none."""
    majority: dict[str, str | None] = {}
    for key in {key for sums in answers.values() for key in sums}:
        value, count = Counter(sums.get(key, "") for sums in answers.values()).most_common(1)[0]
        majority[key] = value if 2 * count > len(answers) else None
    return majority


def _fail_if(update: Update, server: Server, differing: list[str], other: str) -> None:
    if differing:
        names = ", ".join(sorted(differing)[:5])
        message = f"{server.url}: {len(differing)} parameters differ from {other}: {names}"
        update.fail(server, "checksum", EngineError(message))


def _key(rank: Mapping[str, Any], name: str) -> str:
    place = rank["parallelism_info"][0]
    return f"{place['role']}/{place['tp_rank']}/{place['pp_rank']}:{name}"
