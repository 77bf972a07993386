"""Trajectories as parquet: one row a trajectory, readable by pandas, and back to `Trajectory` objects.

A file is there whole or not at all, and repeating a step replaces its files; `files` has their names.
Log-probs are stored as float32, which is what engines compute. Text that is not valid Unicode (lone surrogates)
is stored with U+FFFD in its place.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from agentrl.errors import DataError, first_line
from agentrl.system.owner import new_name
from agentrl.system.publish import published
from agentrl.system.versions import writer_of
from agentrl.trajectory import (
    POLICY,
    Message,
    Outline,
    Status,
    ToolAnswer,
    ToolCallRecord,
    Trajectory,
    Transcript,
    Turn,
    VersionSpan,
)
from agentrl.trajectory.files import image_file, names_of, remove_former
from agentrl.trajectory.sample import row_place

_MESSAGE = pa.struct(
    {
        "role": pa.string(),
        "content": pa.string(),  # null unless it is plain text
        "tool_calls": pa.string(),  # JSON
        "other": pa.string(),  # JSON of the message's further keys
    }
)
_TURN = pa.struct(
    {
        "role": pa.string(),
        "text": pa.string(),
        "transcript": pa.int32(),
        "start": pa.int32(),
        "end": pa.int32(),
        "finish_reason": pa.string(),
        "reward": pa.float64(),
        "seconds": pa.float64(),
        "seed": pa.int64(),  # of an assistant turn's samples; files of earlier versions lack it
    }
)
_CALL = pa.struct(
    {
        "turn": pa.int32(),  # index in `turns` of the turn that made the call
        "name": pa.string(),
        "arguments": pa.string(),  # JSON
        "response": pa.string(),
        "error": pa.string(),
        "reward": pa.float64(),
        "seconds": pa.float64(),
        "truncated": pa.bool_(),
    }
)
_TURN_FIELDS = tuple(field.name for field in _TURN)
_CALL_FIELDS = tuple(field.name for field in _CALL if field.name not in ("turn", "arguments"))
"""Fields that are attributes of the record."""
_IMAGE = pa.struct(
    {
        "start": pa.int32(),  # its first token
        "tokens": pa.int32(),
        "grid": pa.list_(pa.int32()),  # frames, rows and columns of patches
        "digest": pa.string(),  # of its file, as in `messages`
    }
)
_SPAN = pa.struct({"version": pa.int64(), "start": pa.int32(), "end": pa.int32()})
SCHEMA = pa.schema(
    {
        "step": pa.int64(),
        "split": pa.string(),
        "uid": pa.string(),
        "group": pa.int64(),
        "data_source": pa.string(),
        "agent_name": pa.string(),
        "status": pa.string(),
        "failure": pa.string(),
        "score": pa.float64(),
        "reward": pa.float64(),  # `Outline.reward`: its whole reward in training; null where it is not trained on
        "model_reward": pa.float64(),  # the reward model's part of it; null without one
        "reward_parts": pa.map_(
            pa.string(), pa.float64()
        ),  # the addends of `reward`, by name; empty where that is null
        "turn_rewards": pa.list_(pa.float64()),
        "num_turns": pa.int32(),  # assistant turns
        "messages": pa.list_(_MESSAGE),
        "turns": pa.list_(_TURN),
        "calls": pa.list_(_CALL),
        # One entry a transcript:
        "prompt_length": pa.list_(pa.int32()),
        "ids": pa.list_(pa.list_(pa.int32())),
        "mask": pa.list_(pa.list_(pa.int8())),
        "logprobs": pa.list_(pa.list_(pa.float32())),
        "versions": pa.list_(pa.list_(_SPAN)),
        "images": pa.list_(pa.list_(_IMAGE)),
        "policy": pa.list_(pa.string()),
        "role": pa.list_(pa.string()),
        "trained_to": pa.list_(pa.int32()),  # tokens from which on nothing is trained; null: all is, as far as sampled
        "transcript_score": pa.list_(pa.float64()),  # its own in place of `score`; null: it has none
        "score_extra": pa.map_(pa.string(), pa.float64()),
        "metrics": pa.map_(pa.string(), pa.float64()),
        "baseline": pa.bool_(),  # drawn greedily next to the others, and not trained on
        "attempt": pa.int32(),  # number of the try that this is the record of, from 0
        "ground_truth": pa.string(),  # JSON of the row's; null where it is longer than LONGEST_TRUTH
        "failure_cause": pa.string(),  # the name that `failure` is counted under; null where the status says it
    }
)

ROW_GROUP_TOKENS = 1 << 18
"""Tokens that are read together where one trajectory is looked at."""
READ_ROWS = 64
"""Rows that are decoded at once."""
LONGEST_TRUTH = 10_000
"""Characters of a ground truth that is recorded: a program's tests, which may be more than its trajectory, are not."""
ADDED = (
    *("policy", "role", "reward_parts", "baseline", "attempt", "ground_truth", "failure_cause", "trained_to"),
    "transcript_score",
)
"""Columns that files of earlier versions lack."""


