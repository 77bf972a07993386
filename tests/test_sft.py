"""Supervised training end to end, with a real tokenizer and a real tiny model."""

from __future__ import annotations

import errno
import json
import os
import re
import shutil
from itertools import chain, count
from pathlib import Path
from typing import Any
from unittest.mock import ANY

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from agentrl.chat import Chat
from agentrl.config import SFTConfig
from agentrl.config.sections.sft import SFTDataConfig
from agentrl.data.sft import SFTSample, load_transcripts
from agentrl.errors import DataError, WorkerDied
from agentrl.model.scores import Needs, TokenScores
from agentrl.observe.open import open_display
from agentrl.quickstart.tiny_policy import TinyShape, make_tiny_policy
from agentrl.sft import main
from agentrl.tool import ToolSchema
from agentrl.trainer.run_sft import train_sft
from agentrl.trainer.sft import batches
from agentrl.trajectory import FunctionCall, Message
from agentrl.trajectory.batch import RaggedBatch
from agentrl.workers.fsdp import FSDPPolicy
from agentrl.workers.sft import SupervisedWorker, to_batch
from agentrl.workers.trainable import MAX_SKIPPED
from tests.chat.templates import HERMES
from tests.chat.turn_ends import ENDINGS, load_chat
from tests.chat.vocabularies import QWEN, save_tokenizer
from tests.e2e.test_resume import numbers
from tests.naming import assert_names, naming

CALCULATOR: ToolSchema = {
    "type": "function",
    "function": {
        "name": "calculator",
        "description": "Evaluates an expression.",
        "parameters": {"type": "object", "properties": {"expression": {"type": "string"}}, "required": ["expression"]},
    },
}
TOOLS = json.dumps([CALCULATOR])


def transcript(question: str, expression: str, result: str) -> list[Message]:
    function: FunctionCall = {"name": "calculator", "arguments": json.dumps({"expression": expression})}
    return [
        {"role": "user", "content": question},
        {"role": "assistant", "content": "", "tool_calls": [{"type": "function", "function": function}]},
        {"role": "tool", "content": result},
        {"role": "assistant", "content": f"#### {result}"},
    ]


TRANSCRIPTS: list[list[Message]] = [
    transcript("How much is 12 times 3?", "12*3", "36"),
    transcript("Add 40 and 2.", "40+2", "42"),
    transcript("What is 9 minus 4?", "9-4", "5"),
]
GREETING = [{"role": "user", "content": "Hi."}, {"role": "assistant", "content": "Hello."}]


@pytest.fixture(scope="module")
def policy(tmp_path_factory: pytest.TempPathFactory) -> Path:
    shape = TinyShape(vocab=400, hidden=64, layers=2, heads=2, kv_heads=1, intermediate=128)
    return make_tiny_policy(tmp_path_factory.mktemp("policy"), seed=0, shape=shape)


@pytest.fixture(scope="module")
def chat(policy: Path) -> Chat:
    return Chat.from_pretrained(str(policy))


def write(path: Path, messages: list[Any], tools: Any = TOOLS) -> Path:
    pq.write_table(pa.Table.from_pylist([{"messages": row, "tools": tools} for row in messages]), path)
    return path


def data_config(**keys: Any) -> SFTDataConfig:
    return SFTDataConfig(train_files="unused", **keys)


def test_transcripts_are_memorised_and_generated_again(policy: Path, chat: Chat, tmp_path: Path) -> None:
    data = write(tmp_path / "train.parquet", TRANSCRIPTS)
    out = tmp_path / "run"
    arguments = [
        f"data.train_files={data}",
        f"data.val_files={data}",
        "data.train_batch_size=2",
        f"model.path={policy}",
        "optim.name=muon",
        "optim.lr=0.02",
        "optim.adamw_lr=0.006",
        "optim.weight_decay=0",
        "optim.lr_scheduler_type=linear",
        "trainer.total_training_steps=90",
        "trainer.test_freq=40",
        "trainer.device=cpu",
        f"trainer.default_local_dir={out}",
    ]
    assert main(arguments) == 0

    lines = [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]
    assert [line["step"] for line in lines] == list(range(1, 91))
    assert lines[0]["sft/loss"] > 4 > 0.05 > lines[-1]["sft/loss"]
    assert all(line["time/step"] > 0 and line["perf/tokens_per_second"] > 0 for line in lines)
    assert lines[0]["sft/lr"] == pytest.approx(0.02)
    assert lines[-1]["sft/lr"] == pytest.approx(0.02 / 90)
    validated = [line["step"] for line in lines if "val/loss" in line]
    assert validated == [40, 80, 90]
    assert lines[-1]["val/loss"] < 0.05
    assert (out / "config.yaml").exists()
    assert not list(out.glob(".*"))

    model = AutoModelForCausalLM.from_pretrained(out / "policy")
    tokenizer = AutoTokenizer.from_pretrained(out / "policy")
    for messages in TRANSCRIPTS:
        ids, mask = chat.render_training(messages, [CALCULATOR])
        start = mask.index(1)
        end = start + mask[start:].index(0)  # of the first assistant turn
        generated = model.generate(  # type: ignore[misc]  # transformers annotates self with a protocol
            torch.tensor([ids[:start]]), max_new_tokens=60, do_sample=False, eos_token_id=tokenizer.eos_token_id
        )
        assert generated[0].tolist() == ids[:end]


