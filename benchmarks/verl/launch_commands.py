"""Counts which public launch commands of verl's run here, and compares what they train with verl's own configs.

FOLDERs are clones of verl, of its recipes and of forks. Every training command in their scripts and documents is read
as `python -m agentrl.verl check` reads it (no script is run), from the clone's own folder, and judged. Where a command
is accepted, the values that decide the algorithm are compared with those of the config that verl composes from it.

    git clone https://github.com/verl-project/verl /tmp/verl
    git clone https://github.com/verl-project/verl-recipe /tmp/verl/recipe
    git clone --branch v0.2 https://github.com/verl-project/verl /tmp/first
    python -m benchmarks.verl.launch_commands --verl /tmp/verl --first /tmp/first /tmp/verl /tmp/verl/recipe

Quantities (`benchmarks.verl.quantities`) are what a config makes the trainer do, by our code and by the formulas of the
release that the command is of; a key that a release's YAML lacks is compared in them alone.
"""

from __future__ import annotations

import argparse
import contextlib
import functools
import math
import re
import warnings
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from agentrl.config import Config
from agentrl.config.command_line import parse_command_line
from agentrl.config.keys import flatten, leaf_keys
from agentrl.config.load import compose_keys, resolve, told_as_config_errors, validate
from agentrl.errors import ConfigError
from agentrl.system.json_value import JSON, as_object
from agentrl.verl.check import Launch, judge, launches
from agentrl.verl.keys.rewrites import REJECTIONS
from agentrl.verl.launch import CONFIGS, DAPO, FIRST, PPO, SEARCH_R1, arguments
from benchmarks.verl.composed import TRAINERS, composed
from benchmarks.verl.quantities import different
from benchmarks.verl.release_steps import Release

FORK, ASYNCHRONOUS_MAINS, FIRST_RELEASES = "Search-R1's fork", "asynchronous mains", "verl's first releases"
TRAINS = re.compile(r"(?!.*sft|.*eval|.*generation|.*log_parser|.*preprocess).*(main_|_main|train).*")
SCRIPTS, BLOCKS = (
    (".sh", ".slurm", ".sbatch"),
    {
        ".md": re.compile(r"```(?:bash|shell|sh)?\s*\n(.*?)```", re.DOTALL),
        ".rst": re.compile(r"code(?:-block)?:: *(?:bash|shell|sh|console)[^\n]*\n((?:[ \t]+[^\n]*\n|\n)+)"),
    },
)
WRONG = {
    "a placeholder, or a slip of the shell's": r"this is no override|TO_BE_FILLED|base_dir/recipe",
    "a file that is not there": r"no such file|no such folder",
    "a key, a value or a size that verl refuses, too": (
        r"is not the size of a mini-batch|must divide the \d+ ranks|data.train_batch_size: expected greater than 0|"
        r"valid boolean|data.truncation: expected .* found 'center'|"
        r"unknown key (train_batch_size|.*single_turn_response_length)"
    ),
}
"""Reasons why verl itself would not run a command as it stands, by what the messages of its refusal say."""
OWN_CODE = {
    "the recipe's own code": r"recipe's own|agent_loop_manager_class|reward_kwargs\.|=collabllm|custom_cls.path",
    "code of another project": r"mlite_actor",
}
RIGHT = {
    "another device (trainer.device=npu)": r"trainer.device=npu",
    "quantised training or rollouts": r"quantised|fp8_recipe",
    "float16": r"float32 or bfloat16",
    "a loss that verl itself does not take (bypass_mode)": r"whatever loss_mode says",
    "weights divided by the mean of each micro-batch, whose size would count": r"the mean of each micro-batch",
    "steps that generate nothing": r"every step generates",
    "keys of two ages of verl's": r"a key of verl's first releases",
    "another warm-up": r"optim.lr_warmup_init=|ignore_eos|data.min_response_length",
}
"""Reasons for a refusal that stays."""
WAITS = {
    "further tokens, by which all layers learn": r"further tokens are not",
    "routing replayed of experts that SGLang chose": r"asks? SGLang's servers for them",
    "reward models without a name": r"name the model: reward_model",
}
"""Parts of agentrl that a command waits for."""
REASONS = WRONG | OWN_CODE | RIGHT | WAITS
"""Explanations of refusals, first those that count where a command has several. All others are to be mended."""
KINDS = {"wrong": WRONG, "own code": OWN_CODE, "rightly refused": RIGHT, "waits": WAITS}


