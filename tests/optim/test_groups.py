"""Parameters with a rate or a weight decay of their own (`optim.groups`)."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import nn

from agentrl.config.sections.optim import GroupConfig, OptimConfig
from agentrl.errors import ConfigError
from agentrl.optim.optimizer import Optim
from tests.checks.test_faults import alarms
from tests.e2e.conftest import forked_command
from tests.e2e.test_docs import SMALL
from tests.naming import naming
from tests.runs import Overrides

GROUPS = {
    "embeddings": GroupConfig(match="*embed*", lr_factor=0.1),
    "norms": GroupConfig(match="*norm*", weight_decay=0.5),
    "others": GroupConfig(match="*", weight_decay=0.25),
}


@pytest.mark.parametrize("name", ["adamw", "muon"])
def test_each_parameter_steps_at_the_rate_of_the_first_group_that_fits(name: str) -> None:
    """Against the same step with one rate and one decay for all: torch's own, computed for each."""
    shapes = {"embed.weight": (4, 3), "layer.weight": (3, 3), "norm.weight": (3,)}
    wanted = {"embed.weight": (0.1, 0.1), "layer.weight": (1.0, 0.25), "norm.weight": (1.0, 0.5)}

    def stepped(config: OptimConfig) -> dict[str, torch.Tensor]:
        torch.manual_seed(0)
        params = {key: nn.Parameter(torch.randn(shape)) for key, shape in shapes.items()}
        optim = Optim(params, {"layer.weight"}, config, total_steps=10)
        for step in (1, 2):
            for param in params.values():
                param.grad = param.detach().sin()
            optim.step(step)
        return {key: param.detach() for key, param in params.items()}

    base = OptimConfig(name=name, lr=0.01, weight_decay=0.1, lr_warmup_steps=3)
    found = stepped(base.model_copy(update={"groups": GROUPS}))
    for key, (factor, decay) in wanted.items():
        alone = base.model_copy(update={"lr": 0.01 * factor, "weight_decay": decay})
        torch.testing.assert_close(found[key], stepped(alone)[key], rtol=0, atol=0)


def test_a_pattern_that_fits_no_parameter_is_refused() -> None:
    config = OptimConfig(
        groups={"all": GroupConfig(match="?"), "rare": GroupConfig(match="*.embedings.*", lr_factor=0.1)}
    )
    with naming(ConfigError, "optim.groups.rare.match='*.embedings.*'"):
        Optim({"a": nn.Parameter(torch.zeros(2)), "b": nn.Parameter(torch.zeros(2))}, set(), config, 10)


def test_a_run_with_groups_raises_no_alarm(small_run: Overrides, tmp_path: Path) -> None:
    """The check of the optimizer's step knows each parameter's rate and decay."""
    groups = "{rare: {match: '*embed_tokens*', lr_factor: 0.1}, norms: {match: '*norm*', weight_decay: 0}}"
    words = [
        *small_run(*SMALL, run_dir=tmp_path / "run"),
        f"actor_rollout_ref.actor.optim.groups={groups}",
        "trainer.total_training_steps=2",
    ]
    done = forked_command([*words, "actor_rollout_ref.actor.optim.lr=0.01"], tmp_path)
    assert done.returncode == 0, done.stderr
    assert alarms(tmp_path / "run") == []
