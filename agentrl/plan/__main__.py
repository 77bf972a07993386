"""`python -m agentrl.plan [key=value ...]`: memory and seconds of a training, before anything is loaded.

Takes the words of `python -m agentrl.train`, and `--measured REPORT` with speeds of this kind of GPU. The exit status
is 1 for a run that does not fit.
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Sequence
from itertools import chain
from pathlib import Path

from agentrl.config import Config, load_config
from agentrl.system.command import exit_status

HELP = """\
Print the memory and the seconds of a training, before anything is loaded: bytes by part and moment of a step, seconds
by stage. The command takes the keys of agentrl.train. The exit status is 1 for a run that does not fit.

  python -m agentrl.plan actor_rollout_ref.model.path=Qwen/Qwen3-0.6B actor_rollout_ref.rollout.n=16
  python -m agentrl.plan actor_rollout_ref.model.path=Qwen/Qwen3-0.6B --measured runs/gpu-report/report.json
      speeds that `python -m benchmarks.gpu` measured on this kind of GPU, in place of assumed ones
"""


def main(argv: Sequence[str] | None = None) -> int:
    """Print the plan and return the exit status."""
    fits = True
    flags = argparse.ArgumentParser(prog="python -m agentrl.plan", add_help=False, allow_abbrev=False)
    flags.add_argument("--measured", type=Path, metavar="REPORT")
    given, words = flags.parse_known_args(sys.argv[1:] if argv is None else argv)

    def work() -> None:
        nonlocal fits
        config = load_config(words, "train", Config, about=HELP)
        # Imported late, so that --help and config errors wait for nothing.
        from rich.console import Console

        from agentrl.observe.open import open_display
        from agentrl.plan import compaction, containers
        from agentrl.plan.choices import choose
        from agentrl.plan.many_steps import Way
        from agentrl.plan.memory import MemoryPlan
        from agentrl.plan.report import show, show_times
        from agentrl.plan.times import TimePlan, cluster_of
        from agentrl.runtime.device import resolve_device
        from agentrl.runtime.room import room

        console = Console(soft_wrap=True)
        device = resolve_device(config.trainer.device, console.print)
        config = choose(config, device, room(device), lambda said: console.print(f"- {said}"))
        plan = MemoryPlan(config, device, room(device))
        show(plan, console)
        further = chain(containers.described(plan, room("cpu"), os.cpu_count() or 1), compaction.described(config))
        for line in further:
            console.print(line)
        timed, ways = TimePlan(plan, *cluster_of(plan, given.measured)), list[tuple[Way, float]]()
        with open_display("plan") as display, display.stage("staleness bounds", total=len(timed.ways)) as stage:
            for found in timed.by_bound():
                ways.append(found)
                stage.advance()
        show_times(timed, ways, console)
        fits = plan.fullest.total <= plan.capacity

    return exit_status(work) or (0 if fits else 1)


if __name__ == "__main__":
    sys.exit(main())
