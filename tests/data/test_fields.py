"""Fields of messages: what is learnt, other names, and what is not read is told."""

from __future__ import annotations

import json
from collections.abc import Sequence
from datetime import datetime
from pathlib import Path
from typing import Any, cast

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from agentrl.chat import Chat
from agentrl.config import load_config
from agentrl.config.sections.expert import ExpertConfig
from agentrl.config.sections.sft import PairDataConfig, SFTConfig, SFTDataConfig, SFTModelConfig
from agentrl.data.messages import FLAGS, digest_of, read_messages
from agentrl.data.pairs import load_pairs, load_scored_pairs
from agentrl.data.sft import SFTSample, Transcripts, check_transcripts, load_transcripts
from agentrl.errors import DataError
from agentrl.observe.open import open_display
from agentrl.rollouts.context import fit_prompts, load_context, open_rows
from agentrl.trainer.expert import open_expert
from agentrl.trainer.run_sft import SupervisedJob
from data_prep.tool_conversations import main as prepare
from tests.chat.templates import HERMES
from tests.chat.vocabularies import QWEN, save_tokenizer
from tests.naming import assert_names, naming

USER: dict[str, Any] = {"role": "user", "content": "Hi."}
FIRST: dict[str, Any] = {"role": "assistant", "content": "First."}
SECOND: dict[str, Any] = {"role": "assistant", "content": "Second."}
CALL: dict[str, Any] = {"name": "f", "arguments": '{"x": 2}'}
LEARNT = {"weight": 1, "loss": True, "train": 1.0}
UNREAD = "messages with the field {}, which neither agentrl nor the chat template reads"


@pytest.fixture(scope="module")
def chat(tmp_path_factory: pytest.TempPathFactory) -> Chat:
    return Chat.from_pretrained(str(save_tokenizer(tmp_path_factory.mktemp("chat"), QWEN, "<|im_end|>", HERMES)))


def write(path: Path, rows: list[Any]) -> str:
    """As JSON lines, as JSON text in parquet, or as structs, by the name of the file."""
    if path.suffix == ".jsonl":
        path.write_text("".join(json.dumps({"messages": row}) + "\n" for row in rows))
    else:
        texts = "text" in path.name
        pq.write_table(pa.table({"messages": [json.dumps(row) if texts else row for row in rows]}), path)
    return str(path)


def learn(chat: Chat, file: str) -> Transcripts[SFTSample]:
    return load_transcripts(file, SFTDataConfig(train_files="unused"), chat)


def said(chat: Chat, found: Transcripts[SFTSample]) -> list[tuple[str, str]]:
    """What is shown, and what is learnt, by transcript."""
    return [(chat.decode(one.ids.tolist()), chat.decode(one.ids[one.mask].tolist())) for one in found.samples]


@pytest.mark.parametrize("name", ["a.jsonl", "text.parquet", "structs.parquet"])
@pytest.mark.parametrize("flag", FLAGS)
def test_a_turn_that_is_marked_is_shown_and_not_learnt(tmp_path: Path, chat: Chat, flag: str, name: str) -> None:
    no: Any = 0 if flag == "weight" else False
    rows = [
        [{**USER, flag: no}, {**FIRST, flag: no}, USER, {**SECOND, flag: type(no)(1)}],
        [USER, FIRST, USER, {**SECOND, flag: no}],
        [USER, FIRST, USER, SECOND],
    ]
    found = learn(chat, write(tmp_path / name, rows))
    (shown, first), (_, second), (whole, both) = said(chat, found)
    assert shown == whole
    assert (first, second) == ("Second.<|im_end|>", "First.<|im_end|>")
    assert both == second + first
    assert found.unlearnt == {}


@pytest.mark.parametrize("flag", FLAGS)
@pytest.mark.parametrize("value", [0.5, 2, -1, "0", [0, 1]])
def test_a_turn_is_learnt_or_not(tmp_path: Path, chat: Chat, flag: str, value: object) -> None:
    rows = [[USER, FIRST], [USER, {**FIRST, flag: value}]]
    with pytest.raises(DataError, match=rf"row 1 .*column messages, message 1: expected 0 or 1, .* as {flag}.*found"):
        learn(chat, write(tmp_path / "a.jsonl", rows))


