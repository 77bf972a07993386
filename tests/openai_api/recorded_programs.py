"""Requests of published coding programs in a whole session each, without their texts.

`python -m tests.openai_api.recorded_programs NAME EXECUTABLE` runs a program with nothing set but address, key, model
and home, and writes `recorded/programs/NAME.json`. Every longer text becomes a word of its own: what is kept is the
form of the requests, and which texts are the same. A summary of the policy is kept in the texts that show it.
"""

from __future__ import annotations

import asyncio
import hashlib
import json
import os
import re
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from agentrl.chat import Chat
from agentrl.quickstart.tiny_policy import make_tiny_policy
from tests.agent_loop.conftest import call
from tests.openai_api.conftest import scripted

FOLDER = Path(__file__).parent / "recorded" / "programs"
TASK = "Fix add.py"
LONGEST, WORDS = 40, 2
"""Characters of the longest text that is kept, and its blanks."""
ROOM = {
    "max_response_tokens": 1 << 17,
    "max_model_len": 1 << 18,
    "max_prompt_tokens": 1 << 18,
    "max_assistant_turns": 60,
}
FILE = "{work}/add.py"
SUMMARY = "Half of the work on add.py is done."
SAYS: dict[str, list[str]] = {
    "claude_code": [
        "I look.\n" + call("Read", file_path=FILE) + "\n" + call("ToolSearch", query="select:CronList,TaskStop"),
        call("Edit", file_path=FILE, old_string="-", new_string="+"),
        call("CronList"),
        call("Agent", description="Look", prompt="Is it right?", subagent_type="general-purpose"),
        "I wait.",
        call("nonsense"),
        *["It is fixed."] * 9,
    ],
    "codex": [
        "I look.\n" + call("exec_command", cmd="cat add.py") + "\n" + call("exec_command", cmd="ls"),
        call("exec_command", cmd="sed -i s/-/+/ add.py"),
        call("multi_agent_v1__spawn_agent", message="Is it right?"),
        call("nonsense"),
        *["It is fixed."] * 9,
    ],
    "codex_compacts": [
        *[call("exec_command", cmd="seq 1 900")] * 2,
        SUMMARY,
        call("exec_command", cmd="sed -i s/-/+/ add.py"),
        *["It is fixed."] * 9,
    ],
    "mini_swe_agent": [
        "I look.\n" + call("bash", command="cat add.py"),
        call("bash", command="sed -i s/-/+/ add.py") + "\n" + call("bash", command="cat add.py"),
        *[call("bash", command="echo COMPLETE_TASK_AND_SUBMIT_FINAL_OUTPUT")] * 9,
    ],
    "opencode": [
        "A title",
        "I look.\n" + call("read", filePath=FILE) + "\n" + call("bash", command="ls", description="List"),
        call("edit", filePath=FILE, oldString="-", newString="+"),
        *["It is fixed."] * 9,
    ],
    "pi": [
        "I look.\n" + call("read", path="add.py") + "\n" + call("bash", command="ls"),
        call("edit", path="add.py", edits=[{"oldText": "-", "newText": "+"}]),
        call("nonsense"),
        *["It is fixed."] * 9,
    ],
}
"""What the policy says, one text after another."""
CODEX = """model = "policy"
model_provider = "agentrl"
[model_providers.agentrl]
name = "agentrl"
base_url = "{url}"
env_key = "OPENAI_API_KEY"
wire_api = "responses"
"""
OPENCODE: dict[str, Any] = {
    "model": "agentrl/policy",
    "small_model": "agentrl/policy",
    "provider": {
        "agentrl": {
            "npm": "@ai-sdk/openai-compatible",
            "options": {"baseURL": "{url}", "apiKey": "unused"},
            "models": {"policy": {}},
        }
    },
}
PI = {
    "providers": {
        "agentrl": {
            "baseUrl": "{url}",
            "apiKey": "unused",
            "api": "openai-responses",
            "models": [{"id": "policy", "reasoning": True}],
        }
    }
}
CODEX_WORDS = ["exec", "--skip-git-repo-check", "--dangerously-bypass-approvals-and-sandbox", TASK]
PROGRAMS: dict[str, tuple[list[str], str, str]] = {
    "claude_code": (["-p", TASK, "--dangerously-skip-permissions"], "", ""),
    "codex": (CODEX_WORDS, ".codex/config.toml", CODEX),
    "codex_compacts": (CODEX_WORDS, ".codex/config.toml", f"model_auto_compact_token_limit = 24000\n{CODEX}"),
    "mini_swe_agent": (
        [
            *("-y", "--exit-immediately", "-l", "0", "-m", "openai/policy", "-o", "../trajectory.json", "-t", TASK),
            *("-c", "mini.yaml", "-c", 'model.model_kwargs.api_base="{url}"'),
        ],
        "",
        "",
    ),
    "opencode": (["run", TASK], ".config/opencode/opencode.json", json.dumps(OPENCODE)),
    "pi": (["--provider", "agentrl", "--model", "policy", "-p", TASK], ".pi/agent/models.json", json.dumps(PI)),
}
"""Arguments of each program, and its settings."""


