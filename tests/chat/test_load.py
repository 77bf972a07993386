"""Which format is chosen, and what a wrong choice says."""

from __future__ import annotations

import json
from datetime import datetime
from pathlib import Path

import pytest
from pydantic import ValidationError

from agentrl.chat import Chat
from agentrl.chat.check import start_up_check
from agentrl.chat.codec import Codec
from agentrl.chat.load import load_tokenizer, make_format
from agentrl.config.sections.model import PlainModelConfig
from agentrl.errors import ConfigError
from tests.chat import templates
from tests.chat.conftest import TEMPLATES
from tests.chat.conversations import TOOLS
from tests.chat.vocabularies import LLAMA, QWEN, save_tokenizer
from tests.naming import naming

AUTO = {
    **dict.fromkeys(("hermes", "hermes_in_text"), "template:hermes"),
    "coder": "template:qwen3_coder",
    "llama": "template:llama3_json",
    "mistral": "template:mistral",
    "header_ends_turn": "template:glm",
    "harmony": "template:harmony",
}


@pytest.mark.parametrize("name", AUTO)
def test_auto_takes_the_parser_that_the_template_speaks_of(tmp_path: Path, name: str) -> None:
    template, tokens, eos = TEMPLATES[name]
    assert Chat.from_pretrained(save_tokenizer(tmp_path, tokens, eos, template)).format.name == AUTO[name]


def test_auto_knows_the_calls_of_llama_4(tmp_path: Path) -> None:
    """They are those of Llama 3 between other tokens."""
    names = {"<|start_header_id|>": "<|header_start|>", "<|end_header_id|>": "<|header_end|>", "<|eot_id|>": "<|eot|>"}
    template = templates.LLAMA
    for old, new in names.items():
        template = template.replace(old, new)
    chat = Chat.from_pretrained(save_tokenizer(tmp_path, names.values(), "<|eot|>", template))
    assert chat.format.name == "template:llama3_json"
    start_up_check(chat, [{"role": "user", "content": "u"}], TOOLS)


@pytest.fixture
def llama(tmp_path: Path) -> str:
    return save_tokenizer(tmp_path, (*LLAMA, "<|python_tag|>"), "<|eot_id|>", templates.LLAMA)


@pytest.mark.parametrize("before", ["", "<|python_tag|>"])
def test_llama_3_calls_several_tools_with_semicolons_between(llama: str, before: str) -> None:
    """The llama3_json parsers of vLLM and SGLang read them so; a semicolon in an argument separates nothing."""
    chat = Chat.from_pretrained(llama)
    one, two = '{"name": "calculator", "parameters": {"expression": "1; {2}"}}', '{"name": "search", "parameters": {}}'
    turn = chat.parse(chat.encode(f"{before}{one}; {two};{one}"), TOOLS)
    assert [(call.name, call.arguments, call.error) for call in turn.calls] == [
        ("calculator", {"expression": "1; {2}"}, None),
        ("search", {}, None),
        ("calculator", {"expression": "1; {2}"}, None),
    ]
    assert not turn.text.strip()
    for broken in (f"{one}; ", f"{one} {two}", f"{one}; and {two}", f"{one}, {two}"):
        assert any(call.error for call in chat.parse(chat.encode(before + broken), TOOLS).calls), broken


def test_a_template_writes_one_date_in_all_of_a_run(tmp_path: Path) -> None:
    template = "{{- (date_string or strftime_now('%d %b %Y')) + '\n' }}" + templates.LLAMA
    path = save_tokenizer(tmp_path, LLAMA, "<|eot_id|>", template)

    def written(**keys: object) -> str:
        model = PlainModelConfig.model_validate({"path": path, **keys})
        chat = Chat.of_model(model, "auto")
        return chat.decode(chat.render([{"role": "user", "content": "u"}])).partition("\n")[0]

    assert written(chat_template_date="2024-02-29").endswith("29 Feb 2024")
    assert written(chat_template_date="2024-02-29", chat_template_kwargs={"date_string": "a day"}).endswith("a day")
    for keys in ({}, {"chat_template_date": "today"}):
        assert written(**keys).endswith(datetime.now().strftime("%Y"))
    with pytest.raises(ValidationError, match="2026-11-30"):
        written(chat_template_date="29 Feb 2024")


