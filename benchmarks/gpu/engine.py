"""Tokens a second of the embedded engine: prefill, and decoding at several batch sizes.

Each batch runs with graphs, without them, and by transformers' own generate on the same prompts. The least time of a
decoding step is the time in which the weights and the keys and values of all requests are read once, at the rate of a
copy. Next to each step stands its forecast by `agentrl.plan`. The operations of a step are counted as torch dispatches
them; a graph replays them in one launch.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import PreTrainedModel, Qwen2ForCausalLM

from agentrl.engines.contract import SamplingParams
from agentrl.engines.embedded.decoding import Decoder, DecodingProgram
from agentrl.engines.embedded.engine import EmbeddedEngine
from agentrl.engines.embedded.step import StepRunner
from agentrl.model.packed import load_model
from agentrl.plan import sizing
from agentrl.plan.sizing import ModelShape
from benchmarks.gpu.foretold import Device
from benchmarks.gpu.part import (
    Setting,
    copy_bandwidth,
    free,
    matmul_flops,
    out_of_memory_is_a_row,
    row,
    seconds,
    setting,
    wait,
)
from benchmarks.gpu.states import policy_folder
from benchmarks.training.update_utilization import SHAPES

BATCHES, PROMPT, NEW = (1, 4, 16, 64, 256, 512), 512, 128
TINY_BATCHES, TINY_PROMPT, TINY_NEW = (1, 4), 32, 8
MOST_OF_TRANSFORMERS = 64
"""Requests at once that transformers' generate is tried with."""


def generate(
    model: PreTrainedModel, prompts: list[list[int]], new: int, device: str, *, graphs: bool
) -> tuple[float, float]:
    """Seconds of all prompts at once with one new token each, and with `new` of them, once graphs are captured."""

    async def work() -> tuple[float, float]:
        engine = EmbeddedEngine(model, max_num_seqs=len(prompts), max_model_len=len(prompts[0]) + new, graphs=graphs)
        spent = []
        for count in (2, 1, new):
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
        return spent[1], spent[2]

    return asyncio.run(work())


class _Counted(TorchDispatchMode):
    """Counts the operations that torch dispatches."""

    count = 0

    def __torch_dispatch__(
        self, func: Any, types: Sequence[type], args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        self.count += 1
        return func(*args, **(kwargs or {}))


def operations(model: PreTrainedModel, *, graphs: bool) -> int:
    """Operations of the last step of an answer, dispatched one by one."""
    found: list[int] = []
    owner, name = (DecodingProgram, "compute") if graphs else (StepRunner, "run")
    plain = getattr(owner, name)

    def counted(*given: object) -> object:
        with _Counted() as mode:
            answer = plain(*given)
        found.append(mode.count)
        return answer

    async def work() -> None:
        engine = EmbeddedEngine(model, max_num_seqs=1, max_model_len=64, graphs=graphs)
        with mock.patch.object(owner, name, counted), mock.patch.object(Decoder, "_capture"):
            await engine.generate([1, 2, 3], SamplingParams(6), "counted")
        await engine.close()

    asyncio.run(work())
    return found[-1]


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
    rates = Device(asked, matmul_flops(device), copy_bandwidth(device))
    bandwidth, each = rates.copy, getattr(torch, asked.dtype).itemsize
    generator = torch.Generator().manual_seed(0)
    found: dict[tuple[int, bool], float] = {}
    model = load_model(str(folder), dtype=asked.dtype, device=device)
    prompts = torch.randint(1, shape.vocab, (max(batches), length), generator=generator).tolist()
    row("operations of a step", one_by_one=operations(model, graphs=False), captured=operations(model, graphs=True))
    for batch in batches:
        for graphs in (True, False):
            label = f"{batch} requests" + ("" if graphs else ", without graphs")
            with out_of_memory_is_a_row(label):
                prefill, whole = generate(model, prompts[:batch], new, device, graphs=graphs)
                step = found[batch, graphs] = (whole - prefill) / (new - 1)
                contexts = batch * (length + new // 2)
                least = least_step(shape, contexts, bandwidth, each)
                row(
                    label,
                    prefill_tokens_a_second=batch * length / prefill,
                    decoded_tokens_a_second=batch / step,
                    ms_a_step=step * 1e3,
                    least_ms_a_step=least * 1e3,
                    of_the_least=least / step,
                    times_with_graphs=None if graphs or (batch, True) not in found else step / found[batch, True],
                    **rates.decoding(shape, batch, contexts, step, by_graphs=graphs),
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
                times_the_engine=step / found[batch, True] if (batch, True) in found else None,
            )


def main() -> None:
    asked = setting(__doc__)
    shape = SHAPES["tiny" if asked.tiny else asked.shape]
    with policy_folder(shape, asked.device) as folder:
        compare(asked, shape, folder)


if __name__ == "__main__":
    main()
