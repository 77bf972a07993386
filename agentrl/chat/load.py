"""Choice of the chat format: by the model's name, the user's key, or the tokenizer's own template."""

from __future__ import annotations

from collections.abc import Mapping
from datetime import datetime
from functools import partial
from typing import Any

from agentrl.chat.codec import Codec
from agentrl.chat.formats.format import Format
from agentrl.chat.formats.parsers import CallFormat
from agentrl.chat.formats.template import TemplateFormat
from agentrl.config.formats import families, unknown_format
from agentrl.config.registries import CALL_FORMATS
from agentrl.config.sections.model import JINJA, TODAY
from agentrl.errors import ConfigError
from agentrl.system.json_value import JSON
from agentrl.system.targets import is_target
from agentrl.system.texts import read_text

NO_CALLS = "none"
"""The format of models that call no tools."""


def load_tokenizer(path: str, chat_template: str | None, *, trust_remote_code: bool, date: str | None = None) -> Any:
    """Load the tokenizer at `path` (a directory or a hub name), with the Jinja file, or template, if one is given.

    date: written by a template that asks for the time, see model.chat_template_date; None: the day of this call.

    Raises ConfigError when either cannot be read.
    """
    from transformers import AutoTokenizer

    try:
        tokenizer: Any = AutoTokenizer.from_pretrained(path, trust_remote_code=trust_remote_code)
    except (OSError, ValueError, KeyError) as fault:
        raise ConfigError(
            f"no tokenizer could be loaded from {path!r} (expected a model directory or a hub name): {fault}"
        ) from fault
    if chat_template is not None:
        try:
            is_text = any(tag in chat_template for tag in JINJA)
            tokenizer.chat_template = chat_template if is_text else read_text(chat_template)
        except (OSError, UnicodeDecodeError) as fault:
            raise ConfigError(f"model.chat_template: expected a Jinja file, {chat_template!r}: {fault}") from fault
    if date != TODAY and "strftime_now" in str(tokenizer.chat_template):
        day = datetime.fromisoformat(date) if date else datetime.now()
        # A variable of a template takes the place of transformers' function of the same name.
        tokenizer.apply_chat_template = partial(tokenizer.apply_chat_template, strftime_now=day.strftime)
    return tokenizer


def make_format(codec: Codec, name: str, template_kwargs: Mapping[str, JSON], *, own_template: bool) -> Format:
    """Make the chat format that `name` asks for:

    - `auto`: the model's family where the hub name is known to `renderers`, else the tokenizer's own template with the
      call format that its markers speak of, or that reads a call which it writes;
    - a family of the `renderers` package, e.g. `qwen3`;
    - `template:CALLS` or `CALLS` (a name of `CALL_FORMATS`, e.g. `hermes`, or `none`): the tokenizer's own template;
    - a target: a CallFormat for the tokenizer's own template, or a class that is called with the codec and
      `template_kwargs` and gives a Format.

    Raises ConfigError for other names, and for a family together with a template file, which it would ignore.
    """
    from renderers.base import MODEL_RENDERER_MAP  # type: ignore[import-untyped]

    from agentrl.chat.formats.family import FamilyFormat

    family = MODEL_RENDERER_MAP.get(codec.tokenizer.name_or_path) if name == "auto" and not own_template else name
    if family in families():
        if own_template:
            raise ConfigError(
                f"multi_turn.format={name} and model.chat_template conflict: a family has its own template"
            )
        return FamilyFormat(codec, family, template_kwargs)
    if name == "auto":
        return choose_calls(codec, template_kwargs)[0]
    chosen = name.removeprefix("template:")
    if not is_target(chosen) and (fault := unknown_format(name, CALL_FORMATS.names())) is not None:
        raise ConfigError(fault)
    found = None if chosen == NO_CALLS else CALL_FORMATS.get(chosen)
    if isinstance(found, type):
        return found(codec, template_kwargs)
    if found is not None and not isinstance(found, CallFormat):
        raise ConfigError(
            f"multi_turn.format={name}: expected a CallFormat, or a class that gives a Format (agentrl.chat.formats), "
            f"found {found!r:.200}"
        )
    template_source(codec.tokenizer)
    return TemplateFormat(codec, template_kwargs, found, chosen)


def choose_calls(codec: Codec, template_kwargs: Mapping[str, JSON]) -> tuple[TemplateFormat, bool]:
    """Choose the call format by its signs; else the first format by name that reads a call of the template.

    The second result is False where no format reads one. Raises ConfigError where the template fits no format.
    """
    first: TemplateFormat | ConfigError | None = None
    for name in dict.fromkeys((detect_format(template_source(codec.tokenizer)), *CALL_FORMATS.names())):
        try:
            calls = None if name == NO_CALLS else CALL_FORMATS.get(name)
            # A class of formats needs no template's calls.
            tried = TemplateFormat(codec, template_kwargs, calls if isinstance(calls, CallFormat) else None, name)
        except ConfigError as fault:
            first = first or fault
            continue
        written = tried.written_call()
        if tried.reads(written):
            return tried, True
        first = first or tried
        if not written:
            break
    if not isinstance(first, TemplateFormat):
        assert first is not None
        raise first
    return first, False


def detect_format(template: str) -> str:
    """Choose the call format all of whose signs occur in a template, the one with most signs; `none` without any."""
    found: dict[str, int] = {}
    for name in CALL_FORMATS.names():
        calls = CALL_FORMATS.get(name)
        if isinstance(calls, CallFormat) and calls.signs and all(sign in template for sign in calls.signs):
            found[name] = len(calls.signs)
    return max(found, key=lambda name: found[name], default=NO_CALLS)


def template_source(tokenizer: Any) -> str:
    """Text of the tokenizer's template, or of all its named ones. Raises ConfigError without a template."""
    template = tokenizer.chat_template
    if not template:
        raise ConfigError(
            f"the tokenizer at {tokenizer.name_or_path} has no chat template: set actor_rollout_ref.model.chat_template"
            f"=FILE (model.chat_template in SFT) to a Jinja file, or multi_turn.format to the model's family"
        )
    return template if isinstance(template, str) else "\n".join(str(part) for part in template.values())
