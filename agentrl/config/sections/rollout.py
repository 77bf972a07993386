"""The keys of `actor_rollout_ref.rollout.*`: sampling, the engine, the agent loops. Importable without torch."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, Any, Literal
from urllib.parse import urlsplit

from pydantic import AfterValidator, BeforeValidator, Field

from agentrl.config.formats import unknown_format
from agentrl.config.installed import not_installed
from agentrl.config.registries import (
    AGENT_STARTERS,
    CALL_FORMATS,
    CONTAINERS,
    ENGINES,
    HARNESSES,
    STOP_CONDITIONS,
    TURN_OBSERVERS,
    WEIGHT_TRANSPORTS,
)
from agentrl.config.rules import (
    ConflictsWith,
    Names,
    NamesEach,
    NamesFile,
    Needs,
    NotAmong,
    OnlyWith,
    Place,
    Uses,
    UsesFile,
    Values,
)
from agentrl.config.section import Finding, Section
from agentrl.config.sections.parallel import DEVICE, MICRO_BATCH, MicroBatch
from agentrl.config.sections.roles import HoldsRoles, RoleConfig
from agentrl.config.sglang_arguments import SET_BY, plain_name
from agentrl.config.vllm_arguments import SET_BY as SET_BY_VLLM
from agentrl.system.config_files import our_folders
from agentrl.system.json_value import JSON
from agentrl.system.targets import is_target

TOOLS = OnlyWith("tool_config_path")
ANSWERS = OnlyWith("tool_config_path", "agent.agent_loop_config_path")
"""For keys that loops read: those of an environment and of your own, too, which need no file of tools."""
SAMPLED = OnlyWith("do_sample=true")
SERVERS = OnlyWith("name=sglang or vllm or mixed")
VLLM = OnlyWith("actor_rollout_ref.rollout.name=vllm", off=({},))
STARTED = OnlyWith("server_urls=null", because="servers that run already have the arguments they were started with")
CODE = UsesFile("a file that names code")
VARIABLES = Uses("environment variables of yours")
ARGUMENTS = Uses("arguments of a server's command")


def is_server_url(url: str) -> bool:
    """Say whether a text is a URL of a server: http(s), a host, perhaps a port and a path."""
    try:
        parts = urlsplit(url)
        return parts.scheme in ("http", "https") and bool(parts.hostname and parts.port != 0) and "?" not in url
    except ValueError:  # a port that is no number, or an address in brackets that is none
        return False


def server_urls(urls: list[str]) -> list[str]:
    """Strip slashes at the end. Raises ValueError for an empty list, a text that is no URL, or a URL twice."""
    urls = [url.rstrip("/") for url in urls]
    if not urls or not all(map(is_server_url, urls)):
        raise ValueError("URLs such as http://host:30000, at least one")
    if len(set(urls)) < len(urls):
        raise ValueError("each URL once")
    return urls


def callable_target(target: str) -> str:
    """Check that a text names a function. Raises ValueError."""
    if not is_target(target):
        raise ValueError("package.module:function or path/to/file.py:function")
    return target


ServerURLs = Annotated[
    list[str],
    BeforeValidator(lambda value: [value] if isinstance(value, str) else value),
    AfterValidator(server_urls),
]


class NamesFormat(Names):
    """The value names a chat format. Whether the tokenizer fits it is judged with the tokenizer, later.

    So is a name that no format of ours has, where files of the user's may register it.
    """

    def text(self, place: Place) -> str:
        return ""

    def target(self, name: str) -> str:
        return name.removeprefix("template:")

    def faults(self, key: str, values: Values, place: Place) -> list[str]:
        name = str(values.all[key])
        if is_target(target := name.removeprefix("template:")):
            return self.faults_of(target, key, {}, "")
        paths = (values.all.get(f"actor_rollout_ref.rollout.{name}") for name in REGISTERING)
        if any(isinstance(path, str) and not is_ours(path) for path in paths):
            return []
        fault = unknown_format(name, CALL_FORMATS.names())
        return [] if fault is None else [fault]


REGISTERING = ("multi_turn.tool_config_path", "multi_turn.interaction_config_path", "agent.agent_loop_config_path")
"""YAML whose files may register a format; they are loaded before the tokenizer is."""


def is_ours(path: str) -> bool:
    """Say whether a YAML file is one of this package's."""
    return any((found := folder / path).is_relative_to(folder) and found.is_file() for folder in our_folders())


