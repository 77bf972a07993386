"""Small faults in core files: each that OLD's tests find must be found by NEW's, after tests were joined or deleted.

A fault is found again in NEW by its function's name and the text of the expression, in whatever file these now are.
Only tests of its room that come through its lines are run, by a record of the package coverage, which the environment
needs for this. The record knows the tests' own process: a line that only further processes reach counts as not tested.
"""

from __future__ import annotations

import ast
import importlib.util
import random
import re
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from functools import cache
from pathlib import Path

from agentrl.system.json_value import JSON, as_list, as_object
from benchmarks.commits.sides import Side

ROOMS = ("agent_loop", "algorithms", "chat", "checkpoint", "data", "optim", "reward", "rollouts", "trainer", "workers")
"""Rooms whose files are changed; the tests of each are in the folder of tests with its name."""
SEED = 29
LIMIT = 600
"""Seconds after which tests count as standing still, which finds the fault."""
RECORDING = 7200
"""Seconds that the record of a room's tests may take."""
INSIDE = Path(__file__).parent / "inside"
COMPARISONS: dict[type[ast.cmpop], type[ast.cmpop]] = {
    ast.Lt: ast.LtE,
    ast.LtE: ast.Lt,
    ast.Gt: ast.GtE,
    ast.GtE: ast.Gt,
    ast.Eq: ast.NotEq,
    ast.NotEq: ast.Eq,
    ast.Is: ast.IsNot,
    ast.IsNot: ast.Is,
    ast.In: ast.NotIn,
    ast.NotIn: ast.In,
}
OPERATORS: dict[type[ast.operator], type[ast.operator]] = {
    ast.Add: ast.Sub,
    ast.Sub: ast.Add,
    ast.Mult: ast.Div,
    ast.Div: ast.Mult,
}
FAILED = re.compile(r"^(?:FAILED|ERROR) \S*?(tests/\S+)", re.MULTILINE)


@dataclass(frozen=True, slots=True)
class Mutant:
    """A fault: in a function, the `number`th expression that reads `before` reads `after`."""

    room: str
    function: str
    """With its class, without its module."""
    before: str
    after: str
    number: int


@dataclass(frozen=True, slots=True)
class Site:
    """A fault and its bytes in a file."""

    mutant: Mutant
    begin: int
    end: int


@cache
def sites(source: str, room: str) -> list[Site]:
    """List the faults that can be made in the functions of a file."""
    starts = [0]
    for line in source.encode().splitlines(keepends=True):
        starts.append(starts[-1] + len(line))
    seen: Counter[tuple[str, str, str]] = Counter()
    found = []
    for function, node in _in_functions(ast.parse(source), ""):
        after = _changed(node)
        if after is not None:
            before = ast.unparse(node)
            key = (function, before, after)
            end_line, end_column = node.end_lineno, node.end_col_offset
            assert end_line is not None and end_column is not None
            places = starts[node.lineno - 1] + node.col_offset, starts[end_line - 1] + end_column
            found.append(Site(Mutant(room, function, before, after, seen[key]), *places))
            seen[key] += 1
    return found