@dataclass(slots=True)
class Count:
    """The commands of a group by what became of them."""

    outcomes: Counter[str] = field(default_factory=Counter)
    unexplained: list[str] = field(default_factory=list)
    wrong: list[str] = field(default_factory=list)
    different: list[str] = field(default_factory=list)
    compared: int = 0


def found_in(folder: Path) -> Iterator[tuple[Path, Launch]]:
    """List the training commands of a folder's scripts and documents."""
    for path in sorted(folder.rglob("*")):
        if path.suffix not in (*SCRIPTS, *BLOCKS) or not path.is_file():
            continue
        text = path.read_text(encoding="utf-8", errors="replace")
        parts = BLOCKS[path.suffix].findall(text) if path.suffix in BLOCKS else [text]
        for launch in (launch for part in parts for launch in launches(part)):
            if TRAINS.fullmatch(launch.module) and (launch.words or launch.unknown):
                yield path, launch


def group_of(launch: Launch) -> str:
    """Name the group that a command is counted in."""
    name = CONFIGS.get(launch.module)
    words = " ".join(launch.words)
    if name is None:
        return "recipes' own mains"
    if name == DAPO:
        return "main_dapo"
    if name != PPO or "trainer_mode=" in words:
        return ASYNCHRONOUS_MAINS
    start = arguments(launch.words, PPO)[0]
    if start in (f"--config-name={SEARCH_R1}", f"--config-name={FIRST}"):
        return FORK if SEARCH_R1 in start else FIRST_RELEASES
    other = re.search(r"megatron|veomni|torchtitan|mindspeed|automodel|mlite", words)
    return "main_ppo on Megatron and others" if other else "main_ppo on FSDP"


def outcome_of(faults: list[str]) -> tuple[str, list[str]]:
    """Name what became of a command, and list the faults that no known reason explains."""
    if not faults:
        return "accepted", []
    lines = [line for fault in faults for line in fault.splitlines() if "prints all keys" not in line]
    reasons = [next((name for name, why in REASONS.items() if re.search(why, line)), None) for line in lines]
    unexplained = [line for line, reason in zip(lines, reasons, strict=True) if reason is None]
    if unexplained:
        return "not explained", unexplained
    first = min((reason for reason in reasons if reason is not None), key=list(REASONS).index)
    kind = next(kind for kind, reasons in KINDS.items() if first in reasons)
    return f"{kind}: {first}", []


Reference = Mapping[str, JSON]
ACTOR, ROLLOUT, VALIDATION = (f"actor_rollout_ref.{name}" for name in ("actor", "rollout", "rollout.val_kwargs"))
CORRECTION = "algorithm.rollout_correction"
SAME = (
    *("data.train_batch_size", "data.max_prompt_length", "data.max_response_length", "data.shuffle"),
    *("algorithm.gamma", "algorithm.lam", "algorithm.norm_adv_by_std_in_grpo", "algorithm.use_kl_in_reward"),
    *("algorithm.kl_penalty", "algorithm.kl_ctrl.type", "algorithm.kl_ctrl.kl_coef", "algorithm.kl_ctrl.horizon"),
    "algorithm.kl_ctrl.target_kl",
    *(f"{ACTOR}.{name}" for name in ("loss_agg_mode", "clip_ratio_c", "entropy_coeff", "use_kl_loss", "kl_loss_coef")),
    *(f"{ACTOR}.{name}" for name in ("kl_loss_type", "ppo_epochs", "ppo_mini_batch_size", "shuffle")),
    *(f"{ACTOR}.{name}" for name in ("policy_loss.loss_mode", "optim.lr", "optim.weight_decay", "optim.betas")),
    *("critic.optim.lr", "critic.optim.weight_decay", "critic.cliprange_value"),
    *(f"{ROLLOUT}.{name}" for name in ("temperature", "top_p")),
    *("trainer.total_epochs", "trainer.total_training_steps", "trainer.test_freq", "trainer.val_before_train"),
)
"""Keys whose value is the same in both."""

OTHERWISE = (f"{ACTOR}.ppo_mini_batch_size",)
"""Keys whose value the code of a fork takes for something else."""