def test_only_the_assistant_is_learnt(policy: Path, chat: Chat, tmp_path: Path) -> None:
    """The loss is transformers' own over the assistant's tokens, and other tokens have no part in it."""
    samples = load_transcripts(str(write(tmp_path / "a.parquet", TRANSCRIPTS)), data_config(), chat).samples
    worker = SupervisedWorker(sft_config(policy), device="cpu", total_steps=1)
    model = AutoModelForCausalLM.from_pretrained(policy)
    losses = []
    for sample in samples:
        ids = torch.from_numpy(sample.ids).long()
        with torch.no_grad():
            logits = model(input_ids=ids[None]).logits[0, :-1]
        by_token = torch.nn.functional.cross_entropy(logits, ids[1:], reduction="none")
        losses.append(by_token[torch.from_numpy(sample.mask)[1:]])
    expected = torch.cat(losses).mean().item()
    assert worker.mean_loss(to_batch(samples))["val/loss"] == pytest.approx(expected, abs=1e-5)
    assert worker.update(to_batch(samples), 1)["sft/loss"] == pytest.approx(expected, abs=1e-5)
    learnt = [chat.decode(sample.ids[sample.mask].tolist()) for sample in samples]
    assert learnt[1].endswith("#### 42<|im_end|>")
    assert "calculator" in learnt[1]
    assert "Add 40 and 2." not in learnt[1]
    assert "tool_response" not in learnt[1]


