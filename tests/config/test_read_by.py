"""Which algorithms read a key stands at the key, for built-in ones, and at the algorithm. Both say the same."""

from __future__ import annotations

import pytest

from agentrl.config.declaration import declaration_of
from agentrl.config.keys import all_keys
from agentrl.config.registries import ADVANTAGE_ESTIMATORS, POLICY_LOSSES
from agentrl.config.rules import Place, ReadBy
from agentrl.config.sections.training import Config

RULES = [
    (path, rule, Place(section, all_keys(Config)))
    for path, key in all_keys(Config).items()
    for rule, section in key.rules
    if isinstance(rule, ReadBy)
]


def test_the_keys_are_found() -> None:
    assert {"algorithm.gamma", "algorithm.lam", "critic.ppo_epochs", "trainer.critic_warmup"} <= {
        p for p, _, _ in RULES
    }


@pytest.mark.parametrize("registry", [ADVANTAGE_ESTIMATORS, POLICY_LOSSES], ids=lambda registry: registry.what)
def test_a_key_names_the_built_in_algorithms_that_declare_it(registry: object) -> None:
    assert registry is ADVANTAGE_ESTIMATORS or registry is POLICY_LOSSES
    for path, rule, place in RULES:
        if registry in rule.registries:
            named = {
                name
                for condition in rule.conditions
                if place.find(condition.name) == registry.key
                for name in condition.values or ()
            }
            declared = {name for name in registry.names() if rule.declares(declaration_of(registry.get(name)))}
            assert named == declared, path
