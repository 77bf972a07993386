"""A trained model in Hugging Face format."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedModel

from agentrl.workers.shard import full, rank


def export_model(
    model: PreTrainedModel, params: Mapping[str, torch.Tensor], dtype: torch.dtype, directory: Path, tokenizer: Any
) -> None:
    """Write `params`, the trained weights of `model`, in `dtype`, with config and tokenizer. Every rank must call it.

    They are hung into an empty copy of the model, since a sharded one cannot be written and packed attention is
    nothing that a user's `from_pretrained` knows.
    """
    tensors = {name: full(param.detach()).to(dtype).cpu() for name, param in params.items()}
    if rank() != 0:
        return
    config = copy.deepcopy(model.config)
    config._attn_implementation = "eager"
    with torch.device("meta"):
        shell: PreTrainedModel = type(model)(config)
    nn.Module.to(shell, dtype)
    shell.load_state_dict(tensors, strict=False, assign=True)
    shell.tie_weights()
    left = [name for name, param in shell.named_parameters() if param.is_meta]
    if left:
        raise ValueError(f"export_model: no tensor was given for {left[0]}")
    shell.generation_config = copy.deepcopy(model.generation_config)
    shell.save_pretrained(directory)
    tokenizer.save_pretrained(directory)
