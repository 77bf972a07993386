"""`GRPOTrainer`: a training that is set up in TRL's words, and run by agentrl."""

from __future__ import annotations

import copy
import json
import os
import shutil
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, cast

from agentrl.config.installed import is_installed
from agentrl.config.overrides import Translation, Value
from agentrl.errors import ConfigError, TrainingError, install_extra
from agentrl.observe.tracking import METRICS_FILE
from agentrl.system.publish import published_directory
from agentrl.trl.adapters import adapter_keys
from agentrl.trl.arguments import MODEL, ROLLOUT
from agentrl.trl.callbacks import Callbacks, made
from agentrl.trl.config import GRPOConfig
from agentrl.trl.environments import Environments, TrlEnvironmentLoop
from agentrl.trl.names_of_trl import advice
from agentrl.trl.rewards import RewardFunction, TrlRewards, named_functions
from agentrl.trl.rows import EMPTY, read_data
from agentrl.trl.tools import LOOP, TrlToolLoop, as_tools
from agentrl.trl.translation import (
    Arguments,
    batch_sizes,
    frequency,
    output_dir,
    steps_per_epoch,
    translate,
    validation,
)

if TYPE_CHECKING:
    from peft import PeftConfig
    from transformers import PreTrainedTokenizerBase, TrainerCallback, TrainerState
    from transformers.trainer_utils import TrainOutput

    from agentrl.agent_loop import AgentLoop
    from agentrl.config import Config
    from agentrl.trainer.run import TrainingRun
    from agentrl.trl.rows import Rows

BESIDE_WEIGHTS = ("*.json", "*.jinja", "*.txt", "*.model", "*.py")
"""Files of a model at the hub that are read in addition to its weights."""
MODEL_FILES = (
    *("*.safetensors", "*.safetensors.index.json", "pytorch_model*", "adapter*"),
    *("*.jinja", "additional_chat_templates"),
    *("generation_config.json", "*processor_config.json", "added_tokens.json", "special_tokens_map.json"),
    *("tokenizer*", "vocab.*", "merges.txt", "*.model"),
)
"""Files of a model's folder that transformers reads where they are there."""
REFUSED = {
    "optimizers": "the optimizer is AdamW with a schedule of GRPOConfig",
    "reward_processing_classes": "reward models are keys of agentrl (docs/rewards.md)",
    "quantization_config": "models are trained in float32 or bfloat16",
    "rollout_func": "a function that generates is an agent loop here (docs/tools.md): agentrl.training(loops=...)",
}
"""Arguments of TRL's trainer that agentrl has other ways for."""


@dataclass(frozen=True, slots=True)
class _Asked:
    """Arguments of the trainer, as they were given."""

    model: Path
    reward_funcs: object
    train_dataset: Rows | None
    eval_dataset: Rows | None
    processing_class: PreTrainedTokenizerBase | str | Path | None
    callbacks: list[TrainerCallback]
    peft_config: PeftConfig | None
    tools: list[Callable[..., object]]
    environment_factory: object


class OneProcess:
    """TRL's `accelerator` in a single process, as far as scripts print and ask by it."""

    is_main_process = is_local_main_process = is_last_process = True
    num_processes, process_index, local_process_index = 1, 0, 0

    def print(self, *values: object) -> None:
        """Print, as the only process does."""
        print(*values)

    def wait_for_everyone(self) -> None:
        """Return: there is nobody else."""

    def __getattr__(self, name: str) -> object:
        raise AttributeError(f"GRPOTrainer.accelerator.{name}: {advice('accelerator')}")


