"""Environments in whole runs: the page's commands, and one public task of each family with its real package."""

from __future__ import annotations

import shlex
from collections.abc import Callable
from pathlib import Path

import pytest
import yaml

from agentrl.config.registries import AGENT_LOOPS
from agentrl.observe.invariants import check_trajectory
from agentrl.train import main as train
from agentrl.trajectory.parquet import read_trajectories
from data_prep.environment import entry
from data_prep.environment import main as prepare
from tests.agent_loop.recorded_environments import make_files, nemo_gym_server
from tests.agent_loop.short_turns import ending_its_turns
from tests.agent_loop.test_environments import harbor_task, skip_without_python_3_12
from tests.conftest import PROJECT
from tests.e2e.test_docs import commands, write_files
from tests.e2e.test_train import lines
from tests.runs import Overrides
from tests.sandbox.servers import running

PAGE = "docs/environments.md"
Run = Callable[[Path, str], Path]


@pytest.fixture(autouse=True)
def no_loop_outlives_its_test(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(AGENT_LOOPS, "_registered", dict(AGENT_LOOPS._registered))


@pytest.fixture
def two_steps(small_run: Overrides, policy_dir: Path, tmp_path: Path) -> Run:
    """Train two steps on rows of `data` with the environments of `config`; return the run's folder."""

    def train_on(data: Path, config: str) -> Path:
        unwanted = ("custom_reward_function", "tool_config_path")
        overrides = [
            *(word for word in small_run() if not any(key in word for key in unwanted)),
            f"data.train_files={data}/train.parquet",
            f"data.val_files={data}/validation.parquet",
            f"actor_rollout_ref.model.path={ending_its_turns(policy_dir, tmp_path / 'ending')}",
            f"actor_rollout_ref.rollout.agent.agent_loop_config_path={config}",
            "data.max_prompt_length=1200",
            "data.max_response_length=600",
            "data.filter_overlong_prompts=true",
            "actor_rollout_ref.rollout.multi_turn.max_assistant_turns=4",
            "trainer.total_training_steps=2",
        ]
        assert train(overrides) == 0
        return tmp_path / "run"

    return train_on


def check_run(run: Path) -> None:
    steps = [line for line in lines(run) if "turns/mean" in line]
    assert len(steps) == 2
    assert all(line["left_out/failed"] == 0 for line in steps)
    for file in sorted((run / "trajectories").glob("train_*[0-9].parquet")):
        for one in read_trajectories(file):
            assert check_trajectory(one, 600) == []
            assert one.score is not None


@pytest.mark.slice(0, "documents")
def test_the_pages_environment_is_trained_with(
    two_steps: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    assert write_files(PAGE, tmp_path) == ["my_environment.py", "my_play.py", "my_environments.yaml"]
    made, trained, puzzles = map(shlex.split, commands(PAGE))
    assert made[:3] == ["python", "-m", "data_prep.environment"] and puzzles[:3] == made[:3]
    assert prepare(made[3:]) == 0
    written = [line for line in capsys.readouterr().out.splitlines() if line.startswith("data/guess/")]
    assert written == ["data/guess/train.parquet: 100 tasks", "data/guess/validation.parquet: 10 tasks"]
    assert (PROJECT / "agentrl/environments/configs" / puzzles[puzzles.index("--config") + 1]).is_file()
    assert trained[:3] == ["python", "-m", "agentrl.train"]
    given = dict(word.split("=", 1) for word in trained[3:])
    assert given["data.train_files"] == "data/guess/train.parquet"
    run = two_steps(tmp_path / "data" / "guess", given["actor_rollout_ref.rollout.agent.agent_loop_config_path"])
    check_run(run)
    trained_on = read_trajectories(next((run / "trajectories").glob("train_*[0-9].parquet")))
    assert max(len(one.turns) for one in trained_on) > 1
    assert {one.score_extra["guesses"] for one in trained_on} <= {0.0, 1.0, 2.0, 3.0}


FAMILIES = sorted(path.stem for path in (PROJECT / "agentrl/environments/configs/environments").glob("*.yaml"))
INSTALLED = [one for one in FAMILIES if one not in ("harbor", "nemo_gym")]  # which need a server that runs


@pytest.mark.slice(0, "long run")
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("family", INSTALLED)
def test_a_public_task_of_each_family_is_trained_two_steps(
    family: str, two_steps: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its packages are installed once; then no package index is there."""
    config = f"environments/{family}.yaml"
    monkeypatch.chdir(tmp_path)
    make_files(family, entry(Path(config), None)[1])
    rows = ["--train-rows", "16", "--validation-rows", "2", "--out", str(tmp_path / "rows")]
    assert prepare(["--config", config, *rows]) == 0
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    check_run(two_steps(tmp_path / "rows", config))


@pytest.mark.slice(0, "long run")
def test_task_folders_of_harbor_are_trained_two_steps(two_steps: Run, tmp_path: Path) -> None:
    for number in range(18):
        harbor_task(tmp_path / "tasks" / f"t{number:02}")
    config = tmp_path / "harbor.yaml"
    with running(None) as server:
        (given,) = yaml.safe_load((PROJECT / "agentrl/environments/configs/environments" / "harbor.yaml").read_text())
        given["options"]["task_options"] = {"folder": str(tmp_path / "tasks"), "sandbox": server.url}
        config.write_text(yaml.safe_dump([given]))
        assert prepare(["--config", str(config), "--out", str(tmp_path / "rows")]) == 0
        check_run(two_steps(tmp_path / "rows", str(config)))


@pytest.mark.slice(0, "long run")
@pytest.mark.timeout(1800)
def test_a_public_task_of_nemo_gym_is_trained_two_steps(
    two_steps: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The package's own server has four tasks for training and one for validation. It is installed once."""
    skip_without_python_3_12()
    config = tmp_path / "nemo_gym.yaml"
    with nemo_gym_server() as served:
        monkeypatch.setenv("PIP_NO_INDEX", "1")
        (given,) = yaml.safe_load((PROJECT / "agentrl/environments/configs/environments" / "nemo_gym.yaml").read_text())
        given["options"]["task_options"] = served
        config.write_text(yaml.safe_dump([given]))
        assert prepare(["--config", str(config), "--out", str(tmp_path / "rows")]) == 0
        check_run(two_steps(tmp_path / "rows", str(config)))


def test_every_family_has_an_entry_that_pins_its_package() -> None:
    adapters = {path.stem for path in (PROJECT / "agentrl" / "environments" / "adapters").glob("*.py")}
    assert adapters == set(FAMILIES)
    for family in FAMILIES:
        (entry,) = yaml.safe_load(
            (PROJECT / "agentrl/environments/configs/environments" / f"{family}.yaml").read_text()
        )
        assert entry["name"] == entry["options"]["environment"] == family
        assert all("==" in package for package in entry["options"].get("packages", []))
        assert ("packages" in entry["options"]) == (family in INSTALLED)
        assert f"`{family}`" in (PROJECT / PAGE).read_text()
