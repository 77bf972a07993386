"""Weight senders: how servers get the weights of the policy."""

from agentrl.rollout.sglang.sync.disk import DiskSender
from agentrl.rollout.sglang.sync.distributed import DistributedSender
from agentrl.rollout.sglang.sync.tensor import TensorSender
from agentrl.rollout.sglang.sync.update import WeightSender, WeightUpdateFailed

__all__ = ["DiskSender", "DistributedSender", "TensorSender", "WeightSender", "WeightUpdateFailed"]