NAMES_FORMAT = NamesFormat(CALL_FORMATS)


COMPACTS = OnlyWith("threshold")


class CompactionConfig(Section):
    """`actor_rollout_ref.rollout.multi_turn.compaction.*`: continue from a summary (docs/interactions.md)."""

    threshold: float | None = Field(None, gt=0, le=1)
    """Share of the window at which the policy is asked for a summary, from which a new transcript goes on; null: a
    trajectory ends at the end of its window. For tool_agent, react and loops like it, and environments without
    roles."""
    prompt_file: Annotated[str | None, COMPACTS, NamesFile()] = None
    """File with the text that asks for the summary; null: a text of ours."""
    keep_turns: Annotated[int, COMPACTS] = Field(1, ge=0)
    """Last turns, each with its answers, that follow the summary as they were. Fewer where more do not fit."""
    max_summary_tokens: Annotated[int, COMPACTS] = Field(512, gt=0)
    """Tokens of a summary. They and those of the request stay free in every window. A longer one ends the
    trajectory."""
    train_summary: Annotated[bool, COMPACTS] = True
    """Train on the summary's tokens, as on all that the policy sampled."""


class MultiTurnConfig(Section):
    """`actor_rollout_ref.rollout.multi_turn.*`"""

    tool_config_path: Annotated[str | None, NamesFile(), CODE] = None
    """YAML of the tools, relative to the working directory, else to configs/. The quickstart data brings its own."""
    tool_options: Annotated[dict[str, dict[str, Any]], TOOLS, Uses("values of tools, e.g. commands and hosts")] = Field(
        default_factory=dict
    )
    """Keys of the tools' `config` in place of those in their YAML, by the tool's name, e.g. {search: {topk: 5}}."""
    interaction_config_path: Annotated[str | None, NamesFile(), CODE] = None
    """YAML of the interactions."""
    format: Annotated[str, NAMES_FORMAT] = "auto"
    """Chat renderer and tool-call parser: auto (by model), a family of the renderers package, tool calls for the
    tokenizer's own template (a name in docs/models.md#tool-call-formats, e.g. hermes, or none), or a format of your own
    as package.module:object, path/to/file.py:object, or by the name that a file of your tools, interactions or loops
    registers."""
    max_assistant_turns: int = Field(8, gt=0)
    """Assistant turns after which a trajectory ends."""
    max_user_turns: Annotated[int, OnlyWith("interaction_config_path", "agent.agent_loop_config_path")] = Field(8, ge=0)
    """Answers of an interaction that the policy is shown; the next one ends the trajectory."""
    max_tokens_per_turn: int | None = Field(None, gt=0)
    """Cap on one assistant turn; null: only the response budget."""
    max_tool_response_length: Annotated[int, ANSWERS] = Field(1024, gt=0)
    """Tokens of one answer of a tool, or of one observation of an environment. Longer ones are cut between two
    characters, with a visible marker that counts: the number of tokens that are missing, or, where that would take more
    than half, [...] or a part of it."""
    tool_response_unit: Annotated[Literal["tokens", "characters"], ANSWERS] = "tokens"
    """Unit of max_tool_response_length, and of max_response_tokens in the YAML of tools. With characters images are not
    counted."""
    tool_response_truncate_side: Annotated[Literal["left", "right", "middle"], ANSWERS] = "middle"
    """Which part of a long answer is cut away."""
    max_parallel_calls: Annotated[int, ANSWERS] = Field(16, gt=0)
    """Tool calls in one message that are run; the rest get an error as their answer."""
    max_malformed: int = Field(4, ge=0)
    """Malformed calls after which the trajectory ends."""
    stop_conditions: Annotated[
        list[str],
        BeforeValidator(lambda value: [value] if isinstance(value, str) else value),
        Names(STOP_CONDITIONS),
    ] = []
    """Further conditions that end a trajectory of any loop. They are asked after each assistant turn, and again when
    its calls are answered. answer_tag: the turn has </answer>. One of yours is a function of the episode and the reply
    that returns a Status or None (docs/extending.md)."""
    compaction: CompactionConfig = CompactionConfig()
    force_final_answer: bool = True
    """At the turn limit with calls answered: one last generation, whose calls are not run."""
    tool_timeout: Annotated[
        float, OnlyWith("tool_config_path", "interaction_config_path", "agent.agent_loop_config_path")
    ] = Field(30.0, gt=0)
    """Deadline of one tool call, unless the tool's own YAML sets another, and of one call of an interaction or an
    environment."""


