"""Peak memory and time of log-probs and their backward pass, against vocabulary and tokens, beside plain log_softmax.

    python -m benchmarks.training.logprob_memory [--vocab 32000 64000 151936] [--tokens 1024 4096 16384 32768] [--gib 8]

A model of one layer and 64 numbers a token, so that nearly everything is the vocabulary: `token_logprobs` of the
package, and `log_softmax` of all logits at once. The plain way is left out where its logits, their log_softmax and its
gradient would need more than --gib. Each case has a process of its own, with one thread.
"""

from __future__ import annotations

import argparse
import multiprocessing
import time
from dataclasses import dataclass

import torch
from transformers import Qwen3Config, Qwen3ForCausalLM

from agentrl.model.packed import hidden_states, token_logprobs, use_packed_attention
from benchmarks.training.peak_memory import peak_memory

HIDDEN = 64
SEQUENCE = 1024


@dataclass(frozen=True, slots=True)
class Case:
    vocab: int
    tokens: int
    plain: bool


def measure(case: Case) -> tuple[float, float]:
    """(peak MiB above the model and its gradients, CPU seconds)."""
    torch.set_num_threads(1)
    torch.manual_seed(0)
    config = Qwen3Config(
        vocab_size=case.vocab,
        hidden_size=HIDDEN,
        intermediate_size=HIDDEN,
        num_hidden_layers=1,
        num_attention_heads=1,
        num_key_value_heads=1,
        head_dim=HIDDEN,
        tie_word_embeddings=False,
    )
    model = use_packed_attention(Qwen3ForCausalLM(config))
    ids = torch.randint(0, case.vocab, (case.tokens,))
    offsets = torch.arange(0, case.tokens + 1, SEQUENCE)
    for weight in model.parameters():
        weight.grad = torch.zeros_like(weight)
    began = time.process_time()
    with peak_memory() as peak:
        if case.plain:
            logits = model.lm_head(hidden_states(model, ids, offsets)[:-1])
            total = logits.log_softmax(-1).gather(1, ids[1:, None]).sum()
            del logits
        else:
            total = token_logprobs(model, ids, offsets)[0].sum()
        total.backward()
    return peak.bytes / 2**20, time.process_time() - began


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--vocab", type=int, nargs="+", default=[32_000, 64_000, 151_936])
    parser.add_argument("--tokens", type=int, nargs="+", default=[1024, 4096, 16_384, 32_768])
    parser.add_argument("--gib", type=float, default=8.0, help="memory that the plain way may use")
    args = parser.parse_args()
    print(f"{'vocab':>8} {'tokens':>7} | {'MiB':>7} {'CPU s':>6} | {'plain MiB':>9} {'CPU s':>6} | plain / ours")
    with multiprocessing.get_context("spawn").Pool(1, maxtasksperchild=1) as pool:
        for vocab in args.vocab:
            for tokens in args.tokens:
                ours, seconds = pool.apply(measure, (Case(vocab, tokens, plain=False),))
                line = f"{vocab:>8,} {tokens:>7,} | {ours:7.0f} {seconds:6.1f} | "
                if 3 * 4 * vocab * tokens < args.gib * 2**30:
                    plain, took = pool.apply(measure, (Case(vocab, tokens, plain=True),))
                    line += f"{plain:9.0f} {took:6.1f} | {plain / ours:5.1f} memory, {took / seconds:4.2f} time"
                else:
                    line += f"{'(too much)':>9}"
                print(line, flush=True)


if __name__ == "__main__":
    main()
