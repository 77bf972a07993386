"""Checks of steps and their alarms, on numbers made by hand."""

from __future__ import annotations

import json
import re
import shlex
from dataclasses import replace
from pathlib import Path

import pytest

from agentrl.checks.finding import MEANINGS, alarms_of
from agentrl.checks.runner import Alarms
from agentrl.checks.step import History, check_position, check_prompts, check_update
from agentrl.checks.transcripts import check_record, count_text
from agentrl.config import load_config
from agentrl.config.sections.checks import ChecksConfig
from agentrl.observe.report import Finding
from agentrl.replay import __main__ as replay
from agentrl.tool import ErrorKind
from agentrl.trajectory import Status, ToolAnswer, ToolCallRecord, Trajectory, Transcript, Turn
from benchmarks.training import clean_steps
from tests.forked import forked
from tests.trajectory.written import VOCAB_SIZE, Writer, decode, tool_trajectory

PAGE = Path(__file__).resolve().parents[2] / "docs" / "reliability.md"


class Characters:
    """A chat whose tokens are characters, and whose turns end with a full stop."""

    vocab_size = VOCAB_SIZE
    stop_token_ids = (ord("."),)
    media_token_ids = ()
    decode = staticmethod(decode)


def history(**keys: float) -> History:
    return History(ChecksConfig.model_validate(keys), gap=1e-3)


def said(found: list[Finding]) -> list[str]:
    return [f"{one.check}: {one.what}" for one in found]


def test_a_run_that_learns_nothing_says_so_and_again_when_it_has_lasted_twice_as_long() -> None:
    watch, told = history(barren_steps=3), {}
    metrics = {"success/rate": 0.0, "tool/calls_mean": 0.0}
    for step in range(1, 14):
        if found := watch.check(metrics, [], learnt=False):
            told[step] = said(found)
    assert list(told) == [3, 6, 12]
    assert told[3] == [
        "standstill: no group taught anything in 3 steps in a row: no trajectory succeeds, no tool is called"
    ]
    watch.check(metrics, [], learnt=True)
    assert watch.check(metrics, [], learnt=False) == [], "it counts anew"
    assert all(not history(barren_steps=0).check(metrics, [], learnt=False) for _ in range(9))


def test_signs_are_told_against_the_first_steps() -> None:
    watch = history()
    usual = {"checks/repeated": 0.1, "checks/garbled": 0.0, "status/length": 0.1, "actor/entropy": 1.0}
    for _ in range(5):
        assert watch.check({**usual, "checks/gap_mean": 1e-6}, [], learnt=True) == []
    found = watch.check(
        {"checks/repeated": 0.8, "status/length": 1.0, "actor/entropy": 1e-6, "checks/gap_mean": 5e-4}, [], learnt=True
    )
    assert [one.check for one in found] == ["entropy", "gap", "text", "length"]
    always = history()
    for _ in range(9):
        assert always.check({"checks/repeated": 0.9, "status/length": 1.0}, [], learnt=True) == [], "it was always so"


def test_a_tool_that_fails_by_its_own_fault_is_named() -> None:
    def outline(errors: int, kind: ErrorKind) -> Trajectory:
        calls = [
            ToolCallRecord("search", {}, ToolAnswer("x", error=kind if one < errors else None)) for one in range(10)
        ]
        return Writer("p").says("a", *calls).ends(1.0)

    assert said(history().check({}, [outline(6, ErrorKind.TIMEOUT).outline()], learnt=True)) == [
        "tools: 6 of 10 calls failed by its own fault or its server's"
    ]
    for fine in (outline(4, ErrorKind.TIMEOUT), outline(10, ErrorKind.ARGUMENTS), outline(10, ErrorKind.REFUSED)):
        assert history().check({}, [fine.outline()], learnt=True) == []


def test_every_prompt_has_its_trajectories() -> None:
    outlines = [Trajectory(f"{group}/{k}", group, score=1.0).outline() for group in range(4) for k in range(2)]
    assert said([*check_prompts(outlines, 2, 4)]) == []
    assert said([*check_prompts(outlines, 2, 2)]) == [], "two generation batches"
    assert "4 prompts are drawn at once" in said([*check_prompts(outlines[:-2], 2, 4)])[0]
    assert "a prompt has 1" in said([*check_prompts(outlines[:-1], 2, 4)])[0]
    assert "have no trajectory" in said([*check_prompts([*outlines[:2], *outlines[4:]], 2, 4)])[0]
    assert "the same name" in said([*check_prompts([*outlines[:-1], replace(outlines[0], group=3)], 2, 4)])[0]


