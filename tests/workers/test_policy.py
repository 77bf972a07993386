"""The update of the policy on a real tiny Qwen3."""

from __future__ import annotations

import math
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM

from agentrl.algorithms import LossColumns, TokenLoss
from agentrl.config.sections.actor import ActorConfig
from agentrl.config.sections.algorithm import AlgorithmConfig, PolicyLossConfig, RolloutCorrectionConfig
from agentrl.config.sections.model import ModelConfig
from agentrl.config.sections.optim import OptimConfig
from agentrl.errors import TrainingError
from agentrl.model.packed import load_model, token_logprobs
from agentrl.optim.optimizer import Optim
from agentrl.runtime.ranks import LocalRanks
from agentrl.trajectory.batch import RaggedBatch
from agentrl.workers import ReferenceWorker
from agentrl.workers.groups import PolicyGroup
from agentrl.workers.trainable import MAX_SKIPPED
from tests.naming import assert_names, naming
from tests.workers.conftest import BatchMaker, WorkerMaker, fsdp, same_weights, weights

ADAMW = OptimConfig(lr=1e-2)


def test_log_probs_are_those_of_the_model(make_worker: WorkerMaker, make_batch: BatchMaker, tiny_policy: Path) -> None:
    """Against transformers' own forward, one sequence at a time, at a temperature."""
    batch = make_batch()
    logprobs, metrics = make_worker(temperature=0.7, log_prob_max_tokens=64).compute_log_probs(batch)
    model = AutoModelForCausalLM.from_pretrained(tiny_policy)
    expected, entropies = torch.zeros(batch.num_tokens), torch.zeros(batch.num_tokens)
    for start, end in zip(batch.offsets[:-1].tolist(), batch.offsets[1:].tolist(), strict=True):
        with torch.no_grad():
            table = (model(input_ids=batch.ids[None, start:end]).logits[0] / 0.7).log_softmax(-1)
        expected[start + 1 : end] = table[:-1].gather(1, batch.ids[start + 1 : end, None])[:, 0]
        entropies[start + 1 : end] = -(table.exp() * table).sum(-1)[:-1]
    assert (logprobs - expected * batch.mask).abs().max() < 1e-5
    assert metrics["actor/entropy"] == pytest.approx(float(entropies[batch.mask].mean()), abs=1e-5)


def test_published_log_probs_are_those_of_the_weights_kept(make_worker: WorkerMaker, make_batch: BatchMaker) -> None:
    batch = make_batch()
    config = ActorConfig(ppo_mini_batch_size=4, optim=ADAMW)
    worker = make_worker(
        config, algorithm=AlgorithmConfig(rollout_correction=RolloutCorrectionConfig(proximal="published"))
    )
    with naming(ValueError, "proximal", "published"):
        worker.update(batch, step=1)
    worker.keep()
    first, entropy = worker.compute_log_probs(batch)
    batch = batch.with_fields(old_logprobs=first)
    worker.update(batch, step=1)
    after = weights(worker)
    again, entropy_again = worker.compute_log_probs(batch)
    assert torch.equal(again, first) and entropy_again == entropy
    assert all(torch.equal(tensor, after[name]) for name, tensor in weights(worker).items()), (
        "the present ones are back"
    )
    worker.keep()
    moved, _ = worker.compute_log_probs(batch)
    assert (moved - first).abs().max() > 1e-3


@pytest.mark.parametrize("mode", ["token-mean", "seq-mean-token-sum-norm"])
def test_micro_batches_change_nothing(make_worker: WorkerMaker, make_batch: BatchMaker, mode: str) -> None:
    batch = make_batch(prompts=4, n=3)
    workers = []
    for budget in (64, 100_000):
        config = ActorConfig(
            ppo_mini_batch_size=2,
            ppo_max_token_len_per_gpu=budget,
            loss_agg_mode=mode,
            optim=OptimConfig(lr=1e-3),
            use_kl_loss=True,
            entropy_coeff=0.01,
        )
        worker = make_worker(config, max_response_length=30)
        batch = batch.with_fields(old_logprobs=worker.compute_log_probs(batch)[0])
        assert batch.old_logprobs is not None
        batch = batch.with_fields(ref_logprobs=batch.old_logprobs - 0.1)
        metrics = worker.update(batch, step=1)
        workers.append((worker, metrics))
    (small, small_metrics), (large, large_metrics) = workers
    # AdamW's first step is the gradient's sign times 1e-3: rounding shows where a gradient is almost 0 (seen: 3e-6).
    assert same_weights(small, large, 2e-5)
    assert small_metrics == pytest.approx(large_metrics, abs=1e-5)
    assert not same_weights(small, make_worker(), 5e-4)


