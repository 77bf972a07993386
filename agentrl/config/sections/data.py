"""Keys of `data.*`."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from agentrl.config.rules import OnlyWith
from agentrl.config.section import Section

VALIDATION = OnlyWith("data.val_files")


class RowsConfig(Section):
    """`data.*`: how prompts are read, and how long they and what follows may be."""

    prompt_key: str = "prompt"
    """The column that holds the messages."""
    image_key: str | None = "images"
    """The column, where there is one, with a row's images: in a message <image> stands for the next of them. null: no
    images are read."""
    max_prompt_length: int = Field(512, gt=0)
    """Tokens of the first rendered prompt, tools included."""
    max_response_length: int = Field(512, gt=0)
    """Tokens after the first prompt, over all turns, tool answers included."""
    filter_overlong_prompts: bool = True
    """True: leave out rows whose prompt is too long, and count them; False: refuse the data set, naming the first."""
    on_bad_row: Literal["error", "skip"] = "error"
    """What to do with a row that does not fit the schema: stop and name it, or skip and count it."""


class DataConfig(RowsConfig):
    """`data.*` of a training."""

    train_files: str | list[str] = "quickstart"
    """Parquet files or glob patterns; `quickstart` means the made-up tasks of `python -m data_prep.quickstart`."""
    val_files: str | list[str] | None = None
    """The same for validation; null: no validation. With train_files=quickstart the default is `quickstart`, too."""
    train_batch_size: int = Field(32, gt=0)
    """Prompts a step."""
    val_batch_size: Annotated[int | None, VALIDATION] = Field(None, gt=0)
    """Prompts validated at once; null: all."""
    train_max_samples: int | None = Field(None, gt=0)
    """Use only the first so many rows."""
    val_max_samples: Annotated[int | None, VALIDATION] = Field(None, gt=0)
    """The same for validation."""
    shuffle: bool = True
    seed: int = Field(1, ge=0)
    """Seed of the data order."""
