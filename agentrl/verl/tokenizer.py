"""The tokenizer that files written for verl are given."""

from __future__ import annotations

import copy
import functools
from typing import Any


@functools.lru_cache(maxsize=4)
def verl_tokenizer(tokenizer: Any) -> Any:
    """Return a copy whose `apply_chat_template` answers ids where it tokenizes, as before transformers 5.

    transformers 5 answers a dict unless it is asked for ids by `return_dict=False`.
    """
    made = copy.copy(tokenizer)
    made.apply_chat_template = functools.partial(type(tokenizer).apply_chat_template, made, return_dict=False)
    return made
