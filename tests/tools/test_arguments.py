"""Arguments are judged by the tool's schema, in which members that it does not name are unknown at every depth."""

from __future__ import annotations

import copy
import json
from collections.abc import Iterator
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from agentrl.errors import ConfigError
from agentrl.tool import Schema
from agentrl.tool.arguments import ArgumentCheck
from tests.naming import naming

LEAF = st.sampled_from([({"type": "integer"}, 3), ({"type": "string"}, "x"), ({"enum": ["a", None]}, None)])


def grown(inner: st.SearchStrategy[tuple[Any, Any]]) -> st.SearchStrategy[tuple[Any, Any]]:
    """Schemas around schemas, each with a value that it allows."""
    members = st.dictionaries(st.sampled_from("abc"), inner, min_size=1, max_size=3)
    objects = members.map(
        lambda found: (
            {"type": "object", "properties": {name: schema for name, (schema, _) in found.items()}},
            {name: value for name, (_, value) in found.items()},
        )
    )
    return st.one_of(
        objects,
        objects.map(lambda one: ({"allOf": [one[0]]}, one[1])),
        objects.map(lambda one: ({"anyOf": [{"type": "null"}, one[0]]}, one[1])),
        objects.map(lambda one: ({**one[0], "anyOf": [{"required": list(one[1])}, {"required": ["d"]}]}, one[1])),
        inner.map(lambda one: ({"type": "array", "items": one[0]}, [one[1], one[1]])),
        inner.map(lambda one: ({"type": "array", "prefixItems": [one[0]]}, [one[1]])),
    )


CASES = st.recursive(LEAF, grown, max_leaves=8)


def objects_in(value: Any) -> Iterator[dict[str, Any]]:
    if isinstance(value, dict):
        yield value
    for item in value.values() if isinstance(value, dict) else value if isinstance(value, list) else ():
        yield from objects_in(item)


def check_of(parameters: Schema) -> ArgumentCheck:
    return ArgumentCheck({"type": "function", "function": {"name": "f", "parameters": parameters}})


@given(case=CASES)
def test_an_unknown_member_is_refused_wherever_it_is(case: tuple[Any, Any]) -> None:
    schema, value = case
    check = check_of({"type": "object", "properties": {"x": schema}})
    arguments = {"x": value}
    assert check(arguments) is None
    for number, _ in enumerate(objects_in(arguments)):
        changed = copy.deepcopy(arguments)
        list(objects_in(changed))[number]["unknown"] = 1
        problem = check(changed)
        assert problem is not None and "unknown" in problem


REQUIRED: list[tuple[Schema, bool]] = [
    ({"properties": {"query": {}}, "required": ["query"]}, True),
    ({"properties": {"query": {}}, "required": ["querry"]}, False),
    ({"properties": {"query": {}}, "required": ["querry"], "additionalProperties": False}, False),
    ({"properties": {"query": {}}, "required": ["q"], "$schema": "http://json-schema.org/draft-07/schema#"}, False),
    ({"properties": {"a": {"type": "array", "items": {"properties": {"b": {}}, "required": ["c"]}}}}, False),
    ({"properties": {"query": {}}, "required": ["more"], "additionalProperties": True}, True),
    ({"properties": {"query": {}}, "required": ["more"], "patternProperties": {"^m": {}}}, True),
    ({"properties": {"query": {}}, "required": ["more"], "allOf": [{"properties": {"more": {}}}]}, True),
    ({"required": ["anything"]}, True),
]


@pytest.mark.parametrize(("parameters", "is_sound"), REQUIRED)
def test_what_is_required_and_not_allowed_is_told(parameters: Schema, is_sound: bool) -> None:
    """No call could be right: each would be an error of the policy's."""
    if is_sound:
        check_of(parameters)
        return
    with pytest.raises(ConfigError, match=r"tool_schema of 'f': `required` has '\w+'.*, and `properties` only \w+"):
        check_of(parameters)


TREE: Schema = {
    "type": "object",
    "properties": {"root": {"$ref": "#/$defs/Node"}},
    "$defs": {
        "Node": {
            "type": "object",
            "properties": {"name": {"type": "string"}, "next": {"anyOf": [{"$ref": "#/$defs/Node"}, {"type": "null"}]}},
        }
    },
}


def test_references_are_followed_also_to_themselves() -> None:
    check = check_of(TREE)
    assert check({"root": {"name": "a", "next": {"name": "b", "next": None}}}) is None
    assert check({"root": {"name": "a", "next": {"name": "b", "nest": None}}}) is not None
    assert check({"root": {"title": "a"}}) == "unknown argument 'title' in root"


@pytest.mark.parametrize(
    ("member", "value"),
    [
        ({"type": "object"}, {"any": 1}),
        ({}, {"any": 1}),
        ({"type": "object", "properties": {"a": {}}, "additionalProperties": True}, {"a": 1, "any": 1}),
        ({"type": "object", "properties": {"a": {}}, "additionalProperties": {"type": "integer"}}, {"any": 1}),
        ({"type": "object", "properties": {"a": {}}, "patternProperties": {"^x": {}}}, {"xy": 1}),
        ({"anyOf": [{"type": "object", "properties": {"a": {}}}, {"type": "object"}]}, {"any": 1}),
        (
            {"allOf": [{"properties": {"a": {}}}, {"properties": {"b": {}}}], "properties": {"c": {}}},
            {"a": 1, "b": 2, "c": 3},
        ),
    ],
)
def test_objects_that_are_open_stay_so(member: Schema, value: Any) -> None:
    assert check_of({"type": "object", "properties": {"x": member}})({"x": value}) is None