def test_only_policy_tokens_count(make_worker: WorkerMaker, make_batch: BatchMaker) -> None:
    """Whatever stands beside prompt and tool tokens, NaN included, has no effect; beside policy tokens it has."""
    batch = make_batch()
    assert batch.advantages is not None
    config = ActorConfig(ppo_mini_batch_size=4, optim=ADAMW)
    plain, disturbed, changed = make_worker(config), make_worker(config), make_worker(config)
    batch = batch.with_fields(old_logprobs=plain.compute_log_probs(batch)[0])
    assert batch.old_logprobs is not None and batch.advantages is not None
    noise = torch.where(batch.mask, 0.0, torch.nan)
    plain.update(batch, step=1)
    disturbed.update(
        batch.with_fields(advantages=batch.advantages + noise, old_logprobs=batch.old_logprobs + noise), step=1
    )
    changed.update(batch.with_fields(advantages=batch.advantages + batch.mask * 0.5), step=1)
    assert same_weights(plain, disturbed)
    assert not same_weights(plain, changed, 1e-4)


def test_a_step_makes_good_tokens_likelier_and_bad_ones_less_likely(
    make_worker: WorkerMaker, make_batch: BatchMaker
) -> None:
    batch = make_batch(prompts=4, n=2)
    sign = torch.where(torch.arange(len(batch)) % 2 == 0, 1.0, -1.0)
    batch = batch.with_fields(advantages=torch.repeat_interleave(sign, batch.lengths) * batch.mask)
    worker = make_worker(ActorConfig(ppo_mini_batch_size=4, optim=OptimConfig(lr=2e-3)), temperature=0.7)
    before, _ = worker.compute_log_probs(batch)
    batch = batch.with_fields(old_logprobs=before)
    metrics = worker.update(batch, step=1)
    after, _ = worker.compute_log_probs(batch)
    change = torch.zeros(len(batch)).index_add_(0, batch.sequence_ids(), after - before)
    assert (change * sign > 0).all()
    assert metrics["actor/ppo_kl"] == pytest.approx(0.0, abs=1e-6)
    assert metrics["actor/clip_frac"] == 0.0


def test_repeated_updates_on_one_batch_are_held_by_the_clip(make_worker: WorkerMaker, make_batch: BatchMaker) -> None:
    """The surrogate falls, and once the ratios pass their bounds tokens are clipped."""
    batch = make_batch()
    worker = make_worker(ActorConfig(ppo_mini_batch_size=4, ppo_epochs=8, grad_clip=1e9, optim=OptimConfig(lr=3e-3)))
    batch = batch.with_fields(old_logprobs=worker.compute_log_probs(batch)[0])
    first = worker.update(batch, step=1)
    second = worker.update(batch, step=2)
    assert second["actor/pg_loss"] < first["actor/pg_loss"] < 0.2
    assert second["actor/clip_frac"] > 0.1
    assert second["actor/lr"] == pytest.approx(3e-3)
    assert second["perf/update_tokens"] == 8 * batch.num_tokens


def test_what_the_loss_made_of_each_token_is_kept(make_worker: WorkerMaker, make_batch: BatchMaker) -> None:
    """By token it is what the metrics say of all: the first mini-batch's ratios are 1, those of the second are not."""
    batch = make_batch()
    assert batch.advantages is not None
    zero = batch.offsets[2:4]
    batch.advantages[zero[0] : zero[1]] = 0
    config = ActorConfig(ppo_mini_batch_size=2, clip_ratio=0.001, grad_clip=1e9, optim=OptimConfig(lr=3e-3))
    worker = make_worker(config)
    batch = batch.with_fields(old_logprobs=worker.compute_log_probs(batch)[0])
    group = PolicyGroup(LocalRanks(worker))
    metrics = group.update(batch.with_fields(zero_advantage=torch.arange(len(batch)) == 2), step=1, by_token=True)
    made = group.of_update(batch, RolloutCorrectionConfig())
    assert made.ratio is not None and made.clipped is not None
    known = batch.mask.clone()
    known[zero[0] : zero[1]] = False
    assert torch.equal(made.ratio.isfinite(), known) and torch.equal(made.clipped.isfinite(), known)
    change = made.ratio[known].log()
    assert float(-change.mean()) == pytest.approx(metrics["actor/ppo_kl"], abs=1e-6)
    assert float(made.clipped[known].mean()) == pytest.approx(metrics["actor/clip_frac"]) and metrics["actor/clip_frac"]
    moved = [float(made.ratio[batch.sequence_ids() == row].nan_to_num(1).sub(1).abs().max()) for row in range(12)]
    assert [max(moved[start : start + 3]) > 1e-3 for start in (0, 3, 6, 9)].count(True) == 2, "two prompts come second"
    again = group.of_update(batch, RolloutCorrectionConfig()).ratio
    assert again is not None and again.isnan().all(), "it is told once"


