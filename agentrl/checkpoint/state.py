"""Weights and optimizer state of one worker on disk: each rank writes its own part, any number of ranks can read it.

A directory holds one safetensors file a rank, in the layout of torch.distributed.checkpoint's HuggingFaceStorageReader:
the place of each piece in its tensor is in the header of the file. Its `state.json` describes the whole. Nothing is
pickled, and writing needs no collective call, so that a thread can do it.
"""

from __future__ import annotations

import json
import logging
import math
import time
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Protocol

import torch
from pydantic import BaseModel, ConfigDict, Field, JsonValue, ValidationError
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import nn
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner
from torch.distributed.checkpoint.hf_storage import HuggingFaceStorageReader
from torch.distributed.checkpoint.metadata import Metadata, TensorStorageMetadata
from torch.distributed.tensor import DTensor
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

from agentrl.errors import CheckpointError
from agentrl.optim.optimizer import NEVER_NEGATIVE, Optim
from agentrl.parallel.collectives import all_gather, all_max, all_sum, local, rank, world_size
from agentrl.system.json_value import JSON
from agentrl.system.plugin import describe
from agentrl.system.publish import flush_to_disk
from agentrl.system.versions import Format

_STATE = "state.json"
_FORMAT = Format(2, 2)
_PLACES = "DCP_SHARDING_INFO"  # of torch.distributed.checkpoint._hf_utils
_USE_AN_EARLIER = "delete this checkpoint to go on from the one before it"

logger = logging.getLogger(__name__)

SEEN_WITHIN = 60.0
"""Seconds in which a file that another node wrote becomes visible here: network file systems cache old listings."""


class _Description(BaseModel):
    """Content of state.json."""

    model_config = ConfigDict(strict=True, extra="forbid")

    format: int
    ranks: int = Field(gt=0)
    """Number of ranks that wrote it."""
    optimizer: str
    weights: dict[str, str]
    """Signatures (see `_signature`) by name."""
    optimizer_tensors: dict[str, str]
    """Likewise."""
    mark: dict[str, JsonValue]


class StateWriter(Protocol):
    """Writes and reads the trained parameters, and their optimizer, on this rank. One save at a time.

    The config names a factory, which is called on every rank with the parameters by name and their `Optim`. Loaded
    values must be exactly the saved values. Tensors may be sharded (DTensor).
    """

    def save(self, directory: Path, mark: Mapping[str, JSON] | None = None, *, background: bool = False) -> list[str]:
        """Write into `directory`, with all other ranks, and return the names of the files that this rank writes.

        Args:
            mark: by the key of the model's config, values outside of the checkpoint that must be the same when it is
                loaded.
            background: may return when no trained tensor is read any more; `finish` waits for the files.
        """
        ...

    def finish(self, *, wait: bool = True) -> bool:
        """Return true when the last save's files are written. Raises the error of writing them."""
        ...

    def load(self, directory: Path, mark: Mapping[str, JSON] | None = None) -> None:
        """Load the saved values. Every rank calls it. Raises CheckpointError, and then changes nothing."""
        ...


StateWriterFactory = Callable[[Mapping[str, nn.Parameter], Optim], StateWriter]


