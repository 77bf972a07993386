"""Keys for how the ranks of one role share its work, and the sizes that follow from them. Importable without torch."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Annotated, Literal

from pydantic import Field

from agentrl.config.rules import OnlyWith
from agentrl.config.section import Section
from agentrl.errors import ConfigError

RANKS = OnlyWith("trainer.nnodes above 1", "trainer.n_gpus_per_node above 1", off=(1, -1))
DEVICE = OnlyWith("trainer.device=cuda or auto")


MicroBatch = Literal["auto"] | Annotated[int, Field(gt=0)]
"""Tokens of a micro-batch, at most; auto: the plan chooses (`agentrl.plan.choices`)."""
MICRO_BATCH = 16384


def most_tokens(value: MicroBatch) -> int:
    """Return the tokens of a micro-batch; with auto the default's, until the plan has chosen."""
    return MICRO_BATCH if value == "auto" else value


class FSDPConfig(Section):
    """`*.fsdp_config.*`"""

    fsdp_size: Annotated[Literal[-1] | Annotated[int, Field(gt=0)], RANKS] = -1
    """Ranks over which the parameters are sharded; the next group of so many holds a copy (hybrid sharding). -1: all
    ranks. The ranks of tensor_parallel_size are not counted: they split each shard further."""
    tensor_parallel_size: Annotated[int, RANKS] = Field(1, gt=0)
    """Ranks that split each layer's matrices, and attention by heads. Not with LoRA."""


class ActorFSDPConfig(FSDPConfig):
    """`actor_rollout_ref.actor.fsdp_config.*`, and `model.fsdp_config.*` of `python -m agentrl.sft`"""

    param_offload: Annotated[bool, DEVICE] = False
    """While a role (policy, reference, critic) does not work, its parameters are in host memory and not on its device;
    between its steps the optimizer's state, too."""


@dataclass(frozen=True, slots=True)
class Parallel:
    """The ranks of a role: data x sequence x tensor, tensor innermost.

    The sequence x tensor neighbours of one block are given the same sequences; parameters are sharded over data x
    sequence ranks.
    """

    sequence: int = 1
    tensor: int = 1
    shards: int | None = None
    """Number of the data x sequence ranks that hold the parameters between them; None: all."""

    @property
    def copies(self) -> int:
        """Neighbouring ranks that are given the same sequences."""
        return self.sequence * self.tensor

    @staticmethod
    def from_fsdp(sequence: int, fsdp: FSDPConfig) -> Parallel:
        """Read a role's keys."""
        return Parallel(sequence, fsdp.tensor_parallel_size, None if fsdp.fsdp_size == -1 else fsdp.fsdp_size)

    def faults(self, ranks: int, section: str, fsdp_config: str = "fsdp_config") -> Iterator[str]:
        """Say why `ranks` cannot be arranged so; `section` (with its dot) and `fsdp_config`: where the keys are."""
        if ranks % self.copies:
            yield (
                f"{section}ulysses_sequence_parallel_size={self.sequence} x {section}{fsdp_config}."
                f"tensor_parallel_size={self.tensor} must divide the {ranks} ranks of the role"
            )
        elif self.shards is not None and (ranks // self.tensor) % self.shards:
            beside = "" if self.tensor == 1 else f" / tensor_parallel_size={self.tensor}"
            yield (
                f"{section}{fsdp_config}.fsdp_size={self.shards} must divide the {ranks} ranks of the role{beside}; "
                "-1 shards over all"
            )

    def check_heads(self, queries: int, keys: int) -> None:
        """Raise ConfigError when a model's attention heads cannot be handed out over the ranks."""
        if self.tensor > 1 and (queries % self.tensor or keys % self.tensor):
            raise ConfigError(
                f"fsdp_config.tensor_parallel_size={self.tensor} must divide the model's {queries} attention heads and "
                f"its {keys} heads of keys and values"
            )
        if queries // self.tensor % self.sequence:
            beside = "" if self.tensor == 1 else f" / tensor_parallel_size={self.tensor}"
            raise ConfigError(
                f"ulysses_sequence_parallel_size={self.sequence} must divide the model's {queries} attention heads"
                f"{beside}"
            )