REMOTE = OnlyWith("start=remote")


def chosen_transcripts(train: str | list[str]) -> str | list[str]:
    """Check a value of `openai_proxy.train`. Raises ValueError."""
    if isinstance(train, str) and train not in ("auto", "all", "main") and not is_target(train):
        raise ValueError("auto, all, main, a list of models, package.module:function or path/to/file.py:function")
    if isinstance(train, list) and not (train and all(train)):
        raise ValueError("at least one model, each with a name")
    return train


class UsesFunction(Uses):
    """The value may name a function of the user's."""

    def __init__(self) -> None:
        super().__init__("code")

    def uses(self, value: JSON, home: Path) -> str:
        return super().uses(value, home) if isinstance(value, str) and ":" in value else ""


CONTAINER = OnlyWith("openai_proxy.start=container")


def absolute_folder(path: str) -> str:
    """Check the path of a folder in a container. Raises ValueError."""
    if not path.startswith("/") or path == "/" or ".." in path.split("/") or any(mark in path for mark in ":,\n"):
        raise ValueError("an absolute path without ':' and ',', and not /")
    return path


def numbered_user(user: str) -> str:
    """Check a user and a group by number. Raises ValueError."""
    if not re.fullmatch(r"\d{1,9}(:\d{1,9})?", user):
        raise ValueError("numbers, UID or UID:GID, e.g. 1000:1000: names are the image's own")
    return user


def reached_hosts(network: str | list[str]) -> str | list[str]:
    """Check a value of `openai_proxy.container.network`. Raises ValueError."""
    if isinstance(network, str) and network not in ("none", "host"):
        raise ValueError("none, host, or a list of hosts, e.g. [pypi.org,files.pythonhosted.org:443]")
    listed = network if isinstance(network, list) else ["host"]
    if not listed or not all(re.fullmatch(r"[A-Za-z0-9.-]+(:[1-9]\d{0,4})?", host) for host in listed):
        raise ValueError("hosts such as pypi.org or pypi.org:443, at least one")
    return network


