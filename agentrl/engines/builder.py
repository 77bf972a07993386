"""The interface of engine builders; `agentrl.config.registries.ENGINES` finds them by name."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from agentrl.config.sections.rollouts import RolloutsConfig
from agentrl.engines.contract import RolloutEngine
from agentrl.system.loop_thread import LoopThread
from agentrl.system.reporter import Reporter


@dataclass(frozen=True, slots=True)
class EngineSetting:
    """Everything an engine is built from: the config, and facts known only when the run starts."""

    config: RolloutsConfig
    device: str
    """cuda or cpu: where the policy is."""
    max_model_len: int
    """Longest context in tokens, prompt and response together."""
    folder: Path
    """Folder of this engine alone, for logs and weights in files: the run's, or one in it for each rollout worker."""
    decode: Callable[[list[int]], str]
    """Ids to text, for stop strings."""
    reporter: Reporter
    """Shows the user how the start of an engine goes, and later what happens to its servers."""

    @property
    def audience(self) -> Reporter:
        """Return `reporter` by its name of before."""
        return self.reporter


class EngineBuilder(Protocol):
    """Builds one kind of engine."""

    def __call__(self, setting: EngineSetting, loop: LoopThread) -> RolloutEngine:
        """Start the engine, whose coroutines will run on `loop`. It has the weights of the config's model.

        A parameter `options`, annotated with a pydantic model, is given `rollout.engine_options`. Raises UserError with
        the reason when it does not start; then nothing of it is left.
        """
        ...
