"""Handles of weight buckets in SGLang's format, by which a server's rank maps the trainer's buffer."""

from __future__ import annotations

import base64
import io
from multiprocessing.reduction import ForkingPickler
from types import SimpleNamespace

import torch
from torch.multiprocessing import reductions

from agentrl.engines.servers.sync.buckets import Bucket
from agentrl.engines.servers.sync.tensor import shared_by_name

_DEVICE = 6
"""Index of the device among the arguments of torch's rebuild_cuda_tensor."""


def serialize(bucket: Bucket) -> str:
    """Serialize a bucket for one rank: base64 of a pickle of the buffer's handle and the tensors' places in it.

    A handle of CUDA memory counts its users, so each rank needs one of its own.
    """
    metadata = [
        SimpleNamespace(
            name=entry.name,
            shape=torch.Size(entry.shape),
            dtype=entry.dtype,
            start_idx=entry.start,
            end_idx=entry.end,
            numel=entry.end - entry.start,
        )
        for entry in bucket.entries
    ]
    data: torch.Tensor | _CudaHandle = bucket.data if bucket.data.device.type == "cpu" else _CudaHandle(bucket.data)
    payload = io.BytesIO()
    with shared_by_name():
        ForkingPickler(payload).dump({"flattened_tensor": data, "metadata": metadata})
    return base64.b64encode(payload.getvalue()).decode()


class _CudaHandle:
    """Pickles as a CUDA tensor with the UUID of its device, as SGLang reads it: device indices differ by process."""

    def __init__(self, tensor: torch.Tensor) -> None:
        self._tensor = tensor

    def __reduce__(self) -> tuple[object, tuple[object, ...]]:
        rebuild, arguments = reductions.reduce_tensor(self._tensor)
        uuid = str(torch.cuda.get_device_properties(self._tensor.device).uuid)
        return rebuild, (*arguments[:_DEVICE], uuid, *arguments[_DEVICE + 1 :])
