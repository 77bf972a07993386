"""Learning from conversations that are good or bad by themselves, with TRL's numbers as the measure."""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from decimal import Decimal
from itertools import pairwise
from pathlib import Path
from typing import Any, cast

import numpy as np
import pytest
import torch

from agentrl.algorithms.pair_losses import Judged, JudgedLoss, judged_weights
from agentrl.chat import Chat
from agentrl.config import PreferencesConfig
from agentrl.config.registries import PAIR_LOSSES, UNPAIRED_LOSSES
from agentrl.config.sections.sft import PairDataConfig
from agentrl.data.feedback import WORDS, feedback_of
from agentrl.data.judged import add_mismatched, load_judged
from agentrl.data.messages import Unfit
from agentrl.data.pairs import Preference
from agentrl.errors import ConfigError, DataError
from agentrl.preferences import main
from agentrl.system.registry import configured
from agentrl.workers.preferences import auc
from benchmarks.training.kto_trl import CASES, make_policy, ours, write_rows
from tests.e2e.test_resume import numbers
from tests.naming import Names, assert_names, naming
from tests.test_sft import CALCULATOR, TOOLS, transcript

RECORDED: dict[str, Any] = json.loads(Path(__file__).with_name("recorded_kto.json").read_text())


@pytest.fixture(scope="module")
def policy(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_policy(tmp_path_factory.mktemp("policy"))


@pytest.fixture(scope="module")
def chat(policy: Path) -> Chat:
    return Chat.from_pretrained(str(policy))


def loss_of(case: str) -> JudgedLoss:
    return configured(cast(JudgedLoss, PAIR_LOSSES.get(case.partition(",")[0])), CASES[case], "loss_options")


def double(values: list[float]) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.float64)


@pytest.mark.parametrize("case", CASES)
def test_losses_and_gradients_of_given_log_probs_are_trls(case: str) -> None:
    given = RECORDED[case]["given"]
    ratios = double(given["ratios"])
    kl = double(given["mismatched"]).mean().clamp(min=0)
    assert kl > 1 and 0 < sum(given["good"]) < len(ratios)
    judged = Judged(ratios, torch.ones_like(ratios), torch.tensor(given["good"]), kl)
    losses, weights = judged_weights(loss_of(case), judged)
    assert losses.mean().item() == pytest.approx(given["loss"], rel=1e-12)
    assert (-weights / len(losses)).tolist() == pytest.approx(given["gradient"], rel=1e-10)


@pytest.mark.parametrize("case", CASES)
def test_rows_and_steps_are_trls(case: str, policy: Path, chat: Chat, tmp_path: Path) -> None:
    """TRL's model was in float64, and gave log-probs in float32. Micro-batches of 30 tokens hold one or two rows."""
    file, recorded = write_rows(tmp_path / "rows.jsonl"), RECORDED[case]
    rows = load_judged(str(file), PairDataConfig(train_files="unused"), chat, lambda done: None).samples
    if mismatched := case.startswith("kto"):
        add_mismatched([rows], 1000)
    for number, name in enumerate(("sequences", "mismatched")[: 1 + mismatched]):
        parts = [parts_of(row)[number] for row in rows]
        assert [ids for ids, _ in parts] == [one["ids"] for one in recorded[name]]
        assert [mask for _, mask in parts] == [one["learnt"] for one in recorded[name]]
    for mine, other in zip(ours(policy, case, file), recorded["steps"], strict=True):
        assert mine["loss"] == pytest.approx(other["loss"], abs=1e-6)
        assert mine["kl"] == pytest.approx(other["kl"], rel=1e-6, abs=1e-6)
        assert mine["grad_norm"] == pytest.approx(other["grad_norm"], rel=1e-5)


def parts_of(row: Preference) -> list[tuple[list[int], list[int]]]:
    """Ids and mask of each conversation of a row."""
    ends = torch.tensor([0, *row.lengths]).cumsum(0).tolist()
    spans = [slice(*both) for both in pairwise(ends)]
    return [(row.ids[one].tolist(), row.mask[one].astype(int).tolist()) for one in spans]


