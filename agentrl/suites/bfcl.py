"""Function calling of BFCL v4 (Berkeley Function Calling Leaderboard): its single-turn categories.

Data and checker are the authors' own, from their wheel in the user's cache. The checker is imported from there; only
its table of models, which imports every vendor's client, is replaced. Tools are shown and calls are read as the
authors do for models of the OpenAI chat form: a dot in a function's name is an underscore. Its regular expressions for
Java and JavaScript may take any time on what a policy writes: a process of its own, which the kernel ends, judges all
but short texts. Run as `python -m agentrl.suites.bfcl`, this file is that process.
"""

from __future__ import annotations

import copy
import functools
import importlib
import json
import os
import re
import resource
import signal
import subprocess
import sys
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

from agentrl.errors import DataError
from agentrl.suites.contract import Group, Request, Row, Suite, Tasks, chosen
from agentrl.system.user_cache import Wheel
from agentrl.trajectory import Trajectory

WHEEL = Wheel("bfcl-eval==2026.3.23", "3bb6dfa5f0c68ad403c9ec50b00db2bb3b4cc9b38ab1ff33f48fe30d853d3a0a")
SIMPLE = ("simple_python", "simple_java", "simple_javascript")
OF_LIVE = ("live_simple", "live_multiple", "live_parallel", "live_parallel_multiple")
PARTS = (
    *(*SIMPLE, "multiple", "parallel", "parallel_multiple", "irrelevance"),
    *(*OF_LIVE, "live_irrelevance", "live_relevance"),
)
HINTS = {"simple_java": "Java 8 SDK", "simple_javascript": "JavaScript"}
"""Syntax of a category's functions; of the others: Python 3."""
NESTED = {"simple_java": ("ArrayList", "Array"), "simple_javascript": ("array",)}
"""Types of parameters whose items are described in words."""

QUICK = {"\\s": 60, "\\[": 12, ".": 200}
"""Most matches of these patterns in a text that is judged at once: 60 blanks take .02 s, 100 a quarter of a second."""
SECONDS = 10
"""Time of a processor for any other text, after which its score is 0. The authors' answers have at most 160 characters.
"""

Function = dict[str, Any]
"""A function as the data describe it."""


def tasks(request: Request) -> Tasks:
    """Read the categories that are asked for. Raises DataError."""
    data = WHEEL.fetched(request.source, "--source") / "bfcl_eval" / "data"
    types = module("bfcl_eval.constants.type_mappings").GORILLA_TO_OPENAPI
    rows = []
    for part in chosen(request.parts, PARTS, PARTS):
        answers = data / "possible_answer" / f"BFCL_v4_{part}.json"
        truths = list(records(answers)) if answers.exists() else []
        for number, record in enumerate(records(data / f"BFCL_v4_{part}.json")):
            if number == request.limit:
                break
            truth = {
                "category": part,
                "functions": record["function"],
                "answers": truths[number]["ground_truth"] if truths else None,
            }
            tools = json.dumps([tool_of(function, part, types) for function in record["function"]])
            question, source = record["question"][0], f"bfcl/{part}"
            rows.append(Row(part, record["id"], question, json.dumps(truth), source, "single_turn_calls", tools))
    return Tasks(rows, WHEEL.requirement)


def records(path: Path) -> Iterator[dict[str, Any]]:
    """Read JSON lines of the wheel, whose checksum is known."""
    for line in path.read_bytes().splitlines():
        yield json.loads(line)


def tool_of(function: Function, category: str, types: Mapping[str, str]) -> dict[str, Any]:
    """Describe a function as a tool of OpenAI's form; `types`: the authors' names of types by ours."""
    shown = copy.deepcopy(function)
    syntax = HINTS.get(category)
    shown["name"] = shown["name"].replace(".", "_")
    shown["description"] += f" Note that the provided function is in {syntax or 'Python 3'} syntax."
    parameters = shown["parameters"]
    if syntax is not None:
        in_words(parameters["properties"], category)
    parameters["type"] = "object"
    cast_types(parameters["properties"], types)
    return {"type": "function", "function": shown}


def in_words(properties: dict[str, Any], category: str) -> None:
    """Make each parameter a text, and write its type in another language into its description."""
    language = "Java" if category == "simple_java" else "JavaScript"
    for value in properties.values():
        kind = value["type"]
        told = (
            f" This parameter can be of any type of {language} object in string representation."
            if kind == "any"
            else f" This is {language} {kind} type parameter in string representation."
        )
        value["description"] += told
        if kind in NESTED[category]:
            items = value.pop("items")["type"]
            value["description"] += f" The list elements are of type {items}; they are not in string representation."
        if language == "JavaScript" and kind == "dict" and "properties" in value:
            schema = json.dumps(value.pop("properties"))
            value["description"] += (
                " The dictionary entries have the following schema; they are not in string representation. " + schema
            )
        value["type"] = "string"