def write_trajectories(
    dir: Path,
    trajectories: Sequence[Trajectory],
    *,
    step: int,
    split: str,
    part: str = "",
    share: tuple[int, int] = (1, 1),
    turn_reward_coef: float | None,
) -> Path:
    """Write the file of a step's trajectories in `dir` and return its path.

    share: (number, count) of this worker among the workers that each write a file of their own. Without
    `turn_reward_coef` the reward column is null: a reward model has yet to score, and `fill_rewards` comes after it.
    Files of the same step by another number of workers are removed, and so are updates to the replaced files. Raises
    TrainingError on a full disk.
    """
    number, count = share
    names = names_of(split, step, part, count)
    path = dir / names[number - 1]
    write_images(dir, trajectories)
    rows = [to_row(trajectory, step, split, turn_reward_coef) for trajectory in trajectories]
    table = pa.Table.from_pylist(rows, schema=SCHEMA)
    with published(path) as temporary:
        pq.write_table(table, temporary, compression="zstd", row_group_size=rows_together(table))
    remove_former(path, names)
    return path


def write_images(dir: Path, trajectories: Sequence[Trajectory]) -> None:
    """Write the files of the trajectories' images next to `dir`, each once; existing files are marked as used.

    Raises TrainingError on a full disk.
    """
    placed = (one for each in trajectories for transcript in each.transcripts for one in transcript.images)
    for digest, image in {one.image.digest: one.image for one in placed}.items():
        path = image_file(dir, digest.hex())
        if path.exists():
            os.utime(path)
            continue
        own = path.with_name(new_name())  # a worker, of this machine or another, may write the same image
        with published(own) as temporary:
            temporary.write_bytes(image.encoded)
        own.replace(path)


