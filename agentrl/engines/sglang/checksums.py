"""Predicts the checksums that an SGLang server on a CPU answers for its parameters.

On a CPU SGLang's checksum of a parameter is the beginning of the SHA-256 of its bytes. It is predicted for models whose
parameters SGLang lays out as described here; on a GPU it is another hash, and several ranks hold a part each.
"""

from __future__ import annotations

import hashlib
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from agentrl.engines.servers.sync.buckets import Bucket

if TYPE_CHECKING:
    from hashlib import _Hash as Digest

VOCABULARY_MULTIPLE = 64
"""SGLang pads the rows of embeddings and of the head with zeros to a multiple of this."""

FUSED: Mapping[str, tuple[str, int]] = {
    "q_proj": ("qkv_proj", 0),
    "k_proj": ("qkv_proj", 1),
    "v_proj": ("qkv_proj", 2),
    "gate_proj": ("gate_up_proj", 0),
    "up_proj": ("gate_up_proj", 1),
}
"""SGLang stacks the rows of several tensors in one parameter: by tensor, the parameter and the tensor's place in it."""


def parameter_of(name: str) -> tuple[str, int]:
    """Return the name of SGLang's parameter that holds a tensor, and the tensor's place in it."""
    *path, module, kind = ["", *name.split(".")]
    fused, part = FUSED.get(module, (module, 0))
    return ".".join([*path, fused, kind]).lstrip("."), part


class Expectation:
    """Implements `ExpectedChecksums` for a server on a CPU with one rank."""

    def __init__(self) -> None:
        self._hashes: dict[str, _Parameter] = {}

    def add(self, bucket: Bucket) -> None:
        for entry in bucket.entries:
            name, part = parameter_of(entry.name)
            content = bucket.data[entry.start : entry.end].cpu().numpy().tobytes()
            padding = 0
            if name.split(".")[-2:-1] in (["embed_tokens"], ["lm_head"]):
                rows = entry.shape[0]
                padding = -rows % VOCABULARY_MULTIPLE * (len(content) // rows)
            self._hashes.setdefault(name, _Parameter()).add(part, content + bytes(padding))

    def for_parameters(self, parameters: Collection[str]) -> Mapping[str, str] | None:
        """See `ExpectedChecksums.for_parameters`.

        A head that is tied to the embedding is no parameter of SGLang's, but may have been sent.
        """
        checksums = self.checksums()
        theirs, ours = set(parameters), checksums.keys()
        same = theirs | {"lm_head.weight"} == ours | {"lm_head.weight"} and theirs <= ours
        return checksums if same else None

    def checksums(self) -> dict[str, str]:
        """Return the checksums of complete parameters by SGLang's names."""
        return {name: state.hash.hexdigest()[:16] for name, state in self._hashes.items() if not state.waiting}


@dataclass(slots=True)
class _Parameter:
    hash: Digest = field(default_factory=hashlib.sha256)
    turn: int = 0
    waiting: dict[int, bytes] = field(default_factory=dict)
    """Parts that came before their turn."""

    def add(self, part: int, content: bytes) -> None:
        self.waiting[part] = content
        while self.turn in self.waiting:
            self.hash.update(self.waiting.pop(self.turn))
            self.turn += 1