def test_a_template_that_loses_text_is_told_before_a_model_is_loaded(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """There are no weights in the folder of the tokenizer: the chat template is looked at first."""
    template = HERMES.replace("message.role == 'tool'", "message.role == 'observation'")
    tokenizer = save_tokenizer(tmp_path / "tokenizer", QWEN, "<|im_end|>", template)
    (Path(tokenizer) / "config.json").write_text('{"model_type": "qwen3"}')
    data = write(tmp_path / "train.parquet", [[*GREETING, *GREETING], *TRANSCRIPTS])
    arguments = [f"data.train_files={data}", f"model.path={tokenizer}", f"trainer.default_local_dir={tmp_path / 'run'}"]
    assert main([*arguments, "trainer.device=cpu"]) == 2
    told = " ".join(capsys.readouterr().err.split())
    assert "loses text" in told
    assert "role 'tool'" in told
    assert_names(told, "multi_turn.format", "SFT")
    assert not (tmp_path / "run").exists()


def test_users_are_shown_and_not_learnt_whatever_ends_a_conversation(tmp_path: Path) -> None:
    """A token that stands only behind the last turn of a conversation is no end of turns."""
    chat = load_chat(tmp_path, ENDINGS["newline_end_of_conversation"])
    asked = [[*GREETING, {"role": "user", "content": f"Question {n}"}, GREETING[1]] for n in range(2)]
    samples = load_transcripts(str(write(tmp_path / "a.parquet", asked, None)), data_config(), chat).samples
    for n, sample in enumerate(samples):
        assert f"<|user|>\nQuestion {n}<|end|>\n<|assistant|>\n" in chat.decode(sample.ids[~sample.mask].tolist())
        assert chat.decode(sample.ids[sample.mask].tolist()) == "Hello.<|end|>" * 2


def test_a_step_that_is_not_finite_is_skipped_and_too_many_end_the_run(
    policy: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    data = write(tmp_path / "train.parquet", TRANSCRIPTS)
    healthy, calls = FSDPPolicy.forward, count(1)
    broken = {2, *range(8, 8 + MAX_SKIPPED)}

    def sometimes_broken(backend: FSDPPolicy, micro: RaggedBatch, needs: Needs, *others: Any) -> TokenScores:
        return TokenScores(
            healthy(backend, micro, needs, *others).logprobs * (torch.nan if next(calls) in broken else 1.0)
        )

    monkeypatch.setattr(FSDPPolicy, "forward", sometimes_broken)
    run = [f"data.train_files={data}", "data.train_batch_size=3", f"model.path={policy}", "trainer.device=cpu"]
    run += ["optim.lr=1e-2", f"trainer.default_local_dir={tmp_path / 'out'}"]
    assert main([*run, "trainer.total_training_steps=3"]) == 0
    first, second, third = numbers(tmp_path / "out")
    assert second == {"step": 2, "sft/skipped_updates": 1}
    assert first["sft/skipped_updates"] == third["sft/skipped_updates"] == 0
    assert third["sft/loss"] < first["sft/loss"]
    assert main([*run, "trainer.total_training_steps=20"]) == 2
    said = " ".join(capsys.readouterr().err.split())
    assert_names(said, f"step {8 + MAX_SKIPPED - 1 - 3}")
    assert_names(said, f"{MAX_SKIPPED}th")


def test_a_run_goes_on_from_its_checkpoint_as_if_nothing_had_been(
    policy: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Stopped in the middle of the second epoch, whose order is not the first one's."""
    data = write(tmp_path / "train.parquet", TRANSCRIPTS)
    common = [f"data.train_files={data}", f"data.val_files={data}", "data.train_batch_size=1", f"model.path={policy}"]
    common += ["optim.lr=1e-2", "trainer.device=cpu", "trainer.test_freq=2"]

    def run(name: str, total: int, *more: str) -> int:
        return main(
            [*common, f"trainer.total_training_steps={total}", f"trainer.default_local_dir={tmp_path / name}", *more]
        )

    assert run("whole", 6) == 0
    assert not (tmp_path / "whole" / "checkpoints").exists()
    assert run("parts", 4, "trainer.save_freq=3") == 0
    assert sorted(path.name for path in (tmp_path / "parts" / "checkpoints").iterdir()) == [
        "step_000003",
        "step_000004",
    ]
    for changed, said in (
        ("data.train_batch_size=2", r"data\.train_batch_size: 1 in the checkpoint, 2 in this run"),
        (f"data.train_files=[{data},{data}]", r"data\.train_files: \"3 transcripts .*, \"6 transcripts .* in this run"),
    ):
        assert run("parts", 6, "trainer.save_freq=3", changed) == 2
        assert re.search(said, capsys.readouterr().err)
    assert run("parts", 6, "trainer.save_freq=3") == 0
    assert "resumed from" in capsys.readouterr().out
    whole, parts = numbers(tmp_path / "whole"), numbers(tmp_path / "parts")
    assert [line["step"] for line in parts] == [1, 2, 3, 4, 5, 6]
    assert [line["sft/loss"] for line in parts] == [line["sft/loss"] for line in whole]
    weights = [(tmp_path / name / "policy" / "model.safetensors").read_bytes() for name in ("whole", "parts")]
    assert weights[0] == weights[1]

    assert run("parts", 6, "trainer.save_freq=3") == 0
    assert_names(capsys.readouterr().out, "step_000006")
    shutil.rmtree(tmp_path / "parts" / "policy")  # as if it had been killed before its export
    assert run("parts", 6, "trainer.save_freq=3") == 0
    assert (tmp_path / "parts" / "policy" / "model.safetensors").read_bytes() == weights[0]
    earlier = tmp_path / "parts" / "checkpoints" / "step_000004"
    assert run("again", 5, "trainer.resume_mode=resume_path", f"trainer.resume_from_path={earlier}") == 0
    assert numbers(tmp_path / "again") == [{**whole[4], "val/loss": ANY}]
    assert run("parts", 1, "trainer.resume_mode=disable") == 0
    assert len(numbers(tmp_path / "parts")) == 1 and len(numbers(tmp_path / "parts.1")) == 6


def test_the_best_checkpoint_is_kept_and_exported_later(policy: Path, tmp_path: Path) -> None:
    """A learning rate that ruins the policy: the first step stays the best, and a resumed run knows it."""
    data = write(tmp_path / "train.parquet", TRANSCRIPTS)
    common = [f"data.train_files={data}", f"data.val_files={data}", "data.train_batch_size=3", f"model.path={policy}"]
    common += ["optim.lr=0.5", "trainer.device=cpu", "trainer.test_freq=1"]
    run = [*common, f"trainer.default_local_dir={tmp_path / 'run'}", "trainer.save_freq=1"]
    run += ["trainer.max_ckpt_to_keep=1", "trainer.metric_for_best_model=val/loss"]
    checkpoints = tmp_path / "run" / "checkpoints"
    for total in (3, 5):
        assert main([*run, f"trainer.total_training_steps={total}"]) == 0
        losses = [line["val/loss"] for line in numbers(tmp_path / "run")]
        best = losses.index(min(losses)) + 1
        assert best < total, losses
        assert sorted(path.name for path in checkpoints.iterdir()) == [f"step_{best:06d}", f"step_{total:06d}"]
    again = [*common, f"trainer.default_local_dir={tmp_path / 'best'}", f"trainer.total_training_steps={best}"]
    again += ["trainer.resume_mode=resume_path", f"trainer.resume_from_path={checkpoints / f'step_{best:06d}'}"]
    assert main(again) == 0
    assert (tmp_path / "best" / "policy" / "trained_steps").read_text() == f"{best}\n"


def test_a_dead_worker_costs_what_came_after_the_checkpoint(
    policy: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The fault: one call of an update ends as if its process had died."""
    data = str(write(tmp_path / "train.parquet", TRANSCRIPTS))

    def config(name: str, **trainer: Any) -> SFTConfig:
        run = {"default_local_dir": str(tmp_path / name), "total_training_steps": 5, "device": "cpu"}
        files = {"train_files": data, "train_batch_size": 1}
        return SFTConfig.model_validate(
            {"data": files, "model": {"path": str(policy)}, "optim": {"lr": 1e-2}, "trainer": run | trainer}
        )

    deaths = [4]
    healthy = SupervisedWorker.update

    def update(worker: SupervisedWorker, batch: Any, step: int) -> Any:
        if step in deaths:
            deaths.clear()
            raise WorkerDied("rank 1 died")
        return healthy(worker, batch, step)

    with open_display("test") as display:
        train_sft(config("undisturbed"), display)
        monkeypatch.setattr(SupervisedWorker, "update", update)
        train_sft(config("disturbed", max_worker_restarts=1, save_freq=2), display)
        assert numbers(tmp_path / "disturbed") == numbers(tmp_path / "undisturbed")
        with naming(WorkerDied, "same command"):
            deaths.append(1)
            train_sft(config("given up"), display)


def sft_config(policy: Path, **data: Any) -> SFTConfig:
    return SFTConfig.model_validate({"data": {"train_files": "x", **data}, "model": {"path": str(policy)}})


def test_the_end_counts_the_rows_that_were_taken(
    policy: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    data = write(tmp_path / "train.parquet", TRANSCRIPTS)
    run = [f"data.train_files={data}", "data.train_batch_size=2", f"model.path={policy}", "trainer.device=cpu"]
    for steps, counted in ((1, "2 of 3 rows in 1 steps"), (2, "3 rows in 2 steps")):
        assert (
            main([*run, f"trainer.total_training_steps={steps}", f"trainer.default_local_dir={tmp_path}/{steps}"]) == 0
        )
        assert f"trained on {counted}" in capsys.readouterr().out


def test_batches_take_every_transcript_once_an_epoch(policy: Path) -> None:
    samples = [SFTSample(ids=[index], mask=[True]) for index in range(5)]  # type: ignore[arg-type]

    def epochs(config: SFTConfig) -> list[list[list[int]]]:
        source = batches(config, samples)
        return [[[sample.ids[0] for sample in next(source)] for _ in range(3)] for _ in range(2)]

    in_order = epochs(sft_config(policy, train_batch_size=2, shuffle=False))
    assert in_order == [[[0, 1], [2, 3], [4]]] * 2
    first, second = epochs(sft_config(policy, train_batch_size=2))
    assert sorted(chain(*first)) == sorted(chain(*second)) == [0, 1, 2, 3, 4]
    assert first != second
    later = batches(sft_config(policy, train_batch_size=2), samples, 4)
    assert [[sample.ids[0] for sample in next(later)] for _ in range(2)] == second[1:]
    assert epochs(sft_config(policy, train_batch_size=2))[0] == first
    assert epochs(sft_config(policy, train_batch_size=2, seed=2))[0] != first


def test_overlong_transcripts(chat: Chat, tmp_path: Path) -> None:
    long = transcript("How much? " * 50, "1+1", "2")
    data = str(write(tmp_path / "a.parquet", [TRANSCRIPTS[0], long, TRANSCRIPTS[1]]))
    with pytest.raises(DataError, match=r"a\.parquet, row 1 .* tokens long, data\.max_length is 120.*truncation=skip"):
        load_transcripts(data, data_config(max_length=120), chat)
    kept = load_transcripts(data, data_config(max_length=120, truncation="skip"), chat)
    assert (len(kept.samples), kept.too_long) == (2, 1)
    with naming(DataError, "max_length=5"):
        load_transcripts(data, data_config(max_length=5, truncation="skip"), chat)


@pytest.mark.parametrize(
    ("messages", "tools", "message"),
    [
        ([], TOOLS, r"row 1 .*column messages: expected a list of messages, found \[\]"),
        ([{"role": "user", "content": None}], TOOLS, r"row 1 .*column messages, message 0: expected text as content"),
        ([{"role": "user", "content": "hi"}], TOOLS, r"row 1 .*cannot be rendered: there is no assistant turn"),
        (
            [{"role": "assistant", "content": "hi"}],
            TOOLS,
            r"row 1 .*message 0 is an assistant turn with nothing before",
        ),
        (TRANSCRIPTS[1], "{not json", r"row 1 .*column tools: expected JSON \(.*\), found '\{not json'"),
        (TRANSCRIPTS[1], '{"name": "calculator"}', r"row 1 .*column tools: expected a list of .*in JSON text"),
    ],
)
def test_a_bad_row_is_named(chat: Chat, tmp_path: Path, messages: Any, tools: str, message: str) -> None:
    rows = [{"messages": TRANSCRIPTS[0], "tools": TOOLS}, {"messages": messages, "tools": tools}]
    pq.write_table(pa.Table.from_pylist(rows), tmp_path / "a.parquet")
    with pytest.raises(DataError, match=r"a\.parquet, " + message):
        load_transcripts(str(tmp_path / "a.parquet"), data_config(), chat)


def test_tools_may_be_structs(chat: Chat, tmp_path: Path) -> None:
    """As ReTool's set has them. Parquet gives each struct the members of all, null where it has none."""
    (calculator,) = json.loads(TOOLS)
    parameters = {"type": "object", "properties": {"code": {"type": "string"}}, "required": ["code"]}
    other = {"type": "function", "function": {"name": "run", "description": "Runs.", "parameters": parameters}}
    texts = write(tmp_path / "text.parquet", TRANSCRIPTS[:2], json.dumps([calculator, other]))
    structs = write(tmp_path / "structs.parquet", TRANSCRIPTS[:2], [calculator, other])
    read = [load_transcripts(str(file), data_config(), chat).samples for file in (texts, structs)]
    assert [one.ids.tolist() for one in read[0]] == [one.ids.tolist() for one in read[1]]


def test_faults_of_the_user_end_with_a_message(
    policy: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    data = write(tmp_path / "a.parquet", TRANSCRIPTS)
    common = [f"model.path={policy}", f"trainer.default_local_dir={tmp_path / 'run'}", "trainer.device=cpu"]
    for arguments, message in (
        ([f"data.train_files={tmp_path / 'absent.parquet'}", *common], "absent.parquet does not exist"),
        ([f"data.train_files={data}", "data.messages_key=talk", *common], "no column 'talk'"),
        ([f"data.train_files={policy / 'config.json'}", *common], "config.json, row 0 (the first is 0): expected JSON"),
        ([f"data.train_files={data}", "optim.lrate=1", *common], "optim.lr"),
    ):
        assert main(arguments) == 2
        assert message in capsys.readouterr().err
    assert not (tmp_path / "run").exists()


def test_a_full_disk_leaves_the_older_policy(
    policy: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def full_disk(model: Any, params: Any, dtype: Any, directory: Path, tokenizer: Any) -> None:
        directory.mkdir(exist_ok=True)
        (directory / "model.safetensors").write_bytes(b"half")
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    older = tmp_path / "run" / "policy" / "model.safetensors"
    older.parent.mkdir(parents=True)
    older.write_bytes(b"older")
    monkeypatch.setattr("agentrl.workers.fsdp.export_model", full_disk)
    data = write(tmp_path / "a.parquet", TRANSCRIPTS)
    arguments = [f"data.train_files={data}", f"model.path={policy}", "trainer.device=cpu"]
    assert main([*arguments, f"trainer.default_local_dir={tmp_path / 'run'}"]) == 2
    assert "the disk is full" in capsys.readouterr().err
    assert older.read_bytes() == b"older"
    assert not list((tmp_path / "run").glob(".*"))
