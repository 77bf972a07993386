"""A suite on a model: its tasks as rows, responses, scores, a report."""

from __future__ import annotations

import argparse
import hashlib
import json
import sys
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
from rich.console import Console
from rich.table import Table

import agentrl
from agentrl.config import load_config
from agentrl.config.registries import SUITES
from agentrl.config.sections.offline import EvaluateConfig, EvaluateDataConfig, GenerateConfig
from agentrl.data.sources import expand
from agentrl.errors import ConfigError, DataError
from agentrl.observe.display import Display
from agentrl.observe.open import open_display
from agentrl.offline.decisive import decisive
from agentrl.offline.evaluate import score_here
from agentrl.offline.generate import IDLE, generate
from agentrl.offline.scores import ResponseFiles, Responses, check_rows, check_sources
from agentrl.reward import make_reward_manager
from agentrl.suites import report
from agentrl.suites.contract import SETTINGS, Request, Row, Suite, Tasks
from agentrl.system.json_value import JSON, as_mapping, as_object
from agentrl.system.publish import published

ROWS, RESPONSES, MADE = "tasks.parquet", "responses.parquet", "run.json"
TAKEN = ("data.path", "data.output_path", "data.output_trajectories", "data.prompt_key")
"""Keys that a suite sets itself."""


def main(argv: Sequence[str]) -> None:
    """Run a suite, or compare two runs, as a command line says. Raises UserError."""
    parser = argparse.ArgumentParser(
        prog="python -m agentrl.evaluate", usage="--suite NAME --out FOLDER [key=value ...] | --compare FOLDER FOLDER"
    )
    parser.add_argument("--suite", help=f"one of {', '.join(SUITES.names())}, or path/to/file.py:OBJECT")
    parser.add_argument("--out", type=Path, help="folder of tasks, responses, scores and report")
    parser.add_argument("--parts", default="", help="parts of the suite, with commas between them")
    parser.add_argument("--limit", type=int, help="use only the first so many tasks of each part")
    parser.add_argument("--source", type=Path, help="a file or folder with the suite's data, see docs/evaluate.md")
    parser.add_argument("--compare", type=Path, nargs=2, metavar="FOLDER", help="two folders of --out")
    parser.add_argument("overrides", nargs="*", help="keys of agentrl.generate, e.g. model.path=MODEL")
    given = parser.parse_intermixed_args(argv)
    if given.compare is not None:
        if given.suite or given.overrides:
            parser.error("--compare reads two reports, and takes neither --suite nor keys")
        print_table(("part", "tasks", *map(str, given.compare), "difference", "95 %"), report.compare(*given.compare))
        return
    if given.out is None or (given.limit is not None and given.limit < 1):
        parser.error("--suite needs --out FOLDER, and --limit, where it is given, a number of at least 1")
    parts = tuple(filter(None, given.parts.split(",")))
    with open_display(f"evaluate · {given.suite}") as display:
        numbers = run(given.suite, Request(parts, given.limit, given.source), given.out, given.overrides, display)
    print_table(("part", "scored", "mean", "95 %"), report.rows_of(numbers))


def run(name: str, request: Request, out: Path, overrides: Sequence[str], display: Display) -> dict[str, report.Number]:
    """Do the whole job in the folder `out`, and return the numbers. Responses that are there are not made again."""
    suite = SUITES.get(name)
    if not isinstance(suite, Suite):
        raise ConfigError(f"--suite: expected a Suite (agentrl.suites.contract), {name} is {suite!r:.200}")
    config = config_of(suite, out, overrides)
    tasks = suite.tasks(request)
    if not tasks.rows:
        raise DataError(f"--suite {name}: there is no task; name other --parts, or a --source with tasks")
    told = describe(name, tasks, config)
    check_same(out, told)
    responses = Path(config.data.output_path)
    if responses.exists():
        display.note(f"{responses}: the responses are there, and are scored")
    else:
        write_rows(out / ROWS, tasks.rows)
        generate(config, display)
    scored = score(suite, config, responses, tasks, display)
    wanted = Counter(row.part for row in tasks.rows)
    numbers = report.numbers_of(suite, scored, wanted)
    report.write(out, {**told, "numbers": {name: asdict(one) for name, one in numbers.items()}}, scored)
    if lacking := len(tasks.rows) - sum(one.score is not None for one in scored):
        display.warn(f"{lacking} of {len(tasks.rows)} tasks have no score, and count in no mean")
    display.note(f"{out / report.REPORT}: numbers, versions and settings; {out / report.SCORES}: each task's score")
    return numbers


