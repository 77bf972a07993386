"""The optimizer's step of one tensor, predicted from its gradient, its state and the config, against what it did."""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.utils.hooks import RemovableHandle

from agentrl.config.sections.optim import OptimConfig
from agentrl.observe.report import Finding
from agentrl.observe.watch import Stepped
from agentrl.parallel.collectives import all_sum, full, local, placed_like
from agentrl.parallel.gradients import total_norm

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
NAMED = 5
"""Tensors that are named at most."""
NUMBER = re.compile(r"\d+")


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
class _Turn:
    """One tensor that is watched, from the optimizer step before its own to the end of its own."""

    name: str
    param: torch.nn.Parameter
    places: Places
    hook: RemovableHandle | None = None
    passed: Tensor | None = None
    """Sum of its gradients over the backward passes of the mini-batch; None: there was none."""
    before: Snapshot | None = None
    grad: Tensor | None = None
    whole: tuple[Tensor, Tensor | None] | None = None
    """Gradient and momentum of a whole matrix, for Muon."""

    def add_up_passes(self) -> None:
        """Add up its gradients from now on, from nothing. The parameter's own `grad` is not read."""

        def passed(grad: Tensor) -> None:
            new = _flat(grad, self.places).double()
            self.passed = new if self.passed is None else self.passed + new

        self.hook = self.param.register_hook(passed)

    def gradient_of_passes(self) -> Tensor | None:
        """Return the sum of its gradients, and stop adding up; None where that had not begun."""
        if self.hook is None:
            return None
        self.hook.remove()
        self.hook = None
        nothing = torch.zeros_like(_flat(self.param.detach(), self.places), dtype=torch.float64)
        return nothing if self.passed is None else self.passed


@dataclass(slots=True)
class StepWatch:
    """Watches two tensors in each optimizer step: one of the larger half and one of the smaller, all in turn."""

    config: OptimConfig
    grad_clip: float
    total_steps: int
    """Training steps in which the model learns."""
    compared: int = 0
    clips: int = 0
    _turn: int = 0
    _halves: Sequence[Sequence[str]] = ()
    """Names of the larger and of the smaller tensors, by size."""
    _turns: Sequence[_Turn] = ()
    """The tensors of the next step."""
    _after: Sequence[Snapshot] = ()
    """The tensors of the last step, after it."""

    def forget(self) -> None:
        """Begin again, after weights and state were loaded."""
        self._after = ()

    def begin(self) -> None:
        """Begin a mini-batch: the sums of gradients that one without a step may have left are dropped."""
        for turn in self._turns:
            turn.passed = None

    def before(self, model: Stepped, norm: float) -> Iterator[Finding]:
        """Look at the gradients, clipped from `norm`, and at the tensors whose turn it is; every rank must ask."""
        if not self._halves:
            names = sorted(model.params, key=lambda name: (-model.params[name].numel(), name))
            self._halves = [half for half in (names[: (len(names) + 1) // 2], names[(len(names) + 1) // 2 :]) if half]
            self._turns = self._next(model)
            yield from _untrained(model)
        lost = model.not_restored()
        for name in lost[:NAMED]:
            what = f"it is not what the checkpoint holds, from which the run was resumed ({len(lost)} tensors differ)"
            yield Finding("update", what, name)
        limit, clipped = min(norm, self.grad_clip), float(total_norm(model.params.values()))
        self.clips += 1
        if not math.isclose(clipped, limit, rel_tol=CLOSE, abs_tol=1e-12):
            what = f"the gradient's norm is {clipped:.4g} after clipping, and must be {limit:.4g}"
            yield Finding("update", what, "all tensors")
        for after in self._after:
            for part in after.differences(self._snapshot(model, after.name, after.places)):
                yield Finding("update", f"{part} changed between two optimizer steps", after.name)
        for turn in self._turns:
            grad = turn.param.grad
            assert grad is not None
            passed = turn.gradient_of_passes()
            if passed is not None and len(passed):
                wanted = passed * min(1.0, self.grad_clip / max(norm, 1e-12))
                far = float((_flat(grad, turn.places).double() - wanted).abs().max())
                if not far <= CLOSE * float(wanted.abs().max()) + 1e-30:
                    what = f"its gradient is {far:.3g} from the sum over its backward passes"
                    yield Finding("update", what, turn.name)
            turn.before = self._snapshot(model, turn.name, turn.places)
            turn.grad = _flat(grad, turn.places).clone()
            if self.config.name == "muon" and turn.param.ndim == 2:
                momentum = model.optim.state_of(turn.name).get("momentum_buffer")
                turn.whole = full(grad.detach()).clone(), None if momentum is None else full(momentum).clone()
            yield from self._without_gradient(model, turn.name)

    def after(self, model: Stepped, step: float) -> Iterator[Finding]:
        """Compare the tensors with their predictions; `step` is the training step, as in `rate`."""
        turns = self._turns
        self._after = [self._snapshot(model, turn.name, turn.places) for turn in turns]
        self._turn += 1
        self._turns = self._next(model)
        if model.mesh.fsdp is None:
            for turn in self._turns:
                turn.add_up_passes()
        for turn, after in zip(turns, self._after, strict=True):
            yield from self._step_of(turn, after, step)

    def _step_of(self, turn: _Turn, after: Snapshot, step: float) -> Iterator[Finding]:
        """Compare one tensor's step with its prediction."""
        before, grad, param = turn.before, turn.grad, turn.param
        assert before is not None and grad is not None
        own, decay = self.config.of(turn.name, param.ndim)
        factor = rate(self.config, step, self.total_steps) * own
        grad = grad.double()
        if "momentum_buffer" in after.state:
            assert turn.whole is not None
            lr = self.config.lr * factor
            state, update, slack = _muon(before, grad, *turn.whole, param)
        elif "exp_avg" in after.state:
            lr = (self.config.lr if self.config.adamw_lr is None else self.config.adamw_lr) * factor
            state, update, slack = _adamw(before, grad, self.config.betas)
        else:
            yield Finding("update", "the optimizer has no state of it after a step", before.name)
            return
        self.compared += 1
        value, actual = before.value.double(), after.value.double() - before.value.double()
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

    def _next(self, model: Stepped) -> list[_Turn]:
        """Begin the turn of one tensor of each half."""
        turns = []
        for half in self._halves:
            name = half[self._turn % len(half)]
            stride = max(1, local(model.params[name]).numel() // ELEMENTS)
            turns.append(_Turn(name, model.params[name], (self._turn // len(half) % stride, stride)))
        return turns

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
        others = [other for other in model.params if other != name and NUMBER.sub("#", other) == family]
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
