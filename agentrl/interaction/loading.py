"""Construction of the interactions that a YAML file names."""

from __future__ import annotations

from pathlib import Path

import pydantic

from agentrl.config.dialect import translated
from agentrl.errors import ConfigError
from agentrl.interaction.contract import Interaction
from agentrl.system.call_journal import RENAMED, check_on_resume
from agentrl.system.entries import Entry, read_entries
from agentrl.system.plugin import describe


def load_interactions(path: str | Path | None) -> dict[str, Interaction]:
    """Load the interactions of a YAML file (None: no interactions), by name.

    The file is looked for in the working directory, else in `configs/`.

        interaction:
          - name: gsm8k
            class_name: interactions.gsm8k.Gsm8kInteraction
            config: {}
            on_resume: calls             # optional, overrides the class; see `OnResume`

    Raises ConfigError naming the file and the entry.
    """
    loaded: dict[str, Interaction] = {}
    for entry in read_entries(path, "interaction") if path is not None else []:
        interaction = _make(entry)
        if interaction.name in loaded:
            raise entry.error(f"two interactions are called {interaction.name!r}: give one of them another name")
        loaded[interaction.name] = interaction
    return loaded


def _name_of(class_name: str) -> str:
    """Name an interaction that the YAML does not name: by its class, in lower case, without `Interaction`."""
    simple = class_name.rpartition(".")[2]
    return simple.removesuffix("Interaction").lower() or simple.lower()


def _make(entry: Entry) -> Interaction:
    entry = translated(entry).renamed(RENAMED)
    entry.check_keys(("name", "class_name", "config", "on_resume"))
    config = entry.mapping("config")
    if "on_resume" in config:
        raise entry.error("`on_resume` stands beside `config`, not in it")
    name = entry.text("name") if "name" in entry.values else _name_of(entry.text("class_name"))
    interaction_class = entry.load(entry.text("class_name"), Interaction)
    try:
        interaction = interaction_class(config, name)
        if (word := entry.values.get("on_resume")) is not None:
            check_on_resume(word, remembers=interaction.remembers)
            interaction.on_resume = word
    except pydantic.ValidationError as error:
        model = interaction_class.config_model
        raise entry.error(f"config: {describe(error, model.model_fields if model else ())}") from error
    except ConfigError as error:
        raise entry.error(str(error)) from error
    except Exception as error:
        raise entry.error(f"cannot be made: {type(error).__name__}: {error}") from error
    assert isinstance(interaction, Interaction)
    return interaction
