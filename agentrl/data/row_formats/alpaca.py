"""Alpaca's columns: an instruction, perhaps with an input, and the output; earlier turns are in `history`."""

from __future__ import annotations

from agentrl.data.messages import Unfit
from agentrl.data.row_formats.format import Conversation, Row, RowFormat
from agentrl.data.row_formats.trl import text_of


def _read(row: Row) -> Conversation:
    instruction, further = text_of(row, "instruction"), _optional(row, "input")
    system, history = _optional(row, "system"), row.get("history") or []
    if not isinstance(history, list):
        raise Unfit("column history", "a list of [instruction, output]", history)
    messages = [{"role": "system", "content": system}] if system else []
    asked = f"{instruction}\n{further}" if further else instruction
    for number, turn in enumerate([*history, [asked, text_of(row, "output")]]):
        if not isinstance(turn, list) or len(turn) != 2 or not all(isinstance(text, str) for text in turn):
            raise Unfit(f"column history, turn {number}", "[instruction, output], two texts", turn)
        messages += [{"role": "user", "content": turn[0]}, {"role": "assistant", "content": turn[1]}]
    return Conversation(messages)


def _optional(row: Row, column: str) -> str:
    return "" if row.get(column) in (None, "") else text_of(row, column)


FORMAT = RowFormat(("instruction", "output"), _read, ("input", "system", "history"))
