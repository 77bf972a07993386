"""Choosing the chat format: by the model's name, by the user's word, or by the tokenizer's own template."""

from __future__ import annotations

from difflib import get_close_matches
from pathlib import Path
from typing import Any

from agentrl.chat.codec import Codec
from agentrl.chat.formats.format import Format
from agentrl.chat.formats.parsers import CALL_FORMATS, detect_format
from agentrl.chat.formats.template import TemplateFormat
from agentrl.errors import ConfigError


def load_tokenizer(path: str, chat_template: str | None, *, trust_remote_code: bool) -> Any:
    """The Hugging Face tokenizer at `path` (a directory or a hub name), with the template file if one is given."""
    from transformers import AutoTokenizer

    try:
        tokenizer = AutoTokenizer.from_pretrained(path, trust_remote_code=trust_remote_code)
    except (OSError, ValueError, KeyError) as fault:
        raise ConfigError(
            f"no tokenizer could be loaded from {path!r} (expected a model directory or a hub name): {fault}"
        ) from fault
    if chat_template is not None:
        try:
            tokenizer.chat_template = Path(chat_template).read_text(encoding="utf-8")
        except (OSError, UnicodeDecodeError) as fault:
            raise ConfigError(f"model.chat_template: expected a Jinja file, {chat_template!r}: {fault}") from fault
    return tokenizer


def make_format(codec: Codec, name: str, template_kwargs: dict[str, Any], *, own_template: bool) -> Format:
    """`name` is one of

    - `auto`: the model's family where the hub name is known to `renderers`, else the tokenizer's own template with the
      call parser that its markers speak of;
    - a family of the `renderers` package, e.g. `qwen3`;
    - `template:PARSER` or `PARSER` (a key of `CALL_FORMATS`, e.g. `hermes`): the tokenizer's own template.

    Raises ConfigError for other names, and for a family together with a template file, which it would ignore.
    """
    from renderers.base import MODEL_RENDERER_MAP  # type: ignore[import-untyped]

    from agentrl.chat.formats.family import FAMILIES, FamilyFormat

    family = MODEL_RENDERER_MAP.get(codec.tokenizer.name_or_path) if name == "auto" and not own_template else name
    if family in FAMILIES:
        if own_template:
            raise ConfigError(
                f"multi_turn.format={name} and model.chat_template conflict: a family has its own template"
            )
        return FamilyFormat(codec, family, template_kwargs)
    source = _template_source(codec.tokenizer)
    if name == "auto":
        return TemplateFormat(codec, detect_format(source), template_kwargs)
    parser = name.removeprefix("template:")
    if parser not in CALL_FORMATS:
        known = ["auto", *FAMILIES, *CALL_FORMATS, *(f"template:{parser}" for parser in CALL_FORMATS)]
        near = get_close_matches(name, known, n=3, cutoff=0.5)
        raise ConfigError(
            f"multi_turn.format={name!r} is unknown; nearest: {', '.join(near) or 'none'}. Expected auto, a family "
            f"({', '.join(FAMILIES)}) or template:PARSER with one of {', '.join(CALL_FORMATS)}"
        )
    return TemplateFormat(codec, parser, template_kwargs)


def _template_source(tokenizer: Any) -> str:
    """The text of the tokenizer's template, or of all its named templates."""
    template = tokenizer.chat_template
    if not template:
        raise ConfigError(
            f"the tokenizer at {tokenizer.name_or_path} has no chat template: set actor_rollout_ref.model.chat_template"
            f"=FILE (model.chat_template in SFT) to a Jinja file, or multi_turn.format to the model's family"
        )
    return template if isinstance(template, str) else "\n".join(str(part) for part in template.values())
