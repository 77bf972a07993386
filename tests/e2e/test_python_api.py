"""Training from Python: as documented, a step at a time, with objects, and beside a running event loop."""

from __future__ import annotations

import asyncio
import gc
import importlib
import json
import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psutil
import pyarrow
import pyarrow.parquet as pq
import pytest
from hydra.core.override_parser.overrides_parser import OverridesParser

import agentrl
import agentrl.train
from agentrl.agent_loop import AgentLoop, Episode
from agentrl.agent_loop.registry import FunctionLoop, as_loop
from agentrl.algorithms import Advantages, EstimatorColumns
from agentrl.algorithms.groups import Groups
from agentrl.config.overrides import _text, as_config
from agentrl.config.registries import ADVANTAGE_ESTIMATORS
from agentrl.errors import CodeError, ConfigError, TrainingError
from agentrl.interaction import Interaction, InteractionResponse
from agentrl.rollouts.objects import UserObjects
from agentrl.trainer.last_step import LastStep
from agentrl.trainer.observer import Step, StepObserver
from agentrl.trajectory import Status
from agentrl.trajectory.parquet import read_trajectories, trajectory_files
from tests.e2e.conftest import PROJECT
from tests.e2e.test_docs import blocks
from tests.e2e.test_train import lines
from tests.forked import forked
from tests.naming import naming

SMALL = {
    "data.train_batch_size": 4,
    "data.max_prompt_length": 400,
    "data.max_response_length": 24,
    "actor_rollout_ref.actor.ppo_mini_batch_size": 4,
    "actor_rollout_ref.rollout.n": 2,
    "trainer.total_training_steps": 2,
}


