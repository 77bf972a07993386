"""Two ways of a micro-batch through the model's head: whole, with logits made again in the backward pass, or in parts
of whole sequences, each with its loss and its backward pass, whose logits are made once."""

from __future__ import annotations

import gc
import itertools
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from operator import itemgetter
from pathlib import Path
from typing import Any, get_args

import pytest
import torch
from torch.multiprocessing.reductions import StorageWeakRef
from torch.nn.functional import scaled_dot_product_attention
from torch.utils._python_dispatch import TorchDispatchMode
from transformers.models.qwen3.modeling_qwen3 import Qwen3RMSNorm

from agentrl.config.registries import POLICY_LOSSES
from agentrl.config.sections.actor import ActorConfig
from agentrl.config.sections.algorithm import LossAggMode
from agentrl.config.sections.distillation import DistillationConfig
from agentrl.config.sections.model import ModelConfig
from agentrl.config.sections.optim import OptimConfig
from agentrl.config.sections.sft import PreferencesConfig, SFTConfig
from agentrl.model import heads, packed
from agentrl.model.attention import PackedAttention
from agentrl.model.compiled import text_layers
from agentrl.model.scores import TokenScores
from agentrl.model.vision import sample_image
from agentrl.observe.report import Report
from agentrl.observe.watch import UpdateChecked
from agentrl.runtime.ranks import CachedColumns
from agentrl.trajectory import PlacedImage
from agentrl.trajectory.batch import RaggedBatch
from agentrl.trajectory.images import Images
from agentrl.workers import PolicyWorker
from agentrl.workers.backend import MiniBatch, PolicySettings
from agentrl.workers.fsdp import FSDPPolicy
from agentrl.workers.passes import Part, States
from agentrl.workers.plan import head_parts, learns_by_parts
from agentrl.workers.preferences import PolicyPreferenceWorker
from agentrl.workers.sft import SupervisedWorker
from tests.model.families import SIZES, make_model
from tests.trained import trained_batch
from tests.vision.tiny import make_tiny_vision_policy
from tests.workers.conftest import fsdp, same_weights
from tests.workers.made import policy_worker
from tests.workers.test_recomputing import watch_gradients
from tests.workers.test_teacher import scored

VOCAB = SIZES["vocab_size"]
CHUNK = 24
"""Tokens whose logits may exist at once."""
SCORED = (30, 9, 14, 3, 20, 7, 11, 1, 26, 5)
"""Tokens of each sequence of the batch that are scored: two sequences are longer than a chunk."""
OPTIM = OptimConfig(lr=1e-2)


