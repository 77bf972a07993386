"""The interface of engine builders, which `agentrl.config.registries.ENGINES` finds by name, and their one caller."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol, cast

from agentrl.config.registries import ENGINES
from agentrl.config.sections.rollouts import RolloutsConfig
from agentrl.engines.contract import RENAMED, RolloutEngine
from agentrl.system.loop_thread import LoopThread
from agentrl.system.plugin import with_present_names
from agentrl.system.registry import configured
from agentrl.system.reporter import Reporter
from agentrl.system.user_code import contract_error, user_code

OPTIONS = "actor_rollout_ref.rollout.engine_options"
METHODS = tuple(name for name, one in vars(RolloutEngine).items() if callable(one) and not name.startswith("_"))


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


def open_engine(setting: EngineSetting, loop: LoopThread) -> RolloutEngine:
    """Start the engine that the config names.

    Raises UserError; CodeError, with the builder's place, for its errors and for a result that is no engine.
    """
    rollout = setting.config.actor_rollout_ref.rollout
    found, what = cast(EngineBuilder, ENGINES.get(rollout.name)), f"engine {rollout.name}"
    build = configured(found, rollout.engine_options, OPTIONS)
    with user_code(what, found):
        engine = with_present_names(build(setting, loop), RENAMED)
    if missing := [name for name in METHODS if not callable(getattr(engine, name, None))]:
        problem = f"it must return a RolloutEngine, found {type(engine).__name__} without {', '.join(missing)}"
        raise contract_error(what, found, problem)
    return engine
