"""Delta weights: the elements that changed, written as named tensors that any weight transport carries.

An update begins with an entry that names the weights that it changes, and ends with an entry that names the result. In
between, a tensor comes whole under its own name, or as its changed elements. Nothing but torch is imported here, as
the receiving half runs in a server's process.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import cast

import torch

BEGIN = "agentrl-delta-begin:"
"""Begins the name of an update's first entry; the name of the changed weights follows, or nothing: all weights come."""
END = "agentrl-delta-end:"
"""Begins the name of an update's last entry; the name of the weights that a server then holds follows."""
CHANGED = "agentrl-delta:"
"""Begins the name of changed elements; the tensor's shape (`4x8`) and, after a colon, its name follow."""
GAP = 65535
"""Most places from one sent element to the next. Elements that did not change are sent where gaps are longer."""
DENSE_BYTES = 512 << 20
"""Bytes of whole tensors that a server makes of changed elements before it loads them."""
INTEGERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
"""By the bytes of an element, the type that its bits are compared in."""

Named = tuple[str, torch.Tensor]


def differing(new: torch.Tensor, old: torch.Tensor) -> torch.Tensor:
    """Return the places [n] int64 where two tensors [S] of one floating dtype differ in any bit, in order."""
    bits = INTEGERS[new.dtype.itemsize]
    return (new.view(-1).view(bits) != old.view(-1).view(bits)).nonzero().view(-1)


def encode(new: torch.Tensor, places: torch.Tensor) -> torch.Tensor | None:
    """Encode the elements of `new` [S] at `places` [n] int64, which ascend: [L] in the dtype of `new`.

    Its values come first, then the gaps between their places, 16 bits each. None where the tensor has to be sent
    whole. The entry would not be shorter, or a value is NaN. Or the tensor has fewer than two dimensions, so that a
    model's loader may compute with all of it.
    """
    if new.dim() < 2:
        return None
    flat = new.view(-1)
    if len(places) and int(torch.diff(places, prepend=places.new_zeros(1)).max()) > GAP:
        places = torch.cat([places, torch.arange(0, len(flat), GAP, device=places.device)]).unique()
    values = flat[places]
    gaps = torch.diff(places, prepend=places.new_zeros(1))
    fill = -2 * len(places) % new.dtype.itemsize // 2
    gaps = torch.cat([gaps, gaps.new_zeros(fill)]).to(torch.uint16)
    entry = torch.cat([values, gaps.view(new.dtype)])
    return None if len(entry) >= len(flat) or bool(values.isnan().any()) else entry


def decode(entry: torch.Tensor, shape: tuple[int, ...]) -> torch.Tensor:
    """Make the tensor [S] of `shape` S that `encode` wrote: the sent elements, and NaN for all others.

    Where it is copied, NaN leaves the target's element as it is.
    """
    size = entry.dtype.itemsize
    count = len(entry) * size // (size + 2)
    gaps = entry[count:].clone().view(torch.uint16)[:count].to(torch.int64)
    whole = torch.full((math.prod(shape),), torch.nan, dtype=entry.dtype, device=entry.device)
    whole[gaps.cumsum(0)] = entry[:count]
    return whole.view(shape).as_subclass(_Kept)


class _Kept(torch.Tensor):
    """A tensor [S] whose NaN elements leave the target's elements as they are where it is copied.

    A model's own loader puts it into place: slices, parts of ranks and joined tensors stay of this class.
    """

    @classmethod
    def __torch_function__(
        cls,
        func: object,
        types: Sequence[type],
        args: Sequence[object] = (),
        kwargs: Mapping[str, object] | None = None,
    ) -> object:
        """Copy elements that are not NaN; do everything else as torch does."""
        copies, sets = func is torch.Tensor.copy_, func is torch.Tensor.__setitem__
        if not (copies or sets) or isinstance(args[0], cls):
            return super().__torch_function__(func, types, args, kwargs or {})
        target, place = cast(torch.Tensor, args[0]), ... if copies else cast(torch.Tensor, args[1])
        with torch._C.DisableTorchFunctionSubclass():
            source = cast(torch.Tensor, args[-1 if sets else 1]).to(target)
            target[place] = torch.where(source.isnan(), target[place], source)
        return target


class DeltaReceiver:
    """The half of a server: stands in for the function that loads weights into its model.

    It never raises by itself, as that would end some servers. Changes of other weights than the model holds are left
    out, and `held` then says that the update did not arrive.
    """

    def __init__(
        self, load: Callable[[Iterable[Named]], object], parameters: Callable[[], Iterable[torch.Tensor]]
    ) -> None:
        """`load`: the model's own, from an iterable of names and tensors. `parameters`: all of the model's."""
        self.held = ""
        """Name of the model's weights; empty where nobody knows which it holds."""
        self.works: bool | None = None
        """False when the model's own loader does not copy tensors, so that it takes no changed elements; None before
        the first of them."""
        self._load, self._parameters = load, parameters
        self._refuses = self._more = self._changed = False
        self._then = ""

    def __call__(self, named: Iterable[Named]) -> object:
        """Load one part of an update."""
        entries, base = iter(named), self.held
        result: object = None
        self.held, self._then, self._more = "", "", True
        while self._more:
            part = self._part(entries, base)
            result = self._load(part)
            for _ in part:  # what the model did not look at
                pass
        if self._then and self._changed and self.works is None:
            self.works = not any(bool(one.isnan().any()) for one in self._parameters() if one.is_floating_point())
        self.held = "" if self.works is False else self._then
        return result

    def _part(self, entries: Iterator[Named], base: str) -> Iterator[Named]:
        """Yield tensors to load, until DENSE_BYTES are there."""
        dense = 0
        for name, tensor in entries:
            if name.startswith(BEGIN):
                wanted = name.removeprefix(BEGIN)
                self._refuses = bool(wanted) and wanted != base
            elif name.startswith(END):
                self._then = "" if self._refuses else name.removeprefix(END)
            elif not name.startswith(CHANGED):
                yield name, tensor
            elif not self._refuses:
                shape, _, own = name.removeprefix(CHANGED).partition(":")
                whole = decode(tensor, tuple(map(int, shape.split("x"))))
                dense += whole.nbytes
                self._changed = True
                yield own, whole
                if dense > DENSE_BYTES:
                    return
        self._more = False
