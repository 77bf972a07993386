"""verl's contract of a data set class (`data.custom_cls`), and the samples of ours that a class of it becomes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, ClassVar

from omegaconf import DictConfig, OmegaConf

from agentrl.chat.load import load_tokenizer
from agentrl.config.sections.rollouts import RolloutsConfig
from agentrl.data.messages import without_nulls
from agentrl.data.rows import Columns, with_images
from agentrl.data.unread import UnreadColumns
from agentrl.errors import ConfigError, install_extra
from agentrl.system.user_code import contract_error, user_code
from agentrl.trajectory.sample import Sample
from agentrl.verl.agent_loop import as_verl_config
from agentrl.verl.calling import fitting, stand_in
from agentrl.verl.tokenizer import verl_tokenizer

COLUMNS = Columns(prompt="raw_prompt")
"""Fields of a row that are read."""
MADE = (
    *("prompt", "index", "raw_prompt_ids", "full_prompts", "input_ids", "attention_mask"),
    *("position_ids", "multi_modal_data", "multi_modal_inputs", "dummy_tensor"),
)
"""Fields that hold messages and images, or that verl's classes make of them."""


class RLHFDataset:
    """Base class of a data set, as verl's: rows of parquet and JSON files, in a `datasets.Dataset`, `dataframe`.

    A subclass changes `_read_files_and_tokenize`, `maybe_filter_out_long_prompts`, `_build_messages` or `__getitem__`.
    Rows whose prompt is too long are left out (or refused) after it, as data.filter_overlong_prompts says; `processor`
    is None.
    """

    def __init__(
        self,
        data_files: str | Sequence[str],
        tokenizer: Any,
        config: DictConfig,
        processor: Any = None,
        max_samples: int = -1,
    ) -> None:
        self.data_files = [data_files] if isinstance(data_files, str) else list(data_files)
        self.original_data_files = list(self.data_files)
        self.tokenizer, self.processor, self.config, self.max_samples = tokenizer, processor, config, max_samples
        self.prompt_key: str = config.get("prompt_key", "prompt")
        self.image_key: str = config.get("image_key") or "images"
        self.max_prompt_length: int = config.get("max_prompt_length", 1024)
        self.filter_overlong_prompts: bool = config.get("filter_overlong_prompts", True)
        self.apply_chat_template_kwargs = config.get("apply_chat_template_kwargs", {})
        self.dataframe: Any = None
        self._download()
        self._read_files_and_tokenize()

    @classmethod
    def adapted_class(cls) -> type[AdaptedSamples]:
        """Return our class of samples that replaces this class."""
        return stand_in(AdaptedSamples, cls)

    def _download(self, use_origin_parquet: bool = False) -> None:
        """Do nothing: files are read from their own place."""

    def _read_files_and_tokenize(self) -> None:
        """Read the files into `dataframe`."""
        try:
            import datasets
        except ImportError as error:
            raise ConfigError(f"verl's data set classes need a package: {install_extra('hub')}") from error
        kinds = ["parquet" if name.endswith(".parquet") else "json" for name in self.data_files]
        parts = [
            datasets.load_dataset(kind, data_files=name)["train"]
            for kind, name in zip(kinds, self.data_files, strict=True)
        ]
        self.dataframe = datasets.concatenate_datasets(parts)
        if 0 < self.max_samples < len(self.dataframe):
            self.dataframe = self.dataframe.select(range(self.max_samples))
        self.dataframe = self.maybe_filter_out_long_prompts(self.dataframe)

    def maybe_filter_out_long_prompts(self, dataframe: Any = None) -> Any:
        """Return the rows as they are: long prompts are found after the data set."""
        return dataframe

    def __len__(self) -> int:
        return len(self.dataframe)

    def _build_messages(self, example: dict[str, Any]) -> list[dict[str, Any]]:
        """Return the row's messages; in their texts <image> stands for the next of its images."""
        messages: list[dict[str, Any]] = example[self.prompt_key]
        return messages

    def __getitem__(self, item: int) -> dict[str, Any]:
        row = dict(self.dataframe[item])
        row["raw_prompt"] = self._build_messages(row)
        extra = row["extra_info"] = dict(row.get("extra_info") or {})
        row["index"] = extra.get("index", 0)
        for name in ("tools_kwargs", "interaction_kwargs"):
            row[name] = row.get(name) or extra.get(name) or {}
        return row