class WorkerState:
    """Implements `StateWriter` for the parameters `params` that learn."""

    def __init__(self, params: Mapping[str, nn.Parameter], optim: Optim) -> None:
        self._params = params
        self._optim = optim
        self._thread = ThreadPoolExecutor(1, "save")
        self._writing: Future[None] | None = None
        self._host: dict[str, torch.Tensor] = {}

    def save(self, directory: Path, mark: Mapping[str, JSON] | None = None, *, background: bool = False) -> list[str]:
        """Save as `StateWriter.save` says; in the `background`, by a copy in host memory that stays reserved."""
        self.finish()
        remembered = self._optim.state()
        description: dict[str, JSON] = {
            "format": _FORMAT.newest,
            "ranks": world_size(),
            "optimizer": self._optim.name,
            "weights": {name: _signature(tensor.dtype, tensor.shape) for name, tensor in self._params.items()},
            "optimizer_tensors": {name: _signature(tensor.dtype, tensor.shape) for name, tensor in remembered.items()},
            "mark": mark or {},
        }
        pieces: dict[str, torch.Tensor] = {}
        places: dict[str, dict[str, list[int]]] = {}
        for name, piece, offset in _pieces({**self._params, **remembered}):
            pieces[name] = self._staged(name, piece) if background else piece.cpu().contiguous()
            places[name] = {"saved_offsets": offset}
        if background and torch.cuda.is_available():
            torch.cuda.synchronize()
        shard = directory / _shard_name(rank(), world_size())
        self._writing = self._thread.submit(_write, shard, pieces, places, description if rank() == 0 else None)
        if not background:
            self.finish()
        return [shard.name, _STATE] if rank() == 0 else [shard.name]

    def finish(self, *, wait: bool = True) -> bool:
        if self._writing is None:
            return True
        if not (wait or self._writing.done()):
            return False
        writing, self._writing = self._writing, None
        writing.result()
        return True

    def load(self, directory: Path, mark: Mapping[str, JSON] | None = None) -> None:
        """Load exactly the parts saved by any number of ranks. Every rank must call it, and reads only the parts it
        needs.

        Nothing is changed on any rank unless everything fits. Raises CheckpointError when a file is missing or broken,
        or when the checkpoint is of another model or optimizer.
        """
        loaded: dict[str, torch.Tensor] = {}
        error = None
        try:
            loaded = self._read(directory, mark or {})
        except CheckpointError as found:
            error = found
        if all_max(error is not None, _device(next(iter(self._params.values())))):
            raise error or CheckpointError(f"{directory}: another rank could not read its part")
        with torch.no_grad():
            for name, param in self._params.items():
                param.copy_(loaded.pop(name))
        self._optim.load_state(loaded)

    def _staged(self, name: str, piece: torch.Tensor) -> torch.Tensor:
        """Copy a tensor [...] to host memory that was used before: it is filled several times faster than new pages."""
        buffer = self._host.get(name)
        if buffer is None or (buffer.shape, buffer.dtype) != (piece.shape, piece.dtype):
            buffer = torch.empty(piece.shape, dtype=piece.dtype, pin_memory=piece.is_cuda)
            self._host[name] = buffer
        return buffer.copy_(piece, non_blocking=True)

    def _read(self, directory: Path, mark: Mapping[str, JSON]) -> dict[str, torch.Tensor]:
        """Read weights and optimizer state, by name, sharded as they are here."""
        described = _read_description(directory)
        for name in (_shard_name(number, described.ranks) for number in range(described.ranks)):
            if not (directory / name).exists():
                raise CheckpointError(f"{directory}: half-written, {name} is missing; {_USE_AN_EARLIER}")
        reader = HuggingFaceStorageReader(str(directory))
        try:
            there = reader.read_metadata()
        except Exception as error:
            raise _broken(directory, error) from error
        weights = described.weights
        _check_same_model(directory, weights, self._params)
        for key, value in mark.items():
            if described.mark.get(key) != value:
                raise CheckpointError(
                    f"{directory}: its adapters are of another model. {key}: {described.mark.get(key)} in the "
                    f"checkpoint, {value} in this run. Set actor_rollout_ref.model.{key} to what the run began with"
                )
        if described.optimizer != self._optim.name:
            raise CheckpointError(
                f"{directory}: the checkpoint was made with optim.name={described.optimizer}, this run has "
                f"optim.name={self._optim.name}. Set it back, or start over with trainer.resume_mode=disable"
            )
        for name, signature in (weights | described.optimizer_tensors).items():
            _check_whole(directory, name, signature, there)
        wanted = {name: torch.empty_like(param.detach()) for name, param in self._params.items()}
        for name in described.optimizer_tensors:
            found = there.state_dict_metadata[name]
            assert isinstance(found, TensorStorageMetadata)
            try:
                wanted[name] = self._optim.empty_state(name, found.size, found.properties.dtype)
            except ValueError as error:
                raise CheckpointError(f"{directory / _STATE}: broken ({error}); {_USE_AN_EARLIER}") from error
        self._check_remembered(directory, wanted.keys())
        planner = DefaultLoadPlanner()
        planner.set_up_planner(wanted, there, is_coordinator=True)
        reader.set_up_storage_reader(there, is_coordinator=True)
        try:
            reader.read_data(planner.create_local_plan(), planner)
        except Exception as error:
            raise _broken(directory, error) from error
        _check_values(directory, wanted)
        return wanted

    def _check_remembered(self, directory: Path, found: Collection[str]) -> None:
        """Raise CheckpointError where a part of a parameter's optimizer state is missing, and warn where all of it is.

        A model that no step has reached (`critic_warmup`) has no optimizer state.
        """
        without = 0
        for name in self._params:
            missing = [key for kind in self._optim.remembered(name) if (key := f"{name}/{kind}") not in found]
            without += bool(missing)
            if missing and len(missing) < len(self._optim.remembered(name)):
                raise CheckpointError(f"{directory / _STATE}: broken, {missing[0]!r} is missing; {_USE_AN_EARLIER}")
        if without and rank() == 0:
            logger.warning(
                "%s holds no optimizer state of %s of %s parameters: %s begins with them as in a new run. That is "
                "right where they had not been trained yet (trainer.critic_warmup)",
                directory,
                without,
                len(self._params),
                self._optim.name,
            )


