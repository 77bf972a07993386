"""Coding programs as they are published act in whole sessions: `make setup-programs`."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import chain
from typing import Any

import pytest

from agentrl.agents.agent import AgentOptions
from agentrl.trajectory import Status, Trajectory
from tests.agent_loop.conftest import call
from tests.harnesses.conftest import IS_RIGHT, TASK, Harnessed
from tests.harnesses.network import Network
from tests.openai_api.test_programs import rendered
from tests.programs import program

Requests = list[dict[str, Any]]
Turn = str | Callable[[str], str]
"""What the policy says, or a function of the prompt that returns it."""

SHELLS = {
    "claude_code": ("claude", "Bash", "command"),
    "codex": ("codex", "exec_command", "cmd"),
    "mini_swe_agent": ("mini", "bash", "command"),
    "opencode": ("opencode", "bash", "command"),
    "pi": ("pi", "bash", "command"),
}
"""The executable, and its shell's name and parameter."""
WRITE = "printf 5 > answer.txt"
FIND = "Find the numbers."
FOUND = "The numbers are two and three, as the folder's notes say on their first line."
AGENTS: dict[str, list[Turn]] = {
    "claude_code": [
        call("Agent", description="Find", prompt=FIND, subagent_type="general-purpose", run_in_background=False)
    ],
    "codex": [
        call("multi_agent_v1__spawn_agent", message=FIND),
        lambda prompt: call(
            "multi_agent_v1__wait_agent", targets=[re.findall(r'agent_id[\\":]+([0-9a-f-]+)', prompt)[-1]]
        ),
    ],
    "opencode": [call("task", description="Find", prompt=FIND, subagent_type="general")],
}
"""Turns in which the main agent has another one find the numbers."""
SMALL: dict[str, dict[str, Any]] = {
    "claude_code": {
        "arguments": [
            "--settings",
            '{"env": {"CLAUDE_CODE_AUTO_COMPACT_WINDOW": "100000", "CLAUDE_AUTOCOMPACT_PCT_OVERRIDE": "60"}}',
        ]
    },
    "codex": {"arguments": ["-c", "model_auto_compact_token_limit=27000"]},
    "opencode": {"context_window": 60_000},
    "pi": {"context_window": 24_000},
}
"""Options by which a program shortens its context after a few turns."""
ROOM = {"claude_code": 58_000, "opencode": 34_000}
"""Tokens of a model's context that hold a few turns. The other programs end where the endpoint refuses more."""
TITLES = {"opencode": ["A title"]}
"""Answers to side calls of a program."""
ASKS_SUMMARY = re.compile("detailed summary|CONTEXT CHECKPOINT|anchored summary|context checkpoint summary")
DENIED: dict[str, tuple[dict[str, Any], list[dict[str, str]], str, str]] = {
    "claude_code": (
        {"arguments": ["--settings", '{"permissions": {"deny": ["Bash(rm:*)"]}}']},
        [],
        "rm notes.txt",
        "Permission to use Bash with command rm notes.txt has been denied",
    ),
    "codex": ({}, [], "touch /usr/notes.txt", "touch: cannot touch"),
    "opencode": (
        {},
        [{"path": "opencode.json", "text": '{"permission": {"bash": {"*": "allow", "rm *": "deny"}}}'}],
        "rm notes.txt",
        "prevents you from using this specific tool call",
    ),
}
"""Options and files by which a program refuses a command, the command, and what the policy then reads."""


def run(name: str, command: str) -> str:
    """Call a program's shell."""
    _, tool, parameter = SHELLS[name]
    return call(tool, **{parameter: command}, **({"description": "runs it"} if name == "opencode" else {}))


def step(name: str, number: int, more: str = "") -> str:
    """Call a program's shell, whose answer then holds DONE-NUMBER-."""
    return run(name, f"{more}printf 'DO%s-%d-' NE {number}")


