"""Rules of keys and of sections, over every schema: one form, one judgement."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from agentrl.config import Config, load_config
from agentrl.config.checks import findings, idle_keys
from agentrl.config.keys import all_keys, defaults, leaf_keys
from agentrl.config.rules import Condition, ConflictsWith, Needs, OnlyWith, Place, Rule
from agentrl.config.section import Section
from agentrl.config.sections.offline import EvaluateConfig, GenerateConfig
from agentrl.config.sections.sft import PreferencesConfig, SFTConfig
from agentrl.errors import ConfigError

SCHEMAS: list[type[Section]] = [Config, SFTConfig, PreferencesConfig, GenerateConfig, EvaluateConfig]


def rules() -> Iterator[tuple[Rule, str, Place]]:
    for schema in SCHEMAS:
        keys = all_keys(schema)
        for path, key in keys.items():
            yield from ((rule, path, Place(section, keys)) for rule, section in key.rules)


def conditions(rule: Rule) -> tuple[Condition, ...]:
    if isinstance(rule, OnlyWith | ConflictsWith):
        return rule.conditions
    return (rule.condition,) if isinstance(rule, Needs) else ()


def test_every_condition_means_a_key() -> None:
    """One that means none would be left out in silence."""
    unfound: dict[tuple[int, str], str] = {}
    met = set()
    for rule, path, place in rules():
        for condition in conditions(rule):
            at = (id(rule), condition.name)
            if place.find(condition.name) is None:
                unfound[at] = f"{path}: {condition.name}"
            else:
                met.add(at)
    assert len(met) > 40
    assert [text for at, text in unfound.items() if at not in met] == []


@pytest.mark.parametrize("schema", SCHEMAS, ids=lambda schema: schema.__name__)
def test_the_defaults_keep_every_rule(schema: type[Section]) -> None:
    tree = defaults(schema)
    texts = {"data": {"path": "rows.parquet", "train_files": "rows.parquet", "output_path": "out.parquet"}}
    known = leaf_keys(schema)
    for section, values in texts.items():
        inner = tree[section]
        assert isinstance(inner, dict)
        inner |= {name: value for name, value in values.items() if f"{section}.{name}" in known}
    if schema is GenerateConfig:
        tree["actor_rollout_ref"]["model"]["path"] = "policy"  # type: ignore[call-overload, index]
    assert list(findings(schema.model_validate(tree), ())) == []


def test_a_key_without_effect_is_judged_no_further() -> None:
    """Its conflicts and its value do not matter, and would be a second message about one mistake."""
    words = ["async_training.keep_kv_cache=true", "actor_rollout_ref.rollout.free_cache_engine=true"]
    with pytest.raises(ConfigError) as error:
        load_config([*words, "distillation.divergence=nonsense"])
    lines = str(error.value).splitlines()
    assert [line.partition(" has no effect")[0] for line in lines] == [
        "distillation.divergence=nonsense",
        "async_training.keep_kv_cache=true",
    ]


def test_nothing_that_a_key_names_is_looked_up_unless_asked(tmp_path: Path) -> None:
    mark, file = tmp_path / "imported", tmp_path / "mine.py"
    file.write_text(f"open({str(mark)!r}, 'w')\ndef load(*_): ...\n")
    tree = defaults(Config)
    tree["data"] |= {"train_files": "rows.parquet", "sampler": {"name": f"{file}:load", "options": {}}}  # type: ignore[operator]
    config = Config.model_validate(tree)
    assert idle_keys(config, ["quickstart.seed"]).keys() <= {"quickstart.seed"}
    assert list(findings(config, (), look_up=False)) == [] and not mark.exists()
    list(findings(config, ()))
    assert mark.exists()
