"""Containers of agents that a machine carries at once, by their limits."""

from __future__ import annotations

from collections.abc import Iterator

from agentrl.plan.memory import GB, MemoryPlan

MIB = 1 << 20


def described(plan: MemoryPlan, memory: float, cores: int) -> Iterator[str]:
    """Describe the containers of a run on a machine, and name keys where they may take more than there is.

    memory: bytes of the machine. A run without containers has no lines. A limit is no reservation: containers that
    stay below it take less.
    """
    rollout = plan.config.actor_rollout_ref.rollout
    if rollout.agent.openai_proxy.start != "container":
        return
    options = rollout.agent.openai_proxy.container
    asked = min(rollout.agent.max_concurrent, plan.sequences) + options.pool
    each, own = float(options.memory_megabytes * MIB), plan.moments[0].total if plan.device == "cpu" else 0.0
    carried, fast = max(0, int((memory - own) // each)), int(cores // options.cpus)
    yield (
        f"containers: up to {asked:,} at once, each of at most {each / GB:.2f} GB and {options.cpus:g} cores; the "
        f"machine carries {carried:,} by memory ({memory / GB:.2f} GB, of which the run takes {own / GB:.2f}), and its "
        f"{cores} cores run {fast:,} at full speed"
    )
    if asked > carried:
        yield (
            f"- containers at their limits take {asked * each / GB:.2f} GB: "
            f"actor_rollout_ref.rollout.agent.max_concurrent={max(1, carried - options.pool)} or a smaller "
            "openai_proxy.container.memory_megabytes bounds them"
        )