@pytest.mark.parametrize(
    "turn",
    [
        {**FIRST, "train_detail": [{"begin_offset": 0, "end_offset": 3, "train": False}]},
        {**FIRST, "content": [{"type": "text", "text": "Fir", "train": False}, {"type": "text", "text": "st."}]},
    ],
)
def test_no_part_of_a_turn_is_left_out(tmp_path: Path, chat: Chat, turn: dict[str, Any]) -> None:
    file = write(tmp_path / "a.jsonl", [[USER, FIRST], [USER, turn]])
    with naming(DataError, "row 1", "message 1", "turn"):
        learn(chat, file)
    shown = write(tmp_path / "b.jsonl", [[{**USER, "train_detail": []}, FIRST]])
    assert len(learn(chat, shown).samples) == 1


def test_any_flag_that_says_no_holds_and_those_of_others_are_told(tmp_path: Path, chat: Chat) -> None:
    rows = [
        [{**USER, **LEARNT}, {**FIRST, **LEARNT, "weight": 0}, USER, {**SECOND, **LEARNT}],
        [USER, FIRST],
    ]
    found = learn(chat, write(tmp_path / "a.jsonl", rows))
    assert [learnt for _, learnt in said(chat, found)] == ["Second.<|im_end|>", "First.<|im_end|>"]
    assert {what.partition(" (")[0]: count for what, count in found.unlearnt.items()} == {
        "a message marked to be learnt": 1
    }


def test_a_row_of_which_nothing_is_to_be_learnt_is_named(tmp_path: Path, chat: Chat) -> None:
    rows = [[USER, FIRST], [USER, {**FIRST, "weight": 0}]]
    with naming(DataError, "row 1", "every"):
        learn(chat, write(tmp_path / "a.jsonl", rows))


OTHER_NAMES: dict[str, tuple[list[dict[str, Any]], list[dict[str, Any]]]] = {
    "reasoning": ([USER, {**FIRST, "reasoning": "Why."}], [USER, {**FIRST, "reasoning_content": "Why."}]),
    "thinking": ([USER, {**FIRST, "thinking": "Why."}], [USER, {**FIRST, "reasoning_content": "Why."}]),
    "the same twice": (
        [USER, {**FIRST, "thinking": "Why.", "reasoning_content": "Why.", "reasoning": ""}],
        [USER, {**FIRST, "reasoning_content": "Why."}],
    ),
    "function_call beside text": (
        [USER, {**FIRST, "function_call": CALL}, {"role": "function", "name": "f", "content": "5"}, SECOND],
        [
            USER,
            {**FIRST, "tool_calls": [{"type": "function", "function": CALL}]},
            {"role": "tool", "name": "f", "content": "5"},
            SECOND,
        ],
    ),
    "function_call without text": (
        [USER, {"role": "assistant", "content": None, "function_call": CALL}],
        [USER, {"role": "assistant", "tool_calls": [{"type": "function", "function": CALL}]}],
    ),
    "calls without function": (
        [USER, {**FIRST, "tool_calls": [{"id": "a", **CALL}, {"type": "function", **CALL}]}],
        [
            USER,
            {
                **FIRST,
                "tool_calls": [
                    {"type": "function", "id": "a", "function": CALL},
                    {"type": "function", "function": CALL},
                ],
            },
        ],
    ),
    "an OpenAI dump": (
        [
            {**USER, "name": None},
            {**FIRST, "refusal": None, "annotations": [], "audio": None, "function_call": None, "tool_calls": None},
        ],
        [USER, FIRST],
    ),
}


@pytest.mark.parametrize("as_structs", [False, True])
@pytest.mark.parametrize("case", OTHER_NAMES)
def test_other_names_are_read_in_rows_and_in_supervised_training(
    tmp_path: Path, chat: Chat, case: str, as_structs: bool
) -> None:
    given, ours = OTHER_NAMES[case]
    assert read_messages(given) == ours
    name = "structs.parquet" if as_structs else "a.jsonl"
    found = learn(chat, write(tmp_path / name, [given]))
    assert found.unlearnt == {}
    (sample,) = found.samples
    assert (sample.ids.tolist(), sample.mask.tolist()) == chat.render_training(ours)  # type: ignore[arg-type]
    if any(message["role"] != "assistant" for message in given[-1:]):
        return
    (prompt,), warned = rl(tmp_path / name, chat)
    assert prompt == ours
    assert "which neither" not in warned


