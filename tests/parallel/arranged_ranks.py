"""The ranks of test_arrangements.py: trainings arranged in several ways. Run as a script, which forks its ranks."""

from __future__ import annotations

import functools
import json
import os
import sys
import traceback
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any, cast

import torch
import torch.distributed as dist
from safetensors.torch import load_file, save_file
from torch._dynamo.utils import counters
from torch.distributed.device_mesh import DeviceMesh
from transformers import AutoTokenizer, PreTrainedModel

from agentrl.algorithms.declared import declared_by_loss
from agentrl.algorithms.estimate import Settings, estimate
from agentrl.algorithms.policy_loss import select_tokens
from agentrl.config import Config, PreferencesConfig, SFTConfig
from agentrl.config.sections.parallel import Parallel
from agentrl.model.heads import PolicyModel
from agentrl.model.packed import token_logprobs, use_packed_attention
from agentrl.parallel.collectives import full, rank, world_size
from agentrl.parallel.mesh import Mesh
from agentrl.parallel.shard import shard
from agentrl.runtime.ranks import join_tokens, shares
from agentrl.trajectory.batch import RaggedBatch
from agentrl.trajectory.images import Images
from agentrl.workers.fsdp import FSDPScores
from agentrl.workers.groups import HasReference
from agentrl.workers.roles import critic_role, policy_role, preference_role, reference_role, sft_role
from tests.model.families import batch, make_model, one_by_one
from tests.vision import test_model as vision
from tests.vision import tiny

STEPS = 5
Scores = Callable[[RaggedBatch], tuple[torch.Tensor, dict[str, float]]]
SHORT = ("states of qwen3-next", "states of granite-moe-hybrid")
"""Trainings of two steps: later ones enlarge the rounding of float32 (grad_norm differs by 1e-3 and 2e-5 of itself in
the fourth step of two ranks). In float64 the gradients of all five steps differ by 3e-13."""
LIMIT = timedelta(seconds=321)
"""Of a collective call, in every group."""


class Workers:
    """The roles of one run on this rank, and what `trained` asks of them."""

    def __init__(self, config: Config, ppo: bool) -> None:
        self.policy = policy_role(config, "cpu", 10).make()
        self.critic = critic_role(config, "cpu", 10).make() if ppo else None
        role = None if ppo else reference_role(config, "cpu")
        # With adapters the policy is its own reference.
        self.reference: HasReference | None = None if ppo else self.policy if role is None else role.make()


