"""The update of a real model: its FLOPs over what matrix products reach in the same run, and memory over the formula.

    python -m benchmarks.real.update --model FOLDER [--tokens 2048]

Made-up sequences (log-normal lengths, no two alike) are scored and learnt from with AdamW in one micro-batch, on one
thread, in CPU-seconds. FLOPs are the model's, once forward and twice backward, without what is computed again. The
limit is measured twice: by one large product, and by the products of the model's linear layers, forward and backward,
at the shapes that this update has.
"""

from __future__ import annotations

import argparse
import tempfile
from collections import Counter
from collections.abc import Sequence
from functools import partial
from pathlib import Path

import torch
from torch import nn
from transformers import PreTrainedModel

from agentrl.model.packed import chunk_size
from agentrl.plan import sizing
from agentrl.plan.sizing import ModelShape, Work, forward_flops, update_flops
from agentrl.quickstart.tiny_policy import make_tiny_policy
from benchmarks.real.engine import cpu_seconds
from benchmarks.training.peak_memory import peak_memory
from benchmarks.training.update_utilization import fsdp, made_batch, make_worker


def large_product() -> float:
    """FLOPs a CPU-second of a product of matrices of 1,024 x 1,024, the best of six."""
    left = torch.randn(1024, 1024)
    return 2.0 * 1024**3 / min(cpu_seconds(lambda: left @ left) for _ in range(6))


@torch.no_grad()
def model_products(model: PreTrainedModel, tokens: int, scored: int, chunk: int) -> float:
    """FLOPs a CPU-second of the linear layers' products, forward and backward, at an update's numbers of rows."""
    head = model.get_output_embeddings()
    rows = {layer: tokens for layer in model.modules() if type(layer) is nn.Linear and layer is not head}
    assert isinstance(head, nn.Linear)
    kinds = Counter((count, layer.in_features, layer.out_features) for layer, count in rows.items())
    kinds[min(scored, chunk), head.in_features, head.out_features] += max(1, scored // chunk)
    flops = seconds = 0.0
    for (count, inner, outer), times in kinds.items():
        states, gradient, weight = torch.randn(count, inner), torch.randn(count, outer), torch.randn(outer, inner)
        for call in (
            partial(torch.mm, states, weight.t()),
            partial(torch.mm, gradient, weight),
            partial(torch.mm, gradient.t(), states),
        ):
            seconds += times * min(cpu_seconds(call) for _ in range(2))
            flops += times * 2.0 * count * inner * outer
    return flops / seconds


def main(words: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", type=Path, help="folder of a causal language model in float32")
    parser.add_argument("--tiny", action="store_true", help="a made-up model of 0.3 million parameters")
    parser.add_argument("--tokens", type=int, default=2048, help="of an update")
    parser.add_argument("--updates", type=int, default=2, help="that are measured, after one that is not")
    asked = parser.parse_args(words)
    if asked.tiny == (asked.model is not None):
        parser.error("give --model FOLDER, or --tiny")
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as place:
        folder = make_tiny_policy(place, 0) if asked.tiny else asked.model
        shape, tokens = ModelShape.read(Path(folder)), 512 if asked.tiny else asked.tokens
        batch = made_batch(shape, tokens, tokens)
        worker = make_worker(Path(folder), "cpu", "float32", tokens, checkpointing=False)
    lengths, scored = batch.lengths.tolist(), int(batch.policy_tokens.sum())
    work = Work.from_lengths(lengths, scored)
    base = fsdp(worker)._root.base
    chunk = chunk_size(base)
    worker.update(batch, step=1)
    own = model_products(base, sum(lengths), scored, chunk)
    limits = {"one large product": large_product(), "its own products": own}
    passes = min(cpu_seconds(lambda: worker.compute_log_probs(batch)) for _ in range(asked.updates))
    updates = min(cpu_seconds(partial(worker.update, batch, step=2 + n)) for n in range(asked.updates))
    with peak_memory() as memory:  # apart: its thread takes CPU-seconds, too
        worker.update(batch, step=2 + asked.updates)
    print(f"{len(lengths)} sequences of {sum(lengths)} tokens, {scored} of them the policy's")
    for name, seconds, flops in (
        ("update", updates, update_flops(shape, work, recompute=False, recompute_head=False)),
        ("log-probs", passes, forward_flops(shape, work)),
    ):
        over = ", ".join(f"{flops / seconds / limit:.0%} of {what}" for what, limit in limits.items())
        print(f"{name}: {seconds:.2f} CPU-seconds, {flops / seconds / 1e9:.1f} GFLOP a second: {over}")
    print("limits: " + ", ".join(f"{what} {limit / 1e9:.1f} GFLOP a second" for what, limit in limits.items()))
    held = sizing.state_bytes(shape.params, 1, trained=True)["gradients"]
    kept = sizing.activation_bytes(shape, sum(lengths), autocast=False, recomputed=0)
    foretold = held + kept + sizing.logits_bytes(shape, scored, chunk * shape.vocab)
    print(
        f"memory: {memory.bytes / 1e9:.3f} GB more than at rest, {memory.bytes / foretold:.2f} of what the formula "
        "says (gradients, activations, logits)"
    )


if __name__ == "__main__":
    main()