def test_the_module_and_the_function_have_one_name() -> None:
    """Whoever imports the module hides nothing, whatever was imported first; importing the package loads no torch."""
    module: Any = importlib.import_module("agentrl.train")
    assert callable(module) and agentrl.training is module.training and agentrl.train is module
    program = (
        "import sys, agentrl\n"
        "assert not {'torch', 'hydra', 'agentrl.train'} & set(sys.modules)\n"
        "first = agentrl.train\n"
        "import agentrl.train\n"
        "from agentrl.train import main, train\n"
        "assert callable(first) and agentrl.train is first and 'torch' not in sys.modules\n"
        "try:\n    agentrl.train({'no.such': 1})\n"
        "except agentrl.errors.ConfigError as error:\n    assert 'no.such' in str(error)\n"
        "else:\n    sys.exit('no error')\n"
    )
    done = subprocess.run([sys.executable, "-c", program], cwd=PROJECT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize(
    "value",
    [
        *(
            None,
            True,
            3,
            -1.5,
            1e-7,
            "",
            "plain",
            "null",
            "a b",
            "it's",
            "back\\slash",
            "\\",
            "\\'",
            "${x}",
            "a=b,c",
            "ä",
        ),
        *(["a", 1], [], {"a": 1, "b": ["x", None]}, "[1, 2]", Path("/a/b c")),
    ],
)
def test_values_are_read_as_they_were_written(value: Any) -> None:
    override = OverridesParser.create().parse_override(f"key={_text('key', value)}")
    read = override.value()

    def plain(value: Any) -> Any:
        return [plain(one) for one in value] if isinstance(value, list) else getattr(value, "text", value)

    assert plain(read) == (str(value) if isinstance(value, Path) else value)


TURNS = "actor_rollout_ref.rollout.multi_turn"
OBJECTS: dict[str, tuple[object, dict[str, int]]] = {
    "tools": ([len], {f"{TURNS}.max_tool_response_length": 64, f"{TURNS}.tool_timeout": 5, "tools.max_concurrent": 2}),
    "interactions": ([object()], {f"{TURNS}.max_user_turns": 2, "tools.max_concurrent": 2}),
    "loops": ({"mine": AgentLoop}, {f"{TURNS}.max_user_turns": 2, f"{TURNS}.max_parallel_calls": 1}),
}


@pytest.mark.parametrize("part", OBJECTS)
def test_keys_of_a_part_that_is_given_as_objects_have_an_effect(part: str, tmp_path: Path) -> None:
    rows = tmp_path / "rows.parquet"
    rows.touch()
    own = [f"data.train_files={rows}", "data.val_files=null", f"actor_rollout_ref.model.path={tmp_path}"]
    objects, settings = OBJECTS[part]
    given = [f"{key}={value}" for key, value in settings.items()]
    with pytest.raises(ConfigError) as refused:
        as_config([*own, *given])
    assert str(refused.value).count("has no effect") == len(given)
    as_config([*own, *given], UserObjects(**{part: objects}).keys)  # type: ignore[arg-type]


def test_a_config_comes_from_a_mapping_a_command_line_or_a_config() -> None:
    by_mapping = as_config({"trainer.seed": 5, "algorithm": "ppo", "data.val_files": None})
    assert by_mapping == as_config(["trainer.seed=5", "algorithm=ppo", "data.val_files=null"])
    assert as_config(by_mapping) is by_mapping
    named = as_config({"algorithm.adv_estimator": mean_only, "trainer.observers": [Events], "data.val_files": None})
    assert named.algorithm.adv_estimator == f"{__name__}:mean_only"
    assert named.trainer.observers == [f"{__name__}:Events"]
    with pytest.raises(
        ConfigError, match=r"adv_estimator: .*<lambda> has no name in its module .*; define it at the top"
    ):
        as_config({"algorithm.adv_estimator": lambda columns, config: None})
    assert by_mapping.trainer.seed == 5 and by_mapping.algorithm.adv_estimator == "gae"
    with pytest.raises(ConfigError, match=r"trainer.seed: expected text.*of type object"):
        as_config({"trainer.seed": object()})  # type: ignore[dict-item]


def test_the_documented_script_trains(policy_dir: Path, tmp_path: Path) -> None:
    _, script, *_ = blocks("docs/python.md", "python")
    for key, value in {"data.train_batch_size": 4, "actor_rollout_ref.actor.ppo_mini_batch_size": 4}.items():
        assert f'"{key}": 16' in script
        script = script.replace(f'"{key}": 16', f'"{key}": {value}')
    more = {key: value for key, value in SMALL.items() if f'"{key}"' not in script}
    script = script.replace('"trainer.total_training_steps": 20', '"trainer.total_training_steps": 2')
    script = script.replace("config = {", f"config = {{**{json.dumps(more)},")
    (tmp_path / "adding.py").write_text(script)
    done = forked([tmp_path / "adding.py", policy_dir], tmp_path, timeout=240)
    assert done.returncode == 0, done.stderr
    assert "step 1 of 2: reward " in done.stdout and "step 2 of 2: reward " in done.stdout
    assert done.stdout.count("the first answer: ") == 2
    run = tmp_path / "runs" / "adding"
    assert lines(run)[-1]["step"] == 2 and (run / "policy" / "model.safetensors").exists()
    written = [one for file in trajectory_files(run / "trajectories") for one in read_trajectories(file)]
    again = [one for one in written if one.agent_name == "second_try"]
    assert again and any("Answer with a number." in str(one.messages) for one in again)


def test_the_documented_trial_of_an_algorithm_runs(policy_dir: Path, tmp_path: Path) -> None:
    """A loss, its column, an estimator and a metric, as the top level of a notebook or a script has them."""
    _, _, script, curves = blocks("docs/python.md", "python")
    script = script.replace('"trainer.total_training_steps": 6,', "")
    small = {
        **SMALL,
        "actor_rollout_ref.model.path": str(policy_dir),
        "quickstart.train_rows": 8,
        "quickstart.val_rows": 4,
    }
    script = script.replace("config = {", f"config = {{**{json.dumps(small)},")
    # The policy is random: its own rewards are all 0, which teaches nothing.
    script = script.replace("Calls()])", "Calls()], reward=lambda solution_str: float(len(solution_str) % 3))")
    (tmp_path / "trial.py").write_text(script)
    done = forked([tmp_path / "trial.py"], tmp_path, timeout=240)
    assert done.returncode == 0, done.stderr
    assert "{'role': 'user'" in done.stdout and "{'role': 'assistant'" in done.stdout
    assert "'mine/calls': " in done.stdout and "RaggedBatch of " in done.stdout and "answers int64" in done.stdout
    found = lines(tmp_path / "runs" / "trial")
    assert [one["step"] for one in found] == [1, 2] and all("actor/share" in one for one in found)
    (tmp_path / "curves.py").write_text(curves)
    assert forked([tmp_path / "curves.py"], tmp_path).returncode == 0
    assert (tmp_path / "trial.png").stat().st_size > 1000


@pytest.fixture
def keys(policy_dir: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., dict[str, Any]]:
    monkeypatch.chdir(tmp_path)

    def given(loop: str, **row: Any) -> dict[str, Any]:
        rows = [
            {
                "prompt": [{"role": "user", "content": f"What is {n} + 2?"}],
                "data_source": "x",
                "agent_name": loop,
                **row,
            }
            for n in range(8)
        ]
        pq.write_table(pyarrow.Table.from_pylist(rows), tmp_path / "rows.parquet")
        files = {"data.train_files": tmp_path / "rows.parquet", "data.val_files": tmp_path / "rows.parquet"}
        policy = {"actor_rollout_ref.model.path": policy_dir, "trainer.default_local_dir": tmp_path / "run"}
        return {**SMALL, **files, **policy, "data.val_max_samples": 2}

    return given


def varied(solution_str: str) -> float:
    return len(solution_str) % 7 / 7


async def one_turn(episode: Episode) -> None:
    await episode.start(episode.sample.prompt)
    await episode.generate()
    episode.finish(Status.COMPLETED)


def test_steps_beside_a_running_event_loop_that_are_left_and_gone_on_with(
    keys: Callable[..., Any], thawed: None
) -> None:
    """As in a notebook: its kernel runs an event loop in the main thread."""

    async def cells() -> list[int]:
        steps = []
        config = {**keys("mine"), "trainer.total_training_steps": 3}
        with agentrl.training(config, loops={"mine": one_turn}, reward=varied) as run:
            assert (run.step, run.total_steps, run.validation) == (0, 3, {})
            assert gc.get_freeze_count(), "full collections leave out what the run was built of"
            first = next(iter(run))
            assert first["score/mean"] >= 0 and "val/score_greedy" in run.validation
            steps.append(run.step)
            for _ in run:
                steps.append(run.step)
                break
            assert run.dir.name == "run" and not (run.dir / "policy").exists()
        with agentrl.training(config, loops={"mine": one_turn}, reward=varied) as run:
            steps += [run.step for _ in run]
        assert (run.dir / "policy" / "model.safetensors").exists() and not gc.get_freeze_count()
        return steps

    assert asyncio.run(cells())[-1] == 3


def mean_only(columns: EstimatorColumns, config: Any) -> Advantages:
    groups = Groups.from_columns(columns)
    return groups.spread(groups.totals, columns)


class Events(StepObserver):
    """Keeps the events of each step, and some of what they have."""

    def __init__(self) -> None:
        self.seen: list[tuple[int, str, object]] = []

    def on_rollout(self, step: Step) -> None:
        step.metrics["mine/solved"] = sum(bool(one.score) for one in step.sampled)
        self.seen.append((step.number, "on_rollout", len(step.outlines)))

    def on_batch(self, step: Step) -> None:
        self.seen.append((step.number, "on_batch", len(step.batch.load())))

    def on_update(self, step: Step) -> None:
        self.seen.append((step.number, "on_update", step.updated and "actor/grad_norm" in step.metrics))

    def on_published(self, step: Step) -> None:
        self.seen.append((step.number, "on_published", "sync/bytes" in step.metrics))

    def on_end(self, step: Step) -> None:
        self.seen.append((step.number, "on_end", (step.run_dir / "metrics.jsonl").exists()))

    def close(self) -> None:
        self.seen.append((0, "close", None))


def test_observers_see_each_step(keys: Callable[..., Any], tmp_path: Path) -> None:
    config = {**keys("single_turn"), "data.val_files": None, "trainer.observers": f"{__file__}:Events"}
    del config["data.val_max_samples"]
    events = Events()
    agentrl.run_training(config, observers=[events], reward=varied)
    told = [("on_rollout", 8), ("on_batch", 8), ("on_update", True), ("on_published", True), ("on_end", True)]
    assert events.seen == [*((number, *one) for number in (1, 2) for one in told), (0, "close", None)]
    assert all(line["mine/solved"] >= 0 for line in lines(tmp_path / "run")), "logged, as it was set before on_end"


class Partner(Interaction):
    async def start_interaction(self, instance_id: str, **kwargs: Any) -> None: ...

    async def generate_response(self, instance_id: str, messages: list[Any]) -> InteractionResponse:
        return InteractionResponse(True, "")

    async def open_dialogue(self, instance_id: str, messages: list[Any]) -> str:
        return "Be brief."


def test_an_interaction_is_given_as_an_object(keys: Callable[..., Any], tmp_path: Path) -> None:
    config = keys("tool_agent", extra_info={"interaction_kwargs": {"name": "partner"}})
    config |= {"trainer.total_training_steps": 1, "data.val_files": None}
    del config["data.val_max_samples"]
    assert agentrl.train(config, interactions=[Partner({}, "partner")], reward=varied) == {}
    written = read_trajectories(tmp_path / "run" / "trajectories" / "train_000001.parquet")
    assert len(written) == 8 and all("Be brief." in str(one.messages[0]["content"]) for one in written)


def test_the_last_step_is_in_memory(keys: Callable[..., Any], tmp_path: Path) -> None:
    last, config = LastStep(), {**keys("mine"), "data.val_files": None}
    del config["data.val_max_samples"]
    with agentrl.training(config, loops={"mine": one_turn}, reward=varied, observers=[last]) as run:
        assert last.number == 0
        for number, metrics in enumerate(run, 1):
            assert (last.number, last.metrics) == (number, metrics)
            written = read_trajectories(tmp_path / "run" / "trajectories" / f"train_{number:06}.parquet")
            assert [one.uid for one in last.trajectories] == [one.uid for one in written]
            assert last.batch is not None and last.batch.advantages is not None
            ids = [one.transcripts[0].ids for one in last.trajectories]
            assert last.batch.ids.tolist() == [token for one in ids for token in one]
    assert last.number == 2


def test_a_cell_that_fails_leaves_nothing_running(keys: Callable[..., Any], monkeypatch: pytest.MonkeyPatch) -> None:
    """A user's estimator raises; the same cell, mended, begins again at once."""
    config = {**keys("mine"), "data.val_files": None, "algorithm.adv_estimator": "broken"}
    del config["data.val_max_samples"]
    mended: list[bool] = []

    def broken(columns: EstimatorColumns, config: Any) -> Advantages:
        if not mended:
            raise ZeroDivisionError("my mistake")
        groups = Groups.from_columns(columns)
        return groups.spread(groups.totals, columns)

    monkeypatch.setitem(ADVANTAGE_ESTIMATORS._registered, "broken", broken)  # as `register` does, for this test alone

    def left() -> tuple[set[str], set[int]]:
        threads = {one.name for one in threading.enumerate() if one.is_alive()}
        return threads, {one.pid for one in psutil.Process().children(recursive=True)}

    before = left()
    with (
        pytest.raises(CodeError, match="ZeroDivisionError: my mistake"),
        agentrl.training(config, loops={"mine": one_turn}, reward=varied) as run,
    ):
        next(iter(run))
    with pytest.raises(TrainingError, match=r"takes no more steps.*resumes from its newest checkpoint"):
        next(iter(run))
    after = left()
    assert (after[0] - before[0], after[1] - before[1]) == (set(), set())
    mended.append(True)
    with agentrl.training(config, loops={"mine": one_turn}, reward=varied) as run:
        assert [run.step for _ in run] == [1, 2]
    assert list(run) == []  # at its end, and no error


def test_a_folder_in_which_a_training_of_this_process_is_open_is_refused(keys: Callable[..., Any]) -> None:
    """A second cell, whether it resumes or begins again, must not move the live run's folder aside."""
    config = keys("mine")
    parts: Any = {"loops": {"mine": one_turn}, "reward": varied}
    with agentrl.training(config, **parts) as run:
        next(iter(run))
        for mode in ("disable", "auto"):
            with (
                naming(ConfigError, "of this process", run.dir),
                agentrl.training({**config, "trainer.resume_mode": mode}, **parts) as second,
            ):
                next(iter(second))
        assert [run.step for _ in run] == [2]
    assert not run.dir.with_name("run.1").exists()


KERNEL = """\
import asyncio
import runpy


async def run_cells():
    runpy.run_path("cells.py", run_name="__main__")


asyncio.run(run_cells())
"""
"""A notebook's kernel runs an event loop in the thread of the cells."""


@pytest.mark.slice(0, "documents")
@pytest.mark.timeout(900)
def test_the_notebook_runs_from_its_first_cell_to_its_last(tmp_path: Path) -> None:
    cells = json.loads((PROJECT / "examples" / "new_loss.ipynb").read_text())["cells"]
    script = "\n".join("".join(cell["source"]) for cell in cells if cell["cell_type"] == "code")
    (tmp_path / "cells.py").write_text(script.replace("STEPS = 6", "STEPS = 2"))
    (tmp_path / "kernel.py").write_text(KERNEL)
    done = forked([tmp_path / "kernel.py"], tmp_path, timeout=800)
    assert done.returncode == 0, done.stderr
    for said in ("vanilla ", "bounded ", "step 2: ", "log-probs of trainer and engine differ by "):
        assert said in done.stdout


def test_an_error_of_a_loop_function_names_its_place(keys: Callable[..., Any]) -> None:
    async def careless(episode: Episode) -> None:
        await episode.start(episode.sample.prompt)
        await episode.generate()
        raise TypeError("no such thing")

    with pytest.raises(CodeError, match=rf"agent loop mine .*TypeError: no such thing\n  {__file__}:\d+ in careless"):
        agentrl.train(keys("mine"), loops={"mine": careless}, reward=varied)


def test_objects_that_cannot_be_used_are_refused_before_anything_is_made(
    keys: Callable[..., Any], tmp_path: Path
) -> None:
    def no_coroutine(episode: Episode) -> None: ...

    class Needy(AgentLoop):
        def __init__(self, needed: int) -> None: ...

        async def run(self, episode: Episode) -> None: ...

    refused: list[tuple[str, dict[str, Any]]] = [
        ("agent loop 'tool_agent' is registered already", {"loops": {"tool_agent": one_turn}}),
        (r"agent loop 'x': expected a subclass .*no_coroutine", {"loops": {"x": no_coroutine}}),
        (r"agent loop 'x' cannot be made: TypeError", {"loops": {"x": Needy}}),
        ("two tools are called 'add'", {"tools": [add, add]}),
        ("two interactions are called 'p'", {"interactions": [Partner({}, "p"), Partner({}, "p")]}),
        ("reward .*expected a function", {"reward": 3}),
        (r"observers\[0\]: expected an object of a StepObserver's class", {"observers": [add]}),
    ]
    for message, objects in refused:
        with pytest.raises(ConfigError, match=message):
            agentrl.train(keys("single_turn"), **{"reward": varied, **objects})
    assert not (tmp_path / "run").exists()
    needy = Needy(1)
    assert as_loop("x", needy) is needy and isinstance(as_loop("x", one_turn), FunctionLoop)


def add(a: int, b: int) -> int:
    """Add two numbers.

    Args:
        a: The first.
        b: The second.
    """
    return a + b
