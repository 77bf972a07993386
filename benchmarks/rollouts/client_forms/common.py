"""Parts that the programs of all clients share: the session, its mode, the questions, the tool."""

import json
import sys

URL, FORM, STREAM = sys.argv[1], sys.argv[2], sys.argv[3] == "stream"
ROOT = URL.removesuffix("/v1")
QUESTIONS = ["What is 2 + 3?", "And twice that?"]
DESCRIPTION = "Add two numbers."
PARAMETERS = {
    "type": "object",
    "properties": {"a": {"type": "integer"}, "b": {"type": "integer"}},
    "required": ["a", "b"],
    "additionalProperties": False,
}
FUNCTION = {"name": "add", "description": DESCRIPTION, "parameters": PARAMETERS}
RESULT = {
    "type": "object",
    "properties": {"sum": {"type": "integer"}},
    "required": ["sum"],
    "additionalProperties": False,
}


def add(a: int, b: int) -> int:
    """Add two numbers."""
    return a + b


def answer(arguments: str | dict) -> str:
    """Answer a call."""
    return str(add(**(json.loads(arguments) if isinstance(arguments, str) else arguments)))
