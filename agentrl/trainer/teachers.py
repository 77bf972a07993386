"""A training's teachers: checked before the first step, chosen by data source, asked in each step."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence

import torch

from agentrl.algorithms.declared import declared_by_estimator
from agentrl.chat import Chat
from agentrl.chat.load import load_tokenizer
from agentrl.chat.vocabulary import difference
from agentrl.config import Config
from agentrl.config.sections.distillation import DistillationConfig, TeacherConfig
from agentrl.errors import ConfigError
from agentrl.remote.faults import RemoteRefused, RemoteUnavailable
from agentrl.remote.logprobs import LogprobServer
from agentrl.system.loop_thread import run_apart
from agentrl.trajectory import Outline
from agentrl.trajectory.batch import RaggedBatch, Sequences
from agentrl.workers.roles import Workers


def check_teachers(config: Config, chat: Chat) -> None:
    """Check that each teacher has the policy's vocabulary, and that servers answer.

    Raises ConfigError with the first token that means something else to the teacher.
    """
    keys = config.distillation
    if not keys.teachers and "teacher_logprobs" in declared_by_estimator(config).columns:
        raise ConfigError(
            f"algorithm.adv_estimator={config.algorithm.adv_estimator} reads a teacher's log-probs, and there is none: "
            "set distillation.teacher"
        )
    for index, (_, teacher) in enumerate(keys.teachers):
        if teacher.is_policy:
            continue
        at = keys.key_of(index)
        path = teacher.path or teacher.tokenizer
        assert path is not None, "configs are checked for this"
        own = chat.tokenizer.get_vocab()
        other = load_tokenizer(path, None, trust_remote_code=teacher.trust_remote_code).get_vocab()
        found = difference(own, other)
        if found is not None:
            raise ConfigError(
                f"{at}: a teacher scores the policy's own token ids, and the tokenizer at {path} is another one than "
                f"the policy's: {found}. Take a teacher of the policy's family"
            )
        if teacher.base_url is not None:
            run_apart("teacher", _try_server(teacher, keys, at, sorted(own.values())))


async def _try_server(teacher: TeacherConfig, keys: DistillationConfig, at: str, ids: Sequence[int]) -> None:
    """Have a server score the first and the last token of the vocabulary. Raises ConfigError."""
    server = LogprobServer(teacher, at, top_k=keys.top_k if keys.scope == "top_k" else 0)
    try:
        await server.score([ids[0], ids[0], ids[-1]], 1)
    except (RemoteUnavailable, RemoteRefused) as error:
        raise ConfigError(f"{at}: {teacher.name} gives no log-probs of given tokens: {error}") from error
    finally:
        await server.close()


def with_teacher_scores(
    config: DistillationConfig, workers: Workers, batch: Sequences, outlines: Sequence[Outline]
) -> Sequences:
    """Add the columns teacher and teacher_scores to a step's batch; the outlines give the source of its prompts."""
    assert workers.teacher is not None
    chosen = {outline.group: config.teacher_of(outline.data_source) for outline in outlines}
    privileged = {index for index, (_, one) in enumerate(config.teachers) if one.privileged is not None}
    batch, _ = workers.executor.compute(teachers_of, batch, chosen, privileged)
    return workers.teacher.scores(batch)


def teachers_of(
    batch: RaggedBatch, chosen: Mapping[int, int], privileged: Collection[int] = ()
) -> tuple[dict[str, torch.Tensor], None]:
    """Return (the column teacher [T] int32, nothing): `chosen` by each sequence's prompt.

    -1 where the teacher is one of the `privileged` teachers, and would see no more than the policy.
    """
    by_sequence = torch.tensor([chosen[group] for group in batch.group.tolist()], dtype=torch.int32)
    if batch.teacher_prompts is not None:
        untold = torch.tensor([not len(ids) for ids in batch.teacher_prompts.ids], dtype=torch.bool)
        by_sequence[untold & torch.isin(by_sequence, torch.tensor(sorted(privileged), dtype=torch.int32))] = -1
    return {"teacher": by_sequence.repeat_interleave(batch.lengths)}, None
