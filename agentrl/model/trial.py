"""A trial of a model's family on a small copy with random weights: it needs the config alone.

Comparisons of numbers decide whether a model with states can be trained (`agentrl.model.packed`), and need weights. A
copy with one layer of each kind has them in seconds, before the model's own weights are read.
"""

from __future__ import annotations

import copy
import logging
from collections.abc import Callable, Mapping
from typing import cast

import torch
from transformers import AutoModelForCausalLM, PretrainedConfig, PreTrainedModel

from agentrl.errors import ConfigError
from agentrl.model.packed import loading, plain_config, use_packed_attention
from agentrl.model.stateful import keeps_state
from agentrl.system.json_value import JSON

logger = logging.getLogger(__name__)

_MOST_PARAMETERS = 300_000_000
"""Limit of a copy's parameters, 1.2 GB in float32."""
_VOCABULARY, _INNER = 512, 16
"""Ids, and width of feed-forward layers and experts, of a copy."""


def keeps_states(path: str, override: Mapping[str, JSON] = {}, *, trust_remote_code: bool = False) -> bool:
    """Say by its config whether layers of the model at `path` keep a state from token to token.

    Raises ConfigError when there is no such model.
    """
    with loading(path, override):
        return _may_keep_state(plain_config(path, trust_remote_code, override).get_text_config())


def try_family(
    path: str,
    override: Mapping[str, JSON] = {},
    *,
    trust_remote_code: bool = False,
    further: Callable[[PreTrainedModel], object] | None = None,
) -> None:
    """Run packed attention's checks, and then `further`, on a small copy of the model at `path`.

    Its weights need not be there. No-op for models without states, and where a copy cannot be made: then the same
    checks after loading decide alone. Raises ConfigError where the copy, and so the model, cannot be trained.
    """
    with loading(path, override):
        config = plain_config(path, trust_remote_code, override).get_text_config()
    if not _may_keep_state(config):
        return
    model = _small_copy(config)
    if model is None:
        return
    try:
        use_packed_attention(model)
        if further is not None:
            further(model)
    except ConfigError as error:
        raise ConfigError(f"{path}: {error}") from error


def _may_keep_state(config: PretrainedConfig) -> bool:
    kind = _class(config)
    return keeps_state(config) or (kind is not None and kind._is_stateful)


def _class(config: PretrainedConfig) -> type[PreTrainedModel] | None:
    return cast("type[PreTrainedModel] | None", AutoModelForCausalLM._model_mapping.get(type(config), None))


def _small_copy(config: PretrainedConfig) -> PreTrainedModel | None:
    """Make a model with one layer of each kind of `config`, of a text model, with random weights; None if not possible.

    Mixers and hidden states have their own widths, the vocabulary and feed-forward layers are cut.
    """
    kind = _class(config)
    if kind is None:
        return None
    try:
        cut = _cut(config)
        with torch.device("meta"):
            size = sum(weight.numel() for weight in kind._from_config(copy.deepcopy(cut)).parameters())
        if size > _MOST_PARAMETERS:
            return None
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(0)
            model: PreTrainedModel = kind._from_config(cut, dtype=torch.float32)
            with torch.no_grad():
                for weight in model.parameters():
                    if weight.ndim >= 2:  # As large as trained ones: a new model's weights hardly mix tokens.
                        weight.normal_(0.0, weight.shape[-1] ** -0.5)
            model.eval()(input_ids=torch.arange(8)[None], use_cache=False)
    except (AttributeError, IndexError, KeyError, RuntimeError, TypeError, ValueError) as error:
        logger.info("no copy of %s could be made for a trial: %s", type(config).__name__, error)
        return None
    return model


def _cut(config: PretrainedConfig) -> PretrainedConfig:
    """Copy a config with the first layer of each kind, and smaller feed-forward layers and vocabulary."""
    config = copy.deepcopy(config)
    values, layers = vars(config), config.num_hidden_layers
    lists = {name: value for name, value in values.items() if isinstance(value, list) and len(value) == layers}
    lists = {name: value for name, value in lists.items() if all(isinstance(kind, str) for kind in value)}
    kinds = list(zip(*lists.values(), strict=True))
    if kinds:
        first = [number for number, one in enumerate(kinds) if one not in kinds[:number]]
        for name, value in lists.items():
            setattr(config, name, [value[number] for number in first])
        layers = len(first)
    else:  # All are alike, or each so many (`attn_layer_period`) are.
        periods = [value for name, value in values.items() if name.endswith("_period") and isinstance(value, int)]
        layers = min(layers, max([2, *periods]))
    config.num_hidden_layers = layers
    for name, value in values.items():
        if name.endswith("intermediate_size") and isinstance(value, int):
            setattr(config, name, min(value, _INNER))
    config.vocab_size = min(config.vocab_size, _VOCABULARY)
    config.pad_token_id = None
    return config