class AdaptedSamples:
    """Samples of a data set class of verl's contract; made with file names, then given the run's config."""

    wrapped: ClassVar[type[RLHFDataset]]

    def __init__(self, files: Sequence[str]) -> None:
        self._files = list(files)
        self._rows: RLHFDataset | None = None
        self._image_key: str | None = None
        self._unread = UnreadColumns(())

    def configure(self, config: RolloutsConfig, max_samples: int | None) -> None:
        """Make the user's data set with verl's arguments. Raises ConfigError."""
        model = config.actor_rollout_ref.model
        tokenizer = load_tokenizer(
            model.path,
            model.chat_template,
            trust_remote_code=model.trust_remote_code,
            date=model.chat_template_date,
        )
        offered = {
            "data_files": OmegaConf.create(self._files),
            "tokenizer": verl_tokenizer(tokenizer),
            "config": as_verl_config(config).data,
            "processor": None,
            "max_samples": -1 if max_samples is None else max_samples,
        }
        self._image_key = config.data.image_key
        self._unread = UnreadColumns({*COLUMNS.names, *MADE, config.data.prompt_key, str(self._image_key)})
        with user_code(self._what, self.wrapped):
            self._rows = self.wrapped(**fitting(self.wrapped, offered))

    def __len__(self) -> int:
        return len(self._made)

    def __getitem__(self, index: int) -> Sample:
        """Raises DataError for a row that does not fit, and IndexError past the end."""
        if not 0 <= index < len(self):
            raise IndexError(index)
        with user_code(self._what, self.wrapped.__getitem__):
            row: object = self._made[index]
        if not isinstance(row, Mapping):
            raise contract_error(self._what, self.wrapped.__getitem__, f"a row must be a mapping, found {row!r:.200}")
        self._unread.note(map(str, row))
        return sample_of(row, self._image_key)

    @property
    def notes(self) -> dict[str, str]:
        """The columns of the rows so far that are not read."""
        told = self._unread.told()
        return {self._what: told} if told else {}

    @property
    def _what(self) -> str:
        return f"data set {self.wrapped.__name__}"

    @property
    def _made(self) -> RLHFDataset:
        assert self._rows is not None, "configure comes first"
        return self._rows


def sample_of(row: Mapping[str, Any], image_key: str | None) -> Sample:
    """Make a sample of a row as verl's data sets give it. Raises DataError."""
    messages, pictures = _without_pictures(row.get("raw_prompt", row.get("prompt")))
    images = pictures or (row.get(image_key) if image_key is not None else None) or []
    fields = {**row, "raw_prompt": without_nulls(messages), "images": [*images]}
    sample, images = COLUMNS.sample(fields, COLUMNS.messages(fields))
    return replace(sample, prompt=with_images(sample.prompt, images, Path()))


def _without_pictures(messages: object) -> tuple[object, list[object]]:
    """Put <image> where a message's contents hold a picture; return the messages, and the pictures in their order."""
    if not isinstance(messages, list):
        return messages, []
    pictures: list[object] = []
    plain = []
    for message in messages:
        content = message.get("content") if isinstance(message, Mapping) else None
        if isinstance(content, list):
            texts = []
            for part in content:
                if isinstance(part, Mapping) and part.get("type") == "image":
                    pictures.append(part.get("image", part))
                    texts.append("<image>")
                else:
                    texts.append(str(part.get("text", "")) if isinstance(part, Mapping) else str(part))
            message = {**message, "content": "".join(texts)}
        plain.append(message)
    return plain, pictures
