"""A teacher's divergences in cases small enough to work out by hand, as advantages and as a term of the loss."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from agentrl.algorithms.distillation import IMPOSSIBLE, TeacherLoss, with_rest, with_teacher_advantages
from agentrl.algorithms.divergences import ForwardKLOptions, JSOptions, forward_kl, js, reverse_kl
from agentrl.config.sections.distillation import DistillationConfig
from agentrl.errors import TrainingError
from agentrl.trajectory.batch import RaggedBatch
from tests.naming import naming

LN2, LN3 = math.log(2), math.log(3)


def logs(*rows: list[float]) -> Tensor:
    return torch.tensor(rows, dtype=torch.float64).log()


TEACHER, STUDENT = logs([1 / 2, 1 / 2]), logs([1 / 4, 3 / 4])
DIVERGENCES: list[tuple[Callable[[Tensor, Tensor], Tensor], float]] = [
    # 1/2 ln 2 + 1/2 ln(2/3)
    (forward_kl, LN2 - LN3 / 2),
    # 1/4 ln(1/2) + 3/4 ln(3/2)
    (reverse_kl, 0.75 * LN3 - LN2),
    # M = (3/8, 5/8): 1/2 (1/2 ln(4/3) + 1/2 ln(4/5)) + 1/2 (1/4 ln(2/3) + 3/4 ln(6/5))
    (
        lambda s, t: js(s, t, JSOptions()),
        (math.log(4 / 3) + math.log(4 / 5)) / 4 + (math.log(2 / 3) + 3 * math.log(6 / 5)) / 8,
    ),
]


@pytest.mark.parametrize(("divergence", "value"), DIVERGENCES)
def test_divergences(divergence: Callable[[Tensor, Tensor], Tensor], value: float) -> None:
    found = divergence(torch.cat([STUDENT, TEACHER]), torch.cat([TEACHER, TEACHER]))
    assert found.tolist() == pytest.approx([value, 0.0])


def test_log_probs_below_a_bound_count_as_it() -> None:
    """Here ln(1/3): of p_T = (1/8, 7/8) and p_S = (1/16, 15/16) the first are 1/3 each, and give nothing; a gradient
    comes from the second alone, 7/8 of -log p_S."""
    teacher, student = logs([1 / 8, 7 / 8]), logs([1 / 16, 15 / 16]).requires_grad_()
    found = forward_kl(student, teacher, ForwardKLOptions(min_logprob=-LN3))
    assert found.item() == pytest.approx(7 / 8 * math.log(14 / 15))
    (gradient,) = torch.autograd.grad(found.sum(), student)
    assert gradient[0].tolist() == pytest.approx([0, -7 / 8])
    assert forward_kl(student, teacher, ForwardKLOptions(min_logprob=-9)).item() == forward_kl(student, teacher).item()


def test_js_goes_from_one_kl_to_the_other() -> None:
    small = js(STUDENT, TEACHER, JSOptions(beta=1e-6)) / 1e-6
    large = js(STUDENT, TEACHER, JSOptions(beta=1 - 1e-6)) / 1e-6
    assert small.item() == pytest.approx(forward_kl(STUDENT, TEACHER).item(), rel=1e-4)
    assert large.item() == pytest.approx(reverse_kl(STUDENT, TEACHER).item(), rel=1e-4)


def test_gradients_of_logits() -> None:
    """Of forward KL p_S - p_T; of reverse KL p_S (log p_S - log p_T - KL)."""
    logits = STUDENT.clone().requires_grad_()
    (gradient,) = torch.autograd.grad(forward_kl(logits.log_softmax(-1), TEACHER).sum(), logits)
    assert gradient[0].tolist() == pytest.approx([-0.25, 0.25])
    (gradient,) = torch.autograd.grad(reverse_kl(logits.log_softmax(-1), TEACHER).sum(), logits)
    kl = 0.75 * LN3 - LN2
    assert gradient[0].tolist() == pytest.approx([0.25 * (-LN2 - kl), 0.75 * (LN3 - LN2 - kl)])


def test_all_other_tokens_are_one_category() -> None:
    found = with_rest(logs([0.5, 0.2], [0.6, 0.4]))
    assert found.exp()[0].tolist() == pytest.approx([0.5, 0.2, 0.3])
    assert found.exp()[1].tolist() == pytest.approx([0.6, 0.4, 0.0], abs=1e-6), "and its logarithm is finite"


def batch_of(teacher_scores: list[list[float]], old: list[float], teacher: int = 0) -> RaggedBatch:
    """Two sequences of three tokens, prompt, sampled and tool; then prompt and two sampled ones."""
    mask = torch.tensor([False, True, False, False, True, True])
    made = RaggedBatch.unsampled(
        torch.tensor([0, 3, 6]), torch.tensor([5, 1, 6, 5, 0, 2]), mask, torch.tensor([0, 1]), torch.tensor([0, 1])
    )
    return made.with_fields(
        old_logprobs=torch.tensor(old),
        advantages=torch.tensor([0.0, 2.0, 0.0, 0.0, -1.0, -1.0]),
        teacher=torch.tensor([0, 0, 0] + [teacher] * 3, dtype=torch.int32),
        teacher_scores=torch.tensor(teacher_scores),
    )


def config_of(**keys: Any) -> DistillationConfig:
    return DistillationConfig.model_validate({"teacher": {"path": "there"}, **keys})


@pytest.mark.parametrize(
    ("estimator", "expected"),
    [
        # d = log p_S - log p_T is 1, -2 and 0 on the sampled tokens; A is 2, -1 and -1.
        ("k1", [0.5 * 2 - 2 * 1, -0.5 + 2 * 2, -0.5]),
        ("k2", [1 - 2 * 0.5, -0.5 - 2 * 2, -0.5]),
        ("k3", [1 - 2 * math.exp(-1), -0.5 - 2 * (math.exp(2) - 1 - 2), -0.5]),
    ],
)
def test_the_teacher_as_an_advantage(estimator: str, expected: list[float]) -> None:
    nan = math.nan
    batch = batch_of([[nan], [-2.0], [nan], [nan], [-1.0], [-3.0]], [nan, -1.0, nan, nan, -3.0, -3.0])
    found, metrics = with_teacher_advantages(batch, config_of(estimator=estimator, coef=2, policy_loss_coef=0.5))
    assert found.advantages is not None
    assert found.advantages[batch.mask].tolist() == pytest.approx(expected)
    assert found.advantages[~batch.mask].tolist() == [0, 0, 0]
    assert metrics == pytest.approx({"distill/kl": -1 / 3, "distill/taught_fraction": 1.0})


@pytest.mark.parametrize("use", ["advantage", "loss"])
def test_estimates_are_bounded_on_both_sides(use: str) -> None:
    config = config_of(estimator="k1" if use == "advantage" else "k2", use=use, max_divergence=0.75)
    batch = batch_of([[0.0], [-2.0], [0.0], [0.0], [-1.0], [-3.0]], [0.0, -1.0, 0.0, 0.0, -3.0, -3.0])
    if use == "advantage":
        found, _ = with_teacher_advantages(batch.with_fields(advantages=torch.zeros(6)), config)
        assert found.advantages is not None and found.advantages[batch.mask].tolist() == [-0.75, 0.75, 0]
        return
    term = TeacherLoss.from_config(config)
    assert term is not None
    logprobs = torch.tensor([0.0, -1.0, 0.0, 0.0, -3.0, -3.0], requires_grad=True)
    lost = term.by_token_of(batch, logprobs, None)
    (gradient,) = torch.autograd.grad(lost.sum(), logprobs)
    assert lost[batch.mask].tolist() == [0.5, 0.75, 0] and gradient[batch.mask].tolist() == [1, 0, 0]


def test_rows_without_a_teacher_learn_from_rewards_alone() -> None:
    batch = batch_of([[0.0], [-2.0], [0.0], [0.0], [0.0], [0.0]], [0, -1.0, 0, 0, -3.0, -3.0], teacher=-1)
    found, metrics = with_teacher_advantages(batch, config_of())
    assert found.advantages is not None
    assert found.advantages.tolist() == [0, 1, 0, 0, -1, -1]
    assert metrics == pytest.approx({"distill/kl": 1.0, "distill/taught_fraction": 1 / 3})
    assert with_teacher_advantages(batch, config_of(scope="top_k"))[0] is batch, "the loss is where it teaches"


@pytest.mark.parametrize(("estimator", "loss", "slope"), [("k2", 0.5, 1.0), ("k3", math.exp(-1), 1 - math.exp(-1))])
def test_sampled_tokens_as_a_loss(estimator: str, loss: float, slope: float) -> None:
    term = TeacherLoss.from_config(config_of(use="loss", estimator=estimator))
    assert term is not None and term.comparison() is None
    batch = batch_of([[9.0], [-2.0], [9.0], [9.0], [9.0], [9.0]], [0.0] * 6, teacher=-1)
    logprobs = torch.full((6,), -1.0, requires_grad=True)
    found = term.by_token_of(batch, logprobs, None)
    (gradient,) = torch.autograd.grad(found.sum(), logprobs)
    assert found.tolist() == pytest.approx([0, loss, 0, 0, 0, 0])
    assert gradient.tolist() == pytest.approx([0, slope, 0, 0, 0, 0])


def test_top_k_compares_the_teachers_tokens_and_the_rest() -> None:
    """Policy (1/4, 1/4, 1/2) against a teacher's 2: 1/2 and 0: 3/8, so 1/8 for all others."""
    term = TeacherLoss.from_config(config_of(scope="top_k", top_k=2, divergence="forward_kl"))
    assert term is not None and term.comparison() is not None
    row = [-1.0, 2.0, 0.0, math.log(1 / 2), math.log(3 / 8)]
    batch = batch_of([[math.nan] * 5, row, [math.nan] * 5, *[[0.0] * 5] * 3], [0.0] * 6, teacher=-1)
    student = logs([1 / 4, 1 / 4, 1 / 2], [1 / 3] * 3, [1 / 3] * 3).requires_grad_()
    found = term.compare(batch)(student, torch.tensor([1, 4, 5]))
    expected = 3 / 8 * math.log(3 / 2) + 1 / 8 * math.log(1 / 2)
    assert found.tolist() == pytest.approx([expected, 0, 0])
    (gradient,) = torch.autograd.grad(found.sum(), student)
    assert gradient[1:].abs().sum() == 0 and gradient[0].abs().sum() > 0