@dataclass
class Policy:
    """Says one text after another in the main conversation, whatever it was given, and then the last one."""

    name: str
    turns: Sequence[Turn]
    summaries: int = 0
    _said: int = 0

    @property
    def summary(self) -> str:
        """The newest summary of the conversation."""
        return f"<summary>\nIn part {self.summaries} of the work on the sum, nothing was finished yet.\n</summary>"

    def __call__(self, prompt: str) -> str:
        asked = prompt.rpartition("<|im_start|>user")[2]
        if "title generator" in prompt:
            return "A title"
        if ASKS_SUMMARY.search(asked):
            self.summaries += 1
            return self.summary
        if FIND in prompt and TASK not in prompt:
            return FOUND if "DONE-0-" in prompt else step(self.name, 0)
        self._said += 1
        if self._said <= len(self.turns):
            turn = self.turns[self._said - 1]
            return turn if isinstance(turn, str) else turn(prompt)
        if self.name == "mini_swe_agent":
            return run(self.name, "echo COMPLETE_TASK_AND_SUBMIT_FINAL_OUTPUT")
        return "The sum is there."


@dataclass
class Acted:
    """A session that is over."""

    used: Harnessed
    found: Trajectory
    requests: Requests

    def metric(self, name: str) -> float:
        return self.found.metrics.get(f"openai_{name}", 0.0)

    @property
    def said(self) -> Counter[int]:
        """Every id that the engine sampled."""
        return Counter(chain.from_iterable(chain.from_iterable(self.used.bench.engine.said.values())))

    @property
    def recorded(self) -> Counter[int]:
        """Every id of the record with the mask 1."""
        pairs = chain.from_iterable(zip(one.ids, one.mask, strict=True) for one in self.found.transcripts)
        return Counter(id for id, mask in pairs if mask)

    @property
    def left_out(self) -> list[str]:
        """Texts of the policy that are not trained on."""
        kept = {id(turn) for turn in self.found.trained_turns}
        return [turn.text for turn in self.found.turns if turn.role == "assistant" and id(turn) not in kept]


Act = Callable[..., Any]


@pytest.fixture
def act(harnessed: Callable[..., Harnessed], requests: Requests) -> Act:
    """Run a session of a program that writes the right answer; nothing that it asks is refused."""

    async def make(
        name: str,
        turns: Sequence[Turn],
        files: Any = (),
        policy: Policy | None = None,
        held_behind: str = "",
        room: int = 1_000_000,
        **more: Any,
    ) -> Acted:
        command = [str(program(SHELLS[name][0]))]
        options = AgentOptions(harness=name, command=command, check=IS_RIGHT, harness_options=more)
        used = harnessed(options, policy or Policy(name, turns), max_model_len=room)
        used.bench.engine.held_behind = held_behind
        (found,) = await used.run({"files": [{"path": "notes.txt", "text": "Numbers: 2, 3."}, *files]})
        assert (found.status, found.score) == (Status.COMPLETED, 1.0), found.failure
        acted = Acted(used, found, requests)
        assert acted.metric("bad_requests") == 0 and (acted.metric("refused") > 0) == (room < 1_000_000)
        return acted

    return make


pytestmark = [pytest.mark.slice(0, "matrix"), pytest.mark.timeout(300)]


@pytest.mark.parametrize("name", SHELLS)
async def test_thirty_turns_are_one_transcript_whose_prompts_are_a_servers(act: Act, name: str) -> None:
    acted = await act(name, [step(name, number, f"{WRITE}; " if number == 9 else "") for number in range(30)])
    assert acted.recorded == acted.said and acted.left_out == TITLES.get(name, [])
    assert sum(bool(turn.calls) for turn in acted.found.turns) >= 30
    main = max(acted.found.transcripts, key=len)
    last = rendered(acted.used.bench.chat, acted.requests[-1])
    assert main.ids[: len(last)] == last and all(main.mask[len(last) :])
    prompts = [ids for prompts in acted.used.bench.engine.prompts.values() for ids in prompts]
    assert all(rendered(acted.used.bench.chat, request) in prompts for request in acted.requests)


@pytest.mark.parametrize("name", SHELLS)
async def test_parallel_calls_are_answered_in_one_turn(act: Act, name: str) -> None:
    acted = await act(name, ["I look.\n" + "\n".join(step(name, number) for number in range(3)), run(name, WRITE)])
    assert acted.recorded == acted.said and acted.left_out == TITLES.get(name, [])
    after = next(ids for prompts in acted.used.bench.engine.prompts.values() for ids in prompts[1:])
    assert all(f"DONE-{number}-" in acted.used.bench.chat.decode(after) for number in range(3))


