"""Reward functions are handed the prompts, completions and ids that TRL's own trainer hands them.

`messages.json` has what TRL 1.16 handed on for templates of the tests. With --whole TRL itself plays every template
that packages carry (`benchmarks/trl/messages.py`).
"""

from __future__ import annotations

import asyncio
import json
import os
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

import pytest
from transformers import TrainerState

from agentrl.agent_loop import LoopContext, Request, Scheduler
from agentrl.agent_loop.single_turn import SingleTurnLoop
from agentrl.chat import Chat
from agentrl.chat.codec import Codec
from agentrl.chat.load import make_format
from agentrl.engines.contract import FinishReason, Generation, Listener, SamplingParams
from agentrl.errors import UserError
from agentrl.system.user_cache import user_cache
from agentrl.tool.toolset import ToolSet
from agentrl.trajectory import PlacedImage, VersionSpan
from agentrl.trajectory.sample import Sample
from agentrl.trl.rewards import TrlRewards, named_functions
from agentrl.trl.tools import TrlToolLoop, as_tools
from benchmarks.trl.messages import LONGEST, OWN, TOOLS, TRL, Case, cases_of, encode, published, tokenizer_of
from tests.agent_loop.conftest import LIMITS
from tests.agent_loop.scripted_engine import ScriptedEngine
from tests.conftest import PROJECT

RECORDED = json.loads(Path(__file__).with_name("messages.json").read_text(encoding="utf-8"))
KINDS = ("prompts", "completions", "completion_ids")
Handed = dict[str, Any]
KNOWN = {
    "TRL reads the whole arguments of a call in tags that was cut": (
        *("CODER, a cut call, completions", "*[Qq]wen3[._][568]*, a cut call, completions"),
        *("*[Nn]emotron*, a cut call, completions", "*lfm2*, a cut call, completions"),
        *("*LFM2*, a cut call, completions", "*glm4moe, a cut call, completions"),
    ),
    "TRL has the end of an empty turn as reasoning where the prompt opens some": (
        "*[Qq]wen3[._][568]*, nothing, completions",
    ),
    "TRL reads no reasoning whose beginning the prompt has in other turns": (
        "*qwen3_5_nothink, reasoning, completions",
    ),
    "TRL has the token that ends a turn with calls as text, and once more before the answer": ("trl: glm4moe, *",),
    "TRL writes all answers under the name of the first call": ("trl: gemma4*, parallel, completion_ids",),
    "TRL leaves out the newline before the answers": ("trl: gemma4_v2, *, completion_ids",),
}
"""Differences whose cause is in TRL, as patterns of TEMPLATE, CASE, KIND."""


@dataclass
class Given(ScriptedEngine):
    """Answers with tokens as they are given; a turn without a stop token ends with its budget."""

    turns: Sequence[list[int]] = ()

    async def generate(
        self,
        ids: Sequence[int],
        params: SamplingParams,
        session: str,
        images: Sequence[PlacedImage] = (),
        listener: Listener | None = None,
    ) -> Generation:
        said = self.said.setdefault(session, [])
        turn = list(self.turns[len(said)])
        said.append(turn)
        kind = FinishReason("stop", turn[-1]) if turn[-1] in self.chat.stop_token_ids else FinishReason("length")
        return Generation(turn, [-0.25] * len(turn), kind, [VersionSpan(0, 0, len(turn))])


def ours(tokenizer: Any, cases: Mapping[str, Case]) -> dict[str, Handed]:
    """Play the cases by the door's loops; return what a reward function was given."""
    codec = Codec(tokenizer)
    chat = Chat(codec, make_format(codec, "auto", {}, own_template=True))
    return {name: asyncio.run(_played(chat, case)) for name, case in cases.items()}


