"""A command that is refused changes nothing in the folder of the run that it was given."""

from __future__ import annotations

from pathlib import Path

import pytest

from agentrl.quickstart.tiny_policy import TinyShape, make_tiny_policy
from agentrl.sft import main as sft
from agentrl.train import main
from tests.runs import Overrides

Stamp = tuple[bytes, int]


def files(folder: Path) -> dict[str, Stamp]:
    """Content and time of change of every file, by its path."""
    found = sorted(path for path in folder.rglob("*") if path.is_file())
    return {str(path.relative_to(folder)): (path.read_bytes(), path.stat().st_mtime_ns) for path in found}


def leave_traces(run: Path) -> None:
    """What a killed run may have left: part of a line of metrics, and of a checkpoint."""
    with (run / "metrics.jsonl").open("ab") as metrics:
        metrics.write(b'{"step": 2, "rew')
    partial = run / "checkpoints" / ".step_000002.partial" / "policy"
    partial.mkdir(parents=True)
    (partial / "weights").write_bytes(b"half of it")


def test_a_refused_training_leaves_the_run_as_it_was(
    small_run: Overrides, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run, lora = tmp_path / "run", "actor_rollout_ref.model.lora_rank"
    first = ["data.val_files=null", f"{lora}=4", "trainer.total_training_steps=2"]
    assert main(small_run(*first)) == 0
    leave_traces(run)
    other = make_tiny_policy(tmp_path / "other", seed=1, shape=TinyShape(hidden=64))
    unreachable = tmp_path / "unreachable.yaml"
    unreachable.write_text(
        "tools:\n  - class_name: tools.remote_search.RemoteSearchTool\n"
        "    config: {url: 'http://127.0.0.1:9/retrieve', attempts: 1}\n"
    )
    wrong = tmp_path / "wrong.yaml"
    wrong.write_text("tools:\n  - class_name: tools.calculator.Calculater\n    config: {}\n")
    loose = tmp_path / "loose"
    loose.mkdir()
    tool_config, path = "actor_rollout_ref.rollout.multi_turn.tool_config_path", "actor_rollout_ref.model.path"
    checkpoint = run / "checkpoints" / "step_000002"
    refused: dict[str, tuple[list[str], str]] = {
        "another LoRA rank": ([f"{lora}=8"], "another model"),
        "no adapters": ([f"{lora}=0"], "another model"),
        "another model": ([f"{path}={other}"], "another model"),
        "no such model": ([f"{path}={tmp_path}/none"], "none"),
        "another estimator": (["algorithm.adv_estimator=rloo"], "algorithm.adv_estimator"),
        "other data": ([f"data.train_files={tmp_path}/none.parquet"], "none.parquet"),
        "fewer rows": (["data.train_max_samples=8"], "other data"),
        # As many steps as were done, or fewer: the step says nothing of a run with other data.
        "fewer rows, nothing left": (["data.train_max_samples=8", "trainer.total_training_steps=2"], "other data"),
        "fewer rows and steps": (["data.train_max_samples=8", "trainer.total_training_steps=1"], "other data"),
        "another optimizer": (["actor_rollout_ref.actor.optim.name=muon"], "optim.name"),
        "an unknown tool class": ([f"{tool_config}={wrong}"], "Calculater"),
        "a tool without a server": ([f"{tool_config}={unreachable}"], "127.0.0.1:9"),
        "the same, to start over": ([f"{tool_config}={unreachable}", "trainer.resume_mode=disable"], "127.0.0.1:9"),
        "other data, to start over": (
            [f"data.train_files={tmp_path}/none.parquet", "trainer.resume_mode=disable"],
            "none.parquet",
        ),
        "no model, to start over": ([f"{path}={tmp_path}/none", "trainer.resume_mode=disable"], "none"),
        "no checkpoint": (["trainer.resume_mode=resume_path", f"trainer.resume_from_path={loose}"], "no whole"),
        "a checkpoint of another model": (
            [f"{path}={other}", "trainer.resume_mode=resume_path", f"trainer.resume_from_path={checkpoint}"],
            "another model",
        ),
        "fewer steps than were done": (["trainer.total_training_steps=1"], "nothing left to train"),
    }
    before_models = ("another LoRA rank", "no adapters", "another estimator", "fewer rows", "another optimizer")
    before = files(run)
    for name, (keys, says) in refused.items():
        more = [] if keys[-1].startswith("trainer.total_training_steps") else ["trainer.total_training_steps=4"]
        capsys.readouterr()
        assert main(small_run(*first, *keys, *more)) == 2, name
        out, said = capsys.readouterr()
        assert says in said, f"{name}: {said}"
        assert ("load models" not in out) or name not in before_models
        assert files(run) == before, name
        assert not run.with_name("run.1").exists(), name

    assert main(small_run(*first)) == 0, "it is done"
    assert files(run) == before
    assert main(small_run(*first, "trainer.total_training_steps=3")) == 0, "nothing was broken"
    assert not list((run / "checkpoints").glob(".*"))


def test_a_refused_supervised_training_leaves_the_run_as_it_was(
    data_dir: Path, policy_dir: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = tmp_path / "sft"
    keys = [
        f"data.train_files={data_dir}/sft.parquet",
        "data.on_bad_row=learn",
        f"model.path={policy_dir}",
        "data.train_batch_size=40",
        "trainer.total_training_steps=2",
        "trainer.save_freq=1",
        f"trainer.default_local_dir={run}",
    ]
    assert sft(keys) == 0
    leave_traces(run)
    other = make_tiny_policy(tmp_path / "other", seed=1, shape=TinyShape(hidden=64))
    before = files(run)
    for changed in (
        [f"model.path={other}", "trainer.total_training_steps=3"],
        ["model.lora_rank=4", "trainer.total_training_steps=3"],
        ["data.train_batch_size=20", "trainer.total_training_steps=3"],
        [f"model.path={tmp_path}/none", "trainer.resume_mode=disable"],
        ["trainer.total_training_steps=1"],
    ):
        capsys.readouterr()
        assert sft([*keys, *changed]) == 2, changed
        assert capsys.readouterr().err.startswith("error: ")
        assert files(run) == before, changed
