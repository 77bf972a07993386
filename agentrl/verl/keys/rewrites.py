"""Translations of verl's values that need more than another name."""

from __future__ import annotations

import fnmatch
import math
from collections.abc import Callable, Mapping
from pathlib import Path

from agentrl.config.dialect import DIALECT
from agentrl.config.installed import is_installed
from agentrl.config.registries import ADVANTAGE_ESTIMATORS, LOGGERS, POLICY_LOSSES, REWARD_MANAGERS
from agentrl.system.json_value import JSON, as_object
from agentrl.system.registry import Registry
from agentrl.system.targets import is_target
from agentrl.verl.keys.entries import VERL_0_2, Refusal, Values

Translate = Callable[[JSON, Values], dict[str, JSON]]
MODEL, ACTOR, ROLLOUT = "actor_rollout_ref.model", "actor_rollout_ref.actor", "actor_rollout_ref.rollout"
CORRECTION = "algorithm.rollout_correction"
MEGATRON = f"{ACTOR}.megatron.override_transformer_config"
REF, TURNS = "actor_rollout_ref.ref", f"{ROLLOUT}.multi_turn"
WAITS_FOR_ALGORITHMS = "this algorithm is not part of agentrl yet"
ASYNCHRONOUS = "it is a part of verl's asynchronous trainers that is not part of agentrl (docs/async.md says what is)"
PROXIMAL = (
    "true takes the ratio to the engine's log-probs (loss_type=reinforce is loss_mode=gpg). With false the fully "
    "asynchronous trainer takes it to the weights of the last publication, all others to those before the update"
)
FULLY_ASYNC = (
    "max_staleness = ceil(trigger_parameter_sync_step * (1 + staleness_threshold)) - 1, as is depth; a step trains on "
    "ppo_mini_batch_size * require_batches prompts, and every trigger_parameter_sync_step-th version is published"
)
V1 = "trainer.v1"
V1_MODES = (
    "where it is not sync, max_staleness = sampler.max_off_policy_threshold - 1, and depth is the mode's "
    "num_warmup_batches; with 0 of these rollouts and updates take turns. Stale groups are waited for, never dropped. "
    "With separate_async the engine's memory is not freed"
)
SAVES = 50
"""Steps between two checkpoints of an asynchronous run whose command sets no interval."""
LARGE = 1_000_000


def number(values: Values, key: str, default: int) -> int:
    """Return a whole number of the config; `default` where the key is absent or null. Raises Refusal for others."""
    value = values.get(key)
    return default if value is None else whole(value, key)


def whole(value: JSON, key: str = "", least: float = -math.inf) -> int:
    """Return a value that is a whole number of at least `least`. Raises Refusal; `key` says whose value it is."""
    if isinstance(value, int | float) and not isinstance(value, bool) and value >= least and value % 1 == 0:
        return int(value)
    bound = "" if least == -math.inf else f" of at least {least}"
    raise Refusal(f"expected a whole number{bound}" + (f" for {key}, found {value!r}" if key else ""))


def real(value: JSON) -> float:
    """Return a value that is a finite number. Raises Refusal."""
    if isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value):
        return value
    raise Refusal("expected a number")


def is_left_out(translate: Translate) -> Callable[[JSON, Values], bool]:
    """Make a function that checks whether a value asks for something and is translated to nothing."""
    return lambda value, values: bool(value) and not translate(value, values)


def same_unless_null(key: str) -> Translate:
    """Translate to the same key; null keeps our default."""
    return lambda value, _: {} if value is None else {key: value}


def named(registry: Registry, key: str, others: Mapping[str, str] = {}) -> Translate:
    """Translate the name of an algorithm; a name in no registry of ours is refused."""

    def translate(value: JSON, _: Values) -> dict[str, JSON]:
        name = others.get(str(value), str(value))
        if name not in registry.names() and not is_target(name):
            raise Refusal(f"{WAITS_FOR_ALGORITHMS} (there are {', '.join(registry.names())})")
        return {key: name}

    return translate


estimator = named(
    ADVANTAGE_ESTIMATORS, "algorithm.adv_estimator", {"grpo_vectorized": "grpo", "rloo_vectorized": "rloo"}
)


def policy_loss(value: JSON, values: Values) -> dict[str, JSON]:
    """Translate the loss; verl's bypass mode has two of its own, for any name."""
    key = f"{ACTOR}.policy_loss.loss_mode"
    if not is_bypassed(values):
        return named(POLICY_LOSSES, key, {"clip-cov": "clip_cov", "kl-cov": "kl_cov"})(value, values)
    if value not in (None, "vanilla", "bypass_mode"):
        raise Refusal(
            f"with {CORRECTION}.bypass_mode, the default of its asynchronous trainers, verl takes the loss of its "
            "loss_type whatever loss_mode says; leave loss_mode out, or set bypass_mode=false"
        )
    return {key: "gpg" if values.get(f"{CORRECTION}.loss_type") == "reinforce" else "vanilla"}


OWN_MEAN = ("gspo", "sapo", "geo_mean")
"""Losses that verl averages by sequence, at any loss_agg_mode."""


def aggregation(value: JSON, values: Values) -> dict[str, JSON]:
    """Translate the mean over tokens and sequences, which some of verl's losses have written into them."""
    has_own = values.get(f"{ACTOR}.policy_loss.loss_mode") in OWN_MEAN
    return {f"{ACTOR}.loss_agg_mode": "seq-mean-token-mean" if has_own else value}


def is_weighed(values: Values) -> bool:
    """Check whether verl multiplies the loss by importance weights: PPO's ratio replaces them in bypass mode."""
    bypass = is_bypassed(values) and values.get(f"{CORRECTION}.loss_type") != "reinforce"
    return bool(values.get(f"{CORRECTION}.rollout_is")) and not bypass


def importance(value: JSON, values: Values) -> dict[str, JSON]:
    """Translate the importance weight."""
    if not is_weighed(values):
        return {}
    return {f"{CORRECTION}.rollout_is": value}


def importance_bounds(value: JSON, values: Values) -> dict[str, JSON]:
    """Translate the bounds of the importance weights: a single bound truncates, "lower_upper" masks weights outside."""
    if not is_weighed(values) or value is None:
        return {}
    lower, upper = bounds_of(f"{CORRECTION}.rollout_is_threshold", value)
    found: dict[str, JSON] = {f"{CORRECTION}.rollout_is_threshold": upper}
    if lower is not None:
        found |= {f"{CORRECTION}.rollout_is_lower": lower, f"{CORRECTION}.rollout_is_outside": "mask"}
    return found


BOUNDS = ("rollout_is_threshold", "rollout_is_lower", "rollout_is_outside")
"""Names of our keys with the bounds of the weights."""


