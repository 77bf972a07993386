"""Faults that are injected into whole runs, each named by a check within one step: the real command, in process.

Each case changes one part of agentrl from the second step on, as a fault in that part would; the checks know none of
them. What they say is read from alarms.jsonl.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

import agentrl.algorithms.advantages
import agentrl.algorithms.estimate
import agentrl.rollouts.local
import agentrl.trainer.step
import agentrl.workers.groups
import agentrl.workers.policy
from agentrl.agent_loop.scheduler import Scheduler
from agentrl.algorithms import Advantages
from agentrl.chat import Chat
from agentrl.data.loader import Loader
from agentrl.data.sampler import EpochSampler
from agentrl.engines.embedded.cache import SessionCache
from agentrl.engines.embedded.engine import EmbeddedEngine
from agentrl.engines.weights import Weights
from agentrl.model.lora import Lora
from agentrl.reward import NaiveRewardManager
from agentrl.rollouts.contract import Task
from agentrl.rollouts.local import LocalRollouts
from agentrl.train import main
from agentrl.trainer.observer import Step
from agentrl.trainer.step import Trainer
from agentrl.trajectory import Status, Trajectory, Transcript
from agentrl.trajectory.batch import RaggedBatch
from agentrl.trajectory.sample import Sample
from agentrl.workers.policy import PolicyWorker
from agentrl.workers.reference import ReferenceWorker
from tests.naming import assert_names
from tests.runs import Overrides

Inject = Callable[[pytest.MonkeyPatch], None]
PAGE = Path(__file__).resolve().parents[2] / "docs" / "reliability.md"
BEGINS = 2
"""First step with the fault."""
LORA = ("actor_rollout_ref.model.lora_rank=8",)
REFERENCE = ("actor_rollout_ref.actor.use_kl_loss=true",)
pytestmark = pytest.mark.slice(3, "matrix")


class Now:
    """The step that is being trained."""

    step = 0


def faulty() -> bool:
    return Now.step >= BEGINS


@pytest.fixture(autouse=True)
def _count(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    healthy = Trainer.train_step

    def train_step(trainer: Trainer) -> Step:
        Now.step = trainer.step
        return healthy(trainer)

    monkeypatch.setattr(Trainer, "train_step", train_step)
    yield
    Now.step = 0


def wrap(patch: pytest.MonkeyPatch, owner: object, name: str, change: Callable[..., Any]) -> None:
    """Have `change(result, *arguments)` replace what a function returns, while the fault is there."""
    healthy = getattr(owner, name)

    def wrapped(*args: Any, **kwargs: Any) -> Any:
        result = healthy(*args, **kwargs)
        return change(result, *args) if faulty() else result

    patch.setattr(owner, name, wrapped)


def adapter_missing(patch: pytest.MonkeyPatch) -> None:
    def without(found: Iterator[tuple[str, torch.Tensor]], lora: Lora, params: Any) -> Iterator[Any]:
        for name, tensor in found:
            bare = [p for key, p in params.items() if key.replace(".base_layer.", ".").endswith(name)]
            yield name, bare[0].detach() if "layers.0.self_attn.q_proj" in name else tensor

    wrap(patch, Lora, "merged", without)


def stale_cache(patch: pytest.MonkeyPatch) -> None:
    """Keys and values of a prompt outlive the weights, and are found again by the next step's prompt."""
    patch.setattr(SessionCache, "outdate", lambda *args: None)
    patch.setattr(EpochSampler, "next_batch", lambda sampler: list(range(sampler.batch_size)))
    patch.setattr(EpochSampler, "state_dict", lambda sampler: {})


def mask_shifted_in_the_batch(patch: pytest.MonkeyPatch) -> None:
    wrap(
        patch,
        agentrl.rollouts.local,
        "from_trajectories",
        lambda batch, *_: batch.with_fields(mask=batch.mask.roll(-1)),
    )


def mask_shifted_in_the_record(patch: pytest.MonkeyPatch) -> None:
    """A turn's first token counts as observed."""

    def append(transcript: Transcript, ids: Any, mask: int, logprobs: Any) -> None:
        transcript.ids.extend(ids)
        transcript.mask.extend([0] * bool(ids) + [mask] * (len(ids) - 1) if faulty() and mask else [mask] * len(ids))
        transcript.logprobs.extend(logprobs)

    patch.setattr(Transcript, "_append", append)