@pytest.mark.parametrize(("sign", "bound"), [(1.0, "clip_ratio_high"), (-1.0, "clip_ratio_low")])
def test_clip_bounds_are_told_apart(make_worker: WorkerMaker, make_batch: BatchMaker, sign: float, bound: str) -> None:
    """With good tokens only the upper bound can clip, with bad ones only the lower."""
    batch = make_batch()
    batch = batch.with_fields(advantages=sign * batch.mask.float())
    clipped = {}
    for tight in ("clip_ratio_low", "clip_ratio_high"):
        bounds = {"clip_ratio_low": 0.99, "clip_ratio_high": 100.0, tight: 1e-4}
        worker = make_worker(ActorConfig(ppo_mini_batch_size=4, ppo_epochs=3, optim=OptimConfig(lr=1e-3), **bounds))
        batch = batch.with_fields(old_logprobs=worker.compute_log_probs(batch)[0])
        clipped[tight] = worker.update(batch, step=1)["actor/clip_frac"]
    assert clipped.pop(bound) > 0.5
    assert list(clipped.values()) == [0.0]


def test_old_log_probs_may_be_left_out_of_a_single_step(make_worker: WorkerMaker, make_batch: BatchMaker) -> None:
    batch = make_batch()
    config = ActorConfig(ppo_mini_batch_size=4, optim=ADAMW)
    given, left_out = make_worker(config), make_worker(config)
    left_out.update(batch, step=1)
    batch = batch.with_fields(old_logprobs=given.compute_log_probs(batch)[0])
    given.update(batch, step=1)
    assert same_weights(given, left_out, 1e-6)
    batch = batch.with_fields(old_logprobs=None)
    for config in (ActorConfig(ppo_mini_batch_size=2), ActorConfig(ppo_mini_batch_size=4, ppo_epochs=2)):
        with naming(ValueError, "2 optimizer", "batch.old_logprobs"):
            make_worker(config).update(batch, step=1)


def test_gspo_moves_the_weights_elsewhere_than_vanilla(make_worker: WorkerMaker, make_batch: BatchMaker) -> None:
    batch = make_batch()
    vanilla, gspo = (
        make_worker(
            ActorConfig(ppo_mini_batch_size=2, policy_loss=PolicyLossConfig(loss_mode=mode), optim=OptimConfig(lr=5e-2))
        )
        for mode in ("vanilla", "gspo")
    )
    batch = batch.with_fields(old_logprobs=vanilla.compute_log_probs(batch)[0])
    vanilla.update(batch, step=1)
    gspo.update(batch, step=1)
    assert not same_weights(vanilla, gspo, 1e-3)


def test_kl_in_the_loss_pulls_towards_the_reference(
    make_worker: WorkerMaker, make_batch: BatchMaker, tiny_policy: Path
) -> None:
    batch = make_batch()
    reference = ReferenceWorker(
        str(tiny_policy), dtype="float32", device="cpu", temperature=1.0, log_prob_max_tokens=4096
    )
    batch = batch.with_fields(ref_logprobs=reference.compute_reference_log_probs(batch)[0])
    kls = []
    for coefficient in (0.0, 10.0):
        config = ActorConfig(
            ppo_mini_batch_size=4, use_kl_loss=True, kl_loss_coef=coefficient, optim=OptimConfig(lr=2e-3)
        )
        worker = make_worker(config)
        for step in (1, 2, 3, 4):
            batch = batch.with_fields(old_logprobs=worker.compute_log_probs(batch)[0])
            metrics = worker.update(batch, step=step)
        kls.append(metrics["actor/kl_loss"])
    assert 0 < kls[1] < 0.5 * kls[0]


