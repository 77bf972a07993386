"""Scores of responses in a parquet file, by data source, for `python -m agentrl.evaluate`.

The scorers of training score the rows. As many run at once as reward_model.max_concurrent lets them. With `ray_init.*`
Ray's processes score chunks of rows, each with scorers of its own.
"""

from __future__ import annotations

import asyncio
import json
import sys
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path

from rich.console import Console
from rich.table import Table
from rich.text import Text

from agentrl.config.sections.offline import EvaluateConfig
from agentrl.data.sources import expand
from agentrl.errors import DataError
from agentrl.observe.display import Display, note_of_files
from agentrl.observe.excerpt import visible
from agentrl.offline.responses import check_folder
from agentrl.offline.scores import RUN, ResponseFiles, Responses, Scores, check_rows, check_sources, score_chunk
from agentrl.reward import RewardManager, make_reward_manager
from agentrl.reward.prompt_scores import PromptScores
from agentrl.system.json_value import JSON
from agentrl.system.publish import published

ALL = "all"
"""The table's last line, and the JSON's second part."""
SHOWN_CAUSES = 5
CAUSES = 100
"""Different causes of failures that are told apart; the rest count as one."""
CAUSE_LENGTH = 300


@dataclass(slots=True)
class Summary:
    """Running totals of one data source. A row of which a response failed is judged by the others."""

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


def evaluate(config: EvaluateConfig, display: Display) -> dict[str, Summary]:
    """Score all rows. Returns the numbers by data source, and under `all` the numbers of all rows. Raises UserError."""
    if config.data.output_path is not None:
        check_folder(Path(config.data.output_path))
    rows = ResponseFiles(expand(config.data.path), config)
    note_of_files(display, rows.notes)
    reward = make_reward_manager(config.reward_model, config.custom_reward_function)
    check_sources(reward, rows.sources)

    def summary() -> Summary:
        return Summary(PromptScores(config.reward_model.success_threshold))

    everything, by_source = summary(), dict[str, Summary]()
    with display.stage("score", total=rows.rows) as stage:
        for scores in score_all((check_rows(chunk, reward) for chunk in rows), reward, config):
            for row in scores:
                everything.add(row)
                by_source.setdefault(row.data_source, summary()).add(row)
            stage.advance(len(scores), failures=everything.failures)
    for cause, count in everything.causes.most_common(SHOWN_CAUSES):
        display.warn(f"{count} responses have no score: {cause}")
    if everything.failures == everything.responses:
        raise DataError(f"no response could be scored: {everything.causes.most_common(1)[0][0]}")
    summaries = {source: by_source[source] for source in sorted(by_source)} | {ALL: everything}
    if config.data.output_path is not None:
        write(Path(config.data.output_path), summaries)
        display.note(f"{config.data.output_path}: the numbers of the table")
    return summaries


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


def write(path: Path, summaries: Mapping[str, Summary]) -> None:
    """Write all numbers as JSON, whole or not at all. Raises TrainingError on a full disk."""
    numbers = {source: summary.numbers() for source, summary in summaries.items() if source != ALL}
    with published(path) as temporary:
        text = json.dumps({"sources": numbers, ALL: summaries[ALL].numbers()}, indent=2, ensure_ascii=False)
        temporary.write_text(text + "\n", encoding="utf-8")


def print_table(summaries: Mapping[str, Summary]) -> None:
    """Print the numbers to stdout. Where that is no terminal, lines are as long as they are."""
    console = Console() if sys.stdout.isatty() else Console(width=1000)
    console.print(table_of(summaries))
