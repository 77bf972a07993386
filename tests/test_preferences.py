"""Training on preferences end to end, with a real tokenizer and a real tiny model."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification, AutoTokenizer, PreTrainedModel

from agentrl.chat import Chat
from agentrl.config import PreferencesConfig
from agentrl.config.sections.reward import RewardModelConfig
from agentrl.config.sections.sft import PairDataConfig
from agentrl.data.pairs import Preference, load_pairs, load_scored_pairs
from agentrl.errors import DataError
from agentrl.preferences import main
from agentrl.reward.model_input import ModelInput
from agentrl.trajectory import Message
from agentrl.workers.preferences import PolicyPreferenceWorker, RewardPairWorker, to_batch
from agentrl.workers.reward_model import RewardModelWorker
from tests.e2e.test_resume import numbers
from tests.test_sft import CALCULATOR, TOOLS, chat, policy, transcript

__all__ = ["chat", "policy"]

QUESTIONS = (("How much is 12 times 3?", "12*3", "36"), ("Add 40 and 2.", "40+2", "42"), ("9 minus 4?", "9-4", "5"))


def guess(question: str) -> list[Message]:
    """An answer without a call."""
    return [{"role": "user", "content": question}, {"role": "assistant", "content": "I would say #### 7, or so."}]


ROWS: list[dict[str, Any]] = [
    {"chosen": transcript(*one), "rejected": guess(one[0]), "tools": TOOLS} for one in QUESTIONS
]


def write(path: Path, rows: list[dict[str, Any]] = ROWS) -> str:
    texts = [{key: json.dumps(value) if key != "tools" else value for key, value in row.items()} for row in rows]
    pq.write_table(pa.Table.from_pylist(texts), path)
    return str(path)


def pairs_of(tmp_path: Path, chat: Chat, rows: list[dict[str, Any]] = ROWS, **keys: Any) -> list[Preference]:
    config = PairDataConfig(train_files="unused", **keys)
    return load_pairs(write(tmp_path / "a.parquet", rows), config, chat, lambda done: None).samples


def config_of(policy: Path, **keys: Any) -> PreferencesConfig:
    values = {"data": {"train_files": "x", "max_token_len_per_gpu": 60}, "model": {"path": str(policy)}}
    return PreferencesConfig.model_validate(values | keys)


def log_probs(model: PreTrainedModel, pairs: list[Preference]) -> torch.Tensor:
    """By pair, the sums over the masks of both conversations under transformers' own forward, [P, 2]."""
    sums = []
    for pair in pairs:
        for part in (slice(None, pair.lengths[0]), slice(pair.lengths[0], None)):
            ids, mask = torch.from_numpy(pair.ids[part]).long(), torch.from_numpy(pair.mask[part])
            by_token = model(input_ids=ids[None]).logits[0, :-1].log_softmax(-1).gather(1, ids[1:, None])[:, 0]
            sums.append(by_token[mask[1:]].sum())
    return torch.stack(sums).view(-1, 2)


def test_only_what_differs_is_learnt(tmp_path: Path, chat: Chat) -> None:
    """The call that both begin with is shown; so it is where the beginning has a column of its own."""
    begun, good = transcript(*QUESTIONS[0])[:3], transcript(*QUESTIONS[0])[3:]
    bad = [{"role": "assistant", "content": "#### 63"}]
    whole = pairs_of(tmp_path, chat, [{"chosen": [*begun, *good], "rejected": [*begun, *bad], "tools": TOOLS}])
    apart = pairs_of(
        tmp_path, chat, [{"start": begun, "chosen": good, "rejected": bad, "tools": TOOLS}], prompt_key="start"
    )
    for (pair,) in (whole, apart):
        chosen, rejected = slice(None, pair.lengths[0]), slice(pair.lengths[0], None)
        assert chat.decode(pair.ids[chosen][pair.mask[chosen]].tolist()) == "#### 36<|im_end|>"
        assert chat.decode(pair.ids[rejected][pair.mask[rejected]].tolist()) == "#### 63<|im_end|>"
        assert pair.ids[chosen].tolist() == chat.render_training([*begun, *good], [CALCULATOR])[0]


ASKED: list[Message] = [{"role": "system", "content": "S"}, {"role": "user", "content": "q"}]
GOOD: list[Message] = [{"role": "assistant", "content": "Good."}]
BAD: list[Message] = [{"role": "assistant", "content": "Bad."}]


