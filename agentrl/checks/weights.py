"""Checks of the engine's weights after each update: its own tensors against the tensors that it was sent."""

from __future__ import annotations

import math
import re
from collections import defaultdict
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace

import torch

from agentrl.engines.contract import RolloutEngine
from agentrl.engines.inspection import InspectableEngine, checksum
from agentrl.engines.weights import Weights
from agentrl.observe.report import Finding

NUMBER = re.compile(r"\d+")
MB = 10**6
LEAST = {torch.float32: 256, torch.bfloat16: 1 << 20}
"""Elements from which on an update changes at least one, by dtype: in bfloat16 most steps are rounded away."""
BYTES = 4
"""Bytes of an element, for the choice of tensors."""


@dataclass(slots=True)
class WeightWatch:
    """Compares a rotating sample of tensors, and which of them change from one update to the next."""

    budget: float
    """Size of the sample in 10^6 bytes."""
    unchanged: bool = False
    """True when the last `check` found all tensors as the version before had them."""
    compared: int = 0
    """Tensors of the engine that the last `check` compared: none with an engine that cannot be inspected."""
    _next: int = 0
    _known: dict[str, tuple[int, str]] = field(default_factory=dict)
    """By name, the version and the checksum with which a tensor was last sent."""
    _names: Collection[str] = ()
    """Names of all weights of the last update."""
    _omitted: Collection[str] = ()
    """Chosen tensors of the update that the engine did not read."""

    def watched(self, weights: Weights, engine: RolloutEngine) -> tuple[Weights, Mapping[str, torch.Tensor]]:
        """Return the weights [S], and a mapping that fills with the chosen tensors when they are read."""
        names = self._choose(weights.shapes, engine)
        passed: dict[str, torch.Tensor] = {}
        self._names, self._omitted = weights.shapes.keys(), ()

        def read() -> Iterator[tuple[str, torch.Tensor]]:
            for name, tensor in weights.read():
                if name in names:
                    passed[name] = tensor.detach()
                yield name, tensor
            self._omitted = sorted(names - passed.keys())

        return replace(weights, read=read), passed

    async def check(self, engine: RolloutEngine, passed: Mapping[str, torch.Tensor], version: int) -> list[Finding]:
        """Compare the tensors [S] in the engine with the tensors passed to it, and its version with `version`."""
        health = await engine.health()
        found, self.compared = [], 0
        if health.version != version:
            what = f"it names version {health.version}, and was given {version}"
            found.append(Finding("weights", what, "the engine"))
        for name in self._omitted:
            found.append(Finding("weights", f"it was to be sent with version {version}, and was not", name))
        if isinstance(engine, InspectableEngine):
            comparison = await engine.compare(passed, self._names)
            self.compared = comparison.compared
            for one in comparison.differences:
                found.append(Finding("weights", f"version {version} of {one.weight} is not in the engine", one.place))
        found += self._unchanged(passed, version)
        return found

    def _choose(self, shapes: Mapping[str, Sequence[int]], engine: RolloutEngine) -> set[str]:
        """Take the next tensors, in the order of their names, up to the budget: all that the engine holds together in
        one tensor, and at least one of its tensors."""
        held: defaultdict[str, list[str]] = defaultdict(list)
        inspectable = engine if isinstance(engine, InspectableEngine) else None  # Python looks at each method for that
        for name in shapes:
            place = name if inspectable is None else inspectable.held_in(name)
            if place is not None:
                held[place].append(name)
        places = sorted(held)
        chosen: set[str] = set()
        room = self.budget * MB
        for _ in places if self.budget else ():
            names = held[places[self._next % len(places)]]
            room -= BYTES * sum(math.prod(shapes[name]) for name in names)
            if chosen and room < 0:
                break
            chosen.update(names)
            self._next += 1
        return chosen

    def _unchanged(self, passed: Mapping[str, torch.Tensor], version: int) -> Iterator[Finding]:
        """Report a tensor that no update changed while tensors of the same name in other layers changed."""
        families: defaultdict[str, dict[str, bool]] = defaultdict(dict)
        changes: list[bool] = []
        for name, tensor in passed.items():
            value = checksum(tensor)
            before = self._known.get(name)
            self._known[name] = version, value
            large = tensor.numel() >= LEAST.get(tensor.dtype, tensor.numel() + 1)
            if before is not None and before[0] < version and large and "expert" not in name:
                changes.append(before[1] != value)
                families[NUMBER.sub("#", name)][name] = before[1] != value
        self.unchanged = bool(changes) and not any(changes)
        for members in families.values():
            if any(members.values()):
                for name in (name for name, changed in members.items() if not changed):
                    what = f"up to version {version} it was sent unchanged, and those of other layers changed"
                    yield Finding("weights", what, name)
