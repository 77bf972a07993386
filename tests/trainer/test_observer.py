"""A user's observers see each step in the documented order, and their errors are their own."""

from __future__ import annotations

import re
from pathlib import Path
from typing import cast

import pytest

from agentrl.errors import CodeError, ConfigError, WorkerDied
from agentrl.system.metrics import Numbers
from agentrl.system.targets import load_target
from agentrl.trainer.observer import EVENTS, Observers, Step, StepObserver, open_observers
from tests.config.loading import load
from tests.naming import naming

FILE = """
from pydantic import BaseModel
from agentrl.trainer.observer import StepObserver

class Options(BaseModel):
    limit: float = 1.0

class Limited(StepObserver):
    def __init__(self, options: Options):
        self.limit = options.limit

class Late(StepObserver):
    async def on_end(self, step): ...

class Broken(StepObserver):
    def __init__(self):
        self.opn()
"""


class Seen(StepObserver):
    """Keeps what it is told in a list that several share."""

    def __init__(self, name: str, told: list[str]) -> None:
        self.name, self.told = name, told

    def on_rollout(self, step: Step) -> None:
        self.told.append(f"{self.name} on_rollout")

    def on_end(self, step: Step) -> None:
        self.told.append(f"{self.name} on_end {step.metrics}")

    def close(self) -> None:
        self.told.append(f"{self.name} close")


class Late(StepObserver):
    async def on_end(self, step: Step) -> None:  # type: ignore[override]
        raise AssertionError("it is never awaited")


def test_an_object_that_would_have_to_be_awaited_is_refused() -> None:
    with (
        naming(ConfigError, "observers[0]", "Late.on_end"),
        open_observers([], {}, [Late()]),
    ):
        pass


class Failing(StepObserver):
    def __init__(self, error: BaseException) -> None:
        self.error = error

    def on_batch(self, step: Step) -> None:
        raise self.error

    def close(self) -> None:
        raise self.error


class Numbering(StepObserver):
    def __init__(self, value: object) -> None:
        self.value = value

    def on_rollout(self, step: Step) -> None:
        step.metrics["mine/number"] = cast(float, self.value)


def step() -> Step:
    made = Step.__new__(Step)  # the observers here read nothing else
    made.number, made.metrics, made.stop = 3, cast(Numbers, {}), None
    return made


def test_a_users_observers_come_after_ours_and_are_closed() -> None:
    told: list[str] = []
    with open_observers([], {}, [Seen("first", told), Seen("second", told)]) as users:
        observers = Observers([Seen("ours", told)], [Numbering(2.5), *users])
        one = step()
        for event in EVENTS:
            observers.tell(event, one)
    assert told == [
        *("ours on_rollout", "first on_rollout", "second on_rollout"),
        *(f"{name} on_end {{'mine/number': 2.5}}" for name in ("ours", "first", "second")),
        *("second close", "first close"),
    ]


def test_what_was_made_is_closed_in_reverse_order_where_the_next_cannot_be_made(tmp_path: Path) -> None:
    (tmp_path / "made.py").write_text(
        "import agentrl.trainer.observer\n"
        "told = []\n"
        "class First(agentrl.trainer.observer.StepObserver):\n"
        "    def close(self): told.append(type(self).__name__)\n"
        "class Second(First): ...\n"
        "class Broken(First):\n"
        "    def __init__(self): raise ValueError('no room')\n"
    )
    told, names = load_target(f"{tmp_path}/made.py:told", "x"), ("First", "Second", "Broken", "First")
    given = Seen("given", cast(list[str], told))
    with pytest.raises(CodeError, match="no room"):
        open_observers([f"{tmp_path}/made.py:{name}" for name in names], {}, [given]).__enter__()
    assert told == ["Second", "First", "given close"]


def test_an_error_names_the_observer_the_event_and_the_place() -> None:
    for error in (ValueError("too late"), OSError("no such host"), SystemExit("enough")):
        with pytest.raises(CodeError) as raised:
            Observers([], [Failing(error)]).tell("on_batch", step())
        assert re.match(
            rf"step observer \(\S+\.Failing\.on_batch\): {type(error).__name__}: {error}\n", str(raised.value)
        )
        assert f"{__file__}:" in str(raised.value) and raised.value.__cause__ is error
        with pytest.raises(CodeError, match=r"Failing\.close\): "), open_observers([], {}, [Failing(error)]):
            pass


def test_a_death_of_a_worker_and_an_interruption_stay_as_they_are() -> None:
    for error in (WorkerDied("rank 1"), KeyboardInterrupt()):
        with pytest.raises(type(error)) as raised:
            Observers([], [Failing(error)]).tell("on_batch", step())
        assert raised.value is error


@pytest.mark.parametrize("value", ["0.5", None, [1.0]])
def test_a_metric_that_is_no_number_is_refused_where_it_was_set(value: object) -> None:
    Observers([], [Numbering(1)]).tell("on_rollout", step())
    with naming(CodeError, "Numbering.on_rollout", "step.metrics['mine/number']"):
        Observers([], [Numbering(value)]).tell("on_rollout", step())


def test_named_ones_are_made_with_their_options(tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text(FILE)
    name = f"{tmp_path}/mine.py:Limited"
    keys = load(f"trainer.observers=['{name}']", f"trainer.observer_options={{'{name}': {{limit: 3}}}}").trainer
    with open_observers(keys.observers, keys.observer_options, [Numbering(1)]) as (named, given):
        assert vars(named) == {"limit": 3.0} and isinstance(given, Numbering)
    refused = [
        (f"trainer.observers='{name}'", f"trainer.observer_options={{'{name}': {{limt: 3}}}}", "did you mean 'limit'"),
        ("trainer.observers=json:dumps", "", "trainer.observers: expected a subclass of agentrl.trainer.observer.Step"),
        ("trainer.observers=Limited", "", "unknown step observer 'Limited'"),
        (
            "trainer.observer_options={a: {b: 1}}",
            "",
            r"observer_options\.a has no effect: .*observers= does not name it",
        ),
    ]
    for first, second, says in refused:
        with pytest.raises(ConfigError, match=says):
            load(*filter(None, [first, second]))


def test_one_that_cannot_be_used_is_refused_before_the_first_step(tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text(FILE)
    with naming(ConfigError, "trainer.observers", "mine.py:Late.on_end"):
        open_observers([f"{tmp_path}/mine.py:Late"], {}, []).__enter__()
    with pytest.raises(CodeError, match=r"step observer \(mine\.Broken\): AttributeError.*\n.*mine\.py:17"):
        open_observers([f"{tmp_path}/mine.py:Broken"], {}, []).__enter__()
    with naming(ConfigError, "observers[1]", "StepObserver's", "found <class"):
        open_observers([], {}, [Numbering(1), cast(StepObserver, Seen)]).__enter__()