@pytest.mark.parametrize(
    ("chosen", "rejected"),
    [
        (GOOD, BAD),
        ([*ASKED, *GOOD], [*ASKED, *BAD]),
        ([*ASKED[1:], *GOOD], [*ASKED[1:], *BAD]),
        ([*ASKED, *GOOD], BAD),
    ],
)
@pytest.mark.parametrize("scored", [False, True])
def test_a_prompt_stands_once(
    tmp_path: Path, chat: Chat, chosen: list[Message], rejected: list[Message], scored: bool
) -> None:
    """Whole, by its last messages, or not at all may it begin what answers it."""
    file = write(tmp_path / "a.parquet", [{"prompt": ASKED, "chosen": chosen, "rejected": rejected}])
    config, whole = PairDataConfig(train_files="unused", prompt_key="prompt"), chat.render_training
    if scored:
        found = load_scored_pairs(file, config, lambda one: (whole(one)[0], False), lambda done: None)
    else:
        found = load_pairs(file, config, chat, lambda done: None)
    (pair,) = found.samples
    assert pair.ids.tolist() == [*whole([*ASKED, *GOOD])[0], *whole([*ASKED, *BAD])[0]]


def test_a_prompt_with_turns_of_the_assistant_may_be_repeated(tmp_path: Path, chat: Chat) -> None:
    begun: list[Message] = [*ASKED, *GOOD, {"role": "user", "content": "q"}]
    rows = [{"prompt": begun, "chosen": [*begun, *GOOD], "rejected": [*begun, *BAD]}]
    (pair,) = pairs_of(tmp_path, chat, rows, prompt_key="prompt")
    assert pair.ids.tolist() == [*chat.render_training([*begun, *GOOD])[0], *chat.render_training([*begun, *BAD])[0]]
    assert chat.decode(pair.ids[pair.mask].tolist()) == "Good.<|im_end|>Bad.<|im_end|>"


OTHER: list[Message] = [{"role": "user", "content": "another"}]


@pytest.mark.parametrize(
    ("row", "said"),
    [
        (
            {"chosen": [*ASKED, *GOOD], "rejected": [ASKED[0], *OTHER, *BAD]},
            r"to answer the same messages, found message 1 \(the first is 0\) to be .*'q'.* in one and .*'another'",
        ),
        ({"chosen": [*ASKED, *GOOD], "rejected": [*ASKED[1:], *BAD]}, "to answer the same messages, found message 0"),
        (
            {"chosen": [*ASKED, *GOOD, *OTHER, *GOOD], "rejected": [*ASKED, *GOOD, *ASKED[1:], *BAD]},
            "to answer the same messages, found message 3",
        ),
        (
            {"prompt": ASKED, "chosen": [*OTHER, *GOOD], "rejected": BAD},
            r", column chosen: expected an answer to the prompt, .* begin with .*'another'.* ends with .*'q'",
        ),
        ({"prompt": ASKED, "chosen": GOOD, "rejected": [ASKED[0], *OTHER, *BAD]}, ", column rejected: expected an ans"),
    ],
)
def test_a_pair_that_answers_different_prompts_is_refused(
    tmp_path: Path, chat: Chat, row: dict[str, Any], said: str
) -> None:
    good = {name: {"prompt": ASKED, "chosen": [*ASKED, *GOOD], "rejected": [*ASKED, *BAD]}[name] for name in row}
    key = "prompt" if "prompt" in row else None
    with pytest.raises(DataError, match=r"a\.parquet, row 1 .*" + said):
        pairs_of(tmp_path, chat, [good, row], prompt_key=key)


def test_tools_may_answer_differently(tmp_path: Path, chat: Chat) -> None:
    """Two attempts at one prompt may begin with the same call."""
    one, other = transcript(*QUESTIONS[0]), transcript(QUESTIONS[0][0], "12*3", "35")
    (pair,) = pairs_of(tmp_path, chat, [{"chosen": one, "rejected": other, "tools": TOOLS}])
    assert chat.decode(pair.ids[pair.mask].tolist()) == "#### 36<|im_end|>#### 35<|im_end|>"