def test_entropy_bonus_raises_the_entropy(make_worker: WorkerMaker, make_batch: BatchMaker) -> None:
    batch = make_batch()
    batch = batch.with_fields(advantages=torch.zeros(batch.num_tokens))
    worker = make_worker(
        ActorConfig(ppo_mini_batch_size=4, entropy_coeff=1.0, optim=OptimConfig(lr=1e-3)), temperature=0.2
    )
    logprobs, before = worker.compute_log_probs(batch)
    batch = batch.with_fields(old_logprobs=logprobs)
    metrics = worker.update(batch, step=1)
    _, after = worker.compute_log_probs(batch)
    assert "actor/entropy" not in metrics, "it is taken before the update, over all tokens, with a bonus or without"
    assert after["actor/entropy"] > before["actor/entropy"] + 1e-3


def test_the_weight_of_the_entropy_bonus_may_be_another_in_each_update(
    make_worker: WorkerMaker, make_batch: BatchMaker
) -> None:
    batch = make_batch()
    plain, given, steered = (
        make_worker(ActorConfig(ppo_mini_batch_size=4, optim=OptimConfig(lr=1e-3), **keys))
        for keys in ({}, {"entropy_coeff": 0.3}, {"target_entropy": 1.0})
    )
    for worker, weight in ((plain, None), (given, None), (steered, 0.3)):
        batch = batch.with_fields(old_logprobs=worker.compute_log_probs(batch)[0])
        worker.update(batch, step=1, entropy_coeff=weight)
    assert same_weights(given, steered) and not same_weights(plain, steered)


def test_gradient_checkpointing_changes_nothing(
    make_worker: WorkerMaker,
    make_batch: BatchMaker,
    tiny_policy: Path,
) -> None:
    batch = make_batch()
    config = ActorConfig(ppo_mini_batch_size=4, optim=ADAMW)
    plain = make_worker(config)
    saving = make_worker(config, ModelConfig(path=str(tiny_policy), enable_gradient_checkpointing=True))
    layer = fsdp(saving).model.base.base_model.layers[0]  # type: ignore[index]
    runs = []
    layer.self_attn.register_forward_hook(lambda *_: runs.append(1))  # type: ignore[union-attr]
    plain.update(batch, step=1)
    saving.update(batch, step=1)
    assert len(runs) == 2  # once forward, once again in the backward pass
    assert same_weights(plain, saving, 1e-6)


def with_nan(batch: RaggedBatch, group: int) -> RaggedBatch:
    """The batch with a NaN among the advantages of prompt `group`."""
    assert batch.advantages is not None
    advantages = batch.advantages.clone()
    advantages[(batch.mask & (batch.group == group)[batch.sequence_ids()]).nonzero()[3]] = torch.nan
    return batch.with_fields(advantages=advantages)


def test_a_mini_batch_with_a_nan_is_skipped_and_nothing_else(
    make_worker: WorkerMaker, make_batch: BatchMaker, caplog: pytest.LogCaptureFixture
) -> None:
    """Weights and optimizer go on as if it had not been there."""
    batch = make_batch(prompts=4)
    worker, without = (make_worker(ActorConfig(ppo_mini_batch_size=2, shuffle=False, optim=ADAMW)) for _ in range(2))
    batch = batch.with_fields(old_logprobs=worker.compute_log_probs(batch)[0])
    worker.update(batch, step=1)
    without.update(batch, step=1)
    metrics = worker.update(with_nan(batch, group=3), step=2)
    expected = without.update(batch.select([row for row, group in enumerate(batch.group) if group < 2]), step=2)
    assert same_weights(worker, without)
    assert metrics.pop("actor/skipped_updates") == 1 and expected.pop("actor/skipped_updates") == 0
    del metrics["perf/update_tokens"], expected["perf/update_tokens"]
    assert metrics == expected, "the other numbers are of the optimizer steps that were taken"
    (said,) = caplog.messages
    assert_names(said, "step 2", "epoch 1 of 1", "mini-batch 2 of 2", "policy", "advantages")
    assert worker.update(batch, step=3).keys() == metrics.keys() | {"actor/skipped_updates", "perf/update_tokens"}


