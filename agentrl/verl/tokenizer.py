"""The tokenizer that files written for verl are given."""

from __future__ import annotations

import copy
import functools
from typing import TypeVar, cast

Tokenizer = TypeVar("Tokenizer")


def verl_tokenizer(tokenizer: Tokenizer) -> Tokenizer:
    """Return a copy whose `apply_chat_template` answers ids where it tokenizes, as before transformers 5.

    transformers 5 answers a dict unless it is asked for ids by `return_dict=False`. The date of its template stays.
    """
    return cast(Tokenizer, _copied(tokenizer))


@functools.lru_cache(maxsize=4)
def _copied(tokenizer: object) -> object:
    made = copy.copy(tokenizer)
    dated = getattr(vars(tokenizer).get("apply_chat_template"), "keywords", {})  # by `load_tokenizer`
    method = getattr(type(tokenizer), "apply_chat_template")  # noqa: B009
    render = functools.partial(method, made, **dated, return_dict=False)
    setattr(made, "apply_chat_template", render)  # noqa: B010
    return made