def scores(score: Scores, parallel: Parallel, batch: RaggedBatch) -> torch.Tensor:
    """Token scores of all ranks, as worker groups join them."""
    size = parallel.copies
    parts = shares(batch.lengths.tolist(), world_size() // size)
    mine, _ = score(batch.select(parts[rank() // size]))
    everyone: list[Any] = [mine]
    if dist.is_initialized():
        everyone = [None] * world_size()
        dist.all_gather_object(everyone, mine)
    for place, one in enumerate(everyone):
        assert torch.equal(one, everyone[place - place % size]), "the ranks of a block answer the same"
    return join_tokens(everyone[::size], parts, batch)


def trained(config: Config, batch: RaggedBatch, steps: int = STEPS) -> tuple[list[dict[str, float]], Workers]:
    """So many steps on one batch; their metrics."""
    ppo = config.algorithm.adv_estimator == "gae"
    if ppo:  # trajectories of two transcripts, which may lie on two ranks
        batch = batch.with_fields(trajectory=batch.trajectory // 2)
    run = Workers(config, ppo)
    roles = config.actor_rollout_ref
    metrics = []
    for step in range(1, steps + 1):
        if config.algorithm.rollout_correction.proximal == "published" and step == 1:
            run.policy.keep()
        log_probs = scores(run.policy.compute_log_probs, roles.actor.parallel, batch)[
            :, 0
        ]  # and entropies, varentropies
        batch = batch.with_fields(old_logprobs=log_probs)
        if roles.actor.router_replay.mode == "R2":
            batch = batch.with_fields(
                experts=scores(lambda _: (run.policy.of_log_probs().values, {}), roles.actor.parallel, batch)
            )
        if run.critic is not None:
            batch = batch.with_fields(values=scores(run.critic.compute_values, config.critic.parallel, batch))
        if run.reference is not None:
            batch = batch.with_fields(
                ref_logprobs=scores(run.reference.compute_reference_log_probs, roles.ref_parallel, batch)
            )
        columns, seen = estimate(
            batch, config.algorithm, Settings(config.actor_rollout_ref.rollout.n, version=step % 3)
        )
        batch = batch.with_fields(**columns)
        if declared_by_loss(config).select is not None:
            columns, _ = select_tokens(batch, roles.actor, seed=step)
            batch = batch.with_fields(**columns)
        seen |= {} if run.critic is None else run.critic.update(batch, step=step)
        metrics.append(seen | run.policy.update(batch, step=step))
    return metrics, run


def supervised(config: SFTConfig, batch: RaggedBatch) -> tuple[list[dict[str, float]], Any]:
    """STEPS steps on one batch, and the loss after each; their metrics, and the worker."""
    worker = sft_role(config, "cpu", 10).make()
    return [worker.update(batch, step=step) | worker.mean_loss(batch) for step in range(1, STEPS + 1)], worker


def preferring(config: PreferencesConfig, batch: RaggedBatch) -> tuple[list[dict[str, float]], Any]:
    """STEPS steps on a batch of 8 sequences as preferences, and the loss after each; their metrics, and the worker."""
    worker = preference_role(config, "cpu", 10).make()
    sides = [1, -1] * 4 if config.rows == "pairs" else [1, 0, -1, 0] * 2
    batch = batch.with_fields(trajectory=torch.arange(len(batch)), side=torch.tensor(sides, dtype=torch.int32))
    if config.trains == "policy":
        batch = batch.with_fields(ref_logprobs=scores(worker.compute_scores, config.parallel, batch))
    else:
        last = torch.zeros_like(batch.mask)
        last[batch.offsets[1:] - 1] = True
        batch = batch.with_fields(mask=last)
    return [worker.update(batch, step=step) | worker.mean_loss(batch) for step in range(1, STEPS + 1)], worker


def train(name: str, trees: dict[str, Any], work: Path) -> None:
    """Train by each of an arrangement's configs, and write down what came of it."""
    batch = RaggedBatch(**torch.load(work / "batch.pt", weights_only=True))
    torch.compiler.set_default_backend("eager")
    for kind, tree in trees.items():
        counters.clear()
        if kind.endswith("sft"):
            factors = 0.25 + torch.arange(8).double() if kind != "sft" else None
            metrics, policy = supervised(SFTConfig.model_validate(tree), batch.with_fields(loss_weight=factors))
        elif "trains" in tree:
            metrics, policy = preferring(PreferencesConfig.model_validate(tree), batch)
        else:
            config = Config.model_validate(tree)
            brief = kind in SHORT or config.actor_rollout_ref.actor.policy_loss.loss_mode != "vanilla"
            metrics, run = trained(config, batch, 2 if brief else STEPS)
            policy = run.policy
        assert (counters["stats"]["unique_graphs"] > 0) == (kind == "compiled")
        weights = weights_of(policy.backend)
        if rank() == 0:
            (work / f"{name}-{kind}.json").write_text(json.dumps(metrics))
            save_file(weights, work / f"{name}-{kind}.safetensors")
        if kind == "grpo":
            policy.save(work / f"{name}-{kind}")
            policy.export(work / f"{name}-{kind}-export", AutoTokenizer.from_pretrained(work / "policy"))
            for saved in ("one-grpo", "fsdp 2-grpo"):  # of one process, and of two
                if (work / saved).exists():
                    policy.load(work / saved)
                    expected = load_file(work / f"{saved}.safetensors")
                    for key, tensor in policy.backend.model.named_tensors(policy.backend.tensors):
                        assert torch.equal(tensor, expected[key]), (saved, key)


def weights_of(backend: Any) -> dict[str, torch.Tensor]:
    """All weights, whole, by their names in checkpoints; a reward model's head is left out, which no start has."""
    if isinstance(backend, FSDPScores):
        named = ((f"model.{name}", full(param.detach())) for name, param in backend.tensors.items())
        return {name: tensor.clone() for name, tensor in named if name != "model.score.weight"}
    return {key: tensor.clone() for key, tensor in backend.model.named_tensors(backend.tensors)}


SPLIT = {
    Parallel(sequence=4): ("gemma2", "gpt-oss", "qwen3.5", "falcon-h1"),
    Parallel(sequence=2, tensor=2): ("qwen2", "phi3", "qwen3.5"),
}


def score() -> None:
    """Tokens and heads that are split, against transformers' own forward of one sequence after another; images, against
    the packed forward of one process."""
    ids, offsets = batch()
    for parallel, family in [(parallel, family) for parallel, names in SPLIT.items() for family in names]:
        own = make_model(family)
        compare(one_by_one(own, ids, offsets, 0.8), own, make_model(family), parallel, ids, offsets)
    rows, placed = vision.sequences()
    ids, offsets = torch.tensor([token for row in rows for token in row]), torch.tensor([0, *map(len, rows)]).cumsum(0)
    images = Images.from_sequences(placed)
    own, other = (tiny.make_model("qwen3_vl", vision.VOCAB, **vision.TOKENS) for _ in range(2))
    logprobs, entropy, *_ = token_logprobs(
        use_packed_attention(own), ids, offsets, temperature=0.8, needs=frozenset({"entropy"}), images=images
    )
    assert entropy is not None
    compare((logprobs, entropy), own, other, Parallel(sequence=4), ids, offsets, images)


def compare(
    expected: tuple[torch.Tensor, torch.Tensor],
    own: PreTrainedModel,
    base: PreTrainedModel,
    parallel: Parallel,
    ids: torch.Tensor,
    offsets: torch.Tensor,
    images: Images | None = None,
) -> None:
    """`base` on split tokens gives the log-probs, entropies and gradients that `own` gave."""
    name = type(base).__name__
    weights = torch.randn(len(ids), generator=torch.Generator().manual_seed(0))
    (expected[0] @ weights + expected[1].sum()).backward()
    mesh = Mesh(parallel, "cpu")
    for group in (mesh.sequence, *(part.get_group() for part in (mesh.fsdp, mesh.tensor) if part and part.ndim == 1)):
        assert group is None or group._get_backend(torch.device("cpu")).options._timeout == LIMIT
    model = PolicyModel(use_packed_attention(base), group=mesh.sequence)
    partial = shard(model, base, mesh)
    everything = torch.ones_like(ids, dtype=torch.bool)
    logprobs, entropy, *_ = model(
        ids, offsets, needed=everything, temperature=0.8, needs=frozenset({"entropy"}), images=images
    )
    ((logprobs @ weights + entropy.sum()) * mesh.averaged).backward()
    for got, want in zip((logprobs, entropy), expected, strict=True):
        assert torch.allclose(got, want, atol=1e-5), name
    for (key, whole), param in zip(own.named_parameters(), base.parameters(), strict=True):
        want = torch.zeros_like(whole) if whole.grad is None else whole.grad
        got = torch.zeros_like(whole) if param.grad is None else full(param.grad)  # experts without a token
        if key in partial:
            dist.all_reduce(got, group=cast(DeviceMesh, mesh.tensor).get_group())
        assert torch.allclose(got, want, atol=1e-4 * float(want.abs().max()) + 1e-6), (name, key)


def on_ranks(name: str, ranks: int, task: Callable[[], None], work: Path) -> None:
    """Fork ranks that do `task` in a process group of their own: importing torch would cost more than the task."""
    children = []
    for number in range(ranks):
        child = os.fork()
        if child == 0:
            status = 1
            try:
                if ranks > 1:
                    meeting = f"file://{work / name}.rendezvous"
                    dist.init_process_group("gloo", init_method=meeting, timeout=LIMIT, rank=number, world_size=ranks)
                task()
                status = 0
            except BaseException:
                traceback.print_exc()
            finally:
                sys.stderr.flush()
                os._exit(status)
        children.append(child)
    statuses = [os.waitstatus_to_exitcode(os.wait()[1]) for _ in children]
    if any(statuses):
        sys.exit(f"{name}: the ranks ended with {statuses}")


def main(work: Path) -> None:
    for name, (ranks, trees) in json.loads((work / "arrangements.json").read_text()).items():
        on_ranks(name, ranks, functools.partial(train, name, trees, work), work)
    on_ranks("score", 4, score, work)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
