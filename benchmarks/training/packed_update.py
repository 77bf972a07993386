"""Tokens a second of an update's forward and backward pass: packed, against padded to the longest of its micro-batch.

    python -m benchmarks.training.packed_update [--gsm8k train.jsonl]

Both ways compute the log-probs of all tokens of the same sequences and their gradient, with the same weights. Padded is
transformers' own forward with an attention mask, and one log_softmax of its logits. Tokens are random, so no two
sequences begin alike and nothing is gained but the padding; the last column is packed with eight answers to a prompt,
which is computed once. They take turns, micro-batch by micro-batch; with one thread.

Lengths: `answers`, normal with mean 220 and deviation 60 (a prompt and a short answer); `long tail`, log-normal with
median 400 and sigma 0.9, cut at 4096 (dialogues with tools, few of them long); with --gsm8k (a file of JSON lines with
question and answer) a token for every four characters of both.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
import torch
from transformers import PreTrainedModel, Qwen3Config, Qwen3ForCausalLM

from agentrl.model.packed import token_logprobs, use_packed_attention

ROWS = 8
"""Sequences a micro-batch."""
SHARED = 0.5
"""Part of a mean sequence that eight answers have in common in the last column."""


def lengths(name: str, count: int, gsm8k: Path | None) -> list[int]:
    rng = np.random.default_rng(0)
    if name == "gsm8k":
        assert gsm8k is not None
        rows = [json.loads(line) for line in gsm8k.read_text(encoding="utf-8").splitlines()]
        found = np.array([(len(row["question"]) + len(row["answer"])) // 4 for row in rows])
        return rng.choice(found, count, replace=False).tolist()
    drawn = rng.normal(220, 60, count) if name == "answers" else rng.lognormal(np.log(400), 0.9, count)
    return np.clip(drawn, 16, 4096).astype(int).tolist()


def make_model(vocab: int) -> PreTrainedModel:
    torch.manual_seed(0)
    config = Qwen3Config(
        vocab_size=vocab,
        hidden_size=256,
        intermediate_size=768,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=64,
        tie_word_embeddings=True,
    )
    return Qwen3ForCausalLM(config).eval()


def padded(model: PreTrainedModel, rows: list[torch.Tensor]) -> torch.Tensor:
    ids = torch.nn.utils.rnn.pad_sequence(rows, batch_first=True)
    mask = torch.nn.utils.rnn.pad_sequence([torch.ones_like(row) for row in rows], batch_first=True)
    logits = model(input_ids=ids, attention_mask=mask, use_cache=False).logits[:, :-1].float()
    logprobs = logits.log_softmax(-1).gather(2, ids[:, 1:, None])[..., 0]
    return (logprobs * mask[:, 1:]).sum()


def packed(model: PreTrainedModel, rows: list[torch.Tensor]) -> torch.Tensor:
    offsets = torch.tensor([0, *(len(row) for row in rows)]).cumsum(0)
    return token_logprobs(model, torch.cat(rows), offsets)[0].sum()


def timed(way: Callable[[PreTrainedModel, list[torch.Tensor]], torch.Tensor], *args: object) -> tuple[float, float]:
    """(CPU seconds, the sum of the log-probs)."""
    model, rows = args
    assert isinstance(model, PreTrainedModel) and isinstance(rows, list)
    model.zero_grad()
    began = time.process_time()
    total = way(model, rows)
    total.backward()
    return time.process_time() - began, total.item()


def measure(name: str, args: argparse.Namespace) -> None:
    own, ours = make_model(args.vocab), use_packed_attention(make_model(args.vocab))
    sizes = lengths(name, ROWS * args.batches, args.gsm8k)
    generator = torch.Generator().manual_seed(0)
    spent: dict[str, list[float]] = {"padded": [], "packed": [], "shared": []}
    real = room = 0
    for start in range(0, len(sizes), ROWS):
        part = sizes[start : start + ROWS]
        rows = [torch.randint(0, args.vocab, (size,), generator=generator) for size in part]
        common = rows[0][: int(SHARED * statistics.mean(part))]
        alike = [torch.cat([common[: len(row) - 1], row[min(len(common), len(row) - 1) :]]) for row in rows]
        results = [timed(padded, own, rows), timed(packed, ours, rows), timed(packed, ours, alike)]
        assert abs(results[0][1] - results[1][1]) < 1e-4 * abs(results[0][1]), "the two ways do not agree"
        if start:  # the first micro-batch warms up
            for way, (seconds, _) in zip(spent, results, strict=True):
                spent[way].append(seconds)
            real += sum(part)
            room += max(part) * ROWS
    speed = {way: real / sum(seconds) for way, seconds in spent.items()}
    gain, padding = speed["packed"] / speed["padded"], room / real
    print(
        f"{name:>10} | {statistics.median(sizes):5.0f} {max(sizes):5d} | {padding:7.2f} | {speed['padded']:6.0f} "
        f"{speed['packed']:6.0f} | {gain:5.2f} = {gain / padding:4.2f} x padding | "
        f"{speed['shared'] / speed['padded']:5.2f}",
        flush=True,
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--gsm8k", type=Path, help="JSON lines with question and answer")
    parser.add_argument("--batches", type=int, default=12, help="micro-batches of each distribution")
    parser.add_argument("--vocab", type=int, default=8192)
    args = parser.parse_args()
    torch.set_num_threads(1)
    print(
        f"{'lengths':>10} | {'median':>5} {'max':>4} | padded/ | {'padded':>6} {'packed':>6} | gain by packing"
        "         | gain with\n"
        f"{'':>10} | {'':>11} |    real | tokens/CPU-s  |                         | shared beginnings"
    )
    for name in ("answers", "long tail", *(["gsm8k"] if args.gsm8k else [])):
        measure(name, args)


if __name__ == "__main__":
    main()
