"""Checks of a whole config: the rules of its keys, and checks across keys."""

from __future__ import annotations

import importlib.util
import math
from collections.abc import Callable, Collection, Iterator

from agentrl.config.adapters import frozen_adapters, served_adapters, why_not_served
from agentrl.config.columns import COLUMNS, described
from agentrl.config.declaration import OF_ESTIMATORS, declaration_of
from agentrl.config.keys import all_keys, defaults, flatten, leaf_keys
from agentrl.config.registries import ADVANTAGE_ESTIMATORS, POLICY_LOSSES
from agentrl.config.rules import Names, OnlyWith, Place, Values
from agentrl.config.section import Section
from agentrl.config.sections.algorithm import OF_STALE_TOKENS
from agentrl.config.sections.model import ModelConfig
from agentrl.config.sections.offline import EvaluateConfig, GenerateConfig
from agentrl.config.sections.parallel import Parallel
from agentrl.config.sections.rollouts import RolloutsConfig
from agentrl.config.sections.sft import PreferencesConfig, TuningConfig
from agentrl.config.sections.training import Config
from agentrl.errors import ConfigError, install_extra

ACTOR, ROLLOUT = "actor_rollout_ref.actor", "actor_rollout_ref.rollout"
CORRECTION = "algorithm.rollout_correction"
WITHOUT_SERVERS = f". A small model needs no servers: {ROLLOUT}.name=embedded"
COMPARING = frozenset({"grpo", "grpo_turn", "grpo_passk", "rloo", "opo", "gpg", "maxrl", "rlsd"})
"""Estimators that compare the trajectories of a prompt, and take one alone."""


def check(config: Section, given: Collection[str], ours: Callable[[], Collection[str]] = tuple) -> None:
    """Raise ConfigError with a line for each key that conflicts, can have no effect, or does not fit with the others.

    Args:
        given: the keys that the user gave.
        ours: finds those that a YAML file of ours gave: one without an effect is no mistake of the user's.
    """
    found = [*check_rules(config, given), *check_together(config)]
    if any(_idle_key(fault) for fault in found):
        own = ours()
        found = [fault for fault in found if _idle_key(fault) not in own]
    if found:
        raise ConfigError("\n".join(dict.fromkeys(found)))


def _idle_key(fault: str) -> str:
    """Return the key that a message says to have no effect; empty for another message."""
    told, has_none, _ = fault.partition(" has no effect")
    return told.partition("=")[0] if has_none else ""


def check_rules(config: Section, given: Collection[str]) -> Iterator[str]:
    """Yield the faults by the rules that keys declare; where several deny a key its effect, the outermost rule's."""
    keys, leaves = all_keys(type(config)), leaf_keys(type(config))
    found, default = flatten(config.model_dump(mode="json"), leaves), flatten(defaults(type(config)), leaves)
    values = Values(found, {key for key in given if key in found and (found[key] or found[key] != default[key])})
    for path, key in keys.items():
        is_told = False
        for rule, section in key.rules:
            if isinstance(rule, OnlyWith) and is_told:
                continue
            faults = rule.faults(path, values, Place(section, keys))
            if isinstance(rule, Names):
                faults = [f"{fault}. {' '.join((key.field.description or '').split())}" for fault in faults]
            is_told = is_told or (isinstance(rule, OnlyWith) and bool(faults))
            yield from faults


def idle_keys(config: Section, given: Collection[str]) -> dict[str, str]:
    """Find the given keys that have no effect with the others, each with the message that says what it needs."""
    found = {_idle_key(fault): fault.partition(". Set that")[0] for fault in check_rules(config, given)}
    found.pop("", None)
    return found