def test_a_turn_ends_at_each_end_that_the_model_names(llama: str, tmp_path: Path) -> None:
    """Llama 3 ends a call with a token that its template does not write, and servers stop there, too."""
    tokenizer = load_tokenizer(llama, None, trust_remote_code=False)
    last, eom, eot = tokenizer.convert_tokens_to_ids(["<|end_of_text|>", "<|eom_id|>", "<|eot_id|>"])
    (tmp_path / "generation_config.json").write_text(json.dumps({"eos_token_id": [last, eom, eot, 5, 10**6]}))
    chat = Chat.from_pretrained(llama)
    assert chat.stop_token_ids == (eot, last, eom)
    called = '{"name": "calculator", "parameters": {"expression": "1"}}'
    for text in (called, f"<|python_tag|>{called}"):
        turn = chat.encode_markup(f"{text}<|eom_id|>")
        assert turn[-1] == eom
        read = chat.parse(turn, TOOLS)
        assert [(one.name, one.arguments) for one in read.calls] == [("calculator", {"expression": "1"})]
        ids = [*chat.render([{"role": "user", "content": "u"}], TOOLS), *turn]
        answer = chat.decode(chat.bridge(ids, [{"role": "tool", "content": "1"}], TOOLS))
        assert answer.startswith("<|start_header_id|>ipython")
    assert chat.parse(chat.encode_markup("<|python_tag|>print(1)<|eom_id|>"), TOOLS).calls == ()


def test_ends_of_a_class_of_models_are_no_ends_of_the_vocabulary(llama: str, tmp_path: Path) -> None:
    """transformers writes such a file for a model that was published without one."""
    stops = Chat.from_pretrained(llama).stop_token_ids
    begin = load_tokenizer(llama, None, trust_remote_code=False).convert_tokens_to_ids("<|begin_of_text|>")
    file = tmp_path / "generation_config.json"
    file.write_text(json.dumps({"eos_token_id": begin, "_from_model_config": True}))
    assert Chat.from_pretrained(llama).stop_token_ids == stops
    file.write_text('{"eos_token_id": "<|eom_id|>"}')
    with naming(ConfigError, "generation_config.json", "eos_token_id", "<|eom_id|>"):
        Chat.from_pretrained(llama)


@pytest.fixture
def qwen(tmp_path: Path) -> str:
    return save_tokenizer(tmp_path, QWEN, "<|im_end|>", templates.HERMES)


def test_auto_knows_models_by_their_hub_name(qwen: str) -> None:
    tokenizer = load_tokenizer(qwen, None, trust_remote_code=False)
    tokenizer.name_or_path = "Qwen/Qwen3-8B"
    assert make_format(Codec(tokenizer), "auto", {}, own_template=False).name == "qwen3"
    # A template file says more than the model's name.
    assert make_format(Codec(tokenizer), "auto", {}, own_template=True).name == "template:hermes"


def test_gpt_oss_is_written_by_its_own_template(tmp_path: Path) -> None:
    template, tokens, eos = TEMPLATES["harmony"]
    tokenizer = load_tokenizer(save_tokenizer(tmp_path, tokens, eos, template), None, trust_remote_code=False)
    tokenizer.name_or_path = "openai/gpt-oss-20b"
    assert make_format(Codec(tokenizer), "auto", {}, own_template=False).name == "template:harmony"


@pytest.mark.parametrize(
    ("format", "chosen"),
    [("qwen3", "qwen3"), ("hermes", "template:hermes"), ("template:none", "template:none"), ("glm", "template:glm")],
)
def test_formats_by_name(qwen: str, format: str, chosen: str) -> None:
    assert Chat.from_pretrained(qwen, format=format).format.name == chosen


@pytest.mark.parametrize(
    ("format", "nearest"), [("qwen-3", "qwen3"), ("template:hermess", "template:hermes"), ("llama3", "llama-3")]
)
def test_unknown_format_names_the_nearest(qwen: str, format: str, nearest: str) -> None:
    with pytest.raises(ConfigError, match=f"{format}' is unknown; nearest: .*{nearest}"):
        Chat.from_pretrained(qwen, format=format)


ARROWS = """
from agentrl.chat.formats.parsers import CallFormat, Found
from agentrl.chat.formats.template import TemplateFormat

def body(text, tools):
    name, _, value = text.partition(" ")
    return [Found(name, {"expression": value})]

ARROWS = CallFormat("=>", "<=", body)

class Polite(TemplateFormat):
    def __init__(self, codec, template_kwargs):
        super().__init__(codec, template_kwargs, ARROWS, "polite")

    def render(self, messages, tools, generation):
        return [*super().render(messages, tools, generation), *self._codec.encode("Please: ")]

WRONG = 3
"""


