"""Keys of `reward_model.*` and `custom_reward_function.*`."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Annotated, Any, Literal

from pydantic import Field, model_validator

from agentrl.config.installed import not_installed
from agentrl.config.registries import REWARD_MANAGERS, SCORERS
from agentrl.config.rules import Names, NamesFile, Needs, NotAmong, OnlyWith, Place, Uses, Values
from agentrl.config.section import Finding, Section
from agentrl.config.sections.rollout import ARGUMENTS, STARTED, ServerURLs, SGLangKwargs
from agentrl.config.sglang_arguments import plain_name
from agentrl.config.vllm_arguments import SET_BY as SET_BY_VLLM
from agentrl.errors import ConfigError
from agentrl.system.json_value import as_mapping
from agentrl.system.registry import options_model, read_options

SANDBOX = OnlyWith("url")
JUDGE = OnlyWith("base_url")
ENABLED = OnlyWith("enable=true")
POOL = OnlyWith("enable_resource_pool=true")
CLASSIFIES = OnlyWith("model.generative=false", because="the reward function says what a generative model is asked for")
GENERATES = OnlyWith("model.generative=true")
OWN = OnlyWith("path")


class SandboxFusionConfig(Section):
    """`reward_model.sandbox_fusion.*`: the server that runs programs which a scorer judges (data sources `code/*`,
    `apps`, `codecontests`, `codeforces`, `taco`)."""

    url: Annotated[str | None, Uses("a host")] = None
    """A server that speaks SandboxFusion's API, e.g. http://127.0.0.1:8080 for `python -m sandbox.server`."""
    max_concurrent: Annotated[int, SANDBOX] = Field(64, gt=0)
    """Programs judged at once."""
    memory_limit_mb: Annotated[int, SANDBOX] = Field(1024, gt=0)
    """MiB that a program may use, its tests included."""
    timeout: Annotated[float, SANDBOX] = Field(10.0, gt=0)
    """Running time of a program, all of its tests together; below reward_model.timeout, within which the server has to
    answer."""
    partial_credit: Annotated[bool, SANDBOX] = False
    """Score a program by the share of its tests that pass; false: 1 when all do, else 0."""


class JudgeConfig(Section):
    """`reward_model.judge.*`: a language model that scores the data sources `judge/*`, and those named here, by a whole
    number from 0 to 10; a tenth of it is the trajectory's score."""

    base_url: Annotated[
        str | None,
        OnlyWith("custom_reward_function.path=null", because="a function of your own scores everything"),
        Needs("model", "the name of the model there"),
        Uses("a host"),
    ] = None
    """An OpenAI-compatible endpoint, with its /v1."""
    model: Annotated[str | None, JUDGE] = None
    """The model's name there."""
    api_key_env: Annotated[str | None, JUDGE, Uses("an environment variable of yours")] = None
    """The environment variable that holds the endpoint's key; null: none is sent."""
    proxy: Annotated[str | None, JUDGE, Uses("a host")] = None
    """The proxy by which the endpoint is asked: http://HOST:PORT, or the environment variable that holds it; null:
    none, whatever the environment names."""
    data_sources: Annotated[list[str], JUDGE] = []
    """Further data sources that the judge scores, in place of their own scorers; * stands for anything."""
    prompt: Annotated[str | None, JUDGE, NamesFile()] = None
    """A Jinja file with the judge's instructions, made of ground_truth, extra_info, data_source and max_score; null: it
    judges how well the assistant did what it was asked, by the ground truth where there is one."""
    extra_body: Annotated[dict[str, Any], JUDGE] = Field(default_factory=dict)
    """Fields of each request, beside and over temperature 0, max_tokens 1024 and response_format with a verdict's JSON
    schema; null leaves one of these out."""
    max_concurrent: Annotated[int, JUDGE] = Field(32, gt=0)
    """Trajectories judged at once."""
    timeout: Annotated[float, JUDGE] = Field(30.0, gt=0)
    """Seconds after which a request is given up and made again; below reward_model.timeout, which counts all of
    them."""


