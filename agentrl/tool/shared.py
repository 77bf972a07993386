"""Tools as all trajectories of a run share them: limits, quotas, the tokenizer's truncation, failures of their code."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Literal

import pydantic

from agentrl.errors import CodeError
from agentrl.system.call_journal import OnResume
from agentrl.system.cassette import Cassette
from agentrl.system.graphemes import beginning
from agentrl.system.json_value import JSON
from agentrl.system.quota import Quota
from agentrl.system.threads import beside_loop
from agentrl.system.throttle import OncePerKey
from agentrl.system.user_code import code_error
from agentrl.tool import ErrorKind, Tool
from agentrl.tool.arguments import ArgumentCheck
from agentrl.tool.truncation import Decode, Encode, Side, Truncation, Unit
from agentrl.trajectory import ToolAnswer
from agentrl.trajectory.picture import Picture

logger = logging.getLogger(__name__)

CODE_ERRORS = (TypeError, AttributeError, NameError, ImportError, SyntaxError, NotImplementedError)
"""Errors of a tool's code rather than of the policy's arguments; an answer of another type than ToolResponse is a
TypeError."""
_ERROR_CHARACTERS = 500
"""Characters of an exception's text that are kept before tokens are counted: a library may put a whole document into
it."""
MIN_FAILED_CALLS = 8
MIN_FAILED_TRAJECTORIES = 4
"""Failed calls of a tool, and trajectories that made them, from which on the tool itself is taken to be in error.

Both are asked for because a policy must not be able to end a run by one odd call, or one trajectory full of them."""


class CallLimits(pydantic.BaseModel):
    """Config keys that every tool has."""

    model_config = pydantic.ConfigDict(extra="forbid", frozen=True, strict=True)

    type: Literal["native", "function", "mcp"] = "native"
    """Accepted as in other trainers' files; the entry's `class_name` or `function` already says it."""
    timeout: float = pydantic.Field(30.0, gt=0)
    """Seconds of one call (and of create, calc_reward and release); waiting for a free place does not count."""
    max_concurrent: int = pydantic.Field(1024, gt=0)
    """Calls of this tool that run at once, over all trajectories."""
    max_rate: float | None = pydantic.Field(None, gt=0)
    """Calls of this tool that begin in a second, on average."""
    max_response_tokens: int = pydantic.Field(1024, gt=0)
    """Tokens of one answer; longer ones are cut with a visible marker (see `max_tool_response_length`)."""
    on_error: Literal["tell", "fail"] = "tell"
    """With `tell`, an exception or time-out is the tool's answer. With `fail`, it fails the trajectory as an
    infrastructure fault. The YAML's default is `fail` for tools that ask a server, and `tell` for others."""
    on_resume: OnResume | None = None
    """How a trajectory's use of the tool comes back when the run was killed; None: as its class says."""


@dataclass(slots=True)
class Slot:
    """One tool of a tool set with its limits, the objects compiled from them, and its counts."""

    tool: Tool
    limits: CallLimits
    stateful: bool
    quota: Quota
    queued: list[float] = field(default_factory=list)
    """Seconds that each call waited for its turn."""
    faults: int = 0
    answered: bool = False
    """True once a call was answered as the tool's code meant it, an error for the model to see included."""
    broken: CodeError | None = None
    """First error of the tool's code, of a kind that no argument is to blame for."""
    failed: int = 0
    """Calls that failed by such errors since the tool last answered in a batch."""
    failed_trajectories: set[str] = field(default_factory=set)
    """Names of the trajectories that made them, up to MIN_FAILED_TRAJECTORIES."""

    @property
    def on_resume(self) -> OnResume:
        """How a trajectory's use of the tool comes back: as the YAML says, else as its class does."""
        return self.limits.on_resume or self.tool.on_resume


