"""Names of TRL's trainer: none is overridden, set or read in vain, and a changed argument is translated again."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from transformers import PreTrainedTokenizerBase, TrainerCallback

from agentrl.errors import ConfigError
from agentrl.trl import GRPOConfig, GRPOTrainer
from agentrl.trl.names_of_trl import ARGUMENTS, HERE, INSTEAD, advice
from benchmarks.trl.messages import TRL
from tests.conftest import PROJECT
from tests.naming import Names, naming
from tests.trl.test_trainer import ROWS, SMALL, length, trainer_of


def subclass(**body: Any) -> type[GRPOTrainer]:
    return type("Mine", (GRPOTrainer,), body)


def made(kind: type[GRPOTrainer], policy: Path) -> GRPOTrainer:
    return kind(policy, length, GRPOConfig("run", **dict[str, Any](SMALL)), ROWS)


@pytest.mark.parametrize(
    "name", ["compute_loss", "_calculate_rewards", "log", "train", "evaluate", "_tag_names", "beta"]
)
def test_an_overridden_name_is_refused(name: str, policy_dir: Path, at_home: Path) -> None:
    """Also where a base class or a mixin overrides it."""
    mixin = type("Mixin", (), {name: lambda *_: None})
    for kind in (subclass(**{name: lambda *_: None}), type("Two", (mixin, GRPOTrainer), {})):
        with pytest.raises(ConfigError, match=rf"(?s)overridden.*Only __init__ may be.*\.{name}: \w+"):
            made(kind, policy_dir)
    assert list(at_home.iterdir()) == []


def test_a_name_that_a_script_puts_into_the_class_is_refused(
    policy_dir: Path, at_home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(GRPOTrainer, "compute_loss", lambda *_: None, raising=False)
    monkeypatch.setattr(GRPOTrainer, "evaluate", lambda *_: None)
    with pytest.raises(ConfigError, match=r"(?s)GRPOTrainer.compute_loss: .*GRPOTrainer.evaluate: "):
        trainer_of(policy_dir)


def test_a_subclass_may_have_a_constructor_and_names_of_its_own(policy_dir: Path, at_home: Path) -> None:
    def constructor(self: Any, *args: Any, **given: Any) -> None:
        GRPOTrainer.__init__(self, *args, **given)
        self.mine = self.note()

    trainer: Any = made(subclass(__init__=constructor, note=lambda self: "kept"), policy_dir)
    assert trainer.mine == "kept"


def test_what_is_set_later_is_translated_or_refused(policy_dir: Path, at_home: Path) -> None:
    trainer: Any = trainer_of(policy_dir)
    for name, says in {"epsilon_low": "epsilon=", "beta": "trainer.args.beta", "model": "OUTPUT_DIR/policy"}.items():
        with pytest.raises(ConfigError, match=says):
            setattr(trainer, name, 0.5)
    with pytest.raises(ConfigError, match="callback's on_log"):
        trainer.log = print
    trainer.args.learning_rate, trainer.args.max_steps = 1e-6, 1
    trainer.args.overrides["trainer.seed"] = 7
    assert trainer.train().global_step == 1
    assert trainer.state.log_history[0]["learning_rate"] == pytest.approx(1e-6)
    assert trainer.keys["trainer.seed"] == 7
    trainer.args.beta = "much"
    with naming(ConfigError, "beta='much'"):
        trainer.train()


def test_names_that_are_here_do_what_trls_do(policy_dir: Path, at_home: Path, capsys: Any) -> None:
    class Silent(TrainerCallback):
        def on_train_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            print("the end")

    trainer: Any = trainer_of(policy_dir, max_steps=1)
    trainer.add_callback(Silent)
    found = trainer.train()
    trainer.accelerator.print("printed")
    trainer.accelerator.wait_for_everyone()
    trainer.save_state()
    trainer.save_metrics("train", found.metrics)
    trainer.log_metrics("train", found.metrics)
    assert json.loads((at_home / "run/trainer_state.json").read_text())["global_step"] == 1
    assert json.loads((at_home / "run/train_results.json").read_text()) == found.metrics
    out = capsys.readouterr().out
    assert "the end\n" in out and "printed\n" in out and "train_loss" in out
    assert isinstance(trainer.pop_callback(Silent), Silent) and trainer.pop_callback(Silent) is None
    assert isinstance(trainer.processing_class, PreTrainedTokenizerBase) and trainer.is_world_process_zero()
    assert trainer.train_dataset is ROWS and trainer.reward_funcs is length
    for name, says in {
        "push_to_hub": "upload_folder",
        "model": "OUTPUT_DIR/policy",
        "lr_scheduler": "schedule",
    }.items():
        with pytest.raises(AttributeError, match=says):
            getattr(trainer, name)
    with pytest.raises(AttributeError, match="one process"):
        _ = trainer.accelerator.unwrap_model
    with pytest.raises(AttributeError, match="no attribute 'modle'"):
        _ = trainer.modle


def asks_for(name: str, *, event: str = "on_save", default: bool = False) -> TrainerCallback:
    scope: dict[str, Any] = {}
    exec(f"def {event}(self, args, state, control, {name}{'=None' if default else ''}, **kwargs): ...", scope)
    found: TrainerCallback = type("Asking", (TrainerCallback,), {event: scope[event]})()
    return found


@pytest.mark.parametrize(
    ("callback", "says"),
    [
        (asks_for("model"), ("Asking.on_save", "OUTPUT_DIR/policy")),
        (asks_for("model", default=True), "model"),
        (asks_for("train_dataloader", default=True), ("train_dataloader", "data.sampler.name")),
        (asks_for("anything"), ("anything", "args, state and control")),
    ],
)
def test_a_callback_that_asks_for_what_is_not_here_is_refused(
    callback: TrainerCallback, says: Names, policy_dir: Path, at_home: Path
) -> None:
    with naming(ConfigError, says):
        trainer_of(policy_dir, callbacks=[callback])
    for fine in (asks_for("logs", event="on_log"), asks_for("anything", default=True)):
        assert trainer_of(policy_dir, callbacks=[fine]).keys


def test_several_processes_are_refused(policy_dir: Path, at_home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WORLD_SIZE", "2")
    with pytest.raises(ConfigError, match=r"WORLD_SIZE=2: 2 processes.*'trainer\.n_gpus_per_node': 2"):
        trainer_of(policy_dir)
    monkeypatch.setenv("WORLD_SIZE", "1")
    trainer_of(policy_dir)
    assert list(at_home.iterdir()) == [], "rows are written by train() alone"


NAMES = """
import inspect, json, re
from transformers import trainer
from trl import GRPOTrainer
from trl.trainer import grpo_trainer
found = {name for name in dir(GRPOTrainer) if name not in dir(object) and not name.startswith("__")}
for module in (grpo_trainer, trainer):
    found |= set(re.findall(r"self\\.([A-Za-z_]\\w*)(?:\\s*:\\s*[^=\\n]+)?\\s*=[^=]", inspect.getsource(module)))
print(json.dumps(sorted(found)))
"""


@pytest.mark.slice(0, "long run")
def test_every_name_of_trls_own_trainer_has_an_answer() -> None:
    path = os.pathsep.join([str(TRL.fetched(None, "PYTHONPATH")), str(PROJECT)])
    done = subprocess.run(
        [sys.executable, "-c", NAMES], env={**os.environ, "PYTHONPATH": path}, capture_output=True, text=True
    )
    names = json.loads(done.stdout.splitlines()[-1])
    assert len(names) > 200 and [name for name in names if advice(name) is None] == []
    assert {*INSTEAD, *HERE} - {*names, "tokenizer", *ARGUMENTS} == set()
