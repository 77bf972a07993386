"""Self-play in whole runs: two steps with their columns, metrics and exact resuming, and the tiny twin that learns."""

from __future__ import annotations

import json
import shlex
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from agentrl.config.registries import AGENT_LOOPS
from agentrl.train import main as train
from agentrl.trajectory.parquet import read_trajectories
from data_prep.environment import main as prepare
from examples.self_play.tiny import main as make_tiny
from tests.agent_loop.test_roles import Opponent, opponent
from tests.conftest import PROJECT
from tests.e2e.test_docs import commands, write_files
from tests.e2e.test_train import lines
from tests.runs import Overrides, refused

__all__ = ["opponent"]  # a fixture
PAGE = "docs/self_play.md"
ROLLOUT = "actor_rollout_ref.rollout"
SHORTER = """
def tasks(split, seed, count):
    for number in range(count):
        yield {"prompt": f"Be short, and say {number}.", "roles": ["first", "second"], "split": split}

def start(task, seed):
    return [], {"role": "first", "observation": "You begin."}

def step(said, action):
    said.append(len(action["text"]))
    return {"role": "second", "observation": "Shorter!", "done": len(said) == 2}

def score(said):
    if len(said) < 2:  # a turn was cut
        return {"scores": {"first": -1.0, "second": 1.0} if said else {"first": -1.0}}
    return {"scores": {"first": float(said[0] < said[1]), "second": float(said[1] < said[0])}}
"""
"""A game of one turn each, in which any text is a move."""


