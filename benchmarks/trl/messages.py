"""Completions that TRL's own `GRPOTrainer` hands to reward functions for given turns of a policy, by chat template.

    .venv/bin/python -m pip install --no-deps --target trl trl==1.16.0
    PYTHONPATH=trl .venv/bin/python -m benchmarks.trl.messages tests/trl/messages.json

Turns are written by the template itself, some are cut or broken, and no model is asked: TRL's tokenizing, parsing, tool
calls and scoring run as they are. `tests/trl/test_messages.py` compares them with agentrl's.
"""

from __future__ import annotations

import argparse
import json
import logging
import re
import tempfile
import warnings
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from jinja2 import TemplateError

from agentrl.system.user_cache import Wheel
from agentrl.tool import FunctionTool
from benchmarks.templates.drive import tokens_of
from benchmarks.templates.kinds import KINDS
from benchmarks.templates.packages import PACKAGES, read_templates
from benchmarks.templates.reference import Renders, Turn, Unwritten
from tests.chat import templates
from tests.chat.vocabularies import save_tokenizer

TRL = Wheel("trl==1.16.0", "c4726e139dd40e1a41661511c639c8a68416782b2e3e8c0befebd77bb7ba0396")
"""TRL's own code, which needs nothing that agentrl's environment lacks."""
LONGEST = 2000
"""Tokens of a completion, of the cases that are not cut."""
OWN = {
    "HERMES": templates.HERMES,
    "CODER": templates.CODER,
    "OPENS_REASONING": templates.OPENS_REASONING,
    "LLAMA": templates.LLAMA,
    "HARMONY": templates.HARMONY,
    "PARSED": templates.IGNORES_TOOLS,
}
"""Templates of the tests whose recorded answers are committed. The vocabulary of PARSED has `RESPONSE`."""
RESPONSE: dict[str, Any] = {
    "defaults": {"role": "assistant"},
    "start_anchor": "<|im_start|>assistant\n",
    "fields": {
        "reasoning_content": {"open": "<think>", "close_pattern": r"</think>\s*", "content": "text"},
        "content": {"close_pattern": r"<\|im_end\|>\s*", "content": "text"},
    },
}
"""A vocabulary's own `response_template`."""
PARSERS = {"HERMES": "qwen3", "CODER": "qwen3_5", "LLAMA": "llama3", "HARMONY": "gptoss"}
"""The parser of TRL's that reads calls of one of them; TRL knows published templates by their whole text."""


def search(query: str, count: int = 1, ratio: float = 1.0, deep: bool = False, tags: list[str] | None = None) -> str:
    """Look for something.

    Args:
        query: A text.
        count: How many.
        ratio: How exact.
        deep: Whether to look deeper.
        tags: Words.
    """
    return f"{count * 7} of {query}"


def look_up(query: str, count: int = 1) -> str:
    """Look for something.

    Args:
        query: A text.
        count: How many.
    """
    raise ValueError(f"nothing of {query}")


TOOLS = [search, look_up]


@dataclass(frozen=True, slots=True)
class Case:
    """Turns of a policy on one prompt."""

    prompt: list[dict[str, Any]]
    turns: list[str]
    """Texts, with their stop tokens."""
    cut: bool = False
    """The last turn ends with the budget of the completion."""
    tools: bool = False

    def longest(self, turns: Sequence[list[int]]) -> int:
        """Return the tokens that the completion may have: of a single turn that is cut, its own."""
        return len(turns[0]) if self.cut and len(turns) == 1 else LONGEST