def test_the_kl_is_never_below_0_and_a_users_loss_may_read_it() -> None:
    """A row that is as good as the policy's drift weighs most; without drift, at the ratio 0."""
    judged = Judged(double([0.0, 0.0]), double([1, 1]), torch.tensor([True, False]), double([0.0])[0])
    losses, weights = judged_weights(loss_of("kto"), judged)
    assert losses.tolist() == pytest.approx([0.5, 0.5 * 0.2])
    assert weights.tolist() == pytest.approx([0.3 / 4, -0.2 * 0.3 / 4])


GOOD = [transcript("How much is 12 times 3?", "12*3", "36"), transcript("Add 40 and 2.", "40+2", "42")]
GOOD += [transcript("9 minus 4?", "9-4", "5"), transcript("2 plus 2?", "2+2", "4")]
BAD = [
    [{"role": "user", "content": f"{asked} times 3?"}, {"role": "assistant", "content": f"I would say {said}, or so."}]
    for asked, said in (("How much is 7", "20"), ("And 9", "26"), ("Or 11", "3"))
]


def logged(tmp_path: Path, name: str = "logs.jsonl", **more: Any) -> str:
    """Good conversations with a call, which say nothing, 1 or up, and bad ones without."""
    rows: list[dict[str, Any]] = [{"messages": one, "feedback": "up"} for one in GOOD]
    rows += [{"messages": one, "feedback": -1} for one in BAD] + [{"messages": GOOD[0], "feedback": None}]
    return write(tmp_path / name, [{**row, "tools": TOOLS, **more} for row in rows])


def write(path: Path, rows: list[dict[str, Any]]) -> str:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(path)


def read(file: str, chat: Chat, **keys: Any) -> list[Preference]:
    return load_judged(file, PairDataConfig(train_files="unused", **keys), chat, lambda done: None).samples


def test_conversations_with_feedback_are_learnt_turn_by_turn(tmp_path: Path, chat: Chat) -> None:
    rows = read(logged(tmp_path), chat)
    assert [row.sides for row in rows] == [(1,)] * 4 + [(-1,)] * 3, "the one without feedback is left out"
    ids, _ = chat.render_training(GOOD[0], [CALCULATOR])
    assert rows[0].ids.tolist() == ids
    assert chat.decode(rows[0].ids[rows[0].mask].tolist()).endswith("#### 36<|im_end|>")
    add_mismatched([rows[:3], rows[3:6], rows[6:]], 1000)
    learnt = [[chat.decode([i for i, m in zip(*part, strict=True) if m]) for part in parts_of(row)] for row in rows]
    own = [one for one, _ in learnt]
    assert [other for _, other in learnt] == [own[2], own[0], own[1], own[5], own[3], own[4], own[5]]
    shown = chat.decode([i for i, m in zip(*parts_of(rows[3])[1], strict=True) if not m])
    assert "2 plus 2?" in shown and "36" not in shown


def test_mismatched_conversations_are_cut(tmp_path: Path, chat: Chat) -> None:
    rows = read(logged(tmp_path), chat)
    lengths = [row.lengths[0] for row in rows]
    add_mismatched([rows], 100)
    assert [row.lengths[0] for row in rows] == lengths
    assert max(row.lengths[1] for row in rows) == 100
    assert all(row.mask[row.lengths[0] :].any() for row in rows)


def test_pairs_are_taken_apart(tmp_path: Path, chat: Chat) -> None:
    """All bad ones come last, so that no row's neighbour answers the same prompt."""
    pairs = [{"chosen": good, "rejected": [good[0], BAD[0][1]], "tools": TOOLS} for good in GOOD]
    rows = read(write(tmp_path / "pairs.jsonl", pairs), chat)
    assert [row.sides for row in rows] == [(1,)] * 4 + [(-1,)] * 4
    assert rows[0].ids.tolist() == chat.render_training(GOOD[0], [CALCULATOR])[0]
    assert chat.decode(rows[4].ids[rows[4].mask].tolist()) == "I would say 20, or so.<|im_end|>"


def test_a_bad_conversation_may_teach_mistakes(tmp_path: Path, chat: Chat) -> None:
    """A call of a tool that there is not is refused of a good one."""
    tools = TOOLS.replace('"calculator"', '"abacus"')
    rows = [{"messages": GOOD[0], "tools": tools, "feedback": said} for said in (False, True)]
    assert len(read(write(tmp_path / "bad.jsonl", rows[:1]), chat)) == 1
    with pytest.raises(DataError, match=r"row 0 .*abacus"):
        read(write(tmp_path / "good.jsonl", rows[1:]), chat)