def test_a_users_own_calls_and_whole_format(qwen: str, tmp_path: Path) -> None:
    file = tmp_path / "arrows.py"
    file.write_text(ARROWS)
    chat = Chat.from_pretrained(qwen, format=f"{file}:ARROWS")
    message = chat.parse(chat._codec.encode("Hm.=>calculator 2 + 3<="))
    assert [(call.name, call.arguments) for call in message.calls] == [("calculator", {"expression": "2 + 3"})]
    assert message.text == "Hm."
    assert chat.format.shown is not None and chat.format.shown.findall("Hm.=>f x<=.") == ["=>f x<="]
    polite = Chat.from_pretrained(qwen, format=f"{file}:Polite")
    assert polite.decode(polite.render([{"role": "user", "content": "u"}])).endswith("assistant\nPlease: ")
    assert polite.parse(polite._codec.encode("=>f x<=")).calls[0].name == "f"
    with naming(ConfigError, "CallFormat", "Format", "found 3"):
        Chat.from_pretrained(qwen, format=f"{file}:WRONG")
    with naming(ConfigError, "multi_turn.format", "arrows.py", "'ARROW'", "'ARROWS'"):
        Chat.from_pretrained(qwen, format=f"{file}:ARROW")


def test_family_that_does_not_fit_the_tokenizer(qwen: str) -> None:
    with naming(ConfigError, "'llama-3'", "begin_of_text"):
        Chat.from_pretrained(qwen, format="llama-3")


def test_family_and_template_file_conflict(qwen: str, tmp_path: Path) -> None:
    file = tmp_path / "chat.jinja"
    file.write_text(templates.HERMES)
    with pytest.raises(ConfigError, match="conflict"):
        Chat.from_pretrained(qwen, format="qwen3", chat_template=str(file))


def test_template_file_replaces_the_tokenizers(qwen: str, tmp_path: Path) -> None:
    file = tmp_path / "chat.jinja"
    file.write_text(templates.IGNORES_TOOLS)
    chat = Chat.from_pretrained(qwen, chat_template=str(file))
    assert chat.format.name == "template:none"
    assert (
        chat.decode(chat.render([{"role": "user", "content": "u"}]))
        == "<|im_start|>user\nu<|im_end|>\n<|im_start|>assistant\n"
    )
    inline = Chat.from_pretrained(qwen, chat_template=templates.IGNORES_TOOLS)
    assert inline.render([{"role": "user", "content": "u"}]) == chat.render([{"role": "user", "content": "u"}])
    with pytest.raises(ConfigError, match=r"expected a Jinja file, 'missing.jinja'"):
        Chat.from_pretrained(qwen, chat_template="missing.jinja")


def test_template_kwargs(qwen: str, tmp_path: Path) -> None:
    quiet = Chat.from_pretrained(qwen, format="qwen3", chat_template_kwargs={"enable_thinking": False})
    assert quiet.decode(quiet.render([{"role": "user", "content": "u"}])).endswith("<think>\n\n</think>\n\n")
    with pytest.raises(ConfigError, match="enable_thinkin"):
        Chat.from_pretrained(qwen, format="qwen3", chat_template_kwargs={"enable_thinkin": False})
    with naming(ConfigError, "['tools']"):
        Chat.from_pretrained(qwen, chat_template_kwargs={"tools": []})
    file = tmp_path / "chat.jinja"
    file.write_text(templates.IGNORES_TOOLS + "{{- suffix }}")
    chat = Chat.from_pretrained(qwen, chat_template=str(file), chat_template_kwargs={"suffix": "Hm: "})
    assert chat.decode(chat.render([{"role": "user", "content": "u"}])).endswith("assistant\nHm: ")


def test_tokenizer_without_a_template(tmp_path: Path) -> None:
    path = save_tokenizer(tmp_path, QWEN, "<|im_end|>")
    with naming(ConfigError, "actor_rollout_ref.model.chat_template=FILE"):
        Chat.from_pretrained(path)
    assert Chat.from_pretrained(path, format="qwen3").stop_token_ids  # A family needs none.


def test_missing_tokenizer(tmp_path: Path) -> None:
    with naming(ConfigError, "tokenizer", "nowhere"):
        Chat.from_pretrained(str(tmp_path / "nowhere"))


def test_template_that_closes_turns_with_no_token(tmp_path: Path) -> None:
    path = save_tokenizer(tmp_path, ["<|endoftext|>"], "<|endoftext|>", templates.HERMES)
    with naming(ConfigError, "'<|im_end|>\\n'"):
        Chat.from_pretrained(path)


def test_truncation_kept_in_a_tokenizer_file_is_ignored(qwen: str) -> None:
    file = Path(qwen, "tokenizer.json")
    saved = json.loads(file.read_text())
    saved["truncation"] = {"direction": "Right", "max_length": 8, "strategy": "LongestFirst", "stride": 0}
    file.write_text(json.dumps(saved))
    assert len(Chat.from_pretrained(qwen).encode("word " * 50)) >= 50