def warm_up(section: str) -> Callable[[Reference], JSON]:
    """Steps of the warm-up, or their part of all steps: verl reads the part where the steps are not above 0."""

    def read(values: Reference) -> JSON:
        steps, part = values.get(f"{section}.lr_warmup_steps"), values.get(f"{section}.lr_warmup_steps_ratio")
        return ["steps", steps] if isinstance(steps, int) and steps > 0 else ["part", float(part or 0)]  # type: ignore

    return read


def side(name: str) -> Callable[[Reference], JSON]:
    """Bound of the ratio on one side: clip_ratio where it is null."""
    return lambda values: first(values, f"{ACTOR}.{name}", f"{ACTOR}.clip_ratio")


def first(values: Reference, *keys: str) -> JSON:
    """Return the first value that is not null."""
    return next((values[key] for key in keys if values.get(key) is not None), None)


def number(values: Reference, key: str) -> int:
    value = values[key]
    assert isinstance(value, int)
    return value


def samples(values: Reference) -> bool:
    """Say whether validation samples, by verl's config."""
    return bool(values.get(f"{VALIDATION}.temperature"))


def clip_of(role: str) -> Callable[[Reference], JSON]:
    """Largest norm of a role's gradients, which verl has under two names: the one that is not 1.0 holds."""
    return lambda values: next(
        (
            value
            for key in ("optim.clip_grad", "grad_clip")
            if (value := values.get(f"{role}.{key}")) not in (None, 1.0)
        ),
        1.0,
    )


def manager(values: Reference) -> JSON:
    """Read the reward manager."""
    named = values.get("reward_model.reward_manager") or values.get("reward.reward_manager.name")
    return "naive" if named is None else named


FROM: dict[str, tuple[Callable[[Reference], JSON], Callable[[Reference], JSON]]] = {
    "estimator": (
        lambda ours: ours["algorithm.adv_estimator"],
        lambda verls: str(verls["algorithm.adv_estimator"]).removesuffix("_vectorized"),
    ),
    "clip low": (side("clip_ratio_low"),) * 2,
    "clip high": (side("clip_ratio_high"),) * 2,
    "clip of the policy's gradients": (lambda ours: ours[f"{ACTOR}.grad_clip"], clip_of(ACTOR)),
    "clip of the critic's gradients": (lambda ours: ours["critic.grad_clip"], clip_of("critic")),
    "warm-up": (warm_up(f"{ACTOR}.optim"),) * 2,
    "critic's warm-up": (warm_up("critic.optim"),) * 2,
    "first step of the policy": (
        lambda ours: number(ours, "trainer.critic_warmup") + 1,
        lambda verls: max(1, number(verls, "trainer.critic_warmup")),
    ),
    "trajectories a prompt": (
        lambda ours: ours[f"{ROLLOUT}.n"],
        lambda verls: first(verls, f"{ROLLOUT}.n_agent", f"{ROLLOUT}.n"),
    ),
    "top_k": (
        lambda ours: ours[f"{ROLLOUT}.top_k"],
        lambda verls: -1 if verls[f"{ROLLOUT}.top_k"] == 0 else verls[f"{ROLLOUT}.top_k"],
    ),
    "course of the rate": (
        lambda ours: ours[f"{ACTOR}.optim.lr_scheduler_type"],
        lambda verls: first(
            verls,
            *(
                f"{ACTOR}.optim.{name}"
                for name in ("lr_decay_style", "decay_type", "warmup_style", "lr_scheduler_type")
            ),
        ),
    ),
    "reward manager": (
        lambda ours: ours["reward_model.reward_manager"],
        manager,
    ),
    "scorer": (
        lambda ours: ours["custom_reward_function.path"],
        lambda verls: first(verls, "custom_reward_function.path", "reward.custom_reward_function.path"),
    ),
    "scorer's name": (
        lambda ours: ours["custom_reward_function.path"] and ours["custom_reward_function.name"],
        lambda verls: (
            first(verls, "custom_reward_function.path", "reward.custom_reward_function.path")
            and first(verls, "custom_reward_function.name", "reward.custom_reward_function.name")
        ),
    ),
    "validation samples": (lambda ours: ours[f"{VALIDATION}.do_sample"], samples),
    "validation's temperature": (
        lambda ours: ours[f"{VALIDATION}.do_sample"] and ours[f"{VALIDATION}.temperature"],
        lambda verls: samples(verls) and verls[f"{VALIDATION}.temperature"],
    ),
    "validation's n": (
        lambda ours: ours[f"{VALIDATION}.n"],
        lambda verls: verls[f"{VALIDATION}.n"] if samples(verls) else 1,
    ),
    "validation's top_p": (
        lambda ours: ours[f"{VALIDATION}.do_sample"] and ours[f"{VALIDATION}.top_p"],
        lambda verls: samples(verls) and verls[f"{VALIDATION}.top_p"],
    ),
    "staleness and publications": (
        lambda ours: [ours["async_training.max_staleness"], ours["async_training.publish_every"]],
        lambda verls: staleness(verls),
    ),
    "the ratio's policy": (lambda ours: ours[f"{CORRECTION}.proximal"], lambda verls: proximal_of(verls)),
    "importance weight": (
        lambda ours: ours[f"{CORRECTION}.rollout_is"],
        lambda verls: verls[f"{CORRECTION}.rollout_is"] if weighed(verls) else None,
    ),
    "bound of the importance weight": (
        lambda ours: ours[f"{CORRECTION}.rollout_is"] and ours[f"{CORRECTION}.rollout_is_threshold"],
        lambda verls: (
            float(str(verls[f"{CORRECTION}.rollout_is_threshold"]).split("_")[-1]) if weighed(verls) else None
        ),
    ),
    "rejection": (
        lambda ours: sorted(as_object(ours[f"{CORRECTION}.reject"]).keys() - {"veto"}),
        lambda verls: rejected(verls),
    ),
    "rank of adapters": (
        lambda ours: ours["actor_rollout_ref.model.lora_rank"],
        lambda verls: (
            verls.get("actor_rollout_ref.model.lora_rank") or verls.get("actor_rollout_ref.model.lora.rank") or 0
        ),
    ),
}
"""Values that the two configs write differently: how each is read from our config and from verl's."""


