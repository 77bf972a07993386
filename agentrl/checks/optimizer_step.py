"""The optimizer's step of one tensor, predicted from its gradient, its state and the config, against what it did."""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Protocol

import torch
from torch import Tensor
from torch.utils.hooks import RemovableHandle

from agentrl.checks.finding import Finding
from agentrl.config.sections.optim import OptimConfig
from agentrl.optim.optimizer import Optim
from agentrl.parallel.collectives import all_sum, full, local, placed_like
from agentrl.parallel.gradients import total_norm
from agentrl.parallel.mesh import Mesh

ELEMENTS = 1 << 16
"""Elements of a rank's part of a tensor that are compared; others are compared when the tensor's turn comes again."""
WIDE = 1 << 20
"""Elements of a matrix up to which Muon's step is predicted in float64."""
ROUNDING = 2.4e-7
"""Four times the largest rounding of a float32, relative: the decay's factor, the decay, the update, the difference."""
FACTOR = 2.0**-24
"""Rounding of a factor below 1 in float32: kernels of GPUs round beta, then take 1 - beta, 1.3e-5 off for 0.999."""
CLOSE = 2e-3
"""Largest difference from a prediction, relative."""
Places = tuple[int, int]
"""First element of a rank's part, and the distance to the next one."""
NUMBER = re.compile(r"\d+")


class Stepped(Protocol):
    """A model that learns, as its steps are watched."""

    @property
    def params(self) -> Mapping[str, torch.nn.Parameter]: ...

    @property
    def tensors(self) -> Mapping[str, torch.nn.Parameter]: ...

    @property
    def optim(self) -> Optim: ...

    @property
    def mesh(self) -> Mesh: ...


@dataclass(frozen=True, slots=True)
class Snapshot:
    """Some elements of one tensor and of its state, in float32 on its device."""

    name: str
    places: Places
    value: Tensor  # [E]
    state: Mapping[str, Tensor]  # [E], or a scalar

    def differences(self, other: Snapshot) -> list[str]:
        """Name the parts whose bits differ."""
        found = [] if torch.equal(self.value, other.value) else ["its weights"]
        for key in sorted(self.state.keys() | other.state.keys()):
            mine, theirs = self.state.get(key), other.state.get(key)
            if mine is None or theirs is None or not torch.equal(mine, theirs):
                found.append(key)
        return found