@pytest.mark.parametrize(
    ("before", "after", "sound"),
    [
        ((0, 4), (0, 8), True),
        ((0, 44), (1, 4), True),
        ((0, 4), (0, 12), False),
        ((0, 4), (0, 4), False),
        ((0, 44), (1, 8), False),
        ((1, 0), (0, 4), False),
    ],
)
def test_the_data_goes_on_by_what_was_drawn(before: tuple[int, int], after: tuple[int, int], sound: bool) -> None:
    first, then = ({"epoch": epoch, "position": position, "seed": 1} for epoch, position in (before, after))
    assert ([*check_position({**first}, {**then}, 4)] == []) is sound
    assert [*check_position({"mine": 3}, {"mine": 7}, 4)] == []


def test_the_update_is_that_of_the_batch() -> None:
    sound = {"actor/grad_norm": 0.1, "train/policy_tokens": 200.0, "train/loss_weight": 1.0}
    assert said([*check_update(sound, 100, 0, 2, learnt=True)]) == []
    assert said([*check_update(sound | {"train/policy_tokens": 150.0}, 100, 30, 2, learnt=True)]) == []
    for change, told in (
        ({"train/policy_tokens": 150.0}, "150 policy tokens"),
        ({"train/loss_weight": 0.5}, "add up to 0.5"),
        ({"actor/grad_norm": 0.0}, "the gradient is"),
    ):
        assert told in said([*check_update(sound | change, 100, 0, 2, learnt=True)])[0]
    assert said([*check_update(sound | {"actor/grad_norm": 0.0}, 100, 0, 2, learnt=False)]) == []
    assert said([*check_update({"actor/skipped_updates": 1.0, "actor/grad_norm": 0.0}, 100, 0, 2, learnt=True)]) == []


def test_a_shifted_mask_is_seen_by_the_tokens_where_the_record_agrees_with_itself() -> None:
    def shifted(by: int) -> Trajectory:
        """All of the record is shifted alike: mask, log-probs, versions and turns."""
        transcript = Transcript()
        text = "ask:answer one.tools said it.the end."
        ids = [ord(one) for one in text]
        spans = [(4, 15), (29, 37)]
        transcript.append_prompt(ids[: 4 + by])
        for place, (start, end) in enumerate(spans):
            end += by if end + by <= len(ids) else 0
            transcript.append_sampled(ids[start + by : end], [-0.5] * (end - start - by), 1)
            if place == 0:
                transcript.append_observed(ids[end : 29 + by])
        first, last = (Turn("assistant", "", 0, start + by, min(end + by, 37), [], "stop") for start, end in spans)
        return Trajectory("u", 0, transcripts=[transcript], turns=[first, last], score=1.0)

    assert check_record(shifted(0), Characters) == []
    assert "ends its turn" in str(check_record(shifted(-1), Characters)) or "ended its turn" in str(
        check_record(shifted(-1), Characters)
    )
    assert "behind it are said to be sampled" in str(check_record(shifted(1), Characters))


def test_observed_text_must_be_in_its_tokens() -> None:
    assert check_record(tool_trajectory(), Characters) == []
    other = Writer("p").says("call.").hears("the answer is 42").says("done.").ends(1.0)
    assert check_record(other, Characters) == []
    other.turns[1].text = "something else"
    assert "does not hold what was observed, 'something'" in str(check_record(other, Characters))


@pytest.mark.parametrize(
    ("status", "failure", "score", "told"),
    [
        (Status.TIMEOUT, "timeout: 3 s passed", 0.0, "its time was up and yet it has the score 0.0"),
        (Status.COMPLETED, "TimeoutError: judge", 0.0, "and yet the failure"),
        (Status.TIMEOUT, "timeout: 3 s passed", None, None),
    ],
)
def test_a_fault_has_no_score(status: Status, failure: str, score: float | None, told: str | None) -> None:
    found = check_record(Writer("p").says("a").ends(score, status, failure), Characters)
    assert found == [] if told is None else told in found[0].what


def test_repetitions_and_what_is_no_text_are_counted() -> None:
    plain = Writer("p").says("The quick brown fox jumps over the lazy dog, and then sleeps until it is noon.").ends(1.0)
    again = Writer("p").says("again " * 30).ends(1.0)
    broken = Writer("p").says("�\x00" * 40).ends(1.0)
    counts = count_text(plain, Characters)
    assert counts["tokens"] > 64 and counts["repeated"] < 0.05 * counts["tokens"] and counts["garbled"] == 0
    counts = count_text(again, Characters)
    assert counts["repeated"] > 0.9 * counts["tokens"]
    counts = count_text(broken, Characters)
    assert counts["garbled"] == counts["characters"] == 80
    assert not count_text(Writer("p").says("short").ends(1.0), Characters)


