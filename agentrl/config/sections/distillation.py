"""Keys of `distillation.*`: a teacher's distributions on the policy's own trajectories."""

from __future__ import annotations

import fnmatch
from collections.abc import Iterator
from typing import Annotated, Any, Literal

from pydantic import Field

from agentrl.config.registries import DIVERGENCES
from agentrl.config.rules import ConflictsWith, Names, Needs, OnlyWith, Place, Rule, Uses, Values
from agentrl.config.section import Finding, Section
from agentrl.config.sections.parallel import RANKS, FSDPConfig
from agentrl.system.json_value import as_mapping

HERE = OnlyWith("path")
SERVED = OnlyWith("base_url")
TAUGHT = OnlyWith("teacher.path", "teacher.base_url", "by_source")
SAMPLED = OnlyWith("scope=sampled")
POLICY = "policy"
"""A teacher's path that means the policy itself."""
TEACHER = "distillation.teacher"
"""Key of the teacher of all rows that no other one fits."""
WHOLE = OnlyWith("scope=top_k or full")


class TeacherConfig(Section):
    """`distillation.teacher.*`"""

    path: Annotated[
        str | None,
        ConflictsWith("base_url", why="a teacher is a model of the trainer's own, or served elsewhere. Keep one"),
    ] = None
    """The teacher, a Hugging Face model that the trainer's devices hold beside the policy, frozen. policy: the policy
    itself as it is before each update, which takes no memory; it needs privileged. (./policy is a folder.)"""
    privileged: Annotated[str | None, OnlyWith("path", "base_url")] = None
    """Text that the teacher reads at the end of the prompt's last user message, and the policy does not, with values of
    the row in braces: {ground_truth}, or keys of its extra_info, e.g. 'The answer is {ground_truth}.' Rows that lack
    one learn from rewards alone. null: the teacher reads what the policy reads."""
    trust_remote_code: Annotated[bool, HERE, Uses("code")] = False
    """Run Python code that lies with the teacher."""
    base_url: Annotated[str | None, Needs("tokenizer", "the tokenizer of the model there"), Uses("a host")] = None
    """A server that gives the log-probs of given tokens, in place of path: SGLang's address, or an OpenAI-compatible
    endpoint with its /v1."""
    api: Annotated[
        Literal["sglang", "prompt_logprobs", "echo"],
        SERVED,
        Needs("model", of="prompt_logprobs or echo"),
    ] = "sglang"
    """Request that is sent: sglang, its own /generate; prompt_logprobs, completions with that field (vLLM); echo,
    completions with echo, which gives the sampled tokens' log-probs alone."""
    model: Annotated[str | None, SERVED] = None
    """The model's name there, for completions."""
    tokenizer: Annotated[str | None, SERVED] = None
    """A folder with the tokenizer of the model there; it must be the policy's, id by id."""
    api_key_env: Annotated[str | None, SERVED, Uses("an environment variable of yours")] = None
    """The environment variable that holds the server's key; null: none is sent."""
    max_concurrent: Annotated[int, SERVED] = Field(32, gt=0)
    """Sequences that each rank asks about at once."""
    timeout: Annotated[float, SERVED] = Field(120.0, gt=0)
    """Seconds after which a request is given up and made again, up to four times in all."""

    @property
    def is_policy(self) -> bool:
        """Say whether the policy teaches itself."""
        return self.path == POLICY

    @property
    def name(self) -> str:
        """The teacher in messages."""
        return str(self.path or self.base_url)


class HoldsTeachers(Rule):
    """Each value of the mapping is a teacher; further rules are those of its keys."""

    def faults(self, key: str, values: Values, place: Place) -> list[str]:
        found: list[str] = []
        for pattern, entry in values.mapping(key).items():
            keys, at = as_mapping(entry), f"{key}.{pattern}"
            if keys["path"] is None and keys["base_url"] is None:
                found.append(f"{at}: a teacher has path or base_url, one of the two, found {entry!r:.200}")
        return found


