"""Processor time of a rollout correction, and of each policy loss, against the passes and the update of a step.

    python -m benchmarks.training.correction_cost

One thread, a tiny policy (hidden 128, 4 layers; 0.9 million weights), so that the share is larger than any real
policy's; 32 sequences of made-up tokens with log-normal lengths. `recomputed` is computed once a step, `interpolated`
in every micro-batch. A loss is counted forward and backward, with what chooses its tokens. Prints the seconds and the
share of the step (log-probs, correction, update).
"""

from __future__ import annotations

import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import torch

from agentrl.algorithms.estimate import corrected
from agentrl.algorithms.policy_loss import PolicyLoss, select_tokens
from agentrl.config.registries import POLICY_LOSSES
from agentrl.config.sections.actor import ActorConfig, ActorRolloutRefConfig
from agentrl.config.sections.algorithm import AlgorithmConfig, RolloutCorrectionConfig
from agentrl.config.sections.model import PolicyModelConfig
from agentrl.config.sections.optim import OptimConfig
from agentrl.config.sections.training import Config
from agentrl.quickstart.tiny_policy import TinyShape, make_tiny_policy
from agentrl.system.json_value import JSON
from agentrl.trajectory.batch import RaggedBatch
from agentrl.workers.policy import PolicyWorker
from benchmarks.no_options import no_options
from benchmarks.training.made_batches import ragged_batch

SHAPE = TinyShape(vocab=1024, hidden=128, layers=4, heads=4, kv_heads=2, intermediate=384)
KEYS = {"rollout_is": "sequence", "reject": {"token": (0.5, 2.0), "seq_mean_k3": 0.01, "veto": 1e-4}}
ROUNDS = 20


def seconds(call: Callable[[], object], rounds: int = 1) -> float:
    """Thread seconds of a call, the least of `rounds`."""
    found = []
    for _ in range(rounds):
        began = time.thread_time()
        call()
        found.append(time.thread_time() - began)
    return min(found)


def in_loss(batch: RaggedBatch, config: RolloutCorrectionConfig) -> float:
    """Seconds that the correction adds to the loss of a batch, all micro-batches at once."""
    assert batch.old_logprobs is not None
    logprobs = batch.old_logprobs
    plain, own = PolicyLoss.from_config(ActorConfig()), PolicyLoss.from_config(ActorConfig(), config)
    return seconds(lambda: own(batch, logprobs), ROUNDS) - seconds(lambda: plain(batch, logprobs), ROUNDS)


def of_loss(batch: RaggedBatch, name: str) -> float:
    """Seconds of a loss over the whole batch, forward and backward, and of the choice of its tokens."""
    assert batch.old_logprobs is not None
    options: dict[str, JSON] = {"dro_beta": 0.1} if name == "dro" else {}
    config = ActorConfig.model_validate({"policy_loss": {"loss_mode": name, "options": options}})
    loss = PolicyLoss.from_config(config)
    logprobs = batch.old_logprobs.clone().requires_grad_()

    def once() -> None:
        columns: dict[str, torch.Tensor] = {}
        if loss.declaration.select is not None:
            columns, _ = select_tokens(batch, config, 1)
        loss(batch.with_fields(**columns), logprobs).by_token.sum().backward()

    return seconds(once, ROUNDS)


def main() -> None:
    no_options(__doc__)
    torch.set_num_threads(1)
    batch, _ = ragged_batch(32)
    batch = batch.with_fields(ids=batch.ids % 256, advantages=torch.randn(batch.num_tokens) * batch.mask)
    with tempfile.TemporaryDirectory() as folder:
        path = make_tiny_policy(Path(folder) / "policy", seed=0, shape=SHAPE)
        actor = ActorConfig(optim=OptimConfig(lr=1e-6))
        roles = ActorRolloutRefConfig(model=PolicyModelConfig(path=str(path)), actor=actor)
        worker = PolicyWorker(Config(actor_rollout_ref=roles), device="cpu", total_steps=10)
        passes = seconds(lambda: worker.compute_log_probs(batch))
        batch = batch.with_fields(old_logprobs=worker.compute_log_probs(batch)[0])
        assert batch.old_logprobs is not None
        batch = batch.with_fields(rollout_logprobs=batch.old_logprobs + 0.05 * torch.randn(batch.num_tokens))
        update = seconds(lambda: worker.update(batch, step=1))
    algorithm = AlgorithmConfig.model_validate({"rollout_correction": KEYS})
    batch = batch.with_fields(staleness=torch.randint(0, 4, (batch.num_tokens,)))
    interpolated = RolloutCorrectionConfig.model_validate(KEYS | {"proximal": "interpolated"})
    print(f"{batch.num_tokens} tokens: log-probs {passes:.2f} s, update {update:.2f} s")
    for name, cost, step in (
        ("recomputed", seconds(lambda: corrected(batch, algorithm, 3), ROUNDS), passes + update),
        ("interpolated", in_loss(batch, interpolated), update),
    ):
        print(f"{name:13} {cost * 1e3:6.2f} ms, {cost / (step + cost):.2%} of the step")
    batch = batch.with_fields(correction=None)
    for name in POLICY_LOSSES.names():
        cost = of_loss(batch, name)
        print(f"loss {name:8} {cost * 1e3:6.2f} ms, {cost / (passes + update):.2%} of the step")


if __name__ == "__main__":
    main()
