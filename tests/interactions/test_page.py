"""docs/interactions.md: its interactions, trained with as shown; and rows that a run refuses."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow
import pyarrow.parquet as pq
import pytest

from agentrl.observe.invariants import check_trajectory
from agentrl.train import main
from agentrl.trajectory.parquet import read_trajectories
from tests.agent_loop.short_turns import ending_its_turns
from tests.e2e.test_docs import write_files
from tests.e2e.test_train import lines
from tests.naming import Names, assert_names
from tests.runs import Overrides

MULTI_TURN = "actor_rollout_ref.rollout.multi_turn"


@pytest.fixture
def run_of(
    small_run: Overrides, policy_dir: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Callable[[list[dict[str, Any]]], list[str]]:
    """Overrides of one step over such rows, with the page's interactions."""
    assert write_files("docs/interactions.md", tmp_path) == ["my_game.py", "my_interaction.py", "my_interactions.yaml"]
    monkeypatch.syspath_prepend(tmp_path)

    def overrides(rows: list[dict[str, Any]]) -> list[str]:
        system = [{"role": "system", "content": "Play."}]
        base = {"prompt": system, "agent_name": "tool_agent", "reward_model": {"ground_truth": "5"}}
        pq.write_table(pyarrow.Table.from_pylist([{**base, **row} for row in rows]), tmp_path / "rows.parquet")
        unwanted = ("filter_groups", "custom_reward_function")
        return [
            *(word for word in small_run() if not any(key in word for key in unwanted)),
            f"data.train_files={tmp_path}/rows.parquet",
            f"data.val_files={tmp_path}/rows.parquet",
            f"actor_rollout_ref.model.path={ending_its_turns(policy_dir, tmp_path / 'policy')}",
            f"{MULTI_TURN}.tool_config_path=null",
            f"{MULTI_TURN}.interaction_config_path={tmp_path}/my_interactions.yaml",
            "data.max_response_length=160",
            "trainer.total_training_steps=1",
            "trainer.val_before_train=false",
        ]

    return overrides


def test_the_pages_interactions_are_trained_with(
    run_of: Callable[[list[dict[str, Any]]], list[str]], tmp_path: Path
) -> None:
    question = [{"role": "user", "content": "Say please."}]
    rows: list[dict[str, Any]] = [
        {"data_source": "interaction/game", "interaction_kwargs": {"name": "game", "seed": 7}},
        {"data_source": "interaction/game", "interaction_kwargs": {"name": "game", "seed": 8}, "prompt": question},
        {"data_source": "quickstart/x", "interaction_kwargs": {"name": "polite"}, "prompt": question},
        {"data_source": "quickstart/x", "interaction_kwargs": {"name": "notes"}, "prompt": question},
    ]
    assert main(run_of(rows)) == 0
    (step,) = lines(tmp_path / "run")
    assert step["left_out/failed"] == 0
    assert step["turns/mean"] > 2
    written = read_trajectories(next((tmp_path / "run" / "trajectories").glob("train_*[0-9].parquet")))
    assert [problem for t in written for problem in check_trajectory(t, 600)] == []
    for t in written:
        assert ("I think of a number" in str(t.messages[:2])) == (t.data_source == "interaction/game")
    assert max(len(t.transcripts) for t in written) > 2


def test_openings_and_rewritten_histories_are_replayed(
    run_of: Callable[[list[dict[str, Any]]], list[str]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    rows = [
        {"data_source": "interaction/game", "interaction_kwargs": {"name": "game"}},
        {"data_source": "quickstart/x", "interaction_kwargs": {"name": "notes"}},
    ]
    overrides = [*run_of(rows * 2), f"tools.cassette_path={tmp_path}/cassette"]
    texts = []
    for mode in ("record", "replay"):
        folder = tmp_path / mode
        assert main([*overrides, f"tools.cassette={mode}", f"trainer.default_local_dir={folder}"]) == 0
        written = read_trajectories(next((folder / "trajectories").glob("train_*[0-9].parquet")))
        texts.append([(t.messages, t.turn_rewards, t.score, len(t.transcripts)) for t in written])
        monkeypatch.setattr("my_game.Game.reset", None)  # the replay must not play
    assert texts[0] == texts[1]
    assert max(transcripts for *_, transcripts in texts[1]) > 1


@pytest.mark.parametrize(
    ("row", "says"),
    [
        (
            {"agent_name": "react"},
            ("interaction_kwargs", "agent_name=react", "tool_agent"),
        ),
        ({"agent_name": "single_turn_agent"}, "agent_name=single_turn"),
        (
            {"interaction_kwargs": {"name": "game", "sead": 7}},
            ("interaction_kwargs", "key 'sead'", "unknown"),
        ),
    ],
)
def test_rows_that_no_interaction_would_see_as_meant_are_refused(
    run_of: Callable[[list[dict[str, Any]]], list[str]],
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    row: dict[str, Any],
    says: Names,
) -> None:
    good = {"data_source": "interaction/game", "interaction_kwargs": {"name": "game", "seed": 7}}
    overrides = run_of([good, {**good, **row}, good, good])
    assert main(overrides) == 2
    said = capsys.readouterr().err
    assert_names(said, f"{tmp_path}/rows.parquet", "row 1")
    assert_names(said, says)


def test_such_rows_may_be_left_out(run_of: Callable[[list[dict[str, Any]]], list[str]]) -> None:
    good = {"data_source": "interaction/game", "interaction_kwargs": {"name": "game", "seed": 7}}
    overrides = run_of([good, {**good, "agent_name": "react"}, good])
    assert main([*overrides, "data.on_bad_row=skip", "data.train_batch_size=2"]) == 0
