"""`actor_rollout_ref.model.override_config`: the policy computes with it and keeps it; misspelled names are refused."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
import torch
from transformers import AutoTokenizer

from agentrl.config.sections.model import ModelConfig
from agentrl.engines.servers.model import ModelFacts
from agentrl.engines.sglang.options import SGLangArguments
from agentrl.errors import ConfigError
from agentrl.model.packed import load_model
from agentrl.model.read_config import merged
from agentrl.system.json_value import JSON
from tests.naming import naming
from tests.workers.conftest import BatchMaker, WorkerMaker

YARN: dict[str, JSON] = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 16}
OVERRIDE: dict[str, JSON] = {"rope_scaling": YARN, "max_position_embeddings": 4096}


def test_the_policy_computes_with_it_and_keeps_it(
    make_worker: WorkerMaker, make_batch: BatchMaker, tiny_policy: Path, tmp_path: Path
) -> None:
    batch = make_batch()
    plain, _ = make_worker().compute_log_probs(batch)
    worker = make_worker(model=ModelConfig(path=str(tiny_policy), override_config=OVERRIDE))
    scaled, _ = worker.compute_log_probs(batch)
    assert (plain - scaled).abs().max() > 1e-4
    worker.export(tmp_path, AutoTokenizer.from_pretrained(tiny_policy))
    exported = make_worker(model=ModelConfig(path=str(tmp_path)))
    torch.testing.assert_close(exported.compute_log_probs(batch)[0], scaled)
    assert json.loads((tmp_path / "config.json").read_text())["max_position_embeddings"] == 4096


def test_the_engine_is_told(tiny_policy: Path) -> None:
    assert ModelFacts.from_path(str(tiny_policy), OVERRIDE).max_positions == 4096
    argv = SGLangArguments(str(tiny_policy), override_config=OVERRIDE).argv(1)
    assert json.loads(argv[argv.index("--json-model-override-args") + 1]) == OVERRIDE
    assert "--json-model-override-args" not in SGLangArguments(str(tiny_policy)).argv(1)


def test_what_the_config_does_not_have_is_refused(tiny_policy: Path) -> None:
    with naming(ConfigError, "override_config:", "max_position_embedings"):
        load_model(str(tiny_policy), override={"max_position_embedings": 4096})
    with pytest.raises(ConfigError, match="override_config"):
        load_model(str(tiny_policy), override={"rope_scaling": {"rope_type": "no such kind"}})
    with naming(ConfigError, "override_config", "hidden_size"):
        load_model(str(tiny_policy), override={"hidden_size": "wide"})


def test_a_config_whose_values_its_class_refuses_is_named(tiny_policy: Path, tmp_path: Path) -> None:
    config = json.loads((tiny_policy / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(config | {"hidden_size": "wide"}))
    with naming(ConfigError, str(tmp_path), "hidden_size"):
        load_model(str(tmp_path))


def test_a_config_that_does_not_fit_the_weights_is_refused(
    make_worker: WorkerMaker, tiny_policy: Path, tmp_path: Path
) -> None:
    shutil.copytree(tiny_policy, tmp_path / "policy")
    config = tmp_path / "policy" / "config.json"
    found = json.loads(config.read_text())
    config.write_text(json.dumps(found | {"intermediate_size": 96}))
    wrong = r"config\.json does not fit the weights\. model\.layers\.0\.mlp\.down_proj\.weight: \[\d+, 96\] by config"
    with pytest.raises(ConfigError, match=wrong):
        load_model(str(config.parent))
    with pytest.raises(ConfigError, match=wrong):
        make_worker(model=ModelConfig(path=str(config.parent)))


def test_sections_are_merged() -> None:
    assert merged({"a": {"b": 1, "c": 2}, "d": 1}, {"a": {"b": 3}, "d": {"e": 1}}) == {
        "a": {"b": 3, "c": 2},
        "d": {"e": 1},
    }


@pytest.mark.parametrize(
    ("more", "wrong"),
    [
        (1, r"layers\.{}\.input_layernorm\.weight: one by config\.json, which has num_hidden_layers={}, and not there"),
        (-1, r"layers\.{}\.input_layernorm\.weight: none by config\.json, which has num_hidden_layers={}, and there"),
    ],
)
def test_layers_that_config_and_weights_do_not_share_are_named(
    tiny_policy: Path, tmp_path: Path, more: int, wrong: str
) -> None:
    shutil.copytree(tiny_policy, tmp_path / "policy")
    config = tmp_path / "policy" / "config.json"
    found = json.loads(config.read_text())
    layers = found["num_hidden_layers"]
    found |= {"num_hidden_layers": layers + more}
    if "layer_types" in found:
        found["layer_types"] = found["layer_types"][:1] * (layers + more)
    config.write_text(json.dumps(found))
    with pytest.raises(ConfigError, match=wrong.format(min(layers, layers + more), layers + more)) as told:
        load_model(str(config.parent))
    assert str(config.parent) in str(told.value)
