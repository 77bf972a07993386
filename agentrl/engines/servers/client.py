"""The client of one server: the interface that an engine over servers needs and each server software implements."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Literal, Protocol

from agentrl.engines.contract import EngineError, Generation, Listener, PauseMode, SamplingParams
from agentrl.trajectory import PlacedImage

if TYPE_CHECKING:
    from pathlib import Path

    from agentrl.engines.servers.sync.buckets import Bucket

Memory = Literal["kv_cache", "weights"]
"""A part of a server's device memory that can be freed and restored."""


class ServerFailed(EngineError):
    """A server is at fault: it cannot be reached, broke off, or its answer makes no sense."""

    def __init__(self, url: str, reason: str, status: int | None = None) -> None:
        """`status`: of its answer."""
        super().__init__(f"{url}: {reason}")
        self.url = url
        self.status = status


class WrongServer(ServerFailed):
    """A server answers, and will not serve agentrl however long one waits: other software, or missing arguments."""


@dataclass(frozen=True, slots=True)
class ServerInfo:
    """A server's model and settings, as the server reports them."""

    model_path: str
    architecture: str | None
    """Class name of the model."""
    context_length: int
    tensor_parallel: int
    """Number of ranks that the model is split over."""
    weight_version: str
    deterministic: bool
    """True if it honours seeds."""
    incremental: bool
    """True if it streams new tokens only."""
    device: str
    """cpu or cuda."""
    quantized: bool = False
    """True if it holds weights in another form than they are sent in, by rounding."""
    plans_ahead: bool = False
    """True if a pause can leave tokens open that the weights before it sampled."""
    max_lora_rank: int = 0
    """Largest rank of adapters that it serves; 0: it serves none."""


@dataclass(slots=True)
class PartialAnswer:
    """Tokens of an answer that have arrived so far."""

    ids: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    weight_version: str | None = None
    """Version of the server's weights when it sent the last tokens, as the server reports it."""
    listener: Listener | None = None
    """Hears the tokens as they arrive."""


@dataclass(frozen=True, slots=True)
class GroupInvitation:
    """Invitation of a server to the torch.distributed group of a weight broadcast."""

    name: str
    backend: Literal["gloo", "nccl"]
    address: str
    """Address of rank 0, which holds the TCP store where the ranks meet."""
    port: int
    first_rank: int
    """Rank of the server's first rank within the group."""
    world_size: int


@dataclass(frozen=True, slots=True)
class WeightChecksums:
    """Checksums of the parameters that a server holds."""

    ranks: Mapping[str, Mapping[str, str]]
    """By rank, then by the server's own parameter name."""
    predictable: bool
    """Computed by the algorithm that `ExpectedChecksums` repeats."""
    quantized: bool = False
    """The server rounds its weights, so that it may hold the same ones when others were sent."""


class WeightReceiver(Protocol):
    """A server that can be sent weights. All timeouts are in seconds.

    Methods raise EngineError when the server is at fault and RequestError when it refuses, with its own message.
    """

    @property
    def url(self) -> str:
        """Address, which names the server everywhere."""
        ...

    async def info(self) -> ServerInfo:
        """Ask for the server's model and settings."""
        ...

    async def begin_weight_update(self, timeout: float) -> None:
        """Open an update, after closing any that an earlier failure left open."""
        ...

    async def end_weight_update(self, timeout: float) -> None:
        """Close the update: all weights have arrived."""
        ...

    async def update_from_memory(self, bucket: Bucket, version: int, *, ranks: int, timeout: float) -> None:
        """Have each of the server's `ranks` ranks copy the bucket out of memory that both sides map.

        The server has `version` once the last bucket has arrived; the same holds for a broadcast.
        """
        ...

    async def join_weight_group(self, invitation: GroupInvitation, timeout: float) -> None:
        """Join a broadcast group; returns when all ranks of the group have met."""
        ...

    async def update_from_broadcast(self, bucket: Bucket, version: int, *, group: str, timeout: float) -> None:
        """Announce a bucket that rank 0 of the group broadcasts now; returns when the server has it."""
        ...

    async def leave_weight_group(self, group: str, timeout: float) -> None:
        """Destroy the server's side of a broadcast group."""
        ...

    async def update_from_disk(self, folder: Path, version: int, timeout: float) -> None:
        """Load the safetensors files of a folder."""
        ...

    async def use_adapter(self, name: str | None, folder: Path | None, version: int, timeout: float) -> None:
        """Load the adapter of a folder in peft's format; new requests are answered with it, and earlier ones ended.

        The server has `version` from then on. With None, new requests are answered without an adapter. Adapters of
        before are dropped.
        """
        ...

    async def weight_checksums(self, timeout: float, leave_out: Sequence[str] = ()) -> WeightChecksums:
        """Compute the checksums of all parameters, except names that hold any of `leave_out`."""
        ...

    async def held_weights(self, timeout: float) -> str:
        """Ask for the name of the weights that the server's half of delta weights last completed; empty: no weights.

        Raises RequestError with the reason where the server takes no delta weights (`agentrl.engines.servers.delta`).
        """
        ...


class ServerClient(WeightReceiver, Protocol):
    """A server that generates. Methods raise ServerFailed when it is at fault and RequestError when it refuses."""

    async def generate(
        self,
        rid: str,
        ids: Sequence[int],
        params: SamplingParams,
        *,
        cache_key: str,
        partial: PartialAnswer | None = None,
        images: Sequence[PlacedImage] = (),
    ) -> Generation:
        """Continue `ids`. Cancelling the call leaves the request running on the server: `abort` it.

        Args:
            rid: unique and of a fixed length.
            cache_key: requests with different keys share nothing of the prefix cache.
            partial: filled while tokens arrive; emptied if they turn out to make no sense.
            images: all images in `ids`.
        """
        ...

    async def abort(self, rid: str | None = None) -> None:
        """End one request, or all; each returns with the tokens it has. An unknown id is no error."""
        ...

    async def pause(self, mode: PauseMode) -> None: ...

    async def resume(self) -> None: ...

    async def flush_cache(self, wait: float = 0.0) -> bool:
        """Empty the prefix cache. False when running requests still hold a part of it after `wait` seconds."""
        ...

    async def release_memory(self, tags: Sequence[Memory]) -> None:
        """Free memory of an idle server."""
        ...

    async def resume_memory(self, tags: Sequence[Memory]) -> None:
        """Undo `release_memory`; weights come back with any content."""
        ...

    async def held_adapters(self) -> dict[str, str]:
        """Ask for the adapters that it has: their folders by name."""
        ...

    async def check(self, timeout: float | None) -> None:
        """Have the server generate a token. Raises ServerFailed when it does not within `timeout` seconds, if any."""
        ...


def describe(error: BaseException) -> str:
    """Describe an error in one line, also one without a text."""
    return f"{type(error).__name__}: {error}" if str(error) else type(error).__name__