def remarks(config: Section) -> Iterator[str]:
    """Yield settings that are allowed and seldom meant."""
    if isinstance(config, Config):
        yield from remarks_on_filters(config)
        yield from remarks_on_groups(config)
        if config.async_training.max_staleness:
            keys = config.algorithm.rollout_correction
            on = (
                f"the correction is {keys.text()}: watch correction/ess"
                if keys.changes_loss or not keys.needs_pass
                else f"nothing corrects for that: set {CORRECTION}.rollout_is={OF_STALE_TOKENS}, and watch "
                "rollout/logprob_gap_kl"
            )
            yield (
                f"async_training.max_staleness={config.async_training.max_staleness} trains on tokens that older "
                f"weights sampled, and {on}"
            )
        actor = config.actor_rollout_ref.actor
        for name in ("clip_ratio", "clip_ratio_low", "clip_ratio_high"):
            distance = getattr(actor, name)
            if distance is not None and distance >= 1:
                bound = f"[{1 - distance:g}, ...]" if name == "clip_ratio_low" else f"[..., {1 + distance:g}]"
                yield (
                    f"{ACTOR}.{name}={distance:g} is the distance of the ratio's bound from 1, so that ratios are "
                    f"clipped to {bound}; for the bound {distance:g} set {abs(distance - 1):.3g}"
                )


def remarks_on_filters(config: Config) -> Iterator[str]:
    """Warn about training on tokens of a filtered distribution."""
    rollout = config.actor_rollout_ref.rollout
    on = [f"top_p={rollout.top_p:g}"] if rollout.top_p < 1 else []
    on += [f"top_k={rollout.top_k}"] if rollout.top_k > 0 else []
    if not on or config.trainer.val_only:
        return
    apart = f" by up to {-math.log(rollout.top_p):.2g} nats a token (KL)" if rollout.top_p < 1 else ""
    yield (
        f"{ROLLOUT}.{' and '.join(on)}: training samples from a filtered distribution, and engine and trainer both "
        f"report log-probs of the whole one, which differs{apart}; rollout/logprob_gap_kl reads 0. Without a baseline "
        "of the group the gradient is off by about 20 % at top_p=0.95 and 40 % at 0.9, with one by half of that. Set "
        f"top_p=1 and top_k=-1; validation has its own in {ROLLOUT}.val_kwargs"
    )


def remarks_on_groups(config: Config) -> Iterator[str]:
    """Describe the treatment of a single trajectory by an estimator that compares a prompt's trajectories."""
    estimator, n = config.algorithm.adv_estimator, config.actor_rollout_ref.rollout.n
    if n == 1 and estimator in COMPARING and not config.trainer.val_only:
        yield (
            f"{ROLLOUT}.n=1 with algorithm.adv_estimator={estimator}: a prompt has no other trajectory to be compared "
            "with, so there is no baseline and the advantage is the reward. Set n to 2 or more"
        )


def check_together(config: Section) -> Iterator[str]:
    """Yield the faults that span sections."""
    if isinstance(config, RolloutsConfig):
        yield from check_context(config)
        yield from check_servers(config)
        yield from check_cassette(config)
        yield from check_overlong(config)
        yield from check_frozen_adapters(config)
    if isinstance(config, RolloutsConfig | EvaluateConfig):
        yield from check_scorer_timeouts(config)
    if isinstance(config, Config):
        yield from check_batches(config)
        yield from check_async(config)
        yield from check_correction(config)
        yield from check_published(config)
        yield from check_replay(config)
        yield from check_loss_columns(config)
        yield from check_refill(config)
        yield from check_pairs(config)
        yield from check_roles(config)
        yield from check_validation(config)
        yield from check_distillation(config)
        yield from check_own_teacher(config)
        yield from check_reward_servers(config)
    if isinstance(config, Config | TuningConfig):
        yield from check_parallel(config)
    if isinstance(config, GenerateConfig):
        yield from check_greedy(config)


def check_context(config: RolloutsConfig) -> Iterator[str]:
    """Check that the engine's context holds the longest prompt and response."""
    rollout, data = config.actor_rollout_ref.rollout, config.data
    needed = data.max_prompt_length + data.max_response_length
    if rollout.max_model_len is not None and rollout.max_model_len < needed:
        yield (
            f"{ROLLOUT}.max_model_len={rollout.max_model_len} is less than data.max_prompt_length + "
            f"data.max_response_length = {data.max_prompt_length} + {data.max_response_length} = {needed}; "
            "raise it, or set it to null"
        )


