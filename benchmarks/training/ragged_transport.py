"""A step's batch on its way through Ray's object store: ragged, as it travels here, against padded.

    python -m benchmarks.training.ragged_transport [--sequences 512] [--ranks 2]

One step with log-normal lengths: the rollouts put the batch down; each rank gets its share for the log-probs, and
answers with a number for each token; it gets its share again for the update, with four such columns. Padded is what
verl's DataProto does (verl/protocol.py): tensors [sequences, longest prompt or response], cut into a chunk for each
rank; a chunk is pickled to bytes and Ray pickles those, so that both ends copy; the answers go back to the driver,
which puts them together. `arrays` are the same padded tensors without that: Ray hands them over in shared memory. Bytes
are all that are put down or sent; the three take turns. Printed first: how long it takes to share sequences out.
"""

from __future__ import annotations

import argparse
import pickle
import statistics
import time
from typing import Any, Literal

import numpy as np
import ray
import torch

from agentrl.runtime.ranks import shares
from agentrl.runtime.ray.session import start_ray
from agentrl.runtime.ray.stored import StoredBatch, put_batch, put_column
from agentrl.trajectory.batch import RaggedBatch
from benchmarks.training.made_batches import ragged_batch

Arrays = dict[str, np.ndarray]
Way = Literal["ragged", "padded", "arrays"]
ROUNDS = 7
COLUMNS = ("old_logprobs", "ref_logprobs", "advantages", "returns")


@ray.remote(num_cpus=0)
class Rollouts:
    """Makes the batch, before the clock runs."""

    def __init__(self, sequences: int) -> None:
        self.batch, prompts = ragged_batch(sequences)
        self.padded = padded(self.batch, prompts)

    def ragged(self) -> Any:
        return put_batch(self.batch)

    def rectangles(self, way: Way) -> Any:
        return packed(self.padded, way)


@ray.remote(num_cpus=0)
class Rank:
    """Reads its share once."""

    def ragged(self, share: StoredBatch, answers: bool) -> Any:
        batch = share.load()
        read = [value.sum() for value in (*batch.tokens.values(), *batch.sequences.values())]
        return put_column(torch.zeros(batch.num_tokens), batch) if answers else len(read)

    def rectangles(self, chunk: Any, way: Way, answers: bool) -> Any:
        arrays = unpacked(chunk)
        there = arrays["attention_mask"].astype(bool)  # the forward pass leaves the padding out
        read = [arrays[name][there] for name in ("input_ids", "position_ids")]
        read += [array.sum() for array in arrays.values()]
        return packed({"logprobs": np.zeros_like(arrays["rollout_logprobs"])}, way) if answers else len(read)


def padded(batch: RaggedBatch, prompts: torch.Tensor) -> Arrays:
    """The tensors that the rollouts of verl's PPO trainer return. The prompt is padded on its left."""
    lengths, rows, widest = batch.lengths, len(batch), int(prompts.max())
    places = torch.arange(batch.num_tokens) - batch.offsets[:-1].repeat_interleave(lengths)
    columns = places + (widest - prompts).repeat_interleave(lengths)
    shape = (rows, widest + int((lengths - prompts).max()))

    def spread(values: torch.Tensor) -> torch.Tensor:
        return torch.zeros(shape, dtype=values.dtype).index_put((batch.sequence_ids(), columns), values)

    ids, logprobs, rewards = spread(batch.ids), spread(batch.rollout_logprobs), spread(batch.rewards)
    there = spread(torch.ones_like(batch.ids))
    tensors = {
        "prompts": ids[:, :widest],
        "responses": ids[:, widest:],
        "response_mask": spread(batch.mask.long())[:, widest:],
        "input_ids": ids,
        "attention_mask": there,
        "position_ids": (there.cumsum(1) - 1).clamp(min=0),
        "rollout_log_probs": logprobs[:, widest:],
        "token_level_scores": rewards[:, widest:],
    }
    arrays = {name: tensor.contiguous().numpy() for name, tensor in tensors.items()}
    return arrays | {"rollout_logprobs": arrays.pop("rollout_log_probs")}


def packed(arrays: Arrays, way: Way) -> Any:
    return pickle.dumps(arrays) if way == "padded" else arrays


