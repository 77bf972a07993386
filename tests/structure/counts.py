"""Numbers of the project's structure, each with what was counted."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path

from tests.structure.files import File, Function
from tests.structure.words import Prose, count

ANNEXES = ("verl", "trl", "view", "replay", "quickstart", "suites", "environments")
"""Rooms that no other room imports: all others are the core."""
SECTIONS = Path("agentrl/config/sections")
"""Classes there have as many attributes as users need keys."""


@dataclass(frozen=True, slots=True)
class Measure:
    """A number, and what was counted, the largest first."""

    number: float
    found: list[str]


def measure(root: Path, files: Mapping[Path, File]) -> dict[str, Measure]:
    """Count everything of the project in `root`; files: those of its package."""
    return {
        "files in circles": files_in_circles(files),
        **measure_classes(files),
        **measure_functions(files),
        **measure_lines(root, files),
        **measure_prose(root, files),
    }


def files_in_circles(files: Mapping[Path, File]) -> Measure:
    groups = circles({path: file.imports | file.types for path, file in files.items()})
    return Measure(sum(map(len, groups)), [" <-> ".join(map(str, group)) for group in groups])


def circles(graph: Mapping[Path, set[Path]]) -> list[list[Path]]:
    """Groups of files that reach each other by imports, the largest first."""
    reached: dict[Path, set[Path]] = {}
    for start in graph:
        stack, reached[start] = [start], set()
        while stack:
            new = graph[stack.pop()] - reached[start]
            reached[start] |= new
            stack.extend(new)
    groups = {tuple(sorted(to for to in others if one in reached[to])) for one, others in reached.items()}
    return sorted(map(list, groups - {()}), key=len, reverse=True)


def measure_classes(files: Mapping[Path, File]) -> dict[str, Measure]:
    everything = [(f"{path} {one.qualified}", one) for path, file in files.items() for one in file.classes]
    public = [where for where, one in everything if not one.name.startswith("_")]
    judged = [
        (f"{path} {one.qualified}", one)
        for path, file in files.items()
        if not path.is_relative_to(SECTIONS)
        for one in file.classes
    ]
    lines = [(one.lines, where) for where, one in judged]
    methods = [(one.methods, where) for where, one in judged]
    attributes = [(one.attributes, where) for where, one in judged]
    return {
        "classes over 300 lines": over(300, lines),
        "classes over 20 methods": over(20, methods),
        "classes over 15 attributes": over(15, attributes),
        "methods of the largest class": most(methods),
        "public classes": Measure(len(public), public),
    }


def measure_functions(files: Mapping[Path, File]) -> dict[str, Measure]:
    functions = [(path, one) for path, file in files.items() for one in file.functions]
    bags = options_bags(files)
    parameters = [(number_of_parameters(one, bags), f"{path} {one.qualified}") for path, one in functions]
    read = sum((file.names for file in files.values()), Counter())
    private = [
        f"{path} {one.qualified}"
        for path, one in functions
        if one.name.startswith("_") and not one.name.startswith("__") and read[one.name] <= 1
    ]
    # A public name that is read nowhere is called from outside, or found by its name in a table.
    public = [
        f"{path} {one.qualified}" for path, one in functions if not one.name.startswith("_") and read[one.name] == 1
    ]
    return {
        "functions over 7 parameters": over(7, parameters),
        "parameters of the widest function": most(parameters),
        "private functions used once": Measure(len(private), private),
        "functions used once": Measure(len(private) + len(public), private + public),
    }


def options_bags(files: Mapping[Path, File]) -> dict[str, int]:
    """Classes that only carry the arguments of one function, and how many they carry.

    Such a class is a record without methods: no function returns it, no other record has it, and a single function
    has a parameter of its type. A contract and what implements it are one function.
    """
    records = [one for file in files.values() for one in file.classes if one.fields]
    elsewhere = {name for one in records for names in one.fields.values() for name in names}
    taken: dict[str, set[str]] = defaultdict(set)
    for path, file in files.items():
        for function in file.functions:
            elsewhere |= function.result
            who = f"{path} {function.qualified}" if function.name.startswith("__") else function.name
            for names in function.parameters.values():
                for name in names:
                    taken[name].add(who)
    return {
        one.name: len(one.fields)
        for one in records
        if not one.has_behaviour and len(taken[one.name]) == 1 and one.name not in elsewhere
    }


def number_of_parameters(function: Function, bags: Mapping[str, int]) -> int:
    """Count what a caller can give: of an options bag its fields, of `**kwargs` the keys that are taken out of it."""
    carried = [sum(bags.get(name, 0) for name in names) for names in function.parameters.values()]
    return function.given + len(function.keys) + sum(fields - 1 for fields in carried if fields)


def measure_lines(root: Path, files: Mapping[Path, File]) -> dict[str, Measure]:
    rooms: Counter[str] = Counter()
    for path, file in files.items():
        rooms[path.parts[1]] += 0 if path.parts[1] in ANNEXES else file.lines
    tests: Counter[str] = Counter()
    for test in (root / "tests").rglob("*.py"):
        tests[test.relative_to(root / "tests").parts[0]] += len(test.read_text(encoding="utf-8").splitlines())
    short = [f"{path} ({file.lines})" for path, file in files.items() if file.lines < 30]
    pointing = [
        f"{path}:{line}" for path, file in files.items() for line, text in file.docstrings if text.startswith("See ")
    ]
    return {
        "lines of the core": Measure(rooms.total(), [f"{name} ({lines})" for name, lines in rooms.most_common()]),
        "lines of tests": Measure(tests.total(), [f"{name} ({lines})" for name, lines in tests.most_common()]),
        "files under 30 lines": Measure(len(short), short),
        "docstrings that only point": Measure(len(pointing), pointing),
    }


def measure_prose(root: Path, files: Mapping[Path, File]) -> dict[str, Measure]:
    pages = {str(one.relative_to(root / "docs")): [one.read_text("utf-8")] for one in sorted(root.glob("docs/**/*.md"))}
    docstrings = {str(path): [text for _, text in file.docstrings] for path, file in files.items()}
    return {**measure_texts("docs", pages), **measure_texts("docstrings", docstrings)}


def measure_texts(kind: str, texts: Mapping[str, list[str]]) -> dict[str, Measure]:
    counted = {name: count(one) for name, one in texts.items()}
    everything = sum(counted.values(), Prose())
    hard = sorted(((one.hard.total(), name) for name, one in counted.items() if one.hard), reverse=True)
    said = [f"{name} ({', '.join(f'{word} {n}' for word, n in counted[name].hard.most_common())})" for _, name in hard]
    return {
        f"hard words in 1,000 of {kind}": Measure(everything.hard_in_1000, said),
        f"long sentences in 100 of {kind}": Measure(
            everything.long_in_100, over(0, ((one.long, name) for name, one in counted.items())).found
        ),
    }


def over(bound: int, sizes: Iterable[tuple[int, str]]) -> Measure:
    """Count the sizes above a bound."""
    above = sorted((one for one in sizes if one[0] > bound), key=lambda one: (-one[0], one[1]))
    return Measure(len(above), [f"{name} ({size})" for size, name in above])


def most(sizes: Iterable[tuple[int, str]]) -> Measure:
    """Find the largest size."""
    size, name = max(sizes, default=(0, ""))
    return Measure(size, [name])
