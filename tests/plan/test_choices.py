"""The values that the plan chooses for keys with `auto`, against the formulas that it chooses by."""

from __future__ import annotations

import json
from functools import cache
from pathlib import Path
from typing import Any

import pytest

from agentrl.config import Config, PreferencesConfig, SFTConfig, load_config
from agentrl.plan import sizing
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
    note = (lambda line: None) if said is None else said.append
    return choose(config, device, room, note).actor_rollout_ref.model.enable_gradient_checkpointing


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
    assert len(said) == 1 and said[0].startswith(f"{MODEL}.enable_gradient_checkpointing=auto: ")
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
