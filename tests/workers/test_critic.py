"""The critic on a real tiny Qwen3."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from agentrl.config.sections.actor import ActorConfig, CriticConfig
from agentrl.config.sections.model import ModelConfig
from agentrl.config.sections.optim import OptimConfig
from agentrl.errors import ConfigError, TrainingError
from agentrl.workers import CriticWorker
from agentrl.workers.fsdp import FSDPCritic
from agentrl.workers.trainable import MAX_SKIPPED
from tests.config.loading import load
from tests.naming import naming
from tests.workers.conftest import BatchMaker
from tests.workers.made import critic_worker


def critic(tiny_policy: Path, **config: object) -> CriticWorker:
    settings = {"optim": OptimConfig(lr=1e-2), "cliprange_value": 100.0} | config
    return critic_worker(
        ModelConfig(path=str(tiny_policy)),
        CriticConfig(**settings),
        ActorConfig(ppo_mini_batch_size=2),
        device="cpu",
        total_steps=100,
        seed=1,
    )


def ours(worker: CriticWorker) -> FSDPCritic:
    """The worker's backend, where it is ours."""
    assert isinstance(worker.backend, FSDPCritic)
    return worker.backend


def head(worker: CriticWorker) -> torch.Tensor:
    """Weights of the value head."""
    return ours(worker).model.value_head.weight


def test_values_fit_the_returns(tiny_policy: Path, make_batch: BatchMaker) -> None:
    batch = make_batch(prompts=4, n=2)
    # What can be told from the tokens before: a different return for each prompt, known from its first token on.
    target = torch.tensor([1.0, -1.0, 0.5, 0.0])
    batch = batch.with_fields(returns=torch.repeat_interleave(target[batch.group], batch.lengths))
    worker = critic(tiny_policy)
    batch = batch.with_fields(values=worker.compute_values(batch)[0])
    assert batch.values is not None and batch.values.abs().max() == 0.0
    losses = []
    for step in range(1, 41):
        batch = batch.with_fields(values=worker.compute_values(batch)[0])
        losses.append(worker.update(batch, step=step)["critic/vf_loss"])
    values = worker.compute_values(batch)[0]
    first = sum(0.5 * target[rows].square().mean() for rows in ([0, 1], [2, 3])) / 2
    assert losses[0] == pytest.approx(float(first), rel=0.5)
    assert batch.returns is not None and (values - batch.returns)[batch.mask].abs().max() < 0.15


def test_a_value_knows_only_the_tokens_before_it(tiny_policy: Path, make_batch: BatchMaker) -> None:
    batch = make_batch(prompts=2, n=1)
    worker = critic(tiny_policy)
    torch.nn.init.ones_(head(worker))
    values = worker.compute_values(batch)[0]
    place = int(batch.offsets[1]) - 2
    changed = batch.with_fields(ids=batch.ids.clone())
    changed.ids[place] = (changed.ids[place] + 1) % 200
    after = worker.compute_values(changed)[0]
    assert torch.equal(after[: place + 1], values[: place + 1])
    assert after[place + 1] != values[place + 1]
    assert torch.equal(after[place + 2 :], values[place + 2 :])  # the next sequence sees nothing of it
    assert (values[batch.offsets[:-1]] == 0).all()


def test_clip_range_holds_the_values_back(tiny_policy: Path, make_batch: BatchMaker) -> None:
    batch = make_batch(prompts=2, n=2)
    batch = batch.with_fields(returns=torch.full((batch.num_tokens,), 5.0))
    worker = critic(tiny_policy, cliprange_value=0.1, ppo_epochs=20)
    batch = batch.with_fields(values=worker.compute_values(batch)[0])
    metrics = worker.update(batch, step=1)
    assert metrics["critic/clip_frac"] > 0.3
    assert worker.compute_values(batch)[0][batch.mask].mean() < 2.5
    free = critic(tiny_policy, ppo_epochs=20)
    free.update(batch, step=1)
    assert free.compute_values(batch)[0][batch.mask].mean() > 3.5


