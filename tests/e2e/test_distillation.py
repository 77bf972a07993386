"""Distillation through the main job: refused teachers, two ranks as one process, resumed runs as undisturbed ones."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
from safetensors.torch import load_file

from agentrl.config import load_config
from agentrl.errors import ConfigError
from agentrl.quickstart.tiny_policy import TinyShape, make_tiny_policy
from agentrl.train import main
from tests.e2e.conftest import forked_command
from tests.e2e.test_resume import numbers
from tests.e2e.test_train import lines
from tests.runs import Overrides
from tests.workers.teacher_server import serving

EXPERT = ["expert.files={data}/sft.parquet", "expert.batch_size=3", "data.on_bad_row=skip"]
"""Transcripts beside it, fewer than two ranks have optimizer steps for."""
SCOPES = {
    "advantage": ["distillation.policy_loss_coef=0.5"],
    "top_k": ["distillation.scope=top_k", "distillation.divergence=forward_kl", "distillation.policy_loss_coef=0"],
    "full": ["distillation.scope=full", "distillation.divergence=js", *EXPERT],
    "rlsd": [
        "algorithm.adv_estimator=rlsd",
        "distillation.teacher.path=policy",
        'distillation.teacher.privileged="The answer is {ground_truth}."',
    ],
}


@pytest.fixture(scope="module")
def teacher_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Another policy of the same vocabulary, wider than the one that learns."""
    return make_tiny_policy(tmp_path_factory.mktemp("teacher"), seed=9, shape=TinyShape(hidden=128, layers=1))


def chosen(scope: str, data_dir: Path) -> list[str]:
    return [key.replace("{data}", str(data_dir)) for key in SCOPES[scope]]


def same_weights(one: Path, other: Path) -> bool:
    left, right = (load_file(path / "policy" / "model.safetensors") for path in (one, other))
    return left.keys() == right.keys() and all((left[name] == right[name]).all() for name in left)


@pytest.mark.slice(1, "matrix")
@pytest.mark.parametrize("scope", ["advantage", "full", "rlsd"])
def test_a_resumed_run_is_an_undisturbed_one(
    small_run: Overrides, teacher_dir: Path, data_dir: Path, tmp_path: Path, scope: str
) -> None:
    """Bit for bit."""
    keys = [f"distillation.teacher.path={teacher_dir}", *chosen(scope, data_dir), "trainer.total_training_steps=2"]
    whole, parts = tmp_path / "whole", tmp_path / "parts"
    assert main(small_run(*keys, "data.val_files=null", run_dir=whole)) == 0
    first = lines(whole)[0]
    assert first["distill/taught_fraction"] == 1 and first["distill/kl"] > 0 and first["time/teacher"] > 0
    assert ("actor/teacher_loss" in first) == ("actor/expert_loss" in first) == (scope == "full")
    shutil.copytree(whole, parts)
    shutil.rmtree(parts / "checkpoints" / "step_000002")
    shutil.rmtree(parts / "policy")
    assert main(small_run(*keys, "data.val_files=null", run_dir=parts)) == 0
    assert numbers(parts) == numbers(whole)
    assert same_weights(parts, whole)


def test_a_served_teacher_teaches_what_a_loaded_one_does(
    small_run: Overrides, teacher_dir: Path, tmp_path: Path
) -> None:
    steps = ["data.val_files=null", "trainer.total_training_steps=1", *SCOPES["top_k"]]
    assert main(small_run(f"distillation.teacher.path={teacher_dir}", *steps, run_dir=tmp_path / "loaded")) == 0
    with serving(teacher_dir) as server:
        served = [f"distillation.teacher.base_url={server.url}", f"distillation.teacher.tokenizer={teacher_dir}"]
        assert main(small_run(*served, *steps, run_dir=tmp_path / "served")) == 0
        assert len(server.bodies) == 1 + 16
    one, other = (lines(tmp_path / name)[0] for name in ("loaded", "served"))
    for name in ("distill/kl", "actor/teacher_loss", "actor/grad_norm"):
        assert one[name] == pytest.approx(other[name], rel=1e-4)


@pytest.mark.timeout(600)
@pytest.mark.slice(0, "cluster")
@pytest.mark.parametrize("scope", list(SCOPES))
def test_two_ranks_equal_one_process(
    small_run: Overrides, teacher_dir: Path, data_dir: Path, tmp_path: Path, scope: str
) -> None:
    """By two teachers of different widths, each for its own sources; with rlsd by one and the policy itself.

    Elsewhere neither is the policy, whose gradient would be nothing but rounding, which AdamW makes as large as any.
    """
    pytest.importorskip("ray")
    other = make_tiny_policy(tmp_path / "other", seed=5)
    sources = json.dumps({"quickstart/arithmetic": {"path": str(teacher_dir)}}).replace('"', "")
    keys = [
        f"distillation.by_source={sources}",
        f"distillation.teacher.path={other}",
        *chosen(scope, data_dir),
        "trainer.device=cpu",
        "data.val_files=null",
        "trainer.total_training_steps=2",
    ]
    for name, ranks in (("one", 1), ("two", 2)):
        run = small_run(*keys, f"trainer.n_gpus_per_node={ranks}", run_dir=tmp_path / name)
        done = forked_command(run, tmp_path)
        assert done.returncode == 0, done.stderr + done.stdout
    for one, two in zip(lines(tmp_path / "one"), lines(tmp_path / "two"), strict=True):
        for name in [name for name in one if name.startswith(("actor/", "distill/"))]:
            assert two[name] == pytest.approx(one[name], rel=1e-3, abs=1e-5), name
    weights = [load_file(tmp_path / name / "policy" / "model.safetensors") for name in ("one", "two")]
    for name, tensor in weights[0].items():
        assert (tensor - weights[1][name]).abs().max() < 1e-4, name


