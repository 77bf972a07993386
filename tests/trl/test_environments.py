"""Environments in TRL's form: reset, methods as tools, rewards of their own, several in a run, and bad ones."""

from __future__ import annotations

import asyncio
import runpy
import threading
from pathlib import Path
from types import SimpleNamespace
from typing import Any, ClassVar, cast

import pytest

from agentrl.agent_loop.base import CURRENT_EPISODE, Episode
from agentrl.errors import CodeError, UserError
from agentrl.trajectory import Message, Part, Trajectory
from agentrl.trajectory.parquet import read_trajectories, trajectory_files
from agentrl.trl import GRPOConfig, GRPOTrainer
from agentrl.trl.environments import HELD, Environments, with_observation
from tests.e2e.test_docs import blocks

SMALL: dict[str, Any] = {
    "per_device_train_batch_size": 8,
    "num_generations": 4,
    "max_completion_length": 80,
    "max_prompt_length": 300,
    "max_steps": 2,
    "logging_steps": 1,
    "learning_rate": 1e-5,
    "overrides": {"trainer.checks.on_fault": "stop"},
}


class Desk:
    """Opens with the rest of the question, and is content with a right product."""

    made: ClassVar[list[Desk]] = []

    def __init__(self) -> None:
        self.made.append(self)
        self.resets = 0

    def reset(self, a: int, b: int, **row: Any) -> str:
        self.resets, self.asked = self.resets + 1, (a, b)
        self.answers: list[int] = []
        return f"{a} * {b}?"

    def get_reward(self) -> float:
        return float(self.answers[-1:] == [self.asked[0] * self.asked[1]])

    def multiply(self, a: int, b: int) -> int:
        """Multiplies two integers.

        Args:
            a: The first integer.
            b: The second integer.
        """
        self.answers.append(a * b)
        return a * b

    def _not_a_tool(self) -> None: ...


def trainer_of(policy: Path, factory: Any, rows: Any, reward: Any = None, **arguments: Any) -> GRPOTrainer:
    args = GRPOConfig("run", **{**SMALL, **arguments})
    return GRPOTrainer(policy, reward, args, rows, environment_factory=factory)


def test_each_trajectory_has_its_own_environment(taught: Path, at_home: Path) -> None:
    """It opens the prompt, answers the calls, and scores; the reward functions see it."""
    Desk.made.clear()
    seen: list[tuple[Any, Any, Any]] = []

    def looks(prompts: list[Any], completions: list[Any], environments: list[Desk], **kwargs: Any) -> list[float]:
        seen.extend(zip(prompts, completions, environments, strict=True))
        assert kwargs["a"] == [12] * len(prompts)
        assert all(len(one.answers) == sum(m["role"] == "tool" for m in c) for _, c, one in seen[-len(prompts) :])
        return [0.5] * len(prompts)

    rows = [{"prompt": [{"role": "user", "content": "What is "}], "a": 12, "b": 7}] * 8
    trainer = trainer_of(taught, Desk, rows, looks)
    trainer.train()
    assert len(seen) == 16 and {prompt[0]["content"] for prompt, _, _ in seen} == {"What is 12 * 7?"}
    assert 8 <= len(Desk.made) <= 17 and sum(one.resets for one in Desk.made) == 16, "made once, reset often"
    history = [one for one in trainer.state.log_history if "reward" in one]
    assert history[0]["rewards/Desk/mean"] > 0
    assert history[0]["reward"] == pytest.approx(history[0]["rewards/Desk/mean"] + 0.5)
    written = [one for file in trajectory_files(Path("run/trajectories")) for one in read_trajectories(file)]
    answered = [one for one in written if any(call.response == "84" for call in one.tool_calls)]
    assert answered and all(one.score == 1.5 for one in answered)


async def test_an_environment_whose_method_was_given_up_serves_no_other_trajectory() -> None:
    begun, end = threading.Event(), threading.Event()

    class Slow(Silent):
        def wait(self) -> str:
            """Waits."""
            begun.set()
            end.wait()
            return "waited"

    environments = Environments(Slow, [], 100)
    wait = next(tool for tool in environments.tools if tool.name == "wait")
    first, second, third = (Trajectory(f"train/0/0/{k}", 0) for k in range(3))
    await environments.open({}, first)
    CURRENT_EPISODE.set(cast(Episode, SimpleNamespace(trajectory=first)))
    call: asyncio.Task[object] = asyncio.create_task(cast(Any, wait.execute("", {})))
    await asyncio.to_thread(begun.wait)
    call.cancel()  # as a deadline does
    with pytest.raises(asyncio.CancelledError):
        await call
    slow = first.for_scorers[HELD]
    environments.close(first)
    await environments.open({}, second)
    fresh = second.for_scorers[HELD]
    environments.close(second)
    await environments.open({}, third)
    end.set()
    assert fresh is not slow and third.for_scorers[HELD] is fresh