def rl(file: Path, chat: Chat, prompts: str = "messages", more: Sequence[str] = ()) -> tuple[list[Any], str]:
    """The prompts of a file, and what the run says of them."""
    config = load_config(
        [
            f"data.train_files={file}",
            f"data.prompt_key={prompts}",
            "actor_rollout_ref.model.path=x",
            "reward_model.enable=true",
            "reward_model.model.path=x",
            "reward_model.model.replaces_scorers=true",
            *more,
        ]
    )
    context = load_context(config)
    data = open_rows(config, str(file), None, context)
    said: list[str] = []
    with open_display("test") as display:
        display.warn = said.append  # type: ignore[method-assign, assignment]
        fit_prompts([data], config, chat, context, display)
    return [sample.prompt for sample in data], "\n".join(said)


FURTHER = {**FIRST, "refusal": "", "mood": "glad", "reasoning_details": [{"text": "x"}], "tool_calls": []}
CALLING = {**SECOND, "tool_calls": [{"index": 0, "type": "function", "function": {**CALL, "strict": True}}]}
PARTS = {"role": "user", "content": [{"type": "text", "text": "Hi.", "cache_control": {"type": "ephemeral"}}]}
TOLD = {
    "mood": 2,
    "reasoning_details": 2,
    "tool_calls.index": 1,
    "tool_calls.function.strict": 1,
    "content.cache_control": 1,
    "name": 1,
}
ROWS = [
    [PARTS, FURTHER, {**USER, "name": "Ada"}, {**CALLING, "mood": "sad"}],
    [USER, FURTHER],
    [USER, {**FIRST, "mood": ""}],
]


@pytest.mark.parametrize("name", ["a.jsonl", "text.parquet", "structs.parquet"])
def test_a_field_that_is_not_read_is_told_once(tmp_path: Path, chat: Chat, name: str) -> None:
    file, told = tmp_path / name, dict(TOLD)
    if file.stem == "structs":  # all contents of a column are of one type
        del told["content.cache_control"]
    rows = [[USER if one is PARTS and file.stem == "structs" else one for one in row] for row in ROWS]
    found = learn(chat, write(file, rows))
    assert found.unlearnt == {UNREAD.format(field): count for field, count in told.items()}
    _, warned = rl(file, chat)
    for field, count in told.items():
        assert warned.count(f"{count} of 3 prompts of {file} have {UNREAD.format(field)}") == 1
    assert warned.count(UNREAD.partition("{")[0]) == len(told)


def test_flags_of_prompts_and_reasoning_that_is_not_shown_are_told(tmp_path: Path) -> None:
    silent = HERMES.replace("message.reasoning_content is defined", "false")
    chat = Chat.from_pretrained(str(save_tokenizer(tmp_path / "silent", QWEN, "<|im_end|>", silent)))
    file = tmp_path / "a.jsonl"
    write(file, [[USER, {**FIRST, "weight": 0, "thinking": "Why."}, USER], [USER]])
    _, warned = rl(file, chat)
    for field in ("weight", "reasoning_content"):
        assert f"1 of 2 prompts of {file} have {UNREAD.format(field)}" in warned


def test_prompts_that_end_with_the_assistant_and_halves_of_pairs_are_told(tmp_path: Path, chat: Chat) -> None:
    file = tmp_path / "a.jsonl"
    write(file, [[USER, FIRST], [USER, {**USER, "content": "\ud83d Hi."}], [USER, FIRST, USER]])
    _, warned = rl(file, chat)
    assert f"1 of 3 prompts of {file} have an assistant message at their end: the policy begins another turn" in warned
    assert f"1 prompts of {file} have half a surrogate pair or U+FDD0 in a text" in warned


