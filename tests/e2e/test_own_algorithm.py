"""An estimator and a policy loss of a user's own, with options, from one file."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from agentrl.train import main
from tests.e2e.conftest import PROJECT, forked_command
from tests.runs import Overrides

SOURCE = """\
from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from pydantic import BaseModel, Field

from agentrl.algorithms import Advantages, EstimatorColumns, LossColumns, TokenLoss, declare

if TYPE_CHECKING:
    from agentrl.config.sections.actor import ActorConfig
    from agentrl.config.sections.algorithm import AlgorithmConfig


class Baseline(BaseModel):
    reward: float = Field(0.0, ge=0)


@declare("entropy", "squared_probs")
def against_a_constant(columns: EstimatorColumns, config: AlgorithmConfig, options: Baseline) -> Advantages:
    assert not hasattr(columns, "values") and getattr(columns, "ref_logprobs", None) is None, "not declared"
    assert columns.entropy is not None and columns.squared_probs is not None
    sampled = columns.mask
    assert (columns.entropy[sampled] > 0).all() and not columns.entropy[~sampled].any()
    assert (columns.squared_probs[sampled] > columns.old_logprobs[sampled].exp() ** 2).all()
    assert ((columns.turn >= 0) == sampled).all() and ((columns.version >= 0) == sampled).all()
    rewards = torch.segment_reduce(columns.rewards, "sum", offsets=columns.offsets) - options.reward
    by_token = rewards.repeat_interleave(columns.offsets.diff())
    return Advantages(by_token, by_token)


class Scale(BaseModel):
    weight: float


@declare("ref_logprobs", "entropy", "squared_probs", keys=("clip_ratio",))
def scaled(columns: LossColumns, config: ActorConfig, options: Scale) -> TokenLoss:
    assert columns.ref_logprobs is not None and columns.entropy is not None and columns.squared_probs is not None
    assert columns.entropy.requires_grad and columns.squared_probs.requires_grad
    assert columns.old_logprobs[columns.mask].isclose(columns.ref_logprobs[columns.mask], atol=1e-5).all()
    loss = -options.weight * columns.advantages * columns.logprobs
    return TokenLoss(loss, {"advantage": (columns.advantages * columns.mask).sum()})


def plain(columns: LossColumns, config: ActorConfig) -> TokenLoss:
    return TokenLoss(-columns.advantages * columns.logprobs)


def short(columns: EstimatorColumns, config: AlgorithmConfig) -> Advantages:
    return Advantages(columns.rewards[1:], columns.rewards)