def first_importance(value: JSON, values: Values) -> dict[str, JSON]:
    """Translate the importance weights of verl 0.6.0, in which `rollout_is` says whether the loss has them."""
    first = "algorithm.rollout_is"
    upper, lower = values.get(f"{first}_threshold"), values.get(f"{first}_threshold_lower")
    level, mode = values.get(f"{first}_level", "token"), values.get(f"{first}_mode", "truncate")
    if not value or upper is None:
        return {}
    if not isinstance(upper, int | float) or upper <= 0:
        raise Refusal(f"{first}_threshold={upper}: expected a number above 0")
    if mode not in ("truncate", "mask"):
        raise Refusal(f"{first}_mode={mode}: the modes are truncate and mask")
    bounds: list[JSON] = [upper, None, mode]
    if mode == "mask":
        bounds[1] = 1 / upper if lower is None else lower
    veto = values.get(f"{first}_veto_threshold", 1e-4)
    rejected: dict[str, JSON] = {} if veto is None else {f"{CORRECTION}.reject": {"veto": veto}}
    named = {f"{CORRECTION}.{name}": bound for name, bound in zip(BOUNDS, bounds, strict=True)}
    return {f"{CORRECTION}.rollout_is": level, **named, **rejected}


def importance_mean(value: JSON, values: Values) -> dict[str, JSON]:
    """Translate the division by the mean weight, where the weights of the batch are known beforehand."""
    if not value or not is_weighed(values):
        return {}
    if is_bypassed(values):
        raise Refusal("in bypass mode verl divides by the mean of each micro-batch, so that their size would count")
    return {f"{CORRECTION}.rollout_is_batch_normalize": value}


REJECTIONS = {"token_k1": "token", "seq_sum_k1": "sequence", "seq_mean_k1": "geometric"}
"""Ratio bounds by verl's names, which are of the engine's probability to the trainer's."""
SAME_REJECTIONS = tuple(
    f"{level}_{kind}" for level in ("token", "seq_sum", "seq_mean", "seq_max") for kind in ("k2", "k3")
)


def rejection(value: JSON, values: Values) -> dict[str, JSON]:
    """Translate verl's criteria, a list with commas, and their thresholds, one for all or one each."""
    if not value:
        return {}
    key = f"{CORRECTION}.rollout_rs_threshold"
    found: dict[str, JSON] = {}
    for name, text in thresholds(str(value), values.get(key), key):
        lower, upper = bounds_of(key, text)
        if name in REJECTIONS:
            found[REJECTIONS[name]] = [1 / upper, upper if lower is None else 1 / lower]
        elif name in REJECTIONS.values():  # of earlier releases, which bound the ratio itself
            least = values.get(f"{key}_lower")
            found[name] = [least if isinstance(least, int | float) and least else 1 / upper, upper]
        elif name in SAME_REJECTIONS and lower is None:
            found[name] = upper
        elif name in SAME_REJECTIONS:
            raise Refusal(f"{key}: {name} has one bound, found {text}")
        else:
            raise Refusal(f"there is no criterion {name}; there are {', '.join((*REJECTIONS, *SAME_REJECTIONS))}")
    return {f"{CORRECTION}.reject": found}


def thresholds(criteria: str, given: JSON, key: str) -> list[tuple[str, str]]:
    """Pair the criteria, a list with commas, with their thresholds. Raises Refusal where the numbers differ."""
    names = list(dict.fromkeys(name.strip() for name in criteria.split(",") if name.strip()))
    texts = [text.strip() for text in str(given).split(",")] if given is not None else []
    if len(texts) not in (1, len(names)):
        raise Refusal(f"{key} must have one threshold, or one for each of {', '.join(names)}; found {given}")
    return list(zip(names, texts * len(names) if len(texts) == 1 else texts, strict=True))


def bounds_of(key: str, value: JSON) -> tuple[float | None, float]:
    """Read a bound, or "lower_upper". Raises Refusal for another form."""
    lower, found, upper = str(value).rpartition("_")
    try:
        bounds = (float(lower) if found else None, float(upper))
    except ValueError:
        raise Refusal(f"{key}={value}: expected a number above 0, or lower_upper as in 0.5_2.0") from None
    if min(bound for bound in bounds if bound is not None) <= 0 or (bounds[0] or 0) > bounds[1]:
        raise Refusal(f"{key}={value}: bounds must be above 0, the lower one first")
    return bounds


def truncated_weights(value: JSON, _: Values) -> dict[str, JSON]:
    """Translate the cap of the token's weight, by its name in verl's first releases with it."""
    if value is None or real(value) <= 0:
        return {}
    return {f"{CORRECTION}.rollout_is": "token", f"{CORRECTION}.rollout_is_threshold": value}


def option_of(loss_mode: str, name: str) -> Translate:
    """Make an option that only one loss reads an option of that loss; note it where another one is chosen."""

    def translate(value: JSON, values: Values) -> dict[str, JSON]:
        if value is None or str(values.get(f"{ACTOR}.policy_loss.loss_mode")).replace("-", "_") != loss_mode:
            return {}
        if not POLICY_LOSSES.is_built_in(loss_mode):
            raise Refusal(WAITS_FOR_ALGORITHMS)
        return {f"{ACTOR}.policy_loss.options": {name: value}}

    return translate


def strategy(key: str) -> Translate:
    """Keep FSDP's names; models of all other backends are sharded by the default."""
    return lambda value, _: {key: value} if value in ("fsdp", "fsdp2") else {}


def kl_penalty(value: JSON, _: Values) -> dict[str, JSON]:
    """Translate the estimator of the KL in the reward, where a + changes nothing."""
    return {"algorithm.kl_penalty": value.removesuffix("+") if isinstance(value, str) else value}


MINI_BATCHES = (
    "verl counts prompts; Search-R1's fork counts trajectories, as the critic of releases up to 0.3 does. Mini-batches "
    "hold whole prompts here: as many optimizer steps a batch as there"
)
ONE_EPOCH = (
    "verl 0.2 and Search-R1's fork go over a batch once, whatever ppo_epochs says; 0.1 and 0.3 read it. Set 1, or "
    "algorithm.use_kl_in_reward for the code of 0.9.1, which reads it"
)
OLD_MICRO_BATCHES = (
    "a key of verl's first releases, which subtract the KL divergence from the reward unless actor.use_kl_loss=true, "
    "and have entropy_coeff=0.001; other keys here are of later ones, which do neither. Say which: "
    "algorithm.use_kl_in_reward=true or false, with entropy_coeff, or name the micro-batch ..._per_gpu"
)


def is_of_first_releases(values: Values) -> bool:
    """Check whether a config is written for verl 0.2 or a fork of it."""
    return values.get(DIALECT) == VERL_0_2


def is_search_r1s(values: Values) -> bool:
    """Check whether a config is one of Search-R1's fork, whose YAML alone has this key."""
    return f"{ROLLOUT}.n_agent" in values


