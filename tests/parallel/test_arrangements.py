"""Trainings give the same however their ranks are arranged."""

from __future__ import annotations

import json
import math
from collections.abc import Iterable
from dataclasses import fields
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

from agentrl.config import Config, PreferencesConfig, TuningConfig
from agentrl.config.registries import POLICY_LOSSES
from agentrl.config.sections.parallel import Parallel
from agentrl.config.sections.sft import SFTConfig
from agentrl.errors import ConfigError
from agentrl.parallel.tensor_parallel import split_layers
from agentrl.quickstart.tiny_policy import TinyShape, make_tiny_policy
from agentrl.trajectory.batch import RaggedBatch
from agentrl.workers.roles import policy_role
from tests.forked import ForkedPython
from tests.model.families import HYBRIDS, make_model
from tests.naming import naming
from tests.workers.conftest import BatchMaker, fsdp

pytestmark = pytest.mark.timeout(600)  # whichever test is first waits for all ranks
SHAPE = TinyShape(vocab=320, hidden=32, layers=2, heads=4, kv_heads=2, intermediate=66)
CORRECTED = {
    "weighed": {"rollout_is": "sequence", "rollout_is_batch_normalize": True, "reject": {"token": (0.3, 3.0)}},
    "interpolated": {"proximal": "interpolated", "rollout_is": "token", "reject": {"seq_mean_k3": 0.1}},
    "published": {"proximal": "published"},
}
"""Kinds of training with a correction of what the engine sampled."""
LOSS_OPTIONS = {
    "clip_cov": {"clip_cov_ratio": 0.2, "clip_cov_lb": 0.0},
    "kl_cov": {"kl_cov_ratio": 0.2},
    "dro": {"dro_beta": 0.5},
}
LOSSES = tuple(name for name in POLICY_LOSSES.names() if name != "vanilla")
"""Kinds of training with another loss than the others', two steps each; some choose tokens by the whole batch."""
REPLAYED, RECORDED = "replay", "R2"
"""Trainings of a mixture of experts through given experts, and through those that it chose before each update."""
BALANCED, ROUTERS = "balance", {"moe_aux_loss_coeff": 0.3, "moe_z_loss_coeff": 0.01}
"""Training of one with losses of its routers."""
MIXTURES = (REPLAYED, RECORDED, BALANCED)
ECHO = "echo"
"""Training that learns what tools answer, too."""
STATES = tuple(f"states of {family}" for family in HYBRIDS)
"""Trainings of models whose layers have states."""
PAIRS = ("dpo", "reward_model", "kto")
"""Trainings on pairs, and on judged conversations with mismatched ones."""
WEIGHED = "weighed sft"
"""Supervised training whose transcripts have weights."""
ARRANGEMENTS: dict[str, tuple[int, tuple[str, ...], dict[str, int]]] = {
    "one": (
        1,
        ("grpo", "ppo", "sft", WEIGHED, "lora", "bfloat16", *MIXTURES, *STATES, ECHO, *PAIRS, *CORRECTED, *LOSSES),
        {},
    ),
    "fsdp 2": (
        2,
        ("grpo", "ppo", "sft", WEIGHED, "bfloat16", *MIXTURES, *STATES, ECHO, *PAIRS, *CORRECTED, *LOSSES),
        {"budget": 60},
    ),
    "sequence 2": (2, ("grpo", "ppo", "sft", "lora", "compiled", *MIXTURES, ECHO, *PAIRS, *CORRECTED), {"sequence": 2}),
    "tensor 2": (2, ("grpo", "ppo", "sft"), {"tensor": 2}),
    "replicas 2 x shards 2": (4, ("grpo", "ppo"), {"shards": 2}),
    "data 2 x sequence 2": (4, ("grpo", "ppo", "sft"), {"sequence": 2, "budget": 30}),
}
"""Ranks, what is trained on them, and how they are arranged."""