def checksums(tensors: Mapping[str, torch.Tensor]) -> dict[str, int]:
    """Add up the bits of each tensor, by name, over all ranks, modulo 2^32: the same however tensors are sharded.

    Every rank must call it at the same time.
    """
    index = {name: place for place, name in enumerate(tensors)}
    sums = torch.zeros(len(index), dtype=torch.int64, device=_device(next(iter(tensors.values()))))
    for name, piece, _ in _pieces(tensors):
        bits = piece.contiguous().flatten().view(torch.int32 if piece.dtype.itemsize > 2 else torch.int16)
        sums[index[name]] = bits.sum(dtype=torch.int32)
    return {name: value % (1 << 32) for name, value in zip(index, all_sum(sums).tolist(), strict=True)}


def all_seen(directory: Path, files: Sequence[str], *, wait: bool = True) -> bool:
    """Return true when the driver sees `files`, which ranks have written into `directory`.

    Raises CheckpointError when it waits, and some do not appear within SEEN_WITHIN seconds.
    """
    ends = time.monotonic() + SEEN_WITHIN
    while missing := next((name for name in files if not (directory / name).exists()), None):
        if not wait:
            return False
        if time.monotonic() >= ends:
            raise CheckpointError(
                f"{directory / missing} was written by its rank, and cannot be seen from the process of the training "
                "loop: trainer.default_local_dir must be on a file system that all nodes share"
            )
        time.sleep(0.1)
    return True


def _pieces(tensors: Mapping[str, torch.Tensor]) -> Iterator[tuple[str, torch.Tensor, list[int]]]:
    """List the pieces that this rank writes: (name, local tensor [...], its offset). Ranks with the same pieces take
    turns."""
    held: list[tuple[str, torch.Tensor, list[int]]] = []
    starts = []
    for name, tensor in tensors.items():
        piece, offset = tensor.detach(), [0] * tensor.ndim
        if isinstance(piece, DTensor):
            offset = list(compute_local_shape_and_global_offset(tensor.shape, piece.device_mesh, piece.placements)[1])
            piece = piece.to_local()
        held.append((name, piece, offset))
        nothing = piece.numel() == 0 and tensor.numel() > 0
        starts.append(-1 if nothing else _element(offset, tensor.shape))
    by_rank = all_gather(torch.tensor(starts, device=_device(next(iter(tensors.values()))))).cpu()
    for index, (one, start) in enumerate(zip(held, starts, strict=True)):
        holders = (by_rank[:, index] == start).nonzero()[:, 0].tolist()
        if start >= 0 and holders[index % len(holders)] == rank():
            yield one


def _element(place: Sequence[int], shape: Sequence[int]) -> int:
    """The number of the element at `place` of a tensor of `shape`."""
    number = 0
    for at, size in zip(place, shape, strict=True):
        number = number * size + at
    return number


def _write(
    shard: Path,
    pieces: Mapping[str, torch.Tensor],
    places: Mapping[str, Mapping[str, list[int]]],
    description: Mapping[str, JSON] | None,
) -> None:
    shard.parent.mkdir(parents=True, exist_ok=True)
    save_file(dict(pieces), shard, metadata={"format": "pt", "DCP_VERSION": "1.0", _PLACES: json.dumps(places)})
    flush_to_disk(shard)
    if description is not None:
        path = shard.parent / _STATE
        path.write_text(json.dumps(description, indent=1) + "\n", encoding="utf-8")
        flush_to_disk(path)