@pytest.mark.parametrize(
    ("rows", "said"),
    [
        ([{"chosen": guess("a"), "rejected": guess("a")}], "row 0 .*: chosen and rejected are the same conversation"),
        ([*ROWS, {"chosen": [], "rejected": guess("a")}], r"row 3 .*, column chosen: expected a list of messages"),
        (
            [{"chosen": [*guess("a"), *transcript(*QUESTIONS[0])], "rejected": guess("a")}],
            r"row 0 .*, column \w+: no assistant turn is behind what both conversations begin with",
        ),
        ([{"chosen": guess("a")}], "no column 'rejected'; its columns are chosen.*data.rejected_key"),
    ],
)
def test_a_row_that_is_no_pair_is_named(tmp_path: Path, chat: Chat, rows: list[dict[str, Any]], said: str) -> None:
    with pytest.raises(DataError, match=said):
        pairs_of(tmp_path, chat, rows)


@pytest.mark.parametrize("loss", ["sigmoid", "ipo", "sppo"])
def test_a_step_has_the_gradient_of_the_loss_of_whole_pairs(
    tmp_path: Path, policy: Path, chat: Chat, loss: str
) -> None:
    """Micro-batches of 60 tokens hold no pair. Compared with plain transformers, one conversation at a time."""
    pairs = pairs_of(tmp_path, chat)
    model = AutoModelForCausalLM.from_pretrained(policy, attn_implementation="eager")
    with torch.no_grad():
        reference = log_probs(model, pairs)
    worker = PolicyPreferenceWorker(
        config_of(policy, loss=loss, loss_options={"beta": 0.3}, grad_clip=1e6, optim={"lr": 0.03}),
        device="cpu",
        total_steps=2,
    )
    batch = to_batch(pairs)
    batch = batch.with_fields(ref_logprobs=worker.compute_scores(batch)[0])
    first = worker.update(batch, 1)
    assert first["preferences/margin"] == pytest.approx(0, abs=1e-4)
    with torch.no_grad():
        for name, tensor in worker.backend.model.named_tensors(worker.backend.tensors):  # type: ignore[attr-defined]
            model.get_parameter(name).copy_(tensor)
    ratio = log_probs(model, pairs) - reference
    assert ratio.abs().max() > 0.5, "the first step moved it"
    if loss == "ipo":
        tokens = [
            [pair.mask[: pair.lengths[0]].sum().item(), pair.mask[pair.lengths[0] :].sum().item()] for pair in pairs
        ]
        ratio = ratio / torch.tensor(tokens)
    chosen, rejected = ratio.unbind(1)
    expected = {
        "sigmoid": -torch.nn.functional.logsigmoid(0.3 * (chosen - rejected)),
        "ipo": (chosen - rejected - 1 / 0.6).square(),
        "sppo": (chosen - 1 / 0.6).square() + (rejected + 1 / 0.6).square(),
    }[loss].mean()
    expected.backward()
    norm = torch.stack([p.grad.norm() for p in model.parameters() if p.grad is not None]).norm().item()
    second = worker.update(batch, 2)
    assert second["preferences/loss"] == pytest.approx(expected.item(), rel=1e-4)
    assert second["preferences/grad_norm"] == pytest.approx(norm, rel=1e-3)
    assert worker.mean_loss(batch)["val/loss"] < expected.item()


def test_a_policy_comes_to_prefer(policy: Path, tmp_path: Path) -> None:
    """A run that was interrupted has the log-probs of its start as the reference, not those of its checkpoint."""
    data = write(tmp_path / "pairs.parquet")
    run = [f"data.train_files={data}", f"data.val_files={data}", "data.train_batch_size=2", f"model.path={policy}"]
    run += ["optim.lr=3e-3", "trainer.device=cpu", "trainer.test_freq=2", "loss_options.beta=0.2"]
    for name, totals in {"whole": (6,), "parts": (3, 6)}.items():
        for total in totals:
            more = [f"trainer.default_local_dir={tmp_path / name}", "trainer.save_freq=3"]
            assert main([*run, *more, f"trainer.total_training_steps={total}"]) == 0
    whole, parts = numbers(tmp_path / "whole"), numbers(tmp_path / "parts")
    assert [line["preferences/loss"] for line in parts] == [line["preferences/loss"] for line in whole]
    assert whole[0]["preferences/loss"] == pytest.approx(math.log(2), abs=1e-4)
    assert whole[-1]["val/accuracy"] == 1 and whole[-1]["val/margin"] > 1 and whole[-1]["val/loss"] < 0.5
    assert AutoTokenizer.from_pretrained(tmp_path / "whole" / "policy").chat_template