def test_micro_batches_change_nothing(tiny_policy: Path, make_batch: BatchMaker) -> None:
    batch = make_batch()
    batch = batch.with_fields(returns=torch.randn(batch.num_tokens, generator=torch.Generator().manual_seed(0)))
    batch = batch.with_fields(values=torch.zeros(batch.num_tokens))
    small, large = (
        critic(tiny_policy, ppo_max_token_len_per_gpu=budget, optim=OptimConfig(lr=1e-3)) for budget in (64, 100_000)
    )
    for worker in (small, large):  # a head of 0 would give the backbone no gradient but rounding
        torch.nn.init.normal_(head(worker), generator=torch.Generator().manual_seed(0))
    assert small.update(batch, step=1) == pytest.approx(large.update(batch, step=1), rel=1e-6, abs=1e-5)
    for name, param in ours(small).params.items():
        assert torch.allclose(param, ours(large).params[name], rtol=0, atol=1e-6), name


def test_save_and_load_continue_bit_for_bit(tiny_policy: Path, make_batch: BatchMaker, tmp_path: Path) -> None:
    batch = make_batch()
    batch = batch.with_fields(returns=torch.ones(batch.num_tokens))
    batch = batch.with_fields(values=torch.zeros(batch.num_tokens))
    worker = critic(tiny_policy)
    worker.update(batch, step=1)
    worker.save(tmp_path)
    again = critic(tiny_policy)
    again.load(tmp_path)
    for one in (worker, again):
        one.update(batch, step=2)
    assert all(torch.equal(param, ours(again).params[name]) for name, param in ours(worker).params.items())


def test_nan_returns_are_skipped_and_end_the_run_in_the_end(tiny_policy: Path, make_batch: BatchMaker) -> None:
    batch = make_batch()
    batch = batch.with_fields(returns=torch.full((batch.num_tokens,), torch.nan))
    batch = batch.with_fields(values=torch.zeros(batch.num_tokens))
    worker = critic(tiny_policy)
    for step in range(1, MAX_SKIPPED):
        assert worker.update(batch, step=step) == {"critic/skipped_updates": 2}
    with naming(TrainingError, f"step {MAX_SKIPPED}"):
        worker.update(batch, step=MAX_SKIPPED)
    assert head(worker).abs().max() == 0


def test_missing_returns_are_named(tiny_policy: Path, make_batch: BatchMaker) -> None:
    with pytest.raises(ValueError, match=r"batch\.values and batch\.returns are needed"):
        critic(tiny_policy).update(make_batch(), step=1)


MINE = """
from pydantic import BaseModel
from agentrl.workers.fsdp import FSDPCritic

class Options(BaseModel):
    start: float

class Hopeful(FSDPCritic):
    def __init__(self, settings, options: Options):
        super().__init__(settings)
        self.start = options.start

    def values(self, batch):
        return super().values(batch) + self.start
"""


def test_a_backend_of_the_users_is_given_its_options(tiny_policy: Path, make_batch: BatchMaker, tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text(MINE)
    name = f"{tmp_path}/mine.py:Hopeful"
    worker = critic(tiny_policy, strategy=name, strategy_options={"start": 2.0})
    assert (worker.compute_values(make_batch(prompts=2, n=1))[0] == 2.0).all()
    with naming(ConfigError, "critic.strategy_options", "key 'strat'", "'start'", "unknown"):
        load("algorithm.adv_estimator=gae", f"critic.strategy={name}", "critic.strategy_options={strat: 2}")
    with naming(ConfigError, "critic.strategy", "'megatron'", "unknown"):
        load("algorithm.adv_estimator=gae", "critic.strategy=megatron")
    # verl's scripts name it for GRPO too, which has no critic.
    assert load("critic.strategy=fsdp2").critic.strategy == "fsdp2"
