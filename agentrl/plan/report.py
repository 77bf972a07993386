"""The text of a memory plan: a table of parts by moment, and keys that would save."""

from __future__ import annotations

from collections.abc import Iterator

from rich.console import Console
from rich.table import Table

from agentrl.plan.memory import GB, MemoryPlan


def show(plan: MemoryPlan, console: Console) -> None:
    """Print the parts by moment, the fullest moment against the memory that there is, and advice."""
    names = list(dict.fromkeys(part for moment in plan.moments for part in moment.parts))
    where = "process" if plan.device == "cpu" else "GPU"
    table = Table(title=f"GB of a {where}, with sequences at their longest", title_justify="left")
    table.add_column("part")
    for moment in plan.moments:
        table.add_column(moment.name, justify="right")
    for name in names:
        row = [moment.parts.get(name) for moment in plan.moments]
        table.add_row(name, *("" if size is None else f"{size / GB:.2f}" for size in row))
    table.add_section()
    table.add_row("all", *(f"{moment.total / GB:.2f}" for moment in plan.moments))
    console.print(table)
    fullest = plan.fullest
    console.print(
        f"fullest: {fullest.name}, {fullest.total / GB:.2f} of {plan.capacity / GB:.2f} GB"
        f"{'' if fullest.total <= plan.capacity else ': does not fit'}"
    )
    for line in advice(plan):
        console.print(f"- {line}")


def advice(plan: MemoryPlan) -> Iterator[str]:
    """Suggest keys that make the fullest moment smaller, with the part that each acts on, the largest part first."""
    roles, fullest = plan.config.actor_rollout_ref, plan.fullest
    saving = {
        "engine's cache": "actor_rollout_ref.rollout.max_num_seqs below {rows} makes it smaller"
        + ("" if roles.rollout.free_cache_engine or fullest.name == "rollout" else "; free_cache_engine=true frees it"),
        "activations": "a smaller actor_rollout_ref.actor.ppo_max_token_len_per_gpu"
        + ("" if roles.model.enable_gradient_checkpointing else ", or model.enable_gradient_checkpointing=true"),
        "policy's optimizer": "actor_rollout_ref.model.lora_rank=16 trains adapters instead of all weights",
        "reference": "algorithm.use_kl_in_reward=false and actor.use_kl_loss=false need no reference",
        "engine": "a smaller actor_rollout_ref.rollout.gpu_memory_utilization, or free_cache_engine=true",
    }
    for part, size in sorted(fullest.parts.items(), key=lambda one: -one[1])[:3]:
        if part in saving:
            yield f"{part}, {size / GB:.2f} GB: {saving[part].format(rows=plan.rows)}"
