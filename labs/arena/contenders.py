"""The algorithms that are compared: a star around GRPO with PPO's clipped loss. Its rays are estimators, losses,
corrections of stale tokens, and overlapped rollouts as they are by default.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Literal

from agentrl.system.json_value import JSON

Ray = Literal["estimator", "loss", "correction", "overlap"]
ESTIMATOR = "algorithm.adv_estimator"
ACTOR = "actor_rollout_ref.actor"
LOSS = f"{ACTOR}.policy_loss.loss_mode"
AGGREGATION = f"{ACTOR}.loss_agg_mode"
CORRECTION = "algorithm.rollout_correction"
LOW, HIGH, DUAL = (f"{ACTOR}.clip_ratio_{bound}" for bound in ("low", "high", "c"))
# The quickstart's own bounds suit the clipped ratio alone.
UNBOUNDED: Mapping[str, JSON] = {LOW: None, HIGH: None}
SEVERAL_UPDATES: Mapping[str, JSON] = {f"{ACTOR}.ppo_mini_batch_size": 8}
"""Four updates a step: with one, most losses have the same gradient."""


CRITIC: Mapping[str, JSON] = {"critic__optim__lr": 5e-4}
"""The policy's own rate: with the default one, 1e-5, a critic learns nothing in 20 steps."""

CORRECTIONS: Mapping[str, Mapping[str, JSON]] = {
    "uncorrected": {"rollout_is": None},
    "token": {"rollout_is": "token"},
    "token or 0": {
        "rollout_is": "token",
        "rollout_is_lower": 0.5,
        "rollout_is_threshold": 5.0,
        "rollout_is_outside": "mask",
    },
    "sequence": {"rollout_is": "sequence"},
    "token, far sequences rejected": {"rollout_is": "token", "reject.seq_mean_k3": 0.01},
    "ratio to the engine": {"proximal": "rollout", "rollout_is": None},
    "interpolated": {"proximal": "interpolated", "rollout_is": None},
}
"""Keys of algorithm.rollout_correction, by the name of what they are."""


@dataclass(frozen=True, slots=True)
class Contender:
    """One algorithm, by the keys that choose it."""

    ray: Ray
    name: str
    keys: Mapping[str, JSON] = field(default_factory=dict, hash=False)


def _estimator(name: str, /, **keys: JSON) -> Contender:
    key = name.partition(" ")[0]
    return Contender("estimator", name, {ESTIMATOR: key, **{word.replace("__", "."): v for word, v in keys.items()}})


def _loss(name: str, keys: Mapping[str, JSON] | None = None) -> Contender:
    return Contender("loss", name, {**SEVERAL_UPDATES, LOSS: name, **(keys or {})})


def _corrections() -> Iterator[Contender]:
    """Yield GRPO with batches begun as far ahead as the bound of staleness lets them be, corrected in each way."""
    for bound in (0, 1, 2, 4):
        own = {"async_training.max_staleness": bound, "async_training.depth": bound, "trainer.save_freq": 20}
        stale = own if bound else {}
        ways = CORRECTIONS if bound else {"uncorrected": CORRECTIONS["uncorrected"]}
        for name, keys in ways.items():
            corrected = {f"{CORRECTION}.{key}": value for key, value in keys.items()}
            yield Contender("correction", f"staleness {bound}, {name}", {**SEVERAL_UPDATES, **stale, **corrected})


def _overlapped() -> Iterator[Contender]:
    """Yield GRPO as the quickstart has it, in turn and overlapped, with the default correction and without any."""
    yield Contender("overlap", "in turn")
    for bound in (1, 2):
        own: dict[str, JSON] = {"async_training.max_staleness": bound, "trainer.save_freq": 20}
        yield Contender("overlap", f"overlapped {bound}", own)
        yield Contender("overlap", f"overlapped {bound}, uncorrected", {**own, f"{CORRECTION}.rollout_is": None})


CONTENDERS = (
    _estimator("grpo"),
    _estimator("grpo (no std)", algorithm__norm_adv_by_std_in_grpo=False),
    _estimator("rloo"),
    _estimator("opo"),
    _estimator("gpg"),
    _estimator("grpo_passk"),
    _estimator("online_dpo"),
    _estimator("rae"),
    _estimator(
        "rlsd",
        distillation__teacher__path="policy",
        distillation__teacher__privileged="The answer is {ground_truth}.",
    ),
    _estimator("maxrl"),
    _estimator("grpo_turn"),
    _estimator("gigpo"),
    _estimator("gdpo"),
    _estimator("reinforce_plus_plus_baseline"),
    _estimator("optimal_token_baseline"),
    _estimator("reinforce_plus_plus"),
    _estimator("remax"),
    _estimator("gae", **CRITIC),
    _estimator("bi_level_gae", **CRITIC),
    _estimator("decoupled_gae", **CRITIC),
    _loss("vanilla"),
    _loss("gspo", {LOW: 3e-4, HIGH: 4e-4, AGGREGATION: "seq-mean-token-mean"}),
    _loss("cispo", {LOW: 1.0, HIGH: 0.28}),
    _loss("dppo_tv", {LOW: 0.2, HIGH: 0.2, DUAL: 20.0}),
    _loss("dppo_kl", {LOW: 0.05, HIGH: 0.05, DUAL: 20.0}),
    _loss("sapo", {**UNBOUNDED, AGGREGATION: "seq-mean-token-mean"}),
    _loss("geo_mean", {LOW: 0.4, HIGH: 0.4, AGGREGATION: "seq-mean-token-mean"}),
    _loss("clip_cov"),
    _loss("kl_cov", UNBOUNDED),
    _loss("m2po", UNBOUNDED),
    _loss("gpg", UNBOUNDED),
    _loss("topr", UNBOUNDED),
    _loss("dro", {**UNBOUNDED, f"{ACTOR}.policy_loss.options.dro_beta": 0.1}),
    *_corrections(),
    *_overlapped(),
)