def retokenised(patch: pytest.MonkeyPatch) -> None:
    """A token of each answer is recorded as another one, as where text is encoded again."""
    healthy = EmbeddedEngine.generate

    async def generate(engine: EmbeddedEngine, *args: Any, **kwargs: Any) -> Any:
        found = await healthy(engine, *args, **kwargs)
        ids = list(found.ids)
        if faulty() and len(ids) > 2:
            ids[1] = (ids[1] + 1) % 200
        return replace(found, ids=ids)

    patch.setattr(EmbeddedEngine, "generate", generate)


def one_seed(patch: pytest.MonkeyPatch) -> None:
    """All trajectories of a prompt are drawn by the same seeds."""
    wrap(
        patch,
        LocalRollouts,
        "requests",
        lambda found, *_: [replace(one, seed=found[0].seed) for one in found],
    )


def greedy(patch: pytest.MonkeyPatch) -> None:
    """The engine draws from the ten most probable tokens, and reports log-probs of the whole distribution."""
    healthy = EmbeddedEngine.generate

    async def generate(engine: EmbeddedEngine, ids: Any, params: Any, *args: Any, **kwargs: Any) -> Any:
        return await healthy(engine, ids, replace(params, top_k=10) if faulty() else params, *args, **kwargs)

    patch.setattr(EmbeddedEngine, "generate", generate)


def timeout_scored_zero(patch: pytest.MonkeyPatch) -> None:
    healthy = Scheduler._score

    async def score(scheduler: Scheduler, reward: Any, trajectories: list[Trajectory], *more: Any) -> None:
        await healthy(scheduler, reward, trajectories, *more)
        for one in trajectories:
            if faulty() and one.uid.endswith("/1"):
                one.status, one.failure, one.score = Status.TIMEOUT, "timeout: 1 s passed", 0.0

    patch.setattr(Scheduler, "_score", score)


def wrong_version(patch: pytest.MonkeyPatch) -> None:
    healthy = EmbeddedEngine.update_weights

    async def update(engine: EmbeddedEngine, weights: Weights, version: int) -> Any:
        report = await healthy(engine, weights, version)
        engine._version -= faulty()
        return report

    patch.setattr(EmbeddedEngine, "update_weights", update)


def weights_not_taken(patch: pytest.MonkeyPatch) -> None:
    """The engine says that it has the new weights, and keeps the old ones of one layer."""
    healthy = EmbeddedEngine.update_weights

    async def update(engine: EmbeddedEngine, weights: Weights, version: int) -> Any:
        before = {name: p.detach().clone() for name, p in engine.model.named_parameters() if "layers.1.mlp" in name}
        report = await healthy(engine, weights, version)
        for name, parameter in engine.model.named_parameters():
            if faulty() and name in before:
                parameter.data.copy_(before[name])
        return report

    patch.setattr(EmbeddedEngine, "update_weights", update)


def tied_head_not_synced(patch: pytest.MonkeyPatch) -> None:
    healthy = EmbeddedEngine.__init__

    def init(engine: EmbeddedEngine, model: Any, **kwargs: Any) -> None:
        healthy(engine, model, **kwargs)
        assert model.config.tie_word_embeddings
        head = model.get_output_embeddings()
        head.weight = torch.nn.Parameter(head.weight.detach().clone(), requires_grad=False)

    patch.setattr(EmbeddedEngine, "__init__", init)


def swapped_reference(patch: pytest.MonkeyPatch) -> None:
    healthy = ReferenceWorker.compute_reference_log_probs

    def scores(worker: ReferenceWorker, batch: RaggedBatch) -> Any:
        if Now.step == BEGINS:
            with torch.no_grad():
                for parameter in worker.model.parameters():
                    parameter.mul_(1.01)
        return healthy(worker, batch)

    patch.setattr(ReferenceWorker, "compute_reference_log_probs", scores)


def wrong_reference(patch: pytest.MonkeyPatch) -> None:
    """The reference is another model from the beginning."""
    healthy = ReferenceWorker.__init__

    def init(worker: ReferenceWorker, *args: Any, **kwargs: Any) -> None:
        healthy(worker, *args, **kwargs)
        with torch.no_grad():
            for parameter in worker.model.parameters():
                parameter.mul_(1.05)

    patch.setattr(ReferenceWorker, "__init__", init)