RUN = ["data.train_batch_size=4", "optim.lr=3e-3", "trainer.device=cpu", "loss=kto", "loss_options.beta=0.2"]


def test_a_policy_learns_from_thumbs(policy: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A resumed run is the undisturbed one, with the start of the run as the reference. Agreement grows from chance."""
    data = logged(tmp_path)
    run = [f"data.train_files={data}", f"data.val_files={data}", f"model.path={policy}", *RUN]
    run += ["trainer.test_freq=3", "trainer.val_before_train=true"]
    for name, totals in {"whole": (6,), "parts": (3, 6)}.items():
        for total in totals:
            more = [f"trainer.default_local_dir={tmp_path / name}", "trainer.save_freq=3"]
            assert main([*run, *more, f"trainer.total_training_steps={total}"]) == 0
    said = " ".join(capsys.readouterr().out.split())
    assert_names(said, "4 good", "3 bad")
    assert_names(said, "1 rows", "good", "bad")
    assert "warning: good rows" not in said, "4 to 3 is balanced"
    (first, *whole), (_, *parts) = numbers(tmp_path / "whole"), numbers(tmp_path / "parts")
    assert [line["preferences/loss"] for line in parts] == [line["preferences/loss"] for line in whole]
    assert [line["preferences/kl"] for line in parts] == [line["preferences/kl"] for line in whole]
    assert first == pytest.approx(
        {"step": 0, "val/loss": 0.5, "val/auc": 0.5, "val/kl": 0, "val/good": 0, "val/bad": 0, "val/margin": 0}
        | {"val/accuracy": 0},
        abs=1e-4,
    )
    assert whole[0]["preferences/loss"] == pytest.approx(0.5, abs=1e-4) and "preferences/auc" not in whole[0]
    assert whole[-1]["val/auc"] == whole[-1]["val/accuracy"] == 1
    assert whole[-1]["val/good"] > 1 > -1 > whole[-1]["val/bad"] and whole[-1]["val/loss"] < 0.4


def test_factors_that_balance_are_named(policy: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """8 good and 1 bad: a bad row has to weigh 6 up to 8 times, or a good one 1/8 up to 1/6."""
    rows = [{"messages": one, "tools": TOOLS, "feedback": 4} for one in GOOD * 2]
    rows.append({"messages": BAD[0], "tools": TOOLS, "feedback": 3})
    run = [f"data.train_files={write(tmp_path / 'a.jsonl', rows)}", f"model.path={policy}", *RUN]
    run += [
        "trainer.total_training_steps=1",
        "data.feedback_threshold=3",
        f"trainer.default_local_dir={tmp_path / 'r'}",
    ]
    said = []
    for more in ([], ["loss_options.undesirable_weight=6"], ["loss_options.desirable_weight=0.1666"]):
        assert main([*run, *more, "trainer.resume_mode=disable"]) == 0
        said.append(" ".join(capsys.readouterr().out.split()))
    assert "undesirable_weight to 6 up to 8, or loss_options.desirable_weight to 0.125 up to 0.167" in said[0]
    assert not any("warning: good rows weigh" in one for one in said[1:])


TALK = [{"role": "user", "content": "q"}, {"role": "assistant", "content": "Said."}]
REFUSED: list[tuple[list[dict[str, Any]], dict[str, Any], str]] = [
    ([{"feedback": "meh"}], {}, r"row 1 .*column feedback: expected a finite number, .*dislike, or null, found 'meh'"),
    ([{"feedback": 10**400}], {}, "row 1 .*column feedback: expected a finite number"),
    ([{"feedback": [1]}], {}, r"row 1 .*column feedback: .* found \[1\]"),
    ([{"feedback": 1, "label": True}], {}, "row 1 .*: expected one column .* found feedback and label. Name .*ack_key"),
    ([{"score": 1}], {"feedback_key": "stars"}, "2 rows .* have none in the column that data.feedback_key names"),
    ([{"chosen": TALK, "rejected": TALK, "feedback": 1}], {}, r"found columns of both \(feedback, messages\)"),
]


@pytest.mark.parametrize(("rows", "keys", "message"), REFUSED)
def test_what_says_neither_good_nor_bad_is_refused(
    tmp_path: Path, chat: Chat, rows: list[dict[str, Any]], keys: dict[str, Any], message: str
) -> None:
    first = {} if "chosen" not in rows[0] else rows[0]
    file = write(tmp_path / "a.jsonl", [{"messages": TALK, **row} for row in (first, *rows)])
    with pytest.raises(DataError, match=r"a\.jsonl.*" + message):
        read(file, chat, **keys)


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["data.feedback_threshold=2"], ("found 0", "7 bad")),
        (["data.train_batch_size=1"], "data.train_batch_size=1"),
        (["trains=reward_model"], ("loss=kto", "trains=policy", "no effect")),
        (["loss=sigmoid"], "column feedback"),
        (
            ["loss=sigmoid", "data.feedback_key=x"],
            ("data.feedback_key=x", "loss=kto", "apo_zero_unpaired", "no effect"),
        ),
        (["loss_options.undesirable_weight=-1"], "undesirable_weight"),
    ],
)
def test_a_run_that_cannot_learn_ends_at_once(
    policy: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], words: list[str], said: Names
) -> None:
    run = [f"data.train_files={logged(tmp_path)}", f"model.path={policy}", *RUN, *words]
    assert main([*run, f"trainer.default_local_dir={tmp_path / 'run'}"]) == 2
    assert_names(" ".join(capsys.readouterr().err.split()), said)


def test_a_loss_of_ones_own_declares_what_it_learns_from(tmp_path: Path) -> None:
    (tmp_path / "own.py").write_text(
        "from agentrl.algorithms import declare\n"
        "@declare(rows='single')\n"
        "def hinge(judged):\n    return (1 - judged.ratios).clamp(min=0)\n"
    )
    own = f"{tmp_path}/own.py:hinge"
    config = PreferencesConfig.model_validate({"model": {"path": "x"}, "data": {"train_files": "x"}, "loss": own})
    assert config.rows == "single"
    for name, rows in UNPAIRED_LOSSES.items():
        assert cast(Any, PAIR_LOSSES.get(name)).declaration.rows == rows


def test_online_dpo_takes_losses_of_pairs_alone() -> None:
    from agentrl.algorithms.estimators.online_dpo import OnlineDpoOptions, online_dpo

    estimator = cast(Callable[..., object], online_dpo)
    with naming(ConfigError, "algorithm.adv_options.loss=kto"):
        estimator(type("Columns", (), {"ref_logprobs": torch.zeros(1)})(), None, OnlineDpoOptions(loss="kto"))


def test_words_and_numbers_of_feedback() -> None:
    given = ["up", "Thumbs Up", "good", "like", True, 0.25, 3, Decimal("0.5"), np.float32(2)]
    assert [feedback_of(one, "x") for one in given] == [1, 1, 1, 1, 1, 0.25, 3, 0.5, 2]
    assert [feedback_of(one, "x") for one in ("down", "thumbs-down", "bad", "dislike", False)] == [-1] * 5
    assert feedback_of(None, "x") is feedback_of("", "x") is None and len(WORDS) == 8
    for one in ("0.5", math.nan, -math.inf, Decimal("NaN")):
        with naming(Unfit, "column x"):
            feedback_of(one, "x")


def test_agreement_counts_couples() -> None:
    good, bad = double([3, 1, 2]), double([0, 2.0000001])
    assert auc(good, bad) == pytest.approx((2 + 1 + 1.5) / 6), "equal ones count half"
    assert auc(bad, good) == pytest.approx(1 - 4.5 / 6)


@pytest.mark.parametrize(
    ("name", "command"), [("KTOTrainer", "preferences loss=kto"), ("DPOConfig", "preferences"), ("SFTTrainer", "sft")]
)
def test_trls_door_names_the_command(name: str, command: str) -> None:
    with pytest.raises(ImportError, match=f"not {name}: python -m agentrl.{command} reads"):
        exec(f"from agentrl.trl import {name}")
    assert not hasattr(__import__("agentrl.trl").trl, "AnyTrainer")
