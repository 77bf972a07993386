"""Device of a process."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
from collections.abc import Callable
from pathlib import Path

import torch

from agentrl.config.sections.model import PlainModelConfig
from agentrl.config.sections.trainer import RunConfig
from agentrl.errors import ConfigError

_NVIDIA_GPUS = Path("/proc/driver/nvidia/gpus")
_warned = False


def resolve_device(name: str, warn: Callable[[str], None]) -> str:
    """`auto` takes the GPU where torch can use one. Raises ConfigError for cuda without a GPU.

    With `auto` and an NVIDIA GPU that torch cannot use, `warn` is called, once in the life of the process.
    """
    global _warned
    if name == "cpu" or torch.cuda.is_available():
        return "cuda" if name == "auto" else name
    gpu = visible_gpu()
    if name == "cuda":
        build = "a build for the CPU" if torch.version.cuda is None else f"for CUDA {torch.version.cuda}"
        why = f"torch {torch.__version__} ({build}) sees no CUDA device" if gpu is None else _unused(gpu)
        raise ConfigError(f"trainer.device=cuda, but {why}. Without CUDA: trainer.device=cpu")
    if gpu is not None and not _warned:
        _warned = True
        warn(f"computing on the CPU: {_unused(gpu)}. To compute on the CPU without this warning: trainer.device=cpu")
    return "cpu"


def note_ranks(device: str, keys: RunConfig, warn: Callable[[str], None]) -> None:
    """Warn of several ranks that `auto` puts on the CPU, which share the cores of their machine."""
    if device == "cpu" and keys.device == "auto" and keys.n_gpus_per_node > 1:
        warn(
            f"trainer.n_gpus_per_node={keys.n_gpus_per_node}, and torch {torch.__version__} sees no CUDA device: so "
            f"many processes share the {os.cpu_count()} cores of a CPU. To be refused instead: trainer.device=cuda; "
            "without this warning: trainer.device=cpu"
        )


def note_precision(device: str, model: PlainModelConfig, key: str, note: Callable[[str], None]) -> None:
    """Say that float32 is slow on a GPU. key: of the section `model`."""
    if device == "cuda" and model.dtype == "float32" and model.path != "quickstart":
        note(
            f"{key}.dtype=float32 on a GPU: attention runs one sequence after the other, and matrix products take "
            f"several times as long as in bfloat16. With {key}.dtype=bfloat16 trained weights stay float32"
        )


def visible_gpu() -> str | None:
    """The name of an NVIDIA GPU of this machine that is not hidden from CUDA, whether or not torch can use it."""
    hidden = os.environ.get("CUDA_VISIBLE_DEVICES")
    if hidden is not None and hidden.strip() in ("", "-1", "NoDevFiles"):
        return None
    said = ""
    if (program := shutil.which("nvidia-smi")) is not None:
        try:
            said = subprocess.run([program, "-L"], capture_output=True, text=True, timeout=20).stdout
        except (OSError, subprocess.SubprocessError):
            said = ""  # a driver that does not answer
    found = re.search(r"^GPU \d+: (.*?)(?: \(UUID.*)?$", said, re.MULTILINE)
    if found is None:
        said = "\n".join(file.read_text() for file in sorted(_NVIDIA_GPUS.glob("*/information")))
        found = re.search(r"^Model:\s*(.*)$", said, re.MULTILINE)
    return found[1].strip() if found else None


def _unused(gpu: str) -> str:
    """Why torch does not use `gpu`, and how to fix it."""
    if torch.version.cuda is None:
        return (
            f"this machine has an NVIDIA GPU ({gpu}), and torch {torch.__version__} is a build for the CPU. For CUDA: "
            "make setup CONSTRAINTS=constraints/cuda.txt (or pip uninstall torch, then pip install torch)"
        )
    return (
        f"this machine has an NVIDIA GPU ({gpu}), which torch {torch.__version__} cannot use: its driver may be older "
        f"than CUDA {torch.version.cuda} needs. Update the driver, or take torch for an older CUDA, e.g. make clean, "
        "then make setup CONSTRAINTS=constraints/cuda.txt TORCH_INDEX=https://download.pytorch.org/whl/cu126"
    )
