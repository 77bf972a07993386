"""Folders of models, checked before torch is imported and a hub is asked."""

from __future__ import annotations

import time
from pathlib import Path

from agentrl.errors import ConfigError

SHARDS = "model_world_size_*_rank_*.pt"
"""Files of a verl checkpoint's weights."""
GGUF_HINT = "; GGUF holds quantized weights: transformers reads it (gguf_file=...) and saves it as a folder"

HUB_TRIES, HUB_TIMEOUT = 3, 10.0
"""How often the hub is asked whether it answers, and seconds of a try."""


def check_folder(key: str, name: str) -> None:
    """Raise ConfigError where `name`, the value of `key`, can be no hub's name and is no folder of a model either."""
    folder = Path(name)
    if name == "quickstart":
        return
    if folder.is_file():
        hint = GGUF_HINT if folder.suffix == ".gguf" else ""
        raise ConfigError(f"{key}: {name} is a file, and a folder in Hugging Face format is wanted{hint}")
    if folder.is_dir() and not (folder / "config.json").is_file():
        inside = next((path.parent for path in sorted(folder.glob("*/config.json"))), None)
        hint = GGUF_HINT if any(folder.glob("*.gguf")) else "" if inside is None else f"; did you mean {inside}?"
        if (folder / "adapter_config.json").is_file():
            merged = (folder.parent / "config.json").is_file()
            hint = "; it holds adapters: name the model that they are of, and the folder as lora_adapter_path" + (
                f", or name {folder.parent}, which has them merged" if merged else ""
            )
        raise ConfigError(f"{key}: the folder {name} holds no model: it has no config.json{hint}")
    if folder.is_dir() and not any(folder.glob("*.safetensors")) and any(folder.parent.glob(SHARDS)):
        raise ConfigError(
            f"{key}: {name} holds no weights; those beside it ({SHARDS}) are pickles, which are not read. verl's own "
            f"tool verl.model_merger makes a model of {folder.parent}; name the folder that it writes"
        )
    if not folder.exists() and (name.startswith((".", "/", "~")) or name.count("/") > 1):
        raise ConfigError(f"{key}: there is no folder {name} (working directory {Path.cwd()})")
    if not folder.exists():
        check_hub(key, name)


def check_hub(key: str, name: str) -> None:
    """Raise ConfigError where a model is not in the hub's cache, and the hub does not answer.

    Without this check each file would be asked for again and again, a minute and a half in all.
    """
    import httpx
    from huggingface_hub import constants, get_session, try_to_load_from_cache

    if constants.HF_HUB_OFFLINE or isinstance(try_to_load_from_cache(name, "config.json"), str):
        return
    for number in range(HUB_TRIES):
        try:
            get_session().head(constants.ENDPOINT, timeout=HUB_TIMEOUT)
            return
        except httpx.TransportError as error:
            if number == HUB_TRIES - 1:
                raise ConfigError(
                    f"{key}: there is no folder {name}, and the hub's cache ({constants.HF_HUB_CACHE}) has no model of "
                    f"this name. {constants.ENDPOINT} does not answer: {error}. Name a folder, or give a way to the "
                    "hub (HTTPS_PROXY, HF_ENDPOINT)"
                ) from error
            time.sleep(1)
