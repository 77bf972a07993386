"""The memory plan: its parts against hand-worked bytes, and what it refuses and warns of."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from agentrl.config import Config, load_config
from agentrl.config.sections.reward import ScoreModelConfig
from agentrl.errors import ConfigError
from agentrl.plan import __main__ as command
from agentrl.plan.memory import MemoryPlan, check_room, doubled
from agentrl.plan.times import TimePlan, cluster_of
from tests.e2e.test_docs import commands
from tests.naming import assert_names, naming

MODEL, ACTOR = "actor_rollout_ref.model", "actor_rollout_ref.actor"
SHAPE = {
    "model_type": "llama",
    "hidden_size": 64,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "intermediate_size": 160,
    "vocab_size": 1000,
    "tie_word_embeddings": True,
}
LAYER = 2 * 64 * (64 + 32) + 3 * 64 * 160
PARAMS = 3 * LAYER + 1000 * 64
"""Worked by hand: attention's four matrices, the MLP's three, the embedding that is the head, too."""


@pytest.fixture
def words(tmp_path: Path) -> list[str]:
    (tmp_path / "config.json").write_text(json.dumps(SHAPE), encoding="utf-8")
    return [
        f"{MODEL}.path={tmp_path}",
        "trainer.device=cpu",
        "data.train_batch_size=4",
        "actor_rollout_ref.actor.ppo_mini_batch_size=4",
        "actor_rollout_ref.rollout.n=8",
        "data.max_prompt_length=100",
        "data.max_response_length=150",
        "actor_rollout_ref.actor.ppo_max_token_len_per_gpu=1100",
    ]


def planned(words: list[str], *further: str, device: str = "cpu", capacity: float = 1e12) -> MemoryPlan:
    return MemoryPlan(load_config([*words, *further], "train", Config), device, capacity)


def test_states_are_sixteen_bytes_a_parameter_less_the_gradient(words: list[str]) -> None:
    plan = planned(words)
    assert plan.states == {"policy's weights": 4 * PARAMS, "policy's optimizer": 8 * PARAMS}
    assert planned(words, "actor_rollout_ref.actor.optim.name=muon").states["policy's optimizer"] == 4 * PARAMS


def test_each_role_has_its_parts(words: list[str]) -> None:
    assert planned(words, "actor_rollout_ref.actor.use_kl_loss=true").states["reference"] == 4 * PARAMS
    adapters = planned(words, f"{MODEL}.lora_rank=2", "actor_rollout_ref.actor.use_kl_loss=true").states
    trained = 3 * 2 * ((64 + 64) + 2 * (64 + 32) + (64 + 64) + 3 * (64 + 160))
    assert adapters == {
        "policy's weights": 4 * PARAMS,
        "adapters": 4 * trained,
        "policy's optimizer": 8 * trained,
    }, "without its adapters the policy is the reference"
    critic = planned(words, "algorithm.adv_estimator=gae")
    assert critic.states["critic's optimizer"] == 8 * PARAMS
    assert [moment.name for moment in critic.moments] == ["rollout", "log-probs", "critic's update", "update"]


def test_models_that_only_score_have_their_parts_and_moments(words: list[str], tmp_path: Path) -> None:
    teacher, small = tmp_path / "teacher", tmp_path / "small"
    for folder, layers in ((teacher, 40), (small, 1)):
        folder.mkdir()
        (folder / "config.json").write_text(json.dumps({**SHAPE, "num_hidden_layers": layers}), encoding="utf-8")
    large = 4 * (40 * LAYER + 64_000)
    taught = [f"distillation.teacher.path={teacher}", f"+distillation.by_source.x.path={small}"]
    scored = ["reward_model.enable=true", f"reward_model.model.path={teacher}"]
    plan = planned(words, *taught, *scored)
    assert plan.states["teachers"] == large + 4 * (LAYER + 64_000)
    assert plan.states["reward model"] == large, "a classifier has one number where others have a head"
    names = ["rollout", "log-probs", "teachers", "reward model", "update"]
    assert [moment.name for moment in plan.moments] == names
    assert plan.teacher is not None and plan.teacher.layers == 40
    times = TimePlan(plan, *cluster_of(plan))
    stages = {stage.name: stage.seconds for stage in times.step.stages}
    assert stages["teacher"] > 5 * stages["old_log_prob"] and stages["reward_model"] > 5 * stages["old_log_prob"]
    itself = ["distillation.teacher.path=policy", "distillation.teacher.privileged='It is {ground_truth}.'"]
    assert planned(words, *itself).states == planned(words).states
    moved = planned(words, *taught, "trainer.device=auto", f"{ACTOR}.fsdp_config.param_offload=true", device="cuda")
    assert "teachers" not in moved.states and moved.moments[2].parts["teachers"] == large, "one after the other"
    judge = planned(words).config.reward_model.model_copy(
        update={"enable": True, "model": ScoreModelConfig(path="judge", generative=True)}
    )
    served = MemoryPlan(planned(words).config.model_copy(update={"reward_model": judge}), "cuda", 80)
    assert served.states["reward model's servers"] == 40
    apart = planned(words, *scored, "reward_model.enable_resource_pool=true")
    assert "reward model" not in apart.states and apart.reward_model is None


def test_shared_prompts_are_counted_once_on_a_cpu(words: list[str]) -> None:
    layer = 4 * (4 * 64 + (2 * 64 + 64) + (64 + 2 * 32) + 4 * 160)
    # A micro-batch of 1,100 tokens has 4 sequences of 250; on a GPU shorter ones may fill it.
    for device, tokens, pieces in (("cpu", 100 + 4 * 150, 2), ("cuda", 1100, 1)):
        update = planned(words, device=device).moments[-1]
        assert update.parts["activations"] == pieces * 3 * layer * tokens
        assert update.parts["logits"] == 3 * 4 * 1000 * tokens
        only = planned(words, "actor_rollout_ref.actor.ppo_max_token_len_per_gpu=8000", device=device).moments[-1]
        assert only.parts["activations"] == 3 * layer * (32 * 150 + (400 if device == "cpu" else 3200))
        again = planned(words, f"{MODEL}.enable_gradient_checkpointing=true", device=device).moments[-1]
        assert again.parts["activations"] == pieces * (pieces * layer + 3 * 4 * 64) * tokens, "a CPU's gradients, too"


def test_the_cache_grows_by_doubling_and_is_freed_for_updates(words: list[str]) -> None:
    cells = 32 * 256 + 4 * 128
    plan = planned(words)
    assert plan.moments[0].parts["engine's cache"] == cells * 2 * 3 * 32 * 4
    assert plan.moments[-1].parts["engine's cache"] == plan.moments[0].parts["engine's cache"]
    assert "engine's cache" not in planned(words, "actor_rollout_ref.rollout.free_cache_engine=true").moments[-1].parts
    on_gpu = planned(words, device="cuda").moments[0].parts["engine's cache"]
    assert on_gpu == 128 * 128 * 2 * 3 * 32 * 4, "32 answers of two pages, and 4 prompts of one"
    rows = planned(words, "actor_rollout_ref.rollout.engine_kwargs.embedded.graphs=false", device="cuda")
    assert rows.moments[0].parts["engine's cache"] == cells * 2 * 3 * 32 * 4
    assert [doubled(*pair) for pair in ((1, 1), (33, 1), (64, 64), (65, 64))] == [1, 64, 64, 128]


def test_a_server_takes_its_part_of_the_gpu(words: list[str]) -> None:
    config = planned(words).config  # SGLang need not be installed for a plan of the config
    rollout = config.actor_rollout_ref.rollout.model_copy(update={"name": "sglang"})
    roles = config.actor_rollout_ref.model_copy(update={"rollout": rollout})
    served = MemoryPlan(config.model_copy(update={"actor_rollout_ref": roles}), "cuda", 80)
    assert all(moment.parts["engine"] == 40 for moment in served.moments)
    for keys, left in (({}, {}), ({"update_weights_delta": True}, {"engine's weights": 4 * PARAMS})):
        freed = roles.model_copy(update={"rollout": rollout.model_copy(update={"free_cache_engine": True, **keys})})
        update = MemoryPlan(config.model_copy(update={"actor_rollout_ref": freed}), "cuda", 80).moments[-1]
        assert {name: size for name, size in update.parts.items() if name.startswith("engine")} == left


def test_a_run_that_cannot_fit_is_refused_and_one_that_may_not_warned_of(words: list[str]) -> None:
    config = load_config(words, "train", Config)
    said: list[str] = []
    with naming(ConfigError, "0.0 GB", "policy's optimizer", "lora_rank"):
        check_room(config, "cpu", 11 * PARAMS, said.append)
    check_room(config, "cpu", 12 * PARAMS, said.append)
    assert len(said) == 1 and "agentrl.plan" in said[0]
    check_room(config, "cpu", 1e12, said.append)
    assert len(said) == 1


def test_a_model_that_cannot_be_counted(words: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "mamba2", "hidden_size": 8}), encoding="utf-8")
    check_room(load_config(words, "train", Config), "cpu", 1.0, lambda _: pytest.fail("warned"))
    assert command.main(words) == 2
    assert_names(capsys.readouterr().err, "MLPs", "mamba2", "num_hidden_layers")
    hybrid = {**SHAPE, "model_type": "lfm2", "layer_types": ["conv", "full_attention", "conv"]}
    (tmp_path / "config.json").write_text(json.dumps(hybrid), encoding="utf-8")
    assert command.main(words) == 2
    assert_names(capsys.readouterr().err, "lfm2")
    assert command.main(["trainer.device=cpu"]) == 2
    assert_names(capsys.readouterr().err, "model")
    (tmp_path / "config.json").unlink()
    assert command.main(words) == 2
    assert_names(capsys.readouterr().err, "config.json")


def test_the_pages_command(words: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    line, *_ = commands("docs/plan.md")  # test_measured.py runs those with a report
    python, _, module, *given = line.split()
    assert (python, module) == ("python", "agentrl.plan")
    assert command.main([word.replace("Qwen/Qwen3-0.6B", words[0].partition("=")[2]) for word in given]) == 0
    assert "fullest: " in capsys.readouterr().out


def test_the_command_prints_parts_by_moment(words: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert command.main(words) == 0
    said = capsys.readouterr().out
    assert "fullest:" in said and "engine's cache" in said and "policy's optimizer" in said
