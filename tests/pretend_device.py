"""A pretend device, on which mistakes that only an accelerator shows can be seen without one.

Its tensors hold their numbers in host memory and say that they are elsewhere: `tensor.is_cuda` is true, their device is
`pretend:0`. As on a GPU an operation that is given tensors of both places raises RuntimeError, numpy does not see them,
and operators that are only there for a CPU are refused. The kernels of a GPU that the project calls by name are carried
out here, once what they ask for has been checked. Numbers are not those of a GPU, and nothing is asynchronous. Gradient
checkpointing works in float32 only: with autocast torch ends the process.

A process that has called `install` has this device from then on, so tests run it in one of their own.
"""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_iter, tree_map
from torch.utils.backend_registration import _DummyBackendModule, _setup_privateuseone_for_python_backend

NAME = "pretend"
_INDEXING = ("aten::index", "aten::index_put", "aten::index_put_", "aten::_index_put_impl_")
"""Take indices from the host."""
_STRICT = ("aten::cat", "aten::stack")
"""Take no scalar from the host, as others do."""
_AUTOCAST = "AutocastPrivateUse1"
_LOWERED = ("linear", "matmul", "mm", "bmm", "addmm", "baddbmm")
"""What autocast computes in bfloat16 on a GPU, as far as the project uses it."""
_RAISED = ("exp", "pow.Tensor_Scalar", "rsqrt", "softmax.int", "log_softmax.int", "sum", "sum.dim_IntList", "cumsum")
"""What it computes in float32."""
_registered: list[Any] = []
"""Registrations end with these objects."""


class PretendTensor(torch.Tensor):
    """A tensor on the pretend device; `held` is where its numbers are."""

    is_cuda = True
    held: torch.Tensor

    @staticmethod
    def __new__(cls, held: torch.Tensor) -> PretendTensor:
        made = torch.Tensor._make_wrapper_subclass(
            cls,
            held.shape,
            strides=held.stride(),
            storage_offset=held.storage_offset(),
            dtype=held.dtype,
            device=torch.device(NAME, 0),
        )
        made.held = held
        return made

    def __repr__(self) -> str:  # type: ignore[override]
        return f"PretendTensor({self.held!r})"

    def tolist(self) -> Any:
        return self.held.tolist()

    def numpy(self, *, force: bool = False) -> Any:
        if not force:
            raise TypeError("can't convert a tensor on the pretend device to numpy: copy it to host memory first")
        return self.held.numpy(force=True)

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:  # type: ignore[override]
        return _carried_out(func, args, kwargs or {})


class _Pretending(TorchDispatchMode):
    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return _carried_out(func, args, kwargs or {})


class _Module(_DummyBackendModule):
    """torch.pretend"""

    def get_amp_supported_dtype(self) -> list[torch.dtype]:
        return [torch.bfloat16]

    def get_rng_state(self, device: Any = None) -> torch.Tensor:
        return torch.zeros(1, dtype=torch.uint8)

    def set_rng_state(self, state: torch.Tensor, device: Any = None) -> None: ...

    def device(self, index: int) -> contextlib.AbstractContextManager[None]:
        return contextlib.nullcontext()


def install() -> TorchDispatchMode:
    """Add the device to this process; tensors can be made on it in the context that is returned."""
    torch.inference_mode = torch.no_grad  # type: ignore[assignment,misc]  # a wrapped tensor cannot be looked at in it
    _setup_privateuseone_for_python_backend(NAME, _Module())
    torch._C._set_only_lift_cpu_tensors(True)  # torch.tensor(..., device=) goes through the mode, too
    everything = torch.library.Library("_", "IMPL")
    everything.fallback(torch.library.fallthrough_kernel, _AUTOCAST)
    aten = torch.library.Library("aten", "IMPL")
    for names, dtype in ((_LOWERED, torch.bfloat16), (_RAISED, torch.float32)):
        for name in names:
            packet, _, overload = name.partition(".")
            aten.impl(name, _cast(getattr(getattr(torch.ops.aten, packet), overload or "default"), dtype), _AUTOCAST)
    aten.impl("_local_scalar_dense", lambda tensor: tensor.held.item(), "PrivateUse1")  # where torch asks past Python
    _registered.extend((everything, aten))
    return _Pretending()


def _cast(operator: Any, dtype: torch.dtype) -> Callable[..., Any]:
    """The operator under autocast: with its float arguments in `dtype`."""

    def cast(one: Any) -> Any:
        return one.to(dtype) if isinstance(one, torch.Tensor) and one.is_floating_point() else one

    def run(*args: Any, **kwargs: Any) -> Any:
        with torch.autocast(NAME, enabled=False):
            return operator(*tree_map(cast, args), **kwargs)

    return run


def _carried_out(func: Any, args: Any, kwargs: dict[str, Any]) -> Any:
    tensors = [one for one in tree_iter((args, kwargs)) if isinstance(one, torch.Tensor)]
    there = [one for one in tensors if isinstance(one, PretendTensor)]
    name = func._schema.name
    if there:
        _check(name, args, tensors)
    lands_there = bool(there)
    if kwargs.get("device") is not None:
        lands_there = torch.device(kwargs["device"]).type == NAME
        if lands_there:
            kwargs = {**kwargs, "device": torch.device("cpu")}
    if kwargs.get("pin_memory"):
        kwargs = {**kwargs, "pin_memory": False}  # what CUDA pins
    run = _KERNELS.get(name, func)
    out = run(*tree_map(_held, args), **tree_map(_held, kwargs))
    known = {id(one.held): one for one in there}  # what is changed in place is returned as it was given

    def wrapped(one: Any) -> Any:
        if not isinstance(one, torch.Tensor):
            return one
        return known[id(one)] if id(one) in known else PretendTensor(one) if lands_there else one

    return tree_map(wrapped, out)


