"""The values that the plan chooses for keys with `auto`, against the formulas that it chooses by."""

from __future__ import annotations

import json
from functools import cache
from pathlib import Path
from typing import Any

import pytest

from agentrl.config import Config, PreferencesConfig, SFTConfig, load_config
from agentrl.errors import ConfigError
from agentrl.plan import choices, sizing
from agentrl.plan.choices import choose
from agentrl.plan.memory import GPU_RESERVE, MemoryPlan
from agentrl.plan.sizing import ModelShape
from agentrl.system.json_value import JSON

MODEL, ACTOR = "actor_rollout_ref.model", "actor_rollout_ref.actor"
SHAPE: dict[str, JSON] = {
    "model_type": "llama",
    "hidden_size": 64,
    "num_hidden_layers": 6,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "intermediate_size": 160,
    "vocab_size": 1000,
    "tie_word_embeddings": True,
}
TOKENS = 1000
"""Of a micro-batch, which four sequences fill."""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    found = tmp_path_factory.mktemp("model")
    (found / "config.json").write_text(json.dumps(SHAPE), encoding="utf-8")
    return found


@pytest.fixture(scope="module")
def words(folder: Path) -> list[str]:
    return [
        f"{MODEL}.path={folder}",
        "trainer.device=cpu",
        "data.train_batch_size=4",
        f"{ACTOR}.ppo_mini_batch_size=4",
        "actor_rollout_ref.rollout.n=8",
        "data.max_prompt_length=100",
        "data.max_response_length=150",
        f"{ACTOR}.ppo_max_token_len_per_gpu={TOKENS}",
        "actor_rollout_ref.rollout.free_cache_engine=true",
    ]


@cache
def loaded(*words: str) -> Config:
    return load_config(list(words), "train", Config)


def chosen(words: list[str], device: str, room: float, said: list[str] | None = None) -> bool | int | str:
    config = loaded(*words)
    found: list[str] = [] if said is None else said
    config = choose(config, device, room, found.append)
    found[:] = [line for line in found if line.startswith(f"{MODEL}.enable_gradient_checkpointing")]
    return config.actor_rollout_ref.model.enable_gradient_checkpointing


def room_for(words: list[str], activations: float) -> float:
    """Bytes of a GPU whose update has exactly so many left for activations."""
    plan = MemoryPlan(loaded(*words), "cuda", 1e15)
    parts = plan.moments[-1].parts
    rest = sum(size for name, size in parts.items() if name not in ("activations", "CUDA, NCCL, gaps"))
    return (rest + activations) / (1 - GPU_RESERVE)


@pytest.mark.parametrize(("fits", "value"), [(0, False), (1, 2), (2, 2), (3, 3), (4, 4), (5, 5), (6, True)], ids=str)
def test_as_few_layers_are_computed_again_as_fit(words: list[str], fits: int, value: bool | int) -> None:
    """fits: layers whose recomputation just makes room; 6: nothing does. A key of 1 would mean true."""
    shape = ModelShape.from_config(SHAPE)

    def kept(count: int) -> float:
        return sizing.activation_bytes(shape, TOKENS, autocast=False, recomputed=count)

    room = room_for(words, kept(fits) + 1 if fits < 6 else kept(5) - 1)
    said: list[str] = []
    found = chosen(words, "cuda", room, said)
    assert found == value and type(found) is type(value)
    assert said[0].startswith(f"{MODEL}.enable_gradient_checkpointing=auto: ")
    if 1 < fits < 6:
        assert f"{fits} of the 6 layers" in said[0]
        assert chosen(words, "cuda", room_for(words, kept(fits - 1) - 1)) == fits, "one layer fewer has no room"


def test_a_critic_has_to_fit_as_well(words: list[str]) -> None:
    with_critic = [*words, "algorithm.adv_estimator=gae", f"critic.ppo_max_token_len_per_gpu={4 * TOKENS}"]
    moment = next(
        one for one in MemoryPlan(loaded(*with_critic), "cuda", 1e15).moments if one.name == "critic's update"
    )
    needs = moment.total - moment.parts["CUDA, NCCL, gaps"]
    assert chosen(with_critic, "cuda", (needs + 1) / (1 - GPU_RESERVE)) is False
    assert chosen(with_critic, "cuda", (needs - 1) / (1 - GPU_RESERVE)) == 2
    assert chosen(words, "cuda", (needs - 1) / (1 - GPU_RESERVE)) is False