class GRPOTrainer:
    """Training by GRPO with the arguments of TRL's `GRPOTrainer`.

    The config is translated when the trainer is made, and everything of it is refused then that cannot be taken over.
    Models are loaded by `train` and `evaluate`, which translate again where `args` were changed.
    """

    args: GRPOConfig
    state: TrainerState
    """transformers' `TrainerState`, with `global_step`, `epoch` and `log_history`."""
    output_dir: Path

    def __init__(
        self,
        model: str | Path,
        reward_funcs: RewardFunction | Sequence[RewardFunction] | None = None,
        args: GRPOConfig | None = None,
        train_dataset: Rows | None = None,
        eval_dataset: Rows | None = None,
        processing_class: PreTrainedTokenizerBase | str | Path | None = None,
        callbacks: Sequence[TrainerCallback] | None = None,
        peft_config: PeftConfig | None = None,
        tools: Sequence[Callable[..., object]] | None = None,
        environment_factory: Callable[[], object] | Mapping[str, Callable[[], object]] | None = None,
        **others: object,
    ) -> None:
        """Raises UserError for what cannot be taken over, with the reason and the remedy."""
        _check_class(type(self))
        _check_processes(os.environ)
        for name, value in others.items():
            if name not in REFUSED:
                raise ConfigError(f"GRPOTrainer: unknown argument {name!r}")
            if value not in (None, (None, None)):
                raise ConfigError(f"GRPOTrainer: {name}: {REFUSED[name]}")
        self.args = GRPOConfig() if args is None else args
        _check_config(self.args)
        for name, several in {"tools": tools, "callbacks": callbacks}.items():
            if several is not None and not isinstance(several, list | tuple):
                raise ConfigError(f"GRPOTrainer: {name}: expected a list, found {several!r:.100}: give [...]")
        self._asked = _Asked(
            _model_folder(model),
            reward_funcs,
            train_dataset,
            eval_dataset,
            processing_class,
            made(callbacks or ()),
            peft_config,
            list(tools or ()),
            environment_factory,
        )
        self._has_trained = False
        self._set_up()

    def _set_up(self) -> None:
        """Translate the arguments as they are now. Raises UserError."""
        from transformers import TrainerState

        _check_config(self.args)
        asked, folder = self._asked, self._asked.model
        self._translated = copy.deepcopy(self.args.values)
        arguments = Arguments(self.args.given)
        self.__dict__["output_dir"] = Path(output_dir(arguments))
        weights = cast("Sequence[float] | None", self.args.reward_weights)
        longest = arguments.count("max_completion_length")
        self._tools, environments = as_tools(asked.tools, longest), None
        if asked.environment_factory is not None:
            environments = Environments(asked.environment_factory, self._tools, longest)
            self._tools = environments.tools
        own = {} if environments is None else environments.rewards()
        functions = named_functions(asked.reward_funcs, weights, own)
        self._batches = batch_sizes(arguments)
        train_dataset = asked.train_dataset
        if train_dataset is None:
            train_dataset = _rows_without_data(arguments, environments, self._batches.prompts)
        data = self.output_dir.with_name(f"{self.output_dir.name}.data")
        train = read_data(train_dataset, "train_dataset", data, environments)
        self._data = [train]
        keys = translate(self.args.given, model=folder, rows=len(train.rows))
        keys |= {"data.train_files": str(train.file), "data.val_files": None}
        if asked.eval_dataset is not None:
            evaluated = read_data(asked.eval_dataset, "eval_dataset", data, environments)
            self._data.append(evaluated)
            keys |= validation(self.args.given)
            keys["data.val_files"] = str(evaluated.file)
            keys["trainer.val_before_train"] = bool(self.args.eval_on_start)
        self._steps = cast(int, keys["trainer.total_training_steps"])
        keys |= self._validations(arguments, len(train.rows), has_rows=asked.eval_dataset is not None)
        rows = {str(one.file): one.rows for one in self._data}
        self._loops: dict[str, AgentLoop] = {}
        if asked.tools or environments is not None:
            most = arguments["max_tool_calling_iterations"]
            rounds = None if most is None else arguments.count("max_tool_calling_iterations")
            keys[f"{ROLLOUT}.agent.default_agent_loop"] = LOOP
            if environments is None:
                self._loops[LOOP] = TrlToolLoop(rounds)
            else:
                self._loops[LOOP] = TrlEnvironmentLoop(rounds, environments, rows)
        if keys["algorithm.adv_estimator"] == "agentrl.trl.advantages:by_reward":
            keys["algorithm.adv_options"] = {"weights": {one.name: one.weight for one in functions}}
        if asked.peft_config is not None:
            keys |= adapter_keys(asked.peft_config, _config_of(folder).get("model_type", ""))
        keys |= _tokenizer_keys(asked.processing_class, folder)
        engine = self.args.overrides.get(f"{ROLLOUT}.name", keys[f"{ROLLOUT}.name"])
        attached = self.args.overrides.get(f"{ROLLOUT}.server_urls")
        if engine == "vllm" and not attached and not is_installed("vllm"):
            arguments.refuse(
                "use_vllm",
                f"vLLM is not installed here: {install_extra('vllm')} (docs/engines.md), or give use_vllm=False, "
                f"which generates in this process, or overrides={{'{ROLLOUT}.name': 'sglang'}}",
            )
        arguments.raise_faults()
        self.keys: dict[str, Value] = {**keys, **self.args.overrides}
        """The run's config, as `agentrl.training` takes it."""
        plain = translate({}, model=folder, rows=len(train.rows))
        self._lent = {
            key for key, value in plain.items() if key in self.keys and self.keys[key] == value
        } - self.args.overrides.keys()
        """Keys that have TRL's defaults, and that an override may leave without effect."""
        self.__dict__["state"] = TrainerState(max_steps=self._steps * self._batches.updates)
        with_columns = not self.args.remove_unused_columns
        self._rewards = TrlRewards(
            functions,
            rows,
            self.state,
            environments=environments,
            with_tools=bool(self._tools),
            with_columns=with_columns,
        )
        log_every = frequency(arguments, "logging", self._batches, len(train.rows), self._steps)
        save_every = cast(int, keys["trainer.save_freq"])
        self._callbacks = Callbacks(
            asked.callbacks,
            self.args,
            self.state,
            updates=self._batches.updates,
            log_every=log_every,
            save_every=save_every,
            steps_per_epoch=steps_per_epoch(self._batches, len(train.rows)),
            file=self.output_dir / METRICS_FILE,
        )
        arguments.raise_faults()

    def __setattr__(self, name: str, value: object) -> None:
        """Raises ConfigError for a name of TRL's trainer, which nothing here would read."""
        if name != "args" and (instead := advice(name)) is not None:
            raise ConfigError(f"GRPOTrainer.{name} is set, and nothing here reads it: {instead}")
        super().__setattr__(name, value)

    def __getattr__(self, name: str) -> object:
        if (instead := advice(name)) is not None:
            raise AttributeError(f"GRPOTrainer.{name} of TRL is not here: {instead}")
        raise AttributeError(f"GRPOTrainer has no attribute {name!r}")

    @property
    def train_dataset(self) -> Rows | None:
        """The rows, as they were given."""
        return self._asked.train_dataset

    @property
    def eval_dataset(self) -> Rows | None:
        """The rows to validate on, as they were given."""
        return self._asked.eval_dataset

    @property
    def reward_funcs(self) -> object:
        """The reward functions, as they were given."""
        return self._asked.reward_funcs

    @property
    def tools(self) -> list[Callable[..., object]]:
        """The tools, as they were given."""
        return list(self._asked.tools)

    @property
    def processing_class(self) -> PreTrainedTokenizerBase:
        """The policy's tokenizer, with the chat template that the run has."""
        from agentrl.chat.load import load_tokenizer

        template = self.keys.get(f"{MODEL}.chat_template")
        trusted, date = bool(self.keys.get(f"{MODEL}.trust_remote_code")), self.keys.get(f"{MODEL}.chat_template_date")
        found: PreTrainedTokenizerBase = load_tokenizer(
            str(self._asked.model),
            None if template is None else str(template),
            trust_remote_code=trusted,
            date=None if date is None else str(date),
        )
        return found

    tokenizer = processing_class

    @property
    def accelerator(self) -> OneProcess:
        """The only process."""
        return OneProcess()

    def is_world_process_zero(self) -> bool:
        """Say so: there is one process."""
        return True

    is_local_process_zero = is_world_process_zero

    def add_callback(self, callback: TrainerCallback | type[TrainerCallback]) -> None:
        """Add a callback, or an object of its class. Raises ConfigError."""
        (one,) = made([callback])
        self._callbacks.add(one)
        self._asked.callbacks.append(one)

    def pop_callback(self, callback: TrainerCallback | type[TrainerCallback]) -> TrainerCallback | None:
        """Remove a callback, or the first one of a class, and return it; None where there is no such callback."""
        for one in self._asked.callbacks:
            if one is callback or (isinstance(callback, type) and isinstance(one, callback)):
                self._asked.callbacks.remove(one)
                self._callbacks.remove(one)
                return one
        return None

    def remove_callback(self, callback: TrainerCallback | type[TrainerCallback]) -> None:
        """Remove a callback, or the first one of a class."""
        self.pop_callback(callback)

    def metrics_format(self, metrics: dict[str, float]) -> dict[str, float]:
        """Round numbers as transformers does for people."""
        from transformers.trainer_pt_utils import metrics_format

        return metrics_format(metrics)

    def log_metrics(self, split: str, metrics: dict[str, float]) -> None:
        """Print numbers as transformers does."""
        from transformers.trainer_pt_utils import log_metrics

        log_metrics(self, split, metrics)

    def save_metrics(self, split: str, metrics: dict[str, float], combined: bool = True) -> None:
        """Write numbers into OUTPUT_DIR as transformers does."""
        from transformers.trainer_pt_utils import save_metrics

        save_metrics(self, split, metrics, combined)

    def save_state(self) -> None:
        """Write `state` to OUTPUT_DIR/trainer_state.json, as transformers does."""
        self.state.save_to_json(str(self.output_dir / "trainer_state.json"))

    def _validations(self, arguments: Arguments, rows: int, *, has_rows: bool) -> dict[str, Value]:
        """Translate when TRL evaluates. Raises ConfigError where nothing is to be evaluated on."""
        every = frequency(arguments, "eval", self._batches, rows, self._steps)
        if every > 0 and not has_rows:
            raise ConfigError(
                f"GRPOConfig: eval_strategy={arguments.text('eval_strategy')!r} without eval_dataset: give one, or 'no'"
            )
        return {"trainer.test_freq": every, "trainer.val_after_train": every > 0} if has_rows else {}

    def train(self, resume_from_checkpoint: bool | str | Path | None = None) -> TrainOutput:
        """Train to the last step, save, and export the policy to OUTPUT_DIR/policy.

        resume_from_checkpoint: True continues from the newest checkpoint in output_dir, a path from that one; without
        it a run that is in output_dir already is moved aside. Raises UserError.
        """
        from transformers.trainer_utils import TrainOutput

        self._translate_again()
        given = self.args.resume_from_checkpoint if resume_from_checkpoint is None else resume_from_checkpoint
        keys: dict[str, Value] = {"trainer.resume_mode": "disable"}
        if given is True:
            keys = {"trainer.resume_mode": "auto"}
        elif isinstance(given, str | Path):
            keys = {"trainer.resume_mode": "resume_path", "trainer.resume_from_path": str(given)}
        began, self._has_trained = time.monotonic(), False
        self._callbacks.begin()
        with self._open(keys, [self._callbacks]) as run:
            losses = [metrics["actor/loss"] for metrics in run if "actor/loss" in metrics]
        self._has_trained = True
        seconds, mean = time.monotonic() - began, sum(losses) / len(losses) if losses else 0.0
        summary = {"train_runtime": seconds, "train_loss": mean}
        self._callbacks.log(summary)
        self._callbacks.call("on_train_end")
        return TrainOutput(self.state.global_step, mean, {**summary, "epoch": self.state.epoch or 0.0})

    def evaluate(self) -> dict[str, float]:
        """Validate on eval_dataset: the policy of the newest checkpoint in output_dir, or the first one without any.

        Returns the numbers under TRL's prefix `eval_`. Raises UserError.
        """
        self._translate_again()
        if self.keys["data.val_files"] is None:
            raise ConfigError("GRPOTrainer.evaluate: there is no eval_dataset: give one to the trainer")
        keys: dict[str, Value] = {"trainer.val_only": True, "trainer.resume_mode": "auto"}
        with self._open({**keys, "trainer.val_before_train": True}, []) as run:
            for _ in run:
                pass
            return self._callbacks.evaluated(run.validation)

    def save_model(self, output_dir: str | Path | None = None) -> None:
        """Copy the trained policy, with its tokenizer in Hugging Face format, to a folder; None: output_dir.

        Raises TrainingError before the end of `train`, and where the folder has files of another model.
        """
        from agentrl.checkpoint.export import exported_step  # late: it loads transformers

        policy, target = self.output_dir / "policy", self.output_dir if output_dir is None else Path(output_dir)
        if not self._has_trained or not (policy / "config.json").is_file():
            older = exported_step(policy)
            found = "is not there yet" if older is None else f"is of an earlier training, of {older} steps"
            raise TrainingError(f"GRPOTrainer.save_model: {policy} {found}: train() writes this one's at its end")
        there = {one for pattern in MODEL_FILES for one in target.glob(pattern)}
        if others := sorted(one.name for one in there if not (policy / one.name).exists()):
            raise TrainingError(
                f"GRPOTrainer.save_model: {target} has files of another model, which would be read with this one's: "
                f"{', '.join(others)}. Give a new folder, or remove them"
            )
        if target.is_dir() and any(target.iterdir()):
            shutil.copytree(policy, target, dirs_exist_ok=True)
        else:
            with published_directory(target) as partial:
                shutil.copytree(policy, partial, dirs_exist_ok=True)

    def _translate_again(self) -> None:
        """Translate `args` where they were changed after the trainer was made."""
        if self.args.values != self._translated:
            self._set_up()

    def _open(
        self, keys: Mapping[str, Value], observers: Sequence[Callbacks]
    ) -> AbstractContextManager[TrainingRun[Config]]:
        import agentrl

        for one in self._data:
            one.write()
        return agentrl.training(
            Translation({**self.keys, **keys}, self._lent),
            loops=self._loops,
            tools=self._tools,
            reward=copy.copy(self._rewards),
            observers=observers,
        )


