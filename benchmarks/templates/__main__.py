"""Counts the published chat templates that drive conversations with tools exactly.

    python -m benchmarks.templates [--package trl ...] [--folder FOLDER] [--out FILE] [--document]

Templates come from the packages themselves, which are fetched from the package index and pinned by their SHA-256.
Each template gets a small vocabulary with its control tokens, and `auto` chooses the format. Eleven kinds of
conversation are driven as a rollout does it: prompt, sampled turns that are read, the text between turns; then as
supervised training does it. Ids and masks are compared with transformers' own renders. Ends with status 1 where a
conversation becomes something else without an error, or where fewer templates are exact than the page says.
"""

from __future__ import annotations

import argparse
import json
import logging
import sys
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path

from benchmarks.marked import replace_text
from benchmarks.templates.drive import EXACT, REFUSED, TOOLLESS, WRONG, Driven, drive
from benchmarks.templates.packages import PACKAGES, read_templates

PROJECT = Path(__file__).resolve().parents[2]
FOLDER = PROJECT / "runs" / "templates"
PAGE = PROJECT / "docs" / "models.md"
MARK = "python -m benchmarks.templates"
FIRST, SECOND = ("llama-cpp-python",), ("trl", "axolotl", "vllm")
LEAST = {FIRST: 52, SECOND: 82}
"""By packages: how many templates have to drive conversations with tools."""


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog=MARK, description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    names = [package.name for package in PACKAGES]
    parser.add_argument("--package", action="append", choices=names, help="only this one; may be given again")
    parser.add_argument("--template", help="only templates whose names hold this text, with all details")
    parser.add_argument(
        "--folder", type=Path, default=FOLDER, help=f"of the packages' files ({FOLDER.relative_to(PROJECT)})"
    )
    parser.add_argument("--out", type=Path, help="a JSON file of all results")
    parser.add_argument("--document", action="store_true", help="write the table into docs/models.md")
    asked = parser.parse_args(arguments)
    logging.disable(logging.WARNING)  # transformers says for each vocabulary that it knows no model of it.
    results: dict[str, dict[str, Driven]] = {}
    seen: dict[bool, set[str]] = {True: set(), False: set()}
    for package in PACKAGES:
        if asked.package is None or package.name in asked.package:
            known = seen[package.name in FIRST]
            texts = {name: text.rstrip() for name, text in sorted(read_templates(package, asked.folder).items())}
            texts = {name: text for text, name in {text: name for name, text in texts.items()}.items()}
            texts = {name: text for name, text in texts.items() if text not in known}
            known.update(texts.values())
            results[package.name] = drive_all(texts, asked.template or "", print_all=asked.template is not None)
    if asked.out is not None:
        asked.out.write_text(
            json.dumps(
                {
                    package: {name: {"result": one.result, **asdict(one)} for name, one in of.items()}
                    for package, of in results.items()
                },
                indent=1,
            )
        )
    if asked.template is not None:
        return 0
    print(table(results))
    if asked.document:
        replace_text(PAGE, MARK, table(results))
    return 1 if failures(results) else 0


def drive_all(texts: Mapping[str, str], part: str, *, print_all: bool) -> dict[str, Driven]:
    """Drive the templates whose names hold `part`."""
    driven: dict[str, Driven] = {}
    for name, text in texts.items():
        if part not in name:
            continue
        driven[name] = one = drive(text)
        print(f"{name}: {one.result} ({one.format or 'no format'})", flush=True)
        if print_all:
            print(f"  refused: {one.refused}")
            print(*(f"  {kind}: {outcome} {why}" for kind, (outcome, why) in one.kinds.items()), sep="\n")
            print(*(f"  remark: {remark}" for remark in one.remarks), sep="\n")
    return driven


def failures(results: Mapping[str, Mapping[str, Driven]]) -> list[str]:
    """Name and print what does not hold."""
    found = [
        f"{package}, {name}: {kind}: {why}"
        for package, of in results.items()
        for name, one in of.items()
        for kind, (outcome, why) in one.kinds.items()
        if outcome == WRONG
    ]
    for packages, least in LEAST.items():
        if all(package in results for package in packages):
            count = sum(
                one.result not in (REFUSED, TOOLLESS, WRONG)
                for package in packages
                for one in results[package].values()
            )
            if count < least:
                found.append(
                    f"{', '.join(packages)}: {count} templates drive conversations with tools, expected {least}"
                )
    for line in found:
        print(f"error: {line}", file=sys.stderr)
    return found


def table(results: Mapping[str, Mapping[str, Driven]]) -> str:
    """A Markdown table of how many templates came to what."""
    lines = [
        "| package | templates | exact | exact, but for named kinds | without tools | refused | silently wrong |",
        "|---|---|---|---|---|---|---|",
    ]
    for package, of in results.items():
        count = Counter(one.result for one in of.values())
        lines.append(
            f"| {package} | {len(of)} | {count[EXACT]} | {count['exact, but']} | {count[TOOLLESS]} | {count[REFUSED]} "
            f"| {count[WRONG]} |"
        )
    return "\n".join(lines)


if __name__ == "__main__":
    sys.exit(main())
