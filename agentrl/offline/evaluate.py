"""Scores of responses in files or of a run, by data source, for `python -m agentrl.evaluate`.

The scorers of training score the rows. As many run at once as reward_model.max_concurrent lets them. With `ray_init.*`
Ray's processes score chunks of rows, each with scorers of its own.
"""

from __future__ import annotations

import asyncio
import itertools
import json
import sys
from collections import Counter, deque
from collections.abc import Iterable, Iterator, Mapping
from contextlib import nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from typing import TypeVar, cast

from rich.console import Console
from rich.table import Table
from rich.text import Text

from agentrl.config.sections.offline import EvaluateConfig, EvaluateDataConfig
from agentrl.data.sources import expand
from agentrl.errors import ConfigError, DataError, TrainingError
from agentrl.observe.display import Display, note_of_files
from agentrl.offline.comparison import Comparison, Differences
from agentrl.offline.recorded import RunRecords, run_folder
from agentrl.offline.responses import check_folder
from agentrl.offline.score_file import ScoreFile
from agentrl.offline.scores import (
    RUN,
    ResponseFiles,
    ResponseRows,
    Responses,
    Scores,
    check_rows,
    check_sources,
    score_chunk,
)
from agentrl.reward import RewardManager, make_reward_manager
from agentrl.reward.prompt_scores import PromptScores
from agentrl.system.json_value import JSON
from agentrl.system.publish import published
from agentrl.system.visible import visible

T = TypeVar("T")
ALL = "all"
"""The table's last line, and the JSON's second part."""
SHOWN_CAUSES = 5
CAUSES = 100
"""Different causes of failures that are told apart; the rest count as one."""
CAUSE_LENGTH = 300
SHOWN_DIFFERENT = 5
"""Responses whose scores differ most that are shown; the JSON has more."""
OF_RUNS = ("steps", "split")
OF_FILES = ("prompt_key", "response_key", "data_source_key", "reward_model_key")
"""Keys of `data` that are read where `data.path` names a run's folder, and where it names files."""
DOWN = 32
"""Answered responses of a chunk from which on a scorer that scores none of them is taken to be down."""


@dataclass(slots=True)
class Summary:
    """Running totals of one data source. A row with a failed response is judged by its other responses."""

    scores: PromptScores
    rows: int = 0
    responses: int = 0
    failures: int = 0
    causes: Counter[str] = field(default_factory=Counter)

    def add(self, row: Scores) -> None:
        """Count one row."""
        self.rows += 1
        self.responses += len(row.scores)
        self.failures += len(row.failures)
        self.scores.add(row.scores, row.extras)
        for cause in row.failures:
            cause = cause[:CAUSE_LENGTH]
            self.causes[cause if cause in self.causes or len(self.causes) < CAUSES else "other causes"] += 1

    def numbers(self) -> dict[str, JSON]:
        """Return the numbers as JSON values. Mean, best@n, pass@k and scorers' further numbers are means over rows."""
        scores = self.scores
        return {
            "rows": self.rows,
            "responses": self.responses,
            "failures": self.failures,
            "mean": scores.mean.value,
            f"best@{scores.most}": scores.best_of_all,
            **scores.pass_at(),
            "extra": {name: mean.value for name, mean in sorted(scores.extras.items())},
            "causes": dict(self.causes.most_common()),
        }


@dataclass(slots=True)
class Evaluation:
    """The numbers of all rows. Names of `sources` and `compared` are data sources, and `all`."""

    sources: dict[str, Summary]
    compared: dict[str, Comparison]
    """Comparison with earlier scores; empty where no response has one."""
    different: Differences


