"""Names that a user sees: keys with their defaults, metrics, and columns of the records."""

from __future__ import annotations

import ast
import json
import re
from collections.abc import Iterator
from pathlib import Path

from agentrl.system.json_value import JSON, as_list, as_object
from benchmarks.commits.compare import Aliases, differences
from benchmarks.commits.sides import Side

ROW = re.compile(r"^\| `([^`]+)` \| (.*?) \| (.*?) \|", re.MULTILINE)
COMMAND = re.compile(r"^## `python -m agentrl\.(\w+)", re.MULTILINE)
METRIC = re.compile(r"[a-z_]+/[a-z0-9_/]+")


def keys(tree: Path) -> dict[str, JSON]:
    """Read keys, types and defaults by command of docs/config.md, which a test holds to the schema."""
    parts = COMMAND.split((tree / "docs" / "config.md").read_text(encoding="utf-8"))
    found: dict[str, JSON] = {}
    for command, text in zip(parts[1::2], parts[2::2], strict=True):
        found |= {f"{command}: {key}": [kind, default] for key, kind, default in ROW.findall(text)}
    if len(found) < 100:
        raise RuntimeError(f"{tree}/docs/config.md: expected a table of keys by command, found {len(found)} keys")
    return found


def written_metrics(tree: Path, groups: set[str]) -> dict[str, JSON]:
    """Find the names of metrics that stand in the code as they are logged, of groups such as `actor`."""
    found: dict[str, JSON] = {}
    for file in sorted((tree / "agentrl").rglob("*.py")):
        for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
            text = node.value if isinstance(node, ast.Constant) else None
            if isinstance(text, str) and METRIC.fullmatch(text) and text.partition("/")[0] in groups:
                found[text] = True
    return found


def snapshot(side: Side) -> JSON:
    """Collect the names of a side; metrics and columns are also those that its small trainings left."""
    metrics: dict[str, JSON] = {}
    columns: dict[str, JSON] = {}
    for name, run in _trainings(side):
        metrics |= {f"{name}: {metric}": True for metric in map(str, as_list(run["metrics"]))}
        columns |= {f"{name}: {column}": kind for column, kind in as_object(run["columns"]).items()}
    groups = {name.split(": ")[1].partition("/")[0] for name in metrics if "/" in name}
    metrics |= written_metrics(side.tree, groups)
    return {"keys": keys(side.tree), "metrics": metrics, "columns": columns}


def _trainings(side: Side) -> Iterator[tuple[str, dict[str, JSON]]]:
    for file in sorted((side.results / "weights").glob("*.json")):
        yield file.stem, as_object(json.loads(file.read_text(encoding="utf-8")))


def check(old: Side, new: Side) -> Iterator[str]:
    """Compare the names of both sides. Made again each time: it costs seconds, and follows the trainings."""
    left, right = as_object(snapshot(old)), as_object(snapshot(new))
    trained = [{name for name, _ in _trainings(side)} for side in (old, new)]
    both = trained[0] & trained[1]
    if not both:
        yield "metrics and columns: no training of both sides is there; run the part weights first"
    for kind in ("keys", "metrics", "columns"):
        aliases = Aliases.read(kind)
        one, other = (_of(as_object(side[kind]), both, kind) for side in (left, right))
        print(f"  {kind}: {len(one)} and {len(other)}", flush=True)
        yield from (f"{kind}: {line}" for line in differences(one, other, aliases))


def _of(names: dict[str, JSON], trainings: set[str], kind: str) -> dict[str, JSON]:
    """Leave out trainings that one side lacks."""
    if kind == "keys":
        return names
    return {name: value for name, value in names.items() if ": " not in name or name.split(": ")[0] in trainings}
