"""Weight senders: the ways in which a policy's weights reach servers."""

from agentrl.engines.servers.sync.adapters import AdapterSender
from agentrl.engines.servers.sync.delta import DeltaSender
from agentrl.engines.servers.sync.disk import DiskSender
from agentrl.engines.servers.sync.distributed import DistributedSender
from agentrl.engines.servers.sync.tensor import TensorSender
from agentrl.engines.servers.sync.update import SenderSetting, WeightSender, WeightUpdateFailed

__all__ = [
    "AdapterSender",
    "DeltaSender",
    "DiskSender",
    "DistributedSender",
    "SenderSetting",
    "TensorSender",
    "WeightSender",
    "WeightUpdateFailed",
]