def test_an_experts_transcripts_say_what_supervised_training_says(tmp_path: Path) -> None:
    chat = Chat.from_pretrained(
        str(save_tokenizer(tmp_path / "chat", QWEN, "<|im_end|>", HERMES)), format="template:hermes"
    )
    developer = {"role": "developer", "content": "Be \ud83d brief."}
    file = write(tmp_path / "a.jsonl", [[developer, USER, {**FIRST, "mood": "glad"}], [USER, FIRST]])
    said: list[str] = []
    with open_display("test") as display:
        display.warn = said.append  # type: ignore[method-assign, assignment]
        open_expert(ExpertConfig(files=[file], batch_size=1), 1, chat, display)
    assert sorted(text.partition(",")[0] for text in said) == [
        f"1 of 2 transcripts of {[file]} have {UNREAD.format('mood').partition(',')[0]}",
        f"1 transcripts of {[file]} have developer messages",
        f"1 transcripts of {[file]} have half a surrogate pair or U+FDD0 in a text",
    ]


def test_a_field_that_the_template_writes_is_not_told(tmp_path: Path) -> None:
    moody = HERMES.replace("{{- message.content }}", "{{- message.content + (message.mood or '') }}")
    chat = Chat.from_pretrained(str(save_tokenizer(tmp_path / "moody", QWEN, "<|im_end|>", moody)))
    file = write(tmp_path / "a.jsonl", [[USER, {**FIRST, "mood": " Glad.", "colour": "red"}]])
    found = learn(chat, file)
    assert found.unlearnt == {UNREAD.format("colour"): 1}
    assert said(chat, found)[0][1] == "First. Glad.<|im_end|>"


def test_pairs_are_read_alike(tmp_path: Path, chat: Chat) -> None:
    begun = [USER, {**FIRST, "weight": 0}, USER]
    chosen = [*begun, {**SECOND, "mood": "glad"}, USER, {**FIRST, "weight": 0}]
    rejected = [*begun, {**SECOND, "content": "Third.", "refusal": None}]
    pq.write_table(
        pa.table({"chosen": [json.dumps(chosen)], "rejected": [json.dumps(rejected)]}), tmp_path / "a.parquet"
    )
    config = PairDataConfig(train_files="unused")
    found = load_pairs(str(tmp_path / "a.parquet"), config, chat, lambda done: None)
    (pair,) = found.samples
    parts = slice(None, pair.lengths[0]), slice(pair.lengths[0], None)
    learnt = [chat.decode(pair.ids[part][pair.mask[part]].tolist()) for part in parts]
    assert learnt == ["Second.<|im_end|>", "Third.<|im_end|>"]
    assert found.unlearnt == {UNREAD.format("mood"): 1}
    tokenise = lambda messages: (chat.render_training(messages)[0], False)  # noqa: E731
    scored = load_scored_pairs(str(tmp_path / "a.parquet"), config, tokenise, lambda done: None)
    told = "weight, train or loss in messages: a reward model learns to score whole conversations"
    assert scored.unlearnt == {told: 2, UNREAD.format("mood"): 1}


def test_prepared_conversations_keep_what_they_say(
    tmp_path: Path, chat: Chat, capsys: pytest.CaptureFixture[str]
) -> None:
    tools = [{"type": "function", "function": {"name": "f", "parameters": {"properties": {"x": {"type": "integer"}}}}}]
    openai = [
        {**USER, "name": "Ada", "weight": 0},
        {**FIRST, "train": False, "function_call": CALL, "reasoning": "Why.", "mood": "glad", "audio": None},
        {"role": "function", "name": "f", "content": "5"},
        {**SECOND, "weight": 1},
    ]
    sharegpt = [
        {"from": "human", "value": "Hi."},
        {"from": "gpt", "value": "First.", "loss": False, "mood": "sad"},
        {"from": "human", "value": "Hi."},
        {"from": "gpt", "value": "Second.", "loss": True},
    ]
    bad = [{**USER}, {**FIRST, "weight": 0.5}]
    records = [{"messages": openai, "tools": tools}, {"conversations": sharegpt}, {"messages": bad}]
    source = tmp_path / "a.jsonl"
    source.write_text("".join(json.dumps(record) + "\n" for record in records))
    assert prepare(["--source", str(source), "--out", str(tmp_path)]) == 0
    told = capsys.readouterr().out
    assert_names(told, "2 conversations")
    assert told.count("not read") == 1
    assert_names(told, "left out: 1", "weight, train or loss", "message 1")
    found = learn(chat, str(tmp_path / "sft.parquet"))
    assert found.unlearnt == {UNREAD.format("name"): 1}
    (first, one), (second, other) = said(chat, found)
    assert one == other == "Second.<|im_end|>"
    assert "<think>\nWhy.\n</think>\n\nFirst.\n<tool_call>" in first and "First." in second


