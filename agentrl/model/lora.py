"""LoRA (arXiv:2106.09685) by peft: chosen linear layers compute W x + alpha / rank * B (A x), and only A and B learn.

The adapters are put into the model in place; only its linear layers change. Its parameters are then named as peft names
them (`<layer>.base_layer.weight`, `<layer>.lora_A.default.weight`), and the engine is given the merged weights under
the names that the model has without adapters.
"""

from __future__ import annotations

import contextlib
import json
import logging
import re
import zlib
from collections.abc import Iterator, Mapping
from pathlib import Path

import torch
from peft import LoraConfig, inject_adapter_in_model
from peft.helpers import rescale_adapter_scale
from peft.tuners.lora import LoraLayer
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import nn
from transformers import PreTrainedModel

from agentrl.config.sections.model import ModelConfig
from agentrl.errors import ConfigError
from agentrl.model.vision import vision_tower
from agentrl.parallel.collectives import full, rank
from agentrl.system.json_value import JSON

logger = logging.getLogger(__name__)

CONFIG, WEIGHTS = "adapter_config.json", "adapter_model.safetensors"
"""Files of an adapter in peft's format."""
PEFT_PREFIX = "base_model.model."
"""Begins the names of an adapter's tensors in peft's format."""
_ADAPTER = ".default"
_BASE = ".base_layer."
_WITHOUT_OUT_PROJ = ("falcon_h1", "mamba2", "nemotron_h")
"""Families in which peft refuses adapters of a mixer's `out_proj`."""


