"""Faults in scores and gradients that only a second computation shows: the real command, in process."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import PreTrainedModel

import agentrl.model.packed
from agentrl.checks.recomputed import MOST, cut, pick
from agentrl.model.heads import ValueModel
from agentrl.train import main
from agentrl.trajectory.batch import RaggedBatch
from agentrl.workers.reference import ReferenceWorker
from agentrl.workers.teacher import LoadedTeacher
from tests.checks.test_faults import BEGINS, PAGE, _count, alarms, faulty, wrap  # noqa: F401 - a fixture
from tests.runs import Overrides

Inject = Callable[[pytest.MonkeyPatch], None]
ROLES = "actor_rollout_ref"
KL = (f"{ROLES}.actor.use_kl_loss=true",)
HALF = f"{ROLES}.model.dtype=bfloat16"
WARM = f"{ROLES}.rollout.temperature=0.7"
CRITIC = ("algorithm.adv_estimator=gae", "critic.optim.lr=1e-3")
SHORT = ("trainer.total_training_steps=3", "data.val_files=null", "trainer.save_freq=-1")


def reference_one_off(patch: pytest.MonkeyPatch) -> None:
    wrap(patch, ReferenceWorker, "_score", lambda found, *_: found.roll(1))


def reference_of_another_temperature(patch: pytest.MonkeyPatch) -> None:
    healthy = ReferenceWorker._score

    def score(worker: ReferenceWorker, micro: Any) -> torch.Tensor:
        worker.temperature = 1.0 if faulty() else 0.7
        return healthy(worker, micro)

    patch.setattr(ReferenceWorker, "_score", score)


def head_detached(patch: pytest.MonkeyPatch) -> None:
    """No gradient reaches the tied embeddings through the head."""
    healthy = agentrl.model.packed.token_logits

    def token_logits(model: PreTrainedModel, hidden: torch.Tensor) -> torch.Tensor:
        if not (faulty() and torch.is_grad_enabled()):
            return healthy(model, hidden)
        weight = model.get_output_embeddings().weight.detach()
        return torch.nn.functional.linear(hidden, weight).float()

    patch.setattr(agentrl.model.packed, "token_logits", token_logits)


def values_of_the_neighbour(patch: pytest.MonkeyPatch) -> None:
    """The critic gives each token the value of the one before it, in the update and before."""
    wrap(patch, ValueModel, "forward", lambda found, *_: found.roll(1))


def norm_without_gradient(patch: pytest.MonkeyPatch) -> None:
    """The final norm's output is cut off from its weight in the update."""
    healthy = agentrl.model.packed.forward_packed

    def forward(model: Any, *args: Any, **kwargs: Any) -> torch.Tensor:
        norm = model.base_model.norm.weight
        before = norm.requires_grad
        norm.requires_grad_(before and not faulty())
        found = healthy(model, *args, **kwargs)
        norm.requires_grad_(before)
        return found

    patch.setattr(agentrl.model.packed, "forward_packed", forward)


def teacher_one_off(patch: pytest.MonkeyPatch) -> None:
    wrap(patch, LoadedTeacher, "score", lambda found, *_: found.roll(1, 0))


FAULTS: dict[str, tuple[Inject, str, tuple[str, ...]]] = {
    "the reference is one token off": (reference_one_off, "the reference", KL),
    "the reference has another temperature": (reference_of_another_temperature, "the reference", (*KL, WARM)),
    "the tied head is detached": (head_detached, "policy: model.embed_tokens.weight", ()),
    "a norm has no gradient": (norm_without_gradient, "policy: model.norm.weight", ()),
    "the critic gives the neighbour's values": (values_of_the_neighbour, "the critic", CRITIC),
    "the teacher is one token off": (teacher_one_off, "the teacher", ("distillation.coef=0.1",)),
}


@pytest.mark.slice(2, "matrix")
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("fault", FAULTS)
def test_a_fault_is_named_within_two_steps(
    fault: str, dtype: str, small_run: Overrides, policy_dir: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    inject, where, more = FAULTS[fault]
    inject(monkeypatch)
    if "distillation.coef=0.1" in more:
        more = (*more, f"distillation.teacher.path={policy_dir}")
    words = [one for one in small_run(*SHORT, *more, f"{ROLES}.model.dtype={dtype}") if "filter_groups" not in one]
    main(words)
    found = [one for one in alarms(tmp_path / "run") if one["check"] == "recomputed"]
    assert found and BEGINS <= found[0]["step"] <= BEGINS + 1
    assert where in found[0]["where"]


def batch_of(*lengths: int, prompt: int = 4) -> RaggedBatch:
    """Sequences of these lengths, all sampled after their prompts."""
    places = torch.cat([torch.arange(length) for length in lengths])
    rows = torch.arange(len(lengths))
    offsets = torch.tensor([0, *lengths]).cumsum(0)
    return RaggedBatch.unsampled(offsets=offsets, ids=places, mask=places >= prompt, group=rows, trajectory=rows)


def test_each_step_takes_another_of_the_short_sequences() -> None:
    batch = batch_of(600, 300, 30, 3, 512, 700)  # the fourth has no sampled token
    assert [pick(batch, step) for step in range(4)] == [2, 1, 2, 1], "the shorter half of three"
    assert pick(batch_of(900, 700), 5) == 1, "none is short: the shortest"
    assert pick(batch_of(3, 2), 1) is None


def test_long_sequences_are_cut_and_those_without_a_sampled_token_left_out() -> None:
    found = cut(batch_of(700))
    assert found is not None and found.num_tokens == MOST and len(found) == 1
    assert cut(batch_of(700, prompt=MOST)) is None


def test_the_page_lists_these_faults() -> None:
    page = PAGE.read_text(encoding="utf-8").partition("test_recomputed.py")[2].partition("Real SGLang")[0]
    assert [line for line in page.splitlines() if line.startswith("- ")] == [f"- {fault}" for fault in FAULTS]