def test_the_arguments_themselves_may_be_put_together() -> None:
    check = check_of({"allOf": [{"properties": {"a": {"type": "integer"}}}, {"properties": {"b": {}}}]})
    assert check({"a": 1, "b": 2}) is None
    assert check({"a": 1, "c": 2}) == "unknown argument 'c'; arguments: none"


def test_an_older_draft_is_closed_at_the_top_only() -> None:
    nested: Schema = {"type": "object", "properties": {"a": {}}}
    check = check_of({"$schema": "http://json-schema.org/draft-07/schema#", "properties": {"x": nested}})
    assert check({"x": {"b": 1}}) is None
    assert check({"y": 1}) == "unknown argument 'y'; arguments: x"


def test_a_schema_nested_too_deeply_is_refused() -> None:
    schema: Schema = {}
    for _ in range(5000):
        schema = {"items": schema}
    with naming(ConfigError, "nested"):
        check_of({"properties": {"x": schema}})


def chain(names: list[str], **top: Any) -> Schema:
    """Definitions of which each names the next one twice about the same value."""
    twice = [{"allOf": [{"$ref": name}] * 2} for name in names[1:]]
    definitions = {f"d{number}": {**one, **top} for number, one in enumerate([*twice, {}])}
    return {"$defs": definitions, "allOf": [{"$ref": names[0]}]}


POINTERS = [f"#/$defs/d{number}" for number in range(40)]
WEB: Schema = {"allOf": [{"$ref": name} for name in POINTERS[:12]]}
UNBOUNDED: list[tuple[Schema, str]] = [
    (chain(POINTERS), "more than 10,000 of its schemas"),
    ({"properties": {"x": chain(POINTERS)}, **chain(POINTERS[:3])}, "path to a schema"),
    ({"properties": {"x": {"$ref": "#/$defs/d0"}}, "$defs": chain(POINTERS)["$defs"]}, "more than 10,000"),
    ({**WEB, "$defs": {f"d{number}": WEB for number in range(12)}}, "leads back to itself"),
    ({"properties": {"x": {"$ref": "#d0"}}, "$defs": {"d0": {"$anchor": "d0"}}}, "path to a schema.*'#d0'"),
    ({"properties": {"x": {"$id": "http://x/", "$ref": "#/$defs/d0"}}, "$defs": {"d0": {}}}, "`.id` below its top"),
]


@pytest.mark.parametrize(("parameters", "said"), UNBOUNDED)
def test_a_schema_that_multiplies_is_refused(parameters: Schema, said: str) -> None:
    """A validator would take hours, as a log or a row can name it."""
    with pytest.raises(ConfigError, match=f"tool_schema of 'f': function.parameters: .*{said}"):
        check_of(json.loads(json.dumps(parameters)))


def test_references_by_members_and_into_lists_are_no_work() -> None:
    members: Schema = {f"a{number}": {"$ref": f"#/$defs/d{number}"} for number in range(30)}
    web: Schema = {f"d{number}": {"type": "object", "properties": members} for number in range(30)}
    listed: Schema = {"anyOf": [{"type": "integer"}, {"type": "null"}]}
    check = check_of(
        {
            "properties": {"x": {"$ref": "#/$defs/d0"}, "y": listed, "z": {"$ref": "#/properties/y/anyOf/0"}},
            "$defs": {**web, "of [a]": {"type": "string"}, "of_b": {"$ref": "#/$defs/of%20%5Ba%5D"}},
        }
    )
    assert check({"x": {"a1": {"a2": {}}}, "z": 3}) is None
    assert check({"x": {"a1": {"b": {}}}}) == "unknown argument 'b' in x.a1"
    assert check({"z": "3"}) is not None


def test_the_faults_of_alternatives_within_alternatives_are_not_listed() -> None:
    """At each of 60 levels a fault is one of both alternatives, so there are 2 to the 60."""
    either: list[Schema] = [
        {"type": "object", "properties": {"of": {"$ref": "#/$defs/e"}, "is": {"const": kind}}, "required": ["is"]}
        for kind in "ab"
    ]
    check = check_of(
        {"properties": {"x": {"$ref": "#/$defs/e"}}, "$defs": {"e": {"anyOf": [*either, {"type": "null"}]}}}
    )
    right: Any = None
    wrong: Any = "x"
    for _ in range(60):
        right, wrong = {"of": right, "is": "b"}, {"of": wrong, "is": "b"}
    assert check({"x": right}) is None
    assert check({"x": wrong}) == "the arguments do not match the schema"
    assert "anyOf" in (check({"x": {"of": "x", "is": "b"}}) or "")
    for _ in range(900):
        wrong = {"of": wrong, "is": "b"}
    assert check({"x": wrong}) == "the arguments do not match the schema"


def test_the_faults_of_a_deep_list_are_told() -> None:
    """A schema that refers to itself once is no work, however deep the value."""
    item: Schema = {"anyOf": [{"type": "integer"}, {"type": "array", "items": {"$ref": "#/$defs/e"}}]}
    check = check_of({"properties": {"x": {"$ref": "#/$defs/e"}}, "$defs": {"e": item}})
    wrong: Any = "x"
    for _ in range(100):
        wrong = [wrong]
    assert "anyOf" in (check({"x": wrong}) or "")


def test_the_reason_is_told_however_long_the_value() -> None:
    item: Schema = {"type": "object", "properties": {"a": {"type": "string"}}}
    check = check_of({"type": "object", "properties": {"x": {"anyOf": [{"type": "null"}, item]}}})
    assert check({"x": {"a": "y" * 1000, "b": 1}}) == "unknown argument 'b' in x"
    assert (check({"x": ["y" * 1000]}) or "").endswith("any of the schemas listed in the 'anyOf' keyword")
    assert (check({"x": {"a": ["y" * 1000]}}) or "").endswith('is not of type "string"')
