"""Muon: momentum whose update is orthogonalised, for the matrices of the hidden layers.

torch.optim.Muon runs one matrix at a time and always in bfloat16, which CPUs without bfloat16 arithmetic emulate at a
twentieth of the speed. It also does not gather sharded matrices. So it is not used.
"""

from __future__ import annotations

import math
from collections import defaultdict

import torch
from torch.optim.optimizer import ParamsT

from agentrl.parallel.collectives import full, placed_like

_COEFFICIENTS = (3.4445, -4.7750, 2.0315)
_NEWTON_SCHULZ_STEPS = 5
_MOMENTUM = 0.95


class Muon(torch.optim.Optimizer):
    """Muon (https://kellerjordan.github.io/posts/muon; arXiv:2502.16982, eq. 1-2) with Nesterov momentum 0.95.

        buffer <- 0.95 buffer + 0.05 gradient
        update <- orthogonalise(0.95 buffer + 0.05 gradient)
        weight <- (1 - lr weight_decay) weight - lr sqrt(max(1, rows / columns)) update

    Matrices of one shape are orthogonalised together. Sharded matrices (DTensor) are gathered for it, so the result
    does not depend on the number of ranks. Raises ValueError for a parameter that is no matrix.
    """

    def __init__(self, params: ParamsT, lr: float, weight_decay: float = 0.0) -> None:
        super().__init__(params, {"lr": lr, "weight_decay": weight_decay})
        for group in self.param_groups:
            for param in group["params"]:
                if param.ndim != 2:
                    raise ValueError(f"Muon takes matrices only, found a parameter of shape {tuple(param.shape)}")

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            by_shape: dict[torch.Size, list[torch.nn.Parameter]] = defaultdict(list)
            for param in group["params"]:
                if param.grad is not None:
                    by_shape[param.shape].append(param)
            for shape, params in by_shape.items():
                updates = orthogonalise(torch.stack([full(self._momentum(param)) for param in params]))
                scale = group["lr"] * math.sqrt(max(1.0, shape[0] / shape[1]))
                for param, update in zip(params, updates, strict=True):
                    param.mul_(1.0 - group["lr"] * group["weight_decay"])
                    param.add_(placed_like(update.to(param.dtype), param), alpha=-scale)

    def _momentum(self, param: torch.nn.Parameter) -> torch.Tensor:
        """The gradient after Nesterov momentum."""
        assert param.grad is not None
        state = self.state[param]
        if "momentum_buffer" not in state:
            state["momentum_buffer"] = torch.zeros_like(param.grad)
        buffer: torch.Tensor = state["momentum_buffer"]
        buffer.lerp_(param.grad, 1.0 - _MOMENTUM)
        return param.grad.lerp(buffer, _MOMENTUM)


def orthogonalise(matrices: torch.Tensor) -> torch.Tensor:
    """Bring all singular values of matrices [N, R, C] near 1 (0.7 to 1.2), and keep the singular vectors: [N, R, C].

    Five quintic Newton-Schulz iterations X <- aX + (bA + cA^2)X with A = XX^T, in float32 on the CPU. On an accelerator
    they run in bfloat16, which the iteration was designed to tolerate.
    """
    a, b, c = _COEFFICIENTS
    x = matrices.float() if matrices.device.type == "cpu" else matrices.bfloat16()
    wide = x.shape[1] <= x.shape[2]
    x = x if wide else x.mT
    x = x / x.flatten(1).norm(dim=1).clamp(min=1e-7)[:, None, None]
    for _ in range(_NEWTON_SCHULZ_STEPS):
        gram = x @ x.mT
        x = torch.baddbmm(x, torch.baddbmm(gram, gram, gram, beta=b, alpha=c), x, beta=a)
    return x if wide else x.mT