class SharedTools:
    """Tools of a run, as its trajectories' sessions use them."""

    def __init__(self, default_max_tokens: int, truncate_side: Side, unit: Unit) -> None:
        self.slots: dict[str, Slot] = {}
        self.checks: dict[str, ArgumentCheck] = {}
        """Checks of the arguments, by tool."""
        self.default_max_tokens = default_max_tokens
        """Limit of an error's text where no tool's own limit applies."""
        self.cassette: Cassette | None = None
        self.quota = Quota()
        """Limit of all tools of the run together."""
        self.warn: Callable[[str], None] = logger.warning
        """Function that shows the user where a tool's code failed."""
        self.on_answer: Callable[[str, str, Mapping[str, JSON], str | None], object] = lambda *_: None
        """Called with session, tool, arguments and text of each answer; the text is None where images go with it."""
        self.closing: set[asyncio.Task[list[float]]] = set()
        """Sessions that are being closed."""
        self._is_new_place = OncePerKey()
        self._side, self._unit = truncate_side, unit
        self._truncation: Truncation | None = None
        self._loop: asyncio.AbstractEventLoop | None = None
        """Event loop that the quotas belong to."""

    @property
    def names(self) -> list[str]:
        """Names of the tools, in the order of their entries."""
        return list(self.slots)

    @property
    def is_replay(self) -> bool:
        """True when answers come from a cassette, and no tool is asked."""
        return self.cassette is not None and self.cassette.mode == "replay"

    def bind(self, encode: Encode, decode: Decode, image_tokens: Callable[[Picture], int] | None = None) -> None:
        """Set the tokenizer in whose tokens answers are measured. `encode` takes special-token text as plain text.

        `image_tokens` returns the number of tokens that stand for an image; None: the model takes no images.
        """
        if self._unit == "characters":
            self._truncation = Truncation.by_characters(image_tokens, self._side)
        else:
            self._truncation = Truncation(encode, decode, image_tokens, self._side)

    @property
    def truncation(self) -> Truncation:
        """Truncation of answers to their limits. Raises RuntimeError before `bind`."""
        if self._truncation is None:
            raise RuntimeError("ToolSet.bind(encode, decode) must be called first: tool answers are measured in tokens")
        return self._truncation

    @property
    def takes_images(self) -> bool:
        """True when the model can be shown images; False before `bind`."""
        return self._truncation is not None and self._truncation.image_tokens is not None

    async def shown(self, answer: ToolAnswer, limit: int | None = None, *, images: bool = True) -> ToolAnswer:
        """Cut an answer to the part that the model is shown: at most `limit` tokens (None: the default).

        An error's text begins with its kind. Without `images` a note takes their place. Code that shows the model an
        answer calls this once.
        """
        text, limit = answer.text, limit or self.default_max_tokens
        if answer.error is not None:
            # The model reads one word for both; the record says which one it was.
            kind = ErrorKind.EXECUTION if answer.error == ErrorKind.REFUSED else answer.error
            text = f"Error ({kind}): {one_line(text)}"
            if answer.pieces:
                text, answer = f"{text}; before that it said:\n{answer.pieces}", replace(answer, pieces="")
        if not answer.images:
            text, truncated = await beside_loop(len(text), partial(self.truncation.text, text, limit))
            return replace(answer, text=text, truncated=truncated)
        fit = partial(self.truncation.with_images, text, answer.images, limit, images=images)
        text, kept, truncated = await beside_loop(len(text), fit)
        return replace(answer, text=text, truncated=truncated, images=tuple(kept))

    def report(self, slot: Slot, error: BaseException, instance_id: str) -> None:
        """Show the user, once a place, where an exception of `execute` was raised; the model sees its text.

        An exception does not say whether the code or the policy's arguments are to blame, and a policy must not be able
        to end a run. So it is the tool's error, for `check`, only where it is of a kind that arguments seldom provoke.
        """
        found = code_error(f"tool {slot.tool.name}", error, slot.tool.code)
        if isinstance(error, CODE_ERRORS):
            slot.broken = slot.broken or found
            slot.failed += 1
            if len(slot.failed_trajectories) < MIN_FAILED_TRAJECTORIES:
                slot.failed_trajectories.add(instance_id)
        if self._is_new_place(found.place or found.summary):
            self.warn(f"{found}\n  The model is told; errors that it should see are raised as agentrl.tool.ToolError")

    def check(self) -> None:
        """Raise CodeError for a tool that answers no call any more; called after each batch of trajectories.

        Such a tool has answered no call of this batch or of earlier batches since its code's first error, and enough
        calls of enough trajectories failed with such errors.
        """
        for name, slot in self.slots.items():
            if slot.answered:
                slot.answered, slot.broken, slot.failed, slot.failed_trajectories = False, None, 0, set()
            is_enough = slot.failed >= MIN_FAILED_CALLS and len(slot.failed_trajectories) >= MIN_FAILED_TRAJECTORIES
            if slot.broken is not None and is_enough:
                raise CodeError(
                    f"{slot.broken}\nThe tool {name} has answered no call any more: {slot.failed} failed for errors "
                    "of its code. Mend it and start the same command again, or go on, and let the model be told, with "
                    "actor_rollout_ref.rollout.agent.on_code_error=count",
                    slot.broken.place,
                )


def one_line(text: str) -> str:
    """Write an error's text in one line, and cut what exceeds a few hundred characters."""
    return " ".join(beginning(text, _ERROR_CHARACTERS).split()) + (" ..." if len(text) > _ERROR_CHARACTERS else "")
