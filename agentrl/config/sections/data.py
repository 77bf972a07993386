"""Keys of `data.*`."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import Field

from agentrl.config.registries import SAMPLERS
from agentrl.config.rules import Names, OnlyWith, Place, Rule, Uses, Values
from agentrl.config.section import Section
from agentrl.errors import ConfigError
from agentrl.system.registry import read_options
from agentrl.system.targets import load_target

Truncation = Literal["error", "left", "right", "middle"]
VALIDATION = OnlyWith("data.val_files")


class SamplerConfig(Section):
    """`data.sampler.*`"""

    name: Annotated[str | None, Names(SAMPLERS, options="options")] = None
    """The order of the rows; null: shuffled or sequential, as data.shuffle says. One of your own is a subclass of
    agentrl.data.sampler.Sampler."""
    options: Annotated[dict[str, Any], OnlyWith("name")] = Field(default_factory=dict)
    """Options of the sampler."""


class NamesDataset(Rule):
    """The value names, alone or with `name`, a class that takes `options`."""

    looks_up = True

    def faults(self, key: str, values: Values, place: Place) -> list[str]:
        options_key = f"{place.section}.options"
        try:
            for path in values.names(key):
                name = next(iter(values.names(f"{place.section}.name")), None)
                found = load_target(CustomDatasetConfig(path=path, name=name).target, key)
                read_options(found, values.mapping(options_key), options_key)
        except ConfigError as error:
            return [str(error)]
        return []


class CustomDatasetConfig(Section):
    """`data.custom_cls.*`"""

    path: Annotated[str | None, NamesDataset(), Uses("code")] = None
    """A data set class of your own (see agentrl.data.own.Samples), which is made with the names under train_files or
    val_files: path/to/file.py:Class, package.module:Class, or a Python file whose class `name` names."""
    name: Annotated[str | None, OnlyWith("path")] = None
    """The class, where path is only a file."""
    options: Annotated[dict[str, Any], OnlyWith("path")] = Field(default_factory=dict)
    """Options of the class."""

    @property
    def target(self) -> str:
        """`path/to/file.py:Class` or `package.module:Class`; only with path."""
        return f"{self.path}:{self.name}" if self.name is not None else str(self.path)


class RowsConfig(Section):
    """`data.*`: reading of prompts, and lengths of prompts and responses."""

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
    """True: leave out rows whose prompt is too long, and count them; False: see truncation."""
    truncation: Annotated[Truncation, OnlyWith("filter_overlong_prompts=false")] = "error"
    """Action for a prompt that is too long: error refuses the data set, naming the first; left, right and middle cut
    its tokens there, down to max_prompt_length. One with images is refused."""
    on_bad_row: Literal["error", "skip"] = "error"
    """Action for a row that does not fit the schema: stop and name it, or skip and count it."""


class DataConfig(RowsConfig):
    """`data.*` of a training."""

    train_files: str | list[str] = "quickstart"
    """Parquet files, JSON lines, folders, glob patterns or Hugging Face data sets (hf:owner/name:split; docs/data.md);
    `quickstart` means the made-up tasks of `python -m data_prep.quickstart`."""
    val_files: str | list[str] | None = None
    """The same for validation; null: no validation. With train_files=quickstart the default is `quickstart`, too."""
    train_batch_size: int = Field(32, gt=0)
    """Prompts a step."""
    gen_batch_size: Annotated[int | None, OnlyWith("algorithm.filter_groups.refill=true")] = Field(None, gt=0)
    """Prompts of a generation batch, of which a step draws as many as it needs; null: train_batch_size."""
    val_batch_size: Annotated[int | None, VALIDATION] = Field(None, gt=0)
    """Prompts validated at once; null: all."""
    train_max_samples: int | None = Field(None, gt=0)
    """Use only the first so many rows."""
    val_max_samples: Annotated[int | None, VALIDATION] = Field(None, gt=0)
    """The same for validation."""
    custom_cls: CustomDatasetConfig = CustomDatasetConfig()
    sampler: SamplerConfig = SamplerConfig()
    shuffle: Annotated[bool, OnlyWith("sampler.name=null")] = True
    """A new random order in each epoch; false: the order of the files."""
    seed: int = Field(1, ge=0)
    """Seed of the data order."""

    @property
    def draw_size(self) -> int:
        """Prompts that the loader gives at once."""
        return self.gen_batch_size or self.train_batch_size