def config_of(suite: Suite, out: Path, overrides: Sequence[str]) -> GenerateConfig:
    """Load the config of the generation; keys that are given replace the suite's. Raises ConfigError."""
    names = [GenerateConfig.short_keys.get(one.partition("=")[0], one.partition("=")[0]) for one in overrides]
    for short, long in GenerateConfig.short_keys.items():
        names = [
            f"{long}{one.removeprefix(short)}" if short.endswith(".") and one.startswith(short) else one
            for one in names
        ]
    if taken := [one for one in names if one in TAKEN]:
        raise ConfigError(f"{taken[0]}: a suite sets this key itself; leave it out")
    settings = {key: value for key, value in (dict(SETTINGS) | dict(suite.settings)).items() if key not in names}
    values = [f"{key}={json.dumps(value)}" for key, value in settings.items()]
    own = [f"data.path={out / ROWS}", f"data.output_path={out / RESPONSES}", "data.output_trajectories=true"]
    return load_config([*values, *overrides, *own], "generate", GenerateConfig)


def describe(name: str, tasks: Tasks, config: GenerateConfig) -> dict[str, JSON]:
    """Return all that the responses and their scores follow from."""
    digest = hashlib.sha256(json.dumps([asdict(row) for row in tasks.rows], sort_keys=True).encode())
    return {
        "suite": name,
        "version": tasks.version,
        "tasks": digest.hexdigest(),
        "agentrl": agentrl.__version__,
        "settings": decisive(config, IDLE),
    }


def check_same(out: Path, told: Mapping[str, JSON]) -> None:
    """Write the description of the run into its folder. Raises DataError where another run was begun there."""
    path = out / MADE
    if not path.exists():
        with published(path) as temporary:
            temporary.write_text(json.dumps(told, indent=2) + "\n", encoding="utf-8")
        return
    try:
        before = as_mapping(json.loads(path.read_text(encoding="utf-8")))
    except (OSError, ValueError, TypeError) as error:
        raise DataError(f"{path} cannot be read ({error}); name another --out") from error
    flat_before, flat_now = ({**one, **as_object(one.get("settings"))} for one in (before, told))
    for key in sorted({*flat_before, *flat_now} - {"settings", "agentrl"}):
        if flat_before.get(key) != flat_now.get(key):
            raise DataError(
                f"{out} holds a run with {key}={flat_before.get(key)}, and now it is {flat_now.get(key)}; set it back "
                "to continue, or name another --out"
            )


def write_rows(path: Path, rows: Sequence[Row]) -> None:
    """Write tasks as rows of a data set. Raises TrainingError on a full disk."""
    table = [
        {
            "prompt": [{"role": "user", "content": row.question}] if isinstance(row.question, str) else row.question,
            "data_source": row.data_source,
            "agent_name": row.agent_name,
            "reward_model": {"ground_truth": row.ground_truth},
            "extra_info": {"part": row.part, "id": row.id, "tools": row.tools},
        }
        for row in rows
    ]
    with published(path) as temporary:
        pq.write_table(pa.Table.from_pylist(table), temporary)


def score(suite: Suite, config: GenerateConfig, responses: Path, tasks: Tasks, display: Display) -> list[report.Scored]:
    """Score the responses by the scorers of their data sources."""
    keys = EvaluateConfig(
        data=EvaluateDataConfig(path=str(responses)),
        reward_model=config.reward_model,
        custom_reward_function=config.custom_reward_function,
    )
    files = ResponseFiles(expand(keys.data.path), keys)
    reward = make_reward_manager(keys.reward_model, keys.custom_reward_function)
    check_sources(reward, files.sources)
    found: list[report.Scored] = []
    names: list[tuple[str, str]] = []

    def chunks() -> Iterator[list[Responses]]:
        for chunk in files:
            names.extend((str(one.sample.extra_info["part"]), str(one.sample.extra_info["id"])) for one in chunk)
            yield check_rows(chunk, reward)

    with display.stage("score", total=len(tasks.rows)) as stage:
        for scores in score_here(chunks(), reward, count=False):
            for one in scores:
                part, name = names[len(found)]
                numbers = [number for number in one.scores if number is not None]
                if suite.measure == "success":
                    numbers = [float(number >= 1) for number in numbers]
                found.append(report.Scored(part, name, sum(numbers) / len(numbers) if numbers else None))
            stage.advance(len(scores))
    return found


def print_table(head: Sequence[str], lines: Iterable[Sequence[str]]) -> None:
    """Print a table to stdout. Where that is no terminal, lines are as long as they are."""
    table = Table(head[0], box=None, header_style="bold", pad_edge=False)
    for name in head[1:]:
        table.add_column(name, justify="right")
    for line in lines:
        table.add_row(*line)
    console = Console() if sys.stdout.isatty() else Console(width=1000)
    console.print(table)