_DEFINED = dict(vars(GRPOTrainer))
"""The trainer's class as it is written here: what a script puts into it later is not called."""


def _check_class(kind: type[GRPOTrainer]) -> None:
    """Raise ConfigError for names of TRL's trainer that a subclass, or a script, overrides."""
    faults = []
    for one in kind.__mro__[:-1]:
        own = {name for name, value in vars(one).items() if one is not GRPOTrainer or value is not _DEFINED.get(name)}
        faults += [f"  {one.__name__}.{name}: {advice(name)}" for name in sorted(own) if advice(name) is not None]
    if faults:
        lines = "\n".join(faults)
        raise ConfigError(
            f"GRPOTrainer: these names of TRL's trainer are overridden, and nothing here would call them. Only "
            f"__init__ may be:\n{lines}"
        )


def _check_config(args: object) -> None:
    if not isinstance(args, GRPOConfig):
        kind = type(args)
        raise ConfigError(
            f"GRPOTrainer: args is a {kind.__module__}.{kind.__name__}: import GRPOConfig from agentrl.trl"
        )


def _check_processes(environment: Mapping[str, str]) -> None:
    """Raise ConfigError where the script was started as several processes; each process would be a training."""
    size = environment.get("WORLD_SIZE", "1")
    if size.isdigit() and int(size) > 1:
        raise ConfigError(
            f"GRPOTrainer: WORLD_SIZE={size}: {size} processes of this script would be {size} trainings. Start it "
            "once, as `python SCRIPT`, without torchrun and `accelerate launch`; devices are keys: "
            f"overrides={{'trainer.n_gpus_per_node': {size}}} (docs/scale.md)"
        )