OFFLINE = {
    "IS_SANDBOX": "1",
    "PI_OFFLINE": "1",
    "MSWEA_CONFIGURED": "true",
    "MSWEA_COST_TRACKING": "ignore_errors",
    "LITELLM_LOCAL_MODEL_COST_MAP": "True",
}
"""Variables without which one of them asks, or looks things up elsewhere."""


async def record(name: str, executable: str) -> list[dict[str, Any]]:
    """Run a program; return its requests."""
    arguments, file, settings = PROGRAMS[name]
    asked: list[dict[str, Any]] = []
    with tempfile.TemporaryDirectory() as folder:
        root = Path(folder)
        home, work = root / "home", root / "work"
        work.mkdir()
        (work / "add.py").write_text("def add(a, b): return a - b\n")
        subprocess.run(["git", "init", "-q", "."], cwd=work, check=True)
        chat = Chat.from_pretrained(str(make_tiny_policy(root / "tiny", seed=1)))
        says = [text.replace("{work}", str(work)) for text in SAYS[name]]
        async with scripted(chat, says, **ROOM) as (service, _), service.session() as open:
            begin = open.session.begin

            async def spied(body: bytes, dialect: Any, delivery: Any, read: Any = None) -> Any:
                asked.append({"path": dialect.path, "body": json.loads(body)})
                return await begin(body, dialect, delivery, read)

            open.session.begin = spied  # type: ignore[method-assign]
            (home / file).parent.mkdir(parents=True, exist_ok=True)
            if file:
                (home / file).write_text(settings.replace("{url}", open.base_url))
            environment = {"PATH": os.environ["PATH"], "HOME": str(home), **OFFLINE}
            for vendor, url in (("OPENAI", open.base_url), ("ANTHROPIC", open.base_url.removesuffix("/v1"))):
                environment |= {f"{vendor}_API_KEY": "unused", f"{vendor}_BASE_URL": url, f"{vendor}_MODEL": "policy"}
            process = await asyncio.create_subprocess_exec(
                executable,
                *[one.replace("{url}", open.base_url) for one in arguments],
                cwd=work,
                env=environment,
                stdin=asyncio.subprocess.DEVNULL,
            )
            await process.wait()
            print(open.trajectory.metrics)
        text = json.dumps(asked).replace(str(root), "")
    return list(json.loads(text))


def scrubbed(value: Any, name: str = "") -> Any:
    """Put a word in place of every longer text, and of what is new in each session."""
    if isinstance(value, dict):
        return {key: scrubbed(member, key) for key, member in value.items()}
    if isinstance(value, list):
        return [scrubbed(member, name) for member in value]
    if not isinstance(value, str) or name in ("encrypted_content", "arguments"):
        return value
    if len(value) > LONGEST or value.count(" ") > WORDS or re.search("[0-9a-f]{8}-[0-9a-f]{4}-|[0-9a-f]{12}", value):
        return f"text-{hashlib.sha256(value.encode()).hexdigest()[:10]}{f' {SUMMARY}' * (SUMMARY in value)}"
    return value


def packed(asked: list[dict[str, Any]]) -> dict[str, Any]:
    """Write tools and messages that several requests have once."""
    parts: dict[str, Any] = {}

    def place(member: Any) -> str:
        key = hashlib.sha256(json.dumps(member, sort_keys=True).encode()).hexdigest()[:8]
        parts[key] = member
        return key

    requests = []
    for one in asked:
        body = {
            key: [place(member) for member in value] if key in LISTS and isinstance(value, list) else value
            for key, value in one["body"].items()
        }
        requests.append({"path": one["path"], "body": body})
    return {"parts": parts, "requests": requests}


LISTS = ("tools", "messages", "input", "system")


def requests_of(name: str) -> list[dict[str, Any]]:
    """Read the requests of a program."""
    file = json.loads((FOLDER / f"{name}.json").read_text(encoding="utf-8"))
    for one in file["requests"]:
        one["body"] |= {
            key: [file["parts"][part] for part in value]
            for key, value in one["body"].items()
            if key in LISTS and isinstance(value, list)
        }
    requests: list[dict[str, Any]] = file["requests"]
    return requests


def write(name: str, asked: list[dict[str, Any]]) -> None:
    """Write the requests of a program, without their texts."""
    found = packed(scrubbed(asked))
    lines = ",\n".join(f"{json.dumps(key)}: {json.dumps(part)}" for key, part in found["parts"].items())
    requests = ",\n".join(json.dumps(one) for one in found["requests"])
    FOLDER.mkdir(exist_ok=True)
    text = f'{{"parts": {{\n{lines}\n}},\n"requests": [\n{requests}\n]}}\n'
    (FOLDER / f"{name}.json").write_text(text, encoding="utf-8")


if __name__ == "__main__":
    write(sys.argv[1], asyncio.run(record(*sys.argv[1:])))
