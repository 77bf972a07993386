"""A recorded trajectory, with the seeds, parameters and weights that its tokens were sampled with."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from agentrl.checkpoint.manifest import CHECKPOINTS, STATE_FILE, steps_in, verified
from agentrl.config import Config
from agentrl.engines.contract import SamplingParams
from agentrl.errors import CheckpointError, DataError
from agentrl.rollouts.contract import Task, training, validation
from agentrl.trajectory import Trajectory
from agentrl.trajectory.files import TRAJECTORIES, image_file
from agentrl.trajectory.parquet import check_columns, image_places, read_rows, trajectory_files, trajectory_of


@dataclass(frozen=True, slots=True)
class Stretch:
    """Tokens [start, end) of an assistant turn that one version of the weights sampled."""

    turn: int
    transcript: int
    start: int
    end: int
    version: int
    seed: int
    kept: bool = False
    """The run sampled it from keys and values of older weights, in part; here they are computed again."""


@dataclass(frozen=True, slots=True)
class Recorded:
    """A trajectory of a run, and how its tokens were drawn."""

    trajectory: Trajectory
    split: str
    step: int
    params: SamplingParams
    """Temperature, top_p and top_k are meant."""
    images: list[list[tuple[int, Path]]]
    """By transcript, each image's first token and file."""
    keeps: bool = False
    """The run kept keys and values over changes of weights."""

    def stretches(self) -> list[Stretch]:
        """List the sampled stretches, in order. Raises DataError where no seed is recorded."""
        found = []
        for index, turn in enumerate(self.trajectory.turns):
            if turn.role != "assistant" or turn.end == turn.start:
                continue
            if turn.seed is None:
                raise DataError(
                    f"{self.trajectory.uid}: the seed of turn {index} is not recorded: an earlier release wrote it, "
                    "or a loop of your own that gives Episode.record none"
                )
            for span in self.trajectory.transcripts[turn.transcript].versions:
                start, end = max(span.start, turn.start), min(span.end, turn.end)
                if start < end:
                    kept = self.keeps and start > turn.start
                    found.append(Stretch(index, turn.transcript, start, end, span.version, turn.seed, kept))
        return found


def find(run: Path, uid: str, config: Config) -> Recorded:
    """Find a trajectory by its name. Raises DataError where the run holds no trajectory of that name."""
    folder = run / TRAJECTORIES
    files = trajectory_files(folder)
    if not files:
        raise DataError(f"{folder}: want a run's recorded trajectories, found none")
    for file in files:
        check_columns(file)
        number = next((number for number, row in enumerate(read_rows(file, ["uid"])) if row["uid"] == uid), None)
        if number is not None:
            row = next(itertools.islice(read_rows(file), number, None))
            return _recorded(trajectory_of(row, file, number), image_places(row), config, file)
    raise DataError(f"{folder}: none of {len(files)} files holds the trajectory {uid!r}; the column uid names them")


def _recorded(
    trajectory: Trajectory, images: Sequence[Sequence[tuple[int, str]]], config: Config, file: Path
) -> Recorded:
    tag, _, rest = trajectory.uid.rpartition("/")
    tag, _, group = tag.rpartition("/")
    split, _, step = tag.partition("/")
    if split not in ("train", "val", "greedy") or not (step.isdecimal() and group.isdecimal()):
        raise DataError(f"{file}: want a name such as train/12/3/1, found {trajectory.uid!r}")
    params = SamplingParams(1, temperature=0.0) if rest == "greedy" else _task(config, split, int(step)).params
    try:
        files = [[(start, image_file(file.parent, digest)) for start, digest in places] for places in images]
    except DataError as error:
        raise DataError(f"{file}, trajectory {trajectory.uid}: {error}") from error
    return Recorded(trajectory, split, int(step), params, files, config.async_training.keep_kv_cache)


def _task(config: Config, split: str, step: int) -> Task:
    return training(config, step) if split == "train" else validation(config, step, greedy=split == "greedy")


def checkpoint_of(run: Path, version: int) -> Path | None:
    """Find the run's checkpoint of that version of the weights; None for 0, which the run began with.

    Raises CheckpointError where it is not kept.
    """
    if version == 0:
        return None
    there: dict[int, Path] = {}
    partial = list[str]()
    for _, path in sorted(steps_in(run / CHECKPOINTS).items()):
        if (path / STATE_FILE).is_file():
            there[version_of(path)] = path
        else:
            partial.append(f", and {path.name} without its {STATE_FILE}, copied in part")
    if version in there:
        return there[version]
    known = ", ".join(f"{path.name} (version {found})" for found, path in there.items()) or "none"
    raise CheckpointError(
        f"{run / CHECKPOINTS}: want the weights of version {version}, which sampled the trajectory, found {known}"
        f"{''.join(partial)}. "
        "Name another with --checkpoint, to see what it would have sampled; trainer.save_freq and "
        "trainer.max_actor_ckpt_to_keep say which are kept"
    )


def version_of(checkpoint: Path) -> int:
    """Return the version of a checkpoint's weights. Raises CheckpointError without one."""
    state = verified(checkpoint).state
    found = state.get("version", state.get("step"))
    if not isinstance(found, int):
        raise CheckpointError(f"{checkpoint}: its {STATE_FILE} names no version of its weights")
    return found


def read_edit(tool_answer: Path | None, message: str | None) -> str | None:
    """Return the text that takes the place of an observed turn; None where nothing is edited. Raises DataError."""
    if tool_answer is None:
        return message
    try:
        return tool_answer.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise DataError(f"--tool-answer {tool_answer}: want a text file, but it cannot be read: {error}") from error