class Lora:
    """Adapters of one model. A is drawn by `seed` and B zero, or both are read from `lora_adapter_path`."""

    def __init__(self, model: PreTrainedModel, config: ModelConfig, seed: int, *, quiet: bool = False) -> None:
        """Put adapters into the model. They are float32 for a model of any dtype; all other parameters are frozen.

        quiet: the log gets no line on layers without adapters. Raises ConfigError when target_modules or
        lora_adapter_path do not fit the model.
        """
        _check_targets(model, config.target_modules)
        self.config = LoraConfig(
            r=config.lora_rank,
            lora_alpha=config.lora_alpha,
            target_modules=_targets(model, config.target_modules, quiet=quiet or rank() != 0),
            lora_dropout=0.0,
            exclude_modules=_without_adapters(model, config.exclude_modules),
            bias="none",
            task_type="CAUSAL_LM",
            base_model_name_or_path=config.path,
        )
        self._model = model
        self._scale = config.lora_alpha / config.lora_rank
        try:
            inject_adapter_in_model(self.config, model)
        except ValueError as error:
            raise ConfigError(f"target_modules={config.target_modules}: {error}") from error
        self.config.target_modules = sorted(self.config.target_modules or ())  # layers that peft found, in no order
        model.eval()
        _start(model, seed)
        if config.lora_adapter_path is not None:
            self._start_from(Path(config.lora_adapter_path))

    @contextlib.contextmanager
    def off(self) -> Iterator[None]:
        """Switch the adapters off inside the block."""
        with rescale_adapter_scale(self._model, 0.0):
            yield

    def plain(self, params: Mapping[str, nn.Parameter]) -> dict[str, nn.Parameter]:
        """Select the parameters that the model has without adapters, keyed by their names there.

        `params`: all parameters of the model.
        """
        return {_plain(name): param for name, param in params.items() if not _is_adapter(name)}

    def merged(self, params: Mapping[str, nn.Parameter]) -> Iterator[tuple[str, torch.Tensor]]:
        """Yield every weight by its name without adapters; with them it is W + alpha / rank * B A, in float32.

        A weight [O, I] has adapters A [R, I] and B [O, R]. `params`: all parameters of the model, sharded or not. One
        weight is made at a time; every rank must read together.
        """
        for name, param in params.items():
            layer, adapted, kind = name.rpartition(_BASE)
            if _is_adapter(name):
                continue
            if adapted and kind == "weight":
                a, b = (full(params[f"{layer}.lora_{side}{_ADAPTER}.weight"].detach()) for side in "AB")
                yield _plain(name), full(param.detach()).float() + self._scale * (b @ a)
            else:
                yield _plain(name), full(param.detach())

    def unmerged(self, params: Mapping[str, nn.Parameter]) -> Iterator[tuple[str, torch.Tensor]]:
        """Yield every weight [S], whole and without its adapters, by its name without them. See `merged`."""
        return ((name, full(param.detach())) for name, param in self.plain(params).items())

    def adapters(self, params: Mapping[str, nn.Parameter]) -> dict[str, nn.Parameter]:
        """Select the adapters' parameters: A [R, I] and B [O, R], by peft's names."""
        return {PEFT_PREFIX + name.replace(_ADAPTER, ""): param for name, param in params.items() if _is_adapter(name)}

    def write(self, directory: Path, params: Mapping[str, nn.Parameter]) -> None:
        """Write the adapters for `PeftModel.from_pretrained`. Every rank must call it; the first one writes."""
        tensors = {name: full(param.detach()).cpu().contiguous() for name, param in self.adapters(params).items()}
        if rank() != 0:
            return
        self.config.save_pretrained(str(directory))
        save_file(tensors, directory / WEIGHTS, metadata={"format": "pt"})

    def mark(self, params: Mapping[str, nn.Parameter]) -> dict[str, JSON]:
        """Describe the base of a checkpoint's adapters: their scale, and the base weights.

        The weights are identified by a checksum of the first layer with adapters, the same in float32 and bfloat16.
        Every rank must call it.
        """
        first = next(param for name, param in params.items() if name.endswith(f"{_BASE}weight"))
        weights = full(first.detach()).to(torch.bfloat16).cpu().contiguous().view(torch.uint8)
        checksum = zlib.crc32(weights.numpy().tobytes())
        return {"lora_alpha": self.config.lora_alpha, "path": f"weights with checksum {checksum:08x}"}

    def _start_from(self, path: Path) -> None:
        """Take over adapters in peft's format. Raises ConfigError when they do not match the config."""
        at = f"lora_adapter_path={path}"
        theirs = read_plain_lora(path, at)
        self._check_config(theirs, at)
        try:
            tensors = load_file(path / WEIGHTS)
        except (FileNotFoundError, SafetensorError) as error:
            raise ConfigError(f"{at}: {WEIGHTS} cannot be read: {error}") from error
        found = {name.removeprefix(PEFT_PREFIX): tensor for name, tensor in tensors.items()}
        params = {name.replace(_ADAPTER, ""): p for name, p in self._model.named_parameters() if _is_adapter(name)}
        for name in [*params, *sorted(set(found) - set(params))]:
            shapes = [list(there[name].shape) if name in there else "nothing" for there in (params, found)]
            if shapes[0] != shapes[1]:
                raise ConfigError(
                    f"{at}: {name}: the run has {shapes[0]}, the adapter {shapes[1]}. Set "
                    f"target_modules and path as it was made with: target_modules={theirs.get('target_modules')}, "
                    f"path={theirs.get('base_model_name_or_path')}"
                )
        with torch.no_grad():
            for name, param in params.items():
                param.copy_(found[name])

    def _check_config(self, theirs: Mapping[str, JSON], at: str) -> None:
        """Check rank and alpha of the adapters' own config `theirs`. Raises ConfigError, which begins with `at`."""
        ours = {"r": self.config.r, "lora_alpha": self.config.lora_alpha}
        for key, value in ours.items():
            if theirs.get(key) != value:
                name = {"r": "lora_rank"}.get(key, key)
                raise ConfigError(f"{at}: {CONFIG} has {key}={theirs.get(key)}, and the run has {name}={value}")


def _without_adapters(model: PreTrainedModel, excluded: str | list[str] | None) -> list[str] | None:
    """List the layers that get no adapters: the named ones, and a frozen vision tower's; None where all do."""
    tower = vision_tower(model)
    frozen = tower is not None and not any(param.requires_grad for param in tower.parameters())
    inside = set(map(id, tower.modules())) if tower is not None and frozen else set()
    names = [name for name, module in model.named_modules() if id(module) in inside or _is_named(name, excluded)]
    return names or None


def _is_named(name: str, named: str | list[str] | None) -> bool:
    """Check whether a layer is one of those named: by a regular expression, or by names or their last parts."""
    if isinstance(named, str):
        return re.fullmatch(named, name) is not None
    return any(name == one or name.endswith(f".{one}") for one in named or ())


def _plain(name: str) -> str:
    return name.replace(_BASE, ".")


def _is_adapter(name: str) -> bool:
    return f"{_ADAPTER}." in name and ".lora_" in name