def test_a_reward_model_scores_what_is_preferred_higher_where_it_is_used(policy: Path, tmp_path: Path) -> None:
    """Its folder is one of transformers' classifiers, and what our reward model's worker loads."""
    data, out = write(tmp_path / "pairs.parquet"), tmp_path / "run"
    run = [f"data.train_files={data}", f"data.val_files={data}", "data.train_batch_size=3", f"model.path={policy}"]
    run += ["optim.lr=3e-3", "trainer.device=cpu", "trains=reward_model", f"trainer.default_local_dir={out}"]
    assert main([*run, "trainer.total_training_steps=8"]) == 0
    lines = numbers(out)
    assert lines[0]["preferences/loss"] == pytest.approx(math.log(2), abs=1e-6), "the first scores are 0"
    assert lines[-1]["val/accuracy"] == 1 and lines[-1]["val/margin"] > 0.5

    reading = ModelInput(str(out / "policy"), None)
    pairs = load_scored_pairs(data, PairDataConfig(train_files=data), reading.ids, lambda done: None).samples
    config = RewardModelConfig.model_validate({"enable": True, "model": {"path": str(out / "policy")}})
    batch = to_batch(pairs)
    scores = RewardModelWorker(config, dtype="float32", device="cpu").compute_scores(batch)[0]
    ours = scores[batch.offsets[1:] - 1]
    classifier = AutoModelForSequenceClassification.from_pretrained(out / "policy")
    with torch.no_grad():
        theirs = [classifier(input_ids=batch.ids[a:b][None]).logits.item() for a, b in batch.offsets.unfold(0, 2, 1)]
    assert ours.tolist() == pytest.approx(theirs, abs=1e-4)
    chosen, rejected = ours.view(-1, 2).unbind(1)
    assert (chosen - rejected).mean().item() == pytest.approx(lines[-1]["val/margin"], abs=1e-4)


def test_a_reward_models_step_is_the_bradley_terry_losses(policy: Path, tmp_path: Path) -> None:
    """Against plain transformers, after a step that moved the head away from zero."""
    data = write(tmp_path / "pairs.parquet")
    pairs = load_scored_pairs(
        data, PairDataConfig(train_files=data), ModelInput(str(policy), None).ids, lambda done: None
    ).samples
    config = config_of(policy, trains="reward_model", grad_clip=1e6, optim={"lr": 0.02})
    worker, batch = RewardPairWorker(config, device="cpu", total_steps=2), to_batch(pairs)
    worker.update(batch, 1)
    worker.export(tmp_path / "out", AutoTokenizer.from_pretrained(policy))
    classifier = AutoModelForSequenceClassification.from_pretrained(tmp_path / "out", attn_implementation="eager")
    scores = [classifier(input_ids=batch.ids[a:b][None]).logits[0, 0] for a, b in batch.offsets.unfold(0, 2, 1)]
    chosen, rejected = torch.stack(scores).view(-1, 2).unbind(1)
    expected = -torch.nn.functional.logsigmoid(chosen - rejected).mean()
    expected.backward()
    norm = torch.stack([p.grad.norm() for p in classifier.parameters() if p.grad is not None]).norm().item()
    found = worker.update(batch, 2)
    assert found["preferences/loss"] == pytest.approx(expected.item(), rel=1e-4)
    assert found["preferences/grad_norm"] == pytest.approx(norm, rel=1e-3)


def test_keys_that_have_no_effect_are_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    common = [f"data.train_files={tmp_path / 'a.parquet'}", "model.path=x"]
    for more, said in (
        (["trains=reward_model", "loss=ipo"], "loss=ipo has no effect: it needs trains=policy"),
        (["loss=sigmid"], "unknown loss of preferences 'sigmid'"),
        (["loss_options.label_smoothing=0.6"], "label_smoothing"),
        (["trains=reward_model", "model.lora_rank=4"], "model.lora_rank=4 conflicts with trains=reward_model"),
        (["trains=reward_model", "+model.chat_template_kwargs.think=true"], "={'think': True} conflicts with trains"),
    ):
        assert main([*common, *more]) == 2
        assert said in " ".join(capsys.readouterr().err.split())