class ContainerConfig(Section):
    """`actor_rollout_ref.rollout.agent.openai_proxy.container.*`: the container of each trajectory's program."""

    starter: Annotated[str, Names(CONTAINERS, options="starter_options"), CONTAINER] = "command_line"
    """The starter of containers. command_line: podman, docker or another OCI command line. One of yours is a subclass
    of agentrl.containers.contract.Containers (docs/containers.md)."""
    starter_options: Annotated[dict[str, Any], CONTAINER, Uses("options of a starter")] = Field(default_factory=dict)
    """Options of a starter of yours."""
    command_line: Annotated[
        Annotated[list[str], Field(min_length=1)] | None,
        CONTAINER,
        OnlyWith("starter=command_line"),
        Uses("a command"),
    ] = None
    """Words of the command line, e.g. [podman,--runtime,runc]; null: podman or docker, whichever answers `info`."""
    arguments: Annotated[list[str], CONTAINER, OnlyWith("starter=command_line"), Uses("arguments of a command")] = []
    """Further words of its `run`, e.g. [--volume,/data:/data:ro]. They can undo every limit."""
    image: Annotated[str | None, CONTAINER, Uses("an image")] = None
    """Image of all rows that name none; or, with podman, the absolute path of a folder that is the root. A run
    downloads no image."""
    images: Annotated[list[str], CONTAINER, Uses("images")] = []
    """Images that rows may name by extra_info.image: names, or patterns such as "swebench/*"."""
    workdir: Annotated[
        Annotated[str, AfterValidator(absolute_folder)] | None, CONTAINER, Uses("a folder of an image")
    ] = None
    """Folder in which the program works, with its files of the image, e.g. /testbed; null: a new one, with the row's
    files alone. Files of an image need podman."""
    history: Annotated[bool, CONTAINER, OnlyWith("workdir")] = False
    """Leave the folder's .git as it is. false: the program finds one commit there, and the check all of them: a later
    commit may hold the solution."""
    pool: Annotated[int, CONTAINER, OnlyWith("image")] = Field(0, ge=0)
    """Containers that are started before they are needed. Each is used for one trajectory."""
    memory_megabytes: Annotated[int, CONTAINER] = Field(2048, ge=16)
    """MiB of memory, with the files that are written. A process that takes more is killed."""
    cpus: Annotated[float, CONTAINER] = Field(1.0, gt=0)
    """Cores."""
    processes: Annotated[int, CONTAINER] = Field(256, ge=16)
    """Processes and threads at one time."""
    disk_megabytes: Annotated[int, CONTAINER] = Field(1024, gt=0)
    """MiB of files in the folder for temporary and working files, and again in workdir; nothing else can be written
    to. What is left of more is not judged: it scores 0."""
    output_megabytes: Annotated[int, CONTAINER] = Field(64, gt=0)
    """MiB that the program may print; one that prints more is ended, and judged as it is."""
    network: Annotated[str | list[str], AfterValidator(reached_hosts), CONTAINER, Uses("hosts")] = "none"
    """none: the program reaches its session of the endpoint and nothing else. A list of hosts, e.g. [pypi.org]: these,
    too, by https through a proxy. host: everything that the trainer reaches, and other sessions of this machine."""
    user: Annotated[Annotated[str, AfterValidator(numbered_user)], CONTAINER, Uses("rights")] = "1000:1000"
    """Numbers of user and group. 0 needs uidmap: the root of a container of root's is the machine's."""
    uidmap: Annotated[str | None, CONTAINER, Uses("rights")] = None
    """Users of the container as users of this machine, e.g. 0:100000:65536 (podman)."""
    start_timeout: Annotated[float, CONTAINER] = Field(60.0, gt=0)
    """Seconds that a container's start may take, and each time that files go in or out."""

    def findings(self) -> Iterator[Finding]:
        if int(self.user.partition(":")[0]) == 0 and self.uidmap is None:
            yield Finding(
                "actor_rollout_ref.rollout.agent.openai_proxy.container.user=0 needs container.uidmap, e.g. "
                "0:100000:65536: else the program's root is this machine's"
            )


