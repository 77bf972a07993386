"""A run made by hand, with a tokenizer whose tokens are bytes, and with texts that attack whoever shows them."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from tokenizers import AddedToken, Tokenizer
from tokenizers.decoders import ByteLevel as ByteDecoder
from tokenizers.models import BPE
from tokenizers.pre_tokenizers import ByteLevel

from agentrl.trajectory import Status, ToolAnswer, ToolCallRecord, Trajectory, Transcript, Turn
from agentrl.trajectory.parquet import write_trajectories
from agentrl.view.record import to_json
from tests.trajectory.written import Ending

HOSTILE = (
    "<script>window.hacked = 1</script>",
    "<img src=x onerror='window.hacked = 2'>",
    '"><svg/onload=window.hacked=3>',
    "</script><script>window.hacked = 4</script>",
    "<!--<script>window.hacked = 5</script>",
    "{{ 7 * 7 }}{% for x in range(9) %}<b>{% endfor %}",
    "javascript:window.hacked=6",
    "<a href='javascript:window.hacked=7' id=hackedlink>x</a>",
    "<iframe srcdoc='<script>parent.hacked=8</script>'></iframe>",
    "'-window.hacked=9-'",
    "<style>*{display:none}</style>",
    "<base href='http://192.0.2.1/'><meta http-equiv=refresh content='0;url=http://192.0.2.1/'>",
    "<form action=http://192.0.2.1/><input type=submit></form>",
    "\u202egnp.exe\u2066 \u200b \x1b[31m \x00 \ufeff",
    "__proto__",
)
"""Texts that would run, load, or hide something where they were taken for HTML."""


def as_seen(value: object) -> Any:
    """Return an answer as the browser has it."""
    return json.loads(to_json(value))


def tokenizer() -> Tokenizer:
    """Make a vocabulary of the 256 bytes, and two special tokens."""
    alphabet = sorted(ByteLevel.alphabet())
    made = Tokenizer(BPE({character: id for id, character in enumerate(alphabet)}, []))
    made.pre_tokenizer = ByteLevel(add_prefix_space=False, use_regex=False)
    made.decoder = ByteDecoder()
    made.add_special_tokens([AddedToken("<|im_start|>"), AddedToken("<|im_end|>")])
    return made


TOKENIZER = tokenizer()
START, END = "<|im_start|>", "<|im_end|>"


def ids_of(text: str) -> list[int]:
    """Ids of a text; special tokens in it are cut out by hand, as texts are rendered."""
    found: list[int] = TOKENIZER.encode(text).ids
    return found


class Player(Ending):
    """Appends to one trajectory as an agent loop would."""

    def __init__(self, uid: str, group: int, prompt: str, source: str = "made/up") -> None:
        self.window = Transcript()
        self.window.append_prompt(ids_of(f"{START}user\n{prompt}{END}\n{START}assistant\n"))
        self.trajectory = Trajectory(uid, group, source, "tool_agent", [self.window])
        self.trajectory.messages = [{"role": "system", "content": "Be right."}, {"role": "user", "content": prompt}]
        self.trajectory.metrics = {"generate_seconds": 0.5, "retries": 0.0}

    def says(self, text: str, *calls: ToolCallRecord, version: int = 3) -> Player:
        ids, start = ids_of(text + END), len(self.window)
        self.window.append_sampled(ids, [-0.25 * (1 + place % 5) for place in range(len(ids))], version)
        self._turn("assistant", text, start, list(calls))
        return self

    def hears(self, text: str, role: str = "tool") -> Player:
        start = len(self.window)
        self.window.append_observed(ids_of(f"\n{START}{role}\n{text}{END}\n{START}assistant\n"))
        self._turn(role, text, start, [])
        return self

    def _turn(self, role: str, text: str, start: int, calls: list[ToolCallRecord]) -> None:
        finish = "stop" if role == "assistant" else None
        self.trajectory.turns.append(Turn(role, text, 0, start, len(self.window), calls, finish, seconds=0.25))
        self.trajectory.messages.append({"role": role, "content": text})


def played(step: int, group: int, k: int) -> Trajectory:
    """A conversation of two turns with one call; the last of a group of four fails its call."""
    good = k < 3
    call = ToolCallRecord(
        "calculator", {"expression": f"{group}*{k}"}, ToolAnswer(str(group * k), seconds=0.01 * (k + 1) * step)
    )
    if not good:
        call = ToolCallRecord("calculator", None, ToolAnswer("no JSON", error="parse", seconds=0.5, truncated=True))
    player = Player(f"train/{step}/{group}/{k}", group, f"How much is {group} times {k % 1}?")
    player.says(f'<tool_call>{{"k": {k if k > 1 else 0}}}</tool_call>', call, version=step - 1)
    player.hears(call.response).says(f"#### {group * k} é")
    return player.ends(1.0 if good else 0.0, Status.COMPLETED if good else Status.LENGTH)


def hostile() -> list[Trajectory]:
    """Trajectories in which every text is one of HOSTILE."""
    found = []
    for number, text in enumerate(HOSTILE):
        call = ToolCallRecord(text, {text: text}, ToolAnswer(text, error="execution"))
        player = Player(f"{text}/{number}", number // 4, text, text).says(text, call).hears(text).says(text)
        player.trajectory.agent_name = text
        player.trajectory.score_extra = {text: 1.0}
        player.trajectory.metrics = {text: 2.0}
        found.append(player.ends(0.0, Status.FAILED if number % 2 else Status.COMPLETED, text))
    return found


def make_run(folder: Path, steps: int = 3, groups: int = 2, *, more: Sequence[Trajectory] = ()) -> Path:
    """Write a run: config, metrics, alarms, tokenizer, trajectories, and from step 2 on what the update computed."""
    records = folder / "trajectories"
    (folder / "policy").mkdir(parents=True)
    TOKENIZER.save(str(folder / "policy" / "tokenizer.json"))
    (folder / "config.yaml").write_text("trainer:\n  seed: 1\nactor_rollout_ref:\n  model:\n    path: made-up\n")
    for step in range(1, steps + 1):
        trajectories = [played(step, group, k) for group in range(groups) for k in range(4)]
        write_trajectories(records, [*trajectories, *more], step=step, split="train", turn_reward_coef=1.0)
        if step > 1:
            write_update(folder / "updates" / f"train_{step:06d}.parquet", [*trajectories, *more])
        add_metrics(folder, step)
    alarm = {"step": 2, "check": "gap", "severity": "warn", "what": "the gap is 0.5", "where": "train/2/0/0"}
    more_of_it = {"why": "it trains on other numbers", "action": "look at it"}
    (folder / "alarms.jsonl").write_text(json.dumps(alarm | more_of_it) + "\n")
    return folder


def add_metrics(folder: Path, step: int, **more: float) -> None:
    """Append a step's line to metrics.jsonl."""
    line: Mapping[str, float] = {
        "step": step,
        "reward/mean": 0.25 * step,
        "actor/entropy": 1 / step,
        "time/rollout": 1.5,
        "time/update_actor": 0.5,
        "time/step": 2.0,
        "async/engine_idle": 0.125,
        "failure/engine": float(step == 2),
        "checks/gap": 0.5,
        **more,
    }
    with (folder / "metrics.jsonl").open("a") as file:
        file.write(json.dumps(line) + "\n")


