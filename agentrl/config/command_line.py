"""The command line of the entry points: overrides and a few flags."""

from __future__ import annotations

import argparse
import sys
import textwrap
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from agentrl.config.keys import MISSING, defaults, flatten, leaf_keys
from agentrl.config.section import Section
from agentrl.config.sections.offline import EvaluateConfig, GenerateConfig
from agentrl.config.sections.sft import PreferencesConfig, SFTConfig
from agentrl.config.sections.training import Config
from agentrl.system.versions import ShowVersion

TRAIN_HELP = """\
Train a tool-using policy by reinforcement learning. With no arguments it runs the quickstart: it makes a small data
set and a tiny policy, trains for a few minutes on a CPU, and leaves metrics, a plot and the policy in runs/quickstart/.

  python -m agentrl.train data.train_files=train.parquet data.val_files=test.parquet \\
      actor_rollout_ref.model.path=Qwen/Qwen3-0.6B \\
      actor_rollout_ref.rollout.multi_turn.tool_config_path=tools.yaml trainer.experiment_name=mine
  python -m agentrl.train algorithm=ppo trainer.seed=2          PPO with a critic instead of GRPO
  python -m agentrl.train --config-path my/configs --config-name job
      your own YAML; it builds on ours with `defaults: [train, _self_]`
"""

SFT_HELP = """\
Fine-tune a policy on multi-turn transcripts with tools; the loss is on assistant tokens only.

  python -m agentrl.sft data.train_files=transcripts.parquet model.path=Qwen/Qwen3-0.6B
"""

PREFERENCES_HELP = """\
Train a policy, or a reward model, on pairs of conversations of which one is preferred; the loss is on the assistant's
tokens after what both begin with. Or train a policy on conversations that are good or bad by themselves.

  python -m agentrl.preferences data.train_files=pairs.parquet model.path=Qwen/Qwen3-0.6B
  python -m agentrl.preferences data.train_files=pairs.parquet model.path=Qwen/Qwen3-0.6B trains=reward_model
  python -m agentrl.preferences data.train_files=logs.parquet model.path=Qwen/Qwen3-0.6B loss=kto
"""

GENERATE_HELP = """\
Generate responses to the prompts of a parquet file, with the loops, tools and engines of training; the result is a
parquet file. A run that was killed goes on where it stopped. It takes the keys of agentrl.train, and model.* and
rollout.* for actor_rollout_ref.model.* and actor_rollout_ref.rollout.*.

  python -m agentrl.generate data.path=test.parquet data.output_path=out.parquet \\
      model.path=Qwen/Qwen3-0.6B rollout.n=4 rollout.multi_turn.tool_config_path=tools.yaml
  python -m agentrl.generate --config-path runs/mine --config-name config --trust \\
      data.path=test.parquet data.output_path=out.parquet model.path=runs/mine/policy
      everything else as the training run had it
"""

EVALUATE_HELP = """\
Score the responses in a parquet file, in JSON lines or of a run, and print a table by data source.

  python -m agentrl.evaluate data.path=out.parquet data.output_path=scores.json
  python -m agentrl.evaluate data.path=out.parquet custom_reward_function.path=my_reward.py ray_init.num_cpus=8
  python -m agentrl.evaluate data.path=runs/mine custom_reward_function.path=my_reward.py
      a run's recorded trajectories by another scorer, compared with the first
"""

HELP: dict[type[Section], str] = {
    Config: TRAIN_HELP,
    SFTConfig: SFT_HELP,
    PreferencesConfig: PREFERENCES_HELP,
    GenerateConfig: GENERATE_HELP,
    EvaluateConfig: EVALUATE_HELP,
}

GRAMMAR = """\
  key=value          set a key; lists as [a,b], no value as null; +key=value is the same
  ~key               back to its default
  group=choice       take another file of a config group
"""

USEFUL = (
    "data.train_files",
    "data.val_files",
    "data.train_batch_size",
    "data.max_prompt_length",
    "data.max_response_length",
    "actor_rollout_ref.model.path",
    "actor_rollout_ref.actor.optim.lr",
    "actor_rollout_ref.actor.ppo_mini_batch_size",
    "actor_rollout_ref.rollout.n",
    "actor_rollout_ref.rollout.multi_turn.tool_config_path",
    "actor_rollout_ref.rollout.multi_turn.interaction_config_path",
    "custom_reward_function.path",
    "algorithm.adv_estimator",
    "trainer.experiment_name",
    "trainer.default_local_dir",
    "trainer.total_training_steps",
    "trainer.resume_mode",
    "trainer.seed",
    "model.path",
    "optim.lr",
)


USEFUL_TO_GENERATE = (
    "data.path",
    "data.output_path",
    "data.batch_size",
    "data.max_samples",
    "data.output_scores",
    "data.output_trajectories",
    "data.max_prompt_length",
    "data.max_response_length",
    "actor_rollout_ref.model.path",
    "actor_rollout_ref.rollout.name",
    "actor_rollout_ref.rollout.n",
    "actor_rollout_ref.rollout.temperature",
    "actor_rollout_ref.rollout.do_sample",
    "actor_rollout_ref.rollout.multi_turn.tool_config_path",
    "trainer.seed",
)


