"""An exported policy ends its turns by itself, whatever end of a sequence its base model had."""

from __future__ import annotations

import json
import re
import shlex
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from agentrl.chat import Chat
from agentrl.checkpoint.export import export_policy
from agentrl.model.export import export_model
from agentrl.model.heads import PolicyModel
from agentrl.observe.open import open_display
from agentrl.system.json_value import JSON
from tests.chat.templates import HERMES
from tests.checkpoint.pairs import ASKED, PAIRS, SAID, Pair, chatml_on_deepseek, chatml_on_qwen
from tests.e2e.test_docs import commands, write_files
from tests.forked import forked

PAGE, FOLDER = "docs/serve.md", "runs/quickstart/policy"
MOST = 60


def export(base: Path, chat: Chat, folder: Path) -> Path:
    model = PolicyModel(AutoModelForCausalLM.from_pretrained(base))
    params = dict(model.base.named_parameters())
    with open_display("test") as display:
        export_policy(
            lambda dir, tokenizer: export_model(model, params, torch.float32, dir, tokenizer),
            *(chat, 1, folder, None, display),
        )
    return folder


def check_generation(tmp_path: Path, pair: Pair, end: str) -> None:
    """Export a base model that ends its turns with `end`, and have it generate."""
    base = tmp_path / "base"
    chat = pair.save_base(base, end)
    policy = export(base, chat, tmp_path / "policy")
    model: Any = AutoModelForCausalLM.from_pretrained(policy)
    tokenizer: Any = AutoTokenizer.from_pretrained(policy)
    prompt = chat.render(ASKED)
    if pair.template is not None:
        written = tokenizer.apply_chat_template(ASKED, add_generation_prompt=True, return_dict=False)
        assert written == prompt, "the template is that of the training"
    ids = model.generate(torch.tensor([prompt]), do_sample=False, max_new_tokens=MOST)[0, len(prompt) :].tolist()
    assert len(ids) == SAID + 1 and tokenizer.convert_ids_to_tokens(ids[-1]) == end
    stops = model.generation_config.eos_token_id
    assert stops[0] == tokenizer.convert_tokens_to_ids(pair.eos), "the base's own stays, first"
    assert set(stops) == set(chat.stop_token_ids) and len(stops) == len(set(stops))


@pytest.mark.slice(12, "matrix")
@pytest.mark.parametrize(("name", "end"), [(name, end) for name, pair in PAIRS.items() for end in pair.ends])
def test_generate_ends_where_the_turn_ends(tmp_path: Path, name: str, end: str) -> None:
    check_generation(tmp_path, PAIRS[name], end)


def test_the_pages_script(tmp_path: Path) -> None:
    pair = PAIRS["Llama's on its base"]
    policy = export(tmp_path / "base", pair.save_base(tmp_path / "base", pair.ends[0]), tmp_path / FOLDER)
    assert write_files(PAGE, tmp_path) == ["ask.py", "client.py"]
    ask, *_ = map(shlex.split, commands(PAGE))
    assert ask[:3] == ["python", "ask.py", FOLDER]
    done = forked(ask[1:], tmp_path)
    assert done.returncode == 0, done.stderr
    words = AutoTokenizer.from_pretrained(policy).decode(list(range(65, 65 + SAID)))
    assert done.stdout.strip() == words


@pytest.mark.slice(0, "matrix")
@pytest.mark.parametrize("make", [chatml_on_qwen, chatml_on_deepseek])
def test_generate_ends_where_the_turn_ends_in_real_vocabularies(tmp_path: Path, make: Callable[[], Pair]) -> None:
    check_generation(tmp_path, make(), "<|im_end|>")


def test_a_generation_config_that_transformers_saves_no_more_is_kept(tmp_path: Path) -> None:
    """Its flags that have no effect are the base's own; a later transformers or a server may read them."""
    base = tmp_path / "base"
    chat = PAIRS["ChatML on Qwen's base"].save_base(base, "<|im_end|>")
    file = base / "generation_config.json"
    own = json.loads(file.read_text()) | {"temperature": 0.6, "top_p": 0.9, "length_penalty": 2.0}
    own |= {"eos_token_id": [own["eos_token_id"], 7], "repetition_penalty": 1.05}
    file.write_text(json.dumps(own))
    policy = export(base, chat, tmp_path / "policy")
    written = json.loads((policy / "generation_config.json").read_text())
    end = chat.tokenizer.convert_tokens_to_ids("<|im_end|>")
    assert written.pop("eos_token_id") == [*own.pop("eos_token_id"), end]
    assert own.pop("_from_model_config") and "_from_model_config" not in written
    assert written == own


THINKS = HERMES + "{%- if add_generation_prompt and think is false %}{{- '<think></think>' }}{%- endif %}"


@pytest.mark.parametrize(
    ("pair", "kwargs", "told"),
    [
        (PAIRS["ChatML on Qwen's base, by key"], {}, None),
        (PAIRS["a family's format on Qwen's base"], {}, "is missing or cannot write a user's message"),
        (replace(PAIRS["ChatML on Qwen's base"], template=THINKS), {"think": True}, None),
        (
            replace(PAIRS["ChatML on Qwen's base"], template=THINKS),
            {"think": False},
            r"writes '.*assistant\\n' where training had '.*assistant\\n<think></think>'",
        ),
    ],
    ids=["by key", "a format without a template", "a variable without effect", "a variable"],
)
def test_prompts_that_servers_would_write_otherwise_are_told(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], pair: Pair, kwargs: dict[str, JSON], told: str | None
) -> None:
    pair.save_base(tmp_path / "base", "<|im_end|>")
    chat = Chat.from_pretrained(
        str(tmp_path / "base"),
        format=pair.format,
        chat_template=pair.template if pair.by_key else None,
        chat_template_kwargs=kwargs,
    )
    export(tmp_path / "base", chat, tmp_path / "policy")
    said = capsys.readouterr().out
    if told is None:
        assert "warning" not in said
    else:
        assert re.search(rf"policy: servers write prompts by its chat template, which {told}.*docs/serve\.md", said)