def check_servers(config: RolloutsConfig) -> Iterator[str]:
    """Check that each rollout worker has a server, and that the software of servers to start is installed."""
    rollout, workers = config.actor_rollout_ref.rollout, config.rollout_workers
    if rollout.server_urls is not None and len(rollout.server_urls) < workers:
        yield (
            f"{ROLLOUT}.server_urls has {len(rollout.server_urls)} servers for {workers} rollout workers, of which "
            f"each needs one at least. Set {ROLLOUT}.nnodes=1, or name more servers"
        )
    if rollout.name == "sglang" and rollout.server_urls is None and not is_installed("sglang"):
        yield no_sglang(f"{ROLLOUT}.name=sglang", ROLLOUT) + WITHOUT_SERVERS
    if rollout.name == "mixed" and rollout.server_urls is None:
        yield (
            f"{ROLLOUT}.name=mixed attaches to servers that run already, as no environment holds both softwares: "
            f"name them by {ROLLOUT}.server_urls=[http://node1:30000,http://node2:8000], or start servers of one "
            f"software with {ROLLOUT}.name=sglang or vllm"
        )
    if rollout.name in ("vllm", "mixed") and rollout.update_weights_checksum and not rollout.update_weights_delta:
        yield (
            f"{ROLLOUT}.update_weights_checksum=true with vLLM's servers needs {ROLLOUT}.update_weights_delta=true: "
            "without it they keep no weights as they were sent, and their own checksums are of another layout"
        )
    if rollout.name == "vllm" and rollout.server_urls is None and not is_installed("vllm"):
        yield no_vllm(f"{ROLLOUT}.name=vllm", ROLLOUT) + WITHOUT_SERVERS


def no_sglang(key: str, section: str) -> str:
    """Write the message that `key` starts servers without SGLang installed; `section` may name running servers."""
    return (
        f"{key} starts SGLang servers, and SGLang is not installed here. On a machine with a GPU: "
        f"{install_extra('sglang')}; on a CPU: make setup-sglang, in a clone. Or attach to servers that run "
        f"already: {section}.server_urls=[http://host:30000]"
    )


def no_vllm(key: str, section: str) -> str:
    """Write the message that `key` starts servers without vLLM installed; `section` may name running servers."""
    return (
        f"{key} starts vLLM servers, and vLLM is not installed here. On a machine with a GPU: "
        f"{install_extra('vllm')}; on a CPU: make setup-vllm, in a clone. Or attach to servers that run already: "
        f"{section}.server_urls=[http://host:8000], or take {section}.name=sglang"
    )


def check_reward_servers(config: Config) -> Iterator[str]:
    """Check that a generative reward model's servers can be started, and that scorers can reach them."""
    keys, ray_init = config.reward_model, config.ray_init
    if not keys.generates or keys.rollout.server_urls is not None:
        return
    if keys.rollout.name == "vllm" and not is_installed("vllm"):
        yield no_vllm("reward_model.rollout.name=vllm", "reward_model.rollout")
    if keys.rollout.name == "sglang" and not is_installed("sglang"):
        yield no_sglang("reward_model.model.generative=true", "reward_model.rollout")
    if not keys.enable_resource_pool and (config.rollout_workers > 1 or ray_init.address is not None):
        yield (
            "reward_model.model.generative=true starts servers on this machine alone, and several machines score: give "
            "them devices of their own (reward_model.enable_resource_pool=true, reward_model.nnodes, "
            "reward_model.n_gpus_per_node), or name servers that run already (reward_model.rollout.server_urls)"
        )


def is_installed(package: str) -> bool:
    """Check whether a package can be imported, without importing it.

    A mere folder of that name, without `__init__.py`, does not count.
    """
    spec = importlib.util.find_spec(package)
    return spec is not None and spec.origin is not None


def check_cassette(config: RolloutsConfig) -> Iterator[str]:
    """Check that one process writes the cassette, which is one file."""
    workers = config.rollout_workers
    if config.tools.cassette is not None and workers > 1:
        yield f"tools.cassette={config.tools.cassette} is one file, and there are {workers} rollout workers"


def check_overlong(config: RolloutsConfig) -> Iterator[str]:
    """Check that the penalty for overlong responses begins before their limit, which is not above the hard one."""
    buffer, hard = config.reward_model.overlong_buffer, config.data.max_response_length
    limit = buffer.max_resp_len or hard
    if not buffer.enable or buffer.len is None:
        return
    if limit > hard:
        yield (
            f"reward_model.overlong_buffer.max_resp_len={limit} is above data.max_response_length={hard}, which no "
            "response passes: leave it out"
        )
    if buffer.len > limit:
        yield (
            f"reward_model.overlong_buffer.len={buffer.len} is more than the {limit} tokens that a response may have "
            "(max_resp_len, or data.max_response_length): lower it"
        )


