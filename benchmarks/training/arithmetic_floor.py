"""The least time that a GRPO step's matrix products take: each is timed alone, at its own shape, on one thread.

Counted are the products that no implementation of the same work can leave out: a token is computed once in the rollout,
and once forward and once backward in the update; what the trajectories of a prompt share, the prompt, is computed once
for all of them. Left out are norms, rotations, softmax, sampling, the optimizer and all bookkeeping.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from dataclasses import dataclass

import torch

from agentrl.quickstart.tiny_policy import TinyShape

HEAD_DIM = 32


@dataclass(frozen=True, slots=True)
class Work:
    """One step: `prompts` x `generations` trajectories of one tool call. Lengths in tokens."""

    prompts: int
    generations: int
    prompt: int
    call: int
    """Sampled in the first turn."""
    observation: int
    answer: int
    """Sampled in the last turn."""

    @property
    def trajectories(self) -> int:
        return self.prompts * self.generations

    @property
    def response(self) -> int:
        """Tokens after the prompt."""
        return self.call + self.observation + self.answer


@dataclass(frozen=True, slots=True)
class Product:
    """`count` times a [batch, rows, inner] @ [batch, inner, columns]."""

    count: float
    rows: int
    inner: int
    columns: int
    batch: int = 1

    @property
    def flops(self) -> float:
        return 2.0 * self.count * self.batch * self.rows * self.inner * self.columns


def products(shape: TinyShape, work: Work) -> Iterator[Product]:
    """All products of one step."""
    n, sampled = work.trajectories, work.call + work.answer
    yield from forward(shape, work.prompts * work.prompt, work.prompts)  # the prompts
    yield from attention(shape, work.prompts, work.prompt)
    for step in range(sampled - 1):  # one token of every trajectory at a time; the last one is computed no more
        observed = work.observation if step == work.call - 1 else 0  # read together with the call's last token
        yield from forward(shape, n * (1 + observed), n)
        context = work.prompt + step + 1 + (work.observation if step >= work.call - 1 else 0)
        yield Product(2.0 * shape.layers, 1 + observed, HEAD_DIM, context, batch=n * shape.heads)
    update = [
        *forward(shape, work.prompts * work.prompt + n * work.response, n * sampled),
        *attention(shape, work.prompts, work.prompt),
        *attention(shape, n, work.response),
        Product(2.0 * shape.layers, work.response, HEAD_DIM, work.prompt, n * shape.heads),
    ]
    for product in update:
        yield product
        yield Product(product.count, product.rows, product.columns, product.inner, product.batch)  # by its input
        yield Product(product.count, product.inner, product.rows, product.columns, product.batch)  # by its weight


def forward(shape: TinyShape, tokens: int, scored: int) -> Iterator[Product]:
    """The linear layers over `tokens` tokens, and the vocabulary's scores of `scored` of them."""
    heads, kv_heads = shape.heads * HEAD_DIM, shape.kv_heads * HEAD_DIM
    yield Product(shape.layers, tokens, shape.hidden, heads)
    yield Product(2 * shape.layers, tokens, shape.hidden, kv_heads)
    yield Product(shape.layers, tokens, heads, shape.hidden)
    yield Product(2 * shape.layers, tokens, shape.hidden, shape.intermediate)
    yield Product(shape.layers, tokens, shape.intermediate, shape.hidden)
    yield Product(1, scored, shape.hidden, shape.vocab)


def attention(shape: TinyShape, sequences: int, length: int) -> Iterator[Product]:
    """Scores and weighted values; a token attends to half of its sequence on average."""
    batch = sequences * shape.heads
    yield Product(0.5 * shape.layers, length, HEAD_DIM, length, batch)
    yield Product(0.5 * shape.layers, length, length, HEAD_DIM, batch)


def measure(shape: TinyShape, work: Work) -> tuple[float, float]:
    """(CPU-seconds of all products, their FLOPs), on one thread."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        known: dict[tuple[int, int, int, int], float] = {}
        seconds = flops = 0.0
        for product in products(shape, work):
            key = (product.batch, product.rows, product.inner, product.columns)
            if key not in known:
                known[key] = time_product(*key)
            seconds += product.count * known[key]
            flops += product.flops
    finally:
        torch.set_num_threads(threads)
    return seconds, flops


def time_product(batch: int, rows: int, inner: int, columns: int) -> float:
    """CPU-seconds of one product, the best of the runs that 0.02 s hold."""
    left, right = torch.randn(batch, rows, inner), torch.randn(batch, inner, columns)
    out = torch.empty(batch, rows, columns)
    best, spent = float("inf"), 0.0
    while spent < 0.02:
        began = time.process_time()
        if batch == 1:
            torch.mm(left[0], right[0], out=out[0])
        else:
            torch.bmm(left, right, out=out)
        seconds = time.process_time() - began
        best, spent = min(best, seconds), spent + seconds
    return best
