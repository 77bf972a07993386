"""Common beginnings computed once or with each sequence: updates and log-probs of eight answers to each prompt.

Random weights in one of Qwen2.5's shapes, a prompt and its answers a micro-batch, AdamW, activation checkpointing; in
bfloat16 and in float32. Flat computes a prompt with each answer, shared once for all of them. The differences of
log-probs and gradients are to a flat pass in float32.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path

import torch
from transformers import PreTrainedModel

from agentrl.model import packed
from agentrl.model.layout import PackedLayout, flat_layout
from agentrl.model.tree_layout import tree_layout
from agentrl.plan.sizing import ModelShape
from agentrl.trajectory.batch import RaggedBatch
from benchmarks.gpu.part import GB, Setting, median_seconds, memory, out_of_memory_is_a_row, row, seconds, setting
from benchmarks.gpu.states import policy_folder
from benchmarks.training.update_utilization import SHAPES, fsdp, make_worker

SHARES = (0.25, 0.5, 0.75)
"""Part of a sequence that is its prompt."""
ANSWERS = 8
LENGTH, TINY_LENGTH = 2048, 64
"""Mean tokens of a sequence."""
PROMPTS = {"bfloat16": 4, "float32": 1}
"""Prompts of an update, a micro-batch each."""
UPDATES = 2


def groups(shape: ModelShape, prompts: int, share: float, length: int, answers: int = ANSWERS) -> RaggedBatch:
    """Make prompts with their answers, of .6 to 1.4 times the mean length."""
    generator = torch.Generator().manual_seed(3)
    prompt, ids, lengths = round(share * length), [], []
    for _ in range(prompts):
        beginning = torch.randint(0, shape.vocab, (prompt,), generator=generator)
        for part in torch.linspace(0.6, 1.4, answers).tolist():
            answer = torch.randint(0, shape.vocab, (round(part * (length - prompt)),), generator=generator)
            ids += [beginning, answer]
            lengths.append(prompt + len(answer))
    offsets = torch.tensor([0, *lengths]).cumsum(0)
    tokens = int(offsets[-1])
    mask = torch.arange(tokens) - offsets[:-1].repeat_interleave(offsets.diff()) >= prompt
    batch = RaggedBatch.from_columns(
        offsets=offsets,
        ids=torch.cat(ids),
        mask=mask,
        rollout_logprobs=torch.zeros(tokens),
        version=mask.int() - 1,
        turn=mask.int() - 1,
        rewards=torch.zeros(tokens),
        group=torch.arange(len(lengths)) // answers,
        trajectory=torch.arange(len(lengths)),
        policy=torch.zeros(len(lengths), dtype=torch.int32),
        policies=("policy",),
    )
    advantages = torch.randn(tokens, generator=generator) * mask
    return batch.with_fields(old_logprobs=torch.zeros(tokens), advantages=advantages)


@contextmanager
def laid_out(name: str) -> Iterator[None]:
    """Share no beginnings during the block, if `name` is flat, else all."""
    chosen = packed.make_layout

    def flat(ids: torch.Tensor, offsets: torch.Tensor) -> PackedLayout:
        return flat_layout(offsets, ids.device)

    try:
        packed.make_layout = flat if name == "flat" else tree_layout
        yield
    finally:
        packed.make_layout = chosen


def time_updates(asked: Setting, shape: ModelShape, folder: Path, dtype: str) -> None:
    device, length = asked.device, TINY_LENGTH if asked.tiny else LENGTH
    worker = make_worker(folder, device, dtype, ANSWERS * length)
    for share in SHARES:
        batch = groups(shape, PROMPTS[dtype], share, length)
        tokens = batch.num_tokens // PROMPTS[dtype]
        fsdp(worker).max_tokens = fsdp(worker).log_prob_max_tokens = tokens
        spent: dict[str, tuple[float, float]] = {}
        for name in ("flat", "shared"):
            label = f"{dtype}, {share:.0%} prompt: {name}"
            with out_of_memory_is_a_row(label), laid_out(name):
                group = batch.select(range(ANSWERS))
                made = partial(packed.make_layout, group.ids.to(device), group.offsets)
                layout = made()
                first = seconds(partial(worker.update, batch, step=1), device)
                with memory(device) as seen:
                    update = median_seconds(partial(worker.update, batch, step=2), device, UPDATES, warm_up=0)
                scoring = median_seconds(partial(worker.compute_log_probs, batch), device, UPDATES)
                spent[name] = update, scoring
                row(
                    label,
                    tokens=batch.num_tokens,
                    computed=len(layout.stored) / group.num_tokens,
                    update_seconds=update,
                    log_prob_seconds=scoring,
                    first_update_seconds=first,
                    peak_GB=seen.peak / GB,
                    layout_ms=1e3 * median_seconds(made, device, 5),
                )
        if len(spent) == 2:
            (update, scoring), (shared, scoring_shared) = spent["flat"], spent["shared"]
            row(
                f"{dtype}, {share:.0%} prompt: flat / shared",
                update_seconds=update / shared,
                log_prob_seconds=scoring / scoring_shared,
            )


def pass_over(model: PreTrainedModel, batch: RaggedBatch, dtype: str, name: str) -> list[torch.Tensor]:
    """Log-probs of all tokens, then the gradients of the weights."""
    device = model.device
    model.zero_grad(set_to_none=True)
    assert batch.advantages is not None
    with laid_out(name), torch.autocast(device.type, torch.bfloat16, enabled=dtype == "bfloat16"):
        found = packed.token_logprobs(model, batch.ids.to(device), batch.offsets.to(device)).logprobs
        (found * batch.advantages.to(device)).sum().backward()
    return [found.detach(), *(weight.grad for weight in model.parameters() if weight.grad is not None)]


def compare(asked: Setting, shape: ModelShape, folder: Path) -> None:
    length = TINY_LENGTH if asked.tiny else LENGTH
    model = packed.load_model(str(folder), device=asked.device)
    model.gradient_checkpointing_enable({"use_reentrant": False})
    model.train()
    batch = groups(shape, 1, 0.5, length)
    exact = pass_over(model, batch, "float32", "flat")
    size = sum(float(one.norm()) ** 2 for one in exact[1:]) ** 0.5
    for dtype, name in (("float32", "shared"), ("bfloat16", "flat"), ("bfloat16", "shared")):
        with out_of_memory_is_a_row(f"{dtype}, {name}, against float32, flat"):
            found = pass_over(model, batch, dtype, name)
            gap = (found[0] - exact[0]).abs()
            off = sum(float((one - other).norm()) ** 2 for one, other in zip(found[1:], exact[1:], strict=True)) ** 0.5
            row(
                f"{dtype}, {name}, against float32, flat",
                mean_difference=gap.mean().item(),
                largest_difference=gap.max().item(),
                gradients_off=off / size,
            )
            del found


def main() -> None:
    asked = setting(__doc__)
    shape = SHAPES["tiny" if asked.tiny else asked.shape]
    with policy_folder(shape, asked.device) as folder:
        compare(asked, shape, folder)
        for dtype in PROMPTS:
            with out_of_memory_is_a_row(dtype):
                time_updates(asked, shape, folder, dtype)


if __name__ == "__main__":
    main()
