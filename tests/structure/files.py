"""What the files of the package hold: imports, classes, functions, names and docstrings. Each is parsed once."""

from __future__ import annotations

import ast
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

FunctionNode = ast.FunctionDef | ast.AsyncFunctionDef
RECORDS = {"dataclass", "NamedTuple", "TypedDict"}
"""Decorator or base of a class that is a list of fields."""


@dataclass(frozen=True, slots=True)
class Function:
    """A function or method. `keys` are the names that it takes out of its `**kwargs`, which are not among `given`.

    `parameters` and `result` are the names in the annotations, `self` and `cls` aside.
    """

    name: str
    qualified: str
    given: int
    parameters: dict[str, frozenset[str]]
    keys: frozenset[str]
    result: frozenset[str]


@dataclass(frozen=True, slots=True)
class Class:
    """A class. `fields` are those of a record with their annotations; `attributes` counts them and all of `self`."""

    name: str
    qualified: str
    lines: int
    methods: int
    attributes: int
    fields: dict[str, frozenset[str]]
    has_behaviour: bool


@dataclass(slots=True)
class File:
    """A file of the package. `types` are files that it imports for type checking only, `imports` all others."""

    path: Path
    lines: int
    imports: set[Path] = field(default_factory=set)
    types: set[Path] = field(default_factory=set)
    classes: list[Class] = field(default_factory=list)
    functions: list[Function] = field(default_factory=list)
    names: Counter[str] = field(default_factory=Counter)
    docstrings: list[tuple[int, str]] = field(default_factory=list)


def read(root: Path, package: str = "agentrl") -> dict[Path, File]:
    """Parse the package below `root`. Returns its files by their paths, which are relative to `root`."""
    paths = {path.relative_to(root) for path in (root / package).rglob("*.py")}

    def find(module: str) -> Path | None:
        path = Path(*module.split("."))
        return next((one for one in (path.with_suffix(".py"), path / "__init__.py") if one in paths), None)

    return {path: read_file(root, path, find) for path in sorted(paths)}


def read_file(root: Path, path: Path, find: Callable[[str], Path | None]) -> File:
    """Parse one file; find: the path of a module of the package, by its dotted name."""
    text = (root / path).read_text(encoding="utf-8")
    file = File(path, len(text.splitlines()))
    tree = ast.parse(text)
    for node, for_types, scope in walk(tree):
        match node:
            case ast.Name():
                file.names[node.id] += 1
            case ast.Attribute():
                file.names[node.attr] += 1
            case ast.ImportFrom():
                module = ".".join((*(path.parts[: -node.level] if node.level else ()), *filter(None, [node.module])))
                found = {find(f"{module}.{alias.name}") or find(module) for alias in node.names}
                (file.types if for_types else file.imports).update(found - {None, path})  # type: ignore[arg-type]
            case ast.Import():
                found = {find(alias.name) for alias in node.names}
                (file.types if for_types else file.imports).update(found - {None, path})  # type: ignore[arg-type]
            case ast.ClassDef():
                file.classes.append(read_class(node, scope))
            case ast.FunctionDef() | ast.AsyncFunctionDef():
                file.functions.append(read_function(node, scope))
        if isinstance(node, ast.Module | ast.ClassDef | FunctionNode) and (said := ast.get_docstring(node)):
            file.docstrings.append((node.body[0].lineno, said))
    return file


def walk(tree: ast.AST) -> Iterator[tuple[ast.AST, bool, str]]:
    """All nodes, each with whether it is for type checking only, and the beginning of a qualified name in it."""
    stack = [(tree, False, "")]
    while stack:
        node, for_types, scope = stack.pop()
        yield node, for_types, scope
        if isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test):
            for_types = True
        elif isinstance(node, ast.ClassDef | FunctionNode):
            scope = f"{scope}{node.name}."
        stack.extend((child, for_types, scope) for child in ast.iter_child_nodes(node))


def read_class(node: ast.ClassDef, scope: str) -> Class:
    fields = {
        one.target.id: names_in(one.annotation)
        for one in node.body
        if isinstance(one, ast.AnnAssign) and isinstance(one.target, ast.Name)
    }
    kept = {
        one.attr
        for one in ast.walk(node)
        if isinstance(one, ast.Attribute) and isinstance(one.ctx, ast.Store) and getattr(one.value, "id", "") == "self"
    }
    methods = [one.name for one in node.body if isinstance(one, FunctionNode)]
    made_by = {name for one in (*node.decorator_list, *node.bases) for name in names_in(one)}
    return Class(
        node.name,
        scope + node.name,
        (node.end_lineno or node.lineno) - node.lineno + 1,
        len(methods),
        len(kept | fields.keys()),
        fields if made_by & RECORDS else {},
        any(not name.startswith("__") for name in methods),
    )


def read_function(node: FunctionNode, scope: str) -> Function:
    arguments = node.args
    named = [*arguments.posonlyargs, *arguments.args, *arguments.kwonlyargs]
    parameters = {one.arg: names_in(one.annotation) for one in named if one.arg not in ("self", "cls")}
    given, keys = len(parameters), frozenset[str]()
    if arguments.kwarg is not None:
        parameters[arguments.kwarg.arg] = names_in(arguments.kwarg.annotation)
        keys = frozenset(keys_taken(node, arguments.kwarg.arg))
    return Function(node.name, scope + node.name, given, parameters, keys, names_in(node.returns))


def keys_taken(node: FunctionNode, name: str) -> Iterator[str]:
    """Constant keys that a function takes out of the mapping `name`: `name["key"]`, `name.get("key")`, `.pop`."""
    for one in ast.walk(node):
        match one:
            case ast.Subscript(value=ast.Name(id=found), slice=ast.Constant(value=str(key))) if found == name:
                yield key
            case ast.Call(
                func=ast.Attribute(value=ast.Name(id=found), attr="get" | "pop"),
                args=[ast.Constant(value=str(key)), *_],
            ) if found == name:
                yield key


def names_in(node: ast.AST | None) -> frozenset[str]:
    """Names of an annotation, decorator or base."""
    if node is None:
        return frozenset()
    if isinstance(node, ast.Name):
        return frozenset((node.id,))
    return frozenset(
        one.id if isinstance(one, ast.Name) else one.attr
        for one in ast.walk(node)
        if isinstance(one, ast.Name | ast.Attribute)
    )