def temperature_not_scaled(patch: pytest.MonkeyPatch) -> None:
    """The engine samples, and reports, at another temperature than it is asked for."""
    healthy = EmbeddedEngine.generate

    async def generate(engine: EmbeddedEngine, ids: Any, params: Any, *args: Any, **kwargs: Any) -> Any:
        return await healthy(engine, ids, replace(params, temperature=1.0) if faulty() else params, *args, **kwargs)

    patch.setattr(EmbeddedEngine, "generate", generate)


def packed(patch: pytest.MonkeyPatch, kept: slice) -> None:
    """Only these of a step's trajectories are packed."""
    healthy = LocalRollouts.pack_trajectories

    def pack(rollouts: LocalRollouts, task: Task, trajectories: Any, *args: Any, **kwargs: Any) -> Any:
        lost = faulty() and task.split == "train"
        return healthy(rollouts, task, trajectories[kept] if lost else trajectories, *args, **kwargs)

    patch.setattr(LocalRollouts, "pack_trajectories", pack)


def lost_prompt(patch: pytest.MonkeyPatch) -> None:
    packed(patch, slice(-4))


def lost_trajectory(patch: pytest.MonkeyPatch) -> None:
    packed(patch, slice(1, None))


def skipped_rows(patch: pytest.MonkeyPatch) -> None:
    """The data goes on by two batches a step."""
    healthy = EpochSampler.next_batch

    def next_batch(sampler: EpochSampler) -> Any:
        if faulty():
            healthy(sampler)
        return healthy(sampler)

    patch.setattr(EpochSampler, "next_batch", next_batch)


def same_rows(patch: pytest.MonkeyPatch) -> None:
    """Each step gets the rows of the first one, while the position goes on."""
    healthy, first = Loader.__next__, list[list[Sample]]()

    def following(loader: Loader) -> list[Sample]:
        first.append(healthy(loader))
        return first[0]

    patch.setattr(Loader, "__next__", following)


def neighbours_truth(patch: pytest.MonkeyPatch) -> None:
    healthy = NaiveRewardManager.judge

    async def judge(manager: NaiveRewardManager, arguments: Any) -> Any:
        other = {**arguments, "ground_truth": "another"} if faulty() else arguments
        return await healthy(manager, other)

    patch.setattr(NaiveRewardManager, "judge", judge)


def permuted_scores(patch: pytest.MonkeyPatch) -> None:
    """Two trajectories of each prompt have each other's score."""
    healthy = Scheduler.run

    async def run(*args: Any) -> list[Trajectory]:
        found = await healthy(*args)
        if faulty():
            scores = [one.score for one in found]
            for one, score in zip(found, scores[1:] + scores[:1], strict=True):
                one.score = score
        return found

    patch.setattr(Scheduler, "run", run)


def prompt_shifted(patch: pytest.MonkeyPatch) -> None:
    wrap(patch, Chat, "render", lambda ids, *_: [*ids[:5], ids[5] + 1, *ids[6:]])


def schemas_lost(patch: pytest.MonkeyPatch) -> None:
    healthy = Chat.render

    def render(chat: Chat, messages: Any, tools: Any = None, **more: Any) -> list[int]:
        return healthy(chat, messages, None if faulty() else tools, **more)

    patch.setattr(Chat, "render", render)


def answer_to_another_prompt(patch: pytest.MonkeyPatch) -> None:
    """Requests that end one after another are given each other's answer."""
    healthy, kept = EmbeddedEngine._resolve, list[Any]()

    def resolve(engine: EmbeddedEngine, request: Any, reason: Any) -> None:
        kept.append(request)
        if len(kept) == 2 and faulty():
            kept[0].future, kept[1].future = kept[1].future, kept[0].future
        if len(kept) == 2 or not faulty():
            for one in kept:
                healthy(engine, one, reason)
            kept.clear()

    patch.setattr(EmbeddedEngine, "_resolve", resolve)


def answer_delivered_twice(patch: pytest.MonkeyPatch) -> None:
    healthy, last = EmbeddedEngine.generate, list[Any]()

    async def generate(engine: EmbeddedEngine, *args: Any, **kwargs: Any) -> Any:
        last.append(await healthy(engine, *args, **kwargs))
        return last[-2] if faulty() and len(last) % 4 == 0 else last[-1]

    patch.setattr(EmbeddedEngine, "generate", generate)


