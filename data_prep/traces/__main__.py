"""Write the logs of a model's calls as conversations: `python -m data_prep.traces --source LOGS --out DIR`."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import cast

from agentrl.data.messages import Unfit
from agentrl.errors import DataError, UserError
from agentrl.system.json_value import JSON
from agentrl.system.visible import complain, visible
from agentrl.tool import ToolSchema
from data_prep.conversation_formats import tools_of
from data_prep.files import fill_parquet, writing
from data_prep.traces.collection import SCHEMA, Traces, quiet
from data_prep.traces.scrub import Rules, Scrubber, read_rules

NAMES = (".jsonl", ".json", ".ndjson", ".log", ".txt")
GROUP = 256
"""Rows that are written at once."""


def files_of(sources: Sequence[Path]) -> tuple[list[Path], list[Path]]:
    """List the files of a log, and those that are passed over.

    All files below a folder are read whose names are a log's. Raises DataError.
    """
    found, passed = list[Path](), list[Path]()
    for source in sources:
        if source.is_dir():
            below = sorted(path for path in source.rglob("*") if path.is_file())
            inside = [path for path in below if path.name.lower().removesuffix(".gz").endswith(NAMES)]
            if not inside:
                raise DataError(f"{source}: expected files that end in {', '.join(NAMES)} (or .gz), found none")
            found += inside
            passed += sorted({*below} - {*inside})
        else:
            found.append(source)
    return found, passed


def read_tools(path: Path) -> list[ToolSchema]:
    """Read a list of tools. Raises DataError."""
    try:
        return tools_of(json.loads(path.read_text(encoding="utf-8")))
    except (OSError, ValueError, RecursionError, Unfit) as error:
        raise DataError(f"{path}: expected a JSON list of tools ({error}); --tools names one") from None


def write(traces: Traces, out: Path, share: float) -> list[tuple[Path, int]]:
    """Write all files, or none: (each with its number of rows). Raises DataError."""
    kept, held = traces.split(share)
    parts = [(out / "conversations.parquet", kept), *([(out / "held_out.parquet", held)] if share else [])]
    written = list[tuple[Path, int]]()
    with ExitStack() as stack:
        temporary = {path: stack.enter_context(writing(path)) for path, _ in parts}
        report = stack.enter_context(writing(out / "report.json"))
        for path, sessions in parts:
            count = fill_parquet(temporary[path], traces.rows_of(sessions), SCHEMA, GROUP)
            if not count:
                raise DataError(f"{path}: there are no rows to write; the reasons stand below")
            written.append((path, count))
        report.write_text(json.dumps(traces.report(), ensure_ascii=False, indent=1) + "\n", encoding="utf-8")
    return written


def tell(traces: Traces) -> None:
    """Print what became of each record."""
    report = traces.report()
    calls = ", ".join(f"{count} {form}" for form, count in traces.read.items()) or "no"
    print(
        f"read: {traces.records} records: {traces.used} used, {traces.votes_alone} of feedback alone, "
        f"{traces.skipped.total} skipped, {traces.dropped.total} dropped; {sum(traces.read.values())} calls ({calls})"
    )
    print(
        f"joined: {report['sessions']} sessions with {report['branches']} branches, "
        f"{report['repeated_calls']} calls repeat an earlier one"
    )
    for why, count in traces.joined.by.items():
        print(f"joined by {why}: {count} calls")
    said = cast(dict[str, JSON], report["feedback"])
    if said["found"]:
        print(
            f"feedback: {said['found']} found; of the branches {said['positive']} above 0, {said['zero']} at 0, "
            f"{said['negative']} below 0, {said['comments']} with a comment"
        )
    for head, found in (
        ("feedback not used", traces.told_votes()),
        ("skipped", traces.skipped),
        ("dropped", traces.dropped),
        ("left out", traces.left_out),
    ):
        for line in found.lines(head):
            print(line)
    for name, taken in cast(dict[str, dict[str, JSON]], report["scrubbed"]).items():
        first = f"first in the conversation that begins at {taken['first']}"
        print(visible(f"scrubbed: {name} {taken['count']} times, {first}"))
    for name, number in cast(dict[str, JSON], report["not_read"]).items():
        print(visible(f"not read: {name}, in {number} calls"))
    sys.stdout.flush()


def share_of(text: str) -> float:
    """Parse a share of the sessions."""
    value = float(text)
    if not 0 < value < 1:
        raise argparse.ArgumentTypeError(f"expected a number between 0 and 1, found {text}")
    return value


def main(arguments: list[str] | None = None) -> int:
    """Write the files and return the exit status."""
    parser = argparse.ArgumentParser(prog="python -m data_prep.traces", description=(__doc__ or "").splitlines()[0])
    parser.add_argument(
        "--source",
        type=Path,
        nargs="+",
        required=True,
        help="files of JSON lines or arrays, may be gzipped; or folders",
    )
    parser.add_argument("--out", type=Path, required=True, help="directory to write conversations.parquet to")
    parser.add_argument("--held-out", type=share_of, default=0.0, help="share of sessions for held_out.parquet")
    parser.add_argument(
        "--scrub", type=Path, help="YAML with rules for secrets: disable, enable, secrets, patterns, keep"
    )
    parser.add_argument("--score", action="append", default=[], help="name of scores that are feedback; may come again")
    parser.add_argument("--tools", type=Path, help="JSON list of the tools of spans that do not say which they had")
    parser.add_argument("--strict", action="store_true", help="refuse a log with a bad record, naming the first")
    given = parser.parse_args(arguments)
    traces = Traces(Scrubber(), given.strict, [name.lower() for name in given.score])
    status = 0
    try:
        traces.scrubber.rules = Rules() if given.scrub is None else read_rules(given.scrub)
        traces.reader.tools = read_tools(given.tools) if given.tools else ()
        files, passed = files_of(given.source)
        if passed:
            print(f"passed over: {len(passed)} files whose names are no log's, the first {passed[0]}")
        traces.take(files)
        if not traces.records:
            raise DataError(f"{files[0]}: there is no record in it{' or the other files' if files[1:] else ''}")
        traces.join()
        for path, count in write(traces, given.out, given.held_out):
            print(f"{path}: {count} conversations")
    except UserError as error:
        status = complain(quiet(traces.scrubber).text(str(error)))
    if traces.records:
        tell(traces)
    return status


if __name__ == "__main__":
    sys.exit(main())
