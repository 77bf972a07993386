"""The text of a row that its privileged teacher is shown, and the policy is not."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Sequence

from agentrl.config import Config
from agentrl.config.sections.rollouts import RolloutsConfig
from agentrl.trajectory import Message
from agentrl.trajectory.sample import Sample

TeacherContext = Callable[[Sample], str | None]
"""Makes the text that the row's teacher is shown; None where it is shown nothing."""
_NAME = re.compile(r"\{([A-Za-z_]\w*)\}")


def load_teacher_context(config: RolloutsConfig) -> TeacherContext | None:
    """Make the texts of `distillation.teacher.privileged`; None where no teacher is privileged."""
    keys = config.distillation if isinstance(config, Config) else None
    if keys is None or not keys.is_privileged:
        return None

    def text_for(sample: Sample) -> str | None:
        index = keys.teacher_of(sample.data_source)
        template = keys.teachers[index][1].privileged if index >= 0 else None
        return None if template is None else filled(template, sample)

    return text_for


def filled(template: str, sample: Sample) -> str | None:
    """Put the row's values into the braces of `template`; None where it lacks one, or one is empty.

    `{ground_truth}` is the row's, any other name a key of its extra_info. Braces around anything but a name stay.
    """
    values: dict[str, object] = {**sample.extra_info, "ground_truth": sample.ground_truth}
    if any(values.get(name) in (None, "", [], {}) for name in _NAME.findall(template)):
        return None
    return _NAME.sub(lambda match: _written(values[match[1]]), template)


def _written(value: object) -> str:
    return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False, default=str)


def with_teacher_context(messages: Sequence[Message], text: str) -> list[Message]:
    """Add `text`, after a blank line, to the last message of a user; without one, as a message of a user's."""
    changed = list(messages)
    for place in reversed(range(len(changed))):
        message = changed[place]
        if message["role"] == "user" and isinstance(message["content"], str):
            changed[place] = {**message, "content": f"{message['content']}\n\n{text}"}
            return changed
    return [*changed, {"role": "user", "content": text}]