class OpenAIProxyConfig(Section):
    """`actor_rollout_ref.rollout.agent.openai_proxy.*`: the agent that rows with agent_name=openai_proxy run."""

    start: Annotated[str, Names(AGENT_STARTERS)] = "auto"
    """How the agent is started. function: target is called in this process. process: command starts for each
    trajectory. container: command, or a harness's program, starts in a container for each trajectory
    (docs/containers.md). pool: processes of command live on, and take one session after another. remote: programs
    elsewhere connect, with a token. auto: function where target is set, process where command or harness is set. A
    function of yours from `AgentOptions` to an `Agent` is also taken (docs/openai_endpoint.md)."""
    target: Annotated[
        Annotated[str, AfterValidator(callable_target)] | None,
        ConflictsWith("command", why="both say what the agent is. Set one of them to null"),
        Uses("code"),
    ] = None
    """An agent in Python that talks to an OpenAI client: package.module:function or path/to/file.py:function."""
    command: Annotated[Annotated[list[str], Field(min_length=1)] | None, Uses("a command")] = None
    """An agent in any language: the program and its arguments, e.g. [python,agent.py]. Started for each trajectory, it
    finds the endpoint in OPENAI_BASE_URL and ANTHROPIC_BASE_URL; in a pool, in AGENTRL_URL."""
    harness: Annotated[
        str | None,
        Names(HARNESSES, options="harness_options"),
        ConflictsWith("target", why="both say what the agent is. Set one of them to null"),
        OnlyWith("start=auto or container"),
    ] = None
    """A program that acts on a task by itself, e.g. codex: it is started for each trajectory with settings, a home and
    a working folder of its own (docs/harnesses.md). command then names the program, where it is not on PATH."""
    harness_options: Annotated[dict[str, Any], OnlyWith("harness"), Uses("arguments and hosts")] = Field(
        default_factory=dict
    )
    """Options of the harness: arguments, mcp_servers, and its own."""
    check: Annotated[
        Annotated[list[str], Field(min_length=1)] | None, OnlyWith("harness", "start=container"), Uses("a command")
    ] = None
    """A command that judges the working folder of a program after its end: with exit status 0 the score is 1, else
    0."""
    check_timeout: Annotated[float, OnlyWith("check")] = Field(60.0, gt=0)
    """Seconds that check may take; later the score is 0."""
    container: ContainerConfig = ContainerConfig()
    pass_env: Annotated[list[str], VARIABLES] = []
    """Environment variables of the trainer that the command may see, besides PATH, HOME and the like. Each must be
    set."""
    processes: Annotated[int, OnlyWith("start=pool")] = Field(1, gt=0)
    """Processes of a pool, on each machine that generates."""
    sessions_at_once: Annotated[int, OnlyWith("start=pool or remote")] = Field(1, gt=0)
    """Sessions that a process of a pool, or a connection of a remote agent, has at once."""
    host: Annotated[str, OnlyWith("start=remote or container"), Uses("an address to listen at")] = "127.0.0.1"
    """Address that the endpoint listens at; 0.0.0.0: all of this machine's."""
    port: Annotated[int, REMOTE] = Field(0, ge=0, le=65535)
    """Port of the endpoint. Remote agents need one that is known; 0: any that is free."""
    token_env: Annotated[str | None, REMOTE, VARIABLES] = None
    """Environment variable of the trainer with the token that remote agents send."""
    train: Annotated[str | list[str], AfterValidator(chosen_transcripts), UsesFunction()] = "auto"
    """Transcripts of a session that are trained on. auto: main with a harness, else all; all: each of them; main: the
    conversation with the last answer that the agent took, and its sub-agents; a list of names: those of calls that
    name one of these models; or a function of yours that returns some of the session's transcripts
    (docs/openai_endpoint.md)."""
    feedback_timeout: float = Field(0.0, ge=0)
    """Seconds after the agent's end in which a score may still be posted to the session's REPORT_URL/feedback."""
    strict: bool = False
    """Action for a field, or a kind of tool, that the endpoint does not know or only a provider has: true refuses the
    request, false drops and counts it (trajectory/openai_dropped_NAME)."""

    @property
    def is_set(self) -> bool:
        """Say whether there is an agent."""
        return self.start != "auto" or any((self.target, self.command, self.harness))


