"""`python -m agentrl.generate` from its command line: what the file holds; a killed run goes on to the same file."""

from __future__ import annotations

import json
import signal
from collections.abc import Callable
from functools import partial
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from agentrl import evaluate
from agentrl.config import load_config, write_config
from agentrl.generate import main
from agentrl.observe.invariants import check_trajectory
from agentrl.trajectory.parquet import from_row
from tests.forked import forked
from tests.runs import refused

fails = partial(refused, main)

Arguments = Callable[..., list[str]]


@pytest.fixture
def arguments(policy_dir: Path, data_dir: Path, tmp_path: Path) -> Arguments:
    """A run of seconds: 6 prompts, 3 responses each, two prompts at once."""

    def of(*more: str) -> list[str]:
        return [
            f"data.path={data_dir}/val.parquet",
            f"data.output_path={tmp_path}/out.parquet",
            f"model.path={policy_dir}",
            f"rollout.multi_turn.tool_config_path={data_dir}/tools.yaml",
            "rollout.n=3",
            "data.batch_size=2",
            "data.max_prompt_length=300",
            "data.max_response_length=48",
            *more,
        ]

    return of


def test_rows_with_their_responses(arguments: Arguments, data_dir: Path, tmp_path: Path) -> None:
    assert main(arguments("data.output_scores=true", "data.output_trajectories=true")) == 0
    given, table = pq.read_table(data_dir / "val.parquet"), pq.read_table(tmp_path / "out.parquet")
    assert table.select(given.column_names).equals(given.replace_schema_metadata(None))
    assert not (tmp_path / "out.parquet.parts").exists()
    for row in table.to_pylist(maps_as_pydicts="strict"):
        trajectories = [from_row(record) for record in row["trajectories"]]
        assert len(trajectories) == len(row["responses"]) == 3
        assert len(set(row["responses"])) > 1, "every response has its own seed"
        for index, trajectory in enumerate(trajectories):
            assert check_trajectory(trajectory, 10**6) == []
            assert trajectory.data_source == row["data_source"]
            assert row["responses"][index] == "\n".join(t.text for t in trajectory.turns if t.role == "assistant")
            assert row["response_status"][index] == trajectory.status
            assert row["response_tokens"][index] == trajectory.num_sampled > 0
            assert row["response_turns"][index] == sum(turn.role == "assistant" for turn in trajectory.turns)
            assert row["response_tool_calls"][index] == len(trajectory.tool_calls)
            assert row["response_score"][index] == trajectory.score is not None


KILLED = """
import os, signal, sys
from agentrl.offline.responses import Parts
from agentrl.generate import main

add = Parts.add

def add_and_die(parts, rows):
    if parts.done == 4:
        os.kill(os.getpid(), signal.SIGKILL)
    add(parts, rows)

Parts.add = add_and_die
main(sys.argv[1:])
"""
"""Dies when the third batch is done and not yet written."""


