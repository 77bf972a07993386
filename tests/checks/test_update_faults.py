"""Faults inside the policy's update, each named within two steps: the real command, in process.

Each case changes one part of the update from the second step on. The checks know none of them.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

import agentrl.optim.optimizer
from agentrl.algorithms.policy_loss import PolicyLoss
from agentrl.checks.loss_gradient import LossKeys, slopes
from agentrl.checks.update import TOLERANCE
from agentrl.config.sections.actor import ActorConfig
from agentrl.config.sections.algorithm import RolloutCorrectionConfig
from agentrl.model.scores import TokenScores
from agentrl.observe.watch import Counts, owners_of
from agentrl.optim.optimizer import Optim
from agentrl.parallel import gradients
from agentrl.train import main, training
from agentrl.trajectory.batch import RaggedBatch
from agentrl.workers.backend import MiniBatch
from agentrl.workers.critic import CriticWorker
from agentrl.workers.fsdp import FSDPCritic, FSDPPolicy
from agentrl.workers.learner import Learner
from agentrl.workers.policy import PolicyWorker
from tests.checks.test_faults import BEGINS, PAGE, _count, alarms, faulty, wrap  # noqa: F401 - a fixture
from tests.devices import DEVICES
from tests.runs import Overrides
from tests.trained import trained_batch

Inject = Callable[[pytest.MonkeyPatch], None]
Seen = tuple[TokenScores, RaggedBatch]
ACTOR = "actor_rollout_ref.actor"
KEYS = (
    f"{ACTOR}.use_kl_loss=true",
    f"{ACTOR}.kl_loss_coef=0.01",
    f"{ACTOR}.entropy_coeff=0.001",
    f"{ACTOR}.grad_clip=0.5",
    f"{ACTOR}.optim.weight_decay=0.1",
    f"{ACTOR}.optim.lr=3e-3",
    f"{ACTOR}.ppo_epochs=2",
    f"{ACTOR}.ppo_max_token_len_per_gpu=600",
)
"""One config that has all terms, and several micro-batches in a mini-batch."""
SHORT = ("trainer.total_training_steps=3", "data.val_files=null", "trainer.resume_mode=disable")


def in_the_loss(change: Callable[[TokenScores, RaggedBatch], Seen], factor: float = 1.0) -> Inject:
    """Have the loss see other scores or columns than the ones that were computed."""

    def inject(patch: pytest.MonkeyPatch) -> None:
        healthy = Learner._accumulate

        def accumulate(
            learner: Learner[TokenScores], mine: RaggedBatch, mini: MiniBatch[TokenScores], *rest: Any
        ) -> Any:
            def loss(found: TokenScores, micro: RaggedBatch) -> Any:
                total, seen = mini.loss(*change(found, micro))
                return total * factor, seen

            return healthy(learner, mine, replace(mini, loss=loss) if faulty() else mini, *rest)

        patch.setattr(Learner, "_accumulate", accumulate)

    return inject


def in_the_batch(**changes: Callable[[RaggedBatch], Tensor]) -> Inject:
    """Have the update get other columns than the estimate made."""

    def inject(patch: pytest.MonkeyPatch) -> None:
        healthy = PolicyWorker.update

        def update(worker: PolicyWorker, batch: RaggedBatch, **kwargs: Any) -> Any:
            fields = {name: change(batch) for name, change in changes.items()} if faulty() else {}
            return healthy(worker, batch.with_fields(**fields), **kwargs)

        patch.setattr(PolicyWorker, "update", update)

    return inject


def column(name: str, change: Callable[[RaggedBatch], Tensor]) -> Inject:
    return in_the_loss(lambda found, micro: (found, micro.with_fields(**{name: change(micro)})))


def ends_of_turns(batch: RaggedBatch) -> Tensor:
    """[T] bool: sampled tokens after which nothing is sampled."""
    following = torch.cat([batch.mask[1:], torch.zeros(1, dtype=torch.bool)])
    return batch.mask & ~following


def one_group_turned(batch: RaggedBatch) -> Tensor:
    assert batch.advantages is not None
    group = batch.group[0]
    return torch.where((batch.group == group)[batch.sequence_ids()], -batch.advantages, batch.advantages)


def without_ends(batch: RaggedBatch) -> Tensor:
    assert batch.advantages is not None
    return torch.where(ends_of_turns(batch), 0.0, batch.advantages)


def halved(batch: RaggedBatch) -> Tensor:
    assert batch.old_logprobs is not None
    return batch.old_logprobs / 2


def no_kl(found: TokenScores, micro: RaggedBatch) -> Seen:
    return found, micro.with_fields(ref_logprobs=found.logprobs.detach())


def no_bonus(found: TokenScores, micro: RaggedBatch) -> Seen:
    assert found.entropy is not None
    return found._replace(entropy=found.entropy.detach()), micro


def a_token_without_gradient(found: TokenScores, micro: RaggedBatch) -> Seen:
    """The first policy token of each micro-batch learns nothing."""
    first = torch.zeros_like(micro.mask)
    first[micro.mask.nonzero()[:1, 0]] = True
    return found._replace(logprobs=torch.where(first, found.logprobs.detach(), found.logprobs)), micro


def clipped_to_nothing(patch: pytest.MonkeyPatch) -> None:
    healthy = gradients.clip

    def clip(params: Any, limit: float, norm: Tensor) -> None:
        healthy(params, 1e-9 if faulty() else limit, norm)

    patch.setattr("agentrl.workers.learner.clip", clip)


def not_clipped(patch: pytest.MonkeyPatch) -> None:
    healthy = gradients.clip
    patch.setattr(
        "agentrl.workers.learner.clip",
        lambda params, limit, norm: None if faulty() else healthy(params, limit, norm),
    )


def rate_times(factor: float) -> Inject:
    return lambda patch: wrap(patch, agentrl.optim.optimizer, "lr_factor", lambda found, *_: found * factor)


def around_step(before: Callable[[Optim], Any], after: Callable[[Optim, Any], None]) -> Inject:
    """Change an optimizer before and after its steps."""

    def inject(patch: pytest.MonkeyPatch) -> None:
        healthy = Optim.step

        def step(optim: Optim, number: int) -> float:
            kept = before(optim) if faulty() else None
            found = healthy(optim, number)
            if faulty():
                after(optim, kept)
            return found

        patch.setattr(Optim, "step", step)

    return inject


def clear(optim: Optim) -> None:
    for _, one in optim._optimizers:
        one.state.clear()


def copied_state(optim: Optim) -> dict[str, Tensor]:
    return {name: value.clone() for name, value in optim.state().items()}


def put_back(optim: Optim, kept: dict[str, Tensor]) -> None:
    for name, value in optim.state().items():
        value.copy_(kept[name])


def other_betas(optim: Optim) -> None:
    for _, one in optim._optimizers:
        for group in one.param_groups:
            group["betas"] = (0.0, 0.999)


def no_decay(optim: Optim) -> None:
    for _, one in optim._optimizers:
        for group in one.param_groups:
            group["weight_decay"] = 0.0


def forgets_between_steps(patch: pytest.MonkeyPatch) -> None:
    """The moments are lost when the gradients are cleared for the next mini-batch."""
    healthy = Optim.zero_grad

    def zero_grad(optim: Optim) -> None:
        healthy(optim)
        for name, value in optim.state().items() if faulty() else ():
            if not name.endswith("/step"):
                value.zero_()

    patch.setattr(Optim, "zero_grad", zero_grad)


def moved_between_steps(patch: pytest.MonkeyPatch) -> None:
    """Something else than the optimizer changes the weights."""

    def shrink(found: Any, learner: Learner[Any], *_: Any) -> Any:
        with torch.no_grad():
            for param in learner.params.values():
                param.mul_(0.999)
        return found

    wrap(patch, Learner, "step", shrink)


def a_sequence_twice(patch: pytest.MonkeyPatch) -> None:
    """One sequence is trained on in place of another."""

    def instead(mine: RaggedBatch, *_: Any) -> RaggedBatch:
        return mine.select([*range(len(mine) - 1), 0]) if len(mine) else mine

    wrap(patch, Learner, "share_of", instead)


def other_log_probs(patch: pytest.MonkeyPatch) -> None:
    """The update's forward pass has another temperature than the pass before."""
    healthy = FSDPPolicy.forward

    def forward(policy: FSDPPolicy, *args: Any, **kwargs: Any) -> TokenScores:
        found = healthy(policy, *args, **kwargs)
        warm = faulty() and torch.is_grad_enabled()
        return found._replace(logprobs=found.logprobs * 0.9) if warm else found

    patch.setattr(FSDPPolicy, "forward", forward)


