"""GSM8K (arXiv:2110.14168): the test problems, answered in plain text after `####`."""

from __future__ import annotations

import hashlib
import json

from agentrl.errors import DataError
from agentrl.suites.contract import Request, Row, Suite, Tasks, chosen

PROMPT = "Let's think step by step and output the final answer after `####`."
WHERE = "--source FOLDER names the folder with test.jsonl, from https://github.com/openai/grade-school-math"


def tasks(request: Request) -> Tasks:
    """Read test.jsonl. Raises DataError for a missing file, and names a line that cannot be used."""
    chosen(request.parts, ("test",), ())
    if request.source is None:
        raise DataError(f"the suite gsm8k fetches nothing: {WHERE}")
    path = request.source / "test.jsonl" if request.source.is_dir() else request.source
    try:
        content = path.read_bytes()
        lines = [line.decode("utf-8") for line in content.splitlines()]
    except (OSError, UnicodeDecodeError) as error:
        raise DataError(f"{path}: cannot be read ({error}); {WHERE}") from error
    rows = []
    for number, line in enumerate(lines[: request.limit], start=1):
        try:
            record = json.loads(line)
            question, (_, marker, result) = str(record["question"]), str(record["answer"]).rpartition("####")
        except (ValueError, KeyError, TypeError):
            question = marker = result = ""
        if not (question and marker and result.strip()):
            raise DataError(
                f"{path}:{number}: expected an object with `question`, and an `answer` that ends with `#### N`, found "
                f"{line[:80]!r}"
            )
        truth = result.strip().replace(",", "")
        rows.append(Row("test", str(number - 1), f"{question} {PROMPT}", truth, "openai/gsm8k"))
    return Tasks(rows, f"test.jsonl with SHA-256 {hashlib.sha256(content).hexdigest()}")


GSM8K = Suite(tasks, {"data.max_prompt_length": 1024, "data.max_response_length": 1024})
