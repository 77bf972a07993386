"""Tokens a second of the embedded engine: prefill, and decoding at several batch sizes.

Beside each: transformers' own generate on the same prompts, and the least time of a decoding step, in which the weights
and the keys and values of all requests are read once at the rate of a copy.
"""

from __future__ import annotations

import asyncio
import time
from functools import partial
from pathlib import Path
from typing import Any

import torch
from transformers import PreTrainedModel, Qwen2ForCausalLM

from agentrl.engines.contract import SamplingParams
from agentrl.engines.embedded.engine import EmbeddedEngine
from agentrl.model.packed import load_model
from agentrl.plan import sizing
from agentrl.plan.sizing import ModelShape
from benchmarks.gpu.part import (
    Setting,
    copy_bandwidth,
    free,
    out_of_memory_is_a_row,
    row,
    seconds,
    setting,
    wait,
)
from benchmarks.gpu.states import policy_folder
from benchmarks.training.update_utilization import SHAPES

BATCHES, PROMPT, NEW = (1, 16, 64, 256), 512, 128
TINY_BATCHES, TINY_PROMPT, TINY_NEW = (1, 4), 32, 8
MOST_OF_TRANSFORMERS = 64
"""Requests at once that transformers' generate is tried with."""


def generate(model: PreTrainedModel, prompts: list[list[int]], new: int, device: str) -> tuple[float, float]:
    """Seconds of all prompts at once with one new token each, and with `new` of them."""

    async def work() -> tuple[float, float]:
        engine = EmbeddedEngine(model, max_num_seqs=len(prompts), max_model_len=len(prompts[0]) + new)
        spent = []
        for count in (1, new):
            asked = SamplingParams(count, temperature=1.0)
            names = [f"{count} tokens, {number}" for number in range(len(prompts))]
            pairs = zip(prompts, names, strict=True)
            wait(device)
            began = time.perf_counter()
            await asyncio.gather(*(engine.generate(ids, asked, name) for ids, name in pairs))
            wait(device)
            spent.append(time.perf_counter() - began)
            for name in names:
                await engine.release(name)
        await engine.close()
        return spent[0], spent[1]

    return asyncio.run(work())


@torch.no_grad()
def generate_plainly(model: PreTrainedModel, prompts: list[list[int]], new: int) -> None:
    ids = torch.tensor(prompts, device=model.device)
    whole: Any = model  # its generate has no types
    whole.generate(
        input_ids=ids,
        attention_mask=torch.ones_like(ids),
        max_new_tokens=new,
        min_new_tokens=new,
        do_sample=True,
        temperature=1.0,
        top_k=0,
        top_p=1.0,
        pad_token_id=0,
    )


def least_step(shape: ModelShape, contexts: int, bandwidth: float, bytes_each: int) -> float:
    """Seconds of a decoding step with so many tokens of context in all. The embedding is looked up, not read."""
    weights = shape.params - (0 if shape.tied else shape.head_params)
    read = weights * bytes_each + sizing.kv_bytes(shape, dtype=bytes_each) * contexts
    return read / bandwidth


def compare(asked: Setting, shape: ModelShape, folder: Path) -> None:
    device = asked.device
    batches, length, new = (TINY_BATCHES, TINY_PROMPT, TINY_NEW) if asked.tiny else (BATCHES, PROMPT, NEW)
    bandwidth, each = copy_bandwidth(device), getattr(torch, asked.dtype).itemsize
    generator = torch.Generator().manual_seed(0)
    found: dict[int, float] = {}
    model = load_model(str(folder), dtype=asked.dtype, device=device)
    prompts = torch.randint(1, shape.vocab, (max(batches), length), generator=generator).tolist()
    generate(model, prompts[:1], 2, device)  # warms up
    for batch in batches:
        with out_of_memory_is_a_row(f"{batch} requests"):
            prefill, whole = generate(model, prompts[:batch], new, device)
            found[batch] = (whole - prefill) / (new - 1)
            least = least_step(shape, batch * (length + new // 2), bandwidth, each)
            row(
                f"{batch} requests",
                prefill_tokens_a_second=batch * length / prefill,
                decoded_tokens_a_second=batch / found[batch],
                ms_a_step=found[batch] * 1e3,
                least_ms_a_step=least * 1e3,
                of_the_least=least / found[batch],
            )
    del model
    free()
    plain = Qwen2ForCausalLM.from_pretrained(folder, dtype=getattr(torch, asked.dtype))
    torch.nn.Module.to(plain, device)
    generate_plainly(plain, prompts[:1], 2)
    for batch in [size for size in batches if size <= MOST_OF_TRANSFORMERS]:
        label = f"{batch} requests, transformers' generate"
        with out_of_memory_is_a_row(label):
            prefill = seconds(partial(generate_plainly, plain, prompts[:batch], 1), device)
            step = (seconds(partial(generate_plainly, plain, prompts[:batch], new), device) - prefill) / (new - 1)
            row(
                label,
                prefill_tokens_a_second=batch * length / prefill,
                decoded_tokens_a_second=batch / step,
                ms_a_step=step * 1e3,
                times_the_engine=step / found[batch] if batch in found else None,
            )


def main() -> None:
    asked = setting(__doc__)
    shape = SHAPES["tiny" if asked.tiny else asked.shape]
    with policy_folder(shape, asked.device) as folder:
        compare(asked, shape, folder)


if __name__ == "__main__":
    main()
