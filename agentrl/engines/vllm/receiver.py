"""The weight transfer `agentrl` inside a vLLM worker: weights out of shared memory, by broadcast, or from files.

vLLM loads weights by layers. The layers of an update that has begun have no memory until all their weights have
arrived, so nothing may be generated in between. Changed elements are therefore put into a copy of the weights in the
host's memory, which all layers are then loaded from.
"""

from __future__ import annotations

import base64
import hashlib
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import cast

import torch
import torch.distributed as dist
from safetensors import safe_open
from torch._C._distributed_c10d import PrefixStore, Store, TCPStore
from vllm.config import VllmConfig
from vllm.distributed.weight_transfer.base import (
    WeightTransferEngine,
    WeightTransferInitInfo,
    WeightTransferUpdateInfo,
)
from vllm.model_executor.layers.vocab_parallel_embedding import ParallelLMHead
from vllm.model_executor.model_loader.reload import finalize_layerwise_reload, initialize_layerwise_reload

from agentrl.engines.servers.delta import BEGIN, DeltaReceiver, Named
from agentrl.engines.servers.sync.distributed import Peers
from agentrl.engines.vllm.plugin import TRAINED

TIMEOUT = timedelta(minutes=5)
"""Time in which the ranks of a broadcast have to meet, and a bucket to arrive."""


@dataclass
class Group(WeightTransferInitInfo):
    """A broadcast group, as `agentrl.engines.servers.client.GroupInvitation` describes it."""

    name: str
    backend: str
    address: str
    port: int
    first_rank: int
    world_size: int


@dataclass
class Tensors(WeightTransferUpdateInfo):
    """One bucket, or a folder of safetensors files."""

    entries: list[tuple[str, str, list[int], int, int]]
    """Name, dtype, shape, and the first and the last byte + 1 in the bucket of each tensor."""
    size: int = 0
    """Bytes of the bucket, or of the buffer that it lies in."""
    memory: str | None = None
    """Name of the shared memory whose last bytes are the bucket: torch counts its users in the first ones."""
    cuda: list[int | str | bool] | None = None
    """Handle of the device memory that has the bucket, as `agentrl.engines.vllm.handle` writes it."""
    folder: str | None = None
    """Folder that has the tensors in files."""


class Extension:
    """Methods that a server's workers get."""

    vllm_config: VllmConfig
    weight_transfer_engine: Receiver

    def architecture(self) -> str:
        """Return the class name of the model."""
        return str(self.vllm_config.model_config.architectures[0])

    def held(self) -> str:
        """Return the name of the weights that the model holds; empty where they came without a name."""
        return self.weight_transfer_engine.held

    def arrived(self) -> dict[str, str]:
        """Return the checksums of the kept weights by name; empty where no weights are kept."""
        return self.weight_transfer_engine.checksums()


