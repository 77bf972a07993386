"""The text of a memory plan: a table of parts by moment, and keys that would save."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from rich.console import Console
from rich.table import Table

from agentrl.observe.display import duration
from agentrl.plan import times
from agentrl.plan.many_steps import Way
from agentrl.plan.memory import GB, MemoryPlan
from agentrl.plan.one_step import bound_by
from agentrl.plan.speeds import described
from agentrl.plan.times import TimePlan


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
        + ("" if roles.model.recomputed(plan.policy.layers) else ", or model.enable_gradient_checkpointing=true"),
        "policy's optimizer": "actor_rollout_ref.model.lora_rank=16 trains adapters instead of all weights",
        "reference": "algorithm.use_kl_in_reward=false and actor.use_kl_loss=false need no reference",
        "teachers": "distillation.teacher.base_url names a server that has the teacher",
        "reward model": "reward_model.enable_resource_pool=true gives it devices of its own",
        "engine": "a smaller actor_rollout_ref.rollout.gpu_memory_utilization, or free_cache_engine=true",
    }
    for part, size in sorted(fullest.parts.items(), key=lambda one: -one[1])[:3]:
        if part in saving:
            yield f"{part}, {size / GB:.2f} GB: {saving[part].format(rows=plan.rows)}"


def show_times(plan: TimePlan, ways: Sequence[tuple[Way, float]], console: Console) -> None:
    """Print the seconds of a step by stage, its bottleneck, the steps by staleness bound (`ways`), and advice."""
    step = plan.step
    table = Table(title="seconds of a step, rollouts and updates in turn", title_justify="left")
    for column in ("stage", "seconds", "part"):
        table.add_column(column, justify="left" if column == "stage" else "right")
    for stage in filter(lambda stage: stage.seconds, step.stages):
        table.add_row(stage.name, f"{stage.seconds:.3g}", f"{stage.seconds / step.seconds:.0%}")
    table.add_section()
    table.add_row("all", f"{step.seconds:.3g}", f"{step.tokens / step.seconds:,.0f} tokens/s")
    console.print(table)
    console.print("speeds:")
    for line in described(plan.figures):
        console.print(f"- {line}")
    console.print(f"lengths: {plan.lengths}")
    first, steps = step.dominates, plan.memory.config.trainer.total_training_steps
    part = f"{first.seconds / step.seconds:.0%} of the step"
    console.print(f"bottleneck: {first.name}, {part}, bound by {bound_by(first)}")
    if steps is not None:
        console.print(f"{steps} steps: {duration(steps * step.seconds)}")
    chosen, seconds = times.best(ways)
    console.print("seconds a step by async_training.max_staleness: " + listed(ways))
    console.print(f"best bound: {chosen.bound}, {seconds:.3g} s a step")
    for line in times.advice(plan, chosen):
        console.print(f"- {line}")


def listed(ways: Sequence[tuple[Way, float]]) -> str:
    """List the fastest depth of each bound."""
    fastest: dict[int, float] = {}
    for way, seconds in ways:
        fastest[way.bound] = min(seconds, fastest.get(way.bound, seconds))
    return ", ".join(f"{bound}: {seconds:.3g}" for bound, seconds in fastest.items())
