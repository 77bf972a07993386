"""Scorers and interactions are tried before the first step, and rows that leave them unused are told."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow
import pyarrow.parquet as pq
import pytest

from agentrl.config import load_config
from agentrl.errors import CodeError
from agentrl.rollouts.context import FirstRows
from agentrl.rollouts.objects import UserObjects
from agentrl.train import main
from agentrl.trajectory.sample import Sample
from tests.naming import Names, assert_names
from tests.runs import Overrides

INTERACTIONS = """
from agentrl.interaction import Interaction, InteractionResponse


class Talker(Interaction):
    async def start_interaction(self, instance_id, **kwargs):
        return None

    async def generate_response(self, instance_id, messages):
        return ANSWER
"""


@pytest.fixture
def asked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., list[str]]:
    """Overrides for rows that name an interaction which gives `answer`."""

    def overrides(answer: str, columns: dict[str, Any]) -> list[str]:
        (tmp_path / "talkers_of_a_user.py").write_text(INTERACTIONS.replace("ANSWER", answer))
        monkeypatch.syspath_prepend(tmp_path)
        monkeypatch.delitem(sys.modules, "talkers_of_a_user", raising=False)
        (tmp_path / "it.yaml").write_text("interaction:\n  - {name: it, class_name: talkers_of_a_user.Talker}\n")
        prompt = [{"role": "user", "content": "What is 1 + 2?"}]
        row = {"prompt": prompt, "data_source": "x", "agent_name": "tool_agent"}
        rows = [row, *[row | columns] * 7] if columns.pop("vanish", False) else [row | columns] * 8
        pq.write_table(pyarrow.Table.from_pylist(rows), tmp_path / "rows.parquet")
        return [
            f"data.train_files={tmp_path}/rows.parquet",
            f"data.val_files={tmp_path}/rows.parquet",
            f"actor_rollout_ref.rollout.multi_turn.interaction_config_path={tmp_path}/it.yaml",
            "trainer.total_training_steps=1",
        ]

    return overrides


@pytest.mark.parametrize(
    ("body", "status", "says"),
    [
        ("(**columns):\n    return 'good'", 2, "found 'good'"),
        ("(**columns):\n    return float(scoer)", 2, ("NameError", "'scoer'")),
        ("(solution_str, **columns):\n    return {}[solution_str]", 2, "KeyError"),
    ],
    ids=["type", "certain", "perhaps the answer's"],
)
def test_a_scorer_is_tried_before_anything_is_validated(
    small_run: Overrides, tmp_path: Path, capsys: pytest.CaptureFixture[str], body: str, status: int, says: Names
) -> None:
    (tmp_path / "scorer.py").write_text(f"def compute_score{body}\n")
    assert main([*small_run(), f"custom_reward_function.path={tmp_path}/scorer.py"]) == status
    out, err = capsys.readouterr()
    assert_names(err, says, "scorer.py")
    was_certain = says != "KeyError"
    assert ("made-up answer" in err) == was_certain and ("validate" not in out) == was_certain
    assert ("the run goes on" in out) != was_certain, "an answer that only the made-up one meets is no reason to end"


def test_a_rollout_worker_of_rays_tries_them_on_the_rows_that_it_is_sent(
    small_run: Overrides, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("ray")
    from agentrl.rollouts.ray_worker import RolloutWorker
    from agentrl.runtime.ray.pool import raised
    from agentrl.runtime.ray.session import Surroundings

    (tmp_path / "scorer.py").write_text("def compute_score(**columns):\n    return 'good'\n")
    config = load_config([*small_run(), f"custom_reward_function.path={tmp_path}/scorer.py"])
    monkeypatch.chdir(tmp_path)  # a worker goes to the folder it is given
    row = Sample([{"role": "user", "content": "What is 1 + 2?"}], "x", "single_turn", ground_truth="3")
    for first, fails in ((FirstRows({"x": row}), True), (FirstRows(), False)):
        worker = RolloutWorker(Surroundings(str(tmp_path), {}))
        answer = worker.open(config, "cpu", tmp_path, (1, 1), UserObjects(), first)
        worker.close()
        assert (answer is not None) == fails
        if answer is not None:
            error = raised(answer, "rollout worker 1")
            assert isinstance(error, CodeError) and "found 'good'" in str(error) and "made-up answer" in str(error)


def test_an_interaction_is_tried_before_anything_is_validated(
    small_run: Overrides, asked: Callable[..., list[str]], capsys: pytest.CaptureFixture[str]
) -> None:
    assert main([*small_run(), *asked("'no response'", {"interaction_kwargs": {"name": "it"}})]) == 2
    out, err = capsys.readouterr()
    assert_names(err, "InteractionResponse", "interaction it")
    assert "validate" not in out


@pytest.mark.parametrize(
    ("columns", "says"),
    [
        ({"interaction_kwargs": {"name": "it"}, "vanish": True}, "no row of"),
        ({"data_source": "interaction/it"}, "8 rows, the first is"),
        ({"interaction_kwargs": {"name": "it"}}, None),
    ],
    ids=["lost column", "source", "asked"],
)
def test_rows_that_leave_an_interaction_unused_are_told_once(
    small_run: Overrides,
    asked: Callable[..., list[str]],
    capsys: pytest.CaptureFixture[str],
    columns: dict[str, Any],
    says: str | None,
) -> None:
    assert main([*small_run(), *asked("InteractionResponse(True, '', 0.0)", columns)]) == 0
    told = [line for line in capsys.readouterr().out.splitlines() if "from_pylist" in line]
    assert len(told) == (says is not None)
    assert says is None or says in told[0]


def test_rows_without_a_loop_beside_tools_are_told_once(
    small_run: Overrides, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    rows = [{"prompt": [{"role": "user", "content": f"What is {n} + 2?"}], "data_source": "x"} for n in range(8)]
    pq.write_table(pyarrow.Table.from_pylist(rows), tmp_path / "rows.parquet")
    files = [f"data.{split}_files={tmp_path}/rows.parquet" for split in ("train", "val")]
    assert main([*small_run(), *files, "trainer.val_only=true"]) == 0
    assert capsys.readouterr().out.count("8 rows of") == 1
