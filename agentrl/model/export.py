"""A trained model in Hugging Face format."""

from __future__ import annotations

import copy
from pathlib import Path

import torch
from torch import nn
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from agentrl.model.heads import Params, PolicyModel
from agentrl.parallel.collectives import rank

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


def _write(model: PreTrainedModel, tensors: dict[str, torch.Tensor], dtype: torch.dtype, directory: Path) -> None:
    config = copy.deepcopy(model.config)
    config._attn_implementation = "eager"
    with torch.device("meta"):
        shell: PreTrainedModel = type(model)(config)
    nn.Module.to(shell, dtype)
    kept = shell.state_dict().keys()
    buffers = {name: buffer.detach().cpu() for name, buffer in model.named_buffers() if name in kept}
    shell.load_state_dict(tensors | buffers, strict=False, assign=True)
    shell.tie_weights()
    left = [name for name, param in shell.named_parameters() if param.is_meta]
    if left:
        raise ValueError(f"export_model: no tensor was given for {left[0]}")
    shell.generation_config = copy.deepcopy(model.generation_config)
    shell.save_pretrained(directory)
