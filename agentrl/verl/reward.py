"""verl's reward managers: named ones that differ from ours, and users' own as managers of ours."""

from __future__ import annotations

import asyncio
import inspect
from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, ClassVar, TypeAlias, overload

import numpy as np
import numpy.typing as npt
from omegaconf import DictConfig, OmegaConf

from agentrl.config.registries import REWARD_MANAGERS
from agentrl.config.sections.reward import CustomRewardConfig, RewardConfig
from agentrl.errors import ConfigError, DataError
from agentrl.remote.router import ServerAccess
from agentrl.reward import GroupRewardManager, NaiveRewardManager, RewardManager, Verdict
from agentrl.reward.manager import shown_info, solution_of
from agentrl.reward.scorer import as_verdict, load_function
from agentrl.system.deadline import within
from agentrl.system.metrics import Metrics
from agentrl.system.numbers import finite, finite_numbers
from agentrl.system.threads import DaemonThreads
from agentrl.system.user_code import contract_error
from agentrl.trajectory import Trajectory, Transcript
from agentrl.trajectory.sample import Sample
from agentrl.verl.calling import ConstructorOptions, call, fitting, stand_in
from agentrl.verl.tokenizer import verl_tokenizer

if TYPE_CHECKING:
    import torch

Objects: TypeAlias = npt.NDArray[np.object_]
BATCH_ARGUMENTS = ("data_sources", "solution_strs", "ground_truths", "extra_infos")


class PrimeRewardManager(NaiveRewardManager):
    """Reward manager like `naive` that scores programs by the share of their tests that pass."""

    def __init__(
        self,
        config: RewardConfig | None = None,
        custom: CustomRewardConfig | None = None,
        *,
        beside_model: bool = False,
    ) -> None:
        """Raises ConfigError as NaiveRewardManager does."""
        config = config or RewardConfig()
        sandbox = config.sandbox_fusion.model_copy(update={"partial_credit": True})
        super().__init__(config.model_copy(update={"sandbox_fusion": sandbox}), custom, beside_model=beside_model)


class GdpoRewardManager(NaiveRewardManager):
    """Reward manager like `naive` whose scorers find the experiment's name in `extra_info`."""

    _experiment = ""

    async def start(self, run: str) -> None:
        self._experiment = run.rpartition("/")[2]
        await super().start(run)

    def extra_info(self, trajectory: Trajectory, sample: Sample) -> dict[str, object]:
        return {**super().extra_info(trajectory, sample), "experiment_name": self._experiment}


class BatchRewardManager(GroupRewardManager):
    """Calls a function of the user's with lists: the trajectories of one prompt at a time.

    compute_score(data_sources, solution_strs, ground_truths, extra_infos, **reward_kwargs) returns a score, or a dict
    with `score`, for each.
    """

    def __init__(self, config: RewardConfig, custom: CustomRewardConfig, *, beside_model: bool) -> None:
        """Raises ConfigError without such a function."""
        super().__init__(config, custom, beside_model=beside_model)
        if custom.path is None:
            raise ConfigError(
                f"reward_model.reward_manager=batch calls a function of yours with lists ({', '.join(BATCH_ARGUMENTS)}"
                "): name its file with custom_reward_function.path; the scorers by data source are reward_manager=naive"
            )
        self._function = load_function(custom.path, custom.name)
        try:
            inspect.signature(self._function).bind(**dict.fromkeys([*BATCH_ARGUMENTS, *custom.reward_kwargs]))
        except TypeError as error:
            raise ConfigError(
                f"custom_reward_function: {custom.path}: {custom.name}: {error}; reward_manager=batch calls it with "
                f"the lists {', '.join(BATCH_ARGUMENTS)}, and what reward_kwargs sets"
            ) from error
        self._threads = DaemonThreads("reward manager batch")
        self._tokenizer: Any = None

    def bind(self, tokenizer: Any) -> None:
        self._tokenizer = tokenizer

    async def score_group(self, trajectories: Sequence[Trajectory], sample: Sample) -> Sequence[Verdict]:
        given = {
            "data_sources": [sample.data_source for _ in trajectories],
            "solution_strs": [solution_of(self.config, one, sample, self._tokenizer) for one in trajectories],
            "ground_truths": [sample.ground_truth for _ in trajectories],
            "extra_infos": [shown_info(one, sample) for one in trajectories],
            **self.custom.reward_kwargs,
        }
        async with within(self.config.timeout):
            answers = await _called(self._threads, self._function, **given)
        try:
            found = len(answers) if isinstance(answers, Collection) else repr(answers)[:100]
            if not isinstance(answers, Collection) or found != len(trajectories):
                raise ValueError(f"it must return a score for each of {len(trajectories)}, found {found}")
            return [as_verdict(answer) for answer in answers]
        except (TypeError, ValueError) as error:
            raise contract_error("reward manager batch", self._function, str(error)) from error


