"""Every kind of bad input stops early with one message that says where and what to do, and leaves what was there."""

from __future__ import annotations

import json
import shutil
from functools import partial
from pathlib import Path

import pyarrow
import pyarrow.parquet as pq
import pytest

from agentrl.train import main
from agentrl.workers.trainable import MAX_SKIPPED
from tests.runs import Overrides, refused

fails = partial(refused, main)


def row(**changes: object) -> dict[str, object]:
    base: dict[str, object] = {
        "prompt": [{"role": "user", "content": "What is 2 + 2?"}],
        "data_source": "quickstart/arithmetic",
        "agent_name": "tool_agent",
        "reward_model": {"style": "rule", "ground_truth": "4"},
        "tools_kwargs": {"calculator": {"create_kwargs": {"x": 1}}},
    }
    return {**base, **changes}


def parquet(path: Path, rows: list[dict[str, object]]) -> Path:
    pq.write_table(pyarrow.Table.from_pylist(rows), path)
    return path


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"agent_name": "tool_agnet"}, ["tool_agnet", "tool_agent", "row 5"]),
        ({"tools_kwargs": {"calculater": {"create_kwargs": {"x": 1}}}}, ["calculater", "calculator", "row 5"]),
        ({"data_source": "nobody/knows"}, ["nobody/knows"]),
        ({"reward_model": None}, ["row 5", "it has no reward_model.ground_truth", "custom_reward_function.path"]),
        ({"prompt": [{"role": "user", "content": None}]}, ["row 5", "content"]),
    ],
)
def test_bad_row(
    small_run: Overrides,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    changes: dict[str, object],
    says: list[str],
) -> None:
    path = parquet(tmp_path / "rows.parquet", [row(**(changes if number == 5 else {})) for number in range(8)])
    fails([*small_run(f"data.train_files={path}"), "custom_reward_function.path=null"], capsys, *says)


@pytest.mark.parametrize(
    ("override", "says"),
    [
        ("data.train_files=bad.parquet", ["bad.parquet", "prompt", "question"]),
        ("actor_rollout_ref.actor.ppo_mini_batch_size=3", ["ppo_mini_batch_size", "train_batch_size"]),
        ("actor_rollout_ref.actor.optm.lr=1", ["actor_rollout_ref.actor.optim.lr"]),
    ],
    ids=["no prompts", "a size that does not divide", "an unknown key"],
)
def test_a_command_that_cannot_be_run(
    small_run: Overrides,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    override: str,
    says: list[str],
) -> None:
    """test_refused has more of them, beside a run."""
    monkeypatch.chdir(tmp_path)
    parquet(tmp_path / "bad.parquet", [{"question": "2 + 2?"}] * 8)
    fails(small_run(override), capsys, *says)


def test_tokenizer_without_a_chat_template(
    small_run: Overrides, tmp_path: Path, policy_dir: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    bare = shutil.copytree(policy_dir, tmp_path / "bare")
    (bare / "chat_template.jinja").unlink(missing_ok=True)
    config = json.loads((bare / "tokenizer_config.json").read_text())
    config.pop("chat_template", None)
    (bare / "tokenizer_config.json").write_text(json.dumps(config))
    fails(
        small_run(f"actor_rollout_ref.model.path={bare}"),
        capsys,
        "chat template",
        "actor_rollout_ref.model.chat_template",
    )


def test_a_checkpoint_that_is_half_written(
    small_run: Overrides, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(small_run("trainer.total_training_steps=2")) == 0
    newest = tmp_path / "run" / "checkpoints" / "step_000002"
    weights = next(path for path in (newest / "policy").iterdir() if path.stat().st_size > 10000)
    weights.write_bytes(weights.read_bytes()[:1000])
    capsys.readouterr()
    path_mode = ["trainer.resume_mode=resume_path", f"trainer.resume_from_path={newest}"]
    fails(small_run(*path_mode), capsys, "step_000002", weights.name)
    assert main(small_run()) == 0, "auto falls back to the checkpoint of step 1"
    assert "step_000002" in capsys.readouterr().out


def test_a_full_disk_keeps_what_was_there(
    small_run: Overrides, tmp_path: Path, capsys: pytest.CaptureFixture[str], full_disk: Path
) -> None:
    run = full_disk / "run"
    fails(small_run(run_dir=run), capsys, "disk is full")
    kept = sorted(path.name for path in (run / "checkpoints").glob("step_*"))
    assert kept, "the checkpoints of earlier steps are there"
    opened = [str(link.readlink()) for link in Path("/proc/self/fd").iterdir() if link.is_symlink()]
    assert [path for path in opened if Path(path).is_relative_to(run)] == [], "a run that has ended holds no lock"
    assert main(small_run("trainer.val_only=true", f"actor_rollout_ref.model.path={run / 'nope'}")) == 2


def test_a_policy_that_is_not_finite_any_more_ends_the_run_with_metrics_intact(
    small_run: Overrides, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    steps = ("actor_rollout_ref.actor.optim.lr=1e30", "trainer.total_training_steps=20", "data.val_files=null")
    fails(small_run(*steps), capsys, "step", "finite", "in a row in which nothing was learnt")
    skipped = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    assert sum(line.get("actor/skipped_updates", 0) > 0 for line in skipped) >= MAX_SKIPPED - 1


@pytest.mark.parametrize("below", ["", "run"])
def test_a_run_folder_that_cannot_be_made(
    small_run: Overrides, tmp_path: Path, capsys: pytest.CaptureFixture[str], below: str
) -> None:
    (tmp_path / "file").write_text("of mine")
    fails(small_run(run_dir=tmp_path / "file" / below), capsys, "trainer.default_local_dir=", "cannot be written")
    assert (tmp_path / "file").read_text() == "of mine"


@pytest.mark.parametrize("what", ["nothing", "file", "folder"])
def test_what_is_no_checkpoint_is_told_before_models_are_loaded(
    small_run: Overrides, tmp_path: Path, capsys: pytest.CaptureFixture[str], what: str
) -> None:
    (tmp_path / "file").touch()
    (tmp_path / "folder").mkdir()
    given = f"trainer.resume_from_path={tmp_path / what}"
    assert main(small_run("trainer.resume_mode=resume_path", given)) == 2
    told = capsys.readouterr()
    assert f"{given} is no whole checkpoint" in told.err
    assert "load models" not in told.out
    assert not (tmp_path / "run").exists()