def differences(launch: Launch, verl: Path) -> list[str]:
    """Compare the values that decide the algorithm. Raises Hydra's errors where verl itself refuses the command."""
    command = parse_command_line(arguments(launch.words, CONFIGS[launch.module]), "ppo_trainer", Config)
    with told_as_config_errors():
        config = validate(resolve(compose_keys(command, Config), Config), Config)
    ours = flatten(config.model_dump(mode="json"), leaf_keys(Config))
    name = command.config_name.removesuffix(".yaml")
    release: Release = {SEARCH_R1: "search_r1", FIRST: "0.2"}.get(name, "main")  # type: ignore[assignment]
    chosen = list(command.overrides)
    if name in (SEARCH_R1, FIRST):  # those releases have a file for Megatron, no group
        name = "ppo_megatron_trainer" if "model_engine=megatron" in chosen else "ppo_trainer"
        chosen = [word for word in chosen if not word.startswith("model_engine=")]
    folder = command.config_path if command.config_path is not None else folder_of(name, verl)
    overrides = [word if _is_group(word) else f"++{word.lstrip('+')}" for word in chosen]
    verls: Reference = composed(verl, folder, name, overrides)
    if SEARCH_R1 in command.config_name:
        verls = as_fork(verls)
    if name.startswith("dapo") and not verls["algorithm.filter_groups.enable"]:  # `batch = new_batch` of its trainer
        verls = {**verls, "data.train_batch_size": verls["data.gen_batch_size"]}
    if "async_training.staleness_threshold" in verls:
        verls = as_fully_async(verls)
    if verls.get(f"{ACTOR}.policy_loss.loss_mode") in ("gspo", "sapo", "geo_mean"):  # written into their functions
        verls = {**verls, f"{ACTOR}.loss_agg_mode": "seq-mean-token-mean"}
    found = different(config, verls, release)
    # First releases lack some keys, and read mini-batches otherwise: the quantities are of those.
    has = [key for key in SAME if key in verls and not (release != "main" and key in OTHERWISE)]
    found += [f"{key}: {ours.get(key)!r}, verl {verls[key]!r}" for key in has if not _equal(ours, verls, key)]
    for what, (mine, theirs) in FROM.items():
        if mine(ours) != theirs(verls):
            found.append(f"{what}: {mine(ours)!r}, verl {theirs(verls)!r}")
    return found