@pytest.fixture(autouse=True)
def chunk(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(packed, "CHUNK_LOGITS", CHUNK * VOCAB)


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """The folder of a random model of a family, or of Qwen3 with a head that is the embedding."""
    made: dict[str, Path] = {}

    def folder(name: str) -> Path:
        if name not in made:
            made[name] = tmp_path_factory.mktemp(name)
            changes: dict[str, Any] = {"tie_word_embeddings": name == "tied"} if name in ("tied", "untied") else {}
            make_model("qwen3" if changes else name, **changes).save_pretrained(made[name])
        return made[name]

    return folder


def made_batch(seed: int = 0) -> RaggedBatch:
    """Sequences of two prompts, two a trajectory, with tokens that were read between the sampled ones."""
    generator = torch.Generator().manual_seed(seed)
    masks = [torch.tensor([*[0] * 12, *[1] * (count // 2), *[0] * 3, *[1] * (count - count // 2)]) for count in SCORED]
    mask, offsets = torch.cat(masks).bool(), torch.tensor([0, *map(len, masks)]).cumsum(0)
    ids = torch.randint(3, VOCAB, mask.shape, generator=generator)
    columns = {
        name: scale * torch.randn(mask.shape, generator=generator) * mask
        for name, scale in (("advantages", 1.0), ("ref_logprobs", 0.5), ("rollout_logprobs", 0.5))
    }
    return trained_batch(
        offsets,
        ids,
        mask,
        torch.arange(len(SCORED)) // 5,
        trajectory=torch.arange(len(SCORED)) // 2,
        selected=torch.rand(mask.shape, generator=generator) < 0.3,
        **columns,
    )


def made_worker(path: Path, model: dict[str, Any] | None = None, *, by_parts: bool, **keys: Any) -> PolicyWorker:
    further = {name: keys.pop(name) for name in ("distillation", "expert_coef", "temperature") if name in keys}
    actor = ActorConfig.model_validate({"ppo_mini_batch_size": 8, "optim": OPTIM, **keys})
    worker = policy_worker(ModelConfig(path=str(path), **(model or {})), actor, **{"temperature": 0.7, **further})
    fsdp(worker).by_parts = by_parts
    return worker


def with_old(worker: PolicyWorker, batch: RaggedBatch, noise: float = 0.3) -> RaggedBatch:
    """The batch with log-probs of a policy nearby, so that losses clip some tokens."""
    off = noise * torch.randn(batch.num_tokens, generator=torch.Generator().manual_seed(3))
    own = fsdp(worker).log_probs(batch, frozenset()).logprobs
    return batch.with_fields(old_logprobs=torch.where(batch.mask, own + off, 0.0))


class Seen(Exception):
    """Ends an update at its first mini-batch."""


def mini_of(worker: PolicyWorker, batch: RaggedBatch) -> MiniBatch[TokenScores]:
    """The only mini-batch of an update, which is not taken."""
    found: list[MiniBatch[TokenScores]] = []

    def step(mini: MiniBatch[TokenScores], step: float) -> Any:
        found.append(mini)
        raise Seen

    with pytest.MonkeyPatch.context() as patch, pytest.raises(Seen):
        patch.setattr(fsdp(worker), "step", step)
        worker.update(batch, step=1)
    return replace(found[0], watches=())


Gradients = dict[str, torch.Tensor]


@contextmanager
def of_states(patch: pytest.MonkeyPatch) -> Iterator[Callable[[], torch.Tensor]]:
    """Give a function that adds up the gradients of states by the token that they predict: [V, H]."""
    seen: list[tuple[torch.Tensor, torch.Tensor]] = []
    healthy = packed.score_states

    def score_states(model: Any, states: torch.Tensor, ids: torch.Tensor, places: torch.Tensor, **keys: Any) -> Any:
        states.retain_grad()
        seen.append((states, ids[places]))
        return healthy(model, states, ids, places, **keys)

    def total() -> torch.Tensor:
        grads = torch.cat([states.grad for states, _ in seen if states.grad is not None])
        return grads.new_zeros(VOCAB, grads.shape[1]).index_add_(0, torch.cat([ids for _, ids in seen]), grads)

    with patch.context() as one:
        one.setattr(packed, "score_states", score_states)
        one.setattr(heads, "score_states", score_states)
        yield total


def gradients(learner: FSDPPolicy, run: Callable[[], object], patch: pytest.MonkeyPatch) -> Gradients:
    learner.optim.zero_grad()
    with of_states(patch) as states:
        run()
    found = {name: one.grad.clone() for name, one in learner.params.items() if one.grad is not None}
    return found | {"states": states()}


def plainly(learner: FSDPPolicy, mini: MiniBatch[TokenScores], patch: pytest.MonkeyPatch) -> Gradients:
    """Differentiate the loss of all sequences in one graph, with all logits in memory."""
    whole = mini.sequences.load()

    def run() -> None:
        needed = None if mini.reads is None else mini.reads(whole)
        compare = None if mini.compare is None else mini.compare(whole)
        mini.loss(learner.forward(whole, mini.needs, compare, needed), whole)[0].backward()

    with patch.context() as one:
        one.setattr(packed, "CHUNK_LOGITS", 1 << 40)
        return gradients(learner, run, patch)


def accumulated(learner: FSDPPolicy, mini: MiniBatch[TokenScores], patch: pytest.MonkeyPatch) -> Gradients:
    whole = learner.share_of(mini.sequences)
    return gradients(learner, lambda: learner._accumulate(whole, mini, []), patch)


def assert_alike(found: Gradients, wanted: Gradients, tolerance: float) -> None:
    assert found.keys() == wanted.keys()
    for name, one in wanted.items():
        size = one.abs().max()
        assert (found[name] - one).abs().max() <= tolerance * size + 1e-30, (name, found[name], one)


@pytest.fixture
def in_float64(monkeypatch: pytest.MonkeyPatch) -> None:
    """Compute in float64 what the product and transformers compute in float32."""

    def forward(norm: Any, hidden: torch.Tensor) -> torch.Tensor:
        return norm.weight * hidden * (hidden.square().mean(-1, keepdim=True) + norm.variance_epsilon).rsqrt()

    def attend(own: PackedAttention, layer: int, query: Any, key: Any, value: Any, rule: Any) -> torch.Tensor:
        found = []
        for (start, end), above in zip(own.layout.spans, own.layout.ancestors, strict=True):
            places = torch.cat([torch.arange(*own.layout.spans[node]) for node in above] + [torch.arange(start, end)])
            seen = places <= torch.arange(start, end)[:, None]  # what is above comes before
            parts = query[:, start:end], key[:, places], value[:, places]
            found.append(scaled_dot_product_attention(*parts, attn_mask=seen, scale=rule.scale, enable_gqa=True))
        return torch.cat(found, dim=1).transpose(0, 1)

    monkeypatch.setattr(torch.Tensor, "float", torch.Tensor.double)
    monkeypatch.setattr(Qwen3RMSNorm, "forward", forward)
    monkeypatch.setattr(PackedAttention, "attend", attend)


OPTIONS: dict[str, dict[str, Any]] = {"dro": {"dro_beta": 0.1}}
WAYS = [False, True]


@pytest.mark.slice(4, "matrix")
@pytest.mark.parametrize("loss", sorted(POLICY_LOSSES.names()))
def test_gradients_are_plain_autograds(
    loss: str, folders: Callable[[str], Path], in_float64: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of head, states and layers, of every loss with every aggregation; with entropy, KL and a further term."""
    terms = {"entropy_coeff": 0.02, "use_kl_loss": True, "kl_loss_coef": 0.3, "success_nll_coef": 0.2}
    chosen = {"loss_mode": loss, "options": OPTIONS.get(loss, {})}
    batch = made_batch().with_fields(success=torch.arange(len(SCORED)) % 3 == 0)
    for place, mode in enumerate(get_args(LossAggMode)):
        keys = {"loss_agg_mode": mode, "policy_loss": chosen, **(terms if place % 2 else {})}
        worker = made_worker(folders("untied"), by_parts=False, **keys)
        learner = fsdp(worker)
        learner.model.double()
        mini = mini_of(worker, with_old(worker, batch))
        wanted = plainly(learner, mini, monkeypatch)
        assert {one.dtype for one in wanted.values()} == {torch.float64}
        for learner.by_parts in WAYS:
            assert_alike(accumulated(learner, mini, monkeypatch), wanted, 1e-10)


LORA: dict[str, Any] = {"lora_rank": 4}
KINDS: dict[str, tuple[str, dict[str, Any], dict[str, Any]]] = {
    "a tied head": ("tied", {}, {"entropy_coeff": 0.01, "temperature": 1.3}),
    "a head of its own": ("untied", {}, {"observation_nll_coef": 0.1, "loss_agg_mode": "seq-mean-token-sum"}),
    "adapters, and a frozen head": ("untied", {"lora_rank": 4}, {"use_kl_loss": True}),
    "an adapter of the head": ("untied", {"lora_rank": 4, "target_modules": ["q_proj", "lm_head"]}, {}),
    "bfloat16": ("tied", {"dtype": "bfloat16"}, {"entropy_coeff": 0.01}),
    "adapters in bfloat16": ("untied", {"dtype": "bfloat16", "lora_rank": 4}, {}),
    "layers computed again": ("untied", {"enable_gradient_checkpointing": True}, {}),
    "layers with a state": ("qwen3.5", {}, {"policy_loss": {"loss_mode": "gspo"}}),
    "several micro-batches": (
        "tied",
        {},
        {"ppo_max_token_len_per_gpu": 130, "ppo_mini_batch_size": 1, "ppo_epochs": 2},
    ),
    "scaled logits": ("granite", {}, {}),
    "capped logits": ("gemma2", {}, {"policy_loss": {"loss_mode": "geo_mean"}}),
    "replayed experts": ("qwen3-moe", {}, {"router_replay": {"mode": "R2"}}),
}


@pytest.mark.parametrize("kind", KINDS)
def test_an_update_is_the_same_to_rounding(kind: str, folders: Callable[[str], Path]) -> None:
    family, model, keys = KINDS[kind]
    found = []
    for by_parts in WAYS:
        worker = made_worker(folders(family), model, by_parts=by_parts, **keys)
        batch = made_batch().with_fields(observed=torch.full((len(SCORED),), 3))
        if "router_replay" in keys:
            worker.compute_log_probs(batch)
            others = (worker.of_log_probs().values + 1) % 4  # which the routers do not choose
            batch = batch.with_fields(experts=others.to(torch.uint8))
        grads, parts = watch_gradients(worker), sizes_of_parts(worker)
        metrics = worker.update(with_old(worker, batch, noise=0.0), step=1, by_token=True)
        assert [one.report.findings for one in worker.checked()] == [[]]
        assert len(parts) > 3 if by_parts else not parts
        found.append((grads, metrics, by_row(worker.of_update())))
    (grads, metrics, columns), (other_grads, other_metrics, other_columns) = found
    tolerance = 3e-3 if model.get("dtype") == "bfloat16" else 1e-5
    assert_alike(other_grads, grads, tolerance)
    assert other_metrics == pytest.approx(metrics, rel=1e-4, abs=1e-6)
    assert_alike(other_columns, columns, tolerance)


def test_a_teachers_distributions_are_compared_part_by_part(
    folders: Callable[[str], Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    path = folders("tied")
    config = DistillationConfig.model_validate(
        {"teacher": {"path": str(folders("untied"))}, "scope": "top_k", "top_k": 8}
    )
    worker = made_worker(path, by_parts=False, distillation=config)
    batch = scored(with_old(worker, made_batch()), config, path)
    learner, mini = fsdp(worker), mini_of(worker, batch)
    assert mini.compare is not None
    wanted = plainly(learner, mini, monkeypatch)
    for learner.by_parts in WAYS:
        assert_alike(accumulated(learner, mini, monkeypatch), wanted, 1e-5)


def test_transcripts_of_an_expert_go_the_same_way(folders: Callable[[str], Path]) -> None:
    other, found = made_batch(seed=5), []
    expert = RaggedBatch.unsampled(other.offsets, other.ids, other.mask, other.group, other.trajectory)
    for by_parts in WAYS:
        worker = made_worker(folders("tied"), by_parts=by_parts, expert_coef=0.5)
        grads, parts = watch_gradients(worker), sizes_of_parts(worker)
        metrics = worker.update(with_old(worker, made_batch()), step=1, expert=expert)
        assert sum(parts) == by_parts * 2 * sum(SCORED)
        found.append((grads, metrics))
    assert_alike(found[1][0], found[0][0], 1e-5)
    assert found[1][1] == pytest.approx(found[0][1], rel=1e-4, abs=1e-6)


@pytest.mark.parametrize(
    ("kind", "config"),
    [(SupervisedWorker, SFTConfig), (PolicyPreferenceWorker, PreferencesConfig)],
    ids=["sft", "pairs"],
)
def test_training_on_files_goes_the_same_way(
    kind: type[Any], config: type[Any], folders: Callable[[str], Path]
) -> None:
    made, found = made_batch(), []
    batch = RaggedBatch.unsampled(made.offsets, made.ids, made.mask, made.group, torch.arange(len(SCORED)))
    if kind is PolicyPreferenceWorker:
        sides = torch.tensor([1, -1] * (len(SCORED) // 2), dtype=torch.int32)
        batch = batch.with_fields(ref_logprobs=made.ref_logprobs, side=sides)
    for by_parts in WAYS:
        values = {"data": {"train_files": "none"}, "model": {"path": str(folders("tied"))}, "optim": OPTIM}
        worker = kind(config.model_validate(values), device="cpu", total_steps=10)
        worker.backend.by_parts = by_parts
        grads, parts = watch_gradients(worker), sizes_of_parts(worker)
        metrics = worker.update(batch, 1)
        assert sum(parts) == by_parts * sum(SCORED)
        assert [one.report.findings for one in worker.checked()] == [[]]
        found.append((grads, metrics))
    assert_alike(found[1][0], found[0][0], 1e-5)
    assert found[1][1] == pytest.approx(found[0][1], rel=1e-4, abs=1e-6)


def test_sequences_keep_their_images(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also where the parts put sequences in another order."""
    path, found = make_tiny_vision_policy(tmp_path), []
    for by_parts in WAYS:
        worker = made_worker(path, by_parts=by_parts)
        base = fsdp(worker).model.base
        image, config = sample_image(base), base.config
        monkeypatch.setattr(packed, "CHUNK_LOGITS", CHUNK * config.get_text_config().vocab_size)
        batch, ids = made_batch(), made_batch().ids.clone()
        rows, at = (1, 3, 4), 2
        for start in batch.offsets[list(rows)].tolist():
            ids[start + at : start + at + image.tokens] = config.image_token_id
        pictures = [PlacedImage(at, replace(image, patches=image.patches * (row + 1))) for row in range(len(SCORED))]
        images = Images.from_sequences([[one] if row in rows else [] for row, one in enumerate(pictures)])
        grads, parts = watch_gradients(worker), sizes_of_parts(worker)
        worker.update(with_old(worker, replace(batch.with_fields(ids=ids), images=images)), step=1)
        assert len(parts) > 3 if by_parts else not parts
        found.append(grads)
    assert any("visual" in name for name in found[0])
    assert_alike(found[1], found[0], 1e-5)


class Logits(TorchDispatchMode):
    """Counts products of the head, and the bytes of logits that are in memory at once."""

    def __init__(self, vocab: int, hidden: int) -> None:
        super().__init__()
        self.vocab, self.hidden = vocab, hidden
        self.products = 0
        """Of a token with the head."""
        self.most, self.widest = 0, 0
        """Numbers of all tensors of logits that existed at once; rows of the largest."""
        self._alive: dict[int, tuple[StorageWeakRef, int]] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        found = func(*args, **(kwargs or {}))
        if func in (torch.ops.aten.mm.default, torch.ops.aten.addmm.default):
            sizes = [*args[-2].shape, args[-1].shape[1]]
            if self.vocab in sizes:
                sizes.remove(self.vocab)
                sizes.remove(self.hidden)
                self.products += sizes[0]
        for one in found if isinstance(found, (tuple, list)) else [found]:
            # The other tensors of this width are views of the head.
            if isinstance(one, torch.Tensor) and one.shape[1:] == (self.vocab,) and len(one) != self.hidden:
                self._alive[one.untyped_storage()._cdata] = StorageWeakRef(one.untyped_storage()), one.numel()
                self.widest = max(self.widest, len(one))
        self._alive = {key: held for key, held in self._alive.items() if not held[0].expired()}
        self.most = max(self.most, sum(size for _, size in self._alive.values()))
        return found


@pytest.mark.parametrize(
    ("family", "model", "backward"),
    [("untied", {}, 2), ("tied", {}, 2), ("untied", LORA, 1), ("untied", LORA | {"dtype": "bfloat16"}, 1)],
)
def test_logits_are_made_once_but_those_of_sequences_longer_than_a_chunk(
    family: str, model: dict[str, Any], backward: int, folders: Callable[[str], Path]
) -> None:
    """3 products of a token with the head in place of 4; a frozen head has no gradient. No more logits are alive."""
    counted = []
    long = sum(count for count in SCORED if count > CHUNK)
    for by_parts in WAYS:
        worker = made_worker(folders(family), model, by_parts=by_parts, entropy_coeff=0.01)
        batch = with_old(worker, made_batch())
        with Logits(VOCAB, SIZES["hidden_size"]) as seen:
            worker.update(batch, step=1)
        again = long if by_parts else sum(SCORED)
        assert seen.products == (1 + backward) * sum(SCORED) + again
        assert 0 < seen.widest <= CHUNK
        counted.append(seen.most)
    whole, parts = counted
    assert parts <= whole


class Sight:
    """A watch that keeps what it sees of the passes."""

    def __init__(self) -> None:
        self.seen: list[tuple[RaggedBatch, torch.Tensor, float]] = []
        self.grads: dict[tuple[int, str], torch.Tensor] = {}

    def begin(self, counts: object) -> None: ...

    def scored(self, found: TokenScores, micro: RaggedBatch, factor: float) -> None:
        place = len(self.seen)
        self.seen.append((micro, found.logprobs.detach().clone(), factor))
        for name in ("logprobs", "entropy"):
            getattr(found, name).register_hook(lambda grad, key=(place, name): self.grads.__setitem__(key, grad))

    def stepping(self, model: object, norm: float, step: float) -> None: ...

    def stepped(self, model: object, step: float) -> None: ...

    def result(self) -> UpdateChecked:
        return UpdateChecked(Report())

    def by_row(self) -> dict[str, torch.Tensor]:
        found = {}
        for place, (micro, scores, factor) in enumerate(self.seen):
            assert factor == 1 and micro.row is not None
            columns = torch.stack([scores, self.grads[place, "logprobs"], self.grads[place, "entropy"]], dim=1)
            for row, one in zip(micro.row.tolist(), columns.split(micro.lengths.tolist()), strict=True):
                found[str(row)] = one
        return dict(sorted(found.items()))


def test_a_watch_sees_micro_batches_with_all_scores_and_gradients(folders: Callable[[str], Path]) -> None:
    sights = []
    for by_parts in WAYS:
        worker = made_worker(folders("tied"), by_parts=by_parts, ppo_max_token_len_per_gpu=150, entropy_coeff=0.1)
        batch = with_old(worker, made_batch())
        mini = mini_of(worker, batch)
        sights.append(Sight())
        fsdp(worker).step(replace(mini, watches=[sights[-1]]), 1)
        assert len(sights[-1].seen) == len(fsdp(worker).micro_batches(batch)) > 1
    whole, parts = (one.by_row() for one in sights)
    assert len(whole) == len(SCORED)
    assert_alike(parts, whole, 1e-5)


@pytest.mark.parametrize(("work", "owner"), [("run", States), ("run", Part), ("run_back", Part), ("run_back", States)])
def test_a_work_that_runs_out_of_memory_is_done_again_without_its_loss(
    work: str, owner: type[Any], folders: Callable[[str], Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Fault injection in a later micro-batch. A backward pass has added all its gradients before it fails."""
    keys: dict[str, Any] = {"ppo_max_token_len_per_gpu": 150, "entropy_coeff": 0.1}
    plain, worker = (made_worker(folders("tied"), by_parts=True, **keys) for _ in range(2))
    batch = with_old(plain, made_batch(), noise=0.0)
    wanted = plain.update(batch, step=1, by_token=True)
    healthy, calls = getattr(owner, work), itertools.count()

    def fail(self: Any) -> None:
        fails = next(calls) == (1 if owner is States else 4)
        if work == "run_back" or not fails:
            healthy(self)
        if fails:
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB.")

    def give_back(device: torch.device) -> None:
        assert not any(type(one) is States and one.copies for one in gc.get_objects()), "they hold the layers' graph"
        freed.append(device)

    freed: list[torch.device] = []
    monkeypatch.setattr(owner, work, fail)
    monkeypatch.setattr("agentrl.workers.learner.give_back", give_back)
    assert worker.update(batch, step=1, by_token=True) == wanted
    assert len(freed) == 1 and next(calls) > 3 and all(layer.training for layer in text_layers(fsdp(worker).model.base))
    assert same_weights(plain, worker)
    assert_alike(by_row(worker.of_update()), by_row(plain.of_update()), 0.0)
    assert [one.report.findings for each in (plain, worker) for one in each.checked()] == [[], []]


class Waits(TorchDispatchMode):
    """Counts operations that wait for a device: they read a number of it, or the size of their result."""

    count, planning = 0, False

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        sized = func is not torch.ops.aten.repeat_interleave.Tensor or kwargs.get("output_size") is not None
        reads = func in (torch.ops.aten._local_scalar_dense.default, torch.ops.aten.nonzero.default)
        self.count += (reads or not sized) and not self.planning
        return func(*args, **kwargs)


@pytest.mark.parametrize("mode", ["token-mean", "seq-mean-token-mean"])
@pytest.mark.parametrize("loss", ["vanilla", "gspo"])
def test_parts_do_not_wait_for_the_device(
    loss: str, mode: str, folders: Callable[[str], Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A GPU would be idle after the products of each part, while the host prepares the next ones."""
    keys: dict[str, Any] = {"policy_loss": {"loss_mode": loss}, "loss_agg_mode": mode}
    keys |= {"use_kl_loss": True, "entropy_coeff": 0.1}
    found = []
    for tokens in (CHUNK, 2 * CHUNK):
        monkeypatch.setattr(packed, "CHUNK_LOGITS", tokens * VOCAB)
        worker = made_worker(folders("tied"), by_parts=True, **keys)
        batch, parts = with_old(worker, made_batch()), sizes_of_parts(worker)
        seen, healthy = Waits(), fsdp(worker).make_pass

        def make_pass(*given: Any, seen: Waits = seen, healthy: Any = healthy) -> Any:
            seen.planning = True  # of the CPU's numbers
            made = healthy(*given)
            seen.planning = False
            return made

        monkeypatch.setattr(fsdp(worker), "make_pass", make_pass)
        with seen:
            worker.update(batch, step=1, by_token=True)
        found.append((len(parts), seen.count))
    (many, waits), (few, others) = found
    assert many > few > 1 and waits == others


def test_parts_are_whole_sequences_that_fit_into_a_chunk() -> None:
    generator = torch.Generator().manual_seed(0)
    for _ in range(50):
        scored = torch.randint(0, 40, (int(torch.randint(1, 30, (), generator=generator)),), generator=generator)
        parts = head_parts(scored.tolist(), 25)
        assert sorted(row for part in parts for row in part) == list(range(len(scored)))
        long = (scored > 25).nonzero()[:, 0].tolist()
        assert parts[0] == long if long else True
        short = parts[bool(long) :]
        assert all(int(scored[part].sum()) <= 25 for part in short)
        assert len(short) <= 2 * int(scored[scored <= 25].sum()) // 25 + 1, "at most one part is less than half full"


@pytest.mark.parametrize(
    ("device", "ranks", "router_losses", "takes"),
    [("cuda", 1, False, True), ("cpu", 1, False, False), ("cuda", 2, False, False), ("cuda", 1, True, False)],
)
def test_one_gpu_takes_parts(device: str, ranks: int, router_losses: bool, takes: bool) -> None:
    assert learns_by_parts(device, ranks, has_router_losses=router_losses) is takes


def test_a_cpu_takes_the_head_whole_and_so_does_a_forward_of_ones_own(
    folders: Callable[[str], Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    class Own(FSDPPolicy):
        def forward(self, *args: Any, **keys: Any) -> TokenScores:
            return super().forward(*args, **keys)

    model = ModelConfig(path=str(folders("tied")))
    settings = PolicySettings(section=ActorConfig(), model=model, device="cpu", total_steps=1, seed=0)
    assert not FSDPPolicy(settings).by_parts
    monkeypatch.setattr("agentrl.workers.fsdp.learns_by_parts", lambda *_, **__: True)
    assert FSDPPolicy(settings).by_parts and not Own(settings).by_parts


def sizes_of_parts(worker: PolicyWorker) -> list[int]:
    """A list that fills with the scored tokens of each part, from now on."""
    found: list[int] = []
    model = fsdp(worker).model
    healthy = model.score

    def score(states: torch.Tensor, *args: Any, **keys: Any) -> TokenScores:
        found.append(len(states))
        return healthy(states, *args, **keys)

    model.score = score  # type: ignore[method-assign]
    return found


def by_row(found: CachedColumns) -> dict[str, torch.Tensor]:
    """Columns of each sequence."""
    values = found.values.nan_to_num(7.0).split(found.offsets.diff().tolist())
    return {str(row): one for row, one in sorted(zip(found.rows.tolist(), values, strict=True), key=itemgetter(0))}
