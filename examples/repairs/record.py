"""Record repairs by one who knows the right source: `python examples/repairs/record.py ROWS OUT COUNT`.

Each is the conversation that `agent.py` would have, with one call that replaces the faulty lines.
"""

from __future__ import annotations

import difflib
import json
import sys
import tempfile
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
from agent import TOOLS, session  # type: ignore[import-not-found]


def replacement(faulty: str, right: str) -> tuple[str, str]:
    """Find the fewest lines of the faulty source that occur once, and what stands in their place."""
    old, new = faulty.splitlines(keepends=True), right.splitlines(keepends=True)
    blocks = difflib.SequenceMatcher(None, old, new, autojunk=False).get_opcodes()
    changed = [block for block in blocks if block[0] != "equal"]
    first, last = changed[0][1], changed[-1][2]
    shift = len(new) - len(old)
    while first == last or faulty.count("".join(old[first:last])) != 1:
        if last < len(old):
            last += 1
        else:
            first -= 1
    return "".join(old[first:last]), "".join(new[first : last + shift])


def recorded(row: dict[str, Any]) -> list[dict[str, Any]]:
    """Record the conversation of one row, up to its call."""
    files = row["extra_info"]["files"]
    with tempfile.TemporaryDirectory() as place:
        for file in files:
            (Path(place) / file["path"]).write_text(file["text"])
        old, new = replacement(files[0]["text"], row["reward_model"]["ground_truth"])
        function = {"name": "replace", "arguments": json.dumps({"old": old, "new": new})}
        call = {"id": "call", "type": "function", "function": function}
        said = {"role": "assistant", "content": "", "tool_calls": [call]}
        *messages, answer = session(row["prompt"][0]["content"], Path(place), lambda _: said)
        assert answer["content"] == "Tests: they pass.", answer
    return messages


def main(rows: str, out: str, count: str) -> None:
    """Write the conversations of the first rows."""
    found = [recorded(row) for row in pq.read_table(rows).slice(0, int(count)).to_pylist()]
    conversations = [{"messages": json.dumps(messages), "tools": json.dumps(TOOLS)} for messages in found]
    Path(out).parent.mkdir(parents=True, exist_ok=True)
    pq.write_table(pa.Table.from_pylist(conversations), out)
    print(f"{out}: {len(found)} recorded repairs")


if __name__ == "__main__":
    main(*sys.argv[1:])
