"""The tokenizer that files written for verl are given."""

from __future__ import annotations

import copy
import functools
from typing import TypeVar, cast

Tokenizer = TypeVar("Tokenizer")


def verl_tokenizer(tokenizer: Tokenizer) -> Tokenizer:
    """Return a copy whose `apply_chat_template` answers ids where it tokenizes, as before transformers 5.

    transformers 5 answers a dict unless it is asked for ids by `return_dict=False`.
    """
    return cast(Tokenizer, _copied(tokenizer))


@functools.lru_cache(maxsize=4)
def _copied(tokenizer: object) -> object:
    made = copy.copy(tokenizer)
    render = functools.partial(getattr(type(tokenizer), "apply_chat_template"), made, return_dict=False)  # noqa: B009
    setattr(made, "apply_chat_template", render)  # noqa: B010
    return made