def tokenizer_of(name: str, template: str, folder: Path) -> Any:
    """Make a small vocabulary with the tokens of a template; tags of letters alone are ordinary tokens."""
    from transformers import AutoTokenizer

    *others, eos = tokens_of(template)
    others, eos = ([*others, eos], "<eos>") if eos == "<turn|>" else (others, eos)  # Gemma 4 ends turns by another one
    save_tokenizer(folder, [*others, eos], eos, template)
    text = json.loads((folder / "tokenizer.json").read_text())
    for token in text["added_tokens"]:
        token["special"] = token["content"] == eos or re.fullmatch(r"</?[a-z_]+>", token["content"]) is None
        token["special"] &= "tool_call" not in token["content"]
    (folder / "tokenizer.json").write_text(json.dumps(text))
    tokenizer = AutoTokenizer.from_pretrained(folder)
    if name == "PARSED":
        tokenizer.response_template = RESPONSE
    return tokenizer


def cases_of(tokenizer: Any) -> dict[str, Case]:
    """Write the cases of a template; those that the template refuses are left out."""
    schemas = [FunctionTool(tool).schema for tool in TOOLS]
    found: dict[str, Case] = {}
    plain: list[Any] = [KINDS["plain turns"][0][1]]
    with suppress(Unwritten, IndexError):
        (turn,) = Renders(tokenizer, None, tokens(tokenizer)).transcript([*plain, KINDS["plain turns"][0][2]])
        end = _end(turn, tokenizer)
        found["plain"] = Case(plain, [turn.sampled + end])
        thought = "<think>\nTwo and three.\n</think>\n\nIt is 5."
        found["thinking"] = Case(plain, [thought + end])
        found["thinking, opened by the prompt"] = Case(plain, [thought.removeprefix("<think>\n") + end])
        found["cut"] = Case(plain, [thought[:20]], cut=True)
    for kind in ("calls", "no system", "parallel", "text beside a call", "reasoning"):
        with suppress(Unwritten, IndexError):
            messages, _ = KINDS[kind]
            first = next(place for place, one in enumerate(messages) if one["role"] == "assistant")
            turns = Renders(tokenizer, schemas, tokens(tokenizer)).transcript(messages)
            texts = [turn.sampled + _end(turn, tokenizer) for turn in turns]
            prompt: list[Any] = list(messages[:first])
            found[kind] = Case(prompt, texts, tools=True)
            if kind == "calls":
                end = _end(turns[0], tokenizer)
                half = turns[0].sampled[: len(turns[0].sampled) * 2 // 3]
                found["a broken call"] = Case(prompt, [half + end], tools=True)
                found["a cut call"] = Case(prompt, [half], cut=True, tools=True)
                found["a call, then a cut turn"] = Case(
                    prompt, [texts[0], texts[1][: len(texts[1]) * 2 // 3]], cut=True, tools=True
                )
                found["an answer that does not fit"] = Case(prompt, texts[:1], cut=True, tools=True)
                found["no call"] = Case(prompt, [texts[1]], tools=True)
                found["nothing"] = Case(prompt, [end], tools=True)
    return found


def _end(turn: Turn, tokenizer: Any) -> str:
    """Choose the token that ends a turn: the vocabulary's end of a sequence where a policy may sample it."""
    return str(tokenizer.eos_token) if tokenizer.eos_token in turn.ends else turn.ends[0]


def tokens(tokenizer: Any) -> list[str]:
    """List the added tokens of a vocabulary."""
    return [str(one) for one in tokenizer.added_tokens_decoder.values()]


def encode(tokenizer: Any, text: str) -> list[int]:
    """Write a turn as tokens."""
    found: list[int] = tokenizer.encode(text, add_special_tokens=False)
    return found


def of_trl(tokenizer: Any, cases: Mapping[str, Case], parser: str = "") -> dict[str, Any]:
    """Have TRL's trainer play the cases; return what a reward function was given, or TRL's refusal."""
    from datasets import Dataset
    from transformers import Qwen2Config, Qwen2ForCausalLM
    from trl import GRPOConfig, GRPOTrainer, chat_template_utils

    sizes: dict[str, Any] = {"hidden_size": 8, "intermediate_size": 8, "num_hidden_layers": 1, "num_attention_heads": 1}
    config = Qwen2Config(vocab_size=len(tokenizer), num_key_value_heads=1, max_position_embeddings=32768, **sizes)
    given: dict[str, Any] = {}

    def reward(prompts: Any, completions: Any, completion_ids: Any, **kwargs: Any) -> list[float]:
        given.update(prompts=prompts, completions=completions, completion_ids=completion_ids)
        return [0.0] * len(prompts)

    found: dict[str, Any] = {}
    for with_tools in (False, True):
        asked = {name: case for name, case in cases.items() if case.tools == with_tools}
        if not asked:
            continue
        if parser and with_tools:
            tokenizer.response_template = getattr(chat_template_utils, f"{parser}_template")
        with tempfile.TemporaryDirectory() as folder:
            fixed = {"use_cpu": True, "bf16": False, "report_to": "none", "gradient_checkpointing": False}
            try:
                trainer = GRPOTrainer(
                    model=Qwen2ForCausalLM(config),
                    reward_funcs=reward,
                    args=GRPOConfig(folder, per_device_train_batch_size=2, num_generations=2, **fixed),
                    train_dataset=Dataset.from_list([{"prompt": [{"role": "user", "content": "x"}]}]),
                    processing_class=tokenizer,
                    tools=TOOLS if with_tools else None,
                )
            except ValueError as refusal:
                found |= {name: {"refused": str(refusal)} for name in asked}
                continue
        for name, case in asked.items():
            turns = [encode(tokenizer, text) for text in case.turns]
            trainer.max_completion_length = case.longest(turns)
            trainer._generate_single_turn = _scripted(turns)
            try:
                row = {"prompt": case.prompt}
                trainer._generate_and_score_completions([row, row])
            except Exception as fault:
                found[name] = {"refused": f"{type(fault).__name__}: {fault}"}
                continue
            found[name] = {kind: values[0] for kind, values in given.items()}
    return found


def _scripted(turns: Sequence[list[int]]) -> Callable[..., tuple[list[list[int]], None]]:
    left = iter(turns)

    def generate(prompt_ids: Sequence[object], *args: object, **kwargs: object) -> tuple[list[list[int]], None]:
        turn = next(left, None)
        if turn is None:
            raise RuntimeError("a turn was asked for after the last one")
        return [list(turn) for _ in prompt_ids], None

    return generate


def play(name: str, template: str) -> dict[str, Any]:
    """Have TRL play all cases of a template; return what was given by case, or why it cannot be played."""
    with tempfile.TemporaryDirectory() as folder:
        try:
            tokenizer = tokenizer_of(name, template, Path(folder))
            return of_trl(tokenizer, cases_of(tokenizer), PARSERS.get(name, ""))
        except (ValueError, TypeError, TemplateError) as fault:
            return {"every case": {"refused": f"{type(fault).__name__}: {fault}"}}


def published(folder: Path) -> dict[str, str]:
    """Read the templates that packages carry, each text once, by package and name."""
    texts: dict[str, str] = {}
    for package in PACKAGES:
        for name, text in sorted(read_templates(package, folder).items()):
            texts.setdefault(text, f"{package.name}: {name}")
    return {name: text for text, name in texts.items()}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out", metavar="FILE", type=Path, help="file to write")
    parser.add_argument("--published", type=Path, metavar="FOLDER", help="templates of packages, whose files are here")
    asked = parser.parse_args()
    import trl

    logging.disable(logging.WARNING)
    warnings.simplefilter("ignore")
    texts = OWN if asked.published is None else published(asked.published)
    lines = [f' "trl": {json.dumps(trl.__version__)}']
    for name, text in texts.items():
        lines.append(f" {json.dumps(name)}: {json.dumps(play(name, text), ensure_ascii=False)}")
        print(name, flush=True)
    asked.out.write_text("{\n" + ",\n".join(lines) + "\n}\n", encoding="utf-8")


if __name__ == "__main__":
    main()