def config_of(
    policy: Path, kind: str, *, sequence: int = 1, tensor: int = 1, shards: int = -1, budget: int
) -> Config | TuningConfig:
    """Muon and AdamW, one optimizer step an update or two, KL and entropy in the loss, with and without recomputing."""
    ppo = kind == "ppo"
    optim: dict[str, Any] = {"lr": 3e-4} if ppo else {"name": "muon", "lr": 1e-2, "adamw_lr": 1e-3}
    parallel = {"ulysses_sequence_parallel_size": sequence}
    sharding = {"fsdp_size": shards, "tensor_parallel_size": tensor}
    if kind in ("sft", WEIGHED):
        data = {"train_files": "none", "max_token_len_per_gpu": budget}
        sharded = {"path": str(policy), "fsdp_config": sharding}
        return SFTConfig.model_validate({"data": data, "model": sharded, "optim": optim, **parallel})
    if kind in PAIRS:
        data = {"train_files": "none", "max_token_len_per_gpu": budget}
        learning = {"path": str(policy), "fsdp_config": sharding}
        wanted = {"trains": kind} if kind == "reward_model" else {"loss": kind}
        tree: dict[str, Any] = {"data": data, "model": learning, "optim": optim, **wanted, **parallel}
        return PreferencesConfig.model_validate(tree)
    mode = "seq-mean-token-mean" if ppo else "token-mean"
    actor = {
        "loss_agg_mode": mode,
        "ppo_mini_batch_size": 2 if ppo or kind == RECORDED or kind in CORRECTED or kind in LOSSES else 4,
        "ppo_max_token_len_per_gpu": budget,
        "use_kl_loss": not ppo,
        "entropy_coeff": 0.01,
        "optim": optim,
        "fsdp_config": sharding,
        "use_torch_compile": kind == "compiled",
        "strategy_options": ROUTERS if kind == BALANCED else {},
        "router_replay": {"mode": {REPLAYED: "R3", RECORDED: "R2"}.get(kind, "disabled")},
        "observation_nll_coef": 0.1 if kind == ECHO else 0.0,
        "policy_loss": {"loss_mode": kind, "options": LOSS_OPTIONS.get(kind, {})} if kind in LOSSES else {},
        **parallel,
    }
    model = {"path": str(policy), "enable_gradient_checkpointing": ppo, "lora_rank": 4 if kind == "lora" else 0}
    model["dtype"] = "bfloat16" if kind == "bfloat16" else "float32"
    roles = {
        "model": model,
        "actor": actor,
        "ref": {"fsdp_config": sharding},
        "rollout": {"log_prob_max_token_len_per_gpu": 100},
    }
    critic = {
        "loss_agg_mode": mode,
        "ppo_max_token_len_per_gpu": budget + 30,
        "optim": optim,
        "cliprange_value": 100.0,
        "model": {"fsdp_config": sharding},
        **parallel,
    }
    algorithm = {"adv_estimator": "gae" if ppo else "grpo", "rollout_correction": CORRECTED.get(kind, {})}
    return Config.model_validate({"actor_rollout_ref": roles, "critic": critic, "algorithm": algorithm})


READ = {"one": {"grpo", "bfloat16", REPLAYED}, "fsdp 2": {"grpo", "bfloat16", REPLAYED}, "tensor 2": {"grpo"}}
"""Trainings that tests read which are no cases."""


def wanted(items: Iterable[pytest.Item]) -> dict[str, set[str]]:
    """Find the kinds of training, by arrangement, that the tests of this session need."""
    kinds = {name: set(READ.get(name, ())) for name in ARRANGEMENTS}
    for item in items:
        if isinstance(item, pytest.Function) and item.originalname in TESTS:
            name, kind = (str(item.callspec.params[key]) for key in ("name", "kind"))
            kinds[name].add(kind)
            kinds["one"].add("grpo" if kind == "compiled" else kind)
    return kinds


@pytest.fixture(scope="module")
def work(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory, make_batch: BatchMaker) -> Path:
    """What the ranks of the arrangements wrote. 8 sequences: shares differ in size and in number of micro-batches."""
    work = tmp_path_factory.mktemp("parallel")
    make_tiny_policy(work / "policy", seed=0, shape=SHAPE)
    batch = make_batch(prompts=4, n=2)
    last = batch.offsets[1:] - 1
    generator = torch.Generator().manual_seed(3)
    batch.rewards[last] = torch.randn(len(last), generator=generator)
    # The policy is random: about the same log-prob for every token of its vocabulary.
    batch = batch.with_fields(
        rollout_logprobs=0.5 * torch.randn(batch.num_tokens, generator=generator) - math.log(SHAPE.vocab)
    )
    chosen = torch.rand(batch.num_tokens, 2, 4, generator=generator).argsort(-1)[..., :2]
    batch = batch.with_fields(experts=chosen.to(torch.uint8))
    torch.save({item.name: getattr(batch, item.name) for item in fields(batch)}, work / "batch.pt")
    make_model("qwen3-moe", vocab_size=SHAPE.vocab).save_pretrained(work / "mixture")
    needed = wanted(request.session.items)
    for kind in needed["one"].intersection(STATES):
        make_model(kind.removeprefix("states of "), vocab_size=SHAPE.vocab).save_pretrained(start(work, kind))
    arrangements = {
        name: (
            ranks,
            {
                kind: config_of(start(work, kind), kind, **{"budget": 1000} | sizes).model_dump()
                for kind in kinds
                if kind in needed[name]
            },
        )
        for name, (ranks, kinds, sizes) in ARRANGEMENTS.items()
        if needed[name]
    }
    (work / "arrangements.json").write_text(json.dumps(arrangements))
    script = Path(__file__).with_name("arranged_ranks.py")
    ran = ForkedPython([script, work], environment={"GLOO_SOCKET_IFNAME": "lo"}).wait(580)
    assert ran.returncode == 0, ran.stderr[-8000:]
    return work


def start(work: Path, kind: str) -> Path:
    """The model that a training begins with."""
    return work / ("mixture" if kind in MIXTURES else kind if kind in STATES else "policy")