@pytest.mark.parametrize("divergence", ["forward_kl", "reverse_kl", "js"])
def test_a_listed_token_of_the_teacher_alone_is_no_token_of_the_policy(divergence: str) -> None:
    """Its id 0 is in the policy's vocabulary, and the policy's likeliest."""
    term = TeacherLoss.from_config(config_of(scope="top_k", top_k=2, divergence=divergence))
    alone = TeacherLoss.from_config(config_of(scope="top_k", top_k=1, divergence=divergence))
    assert term is not None and alone is not None
    student = logs([7 / 8, 1 / 16, 1 / 16])
    listed, place = math.log(1 / 2), torch.tensor([0])
    found = term.compare(batch_of([[-1.0, 2.0, 0.0, listed, IMPOSSIBLE]], [0.0], teacher=0))(student, place)
    assert found.tolist() == pytest.approx(
        alone.compare(batch_of([[-1.0, 2.0, listed]], [0.0], teacher=0))(student, place).tolist()
    )


def test_full_takes_each_teachers_own_head_and_the_ids_that_both_have() -> None:
    """Two teachers, of hidden width 2 and 1; the policy's vocabulary has a padded id more."""
    heads = [lambda h: h @ torch.eye(2, dtype=h.dtype), lambda h: torch.cat([h[:, :1], -h[:, :1]], dim=1)]
    term = TeacherLoss.from_config(config_of(scope="full", divergence="forward_kl"), heads)
    assert term is not None
    scores = [[0.0] * 3, [-1.0, LN3, 0.0], [0.0] * 3, [0.0] * 3, [-1.0, LN2 / 2, 7.0], [-1.0, LN2 / 2, 7.0]]
    batch = batch_of(scores, [0.0] * 6, teacher=1)
    student = logs([1 / 4, 1 / 4, 1 / 2], [1 / 3] * 3, [1 / 3] * 3)
    found = term.compare(batch)(student, torch.tensor([1, 4, 5]))
    # Both halves of the policy against (3/4, 1/4), and against (2/3, 1/3).
    first = 3 / 4 * math.log(3 / 2) + 1 / 4 * math.log(1 / 2)
    second = 2 / 3 * math.log(4 / 3) + 1 / 3 * math.log(2 / 3)
    assert found.tolist() == pytest.approx([first, second, second], rel=1e-5)


def test_a_divergence_of_the_wrong_shape_and_a_strategy_without_divergences() -> None:
    term = TeacherLoss.from_config(config_of(scope="top_k", top_k=1, divergence=f"{__name__}:one_number"))
    assert term is not None
    batch = batch_of([[-1.0, 0.0, -1.0]] * 6, [0.0] * 6)
    with naming(TrainingError, "divergence=", "one_number:", "[3]", "found []"):
        term.compare(batch)(logs(*[[1 / 3] * 3] * 3), torch.tensor([1, 4, 5]))
    with naming(TrainingError, "scope=top_k"):
        term.by_token_of(batch, torch.zeros(6), None)


def one_number(student: Tensor, teacher: Tensor) -> Tensor:
    return (student - teacher).sum()
