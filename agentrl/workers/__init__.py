"""The models of a run: workers that hold them, and the groups of workers that training loops call."""

from agentrl.workers.critic import CriticWorker
from agentrl.workers.policy import PolicyWorker
from agentrl.workers.reference import ReferenceWorker

__all__ = ["CriticWorker", "PolicyWorker", "ReferenceWorker"]