TESTS = (
    "test_losses_gradients_and_weights_are_those_of_one_process",
    "test_layers_with_a_state_learn_on_two_ranks_as_on_one",
)
CASES = [
    (name, kind)
    for name, (_, kinds, _) in ARRANGEMENTS.items()
    for kind in kinds
    if name != "one" and kind != "bfloat16" and kind not in STATES
]


@pytest.mark.slice(2, "matrix")
@pytest.mark.parametrize(("name", "kind"), CASES)
def test_losses_gradients_and_weights_are_those_of_one_process(work: Path, name: str, kind: str) -> None:
    """Over five steps, or two. Compiled ones are as those of one process that are not."""
    assert_same(work, name, kind)


@pytest.mark.slice(1, "matrix")
@pytest.mark.parametrize(("name", "kind"), [("fsdp 2", kind) for kind in STATES])
def test_layers_with_a_state_learn_on_two_ranks_as_on_one(work: Path, name: str, kind: str) -> None:
    assert_same(work, name, kind)


def assert_same(work: Path, name: str, kind: str) -> None:
    own, several = f"one-{'grpo' if kind == 'compiled' else kind}", f"{name}-{kind}"
    expected, found = (json.loads((work / f"{one}.json").read_text()) for one in (own, several))
    for one, other in zip(expected, found, strict=True):
        assert other == pytest.approx(one, rel=1e-5, abs=1e-6)
    before = load_file(start(work, kind) / "model.safetensors")
    whole, sharded = (load_file(work / f"{one}.safetensors") for one in (own, several))
    assert whole.keys() == sharded.keys()
    for key, tensor in whole.items():
        assert torch.allclose(sharded[key], tensor, rtol=0, atol=1e-5), key
    assert max((whole[key] - before[key]).abs().max() for key in whole) > 1e-3, "something was learnt"


def test_the_given_experts_are_replayed_on_several_ranks(work: Path) -> None:
    """Other ones would give other log-probs; the same metrics on several ranks alone do not show it."""
    config = Config.model_validate(json.loads((work / "arrangements.json").read_text())["one"][1][REPLAYED])
    batch = RaggedBatch(**torch.load(work / "batch.pt", weights_only=True))
    worker = policy_role(config, "cpu", 10).make()
    replayed, chosen = (worker.compute_log_probs(one)[1] for one in (batch, batch.with_fields(experts=None)))
    first = json.loads((work / "fsdp 2-replay.json").read_text())[0]
    assert first["actor/kl_loss"] > 0.1, "the reference chooses its experts itself"
    assert replayed["actor/entropy"] != pytest.approx(chosen["actor/entropy"], rel=1e-3)


def test_mixed_precision_is_that_of_one_process(work: Path) -> None:
    """In bfloat16, to its precision: ranks gather layers in it, and add gradients up in float32."""
    expected, found = (json.loads((work / f"{name}-bfloat16.json").read_text()) for name in ("one", "fsdp 2"))
    exact = json.loads((work / "one-grpo.json").read_text())
    for one, other in zip(expected, found, strict=True):
        assert other == pytest.approx(one, rel=2e-2, abs=5e-3)
    assert expected[0]["actor/grad_norm"] != pytest.approx(exact[0]["actor/grad_norm"], rel=1e-5), "it is another one"


@pytest.mark.parametrize("name", ["fsdp 2", "tensor 2"])
def test_checkpoint_and_export_of_many_ranks_are_whole(work: Path, name: str) -> None:
    weights = load_file(work / f"{name}-grpo.safetensors")
    tree = json.loads((work / "arrangements.json").read_text())["one"][1]["grpo"]
    worker = policy_role(Config.model_validate(tree), "cpu", 10).make()
    worker.load(work / f"{name}-grpo")
    exported = AutoModelForCausalLM.from_pretrained(work / f"{name}-grpo-export")
    assert exported.lm_head.weight is exported.model.embed_tokens.weight
    for key, tensor in fsdp(worker).named_tensors():
        assert torch.equal(tensor, weights[key]), key
        assert torch.equal(exported.state_dict()[key], weights[key]), key


def test_heads_that_cannot_be_handed_out() -> None:
    Parallel(sequence=4, tensor=2).check_heads(queries=8, keys=2)
    with naming(ConfigError, "tensor_parallel_size=4", "8 attention", "2 heads"):
        Parallel(tensor=4).check_heads(queries=8, keys=2)
    with pytest.raises(ConfigError, match=r"ulysses_sequence_parallel_size=8 must divide .* 8 .* / tensor_parallel_s"):
        Parallel(sequence=8, tensor=2).check_heads(queries=8, keys=2)


class TwoRanks:
    """Stands for a mesh: what is refused is refused before anything is split."""

    def size(self) -> int:
        return 2


@pytest.mark.parametrize(("family", "why"), [("qwen3-moe", "splits layers as .*packed_colwise"), ("gpt-oss", "empty")])
def test_models_that_cannot_be_split(family: str, why: str) -> None:
    with pytest.raises(ConfigError, match=f"tensor_parallel_size=2: transformers' plan for .* {why}"):
        split_layers(make_model(family), TwoRanks())  # type: ignore[arg-type]
