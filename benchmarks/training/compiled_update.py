"""An update's forward and backward pass with decoder layers compiled by torch.compile, against the same as they are.

    python -m benchmarks.training.compiled_update [--hidden 512] [--layers 4] [--bfloat16]

Both ways compute the log-probs of the same packed sequences, of another total each time, and their gradient, with the
same weights; they take turns, with one thread. The first micro-batches, in which layers are compiled, are told apart.
Beside them: how many programs were made in all, and how many by the micro-batches that are measured.
"""

from __future__ import annotations

import argparse
import statistics
import time

import numpy as np
import torch
from torch._dynamo.utils import counters
from transformers import PreTrainedModel, Qwen3Config, Qwen3ForCausalLM

from agentrl.model.compiled import compile_layers, text_layers
from agentrl.model.packed import token_logprobs, use_packed_attention

WARM_UP = 3
"""Micro-batches."""


def make_model(args: argparse.Namespace) -> PreTrainedModel:
    torch.manual_seed(0)
    config = Qwen3Config(
        vocab_size=args.vocab,
        hidden_size=args.hidden,
        intermediate_size=3 * args.hidden,
        num_hidden_layers=args.layers,
        num_attention_heads=args.hidden // 64,
        num_key_value_heads=max(1, args.hidden // 128),
        head_dim=64,
        tie_word_embeddings=True,
    )
    return use_packed_attention(Qwen3ForCausalLM(config).eval())


def timed(model: PreTrainedModel, rows: list[torch.Tensor], bfloat16: bool) -> tuple[float, float, float]:
    """(CPU seconds, seconds, the sum of the log-probs)."""
    offsets = torch.tensor([0, *(len(row) for row in rows)]).cumsum(0)
    model.zero_grad()
    cpu, clock = time.process_time(), time.perf_counter()
    with torch.autocast("cpu", torch.bfloat16, enabled=bfloat16):
        logprobs, *_ = token_logprobs(model, torch.cat(rows), offsets)
    total = logprobs.sum()
    total.backward()
    return time.process_time() - cpu, time.perf_counter() - clock, total.item()


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--hidden", type=int, default=512)
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--vocab", type=int, default=8192)
    parser.add_argument("--batches", type=int, default=8, help="micro-batches that are measured")
    parser.add_argument("--bfloat16", action="store_true", help="under autocast")
    args = parser.parse_args()
    torch.set_num_threads(1)
    rng, generator = np.random.default_rng(0), torch.Generator().manual_seed(0)
    plain, compiled = make_model(args), make_model(args)
    compile_layers(text_layers(compiled), "cpu")
    counters.clear()
    ratios: list[tuple[float, float]] = []
    warm_up, programs = 0.0, 0
    for batch in range(WARM_UP + args.batches):
        lengths = rng.integers(100, 700, size=rng.integers(5, 14)).tolist()
        rows = [torch.randint(0, args.vocab, (length,), generator=generator) for length in lengths]
        first, second = (plain, compiled) if batch % 2 else (compiled, plain)  # who comes second is slower
        results = [timed(model, rows, args.bfloat16) for model in (first, second)]
        own, other = results if batch % 2 else results[::-1]
        assert abs(own[2] - other[2]) < (1e-3 if args.bfloat16 else 1e-5) * abs(own[2]), "the two ways do not agree"
        if batch < WARM_UP:
            warm_up, programs = warm_up + other[0] - own[0], counters["stats"]["unique_graphs"]
            continue
        ratios.append((own[0] / other[0], own[1] / other[1]))
        print(f"{sum(lengths):5d} tokens: {own[0]:6.2f} and compiled {other[0]:6.2f} CPU-seconds", flush=True)
    cpu, clock = (statistics.median(column) for column in zip(*ratios, strict=True))
    made = counters["stats"]["unique_graphs"]
    print(f"as they are / compiled, median: {cpu:.2f} CPU-seconds, {clock:.2f} by the clock")
    print(f"compiling: {warm_up:.0f} CPU-seconds, {made} programs, {made - programs} of them after the first {WARM_UP}")


if __name__ == "__main__":
    main()
