"""Keys of verl's commands that are taken or refused by the words that their user wrote."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest

from agentrl.config import Config, SFTConfig, load_config
from agentrl.config.sections.offline import EvaluateConfig, GenerateConfig
from agentrl.config.sections.sft import PreferencesConfig
from agentrl.errors import ConfigError
from agentrl.system.json_value import JSON
from agentrl.verl.keys.translation import translate

ACTOR, TURNS = "actor_rollout_ref.actor", "actor_rollout_ref.rollout.multi_turn"
MOST = f"{TURNS}.max_assistant_turns"


def test_max_turns_is_the_first_name_of_the_assistants_turns() -> None:
    values: dict[str, JSON] = {MOST: None, f"{TURNS}.max_turns": 5, "data.max_response_length": 512}
    for order in (values, dict(reversed(values.items()))):
        found = translate(order, Config)
        assert (found.values[MOST], found.unsupported) == (5, {})
    assert translate({**values, f"{TURNS}.max_turns": None}, Config).values[MOST] == 512, "no limit"
    assert "keep one" in translate({**values, MOST: 3}, Config).unsupported[MOST]


@pytest.mark.parametrize("name", ["chatml", "qwen", "openai"])
def test_formats_of_conversations_are_found_by_the_model(name: str) -> None:
    key = f"{TURNS}.format"
    assert translate({key: name}, Config).values == {key: "auto"}
    assert translate({key: "hermes"}, Config).values == {key: "hermes"}


def test_the_critics_shards_are_taken_under_their_engines_name() -> None:
    words: dict[str, JSON] = {f"critic.fsdp_config.{name}": one for name, one in {"fsdp_size": 4, "x": 1}.items()}
    found = translate({**words, "critic.fsdp_config.param_offload": True, "trainer.n_gpus_per_node": 8}, Config)
    assert found.values["critic.model.fsdp_config.fsdp_size"] == 4
    assert found.strangers == ["critic.fsdp_config.x"] and found.unsupported == {}
    assert "critic.fsdp_config.param_offload" in found.ignored


@pytest.mark.parametrize("loss", ["gspo", "sapo", "geo_mean"])
def test_some_losses_have_a_mean_of_their_own(loss: str) -> None:
    key = f"{ACTOR}.loss_agg_mode"
    found = translate({key: "token-mean", f"{ACTOR}.policy_loss.loss_mode": loss}, Config)
    assert found.values[key] == "seq-mean-token-mean"
    assert found.loud[key].endswith("here all terms have one mean: seq-mean-token-mean here")
    other = translate({key: "token-mean", f"{ACTOR}.policy_loss.loss_mode": "cispo"}, Config)
    assert (other.values[key], other.loud) == ("token-mean", {})


SFT = ["data.train_files=x.parquet", "model.path=m"]
GENERATE = ["data.path=x.parquet", "data.output_path=y.parquet", "actor_rollout_ref.model.path=m"]
REFUSED: dict[str, tuple[Sequence[str], str, Any, str]] = {
    "a critic of null": (["critic=null"], "ppo_trainer", Config, "critic: expected keys under it, .* leave critic out"),
    "a group": (
        ["actor@actor_rollout_ref.actor=dp_actor"],
        "ppo_trainer",
        Config,
        r"^actor@actor_rollout_ref\.actor=dp_actor chooses a YAML file actor/dp_actor\.yaml",
    ),
    "generation": ([], "generation", GenerateConfig, r"verl's generation is python -m agentrl\.generate here"),
    "evaluation": ([], "evaluation", EvaluateConfig, r"verl's evaluation is python -m agentrl\.evaluate here"),
    "sft": ([], "sft_trainer", SFTConfig, r"verl's sft_trainer is python -m agentrl\.sft here"),
    "a length": (
        [*GENERATE, "actor_rollout_ref.rollout.prompt_length=512"],
        "generate",
        GenerateConfig,
        r"prompt_length=512 is verl's spelling of data\.max_prompt_length=512; write that$",
    ),
    "columns": (
        [*SFT, "data.multiturn.enable=true", "data.multiturn.messages_key=chat"],
        "sft",
        SFTConfig,
        r"data\.multiturn\.messages_key=chat is verl's spelling of data\.messages_key=chat; write that$",
    ),
    "a model": (
        [*SFT, "model.partial_pretrain=m"],
        "sft",
        SFTConfig,
        r"model\.partial_pretrain=m is verl's spelling of model\.path=m; write that$",
    ),
    "two columns": (
        [*SFT, "data.prompt_dict_keys=[question]", "+data.response_dict_keys=[answer]"],
        "sft",
        SFTConfig,
        r"data\.prompt_dict_keys=\['question'\], .* would change .* into a column messages \(docs/sft\.md\)",
    ),
    "another library's name": (
        ["actor_rollout_ref.rollout.max_new_tokens=5"],
        "ppo_trainer",
        Config,
        r"max_new_tokens; did you mean data\.max_response_length\?$",
    ),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_is_refused_is_told_in_the_words_of_the_command(name: str) -> None:
    words, start, schema, said = REFUSED[name]
    with pytest.raises(ConfigError, match=said):
        load_config(words, start, schema)


def test_the_policy_learns_from_the_step_of_critic_warmup_on() -> None:
    """verl counts the step of the first update, we the steps before it."""
    for theirs, ours in ((0, 0), (1, 0), (2, 1), (20, 19)):
        assert translate({"trainer.critic_warmup": theirs}, Config).values == {"trainer.critic_warmup": ours}


def test_null_asks_for_nothing() -> None:
    words = ["data.path=x.parquet", "ray_init.num_cpus=null", "ray_init.timeline_json_file=null"]
    load_config(words, "evaluate", EvaluateConfig)
    with pytest.raises(ConfigError, match="unknown key ray_init"):
        load_config([*words[:2], "ray_init.timeline_json_files=null"], "evaluate", EvaluateConfig)


def test_dpo_is_a_name_of_its_loss() -> None:
    words = ["data.train_files=x.parquet", "model.path=m", "loss=dpo", "loss_options.label_smoothing=0.1"]
    assert load_config(words, "preferences", PreferencesConfig).loss == "dpo"