class Silent:
    def reset(self, **row: Any) -> None: ...

    def move(self, where: str) -> str:
        """Moves.

        Args:
            where: The direction.
        """
        return f"moved {where}"

    async def multiply(self, numbers: list[int]) -> int:
        """Multiplies all.

        Args:
            numbers: The integers.
        """
        return numbers[0]

    async def get_reward(self) -> float:
        return 0.25


def test_several_environments_have_their_own_tools(policy_dir: Path, at_home: Path) -> None:
    """A row names its environment; without a prompt, the environment opens the conversation."""
    rows = [{"environment": "silent", "prompt": [{"role": "user", "content": "Go."}]}] * 4
    rows += [{"environment": "desk", "a": 1, "b": 2}] * 4  # type: ignore[dict-item]
    sums: list[float] = []

    def length(completions: list[Any], environments: list[Any], **kwargs: Any) -> list[float]:
        sums.extend(isinstance(one, Desk) for one in environments)
        return [len(completion[-1]["content"]) % 7 / 7 for completion in completions]

    small = {"max_completion_length": 16, "max_prompt_length": 400, "max_steps": -1, "num_train_epochs": 1}
    trainer = trainer_of(policy_dir, {"desk": Desk, "silent": Silent}, rows, length, **small)
    trainer.train()
    assert sorted(sums) == [0.0] * 16 + [1.0] * 16
    assert {"rewards/Desk/mean", "rewards/Silent/mean", "rewards/length/mean"} <= {
        name for one in trainer.state.log_history for name in one
    }
    again = Environments({"desk": Desk, "silent": Silent}, [], 100)
    assert [one["function"]["name"] for one in again.schemas({"environment": "silent"})] == ["move", "multiply"]
    assert [one["function"]["name"] for one in again.schemas({"environment": "desk"})] == ["multiply"]


def test_the_pages_environment_brings_its_tasks_and_needs_no_rows(
    policy_dir: Path, at_home: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    script = next(block for block in blocks("docs/trl.md", "python") if block.startswith("# counter.py"))
    small = {"max_steps=20": "max_steps=1", "max_completion_length=128": "max_completion_length=8"}
    for was, now in small.items():
        assert was in script
        script = script.replace(was, now)
    Path("counter.py").write_text(script)
    monkeypatch.setattr("sys.argv", ["counter.py", str(policy_dir)])
    runpy.run_path("counter.py")
    assert capsys.readouterr().out.splitlines()[-1] == "[0.0]"
    written = [one for file in trajectory_files(Path("counter/trajectories")) for one in read_trajectories(file)]
    assert len(written) == 8 and all(str(one.messages[0]["content"]).startswith("Add up to ") for one in written)


def test_an_observation_joins_the_last_message() -> None:
    asked: list[Message] = [
        {"role": "system", "content": "s"},
        {"role": "user", "content": [{"type": "text", "text": "a"}]},
    ]
    assert with_observation(asked, None) == asked
    parts: list[Part] = [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]
    assert with_observation(asked, "b")[-1] == {"role": "user", "content": parts}
    assert asked[-1]["content"] == [{"type": "text", "text": "a"}], "the row is not changed"


ROW: dict[str, Any] = {"prompt": [{"role": "user", "content": "Go."}]}
BAD: dict[str, tuple[dict[str, Any], str]] = {
    "no factory": ({"factory": 3}, "environment_factory: expected a class or a function"),
    "no reset": ({"factory": dict}, r"environment_factory: dict has no method reset.*def reset\(self, \*\*row\)"),
    "no reward": ({"factory": type("Plain", (), {"reset": Silent.reset})}, "reward_funcs is empty.*get_reward"),
    "no rows, no length": ({"factory": Desk, "rows": None, "max_steps": -1}, "max_steps is missing"),
    "no rows, several": ({"factory": {"desk": Desk}, "rows": None}, "column environment"),
    "an unknown name": (
        {"factory": {"desk": Desk}, "rows": [{**ROW, "environment": "dask"}]},
        "train_dataset, row 0.*environment='dask'.*desk",
    ),
    "a factory that fails": ({"factory": lambda: 1 // 0}, r"environment_factory.*ZeroDivisionError"),
}


@pytest.mark.parametrize("name", BAD)
def test_bad_environments_are_refused_in_words(name: str, policy_dir: Path, at_home: Path) -> None:
    given = {"rows": [ROW] * 8, **BAD[name][0]}
    with pytest.raises(UserError, match=f"(?s){BAD[name][1]}"):
        trainer_of(policy_dir, **given)
    assert list(at_home.iterdir()) == []


@pytest.mark.parametrize(("answer", "says"), [(3, "a text or None, found 3"), (None, "KeyError")])
def test_a_reset_that_fails_ends_the_run(answer: Any, says: str, policy_dir: Path, at_home: Path) -> None:
    class Bad(Silent):
        def reset(self, **row: Any) -> Any:
            return row["missing"] if answer is None else answer

    def zero(completions: list[Any], **kwargs: Any) -> list[float]:
        return [0.0] * len(completions)

    with pytest.raises(CodeError, match=f"(?s)Bad.reset.*{says}"):
        trainer_of(policy_dir, Bad, [ROW] * 8, zero, max_completion_length=8).train()
