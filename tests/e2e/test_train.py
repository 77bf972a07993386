"""The main job from its command line: what it leaves behind, for every algorithm it offers."""

from __future__ import annotations

import itertools
import json
import math
from pathlib import Path

import pandas
import pytest
from transformers import AutoModelForCausalLM, AutoTokenizer

from agentrl.config.registries import ADVANTAGE_ESTIMATORS, POLICY_LOSSES
from agentrl.observe.invariants import check_trajectory
from agentrl.train import main
from agentrl.trajectory.parquet import read_trajectories
from tests.e2e.conftest import forked_command
from tests.model.families import make_model
from tests.runs import Overrides


def lines(run: Path) -> list[dict[str, float]]:
    return [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]


def test_what_a_run_leaves_behind(small_run: Overrides, tmp_path: Path, policy_dir: Path) -> None:
    done = forked_command(small_run(), tmp_path)
    assert done.returncode == 0, done.stderr
    run = tmp_path / "run"
    metrics = lines(run)
    assert [line["step"] for line in metrics] == [0, 1, 2, 3]
    assert {"val/success_sampled", "val/success_greedy"} <= set(metrics[0]) & set(metrics[3])
    for line in metrics[1:]:
        assert line["rollout/logprob_gap_max_abs"] < 1e-4, "engine and trainer disagree"
        assert line["actor/grad_norm"] > 0
        assert line["reward/std"] > 0
        assert line["time/rollout"] > 0
        assert all(value is not None and math.isfinite(value) for value in line.values())
    frame = pandas.read_parquet(sorted((run / "trajectories").glob("train_*[0-9].parquet"))[0])
    assert len(frame) == 16
    trajectories = read_trajectories(sorted((run / "trajectories").glob("train_*[0-9].parquet"))[0])
    assert [problem for t in trajectories for problem in check_trajectory(t, vocab_size=600)] == []
    assert (run / "reward.png").read_bytes()[:4] == b"\x89PNG"
    assert "train_batch_size: 4" in (run / "config.yaml").read_text()
    assert len(list((run / "checkpoints").glob("step_*"))) == 2
    trained = AutoModelForCausalLM.from_pretrained(run / "policy")
    start = AutoModelForCausalLM.from_pretrained(policy_dir)
    assert trained.config._attn_implementation in ("sdpa", "eager")
    changes = [(a - b).abs().max() for a, b in zip(trained.parameters(), start.parameters(), strict=True)]
    assert max(changes) > 5e-4, "three steps of 1e-3 move weights by more than weight decay does"
    assert AutoTokenizer.from_pretrained(run / "policy").chat_template


def test_a_continued_run_may_begin_to_steer_the_kl_and_the_entropy(small_run: Overrides, tmp_path: Path) -> None:
    more = ["use_kl_in_reward=true", "kl_ctrl.type=adaptive"]
    keys = [*(f"algorithm.{key}" for key in more), "actor_rollout_ref.actor.target_entropy=50"]
    for steps, changes in ((1, []), (2, keys)):
        assert main(small_run(*changes, f"trainer.total_training_steps={steps}", "data.val_files=null")) == 0
    last = lines(tmp_path / "run")[-1]
    assert (last["step"], last["actor/entropy_coeff"], last["actor/reward_kl_penalty_coeff"]) == (2, 0.0, 0.001)


@pytest.mark.slice(2, "matrix")
@pytest.mark.parametrize(
    "changes",
    [
        ["algorithm=ppo", "critic.optim.lr=1e-3"],
        ["actor_rollout_ref.actor.use_kl_loss=true", "actor_rollout_ref.actor.kl_loss_coef=0.1"],
        ["algorithm.use_kl_in_reward=true", "algorithm.kl_ctrl.type=adaptive", "algorithm.kl_ctrl.kl_coef=0.01"],
        ["algorithm.adv_estimator=rloo", "actor_rollout_ref.actor.policy_loss.loss_mode=gspo"],
        ["algorithm.adv_estimator=grpo_turn", "actor_rollout_ref.actor.loss_agg_mode=seq-mean-token-sum-norm"],
        ["actor_rollout_ref.actor.entropy_coeff=0.01", "actor_rollout_ref.actor.optim.name=muon"],
        ["actor_rollout_ref.rollout.val_kwargs.n=4", "actor_rollout_ref.rollout.top_p=0.9"],
        ["async_training.max_staleness=1", "actor_rollout_ref.rollout.max_num_seqs=8"],
        ["algorithm.rollout_correction.rollout_is=token", "algorithm.rollout_correction.reject.token=[0.5,2]"],
        ["algorithm.rollout_correction.proximal=rollout", "algorithm.rollout_correction.reject.seq_mean_k3=0.01"],
    ],
)
def test_algorithms_run_whole(small_run: Overrides, tmp_path: Path, changes: list[str]) -> None:
    base = [
        o
        for o in small_run("trainer.total_training_steps=2")
        if "filter_groups" not in o or "algorithm=ppo" not in changes
    ]
    assert main([*base, *changes]) == 0
    last = lines(tmp_path / "run")[-1]
    assert math.isfinite(last["actor/pg_loss"])
    if "async_training.max_staleness=1" in changes:
        assert last["async/staleness_max"] <= 1
    if "algorithm.rollout_correction.rollout_is=token" in changes:
        assert last["correction/weight_mean"] == pytest.approx(1, abs=1e-4), "engine and trainer agree"
        assert last["correction/ess/staleness_0"] == pytest.approx(1, abs=1e-4)
        assert last["correction/masked_frac"] == 0
    if "algorithm.rollout_correction.proximal=rollout" in changes:
        assert "actor/entropy" not in last and "time/old_log_prob" not in last
        assert 0 <= last["rollout/logprob_gap_kl"] < 0.1 and "correction/masked_frac" in last
    if "algorithm=ppo" in changes:
        assert math.isfinite(last["critic/vf_loss"])
    if "algorithm.use_kl_in_reward=true" in changes:
        assert last["actor/reward_kl_penalty_coeff"] != 0.01, "the adaptive controller moved"
    if "actor_rollout_ref.actor.use_kl_loss=true" in changes:
        assert last["actor/kl_loss"] > 0
    if "actor_rollout_ref.rollout.val_kwargs.n=4" in changes:
        assert "val/quickstart/arithmetic/pass@4" in last
        assert last["rollout/logprob_gap_max_abs"] < 1e-4