@pytest.mark.parametrize("group", [0, 3])
def test_a_skipped_mini_batch_is_no_finding_about_the_others(
    make_worker: WorkerMaker, make_batch: BatchMaker, group: int
) -> None:
    batch = make_batch(prompts=4)
    worker = make_worker(ActorConfig(ppo_mini_batch_size=2, shuffle=False))
    batch = with_nan(batch.with_fields(old_logprobs=worker.compute_log_probs(batch)[0]), group)
    assert worker.update(batch, step=1)["actor/skipped_updates"] == 1
    (checked,) = worker.checked()
    assert checked.report.findings == [] and checked.report.evaluated["update/gradient"] == 1


def test_a_step_of_which_everything_is_skipped_changes_nothing(
    make_worker: WorkerMaker, make_batch: BatchMaker
) -> None:
    batch = make_batch(prompts=2)
    worker = make_worker(ActorConfig(ppo_mini_batch_size=2, optim=ADAMW))
    worker.update(batch, step=1)
    before, state = weights(worker), {name: one.clone() for name, one in fsdp(worker).optim.state().items()}
    metrics = worker.update(with_nan(batch, group=0), step=2)
    assert {name: value for name, value in metrics.items() if name.startswith("actor/")} == {"actor/skipped_updates": 1}
    assert all(torch.equal(tensor, before[name]) for name, tensor in fsdp(worker).named_tensors())
    assert all(torch.equal(one, state[name]) for name, one in fsdp(worker).optim.state().items())


def test_a_run_that_learns_nothing_for_long_ends(make_worker: WorkerMaker, make_batch: BatchMaker) -> None:
    """Only after several training steps in a row, each of which was skipped as a whole."""
    batch = make_batch(prompts=4)
    worker = make_worker(ActorConfig(ppo_mini_batch_size=2, shuffle=False))
    batch = batch.with_fields(old_logprobs=worker.compute_log_probs(batch)[0])
    broken = batch.with_fields(advantages=torch.full_like(batch.rewards, torch.nan))
    steps = [broken] * (MAX_SKIPPED - 1) + [with_nan(batch, 1)] + [broken] * (MAX_SKIPPED - 1) + [batch]
    skipped = [worker.update(one, step=step)["actor/skipped_updates"] for step, one in enumerate(steps, start=1)]
    assert skipped == [2] * (MAX_SKIPPED - 1) + [1] + [2] * (MAX_SKIPPED - 1) + [0]
    before = weights(worker)
    with torch.no_grad():
        healthy = fsdp(worker).params["model.norm.weight"].clone()
        fsdp(worker).params["model.norm.weight"].fill_(torch.inf)
    for step in range(20, 19 + MAX_SKIPPED):
        worker.update(batch, step=step)
    said = r"step 30, .* of the policy: .* All numbers of the batch are finite, .* the 5th training step in a row"
    with pytest.raises(TrainingError, match=said):
        worker.update(batch, step=30)
    with torch.no_grad():
        fsdp(worker).params["model.norm.weight"].copy_(healthy)
    assert all(torch.equal(tensor, before[name]) for name, tensor in fsdp(worker).named_tensors())


def gives_nan(columns: LossColumns, config: ActorConfig) -> TokenLoss:
    return TokenLoss(-columns.advantages * columns.logprobs * math.nan)


def has_no_slope(columns: LossColumns, config: ActorConfig) -> TokenLoss:
    return TokenLoss(-columns.advantages * (columns.logprobs - columns.logprobs.detach()).abs().sqrt())


def counts_lower_than_one(columns: LossColumns, config: ActorConfig) -> TokenLoss:
    """A loss that has a sum for some mini-batches only."""
    low = columns.advantages[columns.mask].min()
    return TokenLoss(-columns.advantages * columns.logprobs, {"low": low.abs()} if low < 1 else {})


@pytest.mark.parametrize("low_at", [0, 1])
def test_a_sum_of_some_mini_batches_is_over_the_tokens_of_all(
    make_worker: WorkerMaker, make_batch: BatchMaker, low_at: int
) -> None:
    batch = make_batch(prompts=2)
    mode = f"{__name__}:counts_lower_than_one"
    actor = ActorConfig(ppo_mini_batch_size=1, policy_loss=PolicyLossConfig(loss_mode=mode), shuffle=False)
    low = torch.where(batch.group == low_at, 0.5, 2.0)
    advantages = torch.repeat_interleave(low, batch.offsets.diff()) * batch.mask
    worker = make_worker(actor)
    batch = batch.with_fields(old_logprobs=worker.compute_log_probs(batch)[0], advantages=advantages)
    assert worker.update(batch, step=1)["actor/low"] == pytest.approx(0.5 / int(batch.mask.sum()))