def as_fork(verls: Reference) -> Reference:
    """Say in verl's words what the keys of Search-R1's fork come to."""
    turns, turn, seen = verls["max_turns"], verls["data.max_response_length"], verls["data.max_obs_length"]
    assert isinstance(turns, int) and isinstance(turn, int) and isinstance(seen, int)
    return {
        "data.max_prompt_length": verls["data.max_start_length"],
        "data.max_response_length": turns * (turn + seen) + turn,
        "data.shuffle": verls["data.shuffle_train_dataloader"],
        **{key: value for key, value in verls.items() if not key.startswith("data.max_")},
    }


@functools.cache
def folder_of(name: str, clone: Path) -> Path:
    """Find the folder of a clone with the YAML that a trainer starts from: the trainers' own, or a recipe's."""
    found = [clone / TRAINERS / f"{name}.yaml", *sorted(clone.rglob(f"config/{name}.yaml"))]
    return next((path.parent for path in found if path.is_file()), clone / TRAINERS)


def as_fully_async(verls: Reference) -> Reference:
    """Say in words of verl's other trainers what the keys of its fully asynchronous one come to.

    Its code reads those (`fully_async_trainer.py`, `fully_async_rollouter.py`): the prompts of an update, those of the
    run, of which an update needs all of its own, and frequencies in publications.
    """
    every, batch, total, tests = (
        verls["async_training.trigger_parameter_sync_step"],
        verls["async_training.require_batches"],
        verls["rollout.total_rollout_steps"],
        first(verls, "rollout.test_freq", "trainer.test_freq"),
    )
    mini = verls[f"{ACTOR}.ppo_mini_batch_size"]
    assert isinstance(every, int) and isinstance(batch, int) and isinstance(mini, int) and isinstance(tests, int)
    epochs = first(verls, "rollout.total_epochs", "trainer.total_epochs")
    steps = max(1, total // (mini * batch)) if isinstance(total, int) else None
    return {
        **verls,
        "data.train_batch_size": mini * batch,
        "trainer.total_training_steps": steps,
        "trainer.test_freq": tests * every if tests > 0 else tests,
        "trainer.total_epochs": epochs,
    }


def staleness(verls: Reference) -> JSON:
    """Versions that a token may be old in verl's trainer, and those from one publication to the next."""
    mode = verls.get("trainer.v1.trainer_mode", "sync")
    if mode != "sync" and verls["trainer.use_v1"]:  # replay_buffer.py: `global_steps - begun + 1 > threshold`
        threshold = verls["trainer.v1.sampler.max_off_policy_threshold"]
        assert isinstance(threshold, int)
        return [threshold - 1 if verls[f"trainer.v1.{mode}.num_warmup_batches"] else 0, 1]
    if "async_training.staleness_threshold" not in verls:
        return [1, 1] if verls.get("actor_rollout_ref.hybrid_engine") is False else [0, 1]
    every, part = verls["async_training.trigger_parameter_sync_step"], verls["async_training.staleness_threshold"]
    assert isinstance(every, int) and isinstance(part, int | float)
    return [math.ceil(round(every * (1 + part), 9)) - 1, every]


def proximal_of(verls: Reference) -> JSON:
    """Policy of the ratio, by the code of verl's trainers.

    0.9 asks bypass_mode alone. Earlier, the fully asynchronous trainer asks two keys of its own, and not bypass_mode.
    """
    every = verls.get("async_training.trigger_parameter_sync_step", 1)
    if "async_training.compute_prox_log_prob" in verls:
        if not verls["async_training.use_rollout_log_probs"]:
            return "recomputed"
        bypass = not verls["async_training.compute_prox_log_prob"]
    else:
        bypass = bool(verls.get("algorithm.rollout_correction.bypass_mode"))
    return "rollout" if bypass else "recomputed" if every == 1 else "published"


def weighed(verls: Reference) -> bool:
    """Say whether importance weights are a factor of the loss; PPO's ratio stands for them in bypass mode."""
    clips = verls.get(f"{CORRECTION}.loss_type") in (None, "ppo_clip")
    return bool(verls.get(f"{CORRECTION}.rollout_is")) and not (clips and proximal_of(verls) == "rollout")


def rejected(verls: Reference) -> JSON:
    """Names of the criteria that reject tokens, sorted, ours in verl's words."""
    names = str(verls.get(f"{CORRECTION}.rollout_rs") or "")
    return sorted({REJECTIONS.get(name.strip(), name.strip()) for name in names.split(",") if name.strip()})


def _equal(ours: Reference, verls: Reference, key: str) -> bool:
    mine, theirs = ours.get(key), verls.get(key)
    return mine == theirs or (isinstance(mine, int | float) and _number(theirs) == mine)


def _number(value: Any) -> float | None:
    """A number, also where YAML read one like 1e-6 as text."""
    with contextlib.suppress(TypeError, ValueError):
        return float(value)
    return None


def _is_group(word: str) -> bool:
    return word.startswith("~") or "@" in word or word.startswith(("model_engine=", "hydra."))


def counted(folders: list[Path], verl: Path, first: Path) -> dict[str, Count]:
    """Judge each distinct command once, from the folder it was found in."""
    groups: dict[str, Count] = {}
    seen: set[tuple[str, ...]] = set()
    for folder in folders:
        root = folder.parent if folder.name == "recipe" else folder
        with contextlib.chdir(root if (root / TRAINERS).is_dir() else verl):
            for path, launch in found_in(folder.resolve()):
                told = (launch.module, *launch.words, "", *launch.unknown)
                if told in seen:
                    continue
                seen.add(told)
                name = group_of(launch)
                group = groups.setdefault(name, Count())
                is_own = name in (FORK, ASYNCHRONOUS_MAINS) or "transfer_queue" in " ".join(launch.words)
                reference = root if is_own else first if name == FIRST_RELEASES else verl
                place = f"{path.relative_to(folder.resolve())}:{launch.line}"
                _judge(launch, place, group, reference)
    return groups


def _judge(launch: Launch, place: str, group: Count, verl: Path) -> None:
    """Count one command; `verl`: the clone whose YAML it is compared with."""
    try:
        faults = judge(launch).faults
    except ConfigError as error:
        faults = [str(error)]
    outcome, unexplained = outcome_of(faults)
    group.outcomes[outcome] += 1
    group.unexplained += [f"{place}: {line}" for line in unexplained]
    group.wrong += [f"{place}: {faults[0]}"] if outcome.startswith("wrong") else []
    if outcome == "accepted":
        try:
            different = differences(launch, verl)
        except Exception as error:
            different = [f"verl: {str(error).splitlines()[0]}"]
        group.compared += 1
        group.different += [f"{place}: {line}" for line in different]


def tables(groups: Mapping[str, Count]) -> str:
    """Write the two tables of docs/verl.md: the commands by group, and the refusals by reason."""
    columns = ["accepted", *reversed(KINDS)]
    lines = [f"| | commands | {' | '.join(columns)} |", "|---" * (len(columns) + 2) + "|"]
    reasons: Counter[str] = Counter()
    for name, group in sorted(groups.items()):
        kinds: Counter[str] = Counter()
        for outcome, number in group.outcomes.items():
            kinds[outcome.partition(":")[0]] += number
            reasons[outcome] += number if ":" in outcome else 0
        numbers = [sum(kinds.values()), *(kinds[column] for column in columns)]
        lines.append(f"| {name} | {' | '.join(map(str, numbers))} |")
    lines += ["", "| refused for | | commands |", "|---|---|---|"]
    for kind in reversed(KINDS):
        lines += [
            f"| {reason} | {kind} | {number} |" for reason in KINDS[kind] if (number := reasons[f"{kind}: {reason}"])
        ]
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--verl", type=Path, required=True, help="the clone whose YAML is the reference")
    parser.add_argument("--first", type=Path, required=True, help="a clone of verl 0.2, for commands of its age")
    parser.add_argument("folders", nargs="+", type=Path, metavar="FOLDER")
    given = parser.parse_args()
    warnings.simplefilter("ignore")
    groups = counted([folder.resolve() for folder in given.folders], given.verl.resolve(), given.first.resolve())
    print(tables(groups))
    for name, group in sorted(groups.items()):
        print(f"{name}: {sum(group.outcomes.values())} commands")
        for outcome, number in group.outcomes.most_common():
            print(f"  {number:4d} {outcome}")
        for line in group.wrong:
            print(f"       wrong: {line[:300]}")
        for line in group.unexplained:
            print(f"       not explained: {line[:300]}")
        if group.compared:
            print(
                f"       {len(SAME) + len(FROM)} values of {group.compared} commands; different: {len(group.different)}"
            )
        for line in group.different:
            print(f"       different: {line[:300]}")


if __name__ == "__main__":
    main()