class AgentConfig(Section):
    """`actor_rollout_ref.rollout.agent.*`"""

    default_agent_loop: str = "single_turn"
    """For rows without `agent_name`."""
    agent_loop_config_path: Annotated[str | None, NamesFile(), CODE] = None
    """YAML of user agent loops: a list of `name` and `_target_`."""
    max_concurrent: int = Field(1024, gt=0)
    """Trajectories that run at once."""
    trajectory_timeout: float = Field(600.0, gt=0)
    """Deadline of one try of a trajectory, tools and waits for them included; one that passes it is not trained on."""
    max_retries: int = Field(2, ge=0)
    """Fresh tries of a trajectory that failed for a fault of the infrastructure."""
    on_code_error: Literal["error", "count"] = "error"
    """Action when code of yours (a loop, an interaction, a scorer, an agent, a tool that answers no call) raises
    what is no fault of the infrastructure, or gives what it must not: stop and name file, line and row, or leave the
    trajectory out and count it. The sample that is left is biased then. An environment's error at a turn of the policy,
    whose text may be the cause, is always counted."""
    max_failed_fraction: float = Field(0.5, ge=0, le=1)
    """A step stops the run when a larger part of its trajectories failed or passed the deadline."""
    observers: Annotated[
        list[str],
        BeforeValidator(lambda value: [value] if isinstance(value, str) else value),
        NamesEach(TURN_OBSERVERS, options="observer_options"),
    ] = []
    """Observers of each turn as it is recorded, e.g. for a journal: subclasses of agentrl.agent_loop.TurnObserver, one
    object a process. An error of one ends the run; with on_code_error=count it only misses that turn."""
    observer_options: dict[str, dict[str, Any]] = Field(default_factory=dict)
    """Options of observers, by their entries in observers."""
    openai_proxy: OpenAIProxyConfig = OpenAIProxyConfig()


class ValKwargs(Section):
    """`actor_rollout_ref.rollout.val_kwargs.*`"""

    n: Annotated[int, SAMPLED] = Field(1, gt=0)
    """Sampled trajectories a prompt: gives mean@n and pass@k."""
    do_sample: bool = True
    """Validate by sampling."""
    greedy: bool = True
    """Validate greedily too (one trajectory a prompt)."""
    temperature: Annotated[float, SAMPLED] = Field(1.0, ge=0.01)
    """Sampling temperature of validation."""
    top_p: Annotated[float, SAMPLED] = Field(1.0, gt=0, le=1)
    """Nucleus sampling of validation."""
    top_k: Annotated[int, SAMPLED] = Field(-1, ge=-1)
    """Sample from so many most likely tokens in validation; -1: all."""


class SGLangKwargs(Section):
    """`engine_kwargs.*` of servers of SGLang alone."""

    sglang: Annotated[dict[str, Any], NotAmong(SET_BY, plain_name), ARGUMENTS] = Field(default_factory=dict)
    """Further arguments of the SGLang servers under SGLang's own names, e.g. attention_backend: fa3."""


class EmbeddedKwargs(Section):
    """`actor_rollout_ref.rollout.engine_kwargs.embedded.*`"""

    graphs: Annotated[bool, OnlyWith("name=embedded")] = True
    """On a GPU, keep keys and values in pages, and replay steps of decoding as graphs. false: operation by operation,
    as models with states and recorded experts run anyway."""

    @property
    def paged(self) -> bool | None:
        """Return the choice as the engine takes it; None: by the device."""
        return None if self.graphs else False


class EngineKwargs(SGLangKwargs):
    """`actor_rollout_ref.rollout.engine_kwargs.*`"""

    embedded: EmbeddedKwargs = EmbeddedKwargs()
    sglang: Annotated[dict[str, Any], SERVERS, STARTED, NotAmong(SET_BY, plain_name), ARGUMENTS] = Field(
        default_factory=dict
    )
    """Further arguments of the SGLang servers under SGLang's own names, e.g. attention_backend: fa3."""
    vllm: Annotated[dict[str, Any], VLLM, STARTED, NotAmong(SET_BY_VLLM, plain_name), ARGUMENTS] = Field(
        default_factory=dict
    )
    """Further arguments of the vLLM servers under vLLM's own names, e.g. enable_expert_parallel: true."""


