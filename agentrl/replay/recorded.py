"""A recorded trajectory, and what its tokens were sampled with: seeds, parameters and weights."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import pyarrow.parquet as pq

from agentrl.agent_loop.limits import seed_of
from agentrl.checkpoint.manifest import STATE_FILE, verified
from agentrl.config import Config
from agentrl.engines.contract import SamplingParams
from agentrl.errors import CheckpointError, DataError
from agentrl.rollouts.contract import Task, training, validation
from agentrl.trajectory import Trajectory
from agentrl.trajectory.files import TRAJECTORIES
from agentrl.trajectory.parquet import from_row, trajectory_files


@dataclass(frozen=True, slots=True)
class Recorded:
    """A trajectory of a run, and how each of its transcripts was drawn."""

    trajectory: Trajectory
    params: SamplingParams
    """Temperature, top_p and top_k are meant."""
    seeds: list[int]
    """For each transcript, the seed from which those of its turns are made."""

    @property
    def version(self) -> int:
        """Version of the weights that sampled it. Raises DataError where there are several, or none."""
        versions = {span.version for transcript in self.trajectory.transcripts for span in transcript.versions}
        if len(versions) != 1:
            found = ", ".join(map(str, sorted(versions))) or "none"
            raise DataError(
                f"{self.trajectory.uid}: want tokens of one version of the weights, found {found}. Replayed are "
                "trajectories that one version sampled"
            )
        return versions.pop()


def find(run: Path, uid: str, config: Config) -> Recorded:
    """Find a trajectory by its name. Raises DataError where the run holds none of that name."""
    folder = run / TRAJECTORIES
    files = trajectory_files(folder)
    if not files:
        raise DataError(f"{folder}: want a run's recorded trajectories, found none")
    for file in files:
        uids = pq.read_table(file, columns=["uid"])["uid"].to_pylist()
        if uid in uids:
            row = pq.read_table(file).slice(uids.index(uid), 1).to_pylist(maps_as_pydicts="strict")[0]
            return _recorded(from_row(row), config, file)
    raise DataError(f"{folder}: none of {len(files)} files holds the trajectory {uid!r}; the column uid names them")


def _recorded(trajectory: Trajectory, config: Config, file: Path) -> Recorded:
    tag, _, rest = trajectory.uid.rpartition("/")
    tag, _, group = tag.rpartition("/")
    split, _, step = tag.partition("/")
    if split not in ("train", "val", "greedy") or not (step.isdecimal() and group.isdecimal()):
        raise DataError(f"{file}: want a name such as train/12/3/1, found {trajectory.uid!r}")
    task = _task(config, split, int(step))
    number = task.n if rest == "greedy" else int(rest)
    params = SamplingParams(1, temperature=0.0) if rest == "greedy" else task.params
    seed = seed_of(seed_of(config.trainer.seed, task.seeds, int(group), number), trajectory.attempt)
    seeds = [seed]
    for index in range(1, len(trajectory.transcripts)):
        seeds.append(seed_of(seeds[-1], "transcript", index))
    return Recorded(trajectory, params, seeds)


def _task(config: Config, split: str, step: int) -> Task:
    return training(config, step) if split == "train" else validation(config, step, greedy=split == "greedy")


def checkpoint_of(run: Path, version: int) -> Path | None:
    """Find the run's checkpoint of that version of the weights; None for 0, which the run began with.

    Raises CheckpointError where it is not kept.
    """
    if version == 0:
        return None
    there: dict[int, Path] = {}
    for path in sorted((run / "checkpoints").glob("step_*")):
        if (path / STATE_FILE).is_file():
            state = verified(path).state
            found = state.get("version", state.get("step"))
            if isinstance(found, int):
                there[found] = path
    if version in there:
        return there[version]
    known = ", ".join(f"{path.name} (version {found})" for found, path in there.items()) or "none"
    raise CheckpointError(
        f"{run / 'checkpoints'}: want the weights of version {version}, which sampled the trajectory, found {known}. "
        "Name another with --checkpoint, to see what it would have sampled; trainer.save_freq and "
        "trainer.max_actor_ckpt_to_keep say which are kept"
    )


def read_edit(tool_answer: Path | None, message: str | None) -> str | None:
    """Return the text that takes the place of an observed turn; None where nothing is edited. Raises DataError."""
    if tool_answer is None:
        return message
    try:
        return tool_answer.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise DataError(f"--tool-answer {tool_answer}: want a text file, but it cannot be read: {error}") from error