def first_releases(values: Values) -> str:
    """Write the differences of a command of verl's first releases, or of Search-R1's fork of one."""
    fork = is_search_r1s(values)
    name = "Search-R1's fork of verl" if fork else "verl 0.2"
    is_on = kl_in_reward(values.get("algorithm.use_kl_in_reward"), values)["algorithm.use_kl_in_reward"]
    coef = f"kl_coef={values.get('algorithm.kl_ctrl.kl_coef')}"
    switch = "sets that alone" if fork else "in the command asks for the defaults of 0.9.1"
    return (
        f"the defaults of {name} hold, not those of verl 0.9.1: the KL divergence from the reference is subtracted "
        f"from the reward unless actor.use_kl_loss=true (here it {f'is, with {coef}' if is_on else 'is not'}), "
        f"entropy_coeff is 0.001 unless set (here {values.get(f'{ACTOR}.entropy_coeff')}), clip_ratio is both bounds, "
        f"without a dual clip, and validation runs once more at the end. algorithm.use_kl_in_reward=true or false "
        f"{switch}"
    )


def kl_in_reward(value: JSON, values: Values) -> dict[str, JSON]:
    """Translate whether the KL is in the reward; null means false, or the default of a release without the key."""
    if value is None:
        in_loss, coef = values.get(f"{ACTOR}.use_kl_loss"), values.get("algorithm.kl_ctrl.kl_coef")
        value = is_of_first_releases(values) and not in_loss and bool(coef)
    return {"algorithm.use_kl_in_reward": value}


def is_without_kl(value: JSON, values: Values) -> bool:
    """Check whether a coefficient of the KL in the reward stands where there is no KL in the reward."""
    return (
        bool(value) and not kl_in_reward(values.get("algorithm.use_kl_in_reward"), values)["algorithm.use_kl_in_reward"]
    )


def old_micro_batch(value: JSON, values: Values) -> dict[str, JSON]:
    """Note the size of a micro-batch by its first name, where the command's release is clear."""
    said = values.get("algorithm.use_kl_in_reward") is not None
    if value is not None and not said and not is_of_first_releases(values):
        raise Refusal(OLD_MICRO_BATCHES)
    return {}


def group_size(value: JSON, values: Values) -> dict[str, JSON]:
    """Translate the trajectories of a prompt."""
    if other := next((key for key in (f"{ROLLOUT}.n_agent", "env.rollout.n") if values.get(key) is not None), None):
        if value != 1:
            raise Refusal(f"{other}={values[other]} trajectories of a prompt begin, and the fork fails with n above 1")
        return {}
    return {f"{ROLLOUT}.n": value}


def epochs(key: str) -> Translate:
    """Translate the passes over a batch; verl 0.2 makes one."""

    def translate(value: JSON, values: Values) -> dict[str, JSON]:
        if is_of_first_releases(values) and value != 1:
            raise Refusal(ONE_EPOCH)
        return {key: value}

    return translate


