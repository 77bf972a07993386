"""AReaL's names of the keys of asynchronous training, refused with the page that has ours.

The names are of AReaL's `areal/api/cli_args.py`, and of the two keys that its older releases have in the place of
`actor.rejection_sampling`.
"""

from __future__ import annotations

from collections.abc import Mapping

from agentrl.config.dialect import Dialect, Reading
from agentrl.config.rules import shown
from agentrl.config.section import Section
from agentrl.config.sections.training import Config
from agentrl.system.json_value import JSON

OURS = {
    "rollout.max_head_offpolicyness": "async_training.max_staleness and async_training.depth",
    "rollout.consumer_batch_size": "data.train_batch_size",
    "rollout.max_concurrent_rollouts": "actor_rollout_ref.rollout.agent.max_concurrent",
    **dict.fromkeys(
        (
            "actor.use_decoupled_loss",
            "actor.recompute_logprob",
            "actor.prox_logp_method",
            "actor.behave_imp_weight_mode",
            "actor.behave_imp_weight_cap",
            *(f"actor.rejection_sampling.{name}" for name in ("level", "action", "metric", "agg", "upper", "lower")),
        ),
        "algorithm.rollout_correction.*",
    ),
}


def refuse_areal(unknown: Mapping[str, JSON], values: Mapping[str, JSON], schema: type[Section]) -> Reading:
    """Refuse AReaL's keys in a training's config."""
    found = [key for key in unknown if key in OURS and schema is Config]
    return Reading(
        faults=[
            f"{key}={shown(unknown[key])} is a key of AReaL; expected {OURS[key]} (docs/async.md, From AReaL, says "
            "which values)"
            for key in found
        ],
        strangers=[key for key in unknown if key not in found],
    )


AREAL = Dialect(spelled=refuse_areal)