class DistillationConfig(Section):
    """`distillation.*`: with a teacher, the policy learns its distributions on the policy's own trajectories."""

    teacher: TeacherConfig = TeacherConfig()
    by_source: Annotated[dict[str, TeacherConfig], HoldsTeachers()] = Field(default_factory=dict)
    """Teachers by data source (* stands for anything), before teacher; the first that fits holds. Each has the keys of
    teacher, e.g. {math/*: {path: teachers/math}, code/*: {path: teachers/code}}. Rows that no teacher fits learn from
    rewards alone."""
    scope: Annotated[Literal["sampled", "top_k", "full"], TAUGHT] = "sampled"
    """Terms of the comparison: sampled, the log-probs of the sampled tokens; top_k, the teacher's likeliest tokens and,
    as one more, all others; full, the whole vocabulary, for teachers with path."""
    use: Annotated[Literal["advantage", "loss"], TAUGHT, SAMPLED] = "advantage"
    """advantage: estimates are taken off the advantages, and the policy loss learns from both; loss: they are a term of
    the loss, with a gradient of their own."""
    estimator: Annotated[Literal["k1", "k2", "k3"], TAUGHT, SAMPLED] = "k1"
    """Estimator of the KL of the policy from the teacher, by sampled tokens; as a loss k2 or k3, for the expected
    gradient of k1 is 0."""
    divergence: Annotated[str, TAUGHT, WHOLE, Names(DIVERGENCES, options="divergence_options")] = "reverse_kl"
    """Divergence of the distributions, a term of the loss."""
    divergence_options: Annotated[dict[str, Any], TAUGHT, WHOLE] = Field(default_factory=dict)
    """Options of a divergence that takes some: beta of js, min_logprob of forward_kl, or those of one of yours."""
    top_k: Annotated[int, TAUGHT, OnlyWith("scope=top_k")] = Field(64, gt=0)
    """Tokens that are compared one by one."""
    max_divergence: Annotated[float | None, TAUGHT] = Field(None, gt=0)
    """Bound of a token's estimate or divergence, on both sides: further off, it counts as much, and as a term of the
    loss it has no gradient. null: none."""
    coef: Annotated[float, TAUGHT] = Field(1.0, ge=0)
    """Weight of the teacher."""
    policy_loss_coef: Annotated[float, TAUGHT] = Field(1.0, ge=0)
    """Weight of the rewards beside it: of their advantages, or of the policy loss; 0: the teacher alone."""
    ulysses_sequence_parallel_size: Annotated[int | None, TAUGHT, RANKS] = Field(None, gt=0)
    """null: the actor's."""
    fsdp_config: Annotated[FSDPConfig, TAUGHT] = FSDPConfig()

    def findings(self) -> Iterator[Finding]:
        if not self.teachers:
            return
        if self.scope == "sampled" and self.use == "loss" and self.estimator == "k1":
            yield Finding(
                "distillation.estimator=k1 conflicts with distillation.use=loss: the gradient of log p_S - log p_T is "
                "0 on average, whoever teaches. Set distillation.estimator=k2, or distillation.use=advantage"
            )
        served = [teacher for _, teacher in self.teachers if teacher.base_url is not None]
        if served and self.scope == "full":
            yield Finding(
                f"distillation.scope=full needs the weights of the teacher, and {served[0].name} is a server: take "
                "distillation.teacher.path, or distillation.scope=top_k"
            )
        if self.coef == 0:
            yield Finding(
                "distillation.coef=0 lets the teacher teach nothing: raise it, or leave out distillation.teacher"
            )
        own = [teacher for _, teacher in self.teachers if teacher.is_policy]
        if any(teacher.privileged is None for teacher in own):
            yield Finding(
                "distillation.teacher.path=policy is shown what the policy is shown, and so teaches nothing: set "
                "distillation.teacher.privileged, 'The answer is {ground_truth}.' say"
            )
        if own and self.scope != "sampled":
            yield Finding(
                f"distillation.scope={self.scope} conflicts with distillation.teacher.path=policy, which gives "
                "log-probs of sampled tokens. Take scope=sampled, or the path of the model that the policy begins as"
            )

    @property
    def teachers(self) -> list[tuple[str, TeacherConfig]]:
        """All teachers by the pattern of their data sources, in the order in which they are looked through."""
        alone = [("*", self.teacher)] if self.teacher.path or self.teacher.base_url else []
        return [*self.by_source.items(), *alone]

    def key_of(self, index: int) -> str:
        """Return the key of one of `teachers`."""
        return f"distillation.by_source.{[*self.by_source][index]}" if index < len(self.by_source) else TEACHER

    @property
    def is_privileged(self) -> bool:
        """Say whether some teacher sees text that the policy does not see."""
        return any(teacher.privileged is not None for _, teacher in self.teachers)

    @property
    def in_loss(self) -> bool:
        """Say whether the teacher is a term of the loss, rather than of the advantages."""
        return bool(self.teachers) and (self.scope != "sampled" or self.use == "loss")

    def teacher_of(self, data_source: str) -> int:
        """Return the index in `teachers` of the data source's teacher, -1 where it has no teacher."""
        fits = (index for index, (one, _) in enumerate(self.teachers) if fnmatch.fnmatchcase(data_source, one))
        return next(fits, -1)