INFO = ("all", "config", "defaults", "defaults-tree", "plugins", "searchpath")


@dataclass(frozen=True, slots=True)
class CommandLine:
    overrides: list[str]
    config_name: str
    config_path: Path | None
    """The user's own folder of YAML files."""
    show_config: bool
    """Print the config and end."""
    config_dir: Path | None = None
    """A folder that is searched too, after the folder of `config_name` and before ours."""
    package: str | None = None
    """The section that is printed; None: the whole config."""
    info: str | None = None
    """Kind of information that Hydra prints of the config (`searchpath`, `defaults`, ...); then the command ends."""
    multirun: bool = False
    """Run a job for each combination of the values that overrides list."""
    trust: bool = False
    """Take code, commands and hosts, too, from a config that is read back from a run."""


def parse_command_line(
    argv: Sequence[str], config_name: str, schema: type[Section], *, about: str | None = None, jobs: bool = False
) -> CommandLine:
    """Split flags from overrides. `--help` and `--version` print and end the process with status 0, a wrong flag
    with status 2.

    about: what `--help` says of the command; None: of the command that has this schema of its own. jobs: the command
    can run several jobs, so `--help` lists --multirun.
    """
    parser = argparse.ArgumentParser(add_help=False, allow_abbrev=False, usage="[key=value ...] [flags]")
    parser.add_argument("--help", "-h", action="store_true")
    parser.add_argument("--version", action=ShowVersion, nargs=0)
    parser.add_argument("--config-name", "-cn", default=config_name)
    parser.add_argument("--config-path", "-cp", type=Path)
    parser.add_argument("--config-dir", "-cd", type=Path)
    parser.add_argument("--cfg", "-c", choices=["job"])
    parser.add_argument("--resolve", action="store_true")
    parser.add_argument("--package", "-p")
    parser.add_argument("--info", "-i", nargs="?", const="all", choices=INFO)
    parser.add_argument("--run", "-r", action="store_true")
    parser.add_argument("--multirun", "-m", action="store_true")
    parser.add_argument("--trust", action="store_true")
    parser.add_argument("overrides", nargs="*")
    args, unknown = parser.parse_known_intermixed_args(list(argv))
    if unknown := [word for word in unknown if word.startswith("-")]:  # Words after the first are among them.
        dashed = [word.lstrip("-") for word in unknown if "=" in word]
        told = f"overrides have no dashes: {' '.join(dashed)}" if dashed else "--help lists the flags"
        parser.error(f"unknown flags {' '.join(unknown)}; {told}")
    if args.help:
        sys.stdout.write(help_text(schema, about or HELP[schema], jobs))
        raise SystemExit(0)
    if args.cfg is None and (args.resolve or args.package is not None):
        parser.error("--resolve and --package say what --cfg job prints: give that, too")
    if args.multirun and (args.run or args.cfg is not None or args.info is not None):
        parser.error("--multirun runs several jobs: leave out --run, --cfg and --info, which are for one")
    return CommandLine(
        args.overrides,
        args.config_name,
        args.config_path,
        args.cfg is not None,
        args.config_dir,
        args.package,
        args.info,
        args.multirun,
        args.trust,
    )


def help_text(schema: type[Section], about: str, jobs: bool) -> str:
    """Describe a command, its flags, and the keys that matter most."""
    leaves = leaf_keys(schema)
    default = flatten(defaults(schema), leaves)  # a section may have other defaults than its class
    lines = [about, "Overrides:", GRAMMAR, "Flags:"]
    lines += [
        "  --cfg job                         print the whole resolved config and end (--resolve changes nothing)",
        "  --package SECTION                 of what --cfg job prints only this section",
        "  --config-name NAME                the YAML to start from",
        "  --config-path DIR                 your own folder of YAML files, searched before ours",
        "  --config-dir DIR                  a folder that is searched, too, e.g. for a config group of yours",
        "  --info [WHAT]                     how the config is put together: searchpath, defaults, defaults-tree, ...",
        "  --version                         print the version of agentrl",
        "  --trust                           take code, commands, hosts, too, from a config that a run wrote",
    ]
    if jobs:
        lines.append("  --multirun                        a job for each combination of values: key=a,b key=range(1,4)")
    lines += ["", f"The most useful of the {len(leaves)} keys:"]
    useful = {GenerateConfig: USEFUL_TO_GENERATE, EvaluateConfig: tuple(leaves)}.get(schema, USEFUL)
    for key in useful:
        if key in leaves:
            value = default[key]
            told = "required" if value == MISSING else f"default {'null' if value is None else value}"
            lines.append(f"  {key}  ({told})")
            lines += textwrap.wrap(
                leaves[key].description or "", 110, initial_indent="      ", subsequent_indent="      "
            )
    return "\n".join(lines) + "\n"