class Receiver(WeightTransferEngine[Group, Tensors]):
    """Takes weights for one worker. Without memory, handle or folder, a bucket comes by broadcast."""

    init_info_cls = Group
    update_info_cls = Tensors

    def __init__(self, *arguments: object) -> None:
        super().__init__(*arguments)
        self._peers: Peers | None = None
        self._kept: dict[str, torch.Tensor] = {}
        """The weights as they were sent, in the host's memory; empty until there are updates by changes."""
        self._deltas = DeltaReceiver(self._load, self._kept.values)
        self._keeps = False
        """The update that is open tells the name of its weights, so that they are kept."""
        TRAINED.set()

    @property
    def held(self) -> str:
        """Name of the weights that the model holds."""
        return self._deltas.held

    def init_transfer_engine(self, init_info: Group) -> None:
        """Join a group. Blocks until all ranks have met."""
        self.shutdown()
        rank = init_info.first_rank + self.parallel_config.rank
        store: Store = TCPStore(init_info.address, init_info.port, init_info.world_size, False, TIMEOUT)
        device = "cpu" if init_info.backend == "gloo" else "cuda"
        for prefix in (init_info.name, f"{init_info.name}/", f"{device}/"):
            store = PrefixStore(prefix, store)
        if init_info.backend == "gloo":
            self._peers = cast(Peers, dist.ProcessGroupGloo(store, rank, init_info.world_size, TIMEOUT))
        else:
            options = dist.ProcessGroupNCCL.Options()
            options._timeout = TIMEOUT
            self._peers = cast(Peers, dist.ProcessGroupNCCL(store, rank, init_info.world_size, options))

    def checksums(self) -> dict[str, str]:
        """Compute the checksums of the kept weights, as `agentrl.engines.vllm.checksums` does."""
        return {
            name: hashlib.sha256(tensor.contiguous().view(-1).view(torch.uint8).numpy().tobytes()).hexdigest()
            for name, tensor in self._kept.items()
        }

    def start_weight_update(self) -> None:
        self._keeps = False
        initialize_layerwise_reload(self.model)

    def receive_weights(self, update_info: Tensors) -> None:
        self._deltas(self._noticed(self._tensors(update_info)))

    def finish_weight_update(self) -> None:
        if not self._keeps:
            self._kept.clear()
        elif self.held:  # else the update broke off, or changes other weights: layers get their memory back
            self.model.load_weights(iter(self._kept.items()))
        finalize_layerwise_reload(self.model, self.model_config)
        for layer in self.model.modules():  # a head that is tied to the embedding is not loaded, and keeps a copy
            if isinstance(layer, ParallelLMHead):
                layer.quant_method.process_weights_after_loading(layer)

    def shutdown(self) -> None:
        """Leave the group."""
        peers, self._peers = self._peers, None
        if peers is not None:
            peers.abort()

    def _noticed(self, named: Iterable[Named]) -> Iterator[Named]:
        for name, tensor in named:
            if name.startswith(BEGIN):
                self._keeps = True
                if name == BEGIN:
                    self._kept.clear()
            yield name, tensor

    def _load(self, named: Iterable[Named]) -> None:
        """Load a part of an update, or keep it until the update is whole."""
        self.model.load_weights(self._passed(named))

    def _passed(self, named: Iterable[Named]) -> Iterator[Named]:
        for name, tensor in named:
            if not self._keeps:
                # Layers keep what they are given until they are whole, and the sender fills the bucket again before.
                yield name, tensor.clone()
            elif name in self._kept and self._kept[name].shape == tensor.shape:
                self._kept[name].copy_(tensor)
            else:
                self._kept[name] = tensor.to("cpu", copy=True)

    def _tensors(self, update: Tensors) -> Iterator[tuple[str, torch.Tensor]]:
        if update.folder is not None:
            for file in sorted(Path(update.folder).glob("*.safetensors")):
                with safe_open(file, "pt") as content:
                    for name in content.keys():  # noqa: SIM118, it is no mapping
                        yield name, content.get_tensor(name)
            return
        data = self._bucket(update)
        for name, dtype, shape, start, end in update.entries:
            yield name, data[start:end].view(getattr(torch, dtype)).view(shape)

    def _bucket(self, update: Tensors) -> torch.Tensor:
        """Return the bytes [B] uint8 of a bucket."""
        if update.memory is not None:
            path = Path("/dev/shm", Path(update.memory).name)
            whole = path.stat().st_size
            return torch.from_file(str(path), shared=True, size=whole, dtype=torch.uint8)[whole - update.size :]
        if update.cuda is not None:
            return opened(update.cuda, update.size, self.device)
        if self._peers is None:
            raise RuntimeError("the server is in no broadcast group")
        data = torch.empty(update.size, dtype=torch.uint8, device=self.device)
        options = dist.BroadcastOptions()
        options.rootRank = 0
        self._peers.broadcast([data], options).wait(TIMEOUT)
        return data


def opened(handle: list[int | str | bool], size: int, device: torch.device) -> torch.Tensor:
    """Open device memory of another process by its handle: bytes [size] uint8."""
    from torch.multiprocessing.reductions import rebuild_cuda_tensor

    memory, total, offset, counter, counter_offset, event, event_sync = handle
    return rebuild_cuda_tensor(
        *(torch.Tensor, (size,), (1,), 0, torch.UntypedStorage, torch.uint8, device.index),
        *(base64.b64decode(str(memory)), total, offset, False, base64.b64decode(str(counter)), counter_offset),
        *(base64.b64decode(str(event)), event_sync),
    )