def _device(param: torch.Tensor) -> torch.device:
    """Device of the ranks' collective calls."""
    return torch.device(param.device_mesh.device_type) if isinstance(param, DTensor) else param.device


def _signature(dtype: torch.dtype, shape: torch.Size) -> str:
    return f"{str(dtype).removeprefix('torch.')} {list(shape)}"


def _read_description(directory: Path) -> _Description:
    path = directory / _STATE
    try:
        found: JSON = json.loads(path.read_text(encoding="utf-8"))
        if isinstance(found, dict) and type(number := found.get("format")) is int:
            _FORMAT.check(number, str(path), None, CheckpointError)
        return _Description.model_validate(found)
    except FileNotFoundError:
        raise CheckpointError(
            f"{directory}: half-written or no checkpoint, {_STATE} is missing; {_USE_AN_EARLIER}"
        ) from None
    except ValidationError as error:
        raise CheckpointError(f"{path}: broken ({describe(error):.500}); {_USE_AN_EARLIER}") from error
    except (ValueError, RecursionError) as error:
        raise CheckpointError(f"{path}: broken ({error}); {_USE_AN_EARLIER}") from error


def _shard_name(rank: int, ranks: int) -> str:
    return f"shard-{rank + 1:05d}-of-{ranks:05d}.safetensors"


def _broken(directory: Path, error: Exception) -> CheckpointError:
    """Make the error for a checkpoint that cannot be read; it names the first shard that cannot be opened."""
    for path in sorted(directory.glob("*.safetensors")):
        try:
            with safe_open(path, "pt"):
                pass
        except SafetensorError as found:
            return CheckpointError(f"{path}: broken ({found}); {_USE_AN_EARLIER}")
    return CheckpointError(f"{directory}: broken ({error}); {_USE_AN_EARLIER}")


def _check_whole(directory: Path, name: str, signature: str, there: Metadata) -> None:
    """Raises CheckpointError when the pieces in the shards do not make up the tensor that state.json describes."""
    found = there.state_dict_metadata.get(name)
    if not isinstance(found, TensorStorageMetadata):
        raise CheckpointError(f"{directory}: half-written, {name!r} is missing; {_USE_AN_EARLIER}")
    elements = sum(math.prod(chunk.sizes) for chunk in found.chunks)
    if _signature(found.properties.dtype, found.size) != signature or elements != math.prod(found.size):
        raise CheckpointError(
            f"{directory}: half-written, {elements} elements of {name!r} are there, of {signature}; {_USE_AN_EARLIER}"
        )


def _check_values(directory: Path, tensors: Mapping[str, torch.Tensor]) -> None:
    """Raise CheckpointError for tensors that this rank has read, by name, which no continued training can hold."""
    for name, tensor in tensors.items():
        piece = local(tensor)
        if not piece.numel():
            continue
        least, most = (float(end) for end in piece.aminmax())  # of anything and NaN: NaN
        lowest = 0.0 if name.rpartition("/")[2] in NEVER_NEGATIVE else -math.inf
        if not (math.isfinite(least) and math.isfinite(most) and least >= lowest):
            raise CheckpointError(
                f"{directory}: broken, expected finite numbers{'' if lowest else ' from 0 on'} in {name!r}, found "
                f"{least:g} to {most:g}; {_USE_AN_EARLIER}"
            )


def _check_same_model(directory: Path, weights: Mapping[str, str], params: Mapping[str, nn.Parameter]) -> None:
    for name in [*params, *sorted(set(weights) - set(params))]:
        found = weights.get(name, "nothing")
        expected = _signature(params[name].dtype, params[name].shape) if name in params else "nothing"
        if found != expected:
            raise CheckpointError(
                f"{directory}: a checkpoint of another model. {name}: this model has {expected}, the checkpoint has "
                f"{found}. Set actor_rollout_ref.model.path (or critic.path) and the keys of LoRA as they were, or "
                "start over with trainer.resume_mode=disable"
            )