def dropped_from_the_batch(patch: pytest.MonkeyPatch) -> None:
    wrap(patch, agentrl.trainer.step, "trained_on", lambda batch, *_: batch.select(range(1, len(batch))))


def trained_on_twice(patch: pytest.MonkeyPatch) -> None:
    wrap(patch, agentrl.trainer.step, "trained_on", lambda batch, *_: batch.select([0, *range(len(batch))]))


def doubled_reward(patch: pytest.MonkeyPatch) -> None:
    wrap(
        patch,
        agentrl.rollouts.local,
        "from_trajectories",
        lambda batch, *_: batch.with_fields(rewards=batch.rewards * 2),
    )


def turned_advantages(patch: pytest.MonkeyPatch) -> None:
    def turned(result: Any, *_: Any) -> Any:
        columns, found = result
        return columns | {"advantages": -columns["advantages"]}, found

    wrap(patch, agentrl.trainer.step, "estimate", turned)


def advantages_of_another_sign(patch: pytest.MonkeyPatch) -> None:
    """The estimator itself is wrong."""

    def turned(found: Advantages, *_: Any) -> Advantages:
        return found._replace(advantages=-found.advantages)

    wrap(patch, agentrl.algorithms.estimate, "estimated", turned)
    wrap(patch, agentrl.algorithms.advantages, "estimated", turned)


def mixed_groups(patch: pytest.MonkeyPatch) -> None:
    wrap(
        patch,
        agentrl.rollouts.local,
        "from_trajectories",
        lambda batch, *_: batch.with_fields(group=batch.group.roll(1)),
    )


def lost_mini_batch(patch: pytest.MonkeyPatch) -> None:
    wrap(patch, agentrl.workers.policy, "update_plan", lambda plan, *_: plan[:1])


def weights_of_loss_halved(patch: pytest.MonkeyPatch) -> None:
    wrap(patch, agentrl.workers.policy, "aggregate", lambda loss, *_: loss / 2)


def no_gradient(patch: pytest.MonkeyPatch) -> None:
    healthy = PolicyWorker.update

    def update(worker: PolicyWorker, batch: RaggedBatch, **kwargs: Any) -> Any:
        assert batch.advantages is not None
        return healthy(worker, batch.with_fields(advantages=batch.advantages * 0) if faulty() else batch, **kwargs)

    patch.setattr(PolicyWorker, "update", update)


def old_weights_sent(patch: pytest.MonkeyPatch) -> None:
    """The engine is sent what it had: the policy learns, and is never sampled from."""
    kept: dict[str, torch.Tensor] = {}

    def stale(weights: Weights, *_: Any) -> Weights:
        if not kept:
            kept.update({name: tensor.clone() for name, tensor in weights.read()})
        return Weights.from_tensors(kept.items())

    wrap(patch, agentrl.workers.groups.PolicyGroup, "weights", stale)