NUMBER = 3
"""
LOSS = "actor_rollout_ref.actor.policy_loss"


@pytest.fixture
def own(tmp_path: Path) -> Path:
    path = tmp_path / "own.py"
    path.write_text(SOURCE)
    return path


def without_filter(overrides: list[str]) -> list[str]:
    """Overrides without that of a key which only estimators that compare groups have."""
    return [override for override in overrides if "filter_groups" not in override]


def test_the_example_of_the_docs_trains(small_run: Overrides, tmp_path: Path) -> None:
    page = (PROJECT / "docs" / "algorithms.md").read_text()
    example = tmp_path / "own.py"
    example.write_text(page.partition("```python\n")[2].partition("```")[0])
    changes = [
        f"algorithm.adv_estimator={example}:against_a_constant",
        "algorithm.adv_options.reward=0.5",
        f"{LOSS}.loss_mode={example}:where_unsure",
    ]
    overrides = small_run("trainer.total_training_steps=1", "data.val_files=null")
    assert main([*without_filter(overrides), *changes]) == 0
    step = json.loads((tmp_path / "run" / "metrics.jsonl").read_text().splitlines()[-1])
    assert 0 < step["actor/unsure_frac"] <= 1 and step["actor/grad_norm"] > 0


def test_a_step_is_trained(small_run: Overrides, own: Path, tmp_path: Path) -> None:
    one_step = [
        o for o in small_run("trainer.total_training_steps=1", "data.val_files=null") if "filter_groups" not in o
    ]
    given = [f"algorithm.adv_estimator={own}:against_a_constant", "algorithm.adv_options.reward=1.5"]
    losses = [
        f"{LOSS}.loss_mode={own}:scaled",
        f"{LOSS}.options.weight=0.5",
        "actor_rollout_ref.actor.clip_ratio=0.3",
        "actor_rollout_ref.actor.ppo_mini_batch_size=4",
        "actor_rollout_ref.ref.log_prob_max_token_len_per_gpu=8000",
    ]
    assert main([*one_step, *given, *losses]) == 0
    step = json.loads((tmp_path / "run" / "metrics.jsonl").read_text().splitlines()[-1])
    assert step["actor/grad_norm"] > 0
    assert step["actor/advantage"] == pytest.approx(step["reward/mean"] - 1.5, abs=0.6), "by token, not by sequence"
    assert step["actor/pg_loss"] < 0, "advantages and log-probs are negative, so that -A log p is"
    saved = (tmp_path / "run" / "config.yaml").read_text()
    assert "reward: 1.5" in saved and "weight: 0.5" in saved


REFUSED = {
    "no such name": (["algorithm.adv_estimator=grpoo"], r"unknown advantage estimator 'grpoo'; did you mean 'grpo'"),
    "no such loss": ([f"{LOSS}.loss_mode=vanila"], r"unknown policy loss 'vanila'; did you mean 'vanilla'"),
    "no such option": (
        ["algorithm.adv_estimator={own}:against_a_constant", "algorithm.adv_options.rewart=1"],
        r"algorithm\.adv_options: unknown key 'rewart'; did you mean 'reward'",
    ),
    "a wrong value": (
        ["algorithm.adv_estimator={own}:against_a_constant", "algorithm.adv_options.reward=-1"],
        r"algorithm\.adv_options: .*reward.*greater than or equal to 0",
    ),
    "a missing option": ([f"{LOSS}.loss_mode={{own}}:scaled"], r"policy_loss\.options: .*weight"),
    "options of a loss without": (
        [f"{LOSS}.options.weight=1"],
        r"policy_loss\.options: weight set, and .*vanilla has no",
    ),
    "no function": (
        ["algorithm.adv_estimator={own}:NUMBER"],
        r"algorithm\.adv_estimator=.*:NUMBER: expected a function",
    ),
    "no such object": (
        [f"{LOSS}.loss_mode={{own}}:plein"],
        r"loss_mode: .*own\.py has no 'plein'; did you mean 'plain'",
    ),
    "a key that it does not read": (
        [f"{LOSS}.loss_mode={{own}}:plain", "actor_rollout_ref.actor.clip_ratio=0.3"],
        r"clip_ratio=0\.3 has no effect",
    ),
    "a critic without values": (
        ["algorithm.adv_estimator={own}:short", "critic.ppo_epochs=2"],
        r"critic\.ppo_epochs=2 has no effect: it needs algorithm\.adv_estimator=gae",
    ),
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_cannot_work_is_refused_before_a_model_is_loaded(
    case: str, small_run: Overrides, own: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    changes, said = REFUSED[case]
    (tmp_path / "none").mkdir()
    (tmp_path / "none/config.json").write_text("{}")
    overrides = without_filter(small_run(f"actor_rollout_ref.model.path={tmp_path}/none"))
    assert main([*overrides, *(change.format(own=own) for change in changes)]) == 2
    assert re.search(said, capsys.readouterr().err)
    assert not (tmp_path / "run").exists()


def test_numbers_for_other_tokens_end_the_run(small_run: Overrides, own: Path, tmp_path: Path) -> None:
    overrides = without_filter(small_run("data.val_files=null"))
    done = forked_command([*overrides, f"algorithm.adv_estimator={own}:short"], tmp_path)
    assert done.returncode == 2
    assert re.search(
        rf"algorithm.adv_estimator={re.escape(str(own))}:short .*: expected advantages of shape", done.stderr
    )
