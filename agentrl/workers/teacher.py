"""Teachers: frozen models, here or on servers, that score the policy's own tokens."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Callable, Sequence
from functools import partial
from typing import Protocol

import torch
from transformers import AutoConfig

from agentrl.algorithms.distillation import IMPOSSIBLE, Head
from agentrl.config.sections.distillation import TEACHER, DistillationConfig, TeacherConfig
from agentrl.config.sections.model import ModelConfig
from agentrl.config.sections.parallel import Parallel
from agentrl.errors import ConfigError, TrainingError
from agentrl.model.packed import loading, shares_beginnings
from agentrl.model.plain import PlainModel, Twice
from agentrl.model.teacher import open_teacher, read_head
from agentrl.observe.report import Report
from agentrl.observe.watch import Comparison
from agentrl.parallel.mesh import Mesh
from agentrl.parallel.offload import Offload
from agentrl.remote.faults import RemoteRefused, RemoteUnavailable
from agentrl.remote.logprobs import GivenTokens, LogprobServer
from agentrl.system.loop_thread import run_apart
from agentrl.system.metrics import Numbers
from agentrl.trajectory.batch import RaggedBatch, Sequences, token_places
from agentrl.workers.forward import forward_tokens


class Teacher(Protocol):
    """One teacher; every rank must ask it at the same time."""

    name: str
    width: int
    """Numbers by token: 1 + X (see `agentrl.algorithms.distillation`)."""

    def score(self, batch: RaggedBatch) -> torch.Tensor:
        """Score sequences, perhaps zero of them: [T, width] float32 on the CPU, 0 at tokens that the policy did not
        sample."""
        ...


def write_scores(
    scores: torch.Tensor, batch: RaggedBatch, teacher: int, name: str, score: Callable[[RaggedBatch], torch.Tensor]
) -> None:
    """Write into `scores` [T, 1 + X] the scores that a teacher gives for its own sequences, marked by index `teacher`.

    score: gives [tokens, width] for the sequences as the teacher reads them; every rank calls it, perhaps without
    sequences. A privileged teacher reads other prompts: its score of the n-th sampled token belongs to the policy's
    n-th. Raises TrainingError for numbers that are not finite, and for images after such a prompt.
    """
    assert batch.teacher is not None, "the choice of teachers comes first"
    rows = (batch.teacher[batch.offsets[:-1]] == teacher).nonzero()[:, 0]
    own = read = batch.select(rows.tolist())
    if own.teacher_prompts is not None and any(map(len, own.teacher_prompts.ids)):
        if own.images is not None:
            raise TrainingError(
                f"the teacher {name} is privileged, and reads text alone: rows with images need another"
            )
        read = own.as_taught()
    found = score(read)[read.mask]
    broken = int((~torch.isfinite(found)).any(1).sum())
    if broken:
        raise TrainingError(
            f"the teacher {name} gives numbers that are not finite for {broken} tokens: its weights are broken, or its "
            "numbers overflow in model.dtype"
        )
    scores[token_places(batch.offsets[rows], batch.lengths[rows])[own.mask], : found.shape[1]] = found


class TeacherWorker:
    """All teachers of a config on one rank, but the policy itself; each scores the sequences that are its own.

    Args:
        policy: the policy's model, whose vocabulary and dtype teachers have.
        temperature: of the softmax, the policy's own.
        max_tokens: tokens a micro-batch and rank.
        param_offload: keep each teacher on its device only while it scores.
    """

    def __init__(
        self,
        config: DistillationConfig,
        policy: ModelConfig,
        *,
        device: str | torch.device,
        temperature: float,
        max_tokens: int = 16384,
        parallel: Parallel | None = None,
        param_offload: bool = False,
    ) -> None:
        """Load the local teachers. Raises ConfigError."""
        mesh, vocab = Mesh(parallel or Parallel(), device), vocab_size(policy)

        def open_one(index: int, teacher: TeacherConfig) -> Teacher:
            """Make one teacher. Raises ConfigError."""
            if teacher.path is None:
                return ServedTeacher(teacher, config, vocab, config.key_of(index))
            return LoadedTeacher(
                teacher, config, policy, vocab, mesh, device, temperature, max_tokens, offload=param_offload
            )

        self.teachers = {
            index: open_one(index, teacher)
            for index, (_, teacher) in enumerate(config.teachers)
            if not teacher.is_policy
        }
        """By index in `config.teachers`."""
        self._width = max(teacher.width for teacher in self.teachers.values())

    def compute_teacher_scores(self, batch: RaggedBatch) -> tuple[torch.Tensor, Numbers]:
        """Return ([T, 1 + X] float32 on the CPU: the column teacher_scores; no metrics). Needs the column teacher.

        Scores by the policy as a teacher are in that column already. Raises TrainingError: a teacher gives numbers that
        are not finite, or a server no answer.
        """
        known = batch.teacher_scores
        scores = torch.zeros(batch.num_tokens, self._width) if known is None else known.clone()
        for index, teacher in self.teachers.items():
            write_scores(scores, batch, index, teacher.name, teacher.score)
        return scores, {}

    def recompute(self, sequence: Sequences, compare: Comparison) -> Report:
        """Compare one sequence's scores with those of its teacher's model as transformers computes it.

        A teacher on a server, and one that reads another prompt, is not computed again.
        """
        micro = sequence.load()
        teacher = None if micro.teacher is None else self.teachers.get(int(micro.teacher[0]))
        prompts = micro.teacher_prompts
        if not isinstance(teacher, LoadedTeacher) or (prompts is not None and any(map(len, prompts.ids))):
            return compare(None, micro, torch.device("cpu"))
        return teacher.recompute(micro, compare)


class LoadedTeacher:
    """A teacher whose weights lie here, sharded as the other models are. Implements `Teacher`."""

    def __init__(
        self,
        teacher: TeacherConfig,
        config: DistillationConfig,
        policy: ModelConfig,
        vocab: int,
        mesh: Mesh,
        device: str | torch.device,
        temperature: float,
        max_tokens: int,
        *,
        offload: bool,
    ) -> None:
        """Raises ConfigError when there is no such model."""
        assert teacher.path is not None
        self.name, self._device = teacher.name, torch.device(device)
        self.model = open_teacher(
            teacher.path,
            mesh,
            scope=config.scope,
            top_k=config.top_k,
            temperature=temperature or 1.0,
            vocab=vocab,
            dtype=policy.dtype,
            device=device,
            trust_remote_code=teacher.trust_remote_code,
        )
        if config.scope == "top_k" and self.model.top_k < config.top_k:
            raise too_many(config, min(vocab, self.model.vocab))
        self.width = self.model.width
        self._max_tokens = max_tokens * mesh.parallel.sequence
        self._is_whole = mesh.fsdp is None and mesh.tensor is None and mesh.sequence is None
        self._plain: PlainModel | None = None
        self._offload = Offload(self.model, self._device, enabled=offload)

    def score(self, batch: RaggedBatch) -> torch.Tensor:
        """See `Teacher.score`: [T, width]."""

        def scores(micro: RaggedBatch) -> torch.Tensor:
            """Score the tokens of a micro-batch: [T, width]."""
            found: torch.Tensor = self.model(micro.ids, micro.offsets, micro.mask, micro.images)
            return found

        with self._offload:
            shares = shares_beginnings(self.model.base)
            return forward_tokens(scores, batch, self._max_tokens, self._device, shares=shares)

    def recompute(self, micro: RaggedBatch, compare: Comparison) -> Report:
        """See `TeacherWorker.recompute`."""
        one, model = None, self.model
        with self._offload:
            if self._is_whole:
                plain = self._plain = self._plain or PlainModel(model.base)
                weights = {name.removeprefix("base."): param for name, param in model.named_parameters()}
                exact = all(param.dtype == torch.float32 for param in weights.values())
                again = partial(plain.logprobs, temperature=model.temperature, vocab=model.vocab)
                one = Twice("teacher", "teacher_scores", again, weights, exact)
            return compare(one, micro, self._device)


class ServedTeacher:
    """A teacher on a server. Implements `Teacher`; ranks ask it apart, each about its own sequences."""

    def __init__(self, teacher: TeacherConfig, config: DistillationConfig, vocab: int, key: str = TEACHER) -> None:
        """Raises ConfigError for faults that can be seen without asking the server. key: of the teacher."""
        self.name, self._concurrent, self._vocab = teacher.name, teacher.max_concurrent, vocab
        self._top_k = config.top_k if config.scope == "top_k" else 0
        if self._top_k > vocab:
            raise too_many(config, vocab)
        self.width = 1 + 2 * self._top_k
        self._server = LogprobServer(teacher, key, top_k=self._top_k)

    def score(self, batch: RaggedBatch) -> torch.Tensor:
        """See `Teacher.score`: [T, width] float32.

        Raises TrainingError when there is no answer, or sequences have images.
        """
        scores = torch.zeros(batch.num_tokens, self.width)
        if not len(batch):
            return scores
        if batch.images is not None:
            raise TrainingError(f"the teacher {self.name} is asked about text alone: take one with path for images")
        try:
            answers = run_apart("teacher", self._ask(batch))
        except (RemoteUnavailable, RemoteRefused) as error:
            raise TrainingError(
                f"the teacher {self.name} has not scored the step's trajectories: {error}. Once it answers, the same "
                "command goes on from the newest checkpoint"
            ) from error
        for start, answer in zip(batch.offsets[:-1].tolist(), answers, strict=True):
            if answer is None:
                continue
            places = slice(start + answer.first, start + answer.first + len(answer.logprobs))
            scores[places, 0] = torch.tensor(answer.logprobs)
            if self._top_k:
                top = torch.tensor(answer.top, dtype=torch.float64)  # [tokens, k, 2]
                known = top[:, :, 0] < self._vocab
                scores[places, 1 : 1 + self._top_k] = torch.where(known, top[:, :, 0], 0.0).float()
                scores[places, 1 + self._top_k :] = torch.where(known, top[:, :, 1], IMPOSSIBLE).float()
        return torch.where(batch.mask[:, None], scores, 0.0)

    async def _ask(self, batch: RaggedBatch) -> list[GivenTokens | None]:
        gate = asyncio.Semaphore(self._concurrent)
        ids, mask, offsets = batch.ids.tolist(), batch.mask.tolist(), batch.offsets.tolist()

        async def one(start: int, end: int) -> GivenTokens | None:
            sampled = [place for place in range(1, end - start) if mask[start + place]]
            if not sampled:
                return None
            async with gate:
                return await self._server.score(ids[start : start + sampled[-1] + 1], sampled[0])

        tasks = [asyncio.ensure_future(one(start, end)) for start, end in itertools.pairwise(offsets)]
        try:
            return await asyncio.gather(*tasks)
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
            await self._server.close()


def read_heads(
    config: DistillationConfig,
    policy: ModelConfig,
    *,
    device: str | torch.device,
    temperature: float,
) -> Sequence[Head]:
    """Read each teacher's head, whole on every rank, where the config compares whole vocabularies; else return no head.

    Raises ConfigError.
    """
    if not config.in_loss or config.scope != "full":
        return ()
    vocab, mesh = vocab_size(policy), Mesh(Parallel(), device)
    heads = []
    for _, teacher in config.teachers:
        assert teacher.path is not None, "a config with scope=full is checked for this"
        heads.append(
            read_head(
                teacher.path,
                temperature=temperature or 1.0,
                vocab=vocab,
                dtype=policy.dtype,
                device=device,
                mesh=mesh,
                trust_remote_code=teacher.trust_remote_code,
            )
        )
    return heads


def vocab_size(policy: ModelConfig) -> int:
    """Read the number of the policy's logits. Raises ConfigError when there is no such model."""
    with loading(policy.path):
        config = AutoConfig.from_pretrained(policy.path, trust_remote_code=policy.trust_remote_code)
        size: int = config.get_text_config().vocab_size
    return size


def too_many(config: DistillationConfig, vocab: int) -> ConfigError:
    """Make the error for a `top_k` that is larger than a vocabulary."""
    return ConfigError(
        f"distillation.top_k={config.top_k} is more than the vocabulary's {vocab} tokens: lower it, or take "
        "distillation.scope=full"
    )
