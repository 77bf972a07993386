"""AReaL's names of the keys of asynchronous training, read as ours.

Names and meanings follow AReaL's `areal/api/cli_args.py`, and the two keys that its older releases have in the place of
`actor.rejection_sampling`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

from agentrl.config.dialect import Dialect, Reading
from agentrl.config.rules import shown
from agentrl.config.section import Section
from agentrl.config.sections.training import Config
from agentrl.errors import ConfigError
from agentrl.system.json_value import JSON

ASYNC, CORRECTION = "async_training", "algorithm.rollout_correction"
REJECTION = "actor.rejection_sampling"
UNBOUNDED = 1e9
"""The bound of weights that AReaL leaves without one."""
Values = Mapping[str, JSON]
"""Values by dotted path."""


def _staleness(found: Values) -> dict[str, JSON]:
    """Begin as many batches ahead as the bound allows, as AReaL does."""
    bound = found["rollout.max_head_offpolicyness"]
    return {f"{ASYNC}.max_staleness": bound, **({f"{ASYNC}.depth": bound} if bound else {})}


def _batch(found: Values) -> dict[str, JSON]:
    return {"data.train_batch_size": found["rollout.consumer_batch_size"]}


def _concurrent(found: Values) -> dict[str, JSON]:
    raise ConfigError(
        f"rollout.max_concurrent_rollouts={shown(found['rollout.max_concurrent_rollouts'])} counts prompts; expected "
        "actor_rollout_ref.rollout.agent.max_concurrent, which counts trajectories: that many times rollout.n"
    )


OTHER_WAY = (
    ". Its kl_k3 is that of the inverted ratio, 1 / r - 1 + log r, and ours is r - 1 - log r: the bound is stricter on "
    "ratios above 1 here, and looser below"
)
"""The note on the one criterion that differs."""


def _proximal(found: Values) -> dict[str, JSON]:
    method = found.get("actor.prox_logp_method", "recompute")
    proximal = {"recompute": "recomputed", "loglinear": "interpolated"}.get(str(method))
    if proximal is None:
        raise ConfigError(f"actor.prox_logp_method={shown(method)}: expected recompute or loglinear")
    if not found.get("actor.use_decoupled_loss", False):
        is_recomputed = bool(found.get("actor.recompute_logprob", False))
        return {
            f"{CORRECTION}.proximal": "recomputed" if is_recomputed else "rollout",
            f"{CORRECTION}.rollout_is": None,
        }
    return {f"{CORRECTION}.proximal": proximal, **_weights(found)}


def _weights(found: Values) -> dict[str, JSON]:
    """Weigh tokens by the ratio of the proximal policy to the policy that sampled, bounded or rejected as asked."""
    own = _rejection(found)
    if own is None:
        return _weighed("token", UNBOUNDED, None, "truncate")
    level, metric, aggregation = (str(own.get(name)) for name in ("level", "metric", "agg"))
    if metric == "ratio":
        kinds = {"token": "token", "sequence mean": "geometric", "sequence sum": "sequence"}
        kind = kinds.get(level if level == "token" else f"{level} {aggregation}")
        if kind is not None:
            return _weighed(kind, own["upper"], own["lower"], "mask" if own["action"] == "mask" else "truncate")
    elif metric in ("kl_k2", "kl_k3") and own["action"] == "mask" and own["lower"] is None:
        name = "token" if level == "token" else f"seq_{aggregation}"
        criterion: dict[str, JSON] = {f"{name}_{metric.removeprefix('kl_')}": own["upper"]}
        return {**_weighed("token", UNBOUNDED, None, "truncate"), f"{CORRECTION}.reject": criterion}
    raise ConfigError(
        f"{REJECTION} with level={level}, metric={metric}, agg={aggregation}, action={own['action']} is not here; "
        "expected metric=ratio by token or by a sequence's mean or sum, or metric=kl_k2 or kl_k3 with action=mask and "
        "no lower bound"
    )


def _rejection(found: Values) -> dict[str, JSON] | None:
    """Return the section of rejection with its defaults; None where nothing is bounded."""
    prefix = f"{REJECTION}."
    given = {key.removeprefix(prefix): value for key, value in found.items() if key.startswith(prefix)}
    mode, cap = found.get("actor.behave_imp_weight_mode"), found.get("actor.behave_imp_weight_cap")
    if mode is not None or cap is not None:
        level, _, action = str(mode or "token_mask").partition("_")
        given = {"level": level, "action": action, **({} if cap is None else {"upper": cap}), **given}
    default: dict[str, JSON] = {
        "level": "token",
        "action": "mask",
        "metric": "ratio",
        "agg": "mean",
        "upper": 5.0,
        "lower": None,
    }
    return None if not given or mode == "disabled" else default | given


def _weighed(kind: str, upper: JSON, lower: JSON, outside: str) -> dict[str, JSON]:
    bounds = {
        "rollout_is": kind,
        "rollout_is_threshold": upper,
        "rollout_is_lower": lower,
        "rollout_is_outside": outside,
    }
    return {f"{CORRECTION}.{name}": value for name, value in bounds.items()}


CORRECTED = (
    "actor.use_decoupled_loss",
    "actor.recompute_logprob",
    "actor.prox_logp_method",
    "actor.behave_imp_weight_mode",
    "actor.behave_imp_weight_cap",
    *(f"{REJECTION}.{name}" for name in ("level", "action", "metric", "agg", "upper", "lower")),
)
GROUPS: Mapping[tuple[str, ...], Callable[[Values], dict[str, JSON]]] = {
    ("rollout.max_head_offpolicyness",): _staleness,
    ("rollout.consumer_batch_size",): _batch,
    ("rollout.max_concurrent_rollouts",): _concurrent,
    CORRECTED: _proximal,
}
"""Keys that are read together, and the function that makes our keys from the given ones."""


def read_areal(unknown: Values, values: Values, schema: type[Section]) -> Reading:
    """Replace AReaL's keys in a training's config by ours; a line for each group of keys reports the translation."""
    reading = Reading(strangers=list(unknown))
    for names, make in GROUPS.items():
        found = {name: unknown[name] for name in names if name in unknown}
        if not found or schema is not Config:
            continue
        reading.strangers = [name for name in reading.strangers if name not in found]
        said = ", ".join(f"{key}={shown(value)}" for key, value in found.items())
        try:
            ours = make(found)
        except ConfigError as error:
            reading.faults.append(str(error))
            continue
        if both := [key for key in ours if key in values]:
            reading.faults.append(f"{said}, AReaL's names, and {', '.join(both)} say the same; keep one of them")
            continue
        here = ", ".join(f"{k}={shown(v)}" for k, v in ours.items())
        note = OTHER_WAY if "kl_k3" in found.values() else ""
        reading.said.append(f"{said}, in AReaL's names, is read as {here}{note}")
        reading.values |= ours
    return reading


AREAL = Dialect(spelled=read_areal)