def mini_batch(role: str) -> Translate:
    """Translate the size of a mini-batch to prompts, where the role counts trajectories."""
    key = f"{role}.ppo_mini_batch_size"

    def translate(value: JSON, values: Values) -> dict[str, JSON]:
        each, prompts = 1, number(values, "data.train_batch_size", 1024)
        if "env.rollout.n" in values and isinstance(value, int) and value > prompts:
            if role == "critic":
                return {key: prompts}
            raise Refusal(
                "verl-agent counts the steps of episodes, and here a mini-batch holds whole prompts with all their "
                f"episodes: write a divisor of data.train_batch_size={prompts}; about {value} steps are "
                f"{value} / (env.rollout.n={values['env.rollout.n']} x the steps of an episode) prompts"
            )
        if is_search_r1s(values):
            each = number(values, f"{ROLLOUT}.n_agent", 1)
        elif is_of_first_releases(values) and role == "critic":
            each = number(values, f"{ROLLOUT}.n", 1)
        if each == 1 or not isinstance(value, int) or value < 1:
            return {key: value}
        steps, rest = divmod(prompts * each, value)
        size = -(-prompts // steps) if steps else 0
        if rest or not size or -(-prompts // size) != steps:
            raise Refusal(
                f"it counts trajectories there, and {prompts} prompts x {each} trajectories do not split into "
                "mini-batches of that many and of whole prompts: set a divisor of "
                f"data.train_batch_size={prompts}, times {each}"
            )
        return {key: size}

    return translate


def clip_ratio(value: JSON, values: Values) -> dict[str, JSON]:
    """Translate the bound that holds where verl's other two are null."""
    sides = (f"{ACTOR}.clip_ratio_low", f"{ACTOR}.clip_ratio_high")
    return {side: value for side in sides if values.get(side) is None}


def is_no_bound(value: JSON, values: Values) -> bool:
    """Check whether a bound of the ratio stands next to two others."""
    sides = [values.get(f"{ACTOR}.clip_ratio_{side}") for side in ("low", "high")]
    return value is not None and None not in sides and sides != [value, value]


def reward_manager(value: JSON, values: Values) -> dict[str, JSON]:
    """Translate the reward manager."""
    if value is None:
        return {}
    name = str(value)
    if name == "episode" and "env.env_name" in values:
        return {}
    if name not in REWARD_MANAGERS.names() and not is_target(name):
        raise Refusal(f"{WAITS_FOR_ALGORITHMS} (there are {', '.join(REWARD_MANAGERS.names())})")
    paths = ("custom_reward_function.path", "reward.custom_reward_function.path")
    if name == "batch" and any(values.get(path) for path in paths):
        raise Refusal("a function that scores a whole batch is not called here; one that scores a response is (naive)")
    return {"reward_model.reward_manager": name}


def is_fully_async(values: Values) -> bool:
    """Check whether a config is one of verl's fully asynchronous trainer."""
    return "async_training.staleness_threshold" in values


def v1_mode(values: Values) -> str:
    """Return the mode of verl's newer trainer, by which rollouts and updates overlap or, with `sync`, take turns."""
    mode = values.get(f"{V1}.trainer_mode")
    return "sync" if mode is None or values.get("trainer.use_v1") is False else str(mode)


def v1_ahead(values: Values) -> tuple[int, int]:
    """Return the bound of staleness and the depth of verl's newer trainer. Raises Refusal.

    A group that is begun in step b is trained on in step s unless s - b + 1 is above the threshold. The weights of
    these steps are s - b versions apart.
    """
    mode, warm_up = v1_mode(values), 0
    if mode not in ("sync", "colocate_async", "separate_async"):
        raise Refusal(f"expected sync, colocate_async or separate_async, found {mode!r}")
    if mode != "sync":
        warm_up = number(values, f"{V1}.{mode}.num_warmup_batches", 1)
    threshold = number(values, f"{V1}.sampler.max_off_policy_threshold", 8)
    if warm_up < 0 or threshold < 1:
        raise Refusal(f"expected num_warmup_batches >= 0 and max_off_policy_threshold >= 1: {warm_up} and {threshold}")
    return (threshold - 1, min(warm_up, threshold - 1)) if warm_up else (0, 0)


def v1_trainer(value: JSON, values: Values) -> dict[str, JSON]:
    """Translate the mode of verl's newer trainer, and its bounds of staleness."""
    bound, depth = v1_ahead(values)
    parts = number(values, f"{V1}.separate_async.parameter_sync_step", 4)
    batch, mini = number(values, "data.train_batch_size", 1024), number(values, f"{ACTOR}.ppo_mini_batch_size", 256)
    if v1_mode(values) == "separate_async" and batch != parts * mini:
        raise Refusal(
            "a step has parameter_sync_step updates of ppo_mini_batch_size prompts, so data.train_batch_size should be "
            f"{parts * mini}, not {batch}"
        )
    ours = overlapping(bound, 1, depth)
    if v1_mode(values) == "colocate_async":
        ours.pop(f"{ROLLOUT}.free_cache_engine", None)  # engine and policy share the devices, as verl's key says
    return ours


def overlapping(bound: int, every: int, depth: int | None = None) -> dict[str, JSON]:
    """Return our keys of asynchronous training with an engine that never stands still.

    `depth`: the bound, where it is not given.
    """
    if bound == 0:
        return {}
    return {
        "async_training.max_staleness": bound,
        "async_training.depth": depth or bound,
        "async_training.publish_every": every,
        f"{ROLLOUT}.free_cache_engine": False,
    }


def staleness_of(values: Values) -> int:
    """Return how many versions old a token may be in verl's fully asynchronous trainer. Raises Refusal."""
    threshold = values.get("async_training.staleness_threshold", 0.1)
    if isinstance(threshold, bool) or not isinstance(threshold, int | float) or not 0 <= threshold < math.inf:
        raise Refusal(f"expected a number of at least 0 for async_training.staleness_threshold, found {threshold!r}")
    return math.ceil(round(period_of(values) * (1 + threshold), 9)) - 1


def fully_async(value: JSON, values: Values) -> dict[str, JSON]:
    """Translate the bounds of staleness in verl's fully asynchronous trainer, counted in parts of a publication."""
    return {"data.train_batch_size": batch_of(values), **overlapping(staleness_of(values), period_of(values))}


def period_of(values: Values) -> int:
    """Return the steps from one publication to the next: as in verl's fully asynchronous trainer, else 1."""
    return number(values, "async_training.trigger_parameter_sync_step", 4) if is_fully_async(values) else 1


def batch_of(values: Values) -> int:
    """Return how many prompts a step of verl's fully asynchronous trainer trains on."""
    mini = number(values, f"{ACTOR}.ppo_mini_batch_size", 256)
    return mini * number(values, "async_training.require_batches", 1)


def separate_engine(value: JSON, values: Values) -> dict[str, JSON]:
    """Translate an engine apart from the policy: without keys of the fully asynchronous trainer it is one step off."""
    return {} if value is not False or is_fully_async(values) else overlapping(1, 1)


def partial_rollout(value: JSON, values: Values) -> dict[str, JSON]:
    """Note whether trajectories continue under the next weights; with a threshold of 0 no trajectory does."""
    if value is False and is_fully_async(values) and staleness_of(values) >= period_of(values):
        raise Refusal(
            "trajectories that a publication meets go on under the next weights, and are not waited for; "
            "async_training.staleness_threshold=0 lets it meet none"
        )
    return {}


def rollout_steps(value: JSON, values: Values) -> dict[str, JSON]:
    """Translate the prompts of a whole run into steps; prompts too few for another step are left."""
    if value is None or not is_fully_async(values):
        return {}
    return {"trainer.total_training_steps": max(1, whole(value) // max(1, batch_of(values)))}


def validations(value: JSON, values: Values) -> dict[str, JSON]:
    """Translate a number of publications into steps; the earlier name of the key holds where it is given, too."""
    is_early = "async_training.use_rollout_log_probs" in values  # of releases that read rollout.test_freq alone
    other = values.get("rollout.test_freq", 1 if is_early else None)
    every = other if is_fully_async(values) and isinstance(other, int) else value
    return {"trainer.test_freq": every * period_of(values) if isinstance(every, int) and every > 0 else every}


def checkpoints(value: JSON, values: Values) -> dict[str, JSON]:
    """Translate a number of publications into steps; trajectories that continue over an update need checkpoints."""
    goes_on = staleness_of(values) if is_fully_async(values) else values.get("actor_rollout_ref.hybrid_engine") is False
    goes_on = goes_on or v1_ahead(values) != (0, 0)
    every = SAVES if goes_on and number(values, "trainer.save_freq", -1) < 1 else value
    return {"trainer.save_freq": every * period_of(values) if isinstance(every, int) and every > 0 else every}


def is_bypassed(values: Values) -> bool:
    """Check whether verl takes the engine's log-probs for those before the update.

    Earlier releases of its fully asynchronous trainer say by two keys of `async_training` that it does not.
    """
    computes = values.get("async_training.compute_prox_log_prob") is True
    computes = computes or values.get("async_training.use_rollout_log_probs") is False
    return bool(values.get(f"{CORRECTION}.bypass_mode")) and not computes


def proximal(value: JSON, values: Values) -> dict[str, JSON]:
    """Translate the policy that the ratio is taken to.

    Where it is not the engine, the fully asynchronous trainer takes the weights of the last publication at each of its
    steps. With use_rollout_log_probs=false it takes the weights before the update.
    """
    if is_bypassed(values):
        return {f"{CORRECTION}.proximal": "rollout"}
    is_old = period_of(values) > 1 and values.get("async_training.use_rollout_log_probs") is not False
    return {f"{CORRECTION}.proximal": "published"} if is_old else {}


def router_replay(value: JSON, values: Values) -> dict[str, JSON]:
    """Translate the mode of routing replay."""
    return {} if value in (None, "disabled") else {f"{ACTOR}.router_replay.mode": value}


def balancing_loss(value: JSON, values: Values) -> dict[str, JSON]:
    """Translate the load-balancing loss's weight, which Megatron reads by its kind; verl's default kind is `none`."""
    kind = values.get(f"{MEGATRON}.moe_router_load_balancing_type")
    if not value or kind in (None, "none"):
        return {}
    if kind not in ("aux_loss", "global_aux_loss"):
        raise Refusal("the load of experts is measured over mini-batches: aux_loss or global_aux_loss")
    return {f"{ACTOR}.strategy_options": {"moe_aux_loss_coeff": value}}


def z_loss(value: JSON, _: Values) -> dict[str, JSON]:
    """Translate the weight of the z-loss."""
    return {f"{ACTOR}.strategy_options": {"moe_z_loss_coeff": value}} if value else {}


def told_experts(value: JSON, values: Values) -> dict[str, JSON]:
    """Check that the engine's experts are requested where they are replayed, as verl's R3 needs both."""
    modes = (
        values.get(f"{ACTOR}.{backend}router_replay.mode") for backend in ("", "megatron.", "mindspeed.", "veomni.")
    )
    if value and "R3" not in modes:
        raise Refusal(f"the engine's experts are read with {ACTOR}.router_replay.mode=R3 alone; set that, too")
    return {}


DAPOS_OWN = "reward_model.overlong_buffer.enable"
"""A key that the YAML of DAPO's recipe alone has."""


def generation_batch(value: JSON, values: Values) -> dict[str, JSON]:
    """Translate the size of a generation batch; without dynamic sampling DAPO's recipe trains on all of it."""
    if is_fully_async(values) or v1_mode(values) != "sync":
        return {}  # prompts are drawn one by one, or as many at a time as the batch needs
    if value in (None, values.get("data.train_batch_size")):
        return {}
    if not values.get("algorithm.filter_groups.enable"):
        if DAPOS_OWN in values:
            return {"data.train_batch_size": value}
        raise Refusal("without algorithm.filter_groups.enable a step trains on data.train_batch_size prompts")
    return {"data.gen_batch_size": value}


def dynamic_sampling(value: JSON, values: Values) -> dict[str, JSON]:
    """Translate the switch of dynamic sampling."""
    return {"algorithm.filter_groups.refill": True} if value else {}


def filter_metric(value: JSON, values: Values) -> dict[str, JSON]:
    """Translate the number by which dynamic sampling compares trajectories."""
    if value is None or not values.get("algorithm.filter_groups.enable"):
        return {}
    if value == "seq_final_reward" and values.get("algorithm.use_kl_in_reward"):
        raise Refusal("the KL in the reward is known when all prompts are drawn: metric=seq_reward compares without it")
    return {"algorithm.filter_groups.metric": "reward" if value in ("seq_reward", "seq_final_reward") else value}


def generation_batches(value: JSON, values: Values) -> dict[str, JSON]:
    """Translate the bound on generation batches, where every number below 1 means no bound."""
    if value is None or not values.get("algorithm.filter_groups.enable"):
        return {}
    return {"algorithm.filter_groups.max_num_gen_batches": max(whole(value), 0)}


MANAGERS = ("reward_model.reward_manager", "reward.reward_manager.name", "reward_manager.name")
"""Places of the reward manager's name, by release."""


def overlong(section: str, name: str) -> Translate:
    """Translate a key of one of the spellings of DAPO's overlong buffer, which the reward manager dapo alone reads."""

    def translate(value: JSON, values: Values) -> dict[str, JSON]:
        managers = [values.get(key) for key in MANAGERS]
        if value is None or "dapo" not in managers or not values.get(f"{section}.enable"):
            return {}
        return {f"reward_model.overlong_buffer.{name}": value}

    return translate


def overlong_limit(section: str) -> Translate:
    """Translate the length of a response at which the penalty of DAPO's overlong buffer is whole."""
    return lambda value, values: overlong(f"{section}.overlong_buffer_cfg", "max_resp_len")(value, values)


def gdpo_option(name: str) -> Translate:
    """Make a key that only gdpo reads an option of that estimator; note it where another one is chosen."""

    def translate(value: JSON, values: Values) -> dict[str, JSON]:
        if value is None or values.get("algorithm.adv_estimator") != "gdpo":
            return {}
        return {"algorithm.adv_options": {name: value}}

    return translate


def gigpo(name: str) -> Translate:
    """Translate an option of gigpo as verl-agent reads it: its means count turns, and its discount is gamma."""

    def translate(value: JSON, values: Values) -> dict[str, JSON]:
        if value is None or values.get("algorithm.adv_estimator") != "gigpo":
            return {}
        if name == "mode" and value not in ("mean_norm", "mean_std_norm"):
            raise Refusal("the modes are mean_norm and mean_std_norm")
        if name == "mode":
            return {"algorithm.norm_adv_by_std_in_grpo": value == "mean_std_norm"}
        return {"algorithm.adv_options": {name: value, "step_gamma": values.get("algorithm.gamma"), "over_turns": True}}

    return translate


def environment(value: JSON, values: Values) -> dict[str, JSON]:
    """Note an environment's name where the command has an interaction in its place."""
    if values.get(f"{TURNS}.interaction_config_path") is None:
        raise Refusal(
            "environments of verl-agent are not part of agentrl. Wrap yours in a class with reset and step, name it in "
            f"a YAML file of interactions, and give {TURNS}.interaction_config_path (docs/interactions.md, An "
            "environment)"
        )
    return {}


def warmup(section: str) -> Translate:
    """Translate verl's warm-up: -1, null and, but for the first releases, 0 delegate to the ratio."""

    def translate(value: JSON, values: Values) -> dict[str, JSON]:
        least = 0 if is_of_first_releases(values) else 1
        return {f"{section}.lr_warmup_steps": value} if value is not None and whole(value) >= least else {}

    return translate


def warmup_ratio(section: str) -> Translate:
    """Translate the warm-up's part of all steps, where no number of steps is given."""

    def translate(value: JSON, values: Values) -> dict[str, JSON]:
        steps = number(values, f"{section}.lr_warmup_steps", -1)
        delegates = steps < 0 if is_of_first_releases(values) else steps <= 0
        return {f"{section}.lr_warmup_steps_ratio": value} if value and delegates else {}

    return translate


def clip_grad(section: str) -> Translate:
    """Translate the largest norm of gradients, which verl has under two names: the value other than 1.0 holds."""

    def translate(value: JSON, values: Values) -> dict[str, JSON]:
        other = values.get(f"{section}.grad_clip", 1.0)
        if value not in (None, 1.0, other) and other != 1.0:
            raise Refusal(f"{section}.grad_clip={other} says otherwise; verl 0.9.1 reads optim.clip_grad. Keep one")
        return {} if value in (None, 1.0) else {f"{section}.grad_clip": value}

    return translate


def optimizer(value: JSON, _: Values) -> dict[str, JSON]:
    """Note AdamW in each of verl's spellings."""
    if value is not None and str(value).lower() not in ("adamw", "adam"):
        raise Refusal("the optimizers are AdamW, and Muon by our own key optim.name")
    return {}


def optimizer_name(key: str) -> Translate:
    """Translate TorchTitan's name of the optimizer, or ours."""
    return lambda value, _: {key: str(value).lower()}


def scheduler(section: str) -> Translate:
    """Translate the course of the learning rate."""

    def translate(value: JSON, values: Values) -> dict[str, JSON]:
        if value is None:
            return {}
        if value != "constant" and is_of_first_releases(values):
            raise Refusal("releases up to 0.3 do not read it: their rates are constant. Leave it out")
        if value not in ("constant", "cosine", "linear"):
            raise Refusal("the courses are constant, cosine and linear")
        return {f"{section}.lr_scheduler_type": value}

    return translate


def backend_scheduler(section: str) -> Translate:
    """Translate the course of the learning rate that Megatron and TorchTitan have under names of their own."""

    def translate(value: JSON, values: Values) -> dict[str, JSON]:
        if value in (None, "constant"):
            return {}
        return scheduler(section)(value, values)

    return translate


def least_rate(section: str) -> Translate:
    """Translate a least learning rate to a fraction of the greatest."""

    def translate(value: JSON, values: Values) -> dict[str, JSON]:
        rate = values.get(f"{section}.lr")
        if value is None or not real(value) or not isinstance(rate, int | float) or not rate:
            return {}
        return {f"{section}.min_lr_ratio": min(1.0, real(value) / rate)}

    return translate


def decay_steps(section: str) -> Translate:
    """Note the length of a course that is constant."""

    def translate(value: JSON, values: Values) -> dict[str, JSON]:
        if value is not None and values.get(f"{section}.lr_decay_style") not in (None, "constant"):
            raise Refusal("the learning rate falls over all steps of the training")
        return {}

    return translate


def shards(role: str, key: str) -> Translate:
    """Translate the ranks that another backend splits matrices over, where they divide the ranks here."""

    def translate(value: JSON, values: Values) -> dict[str, JSON]:
        ranks = number(values, "trainer.nnodes", 1) * number(values, "trainer.n_gpus_per_node", 1)
        rank = number(values, f"{MODEL}.lora_rank", 0) or number(values, f"{MODEL}.lora.rank", 0)
        sequence = max(1, number(values, f"{role}.megatron.context_parallel_size", 1))
        size = 1 if value is None else whole(value, least=1)
        return {key: size} if size > 1 and ranks % (size * sequence) == 0 and not rank else {}

    return translate


def shard_ranks(key: str) -> Translate:
    """Translate the ranks that parameters are sharded over; as many as there are, or more, are all."""

    def translate(value: JSON, values: Values) -> dict[str, JSON]:
        ranks = number(values, "trainer.nnodes", 1) * number(values, "trainer.n_gpus_per_node", 1)
        return {key: -1 if isinstance(value, int) and value >= ranks else value}

    return translate


def sequence_ranks(key: str) -> Translate:
    """Translate the ranks that split a sequence, where they divide the ranks here."""

    def translate(value: JSON, values: Values) -> dict[str, JSON]:
        ranks = number(values, "trainer.nnodes", 1) * number(values, "trainer.n_gpus_per_node", 1)
        size = 1 if value is None else whole(value, least=1)
        return {key: size} if size > 1 and ranks % size == 0 else {}

    return translate


def servers(value: JSON, values: Values) -> dict[str, JSON]:
    """Translate the GPUs of a server; verl starts as many servers as the machine's GPUs hold."""
    gpus = number(values, "trainer.n_gpus_per_node", 1)
    each = 1 if value is None else whole(value, least=1)
    return {f"{ROLLOUT}.tensor_model_parallel_size": each, f"{ROLLOUT}.num_servers": max(1, gpus // each)}


def engine(value: JSON, values: Values) -> dict[str, JSON]:
    """Translate the engine."""
    return {f"{ROLLOUT}.name": value if is_attached(value, values) else engine_here(value)}


def is_attached(value: JSON, values: Values) -> bool:
    """Check whether vLLM's servers run already, so that vLLM need not be installed here."""
    return value == "vllm" and bool(values.get(f"{ROLLOUT}.server_urls"))


def engine_here(value: JSON) -> JSON:
    """Find the engine for one of verl's: SGLang's servers replace all but vLLM's where that is installed."""
    if value == "vllm" and is_installed("vllm"):
        return "vllm"
    return "sglang" if value in ("vllm", "trtllm", "hf", "dynamo", "???", None) else value


def is_replaced(value: JSON, values: Values) -> bool:
    """Check whether SGLang's servers stand for the engine that a command names."""
    return _is_another(value) and not is_attached(value, values)


def _is_another(value: JSON) -> bool:
    return value not in ("???", None) and engine_here(value) != value


def length_of(key: str) -> Translate:
    """Note a length that must equal the data's."""

    def translate(value: JSON, values: Values) -> dict[str, JSON]:
        if key not in values and value is not None:  # where the data's length is unknown
            return {key: value}
        if value not in (None, values.get(key)):
            raise Refusal(f"{key}={values.get(key)} says otherwise, and holds here; set both to the same")
        return {}

    return translate


def assistant_turns(value: JSON, values: Values) -> dict[str, JSON]:
    """Translate the limit of turns, also by its first name; null is no limit.

    A tool's answer counts as a user's turn in verl.
    """
    first = values.get(f"{TURNS}.max_turns")
    if isinstance(first, int) and value not in (None, first):
        raise Refusal(f"{TURNS}.max_turns={first}, its first name, says otherwise: keep one")
    value = first if value is None else value
    limit = number(values, "data.max_response_length", LARGE) if value is None else whole(value)
    user = values.get(f"{TURNS}.max_user_turns")
    if isinstance(user, int) and user and not values.get(f"{TURNS}.interaction_config_path"):
        limit = min(limit, user + 1)
    return {f"{TURNS}.max_assistant_turns": limit}


def user_turns(value: JSON, values: Values) -> dict[str, JSON]:
    """Translate the limit of an interaction's answers; null is no limit."""
    if not values.get(f"{TURNS}.interaction_config_path"):
        return {}
    limit = number(values, "data.max_response_length", LARGE) if value is None else whole(value)
    return {f"{TURNS}.max_user_turns": limit}


def call_format(value: JSON, _: Values) -> dict[str, JSON]:
    """Translate the format of tool calls; formats with a family of their own here are found by the model."""
    found = value in (None, "gpt-oss", "gemma4", "chatml", "qwen", "openai")
    return {f"{TURNS}.format": "auto" if found else value}


def agent_loop(value: JSON, _: Values) -> dict[str, JSON]:
    """Translate the loop of rows that name no loop."""
    name = {"single_turn_agent": "single_turn"}.get(str(value), str(value))
    return {} if value is None else {f"{ROLLOUT}.agent.default_agent_loop": name}


def validation_temperature(value: JSON, _: Values) -> dict[str, JSON]:
    """Translate the temperature of validation, which alone decides in verl whether it samples."""
    if not value:
        return {f"{ROLLOUT}.val_kwargs.do_sample": False, f"{ROLLOUT}.val_kwargs.greedy": True}
    return {
        f"{ROLLOUT}.val_kwargs.do_sample": True,
        f"{ROLLOUT}.val_kwargs.greedy": False,
        f"{ROLLOUT}.val_kwargs.temperature": value,
    }


def if_sampled(key: str) -> Translate:
    """Translate a key that only validation by sampling reads."""
    return lambda value, values: {key: value} if values.get(f"{ROLLOUT}.val_kwargs.temperature") else {}


def top_k(value: JSON, _: Values) -> dict[str, JSON]:
    """Translate verl's two spellings of no limit: -1, and 0 for its Hugging Face engine."""
    return {f"{ROLLOUT}.top_k": -1 if value == 0 else value}


OTHER_LOGGERS = ("clearml", "vemlp_wandb", "tracking", "rl_logging_board")
"""Loggers of verl's that are not here."""


def leaves_loggers_out(value: JSON, _: Values) -> bool:
    """Check whether a command names loggers that are left out."""
    return not set(OTHER_LOGGERS).isdisjoint(_logger_names(value))


def _logger_names(value: JSON) -> list[str]:
    """List the loggers of a value, which a command line may have as text."""
    names = value.strip("[]").split(",") if isinstance(value, str) else value if isinstance(value, list) else []
    return [str(name).strip(" '\"") for name in names]


def loggers(value: JSON, _: Values) -> dict[str, JSON]:
    """Translate the loggers; verl's that agentrl does not have are left out. Raises Refusal for others."""
    ours = [{"file": "jsonl"}.get(name, name) for name in _logger_names(value)]
    kept = list(dict.fromkeys(name for name in ours if name in LOGGERS.names() or is_target(name)))
    if unknown := [name for name in ours if name and name not in (*kept, *OTHER_LOGGERS)]:
        raise Refusal(f"there is no logger {', '.join(unknown)}; there are {', '.join(LOGGERS.names())}")
    return {"trainer.logger": [*kept, *(["jsonl"] if "jsonl" not in kept else [])]}


def resume_path(value: JSON, values: Values) -> dict[str, JSON]:
    """Translate the checkpoint to resume from, which only resume_mode=resume_path reads."""
    return {"trainer.resume_from_path": value} if values.get("trainer.resume_mode") == "resume_path" else {}


def device(value: JSON, _: Values) -> dict[str, JSON]:
    """Translate the device."""
    if value == "npu":
        raise Refusal("the devices are cuda and cpu")
    return {} if value is None else {"trainer.device": value}


def critic_enabled(value: JSON, values: Values) -> dict[str, JSON]:
    """Note whether there is a critic, which the estimator decides."""
    if value is False and values.get("algorithm.adv_estimator") == "gae":
        raise Refusal("algorithm.adv_estimator=gae needs a critic")
    return {}


def critic_shuffle(value: JSON, values: Values) -> dict[str, JSON]:
    """Note that the critic's mini-batches are the policy's."""
    if value is not None and bool(value) != bool(values.get(f"{ACTOR}.shuffle")):
        raise Refusal(f"the critic's mini-batches are shuffled as the policy's: {ACTOR}.shuffle")
    return {}


def further_tokens(value: JSON, values: Values) -> dict[str, JSON]:
    """Note the training of layers that predict further tokens, where nothing else learns by it."""
    if value and values.get(f"{MODEL}.mtp.enable") and not values.get(f"{MODEL}.mtp.detach_encoder"):
        raise Refusal("further tokens are not predicted in training, by which all layers would learn")
    return {}


def adapter_layers(value: JSON, values: Values) -> dict[str, JSON]:
    """Translate Megatron's names of the layers that get adapters."""
    if not number(values, f"{MODEL}.lora.rank", 0):
        return {}
    names = {
        "linear_qkv": ["q_proj", "k_proj", "v_proj"],
        "linear_proj": ["o_proj"],
        "linear_fc1": ["gate_proj", "up_proj"],
        "linear_fc2": ["down_proj"],
    }
    layers = value if isinstance(value, list) else [value]
    return {f"{MODEL}.target_modules": [one for layer in layers for one in names.get(str(layer), [str(layer)])]}


def override_config(value: JSON, _: Values) -> dict[str, JSON]:
    """Translate values in place of the model's config.json; Megatron's lie in `model_config`."""
    given = {**as_object(value), **as_object(as_object(value).get("model_config"))}
    given.pop("model_config", None)
    given.pop("attn_implementation", None)
    for name in [name for name in given if name.endswith(("dropout", "pdrop"))]:
        if given.pop(name):
            raise Refusal(f"{name}: models are trained without dropout")
    if as_object(given.pop("moe_config", None)).get("freeze_moe_router"):
        raise Refusal("moe_config.freeze_moe_router: all parameters of the policy learn")
    return {f"{MODEL}.override_config": given} if given else {}


def model_path(key: str) -> Translate:
    """Translate a model's path, in which ~ means the home directory."""
    return lambda value, _: {} if value is None else {key: str(Path(str(value)).expanduser())}


def sampler(value: JSON, values: Values) -> dict[str, JSON]:
    """Translate a sampler's class, of a file or, as pkg://, of a module."""
    if value is None:
        return {}
    if (name := values.get("data.sampler.class_name")) is None:
        raise Refusal("name the class: data.sampler.class_name")
    return {"data.sampler.name": f"{str(value).removeprefix('pkg://')}:{name}"}


GENERATIVE: dict[str, JSON] = {"reward_model.timeout": 1800.0, "reward_model.max_concurrent": 256}
"""Our values where a function asks a reward model: verl sets it no deadline, and makes all calls at once."""


def reward_model(value: JSON, values: Values) -> dict[str, JSON]:
    """Translate a reward model: either it scores conversations by itself, or the custom function asks it."""
    if not value:
        return {}
    path = values.get("reward_model.model.path") or values.get("reward.reward_model.model_path")
    if path is None:
        raise Refusal("name the model: reward_model.model.path")
    found: dict[str, JSON] = {
        "reward_model.enable": True,
        "reward_model.model.path": str(Path(str(path)).expanduser()),
    }
    if values.get("reward_model.model.trust_remote_code"):
        found["reward_model.model.trust_remote_code"] = True
    if _of_reward_model("enable_resource_pool", values):
        found["reward_model.enable_resource_pool"] = True
        for name in ("nnodes", "n_gpus_per_node"):
            if (number := _of_reward_model(name, values)) is not None:
                found[f"reward_model.{name}"] = number
    if _is_asked(values):
        return {**found, "reward_model.model.generative": True, **_reward_servers(values)}
    return {**found, "reward_model.model.replaces_scorers": True}


def reward_engine(value: JSON, values: Values) -> dict[str, JSON]:
    """Translate the engine of a reward model that a function asks, where its servers are started."""
    servers = "reward_model.rollout"
    if not _of_reward_model("enable", values) or not _is_asked(values) or values.get(f"{servers}.server_urls"):
        return {}
    return {f"{servers}.name": engine_here(_of_reward_model("rollout.name", values))}


def is_reward_engine_replaced(value: JSON, values: Values) -> bool:
    """Check whether SGLang's servers are started for another engine of the reward model."""
    return bool(reward_engine(value, values)) and _is_another(value)


def _is_asked(values: Values) -> bool:
    """Check whether a function of the user's asks the reward model; otherwise it scores by itself."""
    return any(values.get(f"{section}custom_reward_function.path") for section in ("", "reward."))


def _of_reward_model(name: str, values: Values) -> JSON:
    """Find a key of the reward model; as in verl, the older spelling is first."""
    older = values.get(f"reward_model.{name}")
    return values.get(f"reward.reward_model.{name}") if older is None else older


def _reward_servers(values: Values) -> dict[str, JSON]:
    """Return the keys of the servers that a function asks. Raises Refusal for quantised ones."""
    if _of_reward_model("rollout.quantization", values) is not None:
        raise Refusal("a quantised reward model judges otherwise: name one whose weights are quantised")
    found = {key: value for key, value in GENERATIVE.items() if key not in values}
    servers = "reward_model.rollout"
    if not values.get(f"{servers}.server_urls"):
        for name, default in (("tensor_model_parallel_size", 2), ("gpu_memory_utilization", 0.5)):
            given = _of_reward_model(f"rollout.{name}", values)
            found[f"{servers}.{name}"] = default if given is None else given
        own: dict[str, JSON] = {}
        is_sglang = engine_here(_of_reward_model("rollout.name", values)) == "sglang"
        for section in ("reward.reward_model", "reward_model") if is_sglang else ():
            at = f"{section}.rollout.engine_kwargs.sglang"
            own |= as_object(values.get(at))
            own |= {key.removeprefix(f"{at}."): one for key, one in values.items() if key.startswith(f"{at}.")}
        if own:
            found[f"{servers}.engine_kwargs.sglang"] = own
    return found


SEARCH_TOOL = "tools/remote_search.yaml"
"""The tool file of Search-R1's commands."""


def retriever(value: JSON, values: Values) -> dict[str, JSON]:
    """Translate Search-R1's keys of its one tool; a user's own tool file sets its own."""
    if values.get(f"{TURNS}.tool_config_path") != SEARCH_TOOL:
        return {}
    options: dict[str, JSON] = {
        "url": values.get("retriever.url"),
        "topk": values.get("retriever.topk"),
        "max_response_tokens": values.get("data.max_obs_length"),
    }
    given: dict[str, JSON] = {name: one for name, one in options.items() if one is not None}
    return {f"{TURNS}.tool_options": {"search": given}}


def response_length(value: JSON, values: Values) -> dict[str, JSON]:
    """Translate the length of responses: of a turn in forks, where a trajectory holds all turns and answers."""
    turns, steps = values.get("max_turns"), values.get("env.max_steps")
    if isinstance(steps, int) and isinstance(value, int):
        return {f"{TURNS}.max_tokens_per_turn": value, "data.max_response_length": steps * value}
    if not isinstance(turns, int) or not isinstance(value, int):
        return {"data.max_response_length": value}
    seen = number(values, "data.max_obs_length", 512)
    return {f"{TURNS}.max_tokens_per_turn": value, "data.max_response_length": turns * (value + seen) + value}


TEACHERS, DISTILLATION_LOSS = "distillation.teacher_models", "distillation.distillation_loss"


def teacher_names(values: Values) -> list[str]:
    """List verl's teachers with a model; the one called teacher_model counts where it is alone."""
    keys = [key for key, value in values.items() if value and fnmatch.fnmatchcase(key, f"{TEACHERS}.*.model_path")]
    names = [key.removeprefix(f"{TEACHERS}.").removesuffix(".model_path") for key in keys]
    return [name for name in names if name != "teacher_model"] or names


def when_distilled(rewrite: Translate) -> Translate:
    """Translate only where distillation is enabled and has a teacher, as nothing reads the key elsewhere."""

    def translate(value: JSON, values: Values) -> dict[str, JSON]:
        return rewrite(value, values) if values.get("distillation.enabled") and teacher_names(values) else {}

    return translate


ESTIMATORS = {"kl": "k1", "k1": "k1", "mse": "k2", "k2": "k2", "low_var_kl": "k3", "k3": "k3"}


@when_distilled
def distillation_loss(value: JSON, _: Values) -> dict[str, JSON]:
    """Translate verl's divergence."""
    if value == "forward_kl_topk":
        return {"distillation.scope": "top_k", "distillation.divergence": "forward_kl"}
    if value not in ESTIMATORS:
        raise Refusal(f"there are {', '.join([*ESTIMATORS, 'forward_kl_topk'])}")
    return {"distillation.estimator": ESTIMATORS[str(value)]}


@when_distilled
def distillation_use(value: JSON, values: Values) -> dict[str, JSON]:
    """Translate how the estimates are used; a divergence of distributions is a loss."""
    if values.get(f"{DISTILLATION_LOSS}.loss_mode") != "forward_kl_topk":
        return {"distillation.use": "advantage" if value else "loss"}
    if value:
        raise Refusal("a divergence of distributions is a term of the loss (false)")
    return {}


@when_distilled
def distillation_top_k(value: JSON, values: Values) -> dict[str, JSON]:
    """Translate the number of tokens, where they are compared one by one."""
    return {"distillation.top_k": value} if values.get(f"{DISTILLATION_LOSS}.loss_mode") == "forward_kl_topk" else {}


def distillation_coef(value: JSON, values: Values) -> dict[str, JSON]:
    """Translate the weight, which verl reads only together with rewards."""
    return {} if values.get(f"{DISTILLATION_LOSS}.use_task_rewards") is False else {"distillation.coef": value}


@when_distilled
def least_log_prob(value: JSON, values: Values) -> dict[str, JSON]:
    """Translate the bound of log-probs of distributions; where sampled tokens are compared nothing reads it."""
    if value is None or values.get(f"{DISTILLATION_LOSS}.loss_mode") != "forward_kl_topk":
        return {}
    return {"distillation.divergence_options": {"min_logprob": value}}


def teacher_key(value: JSON, _: Values) -> dict[str, JSON]:
    """Note the column by which teachers are chosen, where it is the one."""
    if value != "data_source":
        raise Refusal("teachers are chosen by data_source")
    return {}


def teacher_path(value: JSON, values: Values) -> dict[str, JSON]:
    """Translate a teacher's model: the teacher of all rows, or of the rows with its key."""
    names = teacher_names(values)
    if not values.get("distillation.enabled") or not value or not names:
        return {}
    if names == ["teacher_model"]:
        return {"distillation.teacher.path": value}
    teachers: dict[str, JSON] = {}
    for name in names:
        teachers[str(values.get(f"{TEACHERS}.{name}.key"))] = {"path": values[f"{TEACHERS}.{name}.model_path"]}
    return {"distillation.by_source": teachers}
