"""Sessions of several transcripts: planned and computed by their distinct tokens, with the numbers of flat ones."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

from agentrl.config import CriticConfig
from agentrl.config.sections.actor import ActorConfig
from agentrl.config.sections.model import ModelConfig
from agentrl.config.sections.optim import OptimConfig
from agentrl.model import packed
from agentrl.model.layout import PackedLayout, flat_layout
from agentrl.model.scores import TokenScores
from agentrl.model.tree_layout import tree_layout
from agentrl.runtime.ranks import shares
from agentrl.trajectory import Image, PlacedImage
from agentrl.trajectory.batch import RaggedBatch
from agentrl.trajectory.images import Images
from agentrl.workers.fsdp import FSDPCritic
from agentrl.workers.learner import Learner
from agentrl.workers.plan import micro_batches, rank_shares
from tests.model.families import make_model
from tests.workers.conftest import WorkerMaker, fsdp
from tests.workers.made import critic_worker, policy_worker
from tests.workers.sessions import session_batch

CPU, CUDA = torch.device("cpu"), torch.device("cuda")
ROOM = 150
ACTOR = ActorConfig(ppo_mini_batch_size=8, ppo_max_token_len_per_gpu=ROOM, optim=OptimConfig(lr=1e-3))
Grads = Mapping[str, torch.Tensor]


def stored(batch: RaggedBatch, rows: list[int]) -> int:
    part = batch.select(rows)
    return len(tree_layout(part.ids, part.offsets).stored)


def flat_only(ids: torch.Tensor, offsets: torch.Tensor) -> PackedLayout:
    return flat_layout(offsets, ids.device)


def gradients(learner: Learner[torch.Tensor] | Learner[TokenScores]) -> Grads:
    """What the optimizer's next step will be given; filled by that step."""
    found: dict[str, torch.Tensor] = {}
    take = learner.optim.step

    def watched(step: float) -> float:
        found.update({name: one.grad.clone() for name, one in learner.params.items() if one.grad is not None})
        return take(step)

    learner.optim.step = watched  # type: ignore[method-assign]
    return found


def apart(found: Grads, wanted: Grads) -> float:
    """Distance over the size of `wanted`."""
    differences = sum(float((found[name] - one).double().square().sum()) for name, one in wanted.items())
    return float((differences / sum(float(one.double().square().sum()) for one in wanted.values())) ** 0.5)


@pytest.mark.parametrize("seed", range(8))
def test_micro_batches_fit_by_the_tokens_that_are_stored(seed: int) -> None:
    batch = session_batch(seed, vocab=320)
    plan = micro_batches(batch, ROOM, CPU)
    assert sorted(row for rows in plan for row in rows) == list(range(len(batch)))
    sizes = [stored(batch, rows) for rows in plan]
    assert max(sizes) <= ROOM
    flat = micro_batches(batch, ROOM)
    assert len(plan) < len(flat)
    assert sum(sizes) < sum(stored(batch, rows) for rows in flat)