class OverlongBufferConfig(Section):
    """`reward_model.overlong_buffer.*`: DAPO's penalty for responses that come close to their limit, L tokens
    (arXiv:2503.14476, eq. 13)."""

    enable: Annotated[bool, OnlyWith("reward_model.reward_manager=dapo"), Needs("len", "tokens")] = False
    """Add to the reward of a response of more than L - len tokens (tool answers included) a number that falls
    linearly from 0 there to -penalty_factor at L. The score, and successes by it, stay as they are."""
    len: Annotated[int | None, ENABLED] = Field(None, gt=0)
    """Tokens before the limit in which the penalty grows."""
    penalty_factor: Annotated[float, ENABLED] = Field(1.0, ge=0)
    """The largest penalty."""
    max_resp_len: Annotated[int | None, ENABLED] = Field(None, gt=0)
    """L, in tokens; null: data.max_response_length."""


class ScorerConfig(Section):
    """An entry of `reward_model.scorers`; a text is its name."""

    name: Annotated[str, Names(SCORERS)]
    kwargs: dict[str, Any] = Field(default_factory=dict)

    @model_validator(mode="before")
    @classmethod
    def named(cls, value: object) -> object:
        """Take a text for the name."""
        return {"name": value} if isinstance(value, str) else value


class NamesScorers(Names):
    """The values of the mapping are scorers; their kwargs are options of functions that have a parameter `options`."""

    def faults(self, key: str, values: Values, place: Place) -> list[str]:
        found: list[str] = []
        for pattern, value in values.mapping(key).items():
            at, entry = f"{key}.{pattern}", as_mapping(value)
            try:
                function = self.registry.get(str(entry["name"]), at)
                if options_model(function) is not None:
                    read_options(function, as_mapping(entry["kwargs"]), f"{at}.kwargs")
            except ConfigError as error:
                found.append(str(error))
        return found


class RewardConfig(Section):
    """`reward_model.*`"""

    reward_manager: Annotated[str, Names(REWARD_MANAGERS, options="reward_manager_options")] = "naive"
    """Reward manager, which scores trajectories: naive, by the scorers of their data sources; prime, the same, programs
    by the share of tests that pass; batch, a function of yours that is called with lists; gdpo, as naive, with the
    experiment's name in extra_info; dapo, as naive, with the penalty of overlong_buffer. One of your own is a subclass
    of agentrl.reward.RewardManager or GroupRewardManager, or of a base class in agentrl.verl."""
    reward_manager_options: dict[str, Any] = Field(default_factory=dict)
    """Options of the reward manager."""
    scorers: Annotated[
        dict[str, ScorerConfig],
        OnlyWith("custom_reward_function.path=null", because="a function of your own scores everything"),
        NamesScorers(SCORERS),
    ] = Field(default_factory=dict)
    """Scorers by data source (* stands for anything), before ours; the first that fits holds. A name or target, or
    {name: ..., kwargs: {...}}, e.g. {my/*: rewards.py:score}."""

    solution_str: Literal["turns", "response"] = "turns"
    """Text that scorers of the managers naive, prime, dapo, gdpo and batch are given as solution_str: turns, the text
    of the policy's turns without reasoning and calls; response, all text after the prompt as the tokenizer decodes it,
    with reasoning, calls and answers of tools and without special tokens, as verl gives it."""
    timeout: float = Field(60.0, gt=0)
    """Deadline of scoring one trajectory; waiting for one of max_concurrent places, for the sandbox's queue or for a
    math worker does not count."""
    max_concurrent: int = Field(64, gt=0)
    """Scorers that run at once."""
    success_threshold: float = 1.0
    """A trajectory whose score is at least this is a success: in success rates and pass@k, and for
    actor.success_nll_coef."""
    overlong_buffer: OverlongBufferConfig = OverlongBufferConfig()
    sandbox_fusion: SandboxFusionConfig = SandboxFusionConfig()
    judge: JudgeConfig = JudgeConfig()

    def findings(self) -> Iterator[Finding]:
        for name, url, timeout in (
            ("sandbox_fusion", self.sandbox_fusion.url, self.sandbox_fusion.timeout),
            ("judge", self.judge.base_url, self.judge.timeout),
        ):
            if url is not None and timeout >= self.timeout:
                yield Finding(
                    f"reward_model.{name}.timeout={timeout:g} must be below reward_model.timeout={self.timeout:g}, "
                    "within which the server has to answer"
                )