def test_a_killed_run_goes_on_to_the_same_file(
    arguments: Arguments, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(arguments(f"data.output_path={tmp_path}/whole.parquet")) == 0
    (tmp_path / "killed.py").write_text(KILLED)
    done = forked([tmp_path / "killed.py", *arguments()], tmp_path)
    assert done.returncode == -signal.SIGKILL
    assert not (tmp_path / "out.parquet").exists()
    capsys.readouterr()
    assert main(arguments()) == 0
    assert "4 of 6 prompts are done" in capsys.readouterr().out
    assert pq.read_table(tmp_path / "out.parquet").equals(pq.read_table(tmp_path / "whole.parquet"))


def test_evaluate_scores_as_training_does(arguments: Arguments, reward_file: Path, tmp_path: Path) -> None:
    custom = f"custom_reward_function.path={reward_file}"
    assert main(arguments("data.output_scores=true", custom)) == 0
    out, path = tmp_path / "scores.json", tmp_path / "out.parquet"
    assert evaluate.main([f"data.path={path}", f"data.output_path={out}", custom]) == 0
    scores = pq.read_table(path)["response_score"].to_pylist()
    written = json.loads(out.read_text())["all"]
    assert written["mean"] == pytest.approx(sum(map(sum, scores)) / 18)
    assert written["best@3"] == pytest.approx(sum(map(max, scores)) / 6)


def test_other_keys_do_not_go_on_with_the_same_file(
    arguments: Arguments, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupted(*args: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("agentrl.offline.responses.Parts.publish", interrupted)
    assert main(arguments("data.max_samples=2")) == 130
    monkeypatch.undo()
    capsys.readouterr()
    fails(arguments("data.max_samples=2", "trainer.seed=5"), capsys, "out.parquet.parts", "trainer.seed=1", "5")
    fails(arguments(), capsys, "out.parquet.parts", "data.path")
    assert main(arguments("data.max_samples=2", "data.batch_size=1")) == 0
    assert pq.read_table(tmp_path / "out.parquet").num_rows == 2
    fails(arguments(), capsys, "out.parquet", "exists already")


def test_the_config_of_a_training_run_serves(
    arguments: Arguments, data_dir: Path, policy_dir: Path, tmp_path: Path
) -> None:
    training = load_config(
        [
            f"data.train_files={data_dir}/train.parquet",
            f"data.val_files={data_dir}/val.parquet",
            f"actor_rollout_ref.model.path={policy_dir}",
            f"actor_rollout_ref.rollout.multi_turn.tool_config_path={data_dir}/tools.yaml",
            "data.max_prompt_length=300",
            "data.max_response_length=24",
            "algorithm=ppo",
        ]
    )
    write_config(training, tmp_path / "run" / "config.yaml")
    mine = [f"data.path={data_dir}/val.parquet", f"data.output_path={tmp_path}/out.parquet", "data.max_samples=2"]
    greedy = ["rollout.n=1", "rollout.do_sample=false"]
    assert main(["--config-path", f"{tmp_path}/run", "--config-name", "config", "--trust", *mine, *greedy]) == 0
    table = pq.read_table(tmp_path / "out.parquet")
    assert [len(responses) for responses in table["responses"].to_pylist()] == [1, 1]
    assert max(tokens[0] for tokens in table["response_tokens"].to_pylist()) <= 24
    assert "response_score" not in table.column_names


def test_bad_input_writes_nothing(
    arguments: Arguments, data_dir: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    rows = pq.read_table(data_dir / "val.parquet")
    again, other = tmp_path / "again.parquet", tmp_path / "other.parquet"
    pq.write_table(rows.append_column("responses", pa.array([["x"]] * len(rows))), again)
    pq.write_table(rows.append_column("reward", pa.array(["x"] * len(rows))), other)
    before = set(tmp_path.rglob("*"))
    fails(arguments("data.path=nope.parquet"), capsys, "nope.parquet")
    fails(arguments(f"data.path={again}"), capsys, "again.parquet", "column responses")
    fails(arguments(f"data.output_path={again}/out.parquet"), capsys, "data.output_path", "again.parquet is no folder")
    fails(arguments("rollout.do_sample=false"), capsys, "do_sample=false conflicts", "rollout.n=3")
    fails(
        arguments("model.path=quickstart"),
        capsys,
        "model.path: expected a model that is there",
        "runs/quickstart/policy",
    )
    fails(arguments("rollout.temprature=2"), capsys, "unknown key", "actor_rollout_ref.rollout.temperature")
    fails(arguments("data.max_prompt_length=3"), capsys, "data.max_prompt_length=3")
    assert set(tmp_path.rglob("*")) == before


def test_files_with_other_columns(arguments: Arguments, data_dir: Path, tmp_path: Path) -> None:
    rows = pq.read_table(data_dir / "val.parquet").slice(0, 2)
    pq.write_table(rows.append_column("note", pa.array(["first", "second"])), tmp_path / "more.parquet")
    assert main(arguments(f"data.path=[{data_dir}/val.parquet,{tmp_path}/more.parquet]", "data.batch_size=5")) == 0
    table = pq.read_table(tmp_path / "out.parquet")
    assert table["note"].to_pylist() == [None] * 6 + ["first", "second"]
    assert table["prompt"].to_pylist()[6:] == rows["prompt"].to_pylist()


def test_an_error_of_a_users_scorer_keeps_the_batches_before_it_or_is_counted(
    arguments: Arguments, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    function = tmp_path / "mine.py"
    function.write_text(
        "def compute_score(trajectory):\n"
        "    number, k = trajectory.uid.split('/')[1:]\n"
        "    return None if (number, k) == ('3', '2') else 1.0\n"
    )
    keys = arguments("data.output_scores=true", f"custom_reward_function.path={function}")
    fails(
        keys,
        capsys,
        "a score must be a finite number (in float32), found None",
        f"{function}:1",
        "val.parquet, row 3",
        "count",
    )
    assert len(list((tmp_path / "out.parquet.parts").glob("0*.parquet"))) == 1
    assert main([*keys, "rollout.agent.on_code_error=count"]) == 0
    row = pq.read_table(tmp_path / "out.parquet").to_pylist()[3]
    assert row["response_score"] == [1.0, 1.0, None] and None not in row["responses"]
    assert row["response_failure"][2].startswith("scorer: CodeError: custom_reward_function: ")