def test_validation_rows_among_the_training_rows_are_noted_once(chat: Chat, tmp_path: Path) -> None:
    """And the prompts that several rows have are known, by which no row of them is taken for another."""

    def rows(name: str, numbers: Sequence[int]) -> str:
        asked = [{"prompt": [{"role": "user", "content": f"What is {n}?"}], "data_source": "x"} for n in numbers]
        pq.write_table(pa.table({key: [row[key] for row in asked] for key in asked[0]}), tmp_path / name)
        return str(tmp_path / name)

    def noted(held: str) -> tuple[frozenset[int], list[str]]:
        keys = [f"data.train_files={train}", "actor_rollout_ref.model.path=x"]
        config = load_config(keys)
        context = load_context(config, scored=False)
        data, found = [open_rows(config, file, None, context) for file in (train, held)], list[str]()
        with open_display("test") as display:
            display.note = found.append  # type: ignore[method-assign, assignment]
            fit_prompts(data, config, chat, context, display)
        return data[0].repeated, [text for text in found if "prompts of" in text]

    train = rows("train.parquet", [1, 2, 3, 2])
    held = rows("held.parquet", [9, 3, 2])
    repeated, said = noted(held)
    assert said == [
        f"2 of 3 prompts of {held} are in {train}, too, the first is {held} row 1: "
        "scores on them say nothing of other rows"
    ]
    assert repeated == {digest_of([{"role": "user", "content": "What is 2?"}])}
    assert noted(rows("apart.parquet", [8, 9]))[1] == []


def test_messages_with_fields_of_any_type_have_a_digest() -> None:
    said, later = ([cast(Any, {"role": "user", "content": "2?", "at": datetime(2026, 1, day)})] for day in (2, 3))
    assert digest_of(said) == digest_of(said) != digest_of(later)


@pytest.mark.parametrize("name", ["a.jsonl", "structs.parquet"])
def test_rows_that_cannot_be_used_are_left_out_where_that_is_asked_for(tmp_path: Path, chat: Chat, name: str) -> None:
    rows = [[USER, FIRST], [USER, {**FIRST, "role": "oracle"}], [USER, SECOND], [FIRST]]
    file = write(tmp_path / name, rows)
    with naming(DataError, "row 1", "data.on_bad_row=skip", "oracle"):
        learn(chat, file)
    config = SFTDataConfig.model_validate({"train_files": file, "on_bad_row": "skip"})
    assert check_transcripts(file, config) == 4
    with open_display("test") as display:
        display.warn = (warned := list[str]()).append  # type: ignore[method-assign, assignment]
        read = SupervisedJob(SFTConfig(data=config, model=SFTModelConfig(path="policy"))).read(file, chat, display, 4)
        alike = open_expert(ExpertConfig(files=file), 1, chat, display, "skip")
    assert [chat.decode(one.ids[one.mask].tolist()) for one in read] == ["First.<|im_end|>", "Second.<|im_end|>"]
    assert alike is not None and len(alike.samples) == 2
    assert warned == [warned[0]] * 2 and warned[0].startswith(
        f"2 rows cannot be used, and are left out. The first: {file}"
    )
    with naming(DataError, "1 rows"):
        load_transcripts(write(tmp_path / name, rows[1:2]), config, chat)


@pytest.mark.parametrize("suffix", ["jsonl", "parquet"])
def test_prompts_that_cannot_be_used_are_counted_and_the_first_is_named(
    tmp_path: Path, chat: Chat, suffix: str
) -> None:
    file = tmp_path / f"a.{suffix}"
    rows = [[USER], [{**USER, "role": "oracle"}], [{**USER, "role": "sibyl"}]]
    warned = rl(Path(write(file, rows)), chat, more=["data.on_bad_row=skip"])[1]
    assert (
        f"2 rows of {file} cannot be used, and are left out. The first: {file}, row 1 " in warned and "oracle" in warned
    )
