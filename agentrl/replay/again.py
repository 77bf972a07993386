"""Sampling a recorded trajectory again, turn by turn from its own tokens, and comparing."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace

import numpy as np

from agentrl.chat import Chat
from agentrl.engines.contract import RolloutEngine, SamplingParams
from agentrl.errors import DataError
from agentrl.offline.recorded import prompt_of
from agentrl.replay.recorded import Recorded, Stretch
from agentrl.trajectory import Message, PlacedImage, Trajectory, Transcript, Turn
from agentrl.trajectory.picture import Picture


@dataclass(frozen=True, slots=True)
class Comparison:
    """Tokens of one turn and version, sampled again."""

    stretch: Stretch
    first_difference: int | None
    """Place in the transcript of the first other token; None: all are the same."""
    recorded: str = ""
    """The token there, decoded."""
    sampled: str = ""
    same_logprobs: int = 0
    """Log-probs that are equal bit for bit, up to the first other token."""
    logprob_gap: float = 0.0
    """Largest difference of the others."""
    ids: Sequence[int] = field(default=(), repr=False)
    """All that was sampled, with its log-probs."""
    logprobs: Sequence[float] = field(default=(), repr=False)


def placed_images(recorded: Recorded, chat: Chat) -> list[list[PlacedImage]]:
    """Prepare the images of each transcript from their files. Raises DataError where one is missing or damaged."""
    found = []
    for places in recorded.images:
        mine = []
        for start, path in places:
            if chat.vision is None or not path.is_file():
                raise DataError(f"{recorded.trajectory.uid}: want its image {path}, which is not there (any more)")
            mine.append(PlacedImage(start, chat.vision.image(Picture(path.read_bytes()))))
        found.append(mine)
    return found


async def compare(
    recorded: Recorded, stretch: Stretch, images: list[PlacedImage], engine: RolloutEngine, chat: Chat
) -> Comparison:
    """Sample a stretch again, from the recorded tokens before it. images: of its transcript."""
    transcript = recorded.trajectory.transcripts[stretch.transcript]
    ids = transcript.ids[stretch.start : stretch.end]
    params = params_at(recorded, stretch.seed, len(ids), chat)
    name = f"replay {stretch.turn} {stretch.start}"
    before = [one for one in images if one.start < stretch.start]
    generated = await engine.generate(transcript.ids[: stretch.start], params, name, before)
    await engine.release(name)
    pairs = zip(ids, generated.ids, strict=False)
    place = next((place for place, (one, other) in enumerate(pairs) if one != other), None)
    if place is None and len(generated.ids) != len(ids):
        place = min(len(ids), len(generated.ids))
    same = len(ids) if place is None else place
    logprobs = np.array(transcript.logprobs[stretch.start :][:same], np.float32)
    gaps = np.abs(logprobs - np.array(generated.logprobs[:same], np.float32))
    return Comparison(
        stretch,
        first_difference=None if place is None else stretch.start + place,
        recorded="" if place is None else chat.decode(ids[place : place + 1]),
        sampled="" if place is None else chat.decode(generated.ids[place : place + 1]),
        same_logprobs=int((gaps == 0).sum()),
        logprob_gap=float(gaps.max(initial=0.0)),
        ids=generated.ids,
        logprobs=generated.logprobs,
    )


def params_at(recorded: Recorded, seed: int, most: int, chat: Chat) -> SamplingParams:
    """Return the parameters of a turn of at most so many tokens, with the seed of its request."""
    return replace(
        recorded.params, max_new_tokens=most, stop_token_ids=chat.stop_token_ids + chat.media_token_ids, seed=seed
    )


def beginning(transcript: Transcript, end: int, images: Sequence[PlacedImage]) -> Transcript:
    """Copy the first `end` tokens of a transcript.

    images: all images of the transcript, which a record has without pixels.
    """
    return Transcript(
        ids=transcript.ids[:end],
        mask=transcript.mask[:end],
        logprobs=transcript.logprobs[:end],
        versions=[replace(span, end=min(span.end, end)) for span in transcript.versions if span.start < end],
        prompt_length=min(transcript.prompt_length, end),
        images=[one for one in images if one.start < end],
        policy=transcript.policy,
    )


def as_trajectory(recorded: Recorded, compared: Sequence[Comparison], chat: Chat) -> Trajectory:
    """Make the trajectory as it was sampled again: up to its first other turn, as calls and answers would follow it.

    compared: all stretches, in order.
    """
    old, images = recorded.trajectory, placed_images(recorded, chat)
    transcripts = [beginning(one, len(one), images[number]) for number, one in enumerate(old.transcripts)]
    turns = list(old.turns)
    for one in compared:
        stretch, same = one.stretch, transcripts[one.stretch.transcript]
        if one.first_difference is None:
            same.logprobs[stretch.start : stretch.end] = one.logprobs
            continue
        other = transcripts[stretch.transcript] = beginning(same, stretch.start, same.images)
        other.append_sampled(one.ids, one.logprobs, stretch.version)
        turn = turns[stretch.turn]
        text = chat.parse(other.ids[turn.start :]).text
        turns[stretch.turn :] = [replace(turn, text=text, end=len(other), calls=[], finish_reason=None)]
        break
    return unscored(old, transcripts, turns)


def unscored(old: Trajectory, transcripts: list[Transcript], turns: list[Turn]) -> Trajectory:
    """Return `old` with other tokens and turns, and so without its measurements."""
    messages = [*prompt_of(old), *(Message(role=turn.role, content=turn.text) for turn in turns)]
    return Trajectory(
        uid=old.uid,
        group=old.group,
        data_source=old.data_source,
        agent_name=old.agent_name,
        transcripts=transcripts,
        turns=turns,
        messages=messages,
        status=old.status,
        ground_truth=old.ground_truth,
    )