def test_a_cpu_and_a_key_that_is_given_are_left_as_they_are(words: list[str]) -> None:
    said: list[str] = []
    assert chosen(words, "cpu", 1.0, said) is False
    for given in (True, False, 3):
        assert (
            chosen([*words, f"{MODEL}.enable_gradient_checkpointing={str(given).lower()}"], "cuda", 1.0, said) is given
        )
    assert not said
    assert chosen([*words, f"{MODEL}.enable_gradient_checkpointing=1"], "cuda", 1.0) is True, "as it always meant"


COMPILE = f"{ACTOR}.use_torch_compile"
BFLOAT16 = f"{MODEL}.dtype=bfloat16"


@pytest.mark.parametrize(
    ("given", "device", "why"),
    [
        ([BFLOAT16], "cuda", None),
        ([BFLOAT16], "cpu", ""),
        ([], "cuda", "measured in bfloat16 alone"),
        ([BFLOAT16, f"{ACTOR}.router_replay.mode=R2"], "cuda", "routers can neither"),
        ([BFLOAT16, f"{ACTOR}.strategy_options={{moe_aux_loss_coeff: 0.1}}"], "cuda", "routers can neither"),
        (
            [BFLOAT16, f"{ACTOR}.fsdp_config.tensor_parallel_size=2", "trainer.n_gpus_per_node=2"],
            "cuda",
            "matrices are split",
        ),
    ],
    ids=str,
)
def test_layers_are_compiled_on_a_gpu_where_that_was_tried(
    given: list[str], device: str, why: str | None, words: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(choices, "check_compiler", lambda device: None)
    said: list[str] = []
    config = choose(loaded(*words, *given), device, 1e12, said.append)
    assert config.actor_rollout_ref.actor.use_torch_compile is (why is None)
    lines = [line for line in said if line.startswith(f"{COMPILE}=auto: ")]
    assert len(lines) == (device == "cuda") and all((why or "compile layers") in line for line in lines)


def test_kinds_that_were_not_tried_and_a_missing_compiler_leave_layers_as_they_are(
    words: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """So do layers with a state, which a key of true refuses."""
    for kind in ("qwen3_next", "gemma2"):
        (tmp_path / "config.json").write_text(json.dumps({**SHAPE, "model_type": kind}), encoding="utf-8")
        said: list[str] = []
        config = choose(loaded(f"{MODEL}.path={tmp_path}", *words[1:], BFLOAT16), "cuda", 1e12, said.append)
        assert config.actor_rollout_ref.actor.use_torch_compile is False
        assert f"{COMPILE}=auto: false, as models of the kind {kind} were not tried" in said[-1]

    def missing(device: str) -> None:
        raise ConfigError("torch cannot compile for cuda here: no compiler\nIt needs")

    monkeypatch.setattr(choices, "check_compiler", missing)
    config = choose(loaded(*words, BFLOAT16), "cuda", 1e12, said.append)
    assert config.actor_rollout_ref.actor.use_torch_compile is False
    assert said[-1] == f"{COMPILE}=auto: false, as torch cannot compile for cuda here: no compiler"


def test_what_is_given_is_not_chosen(words: list[str]) -> None:
    for value in (True, False):
        config = choose(loaded(*words, f"{COMPILE}={str(value).lower()}"), "cuda", 1e12, lambda line: None)
        assert config.actor_rollout_ref.actor.use_torch_compile is value
    mine = choices.with_keys(loaded(*words, BFLOAT16), {f"{ACTOR}.strategy": "my.module:backend"})
    said: list[str] = []
    roles = choose(mine, "cuda", 1.0, said.append).actor_rollout_ref
    assert (roles.model.enable_gradient_checkpointing, roles.actor.use_torch_compile) == (False, False)
    assert all("strategy" in line for line in said) and len(said) == 2


def test_a_model_that_is_not_counted_keeps_its_activations_and_says_why(words: list[str], tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "mamba2", "hidden_size": 8}), encoding="utf-8")
    said: list[str] = []
    assert chosen([f"{MODEL}.path={tmp_path}", *words[1:]], "cuda", 1.0, said) is False
    assert "does not know the model's memory" in said[0] and "mamba2" in said[0]