async def _called(threads: DaemonThreads, function: Callable[..., object], /, **given: object) -> object:
    """Call a plain function in a thread, a coroutine function here."""
    if inspect.iscoroutinefunction(function):
        return await function(**given)
    return await threads.run(function, **given)


@dataclass(frozen=True, slots=True)
class DataProtoItem:
    """One row of a `DataProto`."""

    batch: dict[str, torch.Tensor]
    non_tensor_batch: dict[str, Any]
    meta_info: dict[str, object]


@dataclass(slots=True)
class DataProto:
    """Trajectories as verl's reward managers read them.

    batch: `prompts` [n, P] int64 with zeros before, `responses` and `response_mask` [n, R] int64 with zeros after,
    `input_ids`, `attention_mask` and `position_ids` [n, P + R] int64. non_tensor_batch: numpy object arrays [n].
    """

    batch: dict[str, torch.Tensor]
    non_tensor_batch: dict[str, Objects]
    meta_info: dict[str, object] = field(default_factory=dict)

    def __len__(self) -> int:
        return len(next(iter(self.batch.values())))

    def __iter__(self) -> Iterator[DataProtoItem]:
        return (self._item(index) for index in range(len(self)))

    @overload
    def __getitem__(self, index: int | np.integer) -> DataProtoItem: ...
    @overload
    def __getitem__(self, index: slice | Iterable[int]) -> DataProto: ...
    def __getitem__(self, index: int | np.integer | slice | Iterable[int]) -> DataProtoItem | DataProto:
        """Return a row, or a `DataProto` of the rows that a slice, list or array of indices names."""
        if isinstance(index, int | np.integer):
            return self._item(range(len(self))[int(index)])
        rows = list(range(len(self))[index]) if isinstance(index, slice) else [int(one) for one in index]
        return DataProto(
            {name: values[rows] for name, values in self.batch.items()},
            {name: values[rows] for name, values in self.non_tensor_batch.items()},
            self.meta_info,
        )

    def _item(self, index: int) -> DataProtoItem:
        return DataProtoItem(
            {name: values[index] for name, values in self.batch.items()},
            {name: values[index] for name, values in self.non_tensor_batch.items()},
            self.meta_info,
        )


def _last(trajectory: Trajectory) -> Transcript:
    """Return the last transcript that is not left out of training, or else the last one. Raises DataError."""
    if not trajectory.transcripts:
        raise DataError(
            f"{trajectory.uid} has no tokens, which reward managers of verl's read: score such responses by a function "
            "(custom_reward_function.path)"
        )
    return ([one for one in trajectory.transcripts if one.trained_to != 0] or trajectory.transcripts)[-1]


def data_proto(trajectories: Sequence[Trajectory], sample: Sample) -> DataProto:
    """Make the DataProto of trajectories of one prompt: of each, its last transcript."""
    import torch

    last = [_last(one) for one in trajectories]
    prompts = [one.ids[: one.prompt_length] for one in last]
    responses = [one.ids[one.prompt_length :] for one in last]
    masks = [one.mask[one.prompt_length :] for one in last]
    before, behind = max(map(len, prompts)), max(map(len, responses))

    def padded(rows: Sequence[Sequence[int]], size: int, *, left: bool) -> torch.Tensor:
        """Make [N, size] int64 of N rows, with zeros to the left or the right of each."""
        pads = [[0] * (size - len(row)) for row in rows]
        return torch.tensor([[*pad, *row] if left else [*row, *pad] for row, pad in zip(rows, pads, strict=True)])

    ids = {"prompts": padded(prompts, before, left=True), "responses": padded(responses, behind, left=False)}
    seen = [
        padded([[1] * len(row) for row in rows], size, left=left)
        for rows, size, left in ((prompts, before, True), (responses, behind, False))
    ]
    attention = torch.cat(seen, dim=1)
    batch = {
        **ids,
        "response_mask": padded(masks, behind, left=False),
        "input_ids": torch.cat([ids["prompts"], ids["responses"]], dim=1),
        "attention_mask": attention,
        "position_ids": (attention.cumsum(1) - 1).clamp(min=0),
    }
    rows = [_row(one, sample) for one in trajectories]
    columns: dict[str, Objects] = {}
    for name in rows[0]:
        columns[name] = np.empty(len(rows), dtype=object)
        columns[name][:] = [row[name] for row in rows]
    return DataProto(batch, columns)