def test_alarms_are_written_shown_and_summed_up(tmp_path: Path) -> None:
    shown: list[str] = []
    keys = ChecksConfig(on_fault="stop", on_sign="checkpoint_then_stop")
    alarms = Alarms(keys, tmp_path, shown.append)
    assert alarms.raise_for(1, []) == ([], "warn") and alarms.text() is None and not alarms.path.exists()
    findings = [Finding("gap", "far", f"train/1/0/{k}") for k in range(5)]
    for step in range(1, 5):
        assert alarms.raise_for(step, findings)[1] == "stop"
    assert alarms.raise_for(5, [*findings, Finding("text", "again", "all", "sign")])[1] == "checkpoint_then_stop"
    written = [json.loads(line) for line in alarms.path.read_text().splitlines()]
    assert [one["step"] for one in written] == [1, 2, 3, 4, 5, 5]
    assert written[0] == {
        "step": 1,
        "check": "gap",
        "severity": "fault",
        "what": "far",
        "where": ["train/1/0/0", "train/1/0/1", "train/1/0/2"],
        "why": MEANINGS["gap"][0],
        "action": MEANINGS["gap"][1],
        "count": 5,
    }
    assert [text.partition(":")[0] for text in shown] == ["step 1", "step 2", "step 4", "step 5"]
    assert "(and 2 more)" in shown[0]
    assert "gap: in 5 steps, the last of step 5: far" in str(alarms.text())
    with alarms.path.open("a") as lines:
        lines.write('{"step": 6, "chec')  # by a kill
    alarms.raise_for(7, findings)
    assert [json.loads(line)["step"] for line in alarms.path.read_text().splitlines()] == [1, 2, 3, 4, 5, 5, 7]
    alarms.forget_after(3)
    assert [json.loads(line)["step"] for line in alarms.path.read_text().splitlines()] == [1, 2, 3]


def test_an_alarm_says_of_each_place_what_was_found_there() -> None:
    twice = "the update went 2 times over it, and 1 was asked for"
    dropped = "the update did not go over it, and 1 was asked for"
    found = [Finding("update", twice, "a"), Finding("update", dropped, "b"), Finding("update", twice, "c")]
    (alarm,) = alarms_of(found)
    assert alarm.what == f"{twice}, in a (and 1 more); {dropped}, in b"
    assert alarm.where == ["a", "b"] and alarm.count == 3
    assert alarm.text().startswith(f"update: {alarm.what}. ")
    (alarm,) = alarms_of(Finding("gap", f"{k} nats", f"train/1/0/{k}") for k in range(5))
    assert alarm.what == "; ".join(f"{k} nats, in train/1/0/{k}" for k in range(3)) + "; and 2 more that differ"
    assert alarm.where == [f"train/1/0/{k}" for k in range(3)]
    (alarm,) = alarms_of([Finding("gap", "far", place) for place in "abcde"])
    assert alarm.text().startswith("gap: far, in a, b, c (and 2 more). ")


def test_the_pages_commands_are_accepted(tmp_path: Path) -> None:
    blocks = re.findall(r"```bash\n(.*?)```", PAGE.read_text(encoding="utf-8"), re.DOTALL)
    commands = [shlex.split(line, comments=True) for block in blocks for line in block.splitlines()]
    assert {words[2] for words in commands} == {
        *("agentrl.train", "agentrl.replay", "labs.fault_matrix", "benchmarks.training.clean_steps")
    }
    for words in commands:
        if words[2] == "agentrl.train":
            load_config(words[3:])
        elif words[2] == "agentrl.replay":
            replay.parse(words[3:])
        elif words[2] == "benchmarks.training.clean_steps":
            clean_steps.parse(words[3:])
        else:  # without any cell
            ran = forked(["-m", *words[2:], "--sample", "0"], tmp_path)
            assert ran.returncode == 0, ran.stderr


def test_the_page_lists_every_check() -> None:
    page = PAGE.read_text(encoding="utf-8")
    for name in MEANINGS:
        assert f"`{name}`" in page, name
    for check in MEANINGS:
        assert alarms_of([Finding(check, "x", "y")])[0].why
