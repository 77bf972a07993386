"""Export the trained policy in Hugging Face format, with the step that it is of."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from jinja2 import TemplateError
from transformers import PreTrainedTokenizerBase
from transformers.utils import CONFIG_NAME, GENERATION_CONFIG_NAME

from agentrl.chat import Chat
from agentrl.checkpoint.remote import ObjectStore
from agentrl.checkpoint.state import all_seen
from agentrl.model.export import add_stop_tokens
from agentrl.observe.display import Display
from agentrl.system.publish import published_directory
from agentrl.trajectory import Message

STEP_FILE = "trained_steps"
"""In the exported policy: how many steps it was trained for."""


def export_policy(
    export: Callable[[Path, PreTrainedTokenizerBase], None],
    chat: Chat,
    step: int,
    folder: Path,
    store: ObjectStore | None,
    display: Display,
) -> None:
    """Write a policy after `step` steps into `folder`, whole or not at all, and upload it where there is a store.

    export: has the workers write the model and the tokenizer into a folder, in Hugging Face format.

    Raises TrainingError when the disk is full. Raises CheckpointError when the policy was written on another machine's
    disk.
    """
    with display.stage("export policy"), published_directory(folder) as partial:
        export(partial, chat.tokenizer)
        all_seen(partial, [CONFIG_NAME])
        generates = (partial / GENERATION_CONFIG_NAME).exists()  # a reward model does not
        if generates:
            add_stop_tokens(partial, chat.stop_token_ids)
        if chat.vision is not None:
            chat.vision.save(partial)
        (partial / STEP_FILE).write_text(f"{step}\n")
    if generates and (fault := _prompt_fault(chat)) is not None:
        display.warn(
            f"{folder}: servers write prompts by its chat template, which {fault}. Give them what training had, a "
            f"template or variables (chat_template_kwargs): docs/serve.md"
        )
    if store is not None:
        with display.stage("upload"):
            store.upload_policy(folder, STEP_FILE)


def _prompt_fault(chat: Chat) -> str | None:
    """Say how the tokenizer's own template, given messages alone, differs from `chat`; None where it does not."""
    asked: list[Message] = [{"role": "user", "content": "u"}]
    try:
        written = chat.tokenizer.apply_chat_template(asked, add_generation_prompt=True, return_dict=False)
    except (TemplateError, TypeError, ValueError, KeyError, AttributeError, IndexError) as fault:
        return f"is missing or cannot write a user's message ({fault!s:.200})"
    trained = chat.render(asked)
    if written == trained:
        return None
    return f"writes {chat.decode(written)[-200:]!r} where training had {chat.decode(trained)[-200:]!r}"


def exported_step(folder: Path) -> int | None:
    """Read how many steps the exported policy was trained for; None without an exported policy."""
    file = folder / STEP_FILE
    return int(file.read_text()) if file.exists() else None