@pytest.mark.parametrize(
    ("kind", "command", "sequences"), [(SFTConfig, "sft", 1), (PreferencesConfig, "preferences", 2)]
)
def test_a_training_on_files_is_planned_by_the_same_formula(
    kind: Any, command: str, sequences: int, words: list[str]
) -> None:
    path = words[0].partition("=")[2]
    given = ["data.train_files=a.parquet", f"model.path={path}", "data.max_length=100", "data.train_batch_size=8"]
    given += [f"data.max_token_len_per_gpu={TOKENS * 10}"]
    config, shape = load_config(given, command, kind), ModelShape.from_config(SHAPE)
    tokens = 8 * sequences * 100  # fewer than a micro-batch may have
    states = 16 * shape.params
    logits = sizing.logits_bytes(shape, tokens, None)
    for count in (0, 3, 5):
        kept = sizing.activation_bytes(shape, tokens, autocast=False, recomputed=count)
        room = (states + logits + kept + 1) / (1 - GPU_RESERVE)
        found = choose(config, "cuda", room, lambda line: None).model.enable_gradient_checkpointing
        assert found == {0: False, 3: 3, 5: 5}[count]
    assert choose(config, "cpu", 1.0, lambda line: None).model.enable_gradient_checkpointing is False


@pytest.mark.parametrize("key", sorted(choices.TOKENS))
def test_micro_batches_that_are_left_to_the_plan_are_the_largest_that_fit(key: str, words: list[str]) -> None:
    """By the formula of their own moment, and 16,384 on a CPU, as without a plan."""
    whole = loaded(*words, "algorithm.adv_estimator=gae", f"{ACTOR}.use_kl_loss=true")
    keys: dict[str, object] = {"data.train_batch_size": 1000, f"{ACTOR}.ppo_mini_batch_size": 1000}
    keys |= {one: 8192 for one, moment in choices.TOKENS.items() if moment == "log-probs"}  # the larger one counts
    config = choices.with_keys(whole, keys)
    asked = choices.with_keys(config, {key: "auto"})

    def needs(size: int) -> float:
        plan = MemoryPlan(choices.with_keys(config, {key: size}), "cuda", 1e15)
        (moment,) = [one for one in plan.moments if one.name == choices.TOKENS[key]]
        return moment.total - moment.parts["CUDA, NCCL, gaps"]

    assert choices.value_of(choose(asked, "cpu", 1.0, lambda line: None), key) == 16384
    for place, size in enumerate(choices.SIZES):
        said: list[str] = []
        exactly = (needs(size) + 1) / (1 - GPU_RESERVE)
        assert choices.value_of(choose(asked, "cuda", exactly, said.append), key) == size
        assert f"{key}={size}" in said[0]
        below = (needs(size) - 1) / (1 - GPU_RESERVE)
        smaller = choices.SIZES[max(0, place - 1)]
        assert choices.value_of(choose(asked, "cuda", below, said.append), key) == smaller


def test_a_smaller_micro_batch_comes_before_a_recomputed_layer(words: list[str]) -> None:
    key = f"{ACTOR}.ppo_max_token_len_per_gpu"
    keys: dict[str, object] = {"data.train_batch_size": 1000, f"{ACTOR}.ppo_mini_batch_size": 1000, key: "auto"}
    config, shape = choices.with_keys(loaded(*words), keys), ModelShape.from_config(SHAPE)

    def chosen_at(activations: float) -> tuple[object, object]:
        parts = MemoryPlan(choices.with_keys(config, {key: 8192}), "cuda", 1e15).moments[-1].parts
        rest = sum(size for name, size in parts.items() if name not in ("activations", "CUDA, NCCL, gaps"))
        found = choose(config, "cuda", (rest + activations) / (1 - GPU_RESERVE), lambda line: None).actor_rollout_ref
        return found.actor.ppo_max_token_len_per_gpu, found.model.enable_gradient_checkpointing

    def kept(tokens: int, recomputed: int) -> float:
        return sizing.activation_bytes(shape, tokens, autocast=False, recomputed=recomputed)

    assert chosen_at(kept(8192, 0) + 1) == (8192, False)
    assert chosen_at(kept(8192, 2) + 1) == (8192, 2), "as 16,384 tokens would take more recomputed layers"