def _in_functions(node: ast.AST, function: str, inside: bool = False) -> Iterator[tuple[str, ast.expr | ast.stmt]]:
    """Yield statements and expressions of functions; texts with values in them have no places of their own."""
    for child in ast.iter_child_nodes(node):
        if isinstance(child, ast.JoinedStr | ast.arguments | ast.arg):
            continue
        name, within = function, inside
        if isinstance(child, ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            name = f"{function}.{child.name}".lstrip(".")
            within = inside or not isinstance(child, ast.ClassDef)
        elif inside and isinstance(child, ast.expr | ast.stmt):
            yield function, child
        yield from _in_functions(child, name, within)


def _changed(node: ast.expr | ast.stmt) -> str | None:
    """Write the fault in place of a node; None where there is none for it."""
    match node:
        case ast.Compare(left, [operator], rest) if type(operator) in COMPARISONS:
            return f"({ast.unparse(ast.Compare(left, [COMPARISONS[type(operator)]()], rest))})"
        case ast.BinOp(left, operator, right) if type(operator) in OPERATORS:
            return f"({ast.unparse(ast.BinOp(left, OPERATORS[type(operator)](), right))})"
        case ast.BoolOp(operator, values):
            other = ast.Or() if isinstance(operator, ast.And) else ast.And()
            return f"({ast.unparse(ast.BoolOp(other, values))})"
        case ast.UnaryOp(ast.Not(), operand):
            return f"({ast.unparse(operand)})"
        case ast.Constant(bool() as value):
            return str(not value)
        case ast.Constant(int() as value):
            return str(value + 1)
        case ast.Expr(ast.Call() | ast.Await()) | ast.AugAssign():
            return "pass"
    return None


def files_of(tree: Path, room: str) -> list[Path]:
    """List the files of a room."""
    return sorted((tree / "agentrl" / room).rglob("*.py"))


def drawn(tree: Path, count: int) -> list[Mutant]:
    """Draw faults, of each file as many as its share of all: the first of a larger draw are a smaller one's."""
    every = [
        site.mutant for room in ROOMS for file in files_of(tree, room) for site in sites(file.read_text("utf-8"), room)
    ]
    random.Random(SEED).shuffle(every)
    return every[:count]


def find(tree: Path, mutant: Mutant) -> tuple[Path, Site] | None:
    """Find a fault's place: in the files of its room first, then in all."""
    for file in (*files_of(tree, mutant.room), *sorted((tree / "agentrl").rglob("*.py"))):
        for site in sites(file.read_text("utf-8"), mutant.room):
            if site.mutant == mutant:
                return file, site
    return None


def killers(side: Side, mutant: Mutant, whole_room: bool = False) -> JSON:
    """Make the fault in the checkout and list the tests that fail, of its lines or of its whole room.

    None where its place is gone. Test files that name its function or its file are run first.
    """
    place = find(side.tree, mutant)
    if place is None:
        return None
    file, site = place
    broken = as_list(side.kept(f"mutants/sound-{mutant.room}", _recorded, side, mutant.room))
    whole = file.read_bytes()
    lines = range(whole.count(b"\n", 0, site.begin) + 1, whole.count(b"\n", 0, site.end) + 2)
    tests = [f"tests/{mutant.room}"] if whole_room else _through(side, mutant, file, lines)
    file.write_bytes(whole[: site.begin] + mutant.after.encode() + whole[site.end :])
    try:
        return failing(side, tests, ["-x", *(f"--deselect={test}" for test in broken)]) if tests else []
    finally:
        file.write_bytes(whole)


def _recorded(side: Side, room: str) -> JSON:
    """Record which tests of a room come through which lines, and list the tests that fail without a fault."""
    record = side.results / "mutants" / f"lines-{room}"
    record.parent.mkdir(parents=True, exist_ok=True)
    words = [str(INSIDE / "recorded.py"), str(record), f"{side.tree}/agentrl"]
    return failing(side, [f"tests/{room}"], (), words, RECORDING)


def _through(side: Side, mutant: Mutant, file: Path, lines: range) -> list[str]:
    """List the test functions that come through lines of a file, those that name the fault's function first."""
    from coverage import CoverageData

    data = CoverageData(str(side.results / "mutants" / f"lines-{mutant.room}"))
    data.read()
    inside = str(file.relative_to(side.tree))
    found: set[str] = set()
    for measured in data.measured_files():
        if measured.endswith(f"/{inside}"):  # the checkout of then had a folder of its own
            by_line = data.contexts_by_lineno(measured)
            found.update(test.split("[")[0] for line in lines for test in by_line.get(line, ()) if test)
    first = near(side.tree, mutant, file)
    return sorted(found, key=lambda test: (test.split("::")[0] not in first, test))


def near(tree: Path, mutant: Mutant, file: Path) -> list[str]:
    """List the test files of a fault's room that name its function, its class or the module that has it."""
    names = "|".join([*mutant.function.split("."), rf"{file.parent.name}\.{file.stem}"])
    written = re.compile(rf"\b(?:{names})\b")
    files = sorted((tree / "tests" / mutant.room).rglob("test_*.py"))
    return [str(test.relative_to(tree)) for test in files if written.search(test.read_text("utf-8"))]


def failing(
    side: Side, tests: list[str], options: Sequence[str], runner: Sequence[str] = ("-m", "pytest"), limit: float = LIMIT
) -> list[JSON]:
    """Run tests of the checkout and name those that fail."""
    folder = side.results / "mutants" / "last"
    inside = [str(side.tree / test) for test in tests]
    words = [*runner, "-q", "-pno:cacheprovider", f"--rootdir={side.tree}", *options, *inside]
    try:
        side.run([*words, f"--config-file={side.tree}/pyproject.toml"], folder, limit=limit)
    except RuntimeError as error:
        if ": ended after" in str(error).splitlines()[0]:  # below it is what the tests wrote
            return ["no test ended"]
        said = (folder / "output.log").read_text(encoding="utf-8", errors="replace")
        return list(FAILED.findall(said)) or [str(error)[-300:]]
    return []


def check(old: Side, new: Side, count: int) -> Iterator[str]:
    """Say what NEW's tests do not find and OLD's do: only a fault that NEW's miss is tried on OLD."""
    if importlib.util.find_spec("coverage") is None:
        raise SystemExit("mutants: needs the package coverage: pip install coverage")
    found: Counter[str] = Counter()
    for number, mutant in enumerate(drawn(old.tree, count)):
        now = _killed_by(new, number, mutant)
        if now == [] and _killed_by(old, number, mutant):
            now = _killed_by(new, number, mutant, whole_room=True)
            if not now:
                before = as_list(_killed_by(old, number, mutant))
                yield f"{number}: {mutant.function}: {mutant.before} -> {mutant.after}: before: {before[0]}"
                found["no longer found"] += 1
                continue
        found["the expression is gone" if now is None else "found" if now else "found by neither"] += 1
        print(f"  {number + 1}/{count} {dict(found)}", flush=True)


def _killed_by(side: Side, number: int, mutant: Mutant, whole_room: bool = False) -> JSON:
    name = f"mutants/{number:04}{'-room' if whole_room else ''}"
    return as_object(side.kept(name, _tried, side, mutant, whole_room))["killed_by"]


def _tried(side: Side, mutant: Mutant, whole_room: bool) -> JSON:
    return {"mutant": asdict(mutant), "killed_by": killers(side, mutant, whole_room)}
