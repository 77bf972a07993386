"""Reading a checkpoint into a sharded model: no rank ever holds the whole of it.

A rank makes its model on the device `meta`, where weights have shapes and no numbers. It shards the model, then reads
its own slice of each weight from the safetensors. The reading is transformers' own, with its names, files and
conversions. It fills a shell, a bare model of the same class whose weights are the sharded ones. The loaded weights are
moved from there into the model, with all its adapters, wrappers and hooks.
"""

from __future__ import annotations

import copy
from collections.abc import Collection, Mapping
from typing import cast

import torch
from torch import nn
from torch.distributed.fsdp import FSDPModule, register_fsdp_forward_method
from torch.distributed.tensor import DTensor, distribute_tensor
from transformers import PreTrainedModel
from transformers.conversion_mapping import get_model_conversion_mapping
from transformers.core_model_loading import (
    Concatenate,
    ConversionOps,
    MergeModulelist,
    Transpose,
    WeightConverter,
)
from transformers.distributed.configuration_utils import DistributedConfig

from agentrl.model.packed import check_fits, empty_model, load_model, loading
from agentrl.parallel.collectives import world_size
from agentrl.system.json_value import JSON


def open_model(
    path: str,
    *,
    dtype: str,
    device: str | torch.device,
    trust_remote_code: bool = False,
    override: Mapping[str, JSON] = {},
) -> PreTrainedModel:
    """Open the model of `load_model`; on several ranks without weights, which `read_weights` reads once it is sharded.

    Raises ConfigError when there is no such model.
    """
    if world_size() == 1:
        return load_model(path, dtype=dtype, device=device, trust_remote_code=trust_remote_code, override=override)
    return empty_model(path, dtype=dtype, trust_remote_code=trust_remote_code, override=override)


def read_weights(root: nn.Module, model: PreTrainedModel) -> None:
    """Read the weights that are on `meta` into `root`, a sharded module around `model`. No-op without any.

    Every rank must call it. Raises ConfigError when the checkpoint cannot be read or lacks a weight, or when the
    model cannot be run on packed sequences.
    """
    wanted = {_plain(name): param for name, param in model.named_parameters() if param.is_meta}
    if not wanted:
        return
    shell = _read_shell(model, wanted)
    found = dict(shell.named_parameters())
    read: dict[int, nn.Parameter] = {}
    for name, param in wanted.items():
        tensor = found.pop(name).detach()
        if not isinstance(tensor, DTensor):
            assert isinstance(param, DTensor)
            tensor = distribute_tensor(tensor, param.device_mesh, param.placements, src_data_rank=None).clone()
        read[id(param)] = nn.Parameter(tensor, requires_grad=param.requires_grad)
    for module in root.modules():
        for name, param in list(module.named_parameters(recurse=False)):
            if id(param) in read:  # tied weights are one
                setattr(module, name, read[id(param)])
    device = next(root.parameters()).device
    buffers = dict(shell.named_buffers())
    for name, _ in model.named_buffers():
        owner, _, last = name.rpartition(".")
        setattr(model.get_submodule(owner), last, buffers[_plain(name)].to(device))
    if shell.can_generate():
        model.generation_config = copy.deepcopy(shell.generation_config)
    _check_attention(root)


def _plain(name: str) -> str:
    """Name of a parameter before peft wrapped its layer."""
    return name.replace(".base_layer.", ".")


def _read_shell(model: PreTrainedModel, wanted: Mapping[str, nn.Parameter]) -> PreTrainedModel:
    """Read a bare model of the same class, in which this rank has its part of the weights `wanted`."""

    def share(cls: type[PreTrainedModel], shell: PreTrainedModel, *_: object) -> PreTrainedModel:
        if _reads_slices(shell, wanted):
            for prefix, module in shell.named_modules():
                for name, _param in list(module.named_parameters(recurse=False)):
                    if (sharded := wanted.get(f"{prefix}.{name}".removeprefix("."))) is not None:
                        setattr(module, name, sharded)
        return shell

    kind = type(model)
    # from_pretrained calls this hook after it made the model on `meta`, and before it reads the weights.
    attributes: dict[str, object] = {"maybe_distribute_model": classmethod(share), "__module__": kind.__module__}
    if model is model.base_model:
        attributes["_keys_to_ignore_on_load_unexpected"] = [".*"]  # the head of a whole model
    reader = cast(type[PreTrainedModel], type(kind.__name__, (kind,), attributes))
    path = str(model.config.name_or_path)
    with loading(path):
        read: object = reader.from_pretrained(
            path,
            config=model.config,
            dtype=next(iter(wanted.values())).dtype,
            distributed_config=DistributedConfig(),
            output_loading_info=True,
            ignore_mismatched_sizes=True,
            use_safetensors=True,
        )
    # What output_loading_info makes of the answer.
    shell, report = cast(tuple[PreTrainedModel, Mapping[str, Collection[object]]], read)
    check_fits(path, shell, report, wanted)
    return shell


def _reads_slices(shell: PreTrainedModel, wanted: Mapping[str, nn.Parameter]) -> bool:
    """True when transformers' conversions work on slices of the first dimension. Otherwise the model is read whole.

    Stacking experts does, where each rank has one; cutting or joining along the first dimension does not.
    """
    converters = [one for one in get_model_conversion_mapping(shell) if isinstance(one, WeightConverter)]
    steps = [step for converter in converters for step in converter.operations]
    if not all(isinstance(step, MergeModulelist) or _keeps_rows(step) for step in steps):
        return False
    return not steps or all(param.to_local().numel() for param in wanted.values() if isinstance(param, DTensor))


def _keeps_rows(step: ConversionOps) -> bool:
    match step:
        case Concatenate():
            return step.dim > 0
        case Transpose():
            return min(step.dim0, step.dim1) > 0
    return False


def _check_attention(root: nn.Module) -> None:
    """Call `root.check_attention` as a forward pass of `root`, which gathers the weights and frees them again."""
    assert isinstance(root, FSDPModule)
    register_fsdp_forward_method(root, "check_attention")
    root.check_attention()  # type: ignore[operator]
    root.reshard()