def evaluate(config: EvaluateConfig, display: Display) -> Evaluation:
    """Score all rows. Raises UserError."""
    if config.data.output_path is not None:
        check_folder(Path(config.data.output_path))
    run = run_folder(config.data.path)
    check_keys(config.data, run)
    rows = ResponseFiles(expand(config.data.path), config) if run is None else RunRecords(run, config.data)
    note_of_files(display, rows.notes)
    reward = make_reward_manager(config.reward_model, config.custom_reward_function)
    check_sources(reward, rows.sources)
    with nullcontext() if config.data.scores_path is None else ScoreFile(config) as file:
        if file is not None and file.known:
            display.note(f"{config.data.scores_path}.parts: {file.known} responses are scored already")
        threshold = config.reward_model.success_threshold
        everything, by_source, different = Summary(PromptScores(threshold)), dict[str, Summary](), Differences()
        compared, compared_by_source = Comparison(threshold), dict[str, Comparison]()
        with display.stage("score", total=rows.rows) as stage:
            for chunk, scores in score_rows(rows, reward, config, file):
                for row, its in zip(chunk, scores, strict=True):
                    source = its.data_source
                    everything.add(its)
                    by_source.setdefault(source, Summary(PromptScores(threshold))).add(its)
                    compared.add(row, its)
                    compared_by_source.setdefault(source, Comparison(threshold)).add(row, its)
                    different.add(row, its)
                stage.advance(len(scores), failures=everything.failures)
        for cause, count in everything.causes.most_common(SHOWN_CAUSES):
            display.warn(f"{count} responses have no score: {cause}")
        if everything.failures == everything.responses:
            if file is not None:
                file.discard()
            raise DataError(f"no response could be scored: {everything.causes.most_common(1)[0][0]}")
        found = Evaluation(_sorted(by_source, everything), {}, different)
        if compared.first:
            found.compared = _sorted(compared_by_source, compared)
        elif run is not None:
            display.warn(f"{run}: no response has both an earlier score and this one, so nothing is compared")
        if file is not None:
            display.note(f"{file.publish()}: the score of each response")
        if config.data.output_path is not None:
            write(Path(config.data.output_path), found, run)
            display.note(f"{config.data.output_path}: the numbers of the table")
        return found


def check_keys(keys: EvaluateDataConfig, run: Path | None) -> None:
    """Raise ConfigError for a key that does nothing to such data: files have no steps, and a run no columns."""
    names, what = (OF_RUNS, "files") if run is None else (OF_FILES, f"the run {run}")
    for name in names:
        if (value := getattr(keys, name)) != EvaluateDataConfig.model_fields[name].default:
            raise ConfigError(f"data.{name}={value} has no effect: data.path names {what}. Leave data.{name} out")


def _sorted(by_source: Mapping[str, T], everything: T) -> dict[str, T]:
    return {source: by_source[source] for source in sorted(by_source)} | {ALL: everything}


def score_rows(
    rows: ResponseRows, reward: RewardManager, config: EvaluateConfig, file: ScoreFile | None
) -> Iterator[tuple[list[Responses], list[Scores]]]:
    """Yield chunks with their scores, which a file may have already; it takes the others.

    Raises TrainingError for a scorer that scores no response any more; the file keeps the scores before.
    """
    chunks, waiting = iter(rows), deque[list[Responses]]()
    while file is not None and file.left:
        chunk = next(chunks, [])
        yield chunk, file.take(chunk)
    if (first := next(chunks, None)) is None:
        return

    def checked() -> Iterator[list[Responses]]:
        for chunk in itertools.chain([first], chunks):
            waiting.append(chunk)
            yield check_rows(chunk, reward)

    for scores in score_all(checked(), reward, config):
        chunk = waiting.popleft()
        if file is not None:
            _check_up(chunk, scores)
            file.add(chunk, scores)
        yield chunk, scores


def _check_up(chunk: list[Responses], scores: list[Scores]) -> None:
    answered = sum(text is not None for row in chunk for text in row.texts)
    if answered >= DOWN and all(score is None for one in scores for score in one.scores):
        cause = Counter(failure for one in scores for failure in one.failures).most_common(1)[0][0]
        raise TrainingError(
            f"the scorer scored none of {answered} responses from {chunk[0].sample.place} on: {cause}\n"
            "The scores before are kept: mend it, and the same command continues"
        )


def score_all(
    chunks: Iterator[list[Responses]], reward: RewardManager, config: EvaluateConfig
) -> Iterator[list[Scores]]:
    """Here, or with Ray where it is asked for."""
    if config.ray_init.address is None and config.ray_init.num_cpus is None:
        return score_here(chunks, reward, count=config.data.on_code_error == "count")
    from agentrl.offline.on_ray import score_with_ray

    return score_with_ray(chunks, config)