@pytest.mark.parametrize("name", AGENTS)
async def test_a_sub_agent_is_trained_on_with_the_main_conversation(act: Act, name: str) -> None:
    acted = await act(name, [step(name, 7), *AGENTS[name], run(name, WRITE)])
    assert acted.recorded == acted.said
    assert acted.metric("sub_agents") == 1 and acted.left_out == TITLES.get(name, [])
    assert FOUND in [turn.text for turn in acted.found.turns]


@pytest.mark.parametrize("name", SMALL)
async def test_a_program_shortens_its_context_and_goes_on(act: Act, name: str) -> None:
    turns = [step(name, number, "seq 1 900; ") for number in range(6)]
    policy = Policy(name, [*turns, run(name, WRITE)])
    acted = await act(name, (), policy=policy, **SMALL[name])
    assert acted.recorded == acted.said
    assert policy.summaries >= 1
    # Pi shortens its context when the work is over, and nobody reads that summary.
    assert acted.left_out == ([policy.summary] if name == "pi" else TITLES.get(name, []))


@pytest.mark.parametrize("name", ROOM)
async def test_a_program_that_meets_the_end_of_the_models_context_goes_on(act: Act, name: str) -> None:
    turns = [step(name, number, "seq 1 900; ") for number in range(6)]
    policy = Policy(name, [*turns, run(name, WRITE)])
    acted = await act(name, (), policy=policy, room=ROOM[name])
    assert acted.recorded == acted.said
    assert policy.summaries >= 1 and acted.left_out == TITLES.get(name, [])


@pytest.mark.parametrize("name", [name for name in SHELLS if name != "mini_swe_agent"])
async def test_of_a_stream_that_breaks_what_was_delivered_is_recorded(act: Act, network: Network, name: str) -> None:
    network.breaks_at = b"HERE"
    begun = "I think that the sum is to be found in the notes, and HERE"
    turns = [
        step(name, 0),
        f"{begun} I begin to look for it.\n" + run(name, "touch lost.txt"),
        step(name, 1),
        run(name, WRITE),
    ]
    policy = Policy(name, turns)
    acted = await act(name, (), policy=policy, held_behind="HERE")
    chat = acted.used.bench.chat
    delivered = chat.encode(begun)
    (lost,) = [turn for said in acted.used.bench.engine.said.values() for turn in said if "HERE" in chat.decode(turn)]
    assert not network.is_whole and lost[: len(delivered)] == delivered
    assert acted.recorded == acted.said - Counter(lost[len(delivered) :])
    assert not any("touch lost" in chat.decode(one.ids) for one in acted.found.transcripts)


@pytest.mark.parametrize("name", SHELLS)
async def test_calls_that_a_program_refuses_are_answered_and_the_session_goes_on(act: Act, name: str) -> None:
    options, files, command, says = DENIED.get(name, ({}, [], "true", ""))
    _, shell, parameter = SHELLS[name]
    wrong = [call("nonsense", a=1), call(shell), call(shell, **{parameter: [1, {"a": None}]})]
    acted = await act(name, [*wrong, run(name, command), step(name, 0), run(name, WRITE)], files, **options)
    assert acted.recorded == acted.said
    assert says in acted.used.prompts()[-1] and acted.left_out == TITLES.get(name, [])


@pytest.mark.parametrize("name", SHELLS)
async def test_a_program_ends_soon_when_its_turns_are_used_up(harnessed: Callable[..., Harnessed], name: str) -> None:
    options = AgentOptions(harness=name, command=[str(program(SHELLS[name][0]))], check=IS_RIGHT)
    policy = Policy(name, [step(name, number, f"{WRITE}; " if number == 1 else "") for number in range(9)])
    (found,) = await harnessed(options, policy, max_assistant_turns=3).run()
    assert (found.status, found.score) == (Status.TURN_LIMIT, 1.0), found.failure
