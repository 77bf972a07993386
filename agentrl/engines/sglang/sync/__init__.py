"""Weight senders: how servers get the weights of the policy."""

from agentrl.engines.sglang.sync.disk import DiskSender
from agentrl.engines.sglang.sync.distributed import DistributedSender
from agentrl.engines.sglang.sync.tensor import TensorSender
from agentrl.engines.sglang.sync.update import WeightSender, WeightUpdateFailed

__all__ = ["DiskSender", "DistributedSender", "TensorSender", "WeightSender", "WeightUpdateFailed"]