def cast_types(properties: dict[str, Any], types: Mapping[str, str]) -> None:
    """Give parameters the types of JSON schemas, two levels of items deep, as far as the data go."""
    for value in properties.values():
        if value.get("type") == "float":
            value["format"] = "float"
            value["description"] = value.get("description", "") + " This is a float type value."
        value["type"] = types.get(value.get("type", ""), "string")
        if value["type"] not in ("array", "object"):
            continue
        if "properties" in value:
            cast_types(value["properties"], types)
        elif "items" in value:
            items = value["items"]
            items["type"] = types[items["type"]]
            if items["type"] == "array" and "items" in items:
                items["items"]["type"] = types[items["items"]["type"]]
            elif items["type"] == "object" and "properties" in items:
                cast_types(items["properties"], types)


def compute_score(trajectory: Trajectory, ground_truth: object) -> float:
    """Score the calls of the last assistant message: 1 or 0, as the authors' runner does."""
    truth = json.loads(str(ground_truth))
    calls = calls_of(trajectory)
    category = truth["category"]
    if "irrelevance" in category:
        return float(not calls)
    if "relevance" in category:
        return float(bool(calls))
    if calls is None:
        return 0.0
    if category in HINTS and not is_quick(calls):
        checker()  # DataError without the wheel
        return in_a_process(truth, calls)
    return verdict(truth, calls)


def verdict(truth: dict[str, Any], calls: list[dict[str, Any]]) -> float:
    """Ask the authors' checker."""
    category = truth["category"]
    language = HINTS.get(category, "Python 3").split()[0].lower()
    check, languages = checker()
    try:
        found = check(truth["functions"], calls, truth["answers"], languages(language), category, "openai")
    except (AttributeError, IndexError, KeyError, TypeError, ValueError):  # a form that the checker does not foresee
        return 0.0
    return float(found["valid"])


def is_quick(calls: list[dict[str, Any]]) -> bool:
    """Check whether no text of the calls can keep the checker's regular expressions busy."""
    texts = [text for call in calls for values in call.values() for text in values.values() if isinstance(text, str)]
    return all(len(re.findall(one, text, re.DOTALL)) <= most for text in texts for one, most in QUICK.items())


def in_a_process(truth: dict[str, Any], calls: list[dict[str, Any]]) -> float:
    """Judge within SECONDS of a processor. Raises RuntimeError where the process fails otherwise."""
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    command = [sys.executable, "-m", "agentrl.suites.bfcl", str(SECONDS)]
    given = json.dumps([truth, calls])
    done = subprocess.run(command, input=given, env=environment, capture_output=True, text=True)
    if done.returncode in (-signal.SIGKILL, -signal.SIGXCPU):
        return 0.0
    if done.returncode != 0:
        raise RuntimeError(
            f"the process that judges answers of bfcl ended with {done.returncode}: {done.stderr[-500:]}"
        )
    return float(done.stdout.split()[-1])


def main() -> None:
    """Judge the answer on stdin. The kernel ends this process when its time is over."""
    truth, calls = json.load(sys.stdin)
    checker()
    used = resource.getrusage(resource.RUSAGE_SELF)
    most = round(used.ru_utime + used.ru_stime) + int(sys.argv[1])
    resource.setrlimit(resource.RLIMIT_CPU, (most, most))
    print(verdict(truth, calls))


def calls_of(trajectory: Trajectory) -> list[dict[str, Any]] | None:
    """Return the calls as the checker takes them; None without calls, and where a call cannot be read."""
    message = next((one for one in reversed(trajectory.messages) if one["role"] == "assistant"), None)
    functions = [] if message is None else [call["function"] for call in message.get("tool_calls") or ()]
    if not functions or not all(isinstance(one["arguments"], dict) for one in functions):
        return None
    return [{one["name"]: one["arguments"]} for one in functions]


@functools.cache
def checker() -> tuple[Callable[..., dict[str, Any]], Callable[[str], object]]:
    """Import the authors' checker, and their names of languages. Raises DataError where the wheel is not fetched."""
    return (
        module("bfcl_eval.eval_checker.ast_eval.ast_checker").ast_checker,
        module("bfcl_eval.constants.enums").Language,
    )


def module(name: str) -> Any:
    """Import a module of the wheel. Raises DataError where it is not fetched."""
    folder = WHEEL.folder
    if not folder.is_dir():
        raise DataError(
            f"{folder}: expected the files of {WHEEL.requirement}; fetch them: agentrl.evaluate --suite bfcl"
        )
    table = ModuleType("bfcl_eval.constants.model_config")
    table.__dict__["MODEL_CONFIG_MAPPING"] = defaultdict(lambda: SimpleNamespace(underscore_to_dot=True))
    sys.modules.setdefault(table.__name__, table)
    sys.path.insert(0, str(folder))
    try:
        return importlib.import_module(name)
    finally:
        sys.path.remove(str(folder))


BFCL = Suite(
    tasks,
    {"data.max_prompt_length": 12288},
    groups={
        "simple": Group(SIMPLE),
        "non_live": Group(("simple", "multiple", "parallel", "parallel_multiple")),
        "live": Group(OF_LIVE, by_rows=True),
        "hallucination": Group(("irrelevance", "live_irrelevance")),
    },
)

if __name__ == "__main__":
    main()
