"""Code problems as data sets write them, read into one form.

The sets are HumanEval (arXiv:2107.03374), MBPP (arXiv:2108.07732), and problems with inputs and outputs, of programs
that read and print or of a function, as APPS, TACO and PRIME's collection have them.
"""

from __future__ import annotations

import ast
import json
from dataclasses import dataclass

from agentrl.errors import DataError
from agentrl.reward.code import AssertTests, Case, StdioTests, Tests, read_tests
from agentrl.system.json_value import JSON
from data_prep.records import Record, short


@dataclass(frozen=True, slots=True)
class Problem:
    """One problem: the task that the policy is told, and the tests that judge its program."""

    where: str
    name: str
    source: str
    """The row's data_source."""
    task: str
    tests: Tests
    solution: str | None
    """Program that should pass; None where the data set has none."""


class LeftOut(Exception):
    """Record that is no problem of these kinds, though nothing is wrong with its form. Its text is the reason."""


def problem(record: Record, max_cases: int | None) -> Problem:
    """Read a record. Raises DataError for one in none of the formats, LeftOut for one without tests that can be run."""
    if "entry_point" in record.fields:
        return humaneval(record)
    if "test_list" in record.fields:
        return mbpp(record)
    if "input_output" in record.fields:
        return with_inputs(record, max_cases)
    raise DataError(
        f"{record.where}: expected the fields of HumanEval (prompt, entry_point, test), of MBPP (text, code, "
        f"test_list) or of APPS (question, input_output), found {short(sorted(record.fields))}"
    )


def humaneval(record: Record) -> Problem:
    """Read a record of HumanEval."""
    prompt, entry = record.text("prompt"), record.text("entry_point")
    body = record.fields.get("canonical_solution")
    tests = AssertTests(
        setup=prompt, entry_points=[entry], tests=[f"{record.text('test').rstrip()}\n\ncheck({entry})\n"]
    )
    task = f"Complete this function.\n\n```python\n{prompt.rstrip()}\n```"
    return Problem(
        record.where,
        str(record.fields.get("task_id", entry)),
        "code/humaneval",
        task,
        tests,
        f"{prompt}{body}" if isinstance(body, str) else None,
    )


def mbpp(record: Record) -> Problem:
    """Read a record of MBPP. Raises LeftOut when its tests call nothing of its code."""
    code, asserts = record.text("code"), record.texts("test_list")
    imports = record.fields.get("test_imports")
    setup = "\n".join(record.texts("test_imports")) if imports else record.fields.get("test_setup_code") or ""
    if not isinstance(setup, str):
        raise DataError(f"{record.where}: expected text as `test_setup_code`, found {short(setup)}")
    entries = called(asserts, code)
    if not entries:
        raise LeftOut("its tests call no function of its code")
    task = f"{record.text('text', 'prompt').strip()}\n\nOne of its tests is:\n\n```python\n{asserts[0].strip()}\n```"
    tests = AssertTests(setup=setup, entry_points=entries, tests=asserts)
    return Problem(record.where, f"MBPP/{record.fields.get('task_id', '')}", "code/mbpp", task, tests, code)


def called(tests: list[str], code: str) -> list[str]:
    """List the names that `code` defines and `tests` use. Raises LeftOut when either cannot be parsed."""
    try:
        defined = {getattr(node, "name", None) for node in ast.parse(code).body}
        used = {node.id for test in tests for node in ast.walk(ast.parse(test)) if isinstance(node, ast.Name)}
    except (SyntaxError, ValueError, RecursionError, MemoryError) as error:
        raise LeftOut("its code or a test is no Python that can be parsed") from error
    return sorted(used & defined)


def with_inputs(record: Record, max_cases: int | None) -> Problem:
    """Read a problem with inputs and outputs, of programs that read and print or of a function (`fn_name`).

    At most `max_cases` of them are kept. Raises LeftOut when it has no such tests.
    """
    given = decoded(record, "input_output") or {}
    if not isinstance(given, dict):
        raise DataError(f"{record.where}: expected a mapping as `input_output`, found {short(given)}")
    pairs, name = pairs_of(record, given), given.get("fn_name")
    if max_cases is not None and len(pairs) > max_cases:  # spread over all: the later ones are the larger ones
        pairs = [pairs[index * len(pairs) // max_cases] for index in range(max_cases)]
    task, solutions = record.text("question", "prompt").strip(), decoded(record, "solutions") or []
    return Problem(
        record.where,
        str(record.fields.get("task_id", record.fields.get("problem_id", record.where))),
        "code/calls" if name else "code/stdio",
        f"{task}\n\n{wanted(record, name)}",
        calls(name, pairs) if name else stdio(record, pairs),
        solutions[0] if isinstance(solutions, list) and solutions and isinstance(solutions[0], str) else None,
    )


def pairs_of(record: Record, given: dict[str, JSON]) -> list[tuple[JSON, JSON]]:
    """Pair inputs with outputs. Raises LeftOut when there are none."""
    inputs, outputs = given.get("inputs"), given.get("outputs")
    if not inputs or not outputs:
        raise LeftOut("it has no tests")
    if not isinstance(inputs, list) or not isinstance(outputs, list) or len(inputs) != len(outputs):
        raise DataError(f"{record.where}: `input_output` must hold as many inputs as outputs, found {short(given)}")
    return list(zip(inputs, outputs, strict=True))


def wanted(record: Record, name: JSON) -> str:
    """Say what kind of program is wanted."""
    if not name:
        return "Read from standard input and print to standard output."
    begun = record.fields.get("starter_code")
    if isinstance(begun, str) and begun.strip():
        return f"Complete this; `{name}` is called, and its result judged.\n\n```python\n{begun.rstrip()}\n```"
    return f"Write a function `{name}`; it is called, and its result judged."


def stdio(record: Record, pairs: list[tuple[JSON, JSON]]) -> Tests:
    """Make the cases of programs that read and print."""
    return StdioTests(tests=[Case(input=lines(record, one), output=lines(record, other)) for one, other in pairs])


def calls(name: JSON, pairs: list[tuple[JSON, JSON]]) -> Tests:
    """Make the tests of a function. Raises LeftOut for a name, arguments or results that are none."""
    inputs, outputs = zip(*pairs, strict=True)
    try:
        return read_tests({"fn_name": name, "inputs": list(inputs), "outputs": list(outputs)})
    except ValueError as error:
        raise LeftOut(str(error)) from error


def lines(record: Record, value: object) -> str:
    """Return a text; some sets have a list of its lines. Raises DataError."""
    if isinstance(value, list) and all(isinstance(line, str) for line in value):
        return "\n".join(value)
    if not isinstance(value, str):
        raise DataError(f"{record.where}: expected text in `input_output`, found {short(value)}")
    return value


def decoded(record: Record, key: str) -> JSON:
    """Return a field that may be JSON text. Raises DataError when it is text, but no JSON."""
    value = record.fields.get(key)
    if not isinstance(value, str) or not value.strip():
        return value or None
    try:
        found: JSON = json.loads(value)
        return found
    except (ValueError, RecursionError) as error:
        raise DataError(f"{record.where}: `{key}` is no JSON: {short(value)} ({error})") from error