@pytest.fixture(autouse=True)
def no_loop_outlives_its_test(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(AGENT_LOOPS, "_registered", dict(AGENT_LOOPS._registered))


@pytest.fixture
def overrides(small_run: Overrides, tmp_path: Path) -> list[str]:
    """Two steps of the game, without roles."""
    (tmp_path / "shorter.py").write_text(SHORTER)
    options = {"environment": str(tmp_path / "shorter.py")}
    entry = {"name": "shorter", "_target_": "agentrl.environments.loop.EnvironmentLoop", "options": options}
    loops = tmp_path / "loops.yaml"
    loops.write_text(json.dumps([entry]))
    assert prepare(["--config", str(loops), "--out", str(tmp_path), "--train-rows", "8", "--validation-rows", "2"]) == 0
    others = ("custom_reward_function", "tool_config_path", "_files", "total_training", "filter_groups")
    return [
        *(word for word in small_run() if not any(key in word for key in others)),
        f"data.train_files={tmp_path}/train.parquet",
        "data.val_files=null",
        f"{ROLLOUT}.agent.agent_loop_config_path={loops}",
        "trainer.total_training_steps=2",
    ]


def test_two_steps_of_self_play_resume_with_their_running_means(overrides: list[str], tmp_path: Path) -> None:
    """The means of `rae` are part of the checkpoint: after each step they are those of all games played so far."""
    run, keys = tmp_path / "run", [*overrides, "algorithm.adv_estimator=rae"]
    keys.append(f"{ROLLOUT}.roles={{first: {{}}, second: {{}}}}")
    means: dict[str, float] = {}
    for step in (1, 2):  # the second run resumes
        assert train([*keys, f"trainer.total_training_steps={step}"]) == 0
        assert {"score/role/first", "score/role/second"} <= lines(run)[-1].keys()
        (file,) = (run / "trajectories").glob(f"train_*{step}.parquet")
        games = read_trajectories(file)
        roles = [[transcript.role for transcript in one.transcripts] for one in games]
        assert ["first", "second"] in roles and all(one in (["first"], ["first", "second"]) for one in roles)
        for game in games:
            assert game.score == sum(game.role_scores.values())
            for role, score in game.role_scores.items():
                name = f"environment/shorter/{role}"
                means[name] = 0.95 * means.get(name, 0.0) + (1 - 0.95) * score
        state = json.loads((run / "checkpoints" / f"step_{step:06}" / "state.json").read_text())["state"]
        assert state["running_returns"] == means


def test_bad_roles_are_refused_before_training(overrides: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    capsys.readouterr()
    for roles, says in (
        ("{first: {}}", "nobody plays the role 'second'"),
        ("{first: {}, second: {policy: other}}", "policy=other is no policy of this run, and has no base_url"),
        ("{first: {}, second: {policy: other, trains: true, base_url: 'http://127.0.0.1:9/v1'}}", "not supported: let"),
        ("{first: {trains: false}, second: {trains: false}}", "none of first, second is trained"),
        ("{first: {}, second: {policy: old, adapter: old}}", "old: adapters are served next to the policy's own"),
        ("{first: {}, second: {adapter: old}}", "adapter needs policy, a name for the frozen adapter"),
        ("{first: {}, second: {policy: old, adapter: old, base_url: 'http://127.0.0.1:9/v1'}}", "name two models"),
        ("{a: {}, b: {policy: old, adapter: x}, c: {policy: old, adapter: y}}", "policy=old is the name of another"),
    ):
        refused(train, [*overrides, f"{ROLLOUT}.roles={roles}"], capsys, says, "roles")
    both = f"{ROLLOUT}.roles={{first: {{}}, second: {{}}}}"
    refused(train, [*overrides, both, "algorithm.adv_estimator=remax"], capsys, "not known by role")


def guessing(folder: Path) -> list[str]:
    """Write rows for the page's agent, which lies in `folder`; returns the keys of a run that plays it."""
    row = {
        "data_source": "agent/guess",
        "agent_name": "openai_proxy",
        "prompt": [{"role": "user", "content": "Guess."}],
    }
    pq.write_table(pa.Table.from_pylist([row] * 4), folder / "guess.parquet")
    proxy = f"{ROLLOUT}.agent.openai_proxy.target={folder}/two_players.py:agent"
    return [f"data.train_files={folder}/guess.parquet", proxy]


@pytest.mark.slice(0, "documents")
def test_the_environment_and_the_agent_of_the_page_play(
    overrides: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The environment is the one of the other tests; the agent plays both roles of one row."""
    monkeypatch.chdir(tmp_path)
    assert write_files(PAGE, tmp_path) == ["shorter.py", "two_players.py"]
    assert (tmp_path / "shorter.py").read_text().removeprefix("# shorter.py\n").strip() == SHORTER.strip().replace(
        "\n\ndef", "\n\n\ndef"
    )
    keys = [word for word in overrides if "train_files" not in word]
    roles = f"{ROLLOUT}.roles={{player-1: {{}}, player-2: {{}}}}"
    assert train([*keys, *guessing(tmp_path), roles, "trainer.total_training_steps=1"]) == 0
    (file,) = (tmp_path / "run" / "trajectories").glob("train_*1.parquet")
    for one in read_trajectories(file):
        assert [transcript.role for transcript in one.transcripts] == ["player-1", "player-2"]
        assert one.score == 0.0 and sorted(one.role_scores.values()) == [-1.0, 1.0]


@pytest.mark.slice(0, "documents")
def test_a_run_against_a_served_policy_as_the_page_says(overrides: list[str], opponent: str) -> None:
    """The second command of the page, with its roles, on the small game; an endpoint stands for the server."""
    tiny, serve, command, _ = commands(PAGE)
    assert tiny == "bash examples/self_play/tiny.sh" and (PROJECT / tiny.split()[1]).is_file()
    served = shlex.split(serve)
    assert served[:3] == ["python", "-m", "sglang.launch_server"]
    words = shlex.split(command)
    assert words[:3] == ["python", "-m", "agentrl.train"]
    (roles,) = (word for word in words if ".roles=" in word)
    assert served[served.index("--model-path") + 1] in roles and served[-1] in roles
    Opponent.moves = ["small words"] * 1000
    Opponent.models = ["runs/self_play_tiny/policy"]
    address = roles.replace("http://127.0.0.1:30000/v1", opponent)
    assert train([*overrides, address, "trainer.total_training_steps=1"]) == 0
    assert Opponent.asked and {one["model"] for one in Opponent.asked} == set(Opponent.models)


@pytest.mark.slice(0, "long run")
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("seed", [1, 2, 3])
def test_self_play_beats_a_fixed_opponent_more_often_than_before(
    seed: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The seeds that the recipe was chosen on: the opponent draws its moves, and is not trained with."""
    monkeypatch.chdir(PROJECT)  # the file of loops names the environment's
    assert make_tiny(["--out", str(tmp_path), "--seed", str(seed)]) == 0
    keys = {
        "data.train_files": tmp_path / "train.parquet",
        "data.val_files": tmp_path / "validation.parquet",
        "actor_rollout_ref.model.path": tmp_path / "policy",
        "trainer.default_local_dir": tmp_path / "run",
        "trainer.seed": seed,
    }
    assert train(["--config-name", "recipe/self_play_tiny", *(f"{key}={value}" for key, value in keys.items())]) == 0
    before, *_, after = [line for line in lines(tmp_path / "run") if "val/success_sampled" in line]
    assert before["val/success_sampled"] <= 0.6
    assert after["val/success_sampled"] >= before["val/success_sampled"] + 0.1
    assert after["val/success_greedy"] >= before["val/success_greedy"]
