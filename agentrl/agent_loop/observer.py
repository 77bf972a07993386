"""Turn observers: users' code that sees each turn of a running trajectory, e.g. to keep a journal."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import ParamSpec, cast

from agentrl.config.registries import TURN_OBSERVERS
from agentrl.errors import CodeError
from agentrl.system.user_code import code_error
from agentrl.trajectory import Trajectory, Turn

P = ParamSpec("P")


class TurnObserver(ABC):
    """Base class of a turn observer. Choose one of your own by `actor_rollout_ref.rollout.agent.observers`.

    One object sees all trajectories of its process; under Ray each rollout worker is one. It is called on the event
    loop on which the trajectories run, and nothing else runs there meanwhile: it must be quick. It must not
    change its arguments.
    """

    def __init__(self, run_dir: Path) -> None:
        """`run_dir`: folder of the run, which may not exist yet and which all rollout workers share.

        A parameter `options`, annotated with a pydantic model, is given what `rollout.agent.observer_options` has.
        """
        self.run_dir = run_dir

    @abstractmethod
    def on_turn(self, trajectory: Trajectory, turn: Turn) -> None:
        """See a turn that was just appended to `trajectory.turns`: the policy's, or an observed one (tool, user).

        Calls and rewards of an assistant turn are added to it later, and loops with tags replace its text. The loop
        `openai_proxy` removes turns from the trajectory at its end that no client got. A try that
        fails is followed by another with the same `trajectory.uid` and the next `trajectory.attempt`, which has no
        turns yet.
        """

    def on_end(self, trajectory: Trajectory) -> None:  # noqa: B027 - for journals of turns nothing
        """See a trajectory that ended, with its status and score: once for each `uid`, its last try.

        It is not called for trajectories that are cancelled because the run ends.
        """

    def close(self) -> None:  # noqa: B027 - most observers hold nothing
        """Free the observer's resources at the end of the run."""


class Observers:
    """The turn observers of this process.

    Their errors are kept until the scheduler asks for them: raised at once, they would pass through the agent loop,
    which may catch them.
    """

    def __init__(self, observers: Sequence[TurnObserver] = ()) -> None:
        self._observers = tuple(observers)
        self._errors: dict[str, CodeError] = {}

    @staticmethod
    def load(
        targets: Sequence[str],
        run_dir: Path,
        options: Mapping[str, Mapping[str, object]],
        on_made: Callable[[object], None],
    ) -> Observers:
        """Make one observer for each target, with its `options`; `on_made` gets each, to have it closed.

        Raises ConfigError for `async` methods and wrong options, CodeError where making fails.
        """
        made = TURN_OBSERVERS.make(targets, options, run_dir, methods=("on_turn", "on_end"), on_made=on_made)
        return Observers(cast(list[TurnObserver], made))

    def on_turn(self, trajectory: Trajectory, turn: Turn) -> None:
        """Show every observer a turn that was just appended."""
        for observer in self._observers:
            self._call(trajectory.uid, observer.on_turn, trajectory, turn)

    def on_end(self, trajectory: Trajectory) -> None:
        """Show every observer a trajectory that ended."""
        for observer in self._observers:
            self._call(trajectory.uid, observer.on_end, trajectory)

    def take_error(self, uid: str) -> CodeError | None:
        """Return the first error that an observer of the trajectory `uid` raised since the last call, and forget it."""
        return self._errors.pop(uid, None)

    def _call(self, uid: str, method: Callable[P, None], *seen: P.args, **named: P.kwargs) -> None:
        try:
            method(*seen, **named)
        except (Exception, SystemExit) as error:
            # No fault of the infrastructure, even by its class: another try of the trajectory would not mend it.
            self._errors.setdefault(uid, code_error("turn observer", error, method))
