"""Everything a run is made of, built and checked from its config before the first step."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import torch

from agentrl.agent_loop import LoopContext, LoopLimits, Scheduler, agent_names, load_agent_loops
from agentrl.agent_loop.registry import ALIASES, instantiate
from agentrl.algorithms.advantages import NEEDS_CRITIC
from agentrl.algorithms.kl import AdaptiveKLController, FixedKLController, KLController
from agentrl.chat import Chat
from agentrl.chat.check import start_up_check
from agentrl.config import Config, write_config
from agentrl.data.dataset import ParquetDataset
from agentrl.data.loader import Loader
from agentrl.data.sample import Sample
from agentrl.errors import ConfigError
from agentrl.interaction import load_interactions
from agentrl.model.packed import load_model
from agentrl.reward import RewardManager
from agentrl.rollout.embedded import EmbeddedEngine
from agentrl.toolset import ToolSet
from agentrl.trainer.checkpoint import CheckpointManager
from agentrl.trainer.display import Display
from agentrl.trainer.rollouts import Rollouts
from agentrl.trainer.tracking import Tracker
from agentrl.workers import CriticWorker, LocalWorkerGroup, PolicyWorker, ReferenceWorker, WorkerGroup
