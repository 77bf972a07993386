"""The optimizer of a trained model: AdamW, or Muon for the matrices of the hidden layers and AdamW for the rest."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Mapping

import torch
from torch import nn

from agentrl.config.sections.optim import OptimConfig
from agentrl.errors import ConfigError
from agentrl.optim.muon import Muon
from agentrl.optim.schedule import lr_factor
from agentrl.parallel.gradients import by_mesh
from agentrl.parallel.offload import move_state

_REMEMBERED: Mapping[type[torch.optim.Optimizer], tuple[str, ...]] = {
    Muon: ("momentum_buffer",),
    torch.optim.AdamW: ("step", "exp_avg", "exp_avg_sq"),
}
"""States of a parameter by its optimizer."""
NEVER_NEGATIVE = ("step", "exp_avg_sq")
"""States that are counts or means of squares."""


class Optim:
    """Steps the named parameters `params` of a model; `matrices` names the parameters that Muon may take.

    The learning rates are set before each step from the schedule (`lr_factor`), never kept from the last one. Its state
    stays on the device `home` between steps; None: next to the parameters.
    """

    def __init__(
        self,
        params: Mapping[str, nn.Parameter],
        matrices: set[str],
        config: OptimConfig,
        total_steps: int,
        home: torch.device | None = None,
    ) -> None:
        """Raises ConfigError for a group of `config.groups` without a parameter."""
        filled = {*map(config.group_of, params)}
        for name, group in config.groups.items():
            if name not in filled:
                raise ConfigError(
                    f"optim.groups.{name}.match={group.match!r} fits no parameter that learns and that no group before "
                    f"it has; the first are {', '.join(list(params)[:5])}"
                )
        self.name = config.name
        self._config = config
        self._total_steps = total_steps
        self._home = home
        self._params = dict(params)
        by_muon = matrices if config.name == "muon" else set()
        rest = [name for name in self._params if name not in by_muon]
        rest_lr = config.lr if config.adamw_lr is None else config.adamw_lr
        self._optimizers: list[tuple[float, torch.optim.Optimizer]] = []
        if by_muon:
            chosen = self._groups([name for name in self._params if name in by_muon])
            self._optimizers.append((config.lr, Muon(chosen, lr=config.lr)))
        if rest:  # adapters may all be matrices
            adamw = torch.optim.AdamW(self._groups(rest), lr=rest_lr, betas=config.betas, fused=True)
            self._optimizers.append((rest_lr, adamw))

    def _groups(self, names: Collection[str]) -> list[dict[str, object]]:
        """Group parameters by their rate's factor, weight decay and mesh."""
        alike: dict[tuple[float, float], list[nn.Parameter]] = defaultdict(list)
        for name in names:
            param = self._params[name]
            alike[self._config.of(name, param.ndim)].append(param)
        return [
            {"params": group, "lr_factor": factor, "weight_decay": decay}
            for (factor, decay), params in alike.items()
            for group in by_mesh(params)
        ]

    def step(self, step: float) -> float:
        """Apply the gradients at the rates of training step `step`, as in `lr_factor`; returns optim.lr's rate."""
        factor = lr_factor(self._config, step, self._total_steps)
        for lr, optimizer in self._optimizers:
            for group in optimizer.param_groups:
                group["lr"] = lr * factor * group["lr_factor"]
            if self._home is not None:
                move_state(optimizer, None)
            optimizer.step()
        self._rest()
        return self._config.lr * factor

    def zero_grad(self) -> None:
        for _, optimizer in self._optimizers:
            optimizer.zero_grad(set_to_none=True)

    def state(self) -> dict[str, torch.Tensor]:
        """Return the state between steps, sharded as it is here, by the name `<parameter>/<state>`.

        A state is float32 in its parameter's shape [*], or a scalar (AdamW's count of steps).
        """
        state: dict[str, torch.Tensor] = {}
        for name, param in self._params.items():
            for key, value in self._of(param).state.get(param, {}).items():
                state[f"{name}/{key}"] = value.detach()
        return state

    def state_of(self, name: str) -> Mapping[str, torch.Tensor]:
        """Return the state of the parameter `name`, as in `state`; empty before its first step."""
        param = self._params[name]
        found: Mapping[str, torch.Tensor] = self._of(param).state.get(param, {})
        return found

    def remembered(self, name: str) -> tuple[str, ...]:
        """Return the names of the states that the parameter `name` has from its first step on."""
        return _REMEMBERED[type(self._of(self._params[name]))]

    def empty_state(self, name: str, shape: torch.Size, dtype: torch.dtype) -> torch.Tensor:
        """Make a tensor for `load_state`, not filled, for the entry `name` of `state`: placed as its parameter is.

        `shape`: the parameter's, or () for a scalar; `dtype`: as in `state`.

        Raises ValueError for a tensor that cannot be the state of a parameter.
        """
        owner, _, kind = name.rpartition("/")
        param = self._params.get(owner)
        if param is not None and kind not in self.remembered(owner):
            raise ValueError(f"{name}: {self.name} remembers {', '.join(self.remembered(owner))} of {owner}")
        if param is not None and shape == param.shape:
            return torch.empty_like(param.detach(), dtype=dtype)
        if param is not None and not shape:  # AdamW's step count
            return torch.empty((), dtype=dtype, device=param.device)
        raise ValueError(f"{name} of shape {list(shape)} is not the state of a parameter")

    def load_state(self, state: Mapping[str, torch.Tensor]) -> None:
        """Take over `state`, filled tensors [S] of `empty_state`; parameters without an entry start afresh."""
        for _, optimizer in self._optimizers:
            optimizer.state.clear()
        for key, value in state.items():
            name, _, kind = key.rpartition("/")
            self._of(self._params[name]).state[self._params[name]][kind] = value
        self._rest()

    def _rest(self) -> None:
        if self._home is not None:
            for _, optimizer in self._optimizers:
                move_state(optimizer, self._home)

    def _of(self, param: nn.Parameter) -> torch.optim.Optimizer:
        """The optimizer that steps `param`."""
        for _, optimizer in self._optimizers[:-1]:
            if any(param is other for group in optimizer.param_groups for other in group["params"]):
                return optimizer
        return self._optimizers[-1][1]