def _held(one: Any) -> Any:
    return one.held if isinstance(one, PretendTensor) else one


def _check(name: str, args: Any, tensors: list[torch.Tensor]) -> None:
    """Raises RuntimeError for what a GPU refuses."""
    if "_for_cpu" in name:
        raise RuntimeError(f"{name} is an operator for CPUs, and was given a tensor on the pretend device")
    if name == "aten::copy_":
        return
    if name in _INDEXING and isinstance(args[0], PretendTensor):
        tensors = [one for one in (args[0], *args[2:]) if isinstance(one, torch.Tensor)]
    strict = name in _STRICT
    here = [one for one in tensors if not isinstance(one, PretendTensor) and (one.ndim or strict)]
    if here and len(here) < len(tensors):
        shapes = [(list(one.shape), str(one.device)) for one in tensors]
        raise RuntimeError(f"{name}: expected all tensors to be on one device, found {shapes}")


def _varlen_attention(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    starts: torch.Tensor,
    key_starts: torch.Tensor,
    longest: int,
    longest_key: int,
    is_causal: bool = False,
    scale: float | None = None,
    window_size: list[int] | None = None,
    *rest: Any,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """torch_attn::_varlen_attn for one causal sequence after the other, with the kernel's own conditions."""
    _check_flash(query, key, value, starts, longest)
    found = _sequences(query, key, value, starts, scale, window_size)
    output = torch.cat([(weights @ v).transpose(0, 1) for _, _, v, weights, _ in found]).to(query.dtype)
    return output, query.new_zeros(query.shape[1], query.shape[0], dtype=torch.float32), torch.zeros(2)


def _varlen_attention_backward(
    grad: torch.Tensor,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    out: torch.Tensor,
    lse: torch.Tensor,
    starts: torch.Tensor,
    key_starts: torch.Tensor,
    longest: int,
    longest_key: int,
    is_causal: bool,
    rng_state: torch.Tensor,
    scale: float | None = None,
    window_size: list[int] | None = None,
    *rest: Any,
) -> tuple[torch.Tensor, ...]:
    parts: list[tuple[torch.Tensor, ...]] = []
    repeats = query.shape[1] // key.shape[1]
    for q, k, v, weights, (start, end) in _sequences(query, key, value, starts, scale, window_size):
        g = grad[start:end].transpose(0, 1).float()
        of_weights = g @ v.mT
        of_scores = weights * (of_weights - (of_weights * weights).sum(-1, keepdim=True))
        factor = query.shape[-1] ** -0.5 if scale is None else scale
        of_key, of_value = (x.unflatten(0, (-1, repeats)).sum(1) for x in (of_scores.mT @ q * factor, weights.mT @ g))
        parts.append((of_scores @ k * factor, of_key, of_value))
    return tuple(torch.cat([one.transpose(0, 1) for one in ones]).to(query.dtype) for ones in zip(*parts, strict=True))


def _sequences(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    starts: torch.Tensor,
    scale: float | None,
    window: list[int] | None,
) -> Iterator[tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, tuple[int, int]]]:
    """Of each sequence query, key and value [H, L, D], its weights [H, L, L], and where it lies; float32."""
    back, ahead = window or (-1, -1)
    assert ahead == 0, "the pretend device attends causally only"
    for start, end in itertools.pairwise(starts.tolist()):
        q, k, v = (one[start:end].transpose(0, 1).float() for one in (query, key, value))
        k, v = (one.repeat_interleave(len(q) // len(one), dim=0) for one in (k, v))
        distance = torch.arange(end - start)[:, None] - torch.arange(end - start)
        outside = (distance < 0) | (distance > (back if back >= 0 else end - start))
        scores = q @ k.mT * (q.shape[-1] ** -0.5 if scale is None else scale)
        yield q, k, v, scores.masked_fill(outside, -torch.inf).softmax(-1), (start, end)


def _mm(left: torch.Tensor, right: torch.Tensor, out_dtype: torch.dtype | None = None) -> torch.Tensor:
    """aten::mm, and aten::mm.dtype, which only CUDA has: float32 sums of half precision."""
    if out_dtype is None:
        return torch.mm(left, right)
    if out_dtype != torch.float32 or not left.dtype == right.dtype in (torch.float16, torch.bfloat16):
        raise RuntimeError(f"mm of {left.dtype} and {right.dtype} cannot give {out_dtype}")
    return left.float() @ right.float()


def _check_flash(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, starts: torch.Tensor, longest: int
) -> None:
    """Raises RuntimeError where flash attention would not run, or would read what is not there."""
    width, lengths = query.shape[-1], starts.diff()
    wrong = {
        f"dtype {query.dtype}": query.dtype not in (torch.float16, torch.bfloat16),
        "dtypes that differ": len({query.dtype, key.dtype, value.dtype}) > 1,
        f"head size {width}": width % 8 != 0 or width > 256,
        "a last dimension with gaps": any(one.stride(-1) != 1 for one in (query, key, value)),
        f"offsets of {starts.dtype}": starts.dtype != torch.int32,
        "offsets that do not end at the last token": int(starts[-1]) != len(query),
        f"a longest sequence of {longest}": int(lengths.max()) > longest,
        "heads of queries that are no multiple": query.shape[1] % key.shape[1] != 0,
    }
    found = [what for what, is_so in wrong.items() if is_so]
    if found:
        raise RuntimeError(f"flash attention cannot run with {', '.join(found)}")


_KERNELS: dict[str, Callable[..., Any]] = {
    "aten::mm": _mm,
    "torch_attn::_varlen_attn": _varlen_attention,
    "torch_attn::_varlen_attn_backward": _varlen_attention_backward,
}