@pytest.mark.parametrize(("function", "says"), [(gives_nan, "the result of"), (has_no_slope, "its gradient is not")])
def test_a_users_loss_that_is_not_finite_is_blamed(
    make_worker: WorkerMaker, make_batch: BatchMaker, caplog: pytest.LogCaptureFixture, function: object, says: str
) -> None:
    batch = make_batch(prompts=2)
    mode = f"{__name__}:{getattr(function, '__name__', '')}"
    worker = make_worker(ActorConfig(ppo_mini_batch_size=2, policy_loss=PolicyLossConfig(loss_mode=mode)))
    batch = batch.with_fields(old_logprobs=worker.compute_log_probs(batch)[0])
    assert worker.update(batch, step=1)["actor/skipped_updates"] == 1
    assert_names(caplog.text, says, mode)
    with torch.no_grad():
        fsdp(worker).params["model.norm.weight"].fill_(torch.inf)
    caplog.clear()
    worker.update(batch, step=2)
    assert mode not in caplog.text and "weights are broken" in caplog.text


def test_the_learning_rate_begins_with_the_policys_first_step(make_worker: WorkerMaker, make_batch: BatchMaker) -> None:
    """Behind a critic's warm-up its own warm-up is whole, and its schedule ends where the run does."""
    batch = make_batch(prompts=2)
    optim = OptimConfig(lr=1.0, lr_warmup_steps=2, lr_scheduler_type="linear")
    config = ActorConfig(ppo_mini_batch_size=2, optim=optim, grad_clip=1e-6)
    late, whole = make_worker(config, total_steps=10, critic_warmup=4), make_worker(config, total_steps=6)
    rates = [late.update(batch, step=step)["actor/lr"] for step in range(5, 11)]
    assert rates == [whole.update(batch, step=step)["actor/lr"] for step in range(1, 7)]
    assert rates == pytest.approx([1 / 3, 2 / 3, 1, 0.75, 0.5, 0.25])
    resumed = make_worker(config, total_steps=10, critic_warmup=4)
    assert resumed.update(batch, step=8)["actor/lr"] == rates[3]


