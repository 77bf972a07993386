"""What every command writes at its end can be served as it is: turns end, and prompts are those of the training."""

from __future__ import annotations

import json
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from transformers import AutoTokenizer, GenerationConfig, PreTrainedTokenizerBase

from agentrl.chat import Chat
from agentrl.config import PreferencesConfig
from agentrl.config.sections.sft import PairDataConfig, SFTModelConfig
from agentrl.observe.open import open_display
from agentrl.preferences import main as preferences
from agentrl.quickstart.tiny_policy import CHAT_TEMPLATE, make_tiny_policy
from agentrl.reward.model_input import ModelInput
from agentrl.sft import main as sft
from agentrl.train import main as train
from agentrl.trainer.run_sft import PreferencesJob
from agentrl.trajectory import Message
from tests.runs import Overrides

MODEL = "actor_rollout_ref.model"
ASKED: list[Message] = [{"role": "user", "content": "How much is 12 times 3?"}]
OTHER = "{%- for message in messages %}{{- message.role + ': ' + message.content + '\\n' }}{%- endfor %}"


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A base model: another token than the template's ends its texts, and its own template is not the one to train."""
    folder = make_tiny_policy(tmp_path_factory.mktemp("base"), seed=3)
    tokenizer = AutoTokenizer.from_pretrained(folder)
    tokenizer.eos_token, tokenizer.chat_template = "<|endoftext|>", OTHER
    tokenizer.save_pretrained(folder)
    for name in ("config.json", "generation_config.json"):
        values = json.loads((folder / name).read_text())
        (folder / name).write_text(json.dumps(values | {"eos_token_id": tokenizer.eos_token_id}))
    return folder


@pytest.fixture(scope="module")
def template(tmp_path_factory: pytest.TempPathFactory) -> Path:
    file = tmp_path_factory.mktemp("template") / "chat.jinja"
    file.write_text(CHAT_TEMPLATE)
    return file


def pairs(folder: Path) -> str:
    rows = [{"chosen": said("36"), "rejected": said("7")} for _ in range(2)]
    pq.write_table(pa.Table.from_pylist(rows), folder / "pairs.parquet")
    return str(folder / "pairs.parquet")


def said(answer: str) -> str:
    return json.dumps([*ASKED, {"role": "assistant", "content": f"#### {answer}"}])


def exported(run: Path) -> PreTrainedTokenizerBase:
    """Check what no command may leave out, and return the tokenizer."""
    tokenizer: PreTrainedTokenizerBase = AutoTokenizer.from_pretrained(run / "policy")
    assert tokenizer.chat_template == CHAT_TEMPLATE
    return tokenizer


@pytest.mark.slice(2, "matrix")
@pytest.mark.parametrize("command", ["rewards", "rewards, adapters", "transcripts", "transcripts, adapters", "pairs"])
def test_a_policy_of_a_base_model_ends_its_turns(
    base: Path, template: Path, small_run: Overrides, data_dir: Path, tmp_path: Path, command: str
) -> None:
    run, one = tmp_path / "run", "trainer.total_training_steps=1"
    adapters = "lora_rank=2" if command.endswith("adapters") else "lora_rank=0"
    model = [f"model.path={base}", f"model.chat_template={template}", f"model.{adapters}"]
    files = ["data.train_batch_size=2", "trainer.device=cpu", f"trainer.default_local_dir={run}", one, *model]
    if command.startswith("rewards"):
        policy = [f"{MODEL}.path={base}", f"{MODEL}.chat_template={template}", f"{MODEL}.{adapters}"]
        assert train(small_run(*policy, one, "data.val_files=null", "trainer.save_freq=-1", run_dir=run)) == 0
    elif command.startswith("transcripts"):
        assert sft([f"data.train_files={data_dir}/sft.parquet", "data.on_bad_row=learn", *files]) == 0
    else:
        assert preferences([f"data.train_files={pairs(tmp_path)}", *files]) == 0
    tokenizer = exported(run)
    ends = GenerationConfig.from_pretrained(run / "policy").eos_token_id
    assert tokenizer.convert_ids_to_tokens(ends) == ["<|endoftext|>", "<|im_end|>"]


def test_a_reward_model_learns_by_the_template_that_it_scores_by(base: Path, template: Path, tmp_path: Path) -> None:
    run, files = tmp_path / "run", pairs(tmp_path)
    model = ["trains=reward_model", f"model.path={base}", f"model.chat_template={template}", "trainer.device=cpu"]
    keys = [f"data.train_files={files}", "data.train_batch_size=2", f"trainer.default_local_dir={run}"]
    assert preferences([*model, *keys, "trainer.total_training_steps=1"]) == 0
    exported(run)
    assert not (run / "policy" / "generation_config.json").exists()
    config = PreferencesConfig(
        data=PairDataConfig(train_files=files),
        model=SFTModelConfig(path=str(base), chat_template=str(template)),
        trains="reward_model",
    )
    with open_display("test") as display:
        read = PreferencesJob(config).read(files, Chat.of_model(config.model, config.format), display, 2)
    scored, _ = ModelInput(str(run / "policy"), None).ids(json.loads(said("36")))
    assert read[0].ids[: read[0].lengths[0]].tolist() == scored