def _rows_without_data(
    arguments: Arguments, environments: Environments | None, prompts: int
) -> list[Mapping[str, object]]:
    """Make empty rows for environments that bring their own tasks, as many as a generation has prompts.

    Raises ConfigError where a data set is needed.
    """
    if environments is None:
        raise ConfigError("GRPOTrainer: train_dataset is missing: give a Dataset, a list of rows, or a file")
    if environments.by_name:
        raise ConfigError(
            "GRPOTrainer: train_dataset is missing: with several environments each row names its own in the column "
            "environment"
        )
    if arguments.number("max_steps") <= 0:
        raise ConfigError("GRPOConfig: max_steps is missing: without train_dataset it is the length of the run")
    return [{"prompt": EMPTY} for _ in range(prompts)]


def _model_folder(model: object) -> Path:
    """Return the folder of a model. Raises ConfigError for a model that is loaded already."""
    if not isinstance(model, str | Path):
        raise ConfigError(
            f"GRPOTrainer: model is a {type(model).__name__}: agentrl loads and shards the weights itself. Give the "
            "folder: model.save_pretrained(FOLDER), with the tokenizer's save_pretrained"
        )
    from agentrl.model.folder import check_folder

    check_folder(f"{MODEL}.path", str(model))
    if Path(model).is_dir():
        return Path(model)
    from huggingface_hub import snapshot_download

    from agentrl.model.download import WEIGHTS, download_weights
    from agentrl.observe.open import open_display

    with open_display(f"agentrl · {model}") as display:
        download_weights(str(model), display)
    try:
        return Path(snapshot_download(str(model), allow_patterns=[WEIGHTS, *BESIDE_WEIGHTS]))
    except Exception as error:
        raise ConfigError(
            f"GRPOTrainer: model={model!r} is no folder here, and the hub does not give it: {error}"
        ) from error