def test_the_ratio_may_be_taken_to_the_published_policy(small_run: Overrides, tmp_path: Path) -> None:
    """Every second version is published: the update between two of them begins where the engine's policy is not."""
    keys = [f"async_training.{key}" for key in ("max_staleness=1", "publish_every=2")]
    keys += ["trainer.save_freq=2", "trainer.total_training_steps=4", "actor_rollout_ref.actor.ppo_mini_batch_size=4"]
    keys += ["data.train_batch_size=4", "data.val_files=null", "algorithm.rollout_correction.proximal=published"]
    assert main(small_run(*keys)) == 0
    steps = lines(tmp_path / "run")
    assert all(step["rollout/logprob_gap_max_abs"] < 1e-4 for step in steps), "engine and proximal policy are one"
    moved = [abs(step["actor/ppo_kl"]) for step in steps]
    assert max(moved[0], moved[2]) < 1e-5 < 1e-4 < min(moved[1], moved[3]), moved


def test_the_entropys_weight_is_steered_on_also_in_a_continued_run(small_run: Overrides, tmp_path: Path) -> None:
    keys = [f"actor_rollout_ref.actor.{key}" for key in ("target_entropy=50", "entropy_coeff=0.01")]
    for steps in (2, 3):
        assert main(small_run(*keys, f"trainer.total_training_steps={steps}", "data.val_files=null")) == 0
    assert [line["actor/entropy_coeff"] for line in lines(tmp_path / "run")] == pytest.approx([0.01, 0.015, 0.02])


@pytest.mark.slice(2, "matrix")
@pytest.mark.parametrize(
    ("estimator", "loss"),
    list(zip(ADVANTAGE_ESTIMATORS.names(), itertools.cycle(POLICY_LOSSES.names()), strict=False)),
)
def test_every_estimator_and_loss_trains(small_run: Overrides, tmp_path: Path, estimator: str, loss: str) -> None:
    """Two steps of two mini-batches, so that the second one's policy is not the one before the update."""
    base = [override for override in small_run("trainer.total_training_steps=2") if "filter_groups" not in override]
    chosen = [f"algorithm.adv_estimator={estimator}", f"actor_rollout_ref.actor.policy_loss.loss_mode={loss}"]
    more = {
        "dro": ["actor_rollout_ref.actor.policy_loss.options.dro_beta=0.1"],
        "maxrl": ["algorithm.turn_reward_coef=0"],
        "rlsd": ["distillation.teacher.path=policy", 'distillation.teacher.privileged="It is {ground_truth}."'],
    }
    assert main([*base, *chosen, *more.get(loss, []), *more.get(estimator, []), "data.val_files=null"]) == 0
    last = lines(tmp_path / "run")[-1]
    assert math.isfinite(last["actor/pg_loss"]) and math.isfinite(last["actor/ppo_kl"])
    assert last["actor/skipped_updates"] == 0


@pytest.fixture(scope="module")
def mixture_dir(policy_dir: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A random mixture of experts with the policy's tokenizer."""
    out = tmp_path_factory.mktemp("mixture")
    tokenizer = AutoTokenizer.from_pretrained(policy_dir)
    make_model("qwen3-moe", vocab_size=len(tokenizer), max_position_embeddings=512).save_pretrained(out)
    tokenizer.save_pretrained(out)
    return out


@pytest.mark.slice(1, "matrix")
@pytest.mark.parametrize("mode", ["R2", "R3"])
def test_experts_are_replayed(small_run: Overrides, tmp_path: Path, mixture_dir: Path, mode: str) -> None:
    replay = f"actor_rollout_ref.actor.router_replay.mode={mode}"
    assert main(small_run(f"actor_rollout_ref.model.path={mixture_dir}", replay)) == 0
    for line in lines(tmp_path / "run")[1:]:
        assert line["rollout/logprob_gap_max_abs"] < 1e-4 and line["actor/grad_norm"] > 0
    again = ["trainer.total_training_steps=4", f"actor_rollout_ref.model.path={mixture_dir}"]
    assert main(small_run(*again, replay)) == 0, "it goes on from its checkpoint"


def test_experts_of_a_model_without_any_cannot_be_replayed(
    small_run: Overrides, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(small_run("actor_rollout_ref.actor.router_replay.mode=R3")) == 2
    assert "router_replay.mode: Qwen3ForCausalLM cannot be told which experts to take" in capsys.readouterr().err


def test_disable_moves_the_older_run_aside(small_run: Overrides, tmp_path: Path) -> None:
    assert main(small_run("trainer.total_training_steps=1")) == 0
    assert main(small_run("trainer.total_training_steps=1", "trainer.resume_mode=disable")) == 0
    assert len(lines(tmp_path / "run.1")) == len(lines(tmp_path / "run")) == 2
