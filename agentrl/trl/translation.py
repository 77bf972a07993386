"""Translation of TRL's arguments into keys of agentrl: the same numbers, or a refusal in words."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from agentrl.config.installed import is_installed
from agentrl.config.overrides import Value
from agentrl.errors import ConfigError
from agentrl.trl.arguments import ACTOR, BY_NAME, MODEL, OPTIM, ROLLOUT

CORRECTION = "algorithm.rollout_correction"
NO_BOUND = 1e9
"""Dual-clip bound that no ratio reaches."""
LOGGERS = ("wandb", "tensorboard", "trackio", "mlflow", "swanlab")
SCHEDULES = {
    "linear": "linear",
    "cosine": "cosine",
    "cosine_with_min_lr": "cosine",
    "constant": "constant",
    "constant_with_warmup": "constant",
}
"""Schedules of transformers, by their names, that agentrl has with the same rates."""
_BATCH = "per_device_train_batch_size * gradient_accumulation_steps"


@dataclass(frozen=True, slots=True)
class Batches:
    """Sizes that TRL's arguments for batches stand for, in one process."""

    prompts: int
    """Prompts of a generation, which is a step here."""
    mini_batch: int
    """Prompts of an optimizer step."""
    epochs: int
    """Passes over a generation."""
    updates: int
    """Optimizer steps of a generation."""


class Arguments:
    """Values of TRL's arguments, given or TRL's defaults, as a translation reads and refuses them."""

    def __init__(self, given: Mapping[str, object]) -> None:
        self.given = given
        self.faults: list[str] = []

    def __getitem__(self, name: str) -> object:
        return self.given.get(name, BY_NAME[name].default)

    def number(self, name: str) -> float:
        """Read a finite number; anything else is a fault, and counts as 1."""
        value, found = self[name], math.nan
        if isinstance(value, str | int | float) and not isinstance(value, bool):  # a text as YAML reads 1e-6
            with suppress(ValueError, OverflowError):
                found = float(value)
        if math.isfinite(found):
            return found
        self.faults.append(f"{name}={value!r}: expected a number")
        return 1.0

    def whole(self, name: str) -> int:
        """Read a whole number; anything else is a fault, and counts as 1."""
        value = self.number(name)
        if value != int(value):
            self.refuse(name, "expected a whole number")
        return int(value)

    def count(self, name: str) -> int:
        """Read a whole number above 0; anything else is a fault, and counts as 1."""
        value = self.number(name)
        if value != int(value) or value < 1:
            self.faults.append(f"{name}={self[name]!r}: expected a whole number above 0")
            return 1
        return int(value)

    def text(self, name: str) -> str:
        """Read a text, or the text of an enumeration's member, in lower case."""
        value = getattr(self[name], "value", self[name])
        return str(value).lower()

    def mapping(self, name: str) -> Mapping[str, object]:
        """Read a mapping, which may be JSON text; None is empty."""
        value = self[name]
        if isinstance(value, str):
            try:
                value = json.loads(value)
            except ValueError:
                value = self[name]
        if value is None:
            return {}
        if isinstance(value, Mapping):
            return value
        self.faults.append(f"{name}={value!r}: expected a mapping")
        return {}

    def refuse(self, name: str, reason: str) -> None:
        """Note a value that would change the result and is not here."""
        self.faults.append(f"{name}={self[name]!r}: {reason}")

    def raise_faults(self) -> None:
        """Raise ConfigError with all faults."""
        if self.faults:
            lines = "\n".join(f"  {fault}" for fault in self.faults)
            raise ConfigError(f"GRPOConfig: {len(self.faults)} of TRL's arguments cannot be taken over:\n{lines}")


