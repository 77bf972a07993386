"""Prompts and responses as text, of the files in `trajectories/`: for tables in loggers, and for files of text."""

from __future__ import annotations

import itertools
import json
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from agentrl.system.publish import published
from agentrl.trajectory.parquet import read_rows

_COLUMNS = ["step", "uid", "data_source", "agent_name", "status", "score", "reward", "prompt_length", "ids"]


@dataclass(frozen=True, slots=True)
class Generation:
    """A trajectory as text: the model's first input, and everything after it, tool answers included."""

    step: int
    uid: str
    data_source: str
    agent_name: str
    status: str
    input: str
    output: str
    score: float | None
    reward: float | None

    def as_text(self) -> str:
        """Write all of it as one text."""
        return f"{self.input}\n----\n{self.output}\n----\nscore {self.score}, {self.status}"


def generations(files: Sequence[Path], decode: Callable[[list[int]], str]) -> Iterator[Generation]:
    """Read the trajectories of the files, in order. One without a transcript has no texts.

    Where there are several transcripts, each begins with its own prompt, after a line of its own.
    """
    for file in files:
        for row in read_rows(file, _COLUMNS):
            ids, lengths = row.pop("ids"), row.pop("prompt_length")
            parts = [(decode(one[:length]), decode(one[length:])) for one, length in zip(ids, lengths, strict=True)]
            first = parts[0] if parts else ("", "")
            later = "".join(f"\n---- context window {n} ----\n{a}{b}" for n, (a, b) in enumerate(parts[1:], 2))
            yield Generation(**row, input=first[0], output=first[1] + later)


def some(files: Sequence[Path], decode: Callable[[list[int]], str], count: int) -> list[Generation]:
    """Read the first `count` trajectories."""
    return list(itertools.islice(generations(files, decode), count))


def write_texts(files: Sequence[Path], decode: Callable[[list[int]], str], out: Path) -> None:
    """Write a JSON object a line for each trajectory of the files, whole or not at all.

    In addition to the fields of `Generation`, which keep their names, it has `gts`, the row's ground truth, and the
    scorer's further numbers. Where a reward model scored, `score` is the reward, which includes its score.
    """
    with published(out) as partial, partial.open("w", encoding="utf-8") as lines:
        for file in files:
            rows = read_rows(file, ["score_extra", "ground_truth", "model_reward"])
            for one, more in zip(generations([file], decode), rows, strict=True):
                truth = None if more["ground_truth"] is None else json.loads(more["ground_truth"])
                line = {**(more["score_extra"] or {}), **asdict(one), "gts": truth}
                if more["model_reward"] is not None:
                    line["score"] = one.reward
                lines.write(json.dumps(line, ensure_ascii=False) + "\n")