def _config_of(folder: Path) -> dict[str, str]:
    try:
        found: dict[str, str] = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ConfigError(f"GRPOTrainer: {folder}/config.json cannot be read: {error}") from error
    return found


def _tokenizer_keys(given: PreTrainedTokenizerBase | str | Path | None, folder: Path) -> dict[str, Value]:
    """Translate processing_class: the model's own tokenizer, perhaps with another chat template. Raises ConfigError."""
    if given is None:
        return {}
    from agentrl.chat.load import load_tokenizer

    own = load_tokenizer(str(folder), None, trust_remote_code=False)
    other = given
    if isinstance(other, str | Path):
        other = cast("PreTrainedTokenizerBase", load_tokenizer(str(other), None, trust_remote_code=False))
    if not hasattr(other, "get_vocab") or other.get_vocab() != own.get_vocab():
        raise ConfigError(
            f"processing_class: expected the tokenizer of {folder}, found another ({type(other).__name__}): agentrl "
            "reads the tokenizer of the model's folder; save yours there by save_pretrained"
        )
    for name in ("eos_token", "bos_token", "response_template"):
        mine, theirs = getattr(own, name, None), getattr(other, name, None)
        if mine != theirs:
            raise ConfigError(
                f"processing_class: its {name} is {theirs!r:.200}, and {mine!r:.200} in {folder}, whose tokenizer "
                "agentrl reads: save yours there by save_pretrained"
            )
    if other.chat_template is None or other.chat_template == own.chat_template:
        return {}
    return {f"{MODEL}.chat_template": str(other.chat_template)}