def unpacked(chunk: Any) -> Arrays:
    arrays: Arrays = pickle.loads(chunk) if isinstance(chunk, bytes) else chunk
    return arrays


def size(chunk: Any) -> int:
    return len(chunk) if isinstance(chunk, bytes) else sum(array.nbytes for array in chunk.values())


def ragged_step(rollouts: Any, ranks: list[Any]) -> int:
    """Bytes that moved, but for the handles."""
    stored = ray.get(rollouts.ragged.remote())
    parts = shares(stored.lengths.tolist(), len(ranks))
    calls = [rank.ragged.remote(stored.select(part), True) for rank, part in zip(ranks, parts, strict=True)]
    answers = ray.get(calls)
    column = stored.column(zip(answers, parts, strict=True))
    stored = stored.with_fields(**dict.fromkeys(COLUMNS, column))
    ray.get([rank.ragged.remote(stored.select(part), False) for rank, part in zip(ranks, parts, strict=True)])
    return stored.num_tokens * (8 + 1 + 4 + 4 + 4 * len(COLUMNS))


def padded_step(rollouts: Any, ranks: list[Any], way: Way) -> int:
    """Bytes that moved."""
    made = ray.get(rollouts.rectangles.remote(way))
    batch, moved = unpacked(made), size(made)
    for columns in ((), COLUMNS):
        chunks = []
        for number in range(len(ranks)):
            start, end = (place * len(batch["prompts"]) // len(ranks) for place in (number, number + 1))
            chunks.append(packed({name: array[start:end] for name, array in batch.items()}, way))
        moved += sum(map(size, chunks))
        calls = [rank.rectangles.remote(chunk, way, not columns) for rank, chunk in zip(ranks, chunks, strict=True)]
        answers = ray.get(calls)
        if not columns:
            moved += sum(map(size, answers))
            joined = np.concatenate([unpacked(answer)["logprobs"] for answer in answers])
            batch = batch | dict.fromkeys(COLUMNS, joined)
    return moved


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--sequences", type=int, default=512)
    parser.add_argument("--ranks", type=int, default=2)
    given = parser.parse_args()
    torch.set_num_threads(1)
    for sequences, ranks in ((4096, 64), (1024, 8)):
        lengths = ragged_batch(sequences)[0].lengths.tolist()
        began = time.process_time()
        parts = shares(lengths, ranks)
        taken, loads = time.process_time() - began, [sum(lengths[row] for row in part) for part in parts]
        print(f"{sequences} sequences on {ranks} ranks: {taken:.3f} s, fullest {max(loads) / sum(loads) * ranks:.5f}")
    batch, _ = ragged_batch(given.sequences)
    full = len(batch) * int(batch.lengths.max()) / batch.num_tokens
    print(f"{len(batch)} sequences, {batch.num_tokens} tokens; padded {full:.2f} times as many")
    start_ray(None, given.ranks + 2)
    try:
        rollouts = Rollouts.remote(given.sequences)  # type: ignore[attr-defined]
        actors = [Rank.remote() for _ in range(given.ranks)]  # type: ignore[attr-defined]
        ways: tuple[Way, ...] = ("ragged", "padded", "arrays")
        seconds: dict[Way, list[float]] = {way: [] for way in ways}
        moved: dict[Way, int] = {}
        for _ in range(ROUNDS + 1):  # the first starts processes
            for way in ways:
                began = time.perf_counter()
                moved[way] = ragged_step(rollouts, actors) if way == "ragged" else padded_step(rollouts, actors, way)
                seconds[way].append(time.perf_counter() - began)
    finally:
        ray.shutdown()
    base = statistics.median(seconds["ragged"][1:])
    print("| way | MB | over ragged | seconds | over ragged |\n|---|---|---|---|---|")
    for way in ways:
        taken = statistics.median(seconds[way][1:])
        row = (f"{moved[way] / 1e6:.1f}", f"{moved[way] / moved['ragged']:.1f}", f"{taken:.3f}", f"{taken / base:.1f}")
        print(f"| {way} | {' | '.join(row)} |")


if __name__ == "__main__":
    main()