async def _played(chat: Chat, case: Case) -> Handed:
    given: Handed = {}

    def reward(prompts: Any, completions: Any, completion_ids: Any, **kwargs: Any) -> list[float]:
        given.update(prompts=prompts, completions=completions, completion_ids=completion_ids)
        return [0.0] * len(prompts)

    turns = [encode(chat.tokenizer, text) for text in case.turns]
    tools = ToolSet.from_tools(
        as_tools(TOOLS if case.tools else [], LONGEST), timeout=30, max_response_tokens=LONGEST, truncate_side="middle"
    )
    tools.bind(chat.encode, chat.decode)
    loop = TrlToolLoop(None) if case.tools else SingleTurnLoop()
    row = {"prompt": case.prompt}
    functions = named_functions(reward, None, {})
    rewards = TrlRewards(functions, {"rows": [row]}, TrainerState(), with_tools=case.tools)
    rewards.bind(chat.tokenizer)
    limits = replace(LIMITS, max_response_tokens=case.longest(turns), max_model_len=32768, max_prompt_tokens=30000)
    engine = Given(chat, lambda session, turn: "", turns=turns)
    scheduler = Scheduler(
        context=LoopContext(engine, chat, tools, {}, limits),
        loops={"loop": loop},
        reward=rewards,
        max_concurrent=1,
        trajectory_timeout=60.0,
        max_retries=0,
    )
    sample = Sample(prompt=case.prompt, data_source="trl", agent_name="loop", file="rows")  # type: ignore[arg-type]
    (played,) = await scheduler.run([Request("one", 0, sample, SamplingParams(1), seed=0)])
    if not given:
        return {"refused": played.failure}
    return {kind: values[0] for kind, values in given.items()}


def differences(name: str, template: str, theirs: Mapping[str, Handed], folder: Path) -> tuple[int, list[str]]:
    """Play the cases of a template that TRL played; return their number, and where ours are others than TRL's."""
    tokenizer = tokenizer_of(name, template, folder)
    cases = cases_of(tokenizer)
    played = {case: given for case, given in theirs.items() if "refused" not in given}
    found = ours(tokenizer, {case: cases[case] for case in played})
    wrong = [
        f"{name}, {case}, {kind}: TRL has {given[kind]!r}, found {found[case].get(kind, found[case])!r}"
        for case, given in played.items()
        for kind in KINDS
        if found[case].get(kind) != given[kind]
    ]
    known = tuple(pattern for patterns in KNOWN.values() for pattern in patterns)
    return len(played), [one for one in wrong if not any(fnmatchcase(one.partition(": TRL")[0], to) for to in known)]


@pytest.mark.parametrize("name", OWN)
def test_templates_of_the_tests(name: str, tmp_path: Path) -> None:
    count, wrong = differences(name, OWN[name], RECORDED[name], tmp_path)
    assert not wrong and count >= 4


@pytest.mark.slice(0, "long run")
@pytest.mark.timeout(3600)
def test_every_template_that_packages_carry(tmp_path: Path) -> None:
    """TRL itself plays them, and the ones of the tests once more."""
    folder = user_cache() / "templates"
    command = [sys.executable, "-m", "benchmarks.trl.messages"]
    environment = {**os.environ, "PYTHONPATH": f"{TRL.fetched(None, 'PYTHONPATH')}"}
    for file, more in (("own.json", []), ("published.json", ["--published", str(folder)])):
        done = subprocess.run(
            [*command, str(tmp_path / file), *more], cwd=PROJECT, env=environment, capture_output=True, text=True
        )
        assert done.returncode == 0, done.stderr[-3000:]
    assert json.loads((tmp_path / "own.json").read_text(encoding="utf-8")) == RECORDED
    texts, theirs = published(folder), json.loads((tmp_path / "published.json").read_text(encoding="utf-8"))
    total, differing, refused = 0, list[str](), list[str]()
    for number, (name, text) in enumerate(texts.items()):
        try:
            count, wrong = differences(name, text, theirs[name], tmp_path / str(number))
        except UserError as fault:
            refused.append(f"{name}: {fault}")
            continue
        total, differing = total + count, differing + wrong
    assert not differing, "\n".join(differing)
    assert total >= 900 and len(refused) <= 12, (total, refused)
