"""Attention of packed sequences on the device, kernel by kernel: flex, variable-length, and one sequence at a time.

The rules are those of gpt-oss (sinks, a window of 128), Gemma 2 (capped scores, a window of 4,096) and Qwen2.5 (plain).
Forward and backward; the reference is one sequence at a time in float32.
"""

from __future__ import annotations

import traceback
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import torch

from agentrl.model.attend import Rule, attend_by_node
from agentrl.model.attention import PackedAttention
from agentrl.model.layout import flat_layout
from benchmarks.gpu.part import GB, Setting, median_seconds, memory, out_of_memory_is_a_row, row, seconds, setting

Attend = Callable[[torch.Tensor, torch.Tensor, torch.Tensor, Rule], torch.Tensor]


@dataclass(frozen=True, slots=True)
class Case:
    """A layer's heads, and its rule."""

    name: str
    heads: int
    kv_heads: int
    width: int
    window: int | None = None
    softcap: float | None = None
    sinks: bool = False


CASES = (
    Case("gpt-oss-20b, windowed layer", 64, 8, 64, window=128, sinks=True),
    Case("gpt-oss-20b, full layer", 64, 8, 64, sinks=True),
    Case("gemma-2-9b, windowed layer", 16, 8, 256, window=4096, softcap=50.0),
    Case("gemma-2-9b, full layer", 16, 8, 256, softcap=50.0),
    Case("Qwen2.5-7B", 28, 4, 128),
    Case("Mistral-7B with a window", 32, 8, 128, window=4096),
)
TINY_CASES = (
    Case("tiny, sinks and a window", 4, 2, 16, window=32, sinks=True),
    Case("tiny, capped", 4, 2, 16, softcap=9.0),
)
LENGTHS = (4500, 1500, 800, 500, 244, 100)
"""The reference holds all scores of all heads: 4,500 tokens of 64 heads take about 50 GB with the gradients."""
TINY_LENGTHS = (150, 70, 36)


def measure(asked: Setting, case: Case) -> None:
    device, lengths = asked.device, TINY_LENGTHS if asked.tiny else LENGTHS
    dtype = getattr(torch, asked.dtype)
    offsets = torch.tensor([0, *lengths]).cumsum(0)
    layout = flat_layout(offsets, torch.device(device))
    generator = torch.Generator(device).manual_seed(0)
    size = int(offsets[-1])

    def made(heads: int) -> torch.Tensor:
        return torch.randn(heads, size, case.width, device=device, generator=generator, dtype=torch.float32)

    given = [made(case.heads), made(case.kv_heads), made(case.kv_heads)]
    gradient = made(case.heads).transpose(0, 1)
    sinks = torch.randn(case.heads, device=device, generator=generator) if case.sinks else None
    rule = Rule(case.width**-0.5, case.window, case.softcap, sinks)

    def pass_over(attend: Attend, kind: torch.dtype) -> list[torch.Tensor]:
        """The output and the gradients of queries, keys and values."""
        inputs = [one.detach().clone().to(kind).requires_grad_() for one in given]
        query, key, value = inputs
        output = attend(query, key, value, rule)
        output.backward(gradient.to(kind))
        return [output.detach(), *(one.grad for one in inputs if one.grad is not None)]

    def by_node(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, rule: Rule) -> torch.Tensor:
        return attend_by_node(layout, query, key, value, rule)

    packed = PackedAttention(layout)

    def as_trained(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, rule: Rule) -> torch.Tensor:
        return packed.attend(0, query, key, value, rule)

    exact: list[torch.Tensor] | None = None
    with out_of_memory_is_a_row(f"{case.name}: float32, one at a time"):
        exact = pass_over(by_node, torch.float32)
    spent: dict[str, float] = {}
    ways = {"as it trains": as_trained, "one at a time": by_node}
    for name, attend in ways.items():
        with out_of_memory_is_a_row(f"{case.name}: {name}"):
            first = seconds(partial(pass_over, attend, dtype), device)
            with memory(device) as seen:
                found = pass_over(attend, dtype)
            spent[name] = median_seconds(partial(pass_over, attend, dtype), device, 5)
            pairs = zip(found, exact, strict=True) if exact is not None else ()
            worst = [((one.float() - other).norm() / other.norm()).item() for one, other in pairs]
            row(
                f"{case.name}: {name}",
                tokens=size,
                ms=spent[name] * 1e3,
                first_seconds=first,
                peak_GB=seen.peak / GB,
                output_off_float32=worst[0] if worst else None,
                gradients_off_float32=max(worst[1:]) if worst else None,
            )
    if len(spent) == 2:
        row(f"{case.name}: one at a time / as it trains", ms=spent["one at a time"] / spent["as it trains"])


def main() -> None:
    asked = setting(__doc__)
    for case in TINY_CASES if asked.tiny else CASES:
        try:
            measure(asked, case)
        except Exception as error:  # a kernel that cannot be compiled for one rule says nothing of the others
            traceback.print_exc()
            row(f"{case.name}: failed", error=f"{type(error).__name__}: {str(error)[:200]}")


if __name__ == "__main__":
    main()