def gradients_halved(patch: pytest.MonkeyPatch) -> None:
    def halve(found: Any, learner: Learner[Any], *_: Any) -> Any:
        for param in learner.params.values():
            assert param.grad is not None
            param.grad.mul_(0.5)
        return found

    wrap(patch, Learner, "_accumulate", halve)


def gradients_kept(patch: pytest.MonkeyPatch) -> None:
    healthy = Optim.zero_grad
    patch.setattr(Optim, "zero_grad", lambda optim: None if faulty() else healthy(optim))


def gradients_lost_between_passes(patch: pytest.MonkeyPatch) -> None:
    """Only the last micro-batch of a mini-batch teaches."""
    healthy = FSDPPolicy.forward

    def forward(policy: FSDPPolicy, *args: Any, **kwargs: Any) -> TokenScores:
        if faulty() and torch.is_grad_enabled():
            policy.optim.zero_grad()
        return healthy(policy, *args, **kwargs)

    patch.setattr(FSDPPolicy, "forward", forward)


FAULTS: dict[str, Inject] = {
    "a loss of the wrong sign": in_the_loss(lambda *seen: seen, factor=-1.0),
    "a loss that is halved": in_the_loss(lambda *seen: seen, factor=0.5),
    "one group's advantages are flipped in the loss": column("advantages", one_group_turned),
    "one group's advantages are flipped before the update": in_the_batch(advantages=one_group_turned),
    "the KL has no weight": in_the_loss(no_kl),
    "the entropy has no weight": in_the_loss(no_bonus),
    "ends of turns are off the mask in the loss": column("mask", lambda micro: micro.mask & ~ends_of_turns(micro)),
    "ends of turns are off the mask before the update": in_the_batch(mask=lambda one: one.mask & ~ends_of_turns(one)),
    "ends of turns have no advantage in the loss": column("advantages", without_ends),
    "ends of turns have no advantage in the update": in_the_batch(advantages=without_ends),
    "old log-probs are halved in the loss": column("old_logprobs", halved),
    "old log-probs are halved before the update": in_the_batch(old_logprobs=halved),
    "a token has no gradient": in_the_loss(a_token_without_gradient),
    "the update has another temperature": other_log_probs,
    "a sequence stands for another": a_sequence_twice,
    "gradients are halved after the backward pass": gradients_halved,
    "gradients are not reset": gradients_kept,
    "gradients are lost between micro-batches": gradients_lost_between_passes,
    "gradients are clipped to 0": clipped_to_nothing,
    "gradients are not clipped": not_clipped,
    "the learning rate is ten times the configured": rate_times(10),
    "the learning rate is a thousandth": rate_times(0.001),
    "the optimizer's state is reset": around_step(clear, lambda *_: None),
    "the optimizer's state is frozen": around_step(copied_state, put_back),
    "the optimizer's state is lost between steps": forgets_between_steps,
    "the optimizer has other betas": around_step(other_betas, lambda *_: None),
    "weights do not decay": around_step(no_decay, lambda *_: None),
    "weights change between steps": moved_between_steps,
}


