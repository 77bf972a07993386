"""`python -m agentrl.train [key=value ...]`: reinforcement learning of a tool-using policy, the main job.

`agentrl.run_training(...)`, also called `agentrl.train(...)`, is the same from Python, and `agentrl.training(...)` a
step at a time.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from types import ModuleType
from typing import TYPE_CHECKING

from agentrl.config import Config
from agentrl.config.dated import dated
from agentrl.config.overrides import Overrides, as_config
from agentrl.config.sweep import load_jobs
from agentrl.system.command import exit_status
from agentrl.system.registrations import of_one_run
from agentrl.trainer.sweep import run_jobs

if TYPE_CHECKING:
    from agentrl.agent_loop import AgentLoop
    from agentrl.agent_loop.registry import LoopFunction
    from agentrl.interaction import Interaction
    from agentrl.reward import RewardManager
    from agentrl.tool import Tool
    from agentrl.trainer.observer import StepObserver
    from agentrl.trainer.run import TrainingRun


def train(
    config: Config | Overrides = (),
    *,
    loops: Mapping[str, AgentLoop | type[AgentLoop] | LoopFunction] | None = None,
    tools: Sequence[Tool | Callable[..., object]] = (),
    interactions: Sequence[Interaction] = (),
    reward: Callable[..., object] | RewardManager | None = None,
    observers: Sequence[StepObserver] = (),
) -> dict[str, float]:
    """Do the whole job: prepare, train, validate, export. Returns the last validation's metrics (empty without).

    See `training` for the arguments and errors.
    """
    with training(
        config, loops=loops, tools=tools, interactions=interactions, reward=reward, observers=observers
    ) as run:
        for _ in run:
            pass
        return run.validation


@contextmanager
def training(
    config: Config | Overrides = (),
    *,
    loops: Mapping[str, AgentLoop | type[AgentLoop] | LoopFunction] | None = None,
    tools: Sequence[Tool | Callable[..., object]] = (),
    interactions: Sequence[Interaction] = (),
    reward: Callable[..., object] | RewardManager | None = None,
    observers: Sequence[StepObserver] = (),
) -> Iterator[TrainingRun[Config]]:
    """Open a training, whose steps are done by iterating over it, and close it at the end.

    Args:
        config: a config; or overrides of `configs/train.yaml`: values by dotted key, or texts as on the command line.
        loops: agent loops by name, next to the registered ones: a class, an object, or `async def loop(episode)`.
        tools: tool objects and plain functions, in addition to multi_turn.tool_config_path.
        interactions: in addition to multi_turn.interaction_config_path.
        reward: a scoring function, or a reward manager, in place of the scorers by data source.
        observers: of each step, called after the ones of trainer.observers.

    Names that code of the config registers (loops, losses, columns) end with the run.

    Raises UserError, before the first step for any config that cannot work.
    """
    # Imported late, so that --help and config errors wait for nothing.
    from agentrl.observe.open import open_display
    from agentrl.quickstart.assets import with_quickstart_data, with_quickstart_policy
    from agentrl.rollouts.objects import UserObjects
    from agentrl.trainer.inputs import open_inputs
    from agentrl.trainer.observer import open_observers

    objects = UserObjects(loops or {}, tools, interactions, reward)
    with of_one_run():
        config = dated(as_config(config, objects.keys))
        with (
            open_observers(config.trainer.observers, config.trainer.observer_options, observers) as watching,
            open_display(f"{config.trainer.project_name} · {config.trainer.experiment_name}") as display,
        ):
            config = with_quickstart_data(config, display)
            inputs = open_inputs(config, objects)
            if config.trainer.device == "cuda":
                from agentrl.runtime.device import resolve_device

                resolve_device("cuda", display.warn)  # refused before minutes of a warm-up
            config = with_quickstart_policy(config, display)
            # Imported later still: torch takes seconds, for which no mistake in tools or rows should wait.
            from agentrl.trainer.build import build

            with build(config, inputs, display, observers=watching) as run:
                yield run


def main(argv: Sequence[str] | None = None, config_name: str = "train") -> int:
    """Train, with --multirun several times, and return the process's exit status (see `agentrl.system.command`).

    config_name: the YAML to start from where `argv` does not say.
    """

    def work() -> None:
        jobs = load_jobs(list(sys.argv[1:] if argv is None else argv), config_name, Config)
        run_jobs(jobs, train)

    return exit_status(work)


class CallableModule(ModuleType):
    """This module, which can be called as the function of its name.

    `agentrl.train` must be both: `python -m agentrl.train` needs a module of that name, and users a function. On any
    import of the module, Python sets the package's attribute `train` to it, so a function there would be hidden sooner
    or later. A module that can be called is never hidden by itself. Type checkers are shown the function.
    """

    __call__ = staticmethod(train)


sys.modules[__name__].__class__ = CallableModule

if __name__ == "__main__":
    sys.exit(main())