class RolloutConfig(Section):
    """`actor_rollout_ref.rollout.*`, as far as running trajectories reads it."""

    name: Annotated[
        str,
        Names(ENGINES, options="engine_options"),
        Needs(
            "server_urls",
            "[http://node1:30000,http://node2:8000] say, as no environment holds both softwares: it attaches to "
            "servers that run already. Or start servers of one software with name=sglang or vllm",
            of="mixed",
        ),
    ] = "embedded"
    """embedded: generates inside the trainer's process, for small models; sglang, vllm: servers, for all others;
    mixed: servers of both, named by server_urls (docs/engines.md)."""
    engine_options: dict[str, Any] = Field(default_factory=dict)
    """Options of an engine of yours; those named here have keys of their own."""
    n: int = Field(8, gt=0)
    """Trajectories a prompt. Group estimators compare them: a trajectory whose siblings all failed teaches nothing.
    With 1 they take the reward itself."""
    temperature: float = Field(1.0, ge=0.01)
    """Sampling temperature; log-probs are of softmax(logits / temperature). vLLM samples below 0.01 as at 0.01."""
    top_p: float = Field(1.0, gt=0, le=1)
    """Nucleus sampling: the most likely tokens up to this probability; 1: all."""
    top_k: int = Field(-1, ge=-1)
    """Sample from so many most likely tokens; -1: all."""
    max_model_len: int | None = Field(None, gt=0)
    """Longest context; null: data.max_prompt_length + data.max_response_length."""
    max_num_seqs: int = Field(256, gt=0)
    """Sequences in the engine's running batch; with servers in that of each."""
    nnodes: int = Field(0, ge=0)
    """Machines of a Ray cluster that only generate, with a rollout worker each; 0: the trainer's machines, which share
    their devices with the engine."""
    n_gpus_per_node: Annotated[int, OnlyWith("nnodes above 0")] = Field(1, gt=0)
    """GPUs of each of them."""
    num_servers: Annotated[int, SERVERS, STARTED] = Field(1, gt=0)
    """Servers that are started on each machine that generates, each with tensor_model_parallel_size GPUs."""
    tensor_model_parallel_size: Annotated[int, SERVERS, STARTED] = Field(1, gt=0)
    """GPUs over which each server splits the model."""
    gpu_memory_utilization: Annotated[float, SERVERS, STARTED, DEVICE] = Field(0.5, gt=0, le=1)
    """Part of a GPU's memory that a server takes for weights and KV cache together. Half leaves room for the policy on
    the same GPU; servers with GPUs of their own can take 0.85."""
    engine_kwargs: EngineKwargs = EngineKwargs()
    server_urls: Annotated[ServerURLs | None, SERVERS, Uses("hosts")] = None
    """Servers that run already and are attached to, e.g. [http://node1:30000,http://node2:30000]; null: servers
    are started. They must serve the policy's model."""
    server_api_key_env: Annotated[str | None, SERVERS, OnlyWith("server_urls"), VARIABLES] = None
    """Environment variable with the key that those servers were started with (--api-key). Servers that agentrl starts
    have a random one."""
    server_pass_env: Annotated[list[str], SERVERS, STARTED, VARIABLES] = []
    """Environment variables of the trainer that servers may see, besides those by which compilers, drivers,
    libraries and the loading of models are set up (docs/sglang.md)."""
    server_start_timeout: Annotated[float, SERVERS] = Field(600.0, gt=0)
    """Seconds until a server must answer after it was started or attached to."""
    health_check_interval: Annotated[float, SERVERS] = Field(10.0, gt=0)
    """Seconds between two health checks of a server."""
    max_server_restarts: Annotated[int, SERVERS, STARTED] = Field(3, ge=0)
    """Restarts of one server within half an hour: a server that dies once more stays dead, and the others
    continue; 0: a dead server is not started again."""
    free_cache_engine: Annotated[bool, STARTED, OnlyWith("trainer.device=cuda or auto", "name=embedded")] = False
    """Free the engine's KV cache while the policy is updated, and the weights of servers, for a policy on the same
    GPU. A server that is sent adapters or changed elements keeps its weights. Off, since it costs time in every step
    and helps only where both do not fit; servers need CUDA and torch_memory_saver. With async_training.max_staleness
    above 0 they stand still meanwhile, and tools go on (docs/async.md)."""
    update_weights_transport: Annotated[str, Names(WEIGHT_TRANSPORTS), SERVERS] = "auto"
    """How servers get the policy's weights. tensor: by handles to shared memory (CUDA IPC on a GPU), on the same
    machine only; distributed: broadcast by torch.distributed (nccl, gloo); disk: by files, in a folder that every
    server sees under the same path; auto: tensor for servers on this machine, distributed for others; or a function
    of yours from a `SenderSetting` to a `WeightSender` (docs/extending.md)."""
    update_weights_bucket_megabytes: Annotated[int, SERVERS] = Field(512, gt=0)
    """Tensors are sent in buckets (with disk: files) of so many MiB: smaller ones take less memory, larger ones fewer
    calls."""
    update_weights_checksum: Annotated[bool, SERVERS] = False
    """After each update, ask every server for a checksum of the weights it has, and compare; vLLM's servers have one
    with update_weights_delta=true alone."""
    update_weights_delta: Annotated[bool, SERVERS] = False
    """Send servers only the elements that changed since the weights that each of them holds, by any transport
    (docs/sglang.md). The process that sends keeps a copy of the weights in the servers' dtype."""
    multi_turn: MultiTurnConfig = MultiTurnConfig()
    roles: Annotated[dict[str, RoleConfig], HoldsRoles()] = Field(default_factory=dict)
    """Who plays the roles of an episode, by role, e.g. {white: {}, black: {policy: small, base_url: URL}}. Environments
    with several players name roles, and agents name them as models (docs/self_play.md)."""
    agent: AgentConfig = AgentConfig()

    def findings(self) -> Iterator[Finding]:
        if self.name in ("vllm", "mixed") and self.update_weights_checksum and not self.update_weights_delta:
            yield Finding(
                "actor_rollout_ref.rollout.update_weights_checksum=true with vLLM's servers needs "
                "actor_rollout_ref.rollout.update_weights_delta=true: without it they keep no weights as they were "
                "sent, and their own checksums are of another layout"
            )
        if self.server_urls is None:
            section = "actor_rollout_ref.rollout"
            instead = f". A small model needs no servers: {section}.name=embedded"
            yield from not_installed(self.name, f"{section}.name={self.name}", section, instead)

    @property
    def frozen_adapters(self) -> dict[str, str]:
        """Adapters that servers serve next to the policy's: their folders, absolute, by name."""
        return {
            role.policy: str(Path(role.adapter).absolute()) for role in self.roles.values() if role.adapter is not None
        }

    @property
    def serves(self) -> bool:
        """Say whether servers of agentrl's software generate, started or attached to."""
        return self.name in ("sglang", "vllm", "mixed")


class TrainingRolloutConfig(RolloutConfig):
    """`actor_rollout_ref.rollout.*` of a training."""

    log_prob_max_token_len_per_gpu: MicroBatch = MICRO_BATCH
    """Tokens a micro-batch of the passes that compute log-probs, a teacher's too. auto: as actor's
    ppo_max_token_len_per_gpu."""
    val_kwargs: Annotated[ValKwargs, OnlyWith("data.val_files")] = ValKwargs()
