"""Sessions by the clients that people have: each form acts in a session of five turns, streamed and not.

`python -m benchmarks.rollouts.clients [FORM ...] [--folder F]` installs the releases of `client_forms/pins.txt`, each
group into an environment of its own below F, and lets each program of `client_forms/` act: it asks two questions, and
a scripted policy answers with reasoning, a call, two calls at once, a text, another call, and JSON. A session is exact
where the record has each token that was sampled once, no request was refused, and the program saw both answers. It
prints a table of the forms, and names those that could not be installed. Exits with 1 where a session is not exact.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import random
import subprocess
import sys
import tempfile
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from agentrl.chat import Chat
from agentrl.quickstart.tiny_policy import make_tiny_policy
from tests.agent_loop.conftest import call
from tests.openai_api.conftest import scripted
from tests.openai_api.test_record import recorded, said

FORMS_FOLDER = Path(__file__).parent / "client_forms"
THOUGHT = "<think>\nTwo and three, é \U0001f600.\n</think>\n\n"
TURNS = (
    THOUGHT + "I add.\n" + call("add", a=2, b=3),
    call("add", a=1, b=1) + "\n" + call("add", a=2, b=2),
    "The sum is 5 \U0001f600.",
    call("add", a=5, b=5),
    '{"sum": 10}',
)
LIMITS = {"max_model_len": 16384, "max_prompt_tokens": 16000, "max_response_tokens": 8192, "max_assistant_turns": 30}
SECONDS = 120


@dataclass(frozen=True)
class Form:
    """One way to call one API by one client."""

    environment: str
    program: str
    argument: str = "chat"
    says: Sequence[str] = TURNS
    transcripts: Sequence[int] = (1, 1)
    """Transcripts of a session, by mode."""
    why: str = ""
    """Why it has more transcripts than one, or lacks a part."""
    modes: Sequence[str] = ("whole", "stream")


@dataclass
class Seen:
    """One session."""

    problems: list[str] = field(default_factory=list)
    calls: int = 0
    streamed: int = 0
    paths: set[str] = field(default_factory=set)
    transcripts: int = 0
    metrics: dict[str, float] = field(default_factory=dict)
    asked: list[dict[str, Any]] = field(default_factory=list)
    ids: list[str] = field(default_factory=list)
    """Ids of the answers."""

    def requests(self) -> str:
        """Write the requests, with the numbers of answers in place of their ids."""
        text = json.dumps(self.asked, indent=1)
        for number, id in enumerate(self.ids):
            text = text.replace(id, f"<answer {number}>")
        return text + "\n"


def fields(**values: str) -> str:
    """Write fields as dspy wants them."""
    return "\n\n".join(f"[[ ## {name} ## ]]\n{value}" for name, value in values.items()) + "\n\n[[ ## completed ## ]]"


RESULTS = tuple(call("PartialResult", sum=sum) for sum in (5, 7, 10))
ANSWERS = ('{"sum": 5}', '{"sum": 7}', '{"sum": 10}')
FINISH = fields(next_thought="Done.", next_tool_name="finish", next_tool_args="{}")
FIELDS = (
    fields(next_thought="I add.", next_tool_name="add", next_tool_args='{"a": 2, "b": 3}'),
    FINISH,
    fields(reasoning="It is plain.", answer="The sum is 5."),
    fields(next_thought="I add.", next_tool_name="add", next_tool_args='{"a": 5, "b": 5}'),
    FINISH,
    fields(reasoning="It is plain.", answer="10"),
)
FINAL = (
    THOUGHT + "I add.\n" + call("add", a=2, b=3),
    call("add", a=1, b=1) + "\n" + call("add", a=2, b=2),
    call("final_answer", answer="The sum is 5."),
    call("add", a=5, b=5),
    call("final_answer", answer="10"),
)
FORMS: dict[str, Form] = {}


def forms(environment: str, program: str, *arguments: str, **more: Any) -> None:
    """Declare the forms of a program."""
    name = program.partition(".")[0].removesuffix("_python")
    for argument in arguments or ("chat",):
        FORMS[f"{name}-{argument}"] = Form(environment, program, argument, **more)


forms("openai", "openai_python.py", "chat", "parse", "responses", "responses-items", "raw")
forms("anthropic", "anthropic_python.py", "messages", "runner")
forms("langchain", "langchain_python.py", "chat", "chat-graph", "responses", "messages")
forms("agents", "openai_agents.py", "chat", "responses")
forms("pydantic", "pydantic_ai_python.py", "chat", "responses", "messages")
forms("litellm", "litellm_python.py", "chat", "responses", "messages")
OWN = "the program writes the answers in its own words"
forms("instructor", "instructor_python.py", "chat-json", says=ANSWERS, transcripts=(3, 3), why=OWN)
forms("instructor", "instructor_python.py", "chat-tools", "messages", says=RESULTS, transcripts=(3, 3), why=OWN)
TEXTS = "it writes calls and their answers as texts"
forms("smolagents", "smolagents_python.py", "tools", "tools-litellm", says=FINAL, transcripts=(5, 5), why=TEXTS)
forms("llamaindex", "llama_index_python.py", "chat", "messages")
forms("llamaindex", "llama_index_python.py", "responses", transcripts=(2, 2), why="it leaves out reasoning")
forms("autogen", "autogen_python.py", "chat")
forms("autogen", "autogen_python.py", "messages", transcripts=(2, 2), why="it sends reasoning back as text")
CUT = "it leaves out text before a call"
forms("crewai", "crewai_python.py", "chat", "messages", transcripts=(3, 3), why=f"{CUT}, and each task begins anew")
forms("dspy", "dspy_python.py", says=FIELDS, transcripts=(6, 6), why="it writes a new prompt for each call")
forms("haystack", "haystack_python.py", "chat", "responses")
forms("haystack", "haystack_python.py", "messages", transcripts=(2, 1), why=f"{CUT} where it does not stream")
forms("agno", "agno_python.py", "chat", "messages")
forms("agno", "agno_python.py", "responses", transcripts=(2, 2), why=f"{CUT}, and reasoning")
STREAMS = "it always streams"
forms("strands", "strands_python.py", "chat", "messages", "litellm", modes=("stream",), why=STREAMS)
forms("strands", "strands_python.py", "responses", modes=("stream",), transcripts=(2,), why="it leaves out reasoning")
forms("adk", "adk_python.py")
forms("sk", "semantic_kernel_python.py", "chat", "messages", transcripts=(2, 3), why=CUT)
forms("maf", "agent_framework_python.py", "chat", "responses", "messages")
forms("node", "vercel.mjs", "compatible", "chat", "responses", "messages")
forms("node", "openai_node.mjs", "chat", "responses")
forms("node", "anthropic_node.mjs", "messages")
forms("node", "langchain_node.mjs", "chat", "responses", "messages")
forms("node", "openai_agents_node.mjs", "chat", "responses")


def pins() -> dict[str, list[str]]:
    """Read the requirements by environment."""
    lines = (FORMS_FOLDER / "pins.txt").read_text(encoding="utf-8").splitlines()
    words = [line.split() for line in lines if line and not line.startswith("#")]
    return {name: requirements for name, *requirements in words}


def installed(name: str, requirements: Sequence[str], folder: Path) -> bool:
    """Install an environment, unless it is there; False where it cannot be."""
    target, log = folder / name, folder / f"{name}.log"
    done, wanted = target / "done", " ".join(requirements)
    if done.exists() and done.read_text() == wanted:
        return True
    target.mkdir(parents=True, exist_ok=True)
    if name == "node":
        (target / "package.json").write_text("{}")
        commands = [["npm", "install", "--no-audit", "--no-fund", "--ignore-scripts", "--prefix", str(target)]]
    else:
        commands = [
            [sys.executable, "-m", "venv", str(target)],
            [str(target / "bin" / "python"), "-m", "pip", "install", "--quiet"],
        ]
    commands[-1] += requirements
    with log.open("w") as out:
        for command in commands:
            try:
                if subprocess.run(command, stdout=out, stderr=out).returncode:
                    return False
            except FileNotFoundError:  # npm
                return False
    done.write_text(wanted)
    return True


async def act(chat: Chat, form: Form, mode: str, folder: Path, seed: int, out: Path | None = None) -> Seen:
    """Let a form act in a session."""
    seen = Seen()
    texts = iter(form.says)
    async with scripted(chat, lambda session, turn: next(texts, "No more."), **LIMITS) as (service, engine):
        engine.pieces, engine.most_between = random.Random(seed), 0.03
        async with service.session() as open:
            begin = open.session.begin

            async def spied(body: bytes, dialect: Any, delivery: Any, read: Any = None) -> Any:
                value = json.loads(body)
                seen.calls, seen.streamed = seen.calls + 1, seen.streamed + bool(value.get("stream"))
                seen.paths.add(dialect.path.removeprefix("v1/"))
                seen.asked.append({"path": dialect.path, "body": value})
                begun = await begin(body, dialect, delivery, read)
                seen.ids.append(begun[1].begun.id)
                return begun

            open.session.begin = spied  # type: ignore[method-assign]
            program = FORMS_FOLDER / form.program
            environment = {"PATH": os.environ["PATH"], "HOME": str(folder), "PYTHONWARNINGS": "ignore"}
            environment |= {"OPENAI_API_KEY": "unused", "ANTHROPIC_API_KEY": "unused"}
            environment |= {"OPENAI_BASE_URL": open.base_url, "ANTHROPIC_BASE_URL": open.base_url.removesuffix("/v1")}
            environment |= {"LITELLM_LOCAL_MODEL_COST_MAP": "True"}
            if form.environment == "node":
                for file in FORMS_FOLDER.glob("*.mjs"):  # Modules are found from the place of a file.
                    (folder / "node" / file.name).write_text(file.read_text())
                command = ["node", str(folder / "node" / program.name)]
            else:
                command = [str(folder / form.environment / "bin" / "python"), str(program)]
            process = await asyncio.create_subprocess_exec(
                *[*command, open.base_url, form.argument, mode],
                cwd=folder,
                env=environment,
                stdout=asyncio.subprocess.PIPE,
                stderr=asyncio.subprocess.PIPE,
            )
            try:
                async with asyncio.timeout(SECONDS):
                    written, errors = await process.communicate()
            except TimeoutError:
                process.kill()
                written, errors = await process.communicate()
                seen.problems.append(f"no end within {SECONDS} s")
            if process.returncode:
                seen.problems.append(f"exit {process.returncode}: {errors.decode()[-1500:]}")
            text = written.decode()
            if "5" not in text or "10" not in text:
                seen.problems.append(f"answers: {text[-300:]!r}")
            if open.session.last_error:
                seen.problems.append(f"refused: {open.session.last_error}")
    trajectory = open.trajectory
    if recorded(trajectory) != said(engine):
        problem = "the record has other tokens than were sampled"
        seen.problems.append(f"{problem}: {len(recorded(trajectory))} for {len(said(engine))}")
    if next(texts, None) is not None:
        seen.problems.append("a turn was not asked for")
    seen.transcripts, seen.metrics = len(trajectory.transcripts), dict(trajectory.metrics)
    expected = form.transcripts[form.modes.index(mode)]
    if seen.transcripts != expected:
        causes = {name: n for name, n in seen.metrics.items() if "opened" in name}
        seen.problems.append(f"{seen.transcripts} transcripts, expected {expected}: {causes}")
    return seen


async def run(names: Sequence[str], folder: Path, out: Path | None) -> bool:
    """Run forms; print the table."""
    folder.mkdir(parents=True, exist_ok=True)
    wanted, fine, missing = pins(), True, list[str]()
    with tempfile.TemporaryDirectory() as scratch:
        chat = Chat.from_pretrained(str(make_tiny_policy(Path(scratch) / "policy", seed=1)))
    lines = ["| form | releases | API | calls streamed | transcripts | dropped |", "|---|---|---|---|---|---|"]
    here = {name: installed(name, wanted[name], folder) for name in sorted({FORMS[one].environment for one in names})}
    for name in names:
        form = FORMS[name]
        if not here[form.environment]:
            missing.append(name)
            continue
        both = [await act(chat, form, mode, folder, seed, out) for seed, mode in enumerate(form.modes)]
        for mode, seen in zip(form.modes, both, strict=True):
            for problem in seen.problems:
                fine = False
                print(f"{name} {mode}: {problem}", file=sys.stderr, flush=True)
            if out is not None:
                (out / f"{name}-{mode}.json").write_text(seen.requests())
        dropped = Counter[str]()
        for seen in both:
            dropped.update(
                {key.removeprefix("openai_dropped_"): int(n) for key, n in seen.metrics.items() if "dropped" in key}
            )
        cells = [
            f"`{name}`",
            " ".join(wanted[form.environment][:1]) if form.environment != "node" else "node",
            ", ".join(sorted(both[0].paths)),
            f"{sum(seen.streamed for seen in both)} of {sum(seen.calls for seen in both)}",
            " and ".join(dict.fromkeys(str(seen.transcripts) for seen in both)) + (f": {form.why}" if form.why else ""),
            ", ".join(f"{key} {n}" for key, n in sorted(dropped.items())) or "-",
        ]
        lines.append("| " + " | ".join(cells) + " |")
        print(lines[-1], flush=True)
    print("\n".join(["", *lines]))
    for name in missing:
        print(f"not installed: {name} ({' '.join(wanted[FORMS[name].environment])}); see {folder}")
    return fine


def main() -> int:
    """Run what the command line asks for."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("forms", nargs="*", metavar="FORM", help=f"one of {', '.join(FORMS)}; without: all")
    parser.add_argument("--folder", type=Path, default=Path("runs/clients"), help="environments are kept here")
    parser.add_argument("--requests", type=Path, help="write the requests of each session into this folder")
    asked = parser.parse_args()
    if unknown := set(asked.forms) - FORMS.keys():
        parser.error(f"expected forms of the list above, found {', '.join(sorted(unknown))}")
    if asked.requests is not None:
        asked.requests.mkdir(parents=True, exist_ok=True)
    return 0 if asyncio.run(run(asked.forms or list(FORMS), asked.folder.resolve(), asked.requests)) else 1


if __name__ == "__main__":
    sys.exit(main())
