"""Sessions of 2, 5 and 20 transcripts by their distinct tokens, against flat: update, log-probs, engine, memory.

    python -m benchmarks.training.sessions [--models tiny mid] [--length 3000]
    python -m benchmarks.training.sessions --long

A session has a main transcript of --length tokens. Each other one begins with 70 to 100 % of it, as a compaction, a
fork or the request for a summary does, and has a few tokens of its own. Both ways run in turn on the same sessions.
Flat means that no transcript shares a token with another one: in the update's micro-batches and in the engine's cache.
Micro-batches have 1.6 times the main transcript's tokens at most; memory is that of a session in one micro-batch.
--long: one session of 24 transcripts in two windows of 35,000 tokens, over 700,000 flat tokens, by the tree alone; and
its two longest transcripts, which have about as many distinct tokens.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import random
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from pathlib import Path

import torch

from agentrl.config import Config
from agentrl.config.sections.actor import ActorConfig
from agentrl.config.sections.model import ModelConfig
from agentrl.config.sections.optim import OptimConfig
from agentrl.engines.contract import SamplingParams
from agentrl.engines.embedded.engine import EmbeddedEngine
from agentrl.model import packed
from agentrl.model.layout import PackedLayout, flat_layout
from agentrl.model.packed import load_model
from agentrl.model.tree_layout import tree_layout
from agentrl.quickstart.tiny_policy import TinyShape, make_tiny_policy
from agentrl.trajectory.batch import RaggedBatch
from agentrl.workers.fsdp import FSDPPolicy
from agentrl.workers.policy import PolicyWorker
from benchmarks.forked import forked
from benchmarks.training.peak_memory import peak_memory

TRANSCRIPTS = (2, 5, 20)
SHAPES = {
    "tiny": TinyShape(vocab=512, hidden=64, layers=2, heads=2, kv_heads=1, intermediate=128),
    "mid": TinyShape(vocab=2048, hidden=256, layers=6, heads=4, kv_heads=2, intermediate=768),
}
OWN = (20, 150)
"""Least and most tokens that a transcript has of its own."""
Grads = Mapping[str, torch.Tensor]


def session(transcripts: int, length: int, vocab: int, seed: int = 0) -> tuple[list[list[int]], list[list[bool]]]:
    """Make the ids of a session's transcripts, and which of them the policy sampled there."""
    draw = random.Random(seed)

    def tokens(count: int) -> list[int]:
        return [draw.randrange(3, vocab) for _ in range(count)]

    main = tokens(length)
    ids, masks = [main], [[place > length // 10 and place // 50 % 4 == 0 for place in range(length)]]
    for _ in range(transcripts - 1):
        cut, own = int(length * draw.uniform(0.7, 1.0)), draw.randint(*OWN)
        ids.append(main[:cut] + tokens(own))
        masks.append([False] * (cut + 10) + [True] * (own - 10))
    return ids, masks


def vocab_of(folder: Path) -> int:
    return int(json.loads((folder / "config.json").read_text())["vocab_size"])


def batch_of(ids: list[list[int]], masks: list[list[bool]]) -> RaggedBatch:
    offsets = torch.tensor([0, *map(len, ids)]).cumsum(0)
    mask = torch.tensor([one for part in masks for one in part])
    count, total = len(ids), len(mask)
    return RaggedBatch.from_columns(
        offsets=offsets,
        ids=torch.tensor([one for part in ids for one in part]),
        mask=mask,
        rollout_logprobs=torch.zeros(total),
        version=mask.int() - 1,
        turn=mask.int() - 1,
        rewards=torch.zeros(total),
        advantages=torch.randn(total, generator=torch.Generator().manual_seed(1)) * mask,
        group=torch.zeros(count, dtype=torch.int64),
        trajectory=torch.zeros(count, dtype=torch.int64),
        policy=torch.zeros(count, dtype=torch.int32),
        policies=("policy",),
    )


def policy(folder: Path, room: int) -> PolicyWorker:
    """Make a policy whose micro-batches have at most `room` tokens."""
    actor = ActorConfig(ppo_mini_batch_size=1, ppo_max_token_len_per_gpu=room, optim=OptimConfig(lr=1e-3))
    whole = Config()
    rollout = whole.actor_rollout_ref.rollout.model_copy(update={"log_prob_max_token_len_per_gpu": room})
    parts = {"model": ModelConfig(path=str(folder)), "actor": actor, "rollout": rollout}
    roles = whole.actor_rollout_ref.model_copy(update=parts)
    return PolicyWorker(whole.model_copy(update={"actor_rollout_ref": roles}), device="cpu", total_steps=10)


@contextmanager
def flat(on: bool) -> Iterator[None]:
    """Let no sequences share tokens, inside the block."""
    shared = packed.make_layout

    def separate(ids: torch.Tensor, offsets: torch.Tensor) -> PackedLayout:
        return flat_layout(offsets, ids.device)

    if on:
        packed.make_layout = separate
    try:
        yield
    finally:
        packed.make_layout = shared


class Cost:
    """CPU-seconds of log-probs and update, the update's peak memory, micro-batches, gradients."""

    def __init__(self, folder: Path, batch: RaggedBatch, room: int, *, is_flat: bool) -> None:
        """room: tokens of a micro-batch, at most."""
        worker = policy(folder, room)
        backend = worker.backend
        assert isinstance(backend, FSDPPolicy)
        one = batch.with_fields(trajectory=torch.arange(len(batch))) if is_flat else batch
        self.micro_batches = len(backend.micro_batches(one))
        self.grads: dict[str, torch.Tensor] = {}
        take = backend.optim.step

        def watched(step: float) -> float:
            self.grads = {name: p.grad.clone() for name, p in backend.params.items() if p.grad is not None}
            return take(step)

        backend.optim.step = watched  # type: ignore[method-assign]
        with flat(is_flat):
            self.log_probs, old = timed(lambda: worker.compute_log_probs(one)[0])
            with peak_memory() as peak:
                self.update, _ = timed(lambda: worker.update(one.with_fields(old_logprobs=old), step=1))
        self.bytes = peak.bytes
        self.old = old


def timed(work: Callable[[], torch.Tensor | dict[str, float]]) -> tuple[float, torch.Tensor]:
    began = time.process_time()
    found = work()
    spent = time.process_time() - began
    return spent, found if isinstance(found, torch.Tensor) else torch.zeros(0)


def apart(found: Grads, wanted: Grads) -> float:
    """Distance of gradients over the size of the wanted ones."""
    differs = sum(float((found[name] - one).double().square().sum()) for name, one in wanted.items())
    return float((differs / sum(float(one.double().square().sum()) for one in wanted.values())) ** 0.5)


def peak_of(folder: Path, transcripts: int, length: int, scratch: Path, *, is_flat: bool) -> int:
    """Bytes that an update holds at most whose micro-batch is the whole session, in a process of its own."""
    found = scratch / "peak"
    work = partial(_write_peak, folder, transcripts, length, found, is_flat=is_flat)
    if forked(work, scratch / "log"):
        raise SystemExit((scratch / "log").read_text())
    return int(found.read_text())


def _write_peak(folder: Path, transcripts: int, length: int, found: Path, *, is_flat: bool) -> None:
    torch.set_num_threads(1)
    batch = batch_of(*session(transcripts, length, vocab_of(folder)))
    found.write_text(str(Cost(folder, batch, batch.num_tokens, is_flat=is_flat).bytes))


def engine_cost(folder: Path, ids: list[list[int]], *, is_flat: bool) -> float:
    """CPU-seconds of a short answer to each transcript, one after another, the main one first."""
    longest = max(map(len, ids)) + 8
    engine = EmbeddedEngine(load_model(str(folder)), max_num_seqs=len(ids), max_model_len=longest)
    spent = 0.0

    async def ask() -> None:
        nonlocal spent
        await engine.generate(ids[0][:64], SamplingParams(2), "warm")
        began = time.process_time()
        for number, part in enumerate(ids):
            name = f"t/{number}.0" if is_flat else f"t/0.0.{number}"
            await engine.generate(part, SamplingParams(2, seed=number), name)
        spent = time.process_time() - began

    asyncio.run(ask())
    return spent


def column_bytes(batch: RaggedBatch) -> int:
    """Bytes of a batch's columns by token."""
    return sum(values.nbytes for values in batch.tokens.values())


def ratio(pairs: list[tuple[float, float]]) -> str:
    """Median of flat over tree."""
    return f"{statistics.median(plain / tree for tree, plain in pairs):.1f}"


def compare(name: str, folder: Path, length: int, rounds: int, scratch: Path) -> None:
    vocab = vocab_of(folder)
    Cost(folder, batch_of(*session(2, length, vocab)), 2 * length, is_flat=False)  # warms up
    for transcripts in TRANSCRIPTS:
        ids, masks = session(transcripts, length, vocab)
        batch = batch_of(ids, masks)
        stored = len(tree_layout(batch.ids, batch.offsets).stored)
        room = int(1.6 * length)
        costs, engines = [], []
        for _ in range(rounds):
            costs.append((Cost(folder, batch, room, is_flat=False), Cost(folder, batch, room, is_flat=True)))
            engines.append((engine_cost(folder, ids, is_flat=False), engine_cost(folder, ids, is_flat=True)))
        tree, plain = costs[0]
        peaks = [peak_of(folder, transcripts, length, scratch, is_flat=way) for way in (False, True)]

        print(
            f"| {name} | {transcripts} | {batch.num_tokens} | {stored} | {batch.num_tokens / stored:.1f} "
            f"| {ratio([(one.log_probs, other.log_probs) for one, other in costs])} "
            f"| {ratio([(one.update, other.update) for one, other in costs])} | {ratio(engines)} "
            f"| {tree.micro_batches} / {plain.micro_batches} "
            f"| {peaks[0] >> 20} / {peaks[1] >> 20} | {column_bytes(batch) / 2**20:.1f} "
            f"| {apart(tree.grads, plain.grads):.1e} | {(tree.old - plain.old).abs().max():.0e} |",
            flush=True,
        )


def long_session(folder: Path) -> None:
    """Learn one long session by the tree, and the same distinct tokens without a common beginning."""
    vocab = vocab_of(folder)
    windows = [session(12, 35_000, vocab, seed) for seed in range(2)]
    batch = batch_of([one for ids, _ in windows for one in ids], [one for _, masks in windows for one in masks])
    stored = len(tree_layout(batch.ids, batch.offsets).stored)
    whole = Cost(folder, batch, 90_000, is_flat=False)
    print(
        f"{batch.num_tokens} tokens in {len(batch)} transcripts, {stored} distinct, {whole.micro_batches} micro-batch: "
        f"log-probs {whole.log_probs:.0f} CPU-s, update {whole.update:.0f} CPU-s, {whole.bytes >> 20} MiB at most, "
        f"columns {column_bytes(batch) / 2**20:.1f} MiB",
        flush=True,
    )
    main = batch.select([0, 12])
    alone = Cost(folder, main, 90_000, is_flat=False)
    print(
        f"its two longest transcripts alone, {main.num_tokens} tokens: log-probs {alone.log_probs:.0f} CPU-s, update "
        f"{alone.update:.0f} CPU-s, {alone.bytes >> 20} MiB at most"
    )


def main() -> None:
    parser = argparse.ArgumentParser(
        description=(__doc__ or "").splitlines()[0],
        epilog=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--models", nargs="+", choices=SHAPES, default=[*SHAPES])
    parser.add_argument("--length", type=int, default=3000, help="tokens of a session's main transcript")
    parser.add_argument("--rounds", type=int, default=1, help="of both ways in turn; ratios are medians")
    parser.add_argument("--long", action="store_true", help="one session of 700,000 flat tokens by the tree alone")
    args = parser.parse_args()
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as scratch:
        if args.long:
            long_session(make_tiny_policy(Path(scratch) / "long", 0, shape=SHAPES["tiny"]))
            return
        folders = {name: make_tiny_policy(Path(scratch) / name, 0, shape=SHAPES[name]) for name in args.models}
        print(
            "| model | transcripts | tokens | distinct | ratio | flat / tree: log-probs | update | engine "
            "| micro-batches, tree / flat | MiB in one micro-batch | columns, MiB | gradients apart | log-probs |\n"
            f"|{'---|' * 13}"
        )
        for name, folder in folders.items():
            compare(name, folder, args.length, args.rounds, Path(scratch))


if __name__ == "__main__":
    main()