def _row(trajectory: Trajectory, sample: Sample) -> dict[str, object]:
    info = shown_info(trajectory, sample)
    return {
        "data_source": sample.data_source,
        "ability": sample.ability,
        "reward_model": {"style": "rule", "ground_truth": sample.ground_truth},
        "extra_info": info,
        "raw_prompt": list(sample.prompt),
        "uid": str(trajectory.group),
        "__num_turns__": info["num_turns"],
        "reward_scores": info["rollout_reward_scores"],
        "turn_scores": info["turn_scores"],
        "tool_rewards": info["tool_rewards"],
    }


class AbstractRewardManager(ABC):
    """Base class of a reward manager, as verl's: called with a DataProto, it returns the rewards of its tokens.

    It is given the trajectories of one prompt at a time, and may reward the last token of each.
    """

    @abstractmethod
    def __init__(
        self,
        tokenizer: Any,
        num_examine: int,
        compute_score: Callable[..., Any] | None,
        reward_fn_key: str = "data_source",
        **kwargs: Any,
    ) -> None: ...

    @classmethod
    def adapted_class(cls) -> type[RewardManager]:
        """Return the reward manager that replaces this class."""
        return stand_in(AdaptedRewardManager, cls)

    @abstractmethod
    def __call__(self, data: DataProto, return_dict: bool = False) -> torch.Tensor | dict[str, object]:
        """Return the rewards [n, R], or {"reward_tensor": rewards, "reward_extra_info": {name: [n values]}}."""

    def _extract_reward_from_rm_scores(self, data: DataProto, return_dict: bool = False) -> None:  # noqa: B027
        """Return None: the scores of a reward model are added by the run itself."""


class RewardManagerBase(ABC):
    """Base class of a reward manager of verl's reward loop: `run_single` scores one trajectory."""

    _class_initialized: ClassVar[bool] = False

    def __init__(self, config: DictConfig, tokenizer: Any, compute_score: Callable[..., Any] | None) -> None:
        self.config, self.tokenizer, self.compute_score = config, tokenizer, compute_score
        self.loop = asyncio.get_running_loop()
        self.init_class(config, tokenizer)

    @classmethod
    def init_class(cls, config: DictConfig, tokenizer: Any) -> None:
        """Set up the state shared by all objects of the class."""
        cls._class_initialized = True

    @classmethod
    def adapted_class(cls) -> type[RewardManager]:
        """Return the reward manager that replaces this class."""
        return stand_in(AdaptedRewardLoop, cls)

    @abstractmethod
    async def run_single(self, data: DataProto) -> Mapping[str, object]:
        """Return {"reward_score": a number, "reward_extra_info": {name: value}} of a DataProto of one row."""


def register(name: str) -> Callable[[type], type]:
    """Register a reward manager of either base class (class decorator); `reward_model.reward_manager` names it.

    Raises ValueError for a taken name.
    """

    def decorate(subclass: type) -> type:
        adapted: type[RewardManager] = subclass.adapted_class()  # type: ignore[attr-defined]
        REWARD_MANAGERS.register(name)(adapted)
        return subclass

    return decorate