def test_transcripts_join_the_longest_one_where_it_has_no_room_either() -> None:
    batch = session_batch(1, vocab=320)
    longest = int(batch.lengths.max())
    plan = micro_batches(batch, longest // 2, CPU)
    assert max(stored(batch, rows) for rows in plan) <= longest
    assert len(plan) < len(micro_batches(batch, longest // 2))


def test_plans_without_sessions_are_flat_ones() -> None:
    batch = session_batch(2, vocab=320)
    single = batch.with_fields(trajectory=torch.arange(len(batch)))
    assert micro_batches(single, ROOM, CPU) == micro_batches(batch, ROOM)
    image = Image(np.zeros((1, 1), np.float32), (1, 1, 1), 1, b"d", b"")
    pictured = replace(batch, images=Images.from_sequences([[PlacedImage(0, image)]] * len(batch)))
    assert micro_batches(pictured, ROOM, CPU) == micro_batches(batch, ROOM)


def test_a_gpu_counts_what_it_would_compute() -> None:
    """It shares nothing of so few tokens, and of more only where half of them are saved."""
    batch = session_batch(3, vocab=320)
    assert micro_batches(batch, ROOM, CUDA) == micro_batches(batch, ROOM)
    beginning = torch.arange(2000)
    rows = [torch.cat([beginning, torch.tensor([3000 + place])]) for place in range(3)]
    rows += [torch.arange(5000 + 500 * place, 5400 + 500 * place) for place in range(2)]
    offsets = torch.tensor([0, *map(len, rows)]).cumsum(0)
    several = RaggedBatch.unsampled(
        offsets,
        torch.cat(rows),
        torch.ones(int(offsets[-1]), dtype=torch.bool),
        torch.zeros(5, dtype=torch.int64),
        torch.tensor([0, 0, 0, 0, 0]),
    )
    assert [sorted(rows) for rows in micro_batches(several, 2300, CUDA)] == [[3, 4], [0, 1, 2]]


@pytest.mark.parametrize("seed", [pytest.param(seed, marks=pytest.mark.slice(2, "matrix")) for seed in range(8)])
def test_gradients_and_log_probs_are_those_of_flat_sequences(
    seed: int, make_worker: WorkerMaker, tiny_policy: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    batch = session_batch(seed, vocab=320)
    found: dict[tuple[str, bool], Grads] = {}
    logprobs: dict[tuple[str, bool], torch.Tensor] = {}
    for dtype in ("float32", "bfloat16"):
        for flat in (False, True):
            with monkeypatch.context() as patch:
                if flat:
                    patch.setattr(packed, "make_layout", flat_only)
                worker = make_worker(ACTOR, ModelConfig(path=str(tiny_policy), dtype=dtype))
                found[dtype, flat] = gradients(fsdp(worker))
                logprobs[dtype, flat] = worker.compute_log_probs(batch)[0]
                worker.update(batch.with_fields(old_logprobs=logprobs[dtype, flat]), step=1)
    exact = found["float32", True]
    assert apart(found["float32", False], exact) < 1e-6
    assert (logprobs["float32", False] - logprobs["float32", True]).abs().max() < 2e-6
    assert apart(found["bfloat16", False], exact) < 1.25 * apart(found["bfloat16", True], exact)


def test_a_critic_learns_sessions_as_flat_sequences(tiny_policy: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    batch = session_batch(4, vocab=320)
    noise = torch.randn(batch.num_tokens, generator=torch.Generator().manual_seed(4))
    found: list[Grads] = []
    for flat in (False, True):
        with monkeypatch.context() as patch:
            if flat:
                patch.setattr(packed, "make_layout", flat_only)
            config = CriticConfig(ppo_max_token_len_per_gpu=ROOM)
            worker = critic_worker(ModelConfig(path=str(tiny_policy)), config, ACTOR)
            assert isinstance(worker.backend, FSDPCritic)
            torch.nn.init.constant_(worker.backend.model.value_head.weight, 0.1)  # from 0 the layers learn nothing
            found.append(gradients(worker.backend))
            values = worker.compute_values(batch)[0]
            worker.update(batch.with_fields(values=values, returns=noise * batch.mask), step=1)
    assert apart(*found) < 1e-6


def test_a_model_with_a_state_computes_each_transcript_whole(tmp_path: Path) -> None:
    """Its weights move by the same bits whether transcripts are of one session or not."""
    make_model("lfm2").save_pretrained(tmp_path)
    batch = session_batch(5, vocab=61)
    moved = []
    for trajectory in (batch.trajectory, torch.arange(len(batch))):
        worker = policy_worker(ModelConfig(path=str(tmp_path)), ACTOR)
        one = batch.with_fields(trajectory=trajectory)
        worker.update(one.with_fields(old_logprobs=worker.compute_log_probs(one)[0]), step=1)
        moved.append(dict(fsdp(worker).named_tensors()))
    assert all(torch.equal(tensor, moved[1][name]) for name, tensor in moved[0].items())


def test_ranks_get_whole_sessions_where_these_are_spread_evenly() -> None:
    lengths = torch.tensor([100, 98, 96, 50, 40, 45])
    offsets = torch.cat([torch.zeros(1, dtype=torch.int64), lengths.cumsum(0)])
    batch = RaggedBatch.unsampled(
        offsets,
        torch.zeros(int(offsets[-1]), dtype=torch.int64),
        torch.ones(int(offsets[-1]), dtype=torch.bool),
        torch.zeros(6, dtype=torch.int64),
        torch.tensor([0, 0, 0, 1, 2, 3]),
    ).with_fields(own_tokens=torch.tensor([100, 8, 6, 50, 40, 45]))
    assert sorted(rank_shares(batch, 2, CPU)) == [[0, 1, 2], [3, 4, 5]]
    assert rank_shares(batch, 2) == shares(lengths.tolist(), 2)
    assert rank_shares(batch, 2, CUDA) == shares(lengths.tolist(), 2), "a GPU would not share so few tokens"
    assert rank_shares(batch, 6, CPU) == shares(lengths.tolist(), 6), "a rank would have more tokens"
