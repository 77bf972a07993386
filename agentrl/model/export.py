"""A trained model in Hugging Face format."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from pathlib import Path

import torch
from torch import nn
from transformers import GenerationConfig, PretrainedConfig, PreTrainedModel, PreTrainedTokenizerBase
from transformers.utils import GENERATION_CONFIG_NAME

from agentrl.model.heads import Params, PolicyModel, ScoreModel, classifier_class
from agentrl.parallel.collectives import full, rank

ADAPTER = "adapter"
"""Name of the adapters' folder within the model's."""


def export_model(
    model: PolicyModel, params: Params, dtype: torch.dtype, directory: Path, tokenizer: PreTrainedTokenizerBase
) -> None:
    """Write `model` with all its parameters `params` in `dtype`, its config and the tokenizer.

    Adapters are merged, and also written in peft's format, into `adapter/`. Every rank must call it.

    The weights are put into an empty copy of the model: a sharded model cannot be written, and a user's
    `from_pretrained` does not know packed attention.
    """
    tensors = {name: tensor.to(dtype).cpu() for name, tensor in model.tensors(params) if rank() == 0}
    if rank() == 0:
        _write(model.base, tensors, dtype, directory)
        tokenizer.save_pretrained(directory)
    if model.lora is not None:
        model.lora.write(directory / ADAPTER, params)


def export_score_model(
    model: ScoreModel, params: Params, dtype: torch.dtype, directory: Path, tokenizer: PreTrainedTokenizerBase
) -> None:
    """Write a reward model with all its parameters `params` in `dtype`, as a sequence classifier of one label, and the
    tokenizer. Every rank must call it."""
    tensors = {name: full(param.detach()).to(dtype).cpu() for name, param in params.items()}
    if rank() == 0:
        config = copy.deepcopy(model.base.config)
        config.num_labels = 1
        kind = classifier_class(model.base)
        head, prefix = "score.weight", f"{kind.base_model_prefix}."
        named = {name if name == head else prefix + name: tensor for name, tensor in tensors.items()}
        buffers = {prefix + name: buffer for name, buffer in model.base.named_buffers()}
        _filled(kind, config, named, buffers, dtype).save_pretrained(directory)
        tokenizer.save_pretrained(directory)


def add_stop_tokens(directory: Path, ids: Sequence[int]) -> None:
    """Have the model in `directory` end its turns with any of `ids`, as well as with the ends that it names already.

    `generate` and servers read them from the generation config.
    """
    config = GenerationConfig.from_pretrained(directory)
    own = config.eos_token_id
    named = own if isinstance(own, list) else [] if own is None else [own]
    config.eos_token_id = list(dict.fromkeys([*named, *ids]))
    config._from_model_config = None  # else transformers 4 takes the ends of config.json instead
    config.to_json_file(directory / GENERATION_CONFIG_NAME)


def _write(model: PreTrainedModel, tensors: dict[str, torch.Tensor], dtype: torch.dtype, directory: Path) -> None:
    _filled(type(model), copy.deepcopy(model.config), tensors, dict(model.named_buffers()), dtype).save_pretrained(
        directory
    )
    # `save_pretrained` refuses generation configs that models are published with, e.g. a temperature without do_sample.
    if model.generation_config is not None:
        model.generation_config.to_json_file(directory / GENERATION_CONFIG_NAME)


def _filled(
    kind: type[PreTrainedModel],
    config: PretrainedConfig,
    tensors: dict[str, torch.Tensor],
    buffers: dict[str, torch.Tensor],
    dtype: torch.dtype,
) -> PreTrainedModel:
    """Make a model of class `kind` with all of its weights. `config` is changed."""
    config._attn_implementation = "eager"
    with torch.device("meta"):
        shell = kind(config)
    nn.Module.to(shell, dtype)
    kept = shell.state_dict().keys()
    own = {name: buffer.detach().cpu() for name, buffer in buffers.items() if name in kept}
    shell.load_state_dict(tensors | own, strict=False, assign=True)
    shell.tie_weights()
    left = [name for name, param in shell.named_parameters() if param.is_meta]
    if left:
        raise ValueError(f"export_model: no tensor was given for {left[0]}")
    return shell