class _Adapted(GroupRewardManager):
    """Base of both kinds of adapted managers."""

    wrapped: ClassVar[type]

    def __init__(
        self,
        config: RewardConfig,
        custom: CustomRewardConfig,
        *,
        beside_model: bool,
        options: ConstructorOptions | None = None,
    ) -> None:
        super().__init__(config, custom, beside_model=beside_model)
        self._options = dict((options or ConstructorOptions()).model_extra or {})
        self._ready = NaiveRewardManager(config, custom, beside_model=beside_model)
        self._tokenizer: Any = None
        self._inner: object = None
        self._loop: asyncio.AbstractEventLoop | None = None
        self._threads = DaemonThreads(f"reward manager {self.wrapped.__name__}")

    def bind(self, tokenizer: Any) -> None:
        self._tokenizer = verl_tokenizer(tokenizer)

    def serve(self, servers: ServerAccess, date: str | None = None) -> None:
        self._ready.serve(servers, date)

    async def start(self, run: str) -> None:
        await self._ready.start(run)

    def take_metrics(self) -> Metrics:
        return self._ready.take_metrics()

    async def close(self) -> None:
        await self._ready.close()

    def _made(self) -> object:
        """Return the user's manager, made once in each event loop. Raises ConfigError where only texts are scored."""
        if self._loop is not (loop := asyncio.get_running_loop()):
            self._loop = loop
            self._inner = self.wrapped(**fitting(self.wrapped, self._offered(loop)))
        return self._inner

    def _offered(self, loop: asyncio.AbstractEventLoop) -> dict[str, object]:
        """Return the constructor's arguments."""
        if self._tokenizer is None:
            raise ConfigError(
                f"reward manager {self.wrapped.__name__} reads tokens, and here texts are scored: take another "
                "reward_model.reward_manager"
            )
        keys = {"reward_model": self.config, "custom_reward_function": self.custom}
        return {
            "config": OmegaConf.create({name: section.model_dump(mode="json") for name, section in keys.items()}),
            "tokenizer": self._tokenizer,
            "num_examine": 0,
            "compute_score": self._compute_score(loop),
            "reward_fn_key": "data_source",
            **self._ready.model_arguments,
            **self._options,
        }

    def _compute_score(self, loop: asyncio.AbstractEventLoop) -> Callable[..., object]:
        """Return the user's own function, or a function that asks the scorers by data source from another thread."""
        if self.custom.path is not None:
            own, kwargs = load_function(self.custom.path, self.custom.name), self.custom.reward_kwargs

            def custom_score(*arguments: object, **given: object) -> object:
                return own(*arguments, **given, **kwargs)

            return custom_score

        def compute_score(
            data_source: str, solution_str: str, ground_truth: object, extra_info: object = None, **kwargs: object
        ) -> float | dict[str, float]:
            arguments = {"data_source": data_source, "solution_str": solution_str, "ground_truth": ground_truth}
            asked = self._ready.judge({**arguments, "extra_info": extra_info or {}, "trajectory": None})
            verdict = asyncio.run_coroutine_threadsafe(asked, loop).result()
            return {"score": verdict.score, **verdict.extra} if verdict.extra else verdict.score

        return compute_score

    def _problem(self, method: Callable[..., object], problem: str) -> Exception:
        return contract_error(f"reward manager {self.wrapped.__name__}", method, problem)


class AdaptedRewardManager(_Adapted):
    """A reward manager of ours around a manager that is called with a DataProto."""

    wrapped: ClassVar[type[AbstractRewardManager]]

    async def score_group(self, trajectories: Sequence[Trajectory], sample: Sample) -> Sequence[Verdict]:
        inner, data = self._made(), data_proto(trajectories, sample)
        assert isinstance(inner, AbstractRewardManager)
        async with within(self.config.timeout):
            answer: Any = await self._threads.run(inner, data, return_dict=True)
        extra: Mapping[str, Sequence[object]] = {}
        if isinstance(answer, dict):
            extra, answer = answer.get("reward_extra_info") or {}, answer.get("reward_tensor")
        method = self.wrapped.__call__
        shape = tuple(getattr(answer, "shape", ()))
        if shape != tuple(data.batch["responses"].shape):
            raise self._problem(
                method,
                f"it must return rewards of shape {tuple(data.batch['responses'].shape)} "
                f"(reward_tensor), found {answer!r:.100}",
            )
        for name, values in extra.items():
            if len(values) != len(trajectories):
                raise self._problem(
                    method,
                    f"reward_extra_info must have a value of {name!r} for each of {len(trajectories)} trajectories, in "
                    f"their order, found {len(values)}",
                )
        rewards = answer.tolist()
        verdicts = []
        for index, (row, one) in enumerate(zip(rewards, trajectories, strict=True)):
            last = _last(one).response_length - 1
            score = finite(row[last]) if last >= 0 else 0.0
            if score is None or any(value for place, value in enumerate(row) if place != last):
                raise self._problem(
                    method,
                    "it may reward, by a finite number, the last token of a response alone: rewards of single tokens "
                    "have no place here",
                )
            given = {name: values[index] for name, values in extra.items()}
            verdicts.append(Verdict(score, finite_numbers(f"reward manager {self.wrapped.__name__}", given)))
        return verdicts


class AdaptedRewardLoop(_Adapted):
    """A reward manager of ours around one of verl's reward loop."""

    wrapped: ClassVar[type[RewardManagerBase]]
    by_group = False

    async def score_group(self, trajectories: Sequence[Trajectory], sample: Sample) -> Sequence[Verdict]:
        inner, verdicts = self._made(), []
        assert isinstance(inner, RewardManagerBase)
        for one in trajectories:
            async with within(self.config.timeout):
                answer = await call(inner.run_single, data_proto([one], sample))
            given = answer if isinstance(answer, dict) else {}
            score = finite(given.get("reward_score"))
            if score is None:
                problem = f"it must return {{'reward_score': a finite number, ...}}, found {answer!r:.100}"
                raise self._problem(self.wrapped.run_single, problem)
            extra = given.get("reward_extra_info") or {}
            verdicts.append(Verdict(score, finite_numbers(f"reward manager {self.wrapped.__name__}", extra)))
        return verdicts