class ScoreModelConfig(Section):
    """`reward_model.model.*`"""

    path: str | None = None
    """A model in Hugging Face format: a sequence classification model with one label, or with generative any that
    SGLang or vLLM serves."""
    trust_remote_code: Annotated[bool, Uses("code")] = False
    """Run Python code that lies with the model."""
    generative: bool = False
    """The model has no score of its own: it runs on servers, and scorers ask it that have the parameter
    reward_router_address (docs/rewards.md)."""
    coef: Annotated[float, CLASSIFIES] = 1.0
    """Weight of its score, next to the scorer's."""
    replaces_scorers: Annotated[bool, CLASSIFIES] = False
    """The scorers are not asked, and give 0; false: they score, too."""


class RewardEngineKwargs(SGLangKwargs):
    """`reward_model.rollout.engine_kwargs.*`"""

    vllm: Annotated[
        dict[str, Any],
        OnlyWith("reward_model.rollout.name=vllm", off=({},)),
        NotAmong(SET_BY_VLLM, plain_name),
        ARGUMENTS,
    ] = Field(default_factory=dict)
    """Further arguments of the vLLM servers under vLLM's own names, e.g. enable_expert_parallel: true."""


class RewardServersConfig(Section):
    """`reward_model.rollout.*`: the servers of a generative reward model."""

    server_urls: Annotated[ServerURLs | None, Uses("hosts")] = None
    """Servers of the model that run already, of any software, e.g. [http://node1:30000]; null: servers are started,
    one for each tensor_model_parallel_size of the reward model's devices."""
    name: Annotated[Literal["sglang", "vllm"], STARTED] = "sglang"
    """Software of the servers that are started."""
    tensor_model_parallel_size: Annotated[int, STARTED] = Field(1, gt=0)
    """GPUs over which each server splits the model."""
    gpu_memory_utilization: Annotated[float, STARTED] = Field(0.5, gt=0, le=1)
    """Part of a GPU's memory that a server takes for weights and KV cache together."""
    engine_kwargs: Annotated[RewardEngineKwargs, STARTED] = RewardEngineKwargs()


class RewardModelConfig(RewardConfig):
    """`reward_model.*` of a training: the scorers, and perhaps a reward model."""

    enable: Annotated[bool, Needs("model.path", "a reward model")] = False
    """Add a reward model's score to that of the scorer, which is 0 where the data source has none; with
    model.generative, have scorers ask it."""
    model: Annotated[ScoreModelConfig, ENABLED] = ScoreModelConfig()
    rollout: Annotated[RewardServersConfig, GENERATES] = RewardServersConfig()
    max_length: Annotated[int | None, ENABLED, CLASSIFIES] = Field(None, gt=0)
    """Tokens of a conversation for the reward model, of which the last are kept; null: as many as it can read."""
    forward_max_token_len_per_gpu: Annotated[int, ENABLED, CLASSIFIES] = Field(16384, gt=0)
    """Tokens of the reward model's micro-batches; changes memory, never the result."""
    enable_resource_pool: Annotated[bool, ENABLED] = False
    """Devices of its own for the reward model; false: those of the trainer."""
    nnodes: Annotated[int, POOL] = Field(1, gt=0)
    """Machines of these."""
    n_gpus_per_node: Annotated[int, POOL] = Field(1, gt=0)
    """Devices on each of them."""

    def findings(self) -> Iterator[Finding]:
        yield from super().findings()
        if self.starts_servers:
            key = "rollout.name" if self.rollout.name == "vllm" else "model.generative"
            value = "vllm" if self.rollout.name == "vllm" else "true"
            yield from not_installed(self.rollout.name, f"reward_model.{key}={value}", "reward_model.rollout")

    @property
    def classifies(self) -> bool:
        """Say whether a sequence classification model scores, too."""
        return self.enable and not self.model.generative

    @property
    def generates(self) -> bool:
        """Say whether scorers ask a generative reward model."""
        return self.enable and self.model.generative

    @property
    def starts_servers(self) -> bool:
        """Say whether servers of a generative reward model are started."""
        return self.generates and self.rollout.server_urls is None


class CustomRewardConfig(Section):
    """`custom_reward_function.*`"""

    path: Annotated[str | None, NamesFile(), Uses("code")] = None
    """A Python file; its function replaces the scorers by data source."""
    name: Annotated[str, OWN] = "compute_score"
    """The function's name in that file."""
    reward_kwargs: Annotated[dict[str, Any], OWN] = Field(default_factory=dict)
    """Further arguments of the function, by name."""