def _targets(model: PreTrainedModel, targets: str | list[str], *, quiet: bool) -> list[str]:
    """List the layers that are named; all-linear: every linear one but the head.

    A router is no linear layer, and neither are the experts of a mixture where one parameter holds all of a layer's.
    peft would wrap these; here they get no adapters. The same holds for layers whose names peft takes for those of
    fused experts, e.g. `gate_proj` of a shared expert.
    """
    if targets != "all-linear":
        assert isinstance(targets, list)
        return targets
    head = model.get_output_embeddings()
    if fused_experts(model) and not quiet:
        logger.warning("target_modules=all-linear: the experts, fused to one parameter a layer, get no adapters")
    linear = [name for name, module in model.named_modules() if type(module) is nn.Linear and module is not head]
    kinds = {name.rpartition(".")[2] for name in linear}
    left_out = {kind for kind in kinds if _means_experts(model, kind)}
    if left_out and not quiet:
        logger.warning(
            "target_modules=all-linear: %s get no adapters: peft takes these names for experts",
            ", ".join(sorted(left_out)),
        )
    if model.config.get_text_config().model_type in _WITHOUT_OUT_PROJ:
        left_out.add("out_proj")
    return [name for name in linear if name.rpartition(".")[2] not in left_out]


def _means_experts(model: PreTrainedModel, kind: str) -> bool:
    """Check whether peft takes layers of a name for fused experts of `model`, which once were layers of that name."""
    # Imported late: peft may move what only all-linear needs.
    from peft.utils.transformers_weight_conversion import convert_peft_config_for_transformers
    from transformers.conversion_mapping import get_model_conversion_mapping

    trial = LoraConfig(target_modules=[kind])
    try:
        convert_peft_config_for_transformers(trial, model, get_model_conversion_mapping(model))
    except ValueError:  # a part of what is fused
        return True
    return set(trial.target_modules or ()) != {kind}


def fused_experts(model: PreTrainedModel) -> bool:
    """Check whether the model keeps all experts of a layer in one parameter, [experts, ...]."""
    return any(name.rpartition(".")[0].endswith("experts") and p.ndim == 3 for name, p in model.named_parameters())


def _check_targets(model: PreTrainedModel, targets: str | list[str]) -> None:
    if isinstance(targets, str):
        return
    names = {name: module for name, module in model.named_modules() if isinstance(module, nn.Linear)}
    for target in targets:
        matched = [name for name in names if name == target or name.endswith(f".{target}")]
        if not matched:
            known = ", ".join(sorted({name.rpartition(".")[2] for name in names}))
            raise ConfigError(
                f"target_modules: {type(model).__name__} has no linear layer named {target!r}; it has: {known}"
            )
        if model.config.tie_word_embeddings and any(names[name] is model.get_output_embeddings() for name in matched):
            raise ConfigError(
                f"target_modules: {target!r} is the head, whose weights are also the embeddings of "
                f"{type(model).__name__}; leave it out"
            )


def _start(model: PreTrainedModel, seed: int) -> None:
    """Draw the adapters in float32 on the CPU: the same for a model of any device (`meta`, too) and dtype."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        for name, module in model.named_modules():
            if isinstance(module, LoraLayer):
                base = module.get_base_layer()
                if type(base) is not nn.Linear:
                    raise ConfigError(
                        f"target_modules: {name} is a {type(base).__name__}; adapters go beside nn.Linear only"
                    )
                for side in (module.lora_A, module.lora_B):
                    side.to_empty(device="cpu").float()
                module.reset_lora_parameters(_ADAPTER.removeprefix("."), init_lora_weights=True)
                if not base.weight.is_meta:
                    for side in (module.lora_A, module.lora_B):
                        side.to(base.weight.device)


def read_plain_lora(path: Path, at: str) -> dict[str, JSON]:
    """Read the config of adapters in peft's format.

    Raises ConfigError, which begins with `at`, where it cannot be read, or the adapters are no plain LoRA.
    """
    try:
        found = json.loads((path / CONFIG).read_text(encoding="utf-8"))
        if not isinstance(found, dict):
            raise ValueError(f"expected a JSON object, found {type(found).__name__}")
    except (OSError, ValueError) as error:
        raise ConfigError(f"{at}: {CONFIG} cannot be read: {error}. Give a folder that peft wrote") from error
    plain = ("use_rslora", "use_dora", "rank_pattern", "alpha_pattern", "modules_to_save", "fan_in_fan_out")
    used = [key for key in plain if found.get(key)]
    used += [key for key, plainly in (("peft_type", "LORA"), ("bias", "none")) if found.get(key, "none") != plainly]
    if used:
        raise ConfigError(f"{at}: {CONFIG} has {used[0]}={found.get(used[0])}; only plain LoRA")
    return found