def test_a_teacher_of_another_tokenizer_is_refused_before_anything_is_made(
    small_run: Overrides, teacher_dir: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """By ids and not by names: the folder may be called as one likes."""
    other = tmp_path / "Qwen"
    shutil.copytree(teacher_dir, other)
    text = json.loads((other / "tokenizer.json").read_text(encoding="utf-8"))
    vocabulary = text["model"]["vocab"]
    first, second = [token for token in vocabulary if len(token) == 1][5:7]
    vocabulary[first], vocabulary[second] = vocabulary[second], vocabulary[first]
    (other / "tokenizer.json").write_text(json.dumps(text), encoding="utf-8")
    assert main(small_run(f"distillation.teacher.path={other}")) == 2
    told = capsys.readouterr().err
    assert "distillation.teacher: a teacher scores the policy's own token ids, and the tokenizer at" in told
    assert "2 of " in told and f"is {first!r} here, there it is {second!r}" in told
    assert not (tmp_path / "run" / "checkpoints").exists() and not (tmp_path / "run" / "metrics.jsonl").exists()


def test_a_server_that_gives_no_log_probs_is_refused_at_the_start(
    small_run: Overrides, teacher_dir: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with serving(teacher_dir) as server:
        server.change = lambda answer: {"text": "I am a chat model"}
        served = [f"distillation.teacher.base_url={server.url}", f"distillation.teacher.tokenizer={teacher_dir}"]
        assert main(small_run(*served)) == 2
    told = capsys.readouterr().err
    assert f"distillation.teacher: {server.url} gives no log-probs of given tokens" in told and "a chat model" in told


@pytest.mark.parametrize(
    ("keys", "told"),
    [
        (["scope=top_k"], r"distillation\.scope='?top_k'? has no effect: it needs distillation\.teacher\.path or"),
        (["teacher.path=t", "use=loss"], r"estimator=k1 conflicts with distillation\.use=loss"),
        (["teacher.path=t", "divergence=js"], r"distillation\.divergence=.*js.* has no effect: it needs .*scope"),
        (["teacher.path=t", "scope=full", "estimator=k2"], r"distillation\.estimator=.*k2.* has no effect"),
        (["teacher.path=t", "scope=full", "divergence=jensen"], r"unknown divergence 'jensen'.*reverse_kl"),
        (["teacher.path=t", "scope=full", "divergence=js", "divergence_options.beta=2"], r"beta.*less than 1"),
        (["teacher.path=t", "teacher.base_url=http://x"], r"teacher\.path=.*t.* conflicts with .*teacher\.base_url"),
        (["teacher.base_url=http://x"], r"base_url=.* needs distillation\.teacher\.tokenizer"),
        (["teacher.base_url=http://x", "teacher.tokenizer=t", "scope=full"], "scope=full needs the weights"),
        (["teacher.path=t", "coef=0"], r"distillation\.coef=0 lets the teacher teach nothing"),
        (["teacher.privileged=x"], r"teacher\.privileged=.*x.* has no effect: it needs distillation\.teacher\.path or"),
        (["teacher.path=policy"], r"teacher\.path=policy is shown what the policy is shown"),
        (["by_source={a: {path: policy}}"], r"teacher\.path=policy is shown what the policy is shown"),
        (["teacher.path=policy", "teacher.privileged=x", "scope=full"], r"scope=full conflicts with .*path=policy"),
        (
            ["by_source={a/*: {path: t, base_url: u}}"],
            r"by_source\.a/\*\.path=t conflicts with .*base_url=u",
        ),
        (["by_source={a: {base_url: u}}"], r"by_source\.a\.base_url=u needs distillation\.by_source\.a\.tokenizer"),
        (["by_source={a: {paht: u}}"], r"distillation\.by_source"),
    ],
)
def test_keys_that_do_not_fit(keys: list[str], told: str) -> None:
    with pytest.raises(ConfigError, match=told):
        load_config([f"distillation.{key}" for key in keys])


def test_a_served_teacher_needs_the_policys_temperature() -> None:
    served = ["distillation.teacher.base_url=http://x", "distillation.teacher.tokenizer=t"]
    with pytest.raises(ConfigError, match=r"temperature=0\.7 conflicts with the teacher http://x"):
        load_config([*served, "actor_rollout_ref.rollout.temperature=0.7"])
