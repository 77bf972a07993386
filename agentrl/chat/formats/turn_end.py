"""The end of an assistant turn, found by comparing the text that a chat template writes after one.

A turn at the end of a conversation and the same turn before another one have their end in common. Text that only the
first has belongs to the end of the conversation (Phi: `<|endoftext|>`); text that only the second has belongs to the
next turn.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass

from agentrl.chat.codec import Codec


class UnclearEnd(ValueError):
    """Raised where no token could end a policy's turn. The message continues a sentence that begins "the template"."""


@dataclass(frozen=True, slots=True)
class TurnEnd:
    """The end of one kind of assistant turn in a template."""

    token: str
    """The control token that ends the turn; empty where the first control token of what follows does, if any."""
    gap: str
    """Text after `token` in both cases, e.g. a newline."""
    final: str
    """Text after the turn at the end of a conversation only."""
    lead: str = ""
    """Control tokens directly before `token`, which belong to the end, too."""
    sampled: str = ""
    """The token with which a policy ends the turn, where the call format names it (`CallFormat.ends`)."""


@dataclass(frozen=True, slots=True)
class Written:
    """One assistant turn as a template writes it in two conversations."""

    turn: str
    """Text from the generation prompt to the end of the content."""
    last: str
    """Text after the content when the turn is the last."""
    followed: str
    """Text after the content when another turn follows."""


def find_turn_end(
    codec: Codec, written: Written, standing_prompt: str, eos: str | None, markers: Collection[str] = ()
) -> TurnEnd:
    """Find the last control token of the common beginning of `last` and `followed` that is not inside the turn, too.

    `standing_prompt`: the first prompt as far as the template writes it without being asked for a generation prompt.
    It may end with a part of the next turn's header, or with all of it. `eos`: ends a turn after which the template
    writes nothing. `markers`: tokens around calls, which end no turn. Raises UnclearEnd when a policy could not end
    such a turn.
    """
    shared = shared_ending(codec, written.last, written.followed, standing_prompt)
    inside = set(_tokens(codec, written.turn + "".join(markers)))
    pieces = codec.split(shared)
    ends = [index for index in range(1, len(pieces), 2) if pieces[index] not in inside]
    if ends:
        # A policy stops at the first of several equal ones.
        at = begin = next(index for index in ends if pieces[index] == pieces[ends[-1]])
        while begin - 2 in ends and not pieces[begin - 1]:
            begin -= 2
        final = written.last[len(shared) :]
        return TurnEnd(pieces[at], "".join(pieces[at + 1 :]), final, "".join(pieces[begin:at]))
    # Without a token to end the turn, blanks after it are the next turn's, which a policy does not write.
    shared = shared.rstrip()
    final = written.last[len(shared) :]
    _, token, _ = cut_at_token(codec, written.followed[len(shared) :])
    if token and token in inside:
        raise UnclearEnd(
            f"ends an assistant turn with {final.strip() or 'nothing'} at the end of a conversation and with {token} "
            f"before another turn, and writes {token} inside of turns, too"
        )
    if not token and final.strip() and final.strip() != eos:
        raise UnclearEnd(
            f"ends an assistant turn with {final!r} at the end of a conversation, and with no control token before "
            f"another turn"
        )
    return TurnEnd("", "", final)


def declared_end(codec: Codec, written: Written, ends: Collection[str]) -> TurnEnd | None:
    """Find the end of a turn whose last control token at the end of a conversation is one of `ends`.

    Before another turn the first control token stands in its place, the same or another.
    """
    *said, sampled, final = ["", *codec.split(written.last)]
    lead, *following = codec.split(written.followed)
    if sampled not in ends or "".join(said) != lead or not following:
        return None
    gap = following[1][: common_length(following[1], final)]
    return TurnEnd(following[0], gap, final[len(gap) :], sampled=sampled)


def shared_ending(codec: Codec, last: str, followed: str, standing_prompt: str) -> str:
    """Common beginning of both texts, in whole control tokens, without the header of the turn that follows."""
    shared = ""
    for index, (one, other) in enumerate(zip(codec.split(last), codec.split(followed), strict=False)):
        if one != other:
            shared += "" if index % 2 else one[: common_length(one, other)]
            break
        shared += one
    # A standing generation prompt, or what stands of it, may open as a user turn does (<|START_OF_TURN_TOKEN|>).
    openers = _opening_tokens(codec, standing_prompt)
    while shared != last:
        *before, token, rest = ["", "", *codec.split(shared)]
        if token not in openers or not standing_prompt.endswith(token + rest + last[len(shared) :]):
            break
        shared = "".join(before)
    return shared


def cut_at_token(codec: Codec, text: str) -> tuple[str, str, str]:
    """Split a text that begins with a control token into (blanks, token, rest); any other into ("", "", text)."""
    lead, *others = codec.split(text)
    if not others or lead.strip():
        return "", "", text
    return lead, others[0], text[len(lead) + len(others[0]) :]


def common_length(one: Sequence[object], other: Sequence[object]) -> int:
    """Length of the common prefix of two texts or lists of ids."""
    shorter = min(len(one), len(other))
    return next((at for at, (a, b) in enumerate(zip(one, other, strict=False)) if a != b), shorter)


def _tokens(codec: Codec, text: str) -> list[str]:
    return codec.split(text)[1::2]


def _opening_tokens(codec: Codec, text: str) -> set[str]:
    """Control tokens before the first words of a text."""
    opening: set[str] = set()
    pieces = codec.split(text)
    for blank, token in zip(pieces[::2], pieces[1::2], strict=False):
        if blank.strip():
            break
        opening.add(token)
    return opening