def check_scorer_timeouts(config: RolloutsConfig | EvaluateConfig) -> Iterator[str]:
    """Check that servers which scorers ask have to answer within the deadline of scoring."""
    reward = config.reward_model
    for section, url, timeout in (
        ("sandbox_fusion", reward.sandbox_fusion.url, reward.sandbox_fusion.timeout),
        ("judge", reward.judge.base_url, reward.judge.timeout),
    ):
        if url is not None and timeout >= reward.timeout:
            yield (
                f"reward_model.{section}.timeout={timeout:g} must be below reward_model.timeout={reward.timeout:g}, "
                "within which the server has to answer"
            )


def even_sizes(batch: int) -> list[int]:
    """List the sizes of the largest mini-batch of a batch that is split as evenly as whole prompts can be, from 1."""
    return sorted({-(-batch // steps) for steps in range(1, batch + 1)})


def check_batches(config: Config) -> Iterator[str]:
    """Check that a batch splits into mini-batches of that many prompts, as even as whole prompts can be."""
    batch = config.data.train_batch_size
    minis = {
        f"{ACTOR}.ppo_mini_batch_size": config.actor_rollout_ref.actor.ppo_mini_batch_size,
        "critic.ppo_mini_batch_size": config.critic.ppo_mini_batch_size,
    }
    for key, size in minis.items():
        sizes = even_sizes(batch)
        if size is not None and size not in sizes:
            near = [*[n for n in sizes if n < size][-1:], *[n for n in sizes if n > size][:1]]
            yield (
                f"{key}={size} is not the size of a mini-batch of data.train_batch_size={batch} (both count prompts), "
                "which is split as evenly as whole prompts can be; the nearest that are: "
                f"{' and '.join(map(str, near))}"
            )


def check_async(config: Config) -> Iterator[str]:
    """Check that the bound on staleness can hold, and that something runs trajectories during updates."""
    keys, rollout = config.async_training, config.actor_rollout_ref.rollout
    bound = keys.max_staleness
    if bound == 0:
        return
    at = f"async_training.max_staleness={bound}"
    if keys.depth > bound:
        yield (
            f"async_training.depth={keys.depth} is above {at}: what is begun so far ahead would be too old when its "
            "turn comes. Lower depth, or raise max_staleness"
        )
    if keys.publish_every > bound + 1:
        yield (
            f"async_training.publish_every={keys.publish_every} is above {at} + 1: by the time of the next publication "
            "nothing that the engine samples may be trained on. Lower publish_every, or raise max_staleness"
        )
    if config.trainer.save_freq < 1 and not config.trainer.val_only:
        yield (
            f"trainer.save_freq={config.trainer.save_freq} conflicts with {at}: prompts that were begun ahead are kept "
            "in checkpoints. Set trainer.save_freq=50, say"
        )
    if rollout.free_cache_engine:
        yield from check_freed_memory(config)


def check_freed_memory(config: Config) -> Iterator[str]:
    """Check that nothing is wanted of servers during updates that they cannot do while their memory is freed."""
    keys, freed = config.async_training, f"{ROLLOUT}.free_cache_engine=true"
    nodes = config.actor_rollout_ref.rollout.nnodes
    if keys.keep_kv_cache:
        yield (
            f"async_training.keep_kv_cache=true conflicts with {freed}, which frees keys and values for the update: "
            "set one of them to false"
        )
    if keys.publish_every > 1:
        yield (
            f"async_training.publish_every={keys.publish_every} conflicts with {freed}: weights that were freed for an "
            "update have to be sent after it. Set publish_every=1, or free_cache_engine=false"
        )
    if nodes:
        yield (
            f"async_training.max_staleness={keys.max_staleness} with {ROLLOUT}.nnodes={nodes} conflicts with {freed}: "
            "rollout workers with devices of their own would stand still for the update. Set free_cache_engine=false"
        )


def check_correction(config: Config) -> Iterator[str]:
    """Check that the importance weight has bounds in order and is not counted twice, and that its inputs are known."""
    keys, loss = config.algorithm.rollout_correction, config.actor_rollout_ref.actor.policy_loss.loss_mode
    if keys.rollout_is_lower is not None and keys.rollout_is_lower > keys.rollout_is_threshold:
        yield (
            f"{CORRECTION}.rollout_is_lower={keys.rollout_is_lower:g} is above rollout_is_threshold="
            f"{keys.rollout_is_threshold:g}; they are the bounds of the weights"
        )
    to_engine = keys.proximal == "rollout" and POLICY_LOSSES.is_built_in(loss) and loss != "gpg"
    if keys.rollout_is is not None and (to_engine or loss == "m2po"):
        what = f"loss_mode={loss}" if loss == "m2po" else f"proximal={keys.proximal}"
        yield (
            f"{CORRECTION}.rollout_is={keys.rollout_is} conflicts with {what}: the ratio of loss_mode={loss} is to the "
            f"engine's log-probs already, and would count twice. Set {ACTOR}.policy_loss.loss_mode=gpg, or leave "
            "rollout_is out"
        )
    if config.actor_rollout_ref.actor.target_entropy is not None and keys.proximal != "recomputed":
        yield (
            f"{ACTOR}.target_entropy needs {CORRECTION}.proximal=recomputed, found {keys.proximal}: the entropy must "
            "be known before the update"
        )
    if keys.normalizes and not keys.needs_pass:
        key = "rollout_is=tempered" if keys.rollout_is == "tempered" else "rollout_is_batch_normalize=true"
        yield (
            f"{CORRECTION}.{key} needs proximal=recomputed, found {keys.proximal}: the mean over the batch must be "
            "known before the update"
        )


def check_published(config: Config) -> Iterator[str]:
    """Check that published weights differ from the weights before the update, and that a resumed run has them again."""
    keys, every = config.async_training, config.async_training.publish_every
    if config.algorithm.rollout_correction.proximal != "published":
        return
    if keys.max_staleness == 0 or every == 1:
        yield (
            f"{CORRECTION}.proximal=published needs async_training.publish_every above 1: otherwise the published "
            "policy is the one before the update. Set proximal=recomputed"
        )
    elif config.trainer.save_freq % every:
        yield (
            f"trainer.save_freq={config.trainer.save_freq} conflicts with {CORRECTION}.proximal=published: a run that "
            f"is continued begins with the weights of a checkpoint. Set a multiple of publish_every={every}"
        )


def check_replay(config: Config) -> Iterator[str]:
    """Check that something reports the experts to replay, and that layers run as they are written."""
    actor, rollout = config.actor_rollout_ref.actor, config.actor_rollout_ref.rollout
    mode, correction = actor.router_replay.mode, config.algorithm.rollout_correction
    if mode == "disabled":
        return
    if mode == "R2" and not correction.needs_pass:
        yield (
            f"{ACTOR}.router_replay.mode=R2 replays the experts that the policy chose as its log-probs were computed, "
            f"and with {CORRECTION}.proximal={correction.proximal} they are not. Set proximal=recomputed, or mode=R3"
        )
    if mode == "R3" and rollout.serves:
        yield (
            f"{ACTOR}.router_replay.mode=R3 needs an engine that tells which experts it chose, and agentrl does not "
            "ask servers for them. Set mode=R2, and bound what their routers change by "
            f"{CORRECTION}.rollout_is=token, or use {ROLLOUT}.name=embedded"
        )
    if actor.use_torch_compile:
        yield (
            f"{ACTOR}.router_replay.mode={mode} conflicts with use_torch_compile=true: compiled routers cannot be "
            "steered"
        )


def check_loss_columns(config: Config) -> Iterator[str]:
    """Check that the batch will have the columns that a user's loss declares."""
    loss, estimator = config.actor_rollout_ref.actor.policy_loss.loss_mode, config.algorithm.adv_estimator
    if POLICY_LOSSES.is_built_in(loss):
        return
    declared = declaration_of(POLICY_LOSSES.get(loss)).columns
    for name in (one for one in OF_ESTIMATORS if one in declared):
        at = f"{ACTOR}.policy_loss.loss_mode={loss} declares the column {described(name)}, which"
        if name not in COLUMNS:
            yield f"{at} only estimators are given: leave it out of @declare"
        elif name not in declaration_of(ADVANTAGE_ESTIMATORS.get(estimator)).columns:
            yield (
                f"{at} is computed only for an estimator that declares it, and algorithm.adv_estimator={estimator} "
                f"does not: choose e.g. {'gae' if name == 'values' else 'remax'}"
            )


def check_pairs(config: Config) -> Iterator[str]:
    """Check that a prompt has trajectories to make a pair of."""
    estimator, n = config.algorithm.adv_estimator, config.actor_rollout_ref.rollout.n
    if estimator == "online_dpo" and n < 2:
        yield (
            f"algorithm.adv_estimator={estimator} compares the trajectories of a prompt, and {ROLLOUT}.n={n}: set it "
            "to 2 or more"
        )


def check_frozen_adapters(config: RolloutsConfig) -> Iterator[str]:
    """Check that servers can serve the adapters of roles."""
    if frozen_adapters(config) and served_adapters(config) is None:
        yield (
            f"{ROLLOUT}.roles: {', '.join(frozen_adapters(config))}: adapters are served next to the policy's own, in "
            "a training with actor_rollout_ref.model.lora_rank and lora_merge=false. Set these, or serve the model and "
            "set base_url"
        )


def check_roles(config: Config) -> Iterator[str]:
    """Check that rewards are known by role, where episodes have roles."""
    estimator = config.algorithm.adv_estimator
    if not config.actor_rollout_ref.rollout.roles:
        return
    if "greedy_rewards" in declaration_of(ADVANTAGE_ESTIMATORS.get(estimator)).columns:
        yield (
            f"{ROLLOUT}.roles conflicts with algorithm.adv_estimator={estimator}: the reward of a greedy trajectory is "
            "not known by role. Set algorithm.adv_estimator=rae, or grpo"
        )
    if config.reward_model.classifies:
        yield (
            f"{ROLLOUT}.roles conflicts with a reward model: it reads a conversation, not a role. Leave reward_model "
            "out; the environment or the agent scores each role"
        )


def check_refill(config: Config) -> Iterator[str]:
    """Check that groups can differ, and that how they do is known while prompts are drawn."""
    keys, n = config.algorithm.filter_groups, config.actor_rollout_ref.rollout.n
    if not keys.refill:
        return
    at = "algorithm.filter_groups.refill=true"
    if n < 2:
        yield f"{at} compares the trajectories of a prompt, and {ROLLOUT}.n={n}: set it to 2 or more, 16 say"
    if config.reward_model.classifies and keys.metric == "reward":
        yield (
            f"{at} with reward_model.enable=true needs algorithm.filter_groups.metric=score, or another number of the "
            "scorer's: the reward model scores when all prompts are drawn"
        )


def check_validation(config: Config) -> Iterator[str]:
    """Check that validation data is validated in one way at least."""
    val = config.actor_rollout_ref.rollout.val_kwargs
    if config.data.val_files is not None and not (val.do_sample or val.greedy):
        yield (
            f"{ROLLOUT}.val_kwargs has do_sample=false and greedy=false, so nothing would be validated; set one of "
            "them, or data.val_files=null"
        )


def check_distillation(config: Config) -> Iterator[str]:
    """Check that the teachers can give the compared values, and that distillation teaches something."""
    keys = config.distillation
    if not keys.teachers:
        return
    if keys.scope == "sampled" and keys.use == "loss" and keys.estimator == "k1":
        yield (
            "distillation.estimator=k1 conflicts with distillation.use=loss: the gradient of log p_S - log p_T is 0 on "
            "average, whoever teaches. Set distillation.estimator=k2, or distillation.use=advantage"
        )
    served = [teacher for _, teacher in keys.teachers if teacher.base_url is not None]
    temperature = config.actor_rollout_ref.rollout.temperature
    if served and keys.scope == "full":
        yield (
            f"distillation.scope=full needs the weights of the teacher, and {served[0].name} is a server: take "
            "distillation.teacher.path, or distillation.scope=top_k"
        )
    if served and temperature not in (0, 1):
        yield (
            f"{ROLLOUT}.temperature={temperature:g} conflicts with the teacher {served[0].name}: servers give "
            "log-probs at temperature 1, as the policy's have to be. Set it to 1, or take distillation.teacher.path"
        )
    if keys.coef == 0:
        yield "distillation.coef=0 lets the teacher teach nothing: raise it, or leave out distillation.teacher"


def check_own_teacher(config: Config) -> Iterator[str]:
    """Check that an estimator that reads a teacher has one, and that the policy as its own teacher is supported."""
    keys = config.distillation
    if config.algorithm.adv_estimator == "rlsd" and not keys.teachers:
        yield (
            "algorithm.adv_estimator=rlsd weighs tokens by what a teacher says of them: set distillation.teacher, "
            "path=policy and privileged='The answer is {ground_truth}.' say"
        )
    own = [teacher for _, teacher in keys.teachers if teacher.is_policy]
    if any(teacher.privileged is None for teacher in own):
        yield (
            "distillation.teacher.path=policy is shown what the policy is shown, and so teaches nothing: set "
            "distillation.teacher.privileged, 'The answer is {ground_truth}.' say"
        )
    if own and keys.scope != "sampled":
        yield (
            f"distillation.scope={keys.scope} conflicts with distillation.teacher.path=policy, which gives log-probs "
            "of sampled tokens. Take scope=sampled, or the path of the model that the policy begins as"
        )


def check_reward_model(model: ModelConfig) -> Iterator[str]:
    """Check that training a reward model reads every key of the model that is set."""
    if model.lora_rank:
        yield (
            f"model.lora_rank={model.lora_rank} conflicts with trains=reward_model, which trains the whole model: "
            "leave it out"
        )
    if model.chat_template_kwargs:
        yield (
            f"model.chat_template_kwargs={model.chat_template_kwargs} conflicts with trains=reward_model: where it "
            "scores, its template is given messages alone. Set what it needs in a template, as model.chat_template"
        )


def check_parallel(config: Config | TuningConfig) -> Iterator[str]:
    """Check that the ranks of each role can be arranged as its keys say, with adapters and compiled layers."""
    ranks = config.trainer.nnodes * config.trainer.n_gpus_per_node
    if isinstance(config, TuningConfig):
        yield from config.parallel.faults(ranks, "", "model.fsdp_config")
        yield from check_adapters(config.model, "model", config.parallel, "model.fsdp_config")
        if isinstance(config, PreferencesConfig) and config.trains == "reward_model":
            yield from check_reward_model(config.model)
        return
    roles = config.actor_rollout_ref
    yield from roles.actor.parallel.faults(ranks, f"{ACTOR}.")
    yield from roles.ref_parallel.faults(ranks, "actor_rollout_ref.ref.")
    yield from config.critic.parallel.faults(ranks, "critic.", "model.fsdp_config")
    if config.distillation.teachers:
        yield from config.teacher_parallel.faults(ranks, "distillation.")
    yield from check_adapters(roles.model, "actor_rollout_ref.model", roles.actor.parallel, f"{ACTOR}.fsdp_config")
    if roles.model.lora_rank and not roles.model.lora_merge and (why := why_not_served(config)) is not None:
        yield (
            f"actor_rollout_ref.model.lora_merge=false: adapters cannot be served as they are: {why}. Leave the key "
            "out, and they are merged"
        )
    tensor = max(role.tensor for role in (roles.actor.parallel, roles.ref_parallel, config.critic.parallel))
    if roles.actor.use_torch_compile and tensor > 1:
        yield (
            f"{ACTOR}.use_torch_compile=true conflicts with fsdp_config.tensor_parallel_size={tensor}: layers whose "
            "matrices are split cannot be compiled. Use fsdp_size and ulysses_sequence_parallel_size"
        )


def check_adapters(model: ModelConfig, section: str, parallel: Parallel, fsdp_config: str) -> Iterator[str]:
    """Check that no adapters would have to be split by tensor parallelism."""
    if model.lora_rank and parallel.tensor > 1:
        yield (
            f"{fsdp_config}.tensor_parallel_size={parallel.tensor} conflicts with {section}.lora_rank="
            f"{model.lora_rank}: adapters are not split. Use fsdp_size and ulysses_sequence_parallel_size"
        )


def check_greedy(config: GenerateConfig) -> Iterator[str]:
    """Check that greedy generation asks for one response to a prompt."""
    rollout = config.actor_rollout_ref.rollout
    if not rollout.do_sample and rollout.n > 1:
        yield (
            f"{ROLLOUT}.do_sample=false conflicts with {ROLLOUT}.n={rollout.n}: greedily every response of a prompt "
            "is the same. Set rollout.n=1"
        )
