"""Export the trained policy in Hugging Face format, with the step that it is of."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from transformers import PreTrainedTokenizerBase
from transformers.utils import CONFIG_NAME

from agentrl.chat import Chat
from agentrl.checkpoint.remote import ObjectStore
from agentrl.checkpoint.state import all_seen
from agentrl.observe.display import Display
from agentrl.system.publish import published_directory

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

    Raises TrainingError when the disk is full, CheckpointError when it was written on another machine's disk.
    """
    with published_directory(folder) as partial:
        export(partial, chat.tokenizer)
        all_seen(partial, [CONFIG_NAME])
        if chat.vision is not None:
            chat.vision.save(partial)
        (partial / STEP_FILE).write_text(f"{step}\n")
    if store is not None:
        with display.stage("upload"):
            store.upload_policy(folder, STEP_FILE)


def exported_step(folder: Path) -> int | None:
    """Read how many steps the exported policy was trained for; None when there is none."""
    file = folder / STEP_FILE
    return int(file.read_text()) if file.exists() else None
