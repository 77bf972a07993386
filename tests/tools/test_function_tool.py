"""Plain functions as tools: the schema that the model is shown, and what it is answered."""

from __future__ import annotations

import asyncio
import dataclasses
import threading
from collections.abc import Callable
from enum import Enum
from typing import Annotated, Any, Literal

import pydantic
import pytest

from agentrl.tool import ErrorKind, FunctionTool, ToolResponse, tool
from agentrl.tool.toolset import ToolSet

Bind = Callable[[ToolSet], ToolSet]


class Colour(Enum):
    RED = "red"
    BLUE = "blue"


class Point(pydantic.BaseModel):
    """A place."""

    x: int
    title: str = "none"


def google(
    a: int,
    kind: Literal["x", "y"],
    at: Point,
    points: list[Point],
    size: Annotated[float, pydantic.Field(gt=0, description="Its own words.")] = 1.5,
    json: str | None = None,
) -> str:
    """Do the thing.

    In more words.

    Args:
        a (int): The first,
            over two lines.
        kind: The kind: one of two.
        size: Not shown, Field wins.

    Returns:
        a: not a parameter.
    """
    return f"{a} {kind} {at.x} {at.title} {sum(p.x for p in points)} {size} {json}"


def sphinx(a: int, b: str = "q") -> str:
    """Do the thing.

    :param int a: The first,
        over two lines.
    :param b: The second.
    :returns: nothing of note
    """
    return f"{a}{b}"


def parameters(function: Callable[..., Any]) -> dict[str, Any]:
    schema: dict[str, Any] = FunctionTool(function).schema["function"]["parameters"]
    return schema


def test_schema_of_a_google_docstring() -> None:
    function = FunctionTool(google).schema["function"]
    assert function["name"] == "google"
    assert function["description"] == "Do the thing.\n\nIn more words."
    point = {
        "type": "object",
        "description": "A place.",
        "properties": {"x": {"type": "integer"}, "title": {"type": "string", "default": "none"}},
        "required": ["x"],
    }
    assert function["parameters"] == {
        "type": "object",
        "properties": {
            "a": {"type": "integer", "description": "The first, over two lines."},
            "kind": {"type": "string", "enum": ["x", "y"], "description": "The kind: one of two."},
            "at": point,
            "points": {"type": "array", "items": point},
            "size": {"type": "number", "exclusiveMinimum": 0, "default": 1.5, "description": "Its own words."},
            "json": {"anyOf": [{"type": "string"}, {"type": "null"}], "default": None},
        },
        "required": ["a", "kind", "at", "points"],
    }


def test_schema_of_a_sphinx_docstring() -> None:
    function = FunctionTool(sphinx).schema["function"]
    assert function["description"] == "Do the thing."
    assert function["parameters"]["properties"] == {
        "a": {"type": "integer", "description": "The first, over two lines."},
        "b": {"type": "string", "default": "q", "description": "The second."},
    }


async def text_of(made: FunctionTool, arguments: dict[str, Any]) -> str:
    answer = await made.execute("i", arguments)
    assert isinstance(answer, ToolResponse)
    return answer.text


async def test_arguments_arrive_as_their_types() -> None:
    arguments = {"a": 1, "kind": "y", "at": {"x": 5}, "points": [{"x": 2}, {"x": 3}], "json": "j"}
    assert await text_of(FunctionTool(google), arguments) == "1 y 5 none 5 1.5 j"


async def test_an_enum_is_shown_by_its_values_and_given_as_itself() -> None:
    def paint(colour: Colour) -> bool:
        """Paint."""
        return colour is Colour.BLUE

    assert parameters(paint)["properties"]["colour"]["enum"] == ["red", "blue"]
    assert await text_of(FunctionTool(paint), {"colour": "blue"}) == "true"


@dataclasses.dataclass
class Found:
    name: str
    score: float


@pytest.mark.parametrize(
    ("value", "text"),
    [
        ("as it is", "as it is"),
        (3, "3"),
        (0.5, "0.5"),
        (None, "null"),
        (True, "true"),
        ({"a": [1, "é"]}, '{"a":[1,"é"]}'),
        ([1, 2], "[1,2]"),
        (Found("n", float("nan")), '{"name":"n","score":NaN}'),
        (Point(x=1), '{"x":1,"title":"none"}'),
        (1j, '"1j"'),
    ],
)
async def test_what_a_function_returns_is_shown_as_text_or_json(value: Any, text: str) -> None:
    def give() -> Any:
        """Give."""
        return value

    assert await text_of(FunctionTool(give), {}) == text


@pytest.mark.parametrize("value", [object(), {"a": [object()]}, lambda: 1], ids=["object", "inside", "function"])
async def test_an_object_without_a_text_of_its_own_is_no_answer(value: Any) -> None:
    def give() -> Any:
        """Give."""
        return value

    with pytest.raises(TypeError, match=r"must be a text or have a JSON form: .*found (object|function)"):
        await FunctionTool(give).execute("i", {})


async def test_sync_functions_leave_the_loop_unless_marked() -> None:
    def where() -> bool:
        """Where."""
        return threading.current_thread() is threading.main_thread()

    assert await text_of(FunctionTool(where), {}) == "false"
    assert await text_of(tool(in_loop=True)(where), {}) == "true"


async def test_many_blocking_calls_run_at_once() -> None:
    together = threading.Barrier(40, timeout=10)

    def wait() -> int:
        """Return only when forty calls are here."""
        return together.wait()

    waiting = FunctionTool(wait)
    answers = await asyncio.gather(*(text_of(waiting, {}) for _ in range(40)))
    assert sorted(map(int, answers)) == list(range(40))


def test_the_decorator_leaves_a_callable() -> None:
    @tool(name="plus", description="Adds.", timeout=2)
    def add(a: int, b: int) -> int:
        return a + b

    assert add(2, 3) == 5
    assert add.schema["function"]["name"] == "plus"
    assert add.schema["function"]["description"] == "Adds."
    assert add.config == {"timeout": 2}


async def test_a_validator_beyond_the_schema_is_an_arguments_error(bound: Bind) -> None:
    def even(n: Annotated[int, pydantic.AfterValidator(_even)]) -> int:
        """Take an even number."""
        return n

    session = await bound(ToolSet.from_tools([even])).open("i", {})
    result = await session.call("even", {"n": 3})
    assert result.error is ErrorKind.ARGUMENTS
    assert "3 is odd" in result.text


def _even(n: int) -> int:
    if n % 2:
        raise ValueError(f"{n} is odd")
    return n


class Node(pydantic.BaseModel):
    children: list[Node] = []


def untyped(a) -> None:  # type: ignore[no-untyped-def]
    ...


def varargs(*numbers: int) -> None: ...


def unresolved(a: "Missing") -> None:  # type: ignore[name-defined]  # noqa: F821, UP037
    ...


def recursive(node: Node) -> None: ...


def no_schema(a: threading.Thread) -> None: ...


@pytest.mark.parametrize(
    ("function", "says"),
    [
        (untyped, "`a` has no type hint"),
        (varargs, "cannot be given by name"),
        (unresolved, "Missing"),
        (recursive, "recursive"),
        (no_schema, "no_schema"),
    ],
)
def test_functions_that_cannot_be_tools(function: Callable[..., Any], says: str) -> None:
    with pytest.raises(TypeError, match=says):
        FunctionTool(function)
