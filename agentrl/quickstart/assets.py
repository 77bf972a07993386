"""The quickstart's assets: made-up tasks, and a tiny policy that can do them but usually does not.

The policy is trained from nothing on conversations that solve the tasks, then for a short while on conversations that
mostly fail. After the warm-up, the policy still has to learn to use the tools rather than to guess.
"""

from __future__ import annotations

import json
import shutil
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import pyarrow.parquet as pq

from agentrl.config.sections.optim import OptimConfig
from agentrl.config.sections.sft import SFTConfig, SFTDataConfig, SFTModelConfig, SFTTrainerConfig
from agentrl.config.sections.trainer import Device, QuickstartConfig
from agentrl.config.sections.training import Config
from agentrl.observe.display import Display
from agentrl.system.config_files import configs_dir
from agentrl.system.json_value import JSON
from agentrl.system.plugin import import_module

if TYPE_CHECKING:
    from agentrl.quickstart.tiny_policy import TinyShape

NAME = "quickstart"
"""Value of `data.train_files`, `data.val_files` and `actor_rollout_ref.model.path` that means these assets."""
TOKENIZER_ROWS = 1000
"""Conversations that the tokenizer learns its vocabulary from."""
HEADS = 6
"""Attention heads of a layer. With 3 some policies do not learn, in the warm-up, to copy a name into a call."""
POSITIONS = 1 << 16
"""Longest context of the policy. The first request of a coding program is long; positions cost no weights."""
POLICY = "warmed-up"
"""Not `policy`: a run gives that name to its trained policy, and both may be pointed at one directory."""
STAMP = "quickstart.json"
"""File of the settings that data, and policy, were made with; written when they are whole."""


@dataclass(frozen=True, slots=True)
class WarmUp:
    """Hyperparameters of the warm-up. `format` is raised whenever the same values come to make another policy."""

    format: int = 2
    batch_size: int = 32
    lr: float = 0.005
    """Learning rate of Muon, for the matrices."""
    adamw_lr: float = 6e-3
    """Learning rate of AdamW, for embeddings and norms."""


def with_quickstart_data(config: Config, display: Display) -> Config:
    """Make the rows where the config asks for them, and name their files in the config. Raises UserError."""
    data, model, turns = config.data, config.actor_rollout_ref.model, config.actor_rollout_ref.rollout.multi_turn
    if NAME not in (data.train_files, data.val_files, model.path):
        return config
    directory = Path(config.quickstart.dir)
    make_data(directory, config.quickstart, display)
    tree = config.model_dump()
    if data.train_files == NAME:
        tree["data"]["train_files"] = str(directory / "train.parquet")
    if data.val_files == NAME:
        tree["data"]["val_files"] = str(directory / "val.parquet")
    if turns.tool_config_path == str(configs_dir() / "tools" / "quickstart.yaml"):
        tree["actor_rollout_ref"]["rollout"]["multi_turn"]["tool_config_path"] = str(directory / "tools.yaml")
    return Config.model_validate(tree)


def with_quickstart_policy(config: Config, display: Display) -> Config:
    """Make the warmed-up policy where the config asks for it, from the generated rows, and name it in the config.

    Raises UserError.
    """
    if config.actor_rollout_ref.model.path != NAME:
        return config
    directory = Path(config.quickstart.dir)
    make_policy(directory, config.quickstart, config.trainer.device, display)
    tree = config.model_dump()
    tree["actor_rollout_ref"]["model"]["path"] = str(directory / POLICY)
    return Config.model_validate(tree)


def make_data(directory: Path, keys: QuickstartConfig, display: Display) -> None:
    """`python -m data_prep.quickstart`, which imports this package and is therefore imported by name."""
    module = import_module("data_prep.quickstart")
    recipe = module.Recipe(seed=keys.seed, train_rows=keys.train_rows, val_rows=keys.val_rows)
    with display.stage("quickstart data", total=None):
        module.make(directory, recipe, display.note)


def make_policy(directory: Path, keys: QuickstartConfig, device: Device, display: Display) -> None:
    """Make tokenizer, random weights and warm-up; a policy that was made with the same keys is used again."""
    from agentrl.quickstart.tiny_policy import TinyShape
    from agentrl.trainer.run_sft import train_sft

    policy, warm_up = directory / POLICY, WarmUp()
    data = json.loads((directory / STAMP).read_text(encoding="utf-8"))
    stamp = {"warm_up": asdict(warm_up), "heads": HEADS, "data": data}
    if read_stamp(policy) == stamp:
        display.note(f"{policy}: made before with the same keys, used again")
        return
    making = directory / "warm-up"
    shutil.rmtree(making, ignore_errors=True)
    shape = TinyShape(heads=HEADS, kv_heads=HEADS, max_length=POSITIONS)
    write_untrained(making / "untrained", directory / "sft.parquet", keys.seed, shape)
    train_sft(sft_config(directory / "sft.parquet", making, warm_up, keys.seed, device), display)
    (making / "policy" / STAMP).write_text(json.dumps(stamp, indent=2) + "\n", encoding="utf-8")
    shutil.rmtree(policy, ignore_errors=True)
    (making / "policy").rename(policy)


def read_stamp(policy: Path) -> JSON:
    """Read the keys that the policy was made with; None when it is not there."""
    try:
        stamp: JSON = json.loads((policy / STAMP).read_text(encoding="utf-8"))
        return stamp
    except (OSError, ValueError):
        return None


def write_untrained(directory: Path, conversations: Path, seed: int, shape: TinyShape) -> None:
    """Write a tokenizer trained on the rendered conversations, and a model with random weights."""
    from transformers.utils.chat_template_utils import render_jinja_template

    from agentrl.quickstart.tiny_policy import CHAT_TEMPLATE, build_model, train_tokenizer

    rows = next(pq.ParquetFile(conversations).iter_batches(TOKENIZER_ROWS)).to_pylist()
    texts = render_jinja_template(
        conversations=[row["messages"] for row in rows], tools=json.loads(rows[0]["tools"]), chat_template=CHAT_TEMPLATE
    )[0]
    tokenizer = train_tokenizer(texts, shape.vocab)
    build_model(tokenizer, shape, seed).save_pretrained(directory)
    tokenizer.save_pretrained(directory)


def sft_config(conversations: Path, out: Path, warm_up: WarmUp, seed: int, device: Device) -> SFTConfig:
    """Configure supervised training once over the conversations, in the order of their file: flawed ones come last."""
    return SFTConfig(
        data=SFTDataConfig(
            train_files=str(conversations),
            train_batch_size=warm_up.batch_size,
            shuffle=False,
            on_bad_row="learn",  # broken calls are among the flaws
        ),
        model=SFTModelConfig(path=str(out / "untrained")),
        optim=OptimConfig(
            name="muon",
            lr=warm_up.lr,
            adamw_lr=warm_up.adamw_lr,
            betas=(0.9, 0.95),
            weight_decay=0.0,
            lr_scheduler_type="linear",
        ),
        grad_clip=1.0,
        trainer=SFTTrainerConfig(default_local_dir=str(out), device=device, logger=["jsonl"]),
    )
