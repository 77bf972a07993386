"""The models of a run and the groups of workers that hold them."""

from agentrl.runtime.group import LocalWorkerGroup, WorkerGroup
from agentrl.workers.critic import CriticWorker
from agentrl.workers.policy import PolicyWorker
from agentrl.workers.reference import ReferenceWorker

__all__ = ["CriticWorker", "LocalWorkerGroup", "PolicyWorker", "ReferenceWorker", "WorkerGroup"]