@dataclass(slots=True)
class StepWatch:
    """Watches one tensor in each optimizer step: large ones first, all in turn."""

    config: OptimConfig
    grad_clip: float
    total_steps: int
    """Training steps in which the model learns."""
    compared: int = 0
    clips: int = 0
    _turn: int = 0
    _order: list[str] = field(default_factory=list)
    _after: Snapshot | None = None
    """The last tensor, after its step."""
    _before: Snapshot | None = None
    _grad: Tensor | None = None
    _passed: Tensor | None = None
    """Sum of the next tensor's gradients over the backward passes since it had none; None where parameters are
    sharded."""
    _hook: RemovableHandle | None = None
    _whole: tuple[Tensor, Tensor | None] | None = None
    """Gradient and momentum of a whole matrix, for Muon."""

    def forget(self) -> None:
        """Begin again, after weights and state were loaded."""
        self._after = self._passed = None

    def before(self, model: Stepped, norm: float) -> Iterator[Finding]:
        """Look at the gradients, clipped from `norm`, and at the tensor whose turn it is; every rank must ask."""
        if not self._order:
            self._order = sorted(model.params, key=lambda name: (-model.params[name].numel(), name))
            yield from _untrained(model)
        limit, clipped = min(norm, self.grad_clip), float(total_norm(model.params.values()))
        self.clips += 1
        if not math.isclose(clipped, limit, rel_tol=CLOSE, abs_tol=1e-12):
            what = f"the gradient's norm is {clipped:.4g} after clipping, and must be {limit:.4g}"
            yield Finding("update", what, "the policy's gradient")
        if self._after is not None:
            for part in self._after.differences(self._snapshot(model, self._after.name, self._after.places)):
                yield Finding("update", f"{part} changed between two optimizer steps", self._after.name)
        name, param, places = self._next(model)
        assert param.grad is not None
        if self._hook is not None:
            self._hook.remove()
        if self._passed is not None:
            wanted = self._passed * min(1.0, self.grad_clip / max(norm, 1e-12))
            far = float((_flat(param.grad, places).double() - wanted).abs().max())
            if not far <= CLOSE * float(wanted.abs().max()) + 1e-30:
                yield Finding("update", f"its gradient is {far:.3g} from the sum over its backward passes", name)
        self._before = self._snapshot(model, name, places)
        self._grad = _flat(param.grad, places).clone()
        self._whole = None
        if self.config.name == "muon" and param.ndim == 2:
            momentum = model.optim.state_of(name).get("momentum_buffer")
            self._whole = full(param.grad.detach()).clone(), None if momentum is None else full(momentum).clone()
        yield from self._without_gradient(model, name)
        self._turn += 1

    def after(self, model: Stepped, step: float) -> Iterator[Finding]:
        """Compare the tensor with its prediction; `step` is the training step, as in `rate`."""
        before, grad = self._before, self._grad
        assert before is not None and grad is not None
        _, param, places = self._next(model)
        self._passed = None
        if model.mesh.fsdp is None:

            def passed(grad: Tensor) -> None:
                new, before = _flat(grad, places).double(), self._passed
                self._passed = new if before is None or param.grad is None else before + new

            self._hook = param.register_hook(passed)
        after = self._after = self._snapshot(model, before.name, before.places)
        factor = rate(self.config, step, self.total_steps)
        grad = grad.double()
        if "momentum_buffer" in after.state:
            assert self._whole is not None
            lr = self.config.lr * factor
            state, update, slack = _muon(before, grad, *self._whole, model.params[before.name])
        elif "exp_avg" in after.state:
            lr = (self.config.lr if self.config.adamw_lr is None else self.config.adamw_lr) * factor
            state, update, slack = _adamw(before, grad, self.config.betas)
        else:
            yield Finding("update", "the optimizer has no state of it after a step", before.name)
            return
        self.compared += 1
        value, actual = before.value.double(), after.value.double() - before.value.double()
        decay = self.config.weight_decay if self.config.decay_vectors or param.ndim > 1 else 0.0
        predicted = -lr * (update + decay * value)
        room = CLOSE * predicted.abs() + lr * slack + ROUNDING * (value.abs() + predicted.abs())
        if len(value) and bool(((actual - predicted).abs() > room).any()):
            length = float(predicted.square().sum())
            part = float((actual * predicted).sum()) / length if length else math.inf
            what = (
                f"an optimizer step moved it by {part:.3g} times as much as its gradient, its moments and the config's "
                f"learning rate ({lr:.3g}) say"
            )
            yield Finding("update", what, before.name)
        for key, (wanted, spread) in state.items():
            if bool(((after.state[key].double() - wanted).abs() > spread).any()):
                yield Finding("update", f"the optimizer's {key} is not what its gradient makes of it", before.name)

    def _next(self, model: Stepped) -> tuple[str, torch.nn.Parameter, Places]:
        name = self._order[self._turn % len(self._order)]
        stride = max(1, local(model.params[name]).numel() // ELEMENTS)
        return name, model.params[name], (self._turn // len(self._order) % stride, stride)

    def _snapshot(self, model: Stepped, name: str, places: Places) -> Snapshot:
        value = _flat(model.params[name].detach(), places)
        state = {
            key: one.detach().clone() if not one.ndim else _flat(one.detach(), places).to(value.device, copy=True)
            for key, one in model.optim.state_of(name).items()
        }
        return Snapshot(name, places, value.clone(), state)

    def _without_gradient(self, model: Stepped, name: str) -> Iterator[Finding]:
        """Report a tensor that no gradient reaches, though one reaches its like in other layers."""
        if not self._empty(model, name):
            return
        family = NUMBER.sub("#", name)
        others = [other for other in self._order if other != name and NUMBER.sub("#", other) == family]
        if "expert" in name or all(self._empty(model, other) for other in others):
            return
        yield Finding("update", "no gradient reaches it, and one reaches its like in other layers", name)

    def _empty(self, model: Stepped, name: str) -> bool:
        grad = model.params[name].grad
        assert grad is not None
        return float(all_sum(torch.count_nonzero(local(grad)).double())) == 0


def rate(config: OptimConfig, step: float, total: int) -> float:
    """Compute the factor of the learning rate at `step` of `total`: rising, then constant or falling.

    A fraction of `step` is a place between two training steps.
    """
    rising = config.lr_warmup_steps or math.floor(config.lr_warmup_steps_ratio * total)
    if step < rising + 1:
        return 1 - (rising - step + 1) / rising if config.lr_warmup_from_zero else step / (1 + rising)
    if config.lr_scheduler_type == "constant":
        return 1.0
    past = min(1.0, (step - rising - 1) / (total - rising)) if total > rising else 1.0
    above = 1 - past if config.lr_scheduler_type == "linear" else (1 + math.cos(math.pi * past)) / 2
    return config.min_lr_ratio + (1 - config.min_lr_ratio) * above


State = dict[str, tuple[Tensor, Tensor]]
"""By name, the predicted state and its largest rounding."""


def _adamw(before: Snapshot, grad: Tensor, betas: tuple[float, float]) -> tuple[State, Tensor, Tensor]:
    """Return (state, update, room of the update) of AdamW (arXiv:1711.05101)."""
    zero = torch.zeros_like(grad)
    mean = before.state.get("exp_avg", zero).double()
    square = before.state.get("exp_avg_sq", zero).double()
    count = before.state.get("step", zero.new_zeros(())).double().cpu() + 1
    new_mean = betas[0] * mean + (1 - betas[0]) * grad
    new_square = betas[1] * square + (1 - betas[1]) * grad.square()
    spread = 1e-5 * (betas[0] * mean.abs() + (1 - betas[0]) * grad.abs()) + FACTOR * grad.abs()
    below = (new_square / (1 - betas[1] ** float(count))).sqrt() + 1e-8
    by = 1 - betas[0] ** float(count)
    state = {
        "exp_avg": (new_mean, spread + 1e-30),
        "exp_avg_sq": (new_square, 1e-5 * new_square + FACTOR * grad.square() + 1e-30),
        "step": (count, torch.zeros(())),
    }
    return (
        {key: (one.to(grad.device), room.to(grad.device)) for key, (one, room) in state.items()},
        (new_mean / by / below),
        spread / by / below,
    )


def _muon(
    before: Snapshot, grad: Tensor, whole: Tensor, momentum: Tensor | None, param: Tensor
) -> tuple[State, Tensor, Tensor]:
    """Return (state, update, room of the update) of Muon (arXiv:2502.16982), by more digits where that is cheap."""
    known = before.state.get("momentum_buffer", torch.zeros_like(grad)).double()
    new = 0.95 * known + 0.05 * grad
    digits = torch.float64 if whole.numel() <= WIDE else torch.float32
    buffer = 0.05 * whole.to(digits) + (0.0 if momentum is None else 0.95 * momentum.to(digits))
    matrix = 0.05 * whole.to(digits) + 0.95 * buffer
    matrix = matrix / matrix.norm().clamp(min=1e-7)
    tall = matrix.shape[0] > matrix.shape[1]
    for _ in range(5):
        square = matrix.mT @ matrix if tall else matrix @ matrix.mT
        change = -4.775 * square + 2.0315 * square @ square
        matrix = 3.4445 * matrix + (matrix @ change if tall else change @ matrix)
    update = math.sqrt(max(1.0, matrix.shape[0] / matrix.shape[1])) * matrix.double()
    low = 0.1 if whole.device.type != "cpu" else 5e-3
    room = torch.full_like(update, low * float(update.abs().max()))
    state = {"momentum_buffer": (new, 1e-5 * (known.abs() + grad.abs()) + 1e-30)}
    return state, _like(update, param, before.places), _like(room, param, before.places)


def _like(whole: Tensor, param: Tensor, places: Places) -> Tensor:
    """Take this rank's elements of a tensor that is whole here."""
    return _flat(placed_like(whole, param), places)


def _untrained(model: Stepped) -> Iterator[Finding]:
    """Report tensors that are not trained while their like in other layers are."""
    families: dict[str, list[str]] = {}
    for name in model.tensors:
        families.setdefault(NUMBER.sub("#", name), []).append(name)
    for members in families.values():
        left = [name for name in members if name not in model.params]
        if left and len(left) < len(members):
            yield Finding("update", "it is not trained, and its like in other layers are", left[0])


def _flat(tensor: Tensor, places: Places) -> Tensor:
    return local(tensor).reshape(-1)[places[0] :: places[1]]
