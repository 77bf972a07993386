"""Replacements for SGLang's imports on a machine without a GPU, so that its servers run there.

SGLang imports triton, torchvision and its own compiled kernels wherever it runs. On a CPU without a build of those
kernels it computes everything in plain torch, and only the names have to be there. `install()` puts them there, in
this process and its forks. Facts: SGLang 0.5.23; `tests/sglang/test_cpu_canary.py` says which names another
version misses.
"""

from __future__ import annotations

import importlib
import importlib.util
import multiprocessing
import os
import sys

import torch

from agentrl.engines.sglang.cpu import kernels
from agentrl.engines.sglang.cpu.stand_ins import StandInFinder

ENVIRONMENT = {
    "SGLANG_USE_CPU_ENGINE": "1",
    "TORCH_COMPILE_DISABLE": "1",  # its sampling is compiled at the first request, by a C++ compiler, else
    "OMP_WAIT_POLICY": "PASSIVE",
}


def install() -> None:
    """Make `import sglang.srt` work without a GPU, and SGLang fork its processes. Must be called before it is imported.

    It would spawn them, as CUDA needs it, and each would import all of SGLang again: ten seconds of a start.
    """
    for name, value in ENVIRONMENT.items():
        os.environ.setdefault(name, value)
    # Imported first, torch's own compiler finds out that there is no Triton, and remembers.
    for module in ("torch._dynamo.backends.debugging", "torch._inductor.runtime.triton_compat"):
        importlib.import_module(module)

    missing = {name for name in ("triton", "torchvision") if importlib.util.find_spec(name) is None}
    sys.meta_path.append(StandInFinder(missing))
    sys.modules["sgl_kernel"] = kernels

    multiprocessing.set_start_method("fork", force=True)
    multiprocessing.set_start_method = lambda *_, **__: None


def allow_seeds() -> None:
    """Let the plain-torch attention serve requests with seeds (deterministic inference) and keep the prefix cache.

    It computes each sequence by itself, so what else runs in the batch does not change a sequence's attention.
    """
    from sglang.srt import batch_invariant_ops
    from sglang.srt.arg_groups import choices

    choices.add_deterministic_attention_backend_choices(["torch_native"])
    choices.add_radix_supported_deterministic_attention_backend_choices(["torch_native"])
    batch_invariant_ops.enable_batch_invariant_mode = lambda: None  # Triton kernels


def allow_adapters() -> None:
    """Let adapters be served: SGLang makes some of their tensors in pinned memory, which only a GPU's driver gives."""
    from sglang.srt.lora import layers
    from sglang.srt.lora.backend import torch_backend

    for module in (layers, torch_backend):
        module.torch = _Unpinned()
    setattr(torch.Tensor, "pin_memory", lambda tensor: tensor)  # noqa: B010, torch's types have no place for it


class _Unpinned:
    """The module `torch`, whose functions that adapters call with `pin_memory=True` leave memory as it is."""

    def __getattr__(self, name: str) -> object:
        return getattr(torch, name)

    def tensor(
        self,
        data: object,
        *,
        dtype: torch.dtype | None = None,
        device: torch.device | str | None = None,
        pin_memory: bool = False,
    ) -> torch.Tensor:
        return torch.tensor(data, dtype=dtype, device=device)

    def zeros(
        self,
        size: int | tuple[int, ...],
        *,
        dtype: torch.dtype | None = None,
        device: torch.device | str | None = None,
        pin_memory: bool = False,
    ) -> torch.Tensor:
        return torch.zeros(size, dtype=dtype, device=device)
