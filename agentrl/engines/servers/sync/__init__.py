"""Weight senders: how servers get the weights of the policy."""

from agentrl.engines.servers.sync.disk import DiskSender
from agentrl.engines.servers.sync.distributed import DistributedSender
from agentrl.engines.servers.sync.tensor import TensorSender
from agentrl.engines.servers.sync.update import WeightSender, WeightUpdateFailed

__all__ = ["DiskSender", "DistributedSender", "TensorSender", "WeightSender", "WeightUpdateFailed"]
