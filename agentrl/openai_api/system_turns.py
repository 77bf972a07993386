"""System turns in the middle of a conversation, for chat templates that do not write them there."""

from __future__ import annotations

from collections.abc import Sequence

from agentrl.chat import Chat
from agentrl.chat.message import content_text
from agentrl.trajectory import Message, Part

ROLES = ("system", "developer")


def placed_turns(messages: Sequence[Message], chat: Chat) -> tuple[list[Message], bool]:
    """Return the messages as the template of `chat` can write them, and whether that changed any.

    Where it writes system turns, they stay. Else those at the beginning are joined, and later ones become a user's
    text. The text in place of a turn does not depend on messages after a later answer, so a conversation stays its own
    beginning.
    """
    later = {message["role"] for message in messages[1:]} & {*ROLES}
    if all(chat.writes_turns_of(role) for role in later):
        return list(messages), False
    groups = list[list[Message]]()
    is_open = False
    """True: a user's message that comes next belongs to the last group, which has a reminder."""
    for message in messages:
        last = groups[-1][0]["role"] if groups else ""
        if message["role"] not in ROLES or not groups:
            if is_open and message["role"] == "user":
                groups[-1].append(message)
            else:
                groups.append([message])
                is_open = False
        elif len(groups) == 1 and last in ROLES:
            groups[-1].append(message)
        else:
            text = f"<system-reminder>\n{content_text(message['content'])}\n</system-reminder>"
            reminder: Message = {"role": "user", "content": text}
            if last == "user":
                groups[-1].append(reminder)
            else:
                groups.append([reminder])
            is_open = True
    return [group[0] if len(group) == 1 else _joined(group) for group in groups], True


def _joined(messages: Sequence[Message]) -> Message:
    """Join the contents of messages, between them a blank line."""
    texts = [content for message in messages if isinstance(content := message["content"], str)]
    if len(texts) == len(messages):
        return {**messages[0], "content": "\n\n".join(texts)}
    parts = list[Part]()
    for message in messages:
        content = message["content"]
        parts += content if isinstance(content, list) else [{"type": "text", "text": content or ""}]
    return {**messages[0], "content": parts}