@pytest.mark.slice(3, "matrix")
@pytest.mark.parametrize("fault", FAULTS)
def test_a_fault_of_the_update_is_named_within_two_steps(
    fault: str, small_run: Overrides, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    FAULTS[fault](monkeypatch)
    main(small_run(*KEYS, *SHORT))
    found = alarms(tmp_path / "run")
    # A temperature of the forward pass changes the gradients below the log-probs, too.
    others = {"recomputed"} if fault == "the update has another temperature" else set()
    assert {one["check"] for one in found} == {"update"} | others
    assert min(one["step"] for one in found) >= BEGINS


TENSORS = ("layers.1.mlp.down_proj.weight", "layers.1.post_attention_layernorm.weight")
"""Tensors of one layer: a large one, and a norm."""


def not_stepped(of: str) -> Inject:
    """The optimizer's steps leave one tensor as it was."""

    def kept(optim: Optim) -> dict[str, Tensor]:
        return {name: one.detach().clone() for name, one in optim._params.items() if name.endswith(of)}

    def put_back(optim: Optim, kept: dict[str, Tensor]) -> None:
        assert kept
        with torch.no_grad():
            for name, value in kept.items():
                optim._params[name].copy_(value)

    return around_step(kept, put_back)


def without_gradient(of: str) -> Inject:
    def inject(patch: pytest.MonkeyPatch) -> None:
        def without(found: Any, learner: Learner[Any], *_: Any) -> Any:
            for name, param in learner.params.items():
                if name.endswith(of) and param.grad is not None:
                    param.grad.zero_()
            return found

        wrap(patch, Learner, "_accumulate", without)

    return inject


@pytest.mark.slice(1, "matrix")
@pytest.mark.parametrize("of", TENSORS)
@pytest.mark.parametrize("inject", [not_stepped, without_gradient])
def test_a_fault_of_one_tensor_is_named_within_a_rotation(
    inject: Callable[[str], Inject],
    of: str,
    small_run: Overrides,
    policy_dir: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Two tensors are watched in an optimizer step, of which there are four a step."""
    inject(of)(monkeypatch)
    tensors = len(load_file(policy_dir / "model.safetensors"))
    steps = BEGINS + math.ceil(math.ceil(tensors / 2) / 4)
    words = (*KEYS, f"trainer.total_training_steps={steps}", "data.val_files=null", "trainer.save_freq=-1")
    main(small_run(*words))
    found = [one for one in alarms(tmp_path / "run") if one["check"] == "update"]
    assert found
    for one in found:
        assert one["step"] >= BEGINS and all(where.endswith(of) for where in one["where"])


def in_the_critic(change: Callable[[Tensor, RaggedBatch], tuple[Tensor, RaggedBatch]], factor: float = 1.0) -> Inject:
    """Have the critic's loss see other values or columns than the ones that were computed."""

    def inject(patch: pytest.MonkeyPatch) -> None:
        healthy = Learner._accumulate

        def accumulate(learner: Learner[Any], mine: RaggedBatch, mini: MiniBatch[Any], *rest: Any) -> Any:
            def loss(found: Tensor, micro: RaggedBatch) -> Any:
                total, seen = mini.loss(*change(found, micro))
                return total * factor, seen

            wrong = faulty() and isinstance(learner, FSDPCritic)
            return healthy(learner, mine, replace(mini, loss=loss) if wrong else mini, *rest)

        patch.setattr(Learner, "_accumulate", accumulate)

    return inject


def critic_without_gradient(patch: pytest.MonkeyPatch) -> None:
    def without(found: Any, learner: Learner[Any], *_: Any) -> Any:
        for param in learner.params.values() if isinstance(learner, FSDPCritic) else ():
            assert param.grad is not None
            param.grad.zero_()
        return found

    wrap(patch, Learner, "_accumulate", without)


def neighbours(values: Tensor) -> Tensor:
    """Give each token the value of the one before it."""
    return values.roll(1)


def other_returns(patch: pytest.MonkeyPatch) -> None:
    healthy = CriticWorker.update

    def update(worker: CriticWorker, batch: RaggedBatch, **kwargs: Any) -> Any:
        assert batch.returns is not None
        turned = batch.with_fields(returns=-batch.returns)
        return healthy(worker, turned if faulty() else batch, **kwargs)

    patch.setattr(CriticWorker, "update", update)


CRITIC = ("algorithm.adv_estimator=gae", "critic.optim.lr=1e-3", "critic.ppo_max_token_len_per_gpu=600")


def with_critic(small_run: Overrides, *more: str) -> list[str]:
    return [one for one in small_run(*CRITIC, *more) if "filter_groups" not in one]


OF_THE_CRITIC: dict[str, Inject] = {
    "the critic's loss has the wrong sign": in_the_critic(lambda *seen: seen, factor=-1.0),
    "the critic has no gradient": critic_without_gradient,
    "the critic's values have no gradient": in_the_critic(lambda found, micro: (found.detach() + 0 * found, micro)),
    "the critic learns the neighbour's values": in_the_critic(lambda found, micro: (neighbours(found), micro)),
    "values before the update are the neighbour's": lambda patch: wrap(
        patch, FSDPCritic, "values", lambda found, *_: neighbours(found)
    ),
    "the critic learns other returns": other_returns,
}


@pytest.mark.slice(1, "matrix")
@pytest.mark.parametrize("fault", OF_THE_CRITIC)
def test_a_fault_of_the_critic_is_named_within_two_steps(
    fault: str, small_run: Overrides, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    OF_THE_CRITIC[fault](monkeypatch)
    main(with_critic(small_run, *SHORT))
    found = [one for one in alarms(tmp_path / "run") if one["check"] == "update"]
    assert found and BEGINS <= min(one["step"] for one in found) <= BEGINS + 1
    assert all(where.startswith("critic: ") for one in found for where in one["where"])


def test_a_sound_critic_raises_no_alarm_and_is_compared(small_run: Overrides, tmp_path: Path) -> None:
    with training(with_critic(small_run, *SHORT)) as run:
        list(run)
        evaluated = run.evaluated
    assert alarms(tmp_path / "run") == []
    assert min(evaluated[f"critic/{name}"] for name in ("gradient", "clip", "optimizer")) >= 3


def test_the_page_lists_these_faults() -> None:
    page = PAGE.read_text(encoding="utf-8").partition("test_update_faults.py")[2].partition("`tests/checks/")[0]
    assert [line for line in page.splitlines() if line.startswith("- ")] == [f"- {fault}" for fault in SHOWN]


def not_loaded(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(Optim, "load_state", lambda optim, state: None)


def lost_after_loading(patch: pytest.MonkeyPatch) -> None:
    healthy = Learner.load

    def load(learner: Learner[Any], dir: Path) -> None:
        healthy(learner, dir)
        clear(learner.optim)

    patch.setattr(Learner, "load", load)


def one_of_another_parameter(patch: pytest.MonkeyPatch) -> None:
    healthy = Optim.load_state

    def load_state(optim: Optim, state: dict[str, Tensor]) -> None:
        one, other = [key for key in state if key.endswith("mlp.down_proj.weight/exp_avg")]
        healthy(optim, {**state, one: state[other], other: state[one]})

    patch.setattr(Optim, "load_state", load_state)


@pytest.mark.slice(1, "matrix")
@pytest.mark.parametrize("inject", [not_loaded, lost_after_loading, one_of_another_parameter])
def test_moments_that_a_resume_does_not_restore_are_named_in_its_first_step(
    inject: Inject, small_run: Overrides, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    words = with_critic(small_run, "data.val_files=null", "trainer.save_freq=1")
    main([*words, "trainer.total_training_steps=1"])
    main([*words, "trainer.total_training_steps=2"])
    assert alarms(tmp_path / "run") == []
    inject(monkeypatch)
    main([*words, "trainer.total_training_steps=3"])
    found = alarms(tmp_path / "run")
    assert [one["check"] for one in found] == ["update"] and found[0]["step"] == 3
    assert "not what the checkpoint holds" in found[0]["what"]
    assert found[0]["where"][0].startswith("critic: ") and found[0]["count"] >= 4, "the policy's two, too"


SHOWN = (*FAULTS, *OF_THE_CRITIC)


@pytest.mark.parametrize("device", DEVICES)
def test_a_sound_update_with_all_terms_raises_no_alarm(device: str, small_run: Overrides, tmp_path: Path) -> None:
    main(small_run(*KEYS, *SHORT, f"trainer.device={device}"))
    assert alarms(tmp_path / "run") == []


def test_betas_that_a_kernel_rounds_to_float32_raise_no_alarm(
    small_run: Overrides, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    healthy = Optim.step

    def step(optim: Optim, number: int) -> float:
        for group in (group for _, one in optim._optimizers for group in one.param_groups):
            group["betas"] = tuple(float(torch.tensor(beta, dtype=torch.float32)) for beta in group["betas"])
        return healthy(optim, number)

    monkeypatch.setattr(Optim, "step", step)
    main(small_run(*KEYS, *SHORT))
    assert alarms(tmp_path / "run") == []


def test_the_rounding_of_a_log_ratio_is_no_fault() -> None:
    """dro's derivative is the log-ratio where advantages are 0, and a proximal policy between two is rounded."""
    generator, count = torch.Generator().manual_seed(1), 4000
    mask = torch.arange(count) > 0
    logprobs = torch.where(mask, -12 * torch.rand(count, generator=generator), 0.0)
    engine = torch.where(mask, logprobs + 1e-3 * torch.randn(count, generator=generator), 0.0)
    micro = trained_batch(torch.tensor([0, count]), torch.zeros(count).long(), mask, torch.zeros(1).long()).with_fields(
        rollout_logprobs=engine, advantages=torch.zeros(count), staleness=torch.full((count,), 2)
    )
    keys = {"policy_loss": {"loss_mode": "dro", "options": {"dro_beta": 0.1}}, "loss_agg_mode": "token-sum"}
    actor, correction = ActorConfig.model_validate(keys), RolloutCorrectionConfig(proximal="interpolated")
    logprobs.requires_grad_()
    lost = PolicyLoss.from_config(actor, correction)(micro, logprobs).by_token
    (grad,) = torch.autograd.grad(torch.where(mask, lost, 0.0).sum(), logprobs)
    counts = Counts(policy_tokens=micro.policy_tokens, owners=owners_of(micro, range(1)))
    found = slopes(
        micro, logprobs.detach(), counts, LossKeys(actor=actor, correction=correction, distillation=None, norm_length=1)
    )
    assert found is not None
    policy = found.terms["policy"]
    assert ((grad.double() - policy.slope).abs() <= TOLERANCE * policy.scale + 1e-30).all()