def translate(given: Mapping[str, object], *, model: Path, rows: int) -> dict[str, Value]:
    """Translate TRL's arguments for a data set of so many rows.

    model: the folder of the policy.

    Raises ConfigError with every argument that is refused.
    """
    arguments = Arguments(given)
    _fixed(arguments)
    batches = batch_sizes(arguments)
    steps = total_steps(arguments, batches, rows)
    keys: dict[str, Value] = {
        f"{MODEL}.path": str(model),
        "data.train_batch_size": batches.prompts,
        f"{ACTOR}.ppo_mini_batch_size": batches.mini_batch,
        f"{ACTOR}.ppo_epochs": batches.epochs,
        f"{ROLLOUT}.n": arguments.count("num_generations"),
        "trainer.total_training_steps": max(1, steps),
        "trainer.default_local_dir": output_dir(arguments),
        "trainer.seed": (seed := arguments.whole("seed")),
        "data.seed": seed,
        "algorithm.turn_reward_coef": 0.0,
    }
    if arguments["shuffle_dataset"]:
        keys["data.sampler.name"] = "agentrl.trl.order:RepeatOrder"
    else:
        keys["data.shuffle"] = False
    keys |= _lengths(arguments, model) | _sampling(arguments) | _engine(arguments)
    keys |= _loss(arguments, batches) | _advantages(arguments) | _optimizer(arguments, batches, steps)
    keys |= _model(arguments, model) | _reports(arguments, batches, rows, steps)
    arguments.raise_faults()
    return keys


def output_dir(arguments: Arguments) -> str:
    """Name the folder of the run: TRL's default is trainer_output."""
    return str(arguments["output_dir"] or "trainer_output")


