"""Arguments of a server, made of the job's settings and the user's own, as words of its command line."""

from __future__ import annotations

import json
from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Self

from agentrl.config.sections.rollouts import RolloutsConfig
from agentrl.config.sections.training import Config
from agentrl.config.sglang_arguments import plain_name
from agentrl.system.json_value import JSON


@dataclass(frozen=True, slots=True)
class ServerArguments(ABC):
    """Arguments that one server is started with. Each server software derives its own class."""

    model_path: str
    device: str = "cuda"
    """`cuda` or `cpu`."""
    dtype: str = "bfloat16"
    """Type of the weights, as PyTorch names it. On a CPU always float32."""
    tensor_model_parallel_size: int = 1
    gpu_memory_utilization: float = 0.85
    """Fraction of a GPU's memory for weights and KV cache."""
    context_length: int | None = None
    """Longest prompt and response in tokens; None: the model's own."""
    trust_remote_code: bool = False
    override_config: Mapping[str, JSON] = field(default_factory=dict)
    """Values in place of those in the model's config.json."""
    max_num_seqs: int = 256
    """Requests that run at once; more wait."""
    enable_memory_saver: bool = False
    """Let weights and KV cache be freed (sleep) on a GPU that trains too."""
    host: str = "127.0.0.1"
    extra: Mapping[str, JSON] = field(default_factory=dict)
    """The software's own arguments by name, with underscores; they override the settings here.

    True gives the bare flag, False and None leave the argument out, a list gives several values, a mapping JSON.
    """

    @classmethod
    def from_config(cls, config: RolloutsConfig, device: str, max_model_len: int) -> Self:
        """Make the arguments that a config's keys set for every software."""
        model, rollout = config.actor_rollout_ref.model, config.actor_rollout_ref.rollout
        return cls(
            model.path,
            device=device,
            dtype=model.dtype,
            tensor_model_parallel_size=rollout.tensor_model_parallel_size,
            gpu_memory_utilization=rollout.gpu_memory_utilization,
            context_length=max_model_len,
            trust_remote_code=model.trust_remote_code,
            override_config=model.override_config,
            max_num_seqs=rollout.max_num_seqs,
            enable_memory_saver=rollout.free_cache_engine,
        )

    @classmethod
    def of_reward_model(cls, config: Config, device: str, host: str) -> Self:
        """Make the arguments of a generative reward model's servers, without their GPUs and the user's own."""
        keys = config.reward_model
        return cls(
            str(keys.model.path),
            device=device,
            dtype=config.actor_rollout_ref.model.dtype,
            tensor_model_parallel_size=keys.rollout.tensor_model_parallel_size,
            gpu_memory_utilization=keys.rollout.gpu_memory_utilization,
            trust_remote_code=keys.model.trust_remote_code,
            host=host,
        )

    @abstractmethod
    def at(self, gpu: int) -> Self:
        """Return the arguments of the server whose first GPU of this machine is `gpu`."""

    @abstractmethod
    def own(self, port: int) -> dict[str, JSON]:
        """Name the settings as the software does, for a server that listens at `port`."""

    def argv(self, port: int) -> list[str]:
        """Build the command line of a server that listens at `port`."""
        arguments = self.own(port)
        # In the user's order and after ours, so that another name of the same argument wins too.
        for name, value in self.extra.items():
            arguments.pop(plain_name(name), None)
            arguments[plain_name(name)] = value
        return [word for name, value in arguments.items() for word in words(name, value)]


def words(name: str, value: JSON) -> list[str]:
    """Write an argument as words of a command line."""
    flag = "--" + name.replace("_", "-")
    if value is None or value is False:
        return []
    if value is True:
        return [flag]
    if isinstance(value, Mapping):
        return [flag, json.dumps(dict(value))]
    if isinstance(value, list | tuple):
        return [flag, *(str(item) for item in value)]
    if isinstance(value, str) and value.startswith("-"):
        return [f"{flag}={value}"]  # else it is read as another argument
    return [flag, str(value)]
