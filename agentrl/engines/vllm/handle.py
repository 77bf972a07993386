"""A bucket's place in memory as JSON, by which a vLLM worker opens it (`receiver.py`)."""

from __future__ import annotations

import base64

from torch.multiprocessing import reductions

from agentrl.engines.servers.sync.buckets import Bucket
from agentrl.engines.servers.sync.tensor import shared_by_name
from agentrl.system.json_value import JSON


def place(bucket: Bucket) -> dict[str, JSON]:
    """Write the handle of the buffer that the bucket lies in: of shared memory, or of a GPU's."""
    if bucket.data.device.type == "cpu":
        with shared_by_name():
            _, name, _ = bucket.data.untyped_storage()._share_filename_cpu_()
        return {"memory": name.decode()}
    _, arguments = reductions.reduce_tensor(bucket.data)
    memory, total, offset, _, counter, counter_offset, event, event_sync = arguments[7:]
    texts = [base64.b64encode(one).decode() for one in (memory, counter, event)]
    return {"cuda": [texts[0], total, offset, texts[1], counter_offset, texts[2], event_sync]}