def batch_sizes(arguments: Arguments) -> Batches:
    """Compute TRL's batches: a generation of steps_per_generation micro-batches, num_iterations passes over it, and an
    optimizer step after each gradient_accumulation_steps of them."""
    micro, accumulated = arguments.count("per_device_train_batch_size"), arguments.count("gradient_accumulation_steps")
    trajectories, passes = arguments.count("num_generations"), arguments.count("num_iterations")
    whole, count = arguments["generation_batch_size"], arguments["steps_per_generation"]
    if whole is not None and count is not None:
        arguments.refuse("generation_batch_size", "TRL takes it or steps_per_generation: leave one of them out")
    if whole is not None and arguments.count("generation_batch_size") % micro:
        arguments.refuse("generation_batch_size", f"it must be a multiple of per_device_train_batch_size ({micro})")
    if count is not None:
        pieces = arguments.count("steps_per_generation")
    else:
        pieces = accumulated if whole is None else max(1, arguments.count("generation_batch_size") // micro)
    if trajectories < 2:
        arguments.refuse("num_generations", "GRPO compares the trajectories of a prompt: give 2 or more")
    if pieces % accumulated:
        instead = "" if whole is None else " in place of generation_batch_size"
        arguments.faults.append(
            f"gradient_accumulation_steps={accumulated} and steps_per_generation={pieces}: agentrl ends a generation "
            f"with an optimizer step; give {_aligned(accumulated, pieces, passes, arguments)}{instead}"
        )
    if (micro * pieces) % trajectories:
        arguments.faults.append(
            f"the generation batch of {micro * pieces} trajectories (per_device_train_batch_size={micro} * "
            f"steps_per_generation={pieces}) must be a multiple of num_generations={trajectories}, as in TRL"
        )
    elif (micro * accumulated) % trajectories:
        arguments.faults.append(
            f"an optimizer step of {micro * accumulated} trajectories ({_BATCH}) holds no whole prompts of "
            f"num_generations={trajectories}: give a multiple of {trajectories}"
        )
    prompts, mini_batch = max(1, micro * pieces // trajectories), max(1, micro * accumulated // trajectories)
    return Batches(prompts, mini_batch, passes, max(1, pieces * passes // accumulated))


def _aligned(accumulated: int, pieces: int, passes: int, arguments: Arguments) -> str:
    """Name values whose optimizer steps end with a generation; where there are such, with the same trajectories."""
    if accumulated % (pieces * passes) == 0:  # all passes over several generations in an optimizer step
        steps = accumulated // passes
        same = f"gradient_accumulation_steps={steps}, steps_per_generation={steps}, num_iterations=1"
        if arguments["loss_type"] in ("dapo", "cispo"):
            same += (
                ", with a loss that is the mean over all their tokens, where TRL takes the mean of each generation's"
            )
        if arguments["scale_rewards"] == "batch":
            same += ", and rewards divided by the deviation of all, where TRL takes each generation's"
    elif accumulated % pieces == 0 and (pieces * passes) % accumulated == 0:  # several passes over one generation
        left = pieces * passes // accumulated
        same = f"gradient_accumulation_steps={pieces}, steps_per_generation={pieces}, num_iterations={left}"
    else:
        return f"steps_per_generation={accumulated}, or a multiple"
    return f"the same trajectories by {same}"


def total_steps(arguments: Arguments, batches: Batches, rows: int) -> int:
    """Compute the generations of the run: max_steps, or num_train_epochs; both count optimizer steps."""
    most = arguments.whole("max_steps")
    if most <= 0:
        by_epoch = rows // batches.prompts * batches.updates
        if rows < batches.prompts:
            arguments.faults.append(
                f"train_dataset has {rows} rows, fewer than the {batches.prompts} prompts of a generation: give more "
                f"rows, a smaller {_BATCH}, or a larger num_generations"
            )
        if (epochs := arguments.number("num_train_epochs")) <= 0:
            arguments.refuse("num_train_epochs", "expected a number above 0, or max_steps")
        most = math.ceil(epochs * by_epoch)
    if most % batches.updates:
        arguments.faults.append(
            f"the run of {most} optimizer steps ends inside a generation, which has {batches.updates}: give max_steps, "
            f"a multiple of {batches.updates}"
        )
    return most // batches.updates


def steps_per_epoch(batches: Batches, rows: int) -> int:
    """Compute the generations of a pass over the rows; a last one that is not whole is left out, as in TRL."""
    return max(1, rows // batches.prompts)


def _fixed(arguments: Arguments) -> None:
    """Note arguments whose value would change the result, and switches that are neither on nor off."""
    for name, value in arguments.given.items():
        argument = BY_NAME[name]
        is_switch = argument.kind == "translated" and isinstance(argument.default, bool)
        if is_switch and value not in (True, False, None):  # the text 'false' would be true
            arguments.refuse(name, "expected True or False")
        if argument.kind != "fixed" or value == argument.default:
            continue
        if getattr(value, "value", value) not in (argument.default, *argument.accepted):
            arguments.refuse(name, argument.text)


def _lengths(arguments: Arguments, model: Path) -> dict[str, Value]:
    if arguments["max_completion_length"] is None:
        arguments.refuse("max_completion_length", "a response needs a bound: give the longest one in tokens")
        return {}
    response = arguments.count("max_completion_length")
    keys: dict[str, Value] = {"data.max_response_length": response, "data.filter_overlong_prompts": False}
    of_vllm = arguments["use_vllm"] and arguments["vllm_max_model_length"] is not None
    longest = arguments.count("vllm_max_model_length") if of_vllm else None
    if arguments["max_prompt_length"] is not None:
        prompt = arguments.count("max_prompt_length")
        if longest is not None:
            keys[f"{ROLLOUT}.max_model_len"] = longest
            if longest < prompt + response:
                arguments.refuse(
                    "vllm_max_model_length",
                    f"give max_prompt_length + max_completion_length ({prompt} + {response}) or more, or leave it out",
                )
        return keys | {"data.max_prompt_length": prompt, "data.truncation": "left"}
    positions = longest_context(model)
    if longest is not None:
        positions = min(positions, longest)
        keys[f"{ROLLOUT}.max_model_len"] = positions
    if positions <= response:
        arguments.refuse("max_completion_length", f"the model's context has {positions} tokens: give fewer")
    return keys | {"data.max_prompt_length": max(1, positions - response)}


def longest_context(model: Path) -> int:
    """Read the positions of a model from its config.json. Raises ConfigError."""
    try:
        config = json.loads((model / "config.json").read_text(encoding="utf-8"))
        found = config.get("max_position_embeddings") or config.get("text_config", {})["max_position_embeddings"]
        return int(found)
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        raise ConfigError(
            f"GRPOTrainer: {model}/config.json gives no max_position_embeddings, by which the longest prompt is known: "
            "give GRPOConfig(max_prompt_length=...), or the folder of a model"
        ) from None


def _sampling(arguments: Arguments) -> dict[str, Value]:
    top_k = arguments["top_k"]
    sampling: dict[str, Value] = {
        "temperature": arguments.number("temperature"),
        "top_p": arguments.number("top_p"),
        "top_k": arguments.count("top_k") if top_k not in (None, 0, -1) else -1,
    }
    keys = {f"{ROLLOUT}.{name}": value for name, value in sampling.items()}
    if kwargs := arguments.mapping("chat_template_kwargs"):
        keys[f"{MODEL}.chat_template_kwargs"] = dict(kwargs)  # type: ignore[arg-type]  # checked by the config
    return keys


def validation(given: Mapping[str, object]) -> dict[str, Value]:
    """Translate the arguments of TRL's evaluation: as many sampled trajectories of each prompt, and no greedy one."""
    arguments = Arguments(given)
    name = "num_generations_eval" if arguments["num_generations_eval"] else "num_generations"
    keys: dict[str, Value] = {
        f"{ROLLOUT}.val_kwargs.{key.rpartition('.')[2]}": value
        for key, value in _sampling(arguments).items()
        if key.startswith(ROLLOUT)
    }
    return keys | {f"{ROLLOUT}.val_kwargs.n": arguments.count(name), f"{ROLLOUT}.val_kwargs.greedy": False}


def _engine(arguments: Arguments) -> dict[str, Value]:
    if not arguments["use_vllm"]:
        return {f"{ROLLOUT}.name": "embedded"}
    keys: dict[str, Value] = {
        f"{ROLLOUT}.name": "vllm",
        f"{ROLLOUT}.gpu_memory_utilization": arguments.number("vllm_gpu_memory_utilization"),
        f"{ROLLOUT}.tensor_model_parallel_size": arguments.count("vllm_tensor_parallel_size"),
        f"{ROLLOUT}.free_cache_engine": bool(arguments["vllm_enable_sleep_mode"]),
    }
    if not arguments["vllm_importance_sampling_correction"]:
        return keys
    level, _, outside = arguments.text("vllm_importance_sampling_mode").rpartition("_")
    if level not in ("token", "sequence") or outside not in ("mask", "truncate"):
        arguments.refuse("vllm_importance_sampling_mode", "expected token_ or sequence_ and mask or truncate")
        return keys
    former = arguments["vllm_importance_sampling_cap"] is not None
    most = "vllm_importance_sampling_cap" if former else "vllm_importance_sampling_clip_max"
    keys |= {f"{CORRECTION}.rollout_is": level, f"{CORRECTION}.rollout_is_outside": outside}
    keys[f"{CORRECTION}.rollout_is_threshold"] = NO_BOUND if arguments[most] is None else arguments.number(most)
    if arguments["vllm_importance_sampling_clip_min"] is not None:
        keys[f"{CORRECTION}.rollout_is_lower"] = arguments.number("vllm_importance_sampling_clip_min")
    return keys


def _loss(arguments: Arguments, batches: Batches) -> dict[str, Value]:
    """Choose loss and aggregation; see docs/trl.md for TRL's formulas."""
    kind, level = arguments.text("loss_type"), arguments.text("importance_sampling_level")
    low = arguments.number("epsilon")
    high = low if arguments["epsilon_high"] is None else arguments.number("epsilon_high")
    aggregations = {"grpo": "seq-mean-token-mean", "sapo": "seq-mean-token-mean", "luspo": "seq-mean-token-sum"}
    aggregations |= {"bnpo": "token-mean", "dapo": "token-mean", "cispo": "token-mean"}
    aggregations["dr_grpo"] = "seq-mean-token-sum-norm"
    if kind not in aggregations:
        arguments.refuse("loss_type", f"known here are {', '.join(sorted(aggregations))}")
        return {}
    keys: dict[str, Value] = {f"{ACTOR}.loss_agg_mode": aggregations[kind], f"{ACTOR}.use_kl_loss": False}
    accumulated = arguments.count("gradient_accumulation_steps")
    if kind == "bnpo" and accumulated > 1:
        arguments.refuse(
            "loss_type", "with gradient_accumulation_steps above 1 TRL averages each micro-batch by itself: take 'dapo'"
        )
    if kind in ("dapo", "cispo") and batches.mini_batch < batches.prompts:
        arguments.refuse(
            "loss_type",
            "with several optimizer steps in a pass TRL divides each of them by the tokens of all: take 'grpo' or "
            "'dr_grpo', or steps_per_generation=gradient_accumulation_steps",
        )
    if kind == "cispo":
        if high < 1:
            arguments.refuse(
                "epsilon_high", "with loss_type='cispo' TRL bounds the ratio by it: give 5.0, or 1 or more"
            )
        keys |= {f"{ACTOR}.policy_loss.loss_mode": "cispo", f"{ACTOR}.clip_ratio_low": 1.0}
        keys[f"{ACTOR}.clip_ratio_high"] = max(high - 1, 1e-9)
    elif kind == "sapo":
        keys[f"{ACTOR}.policy_loss.loss_mode"] = "sapo"
        keys[f"{ACTOR}.policy_loss.options"] = {
            "tau_pos": arguments.number("sapo_temperature_pos"),
            "tau_neg": arguments.number("sapo_temperature_neg"),
        }
    else:
        keys |= {f"{ACTOR}.clip_ratio_low": low, f"{ACTOR}.clip_ratio_high": high}
        if level == "token":
            keys[f"{ACTOR}.policy_loss.loss_mode"] = "vanilla"
            keys[f"{ACTOR}.clip_ratio_c"] = _dual_clip(arguments, high)
    keys |= _level(arguments, kind, level)
    if arguments["mask_truncated_completions"]:
        if kind not in ("dapo", "cispo", "bnpo"):
            arguments.refuse(
                "mask_truncated_completions",
                f"loss_type={kind!r} counts truncated trajectories in its mean: take 'dapo'",
            )
        keys["algorithm.masked_statuses"] = ["length"]
    return keys | _regularizers(arguments, batches, kind, accumulated)


def _dual_clip(arguments: Arguments, high: float) -> float:
    if arguments["delta"] is None:
        return NO_BOUND
    delta = arguments.number("delta")
    if delta <= 1 + high:
        arguments.refuse(
            "delta", f"at most 1 + epsilon_high ({1 + high:g}) it bounds tokens of any advantage: give more"
        )
    return delta


def _level(arguments: Arguments, kind: str, level: str) -> dict[str, Value]:
    """Choose the ratio by sequence, of the losses with clipped ratios."""
    if level == "token":
        return {}
    if level != "sequence":
        arguments.refuse("importance_sampling_level", "expected 'token' or 'sequence'")
    elif kind not in ("grpo", "luspo", "bnpo", "dapo", "dr_grpo"):
        arguments.refuse("importance_sampling_level", f"loss_type={kind!r} weighs tokens: take 'token'")
    elif arguments["delta"] is not None:
        arguments.refuse("delta", "a ratio by sequence has no second bound here: leave it out")
    return {f"{ACTOR}.policy_loss.loss_mode": "gspo"}


def _regularizers(arguments: Arguments, batches: Batches, kind: str, accumulated: int) -> dict[str, Value]:
    """Translate the KL divergence and the entropy bonus."""
    keys: dict[str, Value] = {}
    if (beta := arguments.number("beta")) != 0:
        unbiased = bool(arguments["use_bias_correction_kl"])
        if unbiased and (batches.updates > 1 or arguments.text("importance_sampling_level") != "token"):
            arguments.refuse(
                "beta",
                "with several optimizer steps a generation, or a ratio by sequence, TRL weighs the KL by the ratio: "
                "give use_bias_correction_kl=False, or one optimizer step and 'token'",
            )
        keys |= {f"{ACTOR}.use_kl_loss": True, f"{ACTOR}.kl_loss_coef": beta}
        keys[f"{ACTOR}.kl_loss_type"] = "k3+" if unbiased else "k3"
    if (entropy := arguments.number("entropy_coef")) != 0:
        if kind not in ("dapo", "bnpo", "cispo") or accumulated > 1:
            arguments.refuse(
                "entropy_coef",
                "TRL averages the entropy by micro-batch: give gradient_accumulation_steps=1 and a loss_type that is a "
                "mean over tokens (dapo, bnpo, cispo)",
            )
        keys[f"{ACTOR}.entropy_coeff"] = entropy
    return keys


def _advantages(arguments: Arguments) -> dict[str, Value]:
    scale: object = arguments["scale_rewards"]
    scale = (
        {True: "group", False: "none"}.get(scale, scale) if isinstance(scale, bool) else arguments.text("scale_rewards")
    )
    if scale not in ("group", "batch", "none"):
        arguments.refuse("scale_rewards", "expected 'group', 'batch' or 'none'")
        return {}
    how = arguments.text("multi_objective_aggregation")
    if how == "sum_then_normalize":
        options: dict[str, Value] = {"scale": str(scale)}
        return {"algorithm.adv_estimator": "agentrl.trl.advantages:relative", "algorithm.adv_options": options}
    if how != "normalize_then_sum":
        arguments.refuse("multi_objective_aggregation", "expected 'sum_then_normalize' or 'normalize_then_sum'")
    return {"algorithm.adv_estimator": "agentrl.trl.advantages:by_reward"}


def _optimizer(arguments: Arguments, batches: Batches, steps: int) -> dict[str, Value]:
    kind = arguments.text("lr_scheduler_type").removeprefix("schedulertype.")
    keys: dict[str, Value] = {
        f"{OPTIM}.lr": arguments.number("learning_rate"),
        f"{OPTIM}.betas": [arguments.number("adam_beta1"), arguments.number("adam_beta2")],
        f"{OPTIM}.weight_decay": arguments.number("weight_decay"),
        f"{OPTIM}.decay_vectors": False,
    }
    if (norm := arguments.number("max_grad_norm")) > 0:
        keys[f"{ACTOR}.grad_clip"] = norm
    else:
        keys[f"{ACTOR}.grad_clip"] = NO_BOUND
    if kind not in SCHEDULES:
        arguments.refuse("lr_scheduler_type", f"known here are {', '.join(SCHEDULES)}")
        return keys
    keys[f"{OPTIM}.lr_scheduler_type"] = SCHEDULES[kind]
    if batches.updates > 1:
        keys[f"{OPTIM}.lr_by_mini_batch"] = True
    warmup = _warmup(arguments, steps * batches.updates) if kind != "constant" else 0
    if warmup:
        keys |= {f"{OPTIM}.lr_warmup_steps": warmup / batches.updates, f"{OPTIM}.lr_warmup_from_zero": True}
    return keys | _schedule_options(arguments, kind)


def _schedule_options(arguments: Arguments, kind: str) -> dict[str, Value]:
    options = dict(arguments.mapping("lr_scheduler_kwargs"))
    keys: dict[str, Value] = {}
    if kind == "cosine_with_min_lr":
        least, rate = options.pop("min_lr", None), options.pop("min_lr_rate", None)
        if isinstance(least, int | float):
            rate = least / arguments.number("learning_rate")
        if not isinstance(rate, int | float):
            arguments.refuse("lr_scheduler_kwargs", "cosine_with_min_lr needs min_lr or min_lr_rate")
        else:
            keys[f"{OPTIM}.min_lr_ratio"] = rate
    if options:
        arguments.refuse("lr_scheduler_kwargs", f"{', '.join(options)}: only min_lr and min_lr_rate are here")
    return keys


def _warmup(arguments: Arguments, steps: int) -> int:
    """Compute the optimizer steps of the warm-up: warmup_steps; a value below 1 is a part of all."""
    given = arguments.number("warmup_steps")
    if given < 0:
        arguments.refuse("warmup_steps", "expected 0 or more")
    if given < 0 or given >= 1:
        return int(given)
    part = given or (0.0 if arguments["warmup_ratio"] is None else arguments.number("warmup_ratio"))
    if not 0 <= part <= 1:
        arguments.refuse("warmup_ratio", "expected a part of the run, from 0 to 1")
    return math.ceil(part * steps)


def _model(arguments: Arguments, folder: Path) -> dict[str, Value]:
    options = dict(arguments.mapping("model_init_kwargs"))
    dtype = str(options.pop("dtype", None) or options.pop("torch_dtype", None) or "float32").removeprefix("torch.")
    options.pop("torch_dtype", None)
    if dtype == "auto":
        dtype = _own_dtype(folder)
    for quiet in ("attn_implementation", "use_cache", "device_map", "low_cpu_mem_usage"):  # speed alone
        options.pop(quiet, None)
    if options.pop("trust_remote_code", False):
        arguments.given = {**arguments.given, "trust_remote_code": True}
    if options:
        arguments.refuse("model_init_kwargs", f"{', '.join(options)}: agentrl loads the folder's weights as they are")
    if dtype not in ("float32", "bfloat16"):
        arguments.refuse("model_init_kwargs", f"dtype {dtype}: expected float32 or bfloat16")
    elif dtype == "bfloat16" and arguments["cast_lm_head_to_fp32"]:
        arguments.refuse("cast_lm_head_to_fp32", "with bfloat16 parameters the head is bfloat16, too: take float32")
    keys: dict[str, Value] = {f"{MODEL}.dtype": dtype}
    if arguments["trust_remote_code"]:
        keys[f"{MODEL}.trust_remote_code"] = True
    keys[f"{MODEL}.enable_gradient_checkpointing"] = bool(arguments["gradient_checkpointing"])
    keys[f"{ACTOR}.use_torch_compile"] = bool(arguments["torch_compile"])
    if arguments["router_aux_loss_coef"] is not None:
        coefficient = arguments.number("router_aux_loss_coef")
        keys[f"{ACTOR}.strategy_options"] = {"moe_aux_loss_coeff": coefficient} if coefficient else {}
    return keys


def _own_dtype(folder: Path) -> str:
    """Read the dtype of a model's folder; float32 where its config has no dtype."""
    config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    return str(config.get("dtype") or config.get("torch_dtype") or "float32").removeprefix("torch.")


def _reports(arguments: Arguments, batches: Batches, rows: int, steps: int) -> dict[str, Value]:
    wanted = arguments["report_to"]
    names = [wanted] if isinstance(wanted, str) else list(wanted) if isinstance(wanted, list | tuple) else []
    loggers = [name for name in map(str, names) if name not in ("none", "all")]
    if "all" in names:
        loggers += [name for name in LOGGERS if name not in loggers and is_installed(name)]
    if unknown := [name for name in loggers if name not in LOGGERS]:
        known = f"{', '.join(LOGGERS)}, all (each that is installed) and none"
        arguments.refuse("report_to", f"{', '.join(unknown)}: known here are {known}")
    folder = Path(output_dir(arguments))
    keys: dict[str, Value] = {
        "trainer.logger": ["console", "jsonl", *loggers],
        "trainer.project_name": arguments["project"] if isinstance(arguments["project"], str) else "huggingface",
        "trainer.experiment_name": str(arguments["run_name"] or folder.resolve().name),
        "trainer.save_freq": frequency(arguments, "save", batches, rows, steps),
        "trainer.device": "cpu" if arguments["use_cpu"] else "auto",
    }
    kept = arguments["save_total_limit"]
    keys["trainer.max_actor_ckpt_to_keep"] = None if kept is None else arguments.count("save_total_limit")
    if not arguments["log_completions"]:
        keys["trainer.show_trajectory_freq"] = -1
    return keys


def frequency(arguments: Arguments, kind: str, batches: Batches, rows: int, steps: int) -> int:
    """Compute the generations between two saves or validations; -1: only at the end.

    `kind`: save, eval or logging. `rows`: of the data set. Numbers of TRL count optimizer steps, and below 1 they are a
    part of all. They are rounded up to whole generations.
    """
    strategy = arguments.text(f"{kind}_strategy").rpartition(".")[2]
    if strategy == "no":
        return -1
    if strategy == "epoch":
        return steps_per_epoch(batches, rows)
    if strategy != "steps":
        arguments.refuse(f"{kind}_strategy", "expected 'no', 'steps' or 'epoch'")
        return -1
    name = "logging_steps" if kind == "eval" and arguments["eval_steps"] in (None, 0) else f"{kind}_steps"
    every = arguments.number(name)
    if every <= 0 and kind == "save":  # as in transformers
        return -1
    if every <= 0:
        arguments.refuse(name, f"with {kind}_strategy='steps' expected a number above 0")
    if 0 < every < 1:
        every = math.ceil(steps * batches.updates * every)
    return max(1, math.ceil(every / batches.updates))
