"""Tools, loops, scorers and rows of a training, checked before torch is imported, which takes seconds."""

from __future__ import annotations

from dataclasses import dataclass

from agentrl.config import Config
from agentrl.data.contract import Dataset
from agentrl.data.loader import check_fills_batch
from agentrl.model.folder import check_folder
from agentrl.rollouts.context import RunContext, load_context, open_rows
from agentrl.rollouts.objects import UserObjects


@dataclass(frozen=True, slots=True)
class Inputs:
    """Everything that a user gives in addition to the config and the model."""

    context: RunContext
    train: Dataset
    validation: Dataset | None


def open_inputs(config: Config, objects: UserObjects | None = None) -> Inputs:
    """Load code and rows, in addition to the given `objects`. Raises UserError for the first that cannot be used."""
    check_folder("actor_rollout_ref.model.path", config.actor_rollout_ref.model.path)
    context, data = load_context(config, objects), config.data
    train = open_rows(config, data.train_files, data.train_max_samples, context)
    validation = None if data.val_files is None else open_rows(config, data.val_files, data.val_max_samples, context)
    check_fills_batch(train, data)  # The loader does so, too: it has no rows that are too long, by the tokenizer.
    return Inputs(context, train, validation)
