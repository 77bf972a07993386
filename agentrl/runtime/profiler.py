"""Profiles of a step's stages: a trace and a table a rank, of everything that its worker does within a stage.

The files lie in `<run's directory>/profile/step_000003/`, e.g. `rank0_update_actor.json.gz`. Without a `Profile`
nothing here is imported from torch.profiler, and nothing costs time.
"""

from __future__ import annotations

import gzip
import os
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import torch

from agentrl.config.sections.trainer import RunConfig
from agentrl.errors import ConfigError
from agentrl.system.publish import published

STAGES = ("reward_model", "old_log_prob", "ref_log_prob", "values", "update_critic", "update_actor", "update")
"""Stages that are profiled, by the names under time/ of the metrics."""
ROWS = 40
"""Operators in the table."""
ALLOCATIONS = 100_000
"""The newest so many are in a memory snapshot."""


@dataclass(frozen=True, slots=True)
class Profile:
    """Files that the profiles of one stage are written to."""

    directory: Path
    """Folder of the step's profiles."""
    stage: str


def profile_of(trainer: RunConfig, run_dir: Path, step: int, stage: str) -> Profile | None:
    """Make the profile of a step's stage; None where the config does not ask for one."""
    if step not in (trainer.profile_steps or ()) or stage not in STAGES:
        return None
    return Profile(run_dir.absolute() / "profile" / f"step_{step:06d}", stage)


def rollout_profile(trainer: RunConfig, run_dir: Path, step: int) -> Profile | None:
    """Make the profile of a step's rollouts, which run outside of the workers; None where the config does not ask for
    one."""
    if step not in (trainer.profile_steps or ()):
        return None
    return Profile(run_dir.absolute() / "profile" / f"step_{step:06d}", "rollout")


@contextmanager
def nvtx_range(name: str) -> Iterator[None]:
    """Mark the block as a range in NVIDIA's profilers; without CUDA do nothing."""
    if not torch.cuda.is_available():
        yield
        return
    torch.cuda.nvtx.range_push(name)
    try:
        yield
    finally:
        torch.cuda.nvtx.range_pop()


def check_profile_steps(trainer: RunConfig, total_steps: int) -> None:
    """Raises ConfigError for a step that the run does not have."""
    beyond = [step for step in trainer.profile_steps or () if step > total_steps]
    if beyond:
        raise ConfigError(f"trainer.profile_steps names step {beyond[0]}, and the run ends at step {total_steps}")


@contextmanager
def profiled(profile: Profile | None, rank: int) -> Iterator[None]:
    """Profile the work of this process inside the block, if there is a `profile`:

    - `rank<n>_<stage>.json.gz`: when every operator and kernel ran, for https://ui.perfetto.dev or chrome://tracing;
    - `rank<n>_<stage>.txt`: the operators with the most time;
    - `rank<n>_<stage>_memory.pickle`, with a GPU: its allocations, for https://pytorch.org/memory_viz.

    Each file appears whole or not at all; no file when the block raises. Raises TrainingError on a full disk.
    """
    if profile is None:
        yield
        return
    os.environ.setdefault("KINETO_LOG_LEVEL", "6")  # else it writes to stderr that it starts and stops
    from torch.profiler import ProfilerActivity
    from torch.profiler import profile as torch_profile

    on_gpu = torch.cuda.is_available()
    activities = [ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if on_gpu else [])]
    name = f"rank{rank}_{profile.stage}"
    if on_gpu:
        torch.cuda.memory._record_memory_history(max_entries=ALLOCATIONS)
    try:
        with torch_profile(activities=activities) as seen:
            yield
            if on_gpu:
                torch.cuda.synchronize()
        if on_gpu:
            with published(profile.directory / f"{name}_memory.pickle") as partial:
                torch.cuda.memory._dump_snapshot(str(partial))
    finally:
        if on_gpu:
            torch.cuda.memory._record_memory_history(enabled=None)
    table = seen.key_averages().table(sort_by=f"self_{'cuda' if on_gpu else 'cpu'}_time_total", row_limit=ROWS)
    with published(profile.directory / f"{name}.txt") as partial:
        partial.write_text(table + "\n", encoding="utf-8")
    with tempfile.TemporaryDirectory() as scratch, published(profile.directory / f"{name}.json.gz") as partial:
        trace = Path(scratch) / "trace.json"
        seen.export_chrome_trace(str(trace))
        with trace.open("rb") as plain, gzip.open(partial, "wb", compresslevel=5) as packed:
            shutil.copyfileobj(plain, packed)
