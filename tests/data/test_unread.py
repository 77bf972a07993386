"""Columns that nothing reads are named once, for every form of rows and behind every door."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from agentrl.chat import Chat
from agentrl.config import load_config
from agentrl.config.sections.expert import ExpertConfig
from agentrl.config.sections.sft import PreferencesConfig, SFTConfig
from agentrl.data.pairs import load_scored_pairs
from agentrl.data.unread import MOST_NAMED, UnreadColumns
from agentrl.evaluate import main as evaluate
from agentrl.observe.display import Display
from agentrl.observe.open import open_display
from agentrl.rollouts.context import fit_prompts, load_context, open_rows
from agentrl.trainer.expert import open_expert
from agentrl.trainer.run_sft import Job, PreferencesJob, SupervisedJob
from data_prep.tool_conversations import main as prepare
from tests.chat.templates import HERMES
from tests.chat.vocabularies import QWEN, save_tokenizer

ASKED, GOOD, BAD = ({"role": role, "content": text} for role, text in zip("uaa", "?+-", strict=True))
ASKED["role"], GOOD["role"], BAD["role"] = "user", "assistant", "assistant"
SUPERVISED: dict[str, dict[str, Any]] = {
    "messages": {"messages": [ASKED, GOOD]},
    "messages with tools": {"messages": [ASKED, GOOD], "tools": "[]", "functions": None},
    "prompt_completion": {"prompt": [ASKED], "completion": [GOOD]},
    "text": {"text": "Once."},
    "sharegpt": {"conversations": [{"from": "human", "value": "?"}, {"from": "gpt", "value": "+"}]},
    "alpaca": {"instruction": "?", "output": "+", "history": []},
}
PAIRS: dict[str, dict[str, Any]] = {
    "whole": {"chosen": [ASKED, GOOD], "rejected": [ASKED, BAD]},
    "prompt": {"prompt": [ASKED], "chosen": [GOOD], "rejected": [BAD]},
    "text": {"prompt": "?", "chosen": "+", "rejected": "-"},
}
PROMPT: dict[str, Any] = {"prompt": [ASKED], "data_source": "openai/gsm8k", "reward_model": {"ground_truth": "7"}}
NOTED = "columns that are not read: {}"


@pytest.fixture(scope="module")
def chat(tmp_path_factory: pytest.TempPathFactory) -> Chat:
    return Chat.from_pretrained(str(save_tokenizer(tmp_path_factory.mktemp("chat"), QWEN, "<|im_end|>", HERMES)))


def write(path: Path, row: dict[str, Any], **further: Any) -> str:
    """Two rows, the second with further columns, as one file and, for the note, as another one of the same form."""
    rows = [{**row, **dict.fromkeys(further)}, {**row, **further}]
    for file in (path, path.with_stem("b")):
        if path.suffix == ".jsonl":
            # The first row, by which the form is found, has not all columns.
            file.write_text("".join(json.dumps(one) + "\n" for one in (row, rows[1])))
        else:
            pq.write_table(pa.Table.from_pylist(rows), file)
    return str(path.parent / f"*{path.suffix}")


def noted(display: Display) -> list[str]:
    """All that the display is told, from now on."""
    said: list[str] = []
    display.note = said.append  # type: ignore[method-assign, assignment]
    return said


def tuned(job: Job[Any], files: str, chat: Chat) -> list[str]:
    with open_display("test") as display:
        said = noted(display)
        job.read(files, chat, display, job.check(files, lambda rows: None))
    return [text for text in said if "not read" in text]


@pytest.mark.parametrize("suffix", ["jsonl", "parquet"])
@pytest.mark.parametrize("form", SUPERVISED)
def test_of_supervised_rows(tmp_path: Path, chat: Chat, form: str, suffix: str) -> None:
    files = write(tmp_path / f"a.{suffix}", SUPERVISED[form], verdict="bad", votes=-1)
    job = SupervisedJob(SFTConfig.model_validate({"model": {"path": "x"}, "data": {"train_files": files}}))
    (note,) = tuned(job, files, chat)
    assert note.startswith(f"{tmp_path / f'a.{suffix}'} and 1 more files: ")
    assert note.endswith(NOTED.format("verdict, votes"))
    with open_display("test") as display:
        said = noted(display)
        open_expert(ExpertConfig(files=files), 1, chat, display)
    assert [text for text in said if "not read" in text] == [note]
    assert tuned(job, write(tmp_path / f"a.{suffix}", SUPERVISED[form]), chat) == []


@pytest.mark.parametrize("suffix", ["jsonl", "parquet"])
@pytest.mark.parametrize("form", PAIRS)
def test_of_pairs(tmp_path: Path, chat: Chat, form: str, suffix: str) -> None:
    files = write(tmp_path / f"a.{suffix}", PAIRS[form], score_chosen=0.9, margin=0.1)
    config = PreferencesConfig.model_validate({"model": {"path": "x"}, "data": {"train_files": files}})
    (note,) = tuned(PreferencesJob(config), files, chat)
    assert note == f"{tmp_path / f'a.{suffix}'} and 1 more files: {NOTED.format('score_chosen, margin')}"
    if form != "text":
        found = load_scored_pairs(files, config.data, lambda messages: ([1], False), lambda rows: None)
        assert {*found.notes.values()} == {NOTED.format("score_chosen, margin")}


@pytest.mark.parametrize("suffix", ["jsonl", "parquet"])
def test_of_prompts(tmp_path: Path, chat: Chat, suffix: str) -> None:
    files = write(tmp_path / f"a.{suffix}", PROMPT, ability="sums", tool_kwargs={"x": 1}, images=None)
    config = load_config([f"data.train_files={files}", "actor_rollout_ref.model.path=x"])
    context = load_context(config)
    data = open_rows(config, files, None, context)
    with open_display("test") as display:
        said = noted(display)
        fit_prompts([data], config, chat, context, display)
    assert said == [f"{tmp_path / f'a.{suffix}'} and 1 more files: {NOTED.format('tool_kwargs')}"]


def test_of_responses(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    row = {**PROMPT, "responses": ["#### 7"], "response_status": ["completed"], "response_score": [1.0]}
    files = write(tmp_path / "a.parquet", row, label=True, extra_info={"index": 1})
    assert evaluate([f"data.path={files}"]) == 0
    said = capsys.readouterr()
    assert (said.out + said.err).count("not read") == 1
    assert NOTED.format("label") in " ".join((said.out + said.err).split())


def test_of_records_that_become_rows(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write(tmp_path / "a.jsonl", SUPERVISED["messages"], feedback="bad")
    assert prepare(["--source", str(tmp_path / "a.jsonl"), "--out", str(tmp_path / "out")]) == 0
    *_, columns, log = capsys.readouterr().out.splitlines()
    assert columns == NOTED.format("feedback") and "(feedback)" in log and "data_prep.traces" in log


def test_rows_of_json_may_have_any_number_of_members() -> None:
    unread = UnreadColumns(["x"])
    for number in range(MOST_NAMED + 3):
        unread.note_row({"x": 1, f"c{number}": 0, "empty": ""})
    assert unread.told().endswith(f", c{MOST_NAMED - 1} and 3 more")
