"""Feedback of conversations in supervised training: left out, or a weight."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from transformers import AutoModelForCausalLM

from agentrl.chat import Chat
from agentrl.config import SFTConfig
from agentrl.config.sections.sft import SFTDataConfig
from agentrl.data.feedback import effective_number
from agentrl.data.sft import SFTSample as Sample
from agentrl.data.sft import Transcripts, check_transcripts, load_transcripts
from agentrl.errors import DataError
from agentrl.sft import main
from agentrl.trainer.sft import order_of
from agentrl.workers.sft import SupervisedWorker, to_batch
from tests.naming import Names, naming
from tests.test_sft import GREETING, TOOLS, TRANSCRIPTS, chat, policy

__all__ = ["chat", "policy"]


def write(path: Path, feedback: list[Any], column: str = "feedback") -> str:
    """One of the transcripts for each, the last of them a greeting."""
    talks = [*TRANSCRIPTS, GREETING]
    rows = [{"messages": talk, "tools": TOOLS, column: said} for talk, said in zip(talks, feedback, strict=True)]
    if path.suffix == ".parquet":
        texts = [{**row, "messages": json.dumps(row["messages"])} for row in rows]
        pq.write_table(pa.Table.from_pylist(texts), path)
    else:
        path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(path)


def load(file: str, chat: Chat, **keys: Any) -> Transcripts[Sample]:
    config = SFTDataConfig(train_files=file, **keys)
    assert check_transcripts(file, config) == 4, "the first reading counts rows that are left out, too"
    return load_transcripts(file, config, chat)


@pytest.mark.parametrize(
    ("said", "words", "told"),
    [
        (
            [1, -1, "down", None],
            [],
            "warning: {}: 1 above 0, 2 not above it, 1 without any, from -1 to 1. All of them are",
        ),
        ([1, -1, "down", None], ["data.feedback=ignore"], None),
        ([1, 0.5, None, 2], [], "{}: 3 above 0, 0 not above it, 1 without any, from 0.5 to 2. It is not used"),
        (["fine", "no", "well", None], [], "the column feedback holds no feedback that is known, and is not read"),
        ([1, -1, None, 2], ["data.feedback=filter"], "from -1 to 2; data.feedback=filter leaves 1 rows out"),
        (
            [3, 1, None, 0],
            ["data.feedback=weight"],
            "; data.feedback=weight leaves 1 rows out; the weights are worth 2 equal ones",
        ),
    ],
)
def test_a_run_says_what_becomes_of_feedback(
    policy: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    said: list[Any],
    words: list[str],
    told: str | None,
) -> None:
    file = write(tmp_path / "a.jsonl", said)
    run = [f"data.train_files={file}", f"model.path={policy}", f"trainer.default_local_dir={tmp_path / 'run'}", *words]
    assert main([*run, "trainer.total_training_steps=1", "trainer.device=cpu"]) == 0
    out = " ".join(capsys.readouterr().out.split())
    if told is None:
        assert "without any" not in out
    else:
        assert told.format(f"feedback of {file} (column feedback)") in out


@pytest.mark.parametrize("suffix", ["jsonl", "parquet"])
def test_bad_ones_are_left_out(tmp_path: Path, chat: Chat, suffix: str) -> None:
    """Those without feedback stay unless they are to go."""
    file = write(tmp_path / f"a.{suffix}", [1.0, -1.0, 0.0, None])
    every = load(file, chat).samples
    kept = load(file, chat, feedback="filter")
    assert [one.ids.tolist() for one in kept.samples] == [every[0].ids.tolist(), every[3].ids.tolist()]
    assert (kept.left_out, kept.samples[0].weight) == (2, None)
    assert len(load(file, chat, feedback="filter", without_feedback="skip").samples) == 1
    assert len(load(file, chat, feedback="filter", feedback_threshold=-0.5).samples) == 3
    with naming(DataError, "4 rows"):
        load(file, chat, feedback="filter", feedback_threshold=1, without_feedback="skip", on_bad_row="skip")


def test_a_bad_row_that_is_left_out_may_be_broken(tmp_path: Path, chat: Chat) -> None:
    rows = [{"messages": GREETING, "feedback": True}, {"messages": "no list", "feedback": False}]
    file = tmp_path / "a.jsonl"
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    config = SFTDataConfig(train_files=str(file), feedback="filter")
    assert load_transcripts(str(file), config, chat).left_out == 1
    with pytest.raises(DataError, match="row 1 "):
        load_transcripts(str(file), config.model_copy(update={"feedback": None}), chat)


def test_weights_are_relative_to_their_mean_by_token(tmp_path: Path, chat: Chat) -> None:
    file = write(tmp_path / "a.jsonl", [3, 0, 0.5, None])
    for keys, wanted in (
        ({"feedback": "weight"}, [3, 0.5, 1]),
        ({"feedback": "weight", "without_feedback": "skip"}, [3, 0.5]),
        ({"feedback": "exp_weight", "feedback_temperature": 2.0}, [math.exp(1.5), 1, math.exp(0.25), 1]),
    ):
        samples = load(file, chat, **keys).samples
        weights, tokens = [one.weight or 0 for one in samples], [int(one.mask.sum()) for one in samples]
        mean = sum(weight * count for weight, count in zip(wanted, tokens, strict=True)) / sum(tokens)
        assert weights == pytest.approx([weight / mean for weight in wanted], rel=1e-12)


@pytest.mark.parametrize("given", [(9e299, 9e299), (1e-320, 1e-320), (1e200, 1e200), (1e200, 1.0)])
def test_huge_and_tiny_weights_are_weights(tmp_path: Path, chat: Chat, given: tuple[float, float]) -> None:
    file = write(tmp_path / "a.jsonl", [*given, None, None])
    samples = load(file, chat, feedback="weight", without_feedback="skip").samples
    weights = [one.weight or 0 for one in samples]
    assert [weight / weights[0] for weight in weights] == pytest.approx([one / given[0] for one in given], abs=1e-300)
    assert effective_number(given) == pytest.approx(1 if given[-1] == 1 else len(given))


def worker_of(policy: Path) -> SupervisedWorker:
    values = {"data": {"train_files": "x", "max_token_len_per_gpu": 120}, "model": {"path": str(policy)}}
    return SupervisedWorker(
        SFTConfig.model_validate({**values, "optim": {"lr": 0.01}, "grad_clip": 1e6}), device="cpu", total_steps=2
    )


def test_the_loss_is_the_weighted_mean_over_tokens(policy: Path, chat: Chat, tmp_path: Path) -> None:
    """Against plain transformers in float64, one conversation at a time; micro-batches hold one or two."""
    file = write(tmp_path / "a.jsonl", [3, 0.25, 1, 2])
    samples = load(file, chat, feedback="weight").samples
    model = AutoModelForCausalLM.from_pretrained(policy, attn_implementation="eager", dtype=torch.float64)
    total, weight = torch.zeros((), dtype=torch.float64), 0.0
    for sample, factor in zip(samples, (3, 0.25, 1, 2), strict=True):
        ids, mask = torch.from_numpy(sample.ids).long(), torch.from_numpy(sample.mask)[1:]
        by_token = model(input_ids=ids[None]).logits[0, :-1].log_softmax(-1).gather(1, ids[1:, None])[:, 0]
        total, weight = total - factor * by_token[mask].sum(), weight + factor * int(mask.sum())
    expected = total / weight
    expected.backward()
    norm = torch.stack([p.grad.norm() for p in model.parameters() if p.grad is not None]).norm().item()
    worker = worker_of(policy)
    assert worker.mean_loss(to_batch(samples))["val/loss"] == pytest.approx(expected.item(), rel=1e-6)
    found = worker.update(to_batch(samples), 1)
    assert found["sft/loss"] == pytest.approx(expected.item(), rel=1e-6)
    assert found["sft/grad_norm"] == pytest.approx(norm, rel=1e-5)
    checked = [one.report for one in worker.checked()]
    assert [one.findings for one in checked] == [[]] and checked[0].evaluated["update/gradient"] > 1


def test_equal_weights_change_nothing(policy: Path, chat: Chat, tmp_path: Path) -> None:
    file = write(tmp_path / "a.jsonl", [1, 1, 1, 1])
    found = []
    for keys in ({}, {"feedback": "weight"}):
        worker, batch = worker_of(policy), to_batch(load(file, chat, **keys).samples)
        metrics = [worker.update(batch, step) for step in (1, 2)]
        found.append((metrics, worker.mean_loss(batch), worker.backend.tensors))
        assert batch.has("loss_weight") == bool(keys)
    assert found[0][:2] == found[1][:2]
    assert all(torch.equal(one, found[1][2][name]) for name, one in found[0][2].items())


def test_a_checkpoint_is_of_its_weights(tmp_path: Path, chat: Chat) -> None:
    file = write(tmp_path / "a.jsonl", [3, 2, 1, 1])
    config = SFTConfig.model_validate({"model": {"path": "x"}, "data": {"train_files": file}})
    orders = [
        order_of(config, load(file, chat, **keys).samples)["data.train_files"]
        for keys in ({}, {"feedback": "weight"}, {"feedback": "exp_weight"}, {"feedback": "ignore"})
    ]
    assert len({*map(str, orders)}) == 3 and orders[0] == orders[3]


@pytest.mark.parametrize(
    ("said", "keys", "message"),
    [
        ([1, 2, -1, 1], {"feedback": "weight"}, ("row 2", "column feedback", "exp_weight")),
        ([1, 2, "bad", 1], {"feedback": "weight"}, "row 2"),
        (
            [1, 2, 5, 1],
            {"feedback": "exp_weight", "feedback_temperature": 0.001},
            ("row 0", "data.feedback_temperature=0.001"),
        ),
        ([1, 2, "so so", 1], {"feedback": "filter"}, ("row 2", "column feedback", "'so so'")),
        ([None] * 4, {"feedback": "filter"}, "column feedback"),
        ([1] * 4, {"feedback": "filter", "feedback_key": "stars"}, "column stars"),
    ],
)
def test_feedback_that_cannot_be_used_is_named(
    tmp_path: Path, chat: Chat, said: list[Any], keys: dict[str, Any], message: Names
) -> None:
    file = write(tmp_path / "a.jsonl", said)
    config = SFTDataConfig(train_files=file, **keys)
    for read in (lambda: check_transcripts(file, config), lambda: load_transcripts(file, config, chat)):
        with naming(DataError, message):
            read()


def test_rows_to_validate_on_need_no_feedback(tmp_path: Path, chat: Chat) -> None:
    config = SFTDataConfig(train_files="others", feedback="filter")
    found = load_transcripts(write(tmp_path / "a.jsonl", [None] * 4), config, chat)
    assert len(found.samples) == 4 and found.heard is None


def test_a_label_of_trl_filters_by_its_name(tmp_path: Path, chat: Chat) -> None:
    rows = [{"prompt": "p", "completion": " x", "label": True}, {"prompt": "p", "completion": " y", "label": False}]
    file = tmp_path / "a.jsonl"
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    config = SFTDataConfig(train_files=str(file), feedback="filter", feedback_key="label")
    (sample,) = load_transcripts(str(file), config, chat).samples
    assert chat.decode(sample.ids.tolist()).startswith("p x")


def test_keys_without_effect_are_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for word in ("feedback_threshold=1", "feedback_temperature=2", "without_feedback=skip"):
        assert main([f"data.train_files={tmp_path / 'a.jsonl'}", "model.path=x", f"data.{word}"]) == 2
        assert f"data.{word.partition('=')[0]}" in capsys.readouterr().err