def rows_together(table: pa.Table) -> int:
    """Count the rows of a row group, such that it has about ROW_GROUP_TOKENS tokens."""
    tokens = pc.sum(pc.list_value_length(pc.list_flatten(table["mask"]))).as_py() or 0
    return max(1, min(table.num_rows, ROW_GROUP_TOKENS * table.num_rows // max(tokens, 1)))


def fill_rewards(path: Path, outlines: Sequence[Outline], turn_reward_coef: float) -> None:
    """Write the reward model's rewards and failures into the file of the trajectories, which is in the same order.

    Outlines that the file does not hold, as not all were recorded, are left out. Raises DataError when it is not their
    file, TrainingError on a full disk.
    """
    try:
        table = pq.read_table(path)
    except (OSError, pa.ArrowInvalid) as error:
        raise DataError(f"{path}: the rewards cannot be filled in, for it cannot be read: {error}") from error
    recorded = table["uid"].to_pylist()
    wanted = set(recorded)
    outlines = [outline for outline in outlines if _text(outline.uid) in wanted]
    if [_text(outline.uid) for outline in outlines] != recorded:
        raise DataError(f"{path}: the rewards cannot be filled in, for it holds other trajectories than were scored")
    rewards = [outline.reward_parts(turn_reward_coef) for outline in outlines]
    columns: dict[str, list[object]] = {
        "status": [outline.status.value for outline in outlines],
        "failure": [_text(outline.failure) for outline in outlines],
        "failure_cause": [_text(outline.failure_cause) for outline in outlines],
        "score": [outline.score for outline in outlines],
        "reward": [outline.reward(turn_reward_coef) for outline in outlines],
        "reward_parts": [list(parts.items()) for parts in rewards],
        "model_reward": [None if outline.score is None else outline.model_reward for outline in outlines],
    }
    for name, values in columns.items():
        index = table.schema.get_field_index(name)
        table = table.set_column(index, table.schema.field(index), pa.array(values, SCHEMA.field(name).type))
    with published(path) as temporary:
        pq.write_table(table, temporary, compression="zstd", row_group_size=rows_together(table))


def trajectory_files(folder: Path | str) -> list[Path]:
    """List the files of trajectories in a folder, by name."""
    return sorted(Path(folder).glob("*.parquet"))


def read_trajectories(path: Path) -> list[Trajectory]:
    """Read the trajectories of one file, in the order they were written. Raises DataError when it is no such file."""
    check_columns(path)
    return [trajectory_of(row, path, number) for number, row in enumerate(read_rows(path))]


def check_columns(path: Path) -> list[str]:
    """Return the names of a file's columns. Raises DataError where it cannot be read, or is of no trajectories."""
    try:
        found: list[str] = pq.read_schema(path).names
    except (OSError, pa.ArrowException) as error:
        raise _unreadable(path, error) from error
    missing = [name for name in SCHEMA.names if name not in (*found, *ADDED)]
    if missing:
        raise DataError(
            f"{path}: want a file of trajectories that agentrl.train wrote; the columns {', '.join(missing)} are "
            f"missing. Perhaps another version wrote it (of the run: {_writer(path)}): use that version"
        )
    return found


def read_rows(path: Path, columns: Sequence[str] | None = None) -> Iterator[dict[str, Any]]:
    """Yield the rows of a file as `from_row` takes them, READ_ROWS at once; None: with all columns.

    Raises DataError where it cannot be read.
    """
    try:
        with pq.ParquetFile(path, pre_buffer=False) as file:
            for batch in file.iter_batches(READ_ROWS, columns=None if columns is None else list(columns)):
                yield from pa.Table.from_batches([batch]).to_pylist(maps_as_pydicts="strict")
    except (OSError, KeyError, ValueError, pa.ArrowException) as error:  # a map with a key twice, text that is no UTF-8
        raise _unreadable(path, error) from error


def trajectory_of(row: Mapping[str, Any], path: Path, number: int) -> Trajectory:
    """Rebuild the trajectory of a file's row. Raises DataError for a row of another version."""
    try:
        return from_row(dict(row))
    except (KeyError, TypeError, ValueError, IndexError, AttributeError) as error:
        raise DataError(
            f"{row_place(str(path), number)}: want a trajectory as agentrl.train records it, but it cannot be read "
            f"({type(error).__name__}: {first_line(error)}). Perhaps another version wrote it (of the run: "
            f"{_writer(path)}): use that version, or leave its step out (data.steps)"
        ) from error


def _unreadable(path: Path, error: Exception) -> DataError:
    return DataError(
        f"{path}: the recorded trajectories cannot be read ({first_line(error)}). Copy the file again from the run "
        f"(written by {_writer(path)}), or move it away. A run that goes on removes its oldest records: let it end "
        "first"
    )


def _writer(path: Path) -> str:
    return writer_of(path.parent.parent)


def to_row(trajectory: Trajectory, step: int, split: str, turn_reward_coef: float | None) -> dict[str, object]:
    """Values of SCHEMA's columns for one trajectory; see `write_trajectories`."""
    outline = trajectory.outline()
    return {
        "step": step,
        "split": split,
        "uid": _text(trajectory.uid),
        "group": trajectory.group,
        "data_source": _text(trajectory.data_source),
        "agent_name": _text(trajectory.agent_name),
        "status": trajectory.status.value,
        "failure": _text(trajectory.failure),
        "score": trajectory.score,
        "reward": None if turn_reward_coef is None else outline.reward(turn_reward_coef),
        "model_reward": None,
        "reward_parts": {} if turn_reward_coef is None else outline.reward_parts(turn_reward_coef),
        "turn_rewards": trajectory.turn_rewards,
        "num_turns": sum(turn.role == "assistant" for turn in trajectory.turns),
        "messages": [_message_row(message) for message in trajectory.messages],
        "turns": [turn_row(turn) for turn in trajectory.turns],
        "calls": [_call_row(index, call) for index, turn in enumerate(trajectory.turns) for call in turn.calls],
        **_transcript_columns(trajectory.transcripts),
        "score_extra": {valid_unicode(name): value for name, value in trajectory.score_extra.items()},
        "metrics": {valid_unicode(name): value for name, value in trajectory.metrics.items()},
        "baseline": trajectory.baseline,
        "attempt": trajectory.attempt,
        "ground_truth": _truth(trajectory.ground_truth),
        "failure_cause": _text(trajectory.failure_cause),
    }


def _transcript_columns(transcripts: Sequence[Transcript]) -> dict[str, object]:
    return {
        "prompt_length": [transcript.prompt_length for transcript in transcripts],
        "ids": [transcript.ids for transcript in transcripts],
        "mask": [transcript.mask for transcript in transcripts],
        "logprobs": [transcript.logprobs for transcript in transcripts],
        "versions": [
            [{"version": span.version, "start": span.start, "end": span.end} for span in transcript.versions]
            for transcript in transcripts
        ],
        "images": [
            [
                {
                    "start": one.start,
                    "tokens": one.image.tokens,
                    "grid": one.image.grid,
                    "digest": one.image.digest.hex(),
                }
                for one in transcript.images
            ]
            for transcript in transcripts
        ],
        "policy": [valid_unicode(transcript.policy) for transcript in transcripts],
        "role": [valid_unicode(transcript.role) for transcript in transcripts],
        "trained_to": [transcript.trained_to for transcript in transcripts],
        "transcript_score": [transcript.score for transcript in transcripts],
    }


def _message_row(message: Message) -> dict[str, object]:
    content = message.get("content")
    plain = content if isinstance(content, str) else None
    columns = ("role", "tool_calls") if plain is None else ("role", "tool_calls", "content")
    other = {key: value for key, value in message.items() if key not in columns}
    return {
        "role": _text(message["role"]),
        "content": _text(plain),
        "tool_calls": _json(message["tool_calls"]) if "tool_calls" in message else None,
        "other": _json(other) if other else None,
    }


def turn_row(turn: Turn) -> dict[str, object]:
    """Values of a turn in the column `turns`."""
    return {name: _plain(getattr(turn, name)) for name in _TURN_FIELDS}


def _call_row(turn: int, call: ToolCallRecord) -> dict[str, object]:
    arguments = None if call.arguments is None else _json(call.arguments)
    return {"turn": turn, "arguments": arguments, **{name: _plain(getattr(call, name)) for name in _CALL_FIELDS}}


def _plain(value: object) -> object:
    return valid_unicode(value) if isinstance(value, str) else value


def from_row(row: dict[str, Any]) -> Trajectory:
    """Rebuild the trajectory of a row of `to_row`, without its images, whose files `image_file` names."""
    turns = [Turn(**turn) for turn in row["turns"]]
    for call in row["calls"]:
        arguments = None if call["arguments"] is None else json.loads(call["arguments"])
        answer = ToolAnswer(call["response"], call["error"], call["reward"], call["seconds"], call["truncated"])
        turns[call["turn"]].calls.append(ToolCallRecord(call["name"], arguments, answer))
    return Trajectory(
        uid=row["uid"],
        group=row["group"],
        data_source=row["data_source"],
        agent_name=row["agent_name"],
        transcripts=[
            Transcript(
                *(ids, mask, logprobs, [VersionSpan(**span) for span in versions], prompt_length),
                policy=policy,
                role=role,
                trained_to=trained_to,
                score=score,
            )
            for ids, mask, logprobs, versions, prompt_length, policy, role, trained_to, score in zip(
                row["ids"],
                row["mask"],
                row["logprobs"],
                row["versions"],
                row["prompt_length"],
                row.get("policy", [POLICY] * len(row["ids"])),
                row.get("role", [""] * len(row["ids"])),
                row.get("trained_to", [None] * len(row["ids"])),
                row.get("transcript_score", [None] * len(row["ids"])),
                strict=True,
            )
        ],
        turns=turns,
        messages=[_message(message) for message in row["messages"]],
        status=Status(row["status"]),
        failure=row["failure"],
        failure_cause=row.get("failure_cause"),
        score=row["score"],
        score_extra=row["score_extra"],
        metrics=row["metrics"],
        baseline=row.get("baseline", False),
        attempt=row.get("attempt", 0),
        ground_truth=None if row.get("ground_truth") is None else json.loads(row["ground_truth"]),
    )


def image_places(row: dict[str, Any]) -> list[list[tuple[int, str]]]:
    """List, for each transcript of a row, the first token and the digest in hexadecimal of each of its images."""
    return [[(one["start"], one["digest"]) for one in images] for images in row["images"]]


def _message(row: dict[str, Any]) -> Message:
    message: Message = {"role": row["role"]}
    if row["content"] is not None:
        message["content"] = row["content"]
    message |= json.loads(row["other"]) if row["other"] else {}
    if row["tool_calls"] is not None:
        message["tool_calls"] = json.loads(row["tool_calls"])
    return message


def _json(value: object) -> str:
    return valid_unicode(json.dumps(value, ensure_ascii=False, default=str))


def _truth(value: object) -> str | None:
    if value is None or (isinstance(value, str) and len(value) > LONGEST_TRUTH):
        return None
    text = _json(value)
    return text if len(text) <= LONGEST_TRUTH else None


def _text(text: str | None) -> str | None:
    return None if text is None else valid_unicode(text)


def valid_unicode(text: str) -> str:
    """Make `text` encodable in UTF-8: join surrogate pairs, replace lone ones."""
    if text.isascii():
        return text
    return text.encode("utf-16-le", "surrogatepass").decode("utf-16-le", "replace")