def score_here(chunks: Iterable[list[Responses]], reward: RewardManager, *, count: bool) -> Iterator[list[Scores]]:
    """In this process. Raises ConfigError when the sandbox does not answer."""
    with asyncio.Runner() as runner:
        try:
            runner.run(reward.start(RUN))
            for chunk in chunks:
                yield runner.run(score_chunk(chunk, reward, count=count))
        finally:
            runner.run(reward.close())


def table_of(summaries: Mapping[str, Summary]) -> Table:
    """One line a data source, and one for all where there are several."""
    shown = {source: summary.numbers() for source, summary in summaries.items() if source != ALL or len(summaries) > 2}
    ends = ("extra", "causes")
    names = dict.fromkeys(name for numbers in shown.values() for name in numbers if name not in ends)
    columns = sorted(names, key=lambda name: name.startswith("pass@"))  # rows with fewer responses have fewer of them
    table = Table("data source", box=None, header_style="bold", pad_edge=False)
    for name in columns:
        table.add_column(name, justify="right")
    for source, numbers in shown.items():
        cells = [numbers.get(name) for name in columns]
        texts = (
            f"{one:,}" if isinstance(one, int) else f"{one:.4f}" if isinstance(one, float) else "-" for one in cells
        )
        table.add_row(Text(visible(source)), *map(Text, texts))
    return table


def comparison_table(compared: Mapping[str, Comparison]) -> Table:
    """Make a table of two scores: a line a data source, and one for all where there are several."""
    table = Table("data source", box=None, header_style="bold", pad_edge=False)
    for name in ("both", "first", "second", "difference", "95 %", "agree", "ranks", "in groups"):
        table.add_column(name, justify="right")
    for name in ("signal first", "second", "sign changed"):
        table.add_column(name, justify="right")
    for source, one in compared.items():
        if source == ALL and len(compared) == 2:
            continue
        found = one.numbers()
        low, high = cast(list[float | None], found["interval"])
        table.add_row(
            Text(visible(source)),
            f"{found['responses']:,}",
            *(_decimal(found[name]) for name in ("mean_first", "mean_second")),
            _decimal(found["mean_difference"], "+.4f"),
            "-" if low is None or high is None else f"{low:+.4f} to {high:+.4f}",
            *(_decimal(found[name]) for name in ("agreement", "rank_correlation", "tau_within_groups")),
            *(_decimal(found[name]) for name in ("signal_first", "signal_second", "sign_changed")),
        )
    return table


def _decimal(value: JSON, form: str = ".4f") -> str:
    return format(value, form) if isinstance(value, float) else "-"


def write(path: Path, found: Evaluation, run: Path | None) -> None:
    """Write all numbers as JSON, whole or not at all. Raises TrainingError on a full disk."""
    written: dict[str, JSON] = _parts_of({source: one.numbers() for source, one in found.sources.items()})
    if found.compared:
        viewer = None if run is None else f"python -m agentrl.view {run}"
        written["comparison"] = {
            **_parts_of({source: one.numbers() for source, one in found.compared.items()}),
            "viewer": viewer,
            "different": [one.as_json() for one in found.different],
        }
    with published(path) as temporary:
        temporary.write_text(json.dumps(written, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")


def _parts_of(numbers: Mapping[str, JSON]) -> dict[str, JSON]:
    return {"sources": {source: one for source, one in numbers.items() if source != ALL}, ALL: numbers[ALL]}


def print_tables(found: Evaluation) -> None:
    """Print the numbers to stdout. Where that is no terminal, lines are as long as they are."""
    console = Console() if sys.stdout.isatty() else Console(width=1000)
    console.print(table_of(found.sources))
    if not found.compared:
        return
    console.print()
    console.print(comparison_table(found.compared))
    for one in itertools.islice(found.different, SHOWN_DIFFERENT):
        console.print(Text(f"{visible(one.earlier.uid)}: {one.earlier.score:g}, now {one.score:g}"))