FAULTS: dict[str, tuple[Inject, set[str], tuple[str, ...]]] = {
    "an adapter is missing in the engine": (adapter_missing, {"weights", "gap"}, LORA),
    "a stale cache": (stale_cache, {"gap"}, ("data.shuffle=false",)),
    "the mask is shifted in the batch": (mask_shifted_in_the_batch, {"columns", "coverage"}, ()),
    "the mask is shifted in the record": (mask_shifted_in_the_record, {"record"}, ()),
    "tokens are encoded again": (retokenised, {"gap"}, ()),
    "one seed for all": (one_seed, {"sampling"}, ()),
    "a filter that only the engine knows": (greedy, {"sampling"}, ()),
    "a time-out is scored 0": (timeout_scored_zero, {"record"}, ()),
    "weights that the engine did not take": (weights_not_taken, {"weights"}, ()),
    "the tied head is not sent": (tied_head_not_synced, {"weights", "gap"}, ()),
    "the reference is swapped": (swapped_reference, {"reference"}, REFERENCE),
    "the reference is another model": (wrong_reference, {"reference"}, REFERENCE),
    "the temperature is not scaled": (temperature_not_scaled, {"gap"}, ("actor_rollout_ref.rollout.temperature=0.7",)),
    "a prompt is lost": (lost_prompt, {"fates"}, ()),
    "a trajectory is lost": (lost_trajectory, {"fates"}, ()),
    "rows are skipped": (skipped_rows, {"fates"}, ()),
    "each step has the same rows": (same_rows, {"rows"}, ()),
    "another ground truth is scored": (neighbours_truth, {"scores"}, ()),
    "scores are permuted": (permuted_scores, {"scores"}, ()),
    "a prompt's token is shifted": (prompt_shifted, {"prompt"}, ()),
    "schemas are lost from the prompt": (schemas_lost, {"prompt"}, ()),
    "an answer to another prompt": (answer_to_another_prompt, {"requests"}, ()),
    "an answer is delivered twice": (answer_delivered_twice, {"requests"}, ()),
    "a sequence is dropped": (dropped_from_the_batch, {"coverage"}, ()),
    "a sequence is trained on twice": (trained_on_twice, {"coverage"}, ()),
    "a doubled reward": (doubled_reward, {"rewards"}, ()),
    "advantages change their sign": (turned_advantages, {"advantages"}, ()),
    "the estimator has the wrong sign": (advantages_of_another_sign, {"advantages"}, ()),
    "groups are mixed": (mixed_groups, {"coverage"}, ()),
    "a mini-batch is lost": (lost_mini_batch, {"update"}, ()),
    "weights of the loss are halved": (weights_of_loss_halved, {"update"}, ()),
    "there is no gradient": (no_gradient, {"update"}, ()),
    "old weights are sent": (old_weights_sent, {"gap", "update"}, ()),
}


def test_the_page_lists_the_faults_and_what_names_them() -> None:
    page = PAGE.read_text(encoding="utf-8").partition("## Faults that were injected")[2].partition("\n## ")[0]
    rows = [
        f"| {fault} | {', '.join(f'`{one}`' for one in sorted(checks))} |" for fault, (_, checks, _) in FAULTS.items()
    ]
    assert [line for line in page.splitlines() if line.startswith("| ") and "`" in line] == rows


def alarms(run: Path) -> list[dict[str, Any]]:
    path = run / "alarms.jsonl"
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


@pytest.mark.parametrize("fault", FAULTS)
def test_an_injected_fault_is_named_within_one_step(
    fault: str,
    small_run: Overrides,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    inject, checks, more = FAULTS[fault]
    inject(monkeypatch)
    assert (
        main([*small_run("data.val_files=null", "trainer.total_training_steps=3", "trainer.save_freq=-1"), *more]) == 0
    )
    found = alarms(tmp_path / "run")
    begins = 1 if inject in (wrong_reference, tied_head_not_synced) else BEGINS
    assert found, "nothing was said"
    assert begins <= min(one["step"] for one in found) <= begins + (1 if begins == BEGINS else 0), found
    first = [one for one in found if one["step"] <= begins + 1]
    assert checks & {one["check"] for one in first}, found
    for one in found:
        assert one["severity"] in ("fault", "sign") and one["what"] and one["where"] and one["why"] and one["action"]
    said = " ".join(capsys.readouterr().out.split())
    assert_names(said, "alarms")


def test_a_wrong_version_ends_the_run(
    small_run: Overrides, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """No batch is made of it."""
    wrong_version(monkeypatch)
    assert main(small_run("data.val_files=null", "trainer.total_training_steps=3", "trainer.save_freq=-1")) == 2
    said = " ".join(capsys.readouterr().err.split())
    assert_names(said, "version 1")


@pytest.mark.parametrize(("reaction", "checkpoints"), [("stop", []), ("checkpoint_then_stop", ["step_000002"])])
def test_a_run_stops_at_an_injected_fault_where_it_is_asked_to(
    reaction: str,
    checkpoints: list[str],
    small_run: Overrides,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    doubled_reward(monkeypatch)
    keys = ("data.val_files=null", "trainer.save_freq=-1", f"trainer.checks.on_fault={reaction}")
    assert main(small_run(*keys)) == 2
    said = " ".join(capsys.readouterr().err.split())
    assert_names(said, "step 2", "alarms.jsonl")
    folder = tmp_path / "run" / "checkpoints"
    assert sorted(path.name for path in folder.glob("step_*")) == checkpoints