def test_a_rate_by_mini_batch_falls_within_a_step(
    make_worker: WorkerMaker, make_batch: BatchMaker, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Four mini-batches of a step have four rates, and those of the next one continue."""
    batch = make_batch(prompts=4)
    optim = OptimConfig(lr=1.0, lr_scheduler_type="linear", lr_by_mini_batch=True)
    worker = make_worker(ActorConfig(ppo_mini_batch_size=1, optim=optim, grad_clip=1e-6), total_steps=2)
    batch = batch.with_fields(old_logprobs=worker.compute_log_probs(batch)[0])
    seen: list[float] = []
    step = Optim.step

    def noted(self: Optim, place: float) -> float:
        seen.append(step(self, place))
        return seen[-1]

    monkeypatch.setattr(Optim, "step", noted)
    found = [worker.update(batch, step=number)["actor/lr"] for number in (1, 2)]
    assert seen == pytest.approx([1 - place / 8 for place in range(8)])
    assert found == pytest.approx([sum(seen[:4]) / 4, sum(seen[4:]) / 4])


def test_vectors_may_have_no_weight_decay(make_worker: WorkerMaker, make_batch: BatchMaker) -> None:
    batch = make_batch(prompts=2)
    optim = OptimConfig(lr=1e-3, weight_decay=0.5)
    kinds: list[dict[str, object]] = [{}, {"decay_vectors": False}, {"weight_decay": 0.0}]
    workers = [make_worker(ActorConfig(optim=optim.model_copy(update=kind))) for kind in kinds]
    for worker in workers:
        worker.update(batch, step=1)
    whole, spared, without = map(weights, workers)
    for name, value in spared.items():
        same, other = (without, whole) if value.ndim < 2 else (whole, without)
        assert torch.equal(value, same[name]) and not torch.equal(value, other[name])


def test_sequences_without_a_policy_token_are_left_out(make_worker: WorkerMaker, make_batch: BatchMaker) -> None:
    batch = make_batch(prompts=4, n=2)
    config = ActorConfig(ppo_mini_batch_size=4, loss_agg_mode="seq-mean-token-mean", optim=ADAMW)
    batch.mask[: batch.offsets[1]] = False
    worker, without = make_worker(config), make_worker(config)
    worker.update(batch, step=1)
    without.update(batch.select(range(1, 8)), step=1)
    assert same_weights(worker, without)
    batch.mask[:] = False
    with naming(ValueError, "no policy token"):
        worker.update(batch, step=2)
    logprobs, metrics = worker.compute_log_probs(batch.select([]))
    assert logprobs.shape == (0,)
    assert metrics == {"actor/entropy": 0.0}


def test_named_tensors_are_the_models_weights_by_their_names(make_worker: WorkerMaker, tiny_policy: Path) -> None:
    found = dict(fsdp(make_worker()).named_tensors())
    model = AutoModelForCausalLM.from_pretrained(tiny_policy)
    expected = dict(model.named_parameters())  # tied weights once
    assert list(found) == list(expected)
    assert all(torch.equal(found[name], expected[name]) for name in expected)
    half = fsdp(make_worker(model=ModelConfig(path=str(tiny_policy), dtype="bfloat16"))).named_tensors()
    assert {tensor.dtype for _, tensor in half} == {torch.bfloat16}


def test_bfloat16_computes_on_float32_weights(
    make_worker: WorkerMaker, make_batch: BatchMaker, tiny_policy: Path
) -> None:
    batch = make_batch()
    model = ModelConfig(path=str(tiny_policy), dtype="bfloat16")
    tiny_step = ActorConfig(ppo_mini_batch_size=4, optim=OptimConfig(lr=1e-5))
    worker, exact = make_worker(tiny_step, model), make_worker(tiny_step)
    half, _ = worker.compute_log_probs(batch)
    full, _ = exact.compute_log_probs(batch)
    assert 1e-5 < (half - full).abs().max() < 0.1
    before = dict(fsdp(exact).named_tensors())["model.norm.weight"].clone()
    worker.update(batch, step=1)
    after = fsdp(worker).params["model.norm.weight"]
    # bfloat16 weights of size 1 could not take a step of 1e-5.
    assert after.dtype == torch.float32
    assert (after - before).abs().max().item() == pytest.approx(1e-5, rel=0.05)


def test_export_loads_with_transformers(
    make_worker: WorkerMaker, make_batch: BatchMaker, tiny_policy: Path, tmp_path: Path
) -> None:
    from transformers import AutoTokenizer

    batch = make_batch()
    for dtype in ("float32", "bfloat16"):
        worker = make_worker(
            ActorConfig(ppo_mini_batch_size=4, optim=ADAMW), ModelConfig(path=str(tiny_policy), dtype=dtype)
        )
        worker.update(batch, step=1)
        worker.export(tmp_path / dtype, AutoTokenizer.from_pretrained(tiny_policy))
        loaded = AutoModelForCausalLM.from_pretrained(tmp_path / dtype)
        assert "agentrl" not in (tmp_path / dtype / "config.json").read_text()
        assert loaded.dtype == getattr(torch, dtype)
        assert loaded.lm_head.weight is loaded.model.embed_tokens.weight
        state = loaded.state_dict()
        assert all(torch.equal(state[name], tensor) for name, tensor in fsdp(worker).named_tensors())
        assert len(AutoTokenizer.from_pretrained(tmp_path / dtype)) == loaded.config.vocab_size
    assert not same_weights(worker, make_worker(model=ModelConfig(path=str(tiny_policy), dtype="bfloat16")), 1e-3)


def test_local_group_runs_the_worker(make_worker: WorkerMaker, make_batch: BatchMaker) -> None:
    batch = make_batch()
    worker = make_worker(ActorConfig(ppo_mini_batch_size=4))
    group = PolicyGroup(LocalRanks(worker))
    logprobs = group.log_probs(batch)[0].old_logprobs
    assert logprobs is not None
    model = load_model(fsdp(worker).model.base.config._name_or_path)
    with torch.no_grad():
        expected, *_ = token_logprobs(model, batch.ids, batch.offsets, needed=batch.mask)
    assert torch.allclose(logprobs, expected, atol=1e-6)
    assert group.update(batch, step=1)["actor/grad_norm"] > 0
    assert next(iter(group.weights().read()))[0] == "model.embed_tokens.weight"