def write_update(path: Path, trajectories: Sequence[Trajectory]) -> None:
    """Write the file of the update. The gap is 0.5 at the last sampled token of the second row, where it is clipped."""
    path.parent.mkdir(exist_ok=True)
    rows = []
    for number, one in enumerate(trajectories):
        (window,) = one.transcripts
        last = int(np.flatnonzero(window.mask)[-1])
        gap = {last: 0.5 if number == 1 else 0.0}
        on = [
            (place, mask, logprob)
            for place, (mask, logprob) in enumerate(zip(window.mask, window.logprobs, strict=True))
        ]
        values = {
            "trainer_logprobs": [logprob + gap.get(place, 0) if mask else None for place, mask, logprob in on],
            "entropy": [0.5 if mask else None for _, mask, _ in on],
            "advantages": [(1.0 if one.score else -1.0) if mask else None for _, mask, _ in on],
            "weights": [1.25 if mask else None for _, mask, _ in on],
            "ratio": [math.exp(0.01) if mask else None for _, mask, _ in on],
            "clipped": [place == last if mask else None for place, mask, _ in on],
            "weights_clipped": [place != last if mask else None for place, mask, _ in on],
            "teacher_logprobs": [logprob - 0.25 if mask else None for _, mask, logprob in on],
        }
        rows.append({"uid": one.uid, **{name: [column] for name, column in values.items()}})
    kinds = {name: pa.bool_() if "clipped" in name else pa.float32() for name in rows[0] if name != "uid"}
    schema = pa.schema({"uid": pa.string(), **{name: pa.list_(pa.list_(kind)) for name, kind in kinds.items()}})
    pq.write_table(pa.Table.from_pylist(list(reversed(rows)), schema=schema), path)
