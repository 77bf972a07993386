"""Everything that configs choose by name, and where the built-in choices are.

Users add their own as `module:object` or `path/to/file.py:object`, or by the decorator `register` of a registry.
A registry with a group takes entry points, too (`agentrl.system.parts`). Nothing is imported before it is chosen.
"""

from __future__ import annotations

from agentrl.config.declaration import Rows
from agentrl.system.registry import Registry

ENGINES = Registry(
    "rollout engine",
    "actor_rollout_ref.rollout.name",
    {name: f"agentrl.engines.{name}.build:build" for name in ("embedded", "sglang", "vllm", "mixed")},
)

_SENDERS = "agentrl.engines.servers.sync"
WEIGHT_TRANSPORTS = Registry(
    "weight transport",
    "actor_rollout_ref.rollout.update_weights_transport",
    {name: f"{_SENDERS}.{name}:build" for name in ("auto", "disk", "distributed", "tensor")},
    functions=True,
)
"""Functions from a `SenderSetting` to the `WeightSender` that carries new weights to the servers of an engine."""

_FORMATS = (
    *("apertus", "cohere", "deepseek_v3", "deepseek_v4", "functionary", "gemma", "glm", "harmony", "hermes", "inkling"),
    *("kimi", "kimi_k3", "llama3_json", "minicpm", "minimax", "minimax_m3", "mistral", "muse", "phi4_mini", "pythonic"),
    "qwen3_coder",
)
CALL_FORMATS = Registry(
    "tool-call format",
    "actor_rollout_ref.rollout.multi_turn.format",
    {
        **{name: f"agentrl.chat.formats.{name}:FORMAT" for name in _FORMATS},
        "deepseek_v32": "agentrl.chat.formats.deepseek_v4:V32",
        "function_gemma": "agentrl.chat.formats.gemma:FUNCTION_GEMMA",
        "functionary_3_2": "agentrl.chat.formats.functionary:V3_2",
        "gigachat": "agentrl.chat.formats.hermes:GIGACHAT",
        "granite": "agentrl.chat.formats.llama3_json:GRANITE",
        "granite_20b": "agentrl.chat.formats.hermes:GRANITE_20B",
        "hy3": "agentrl.chat.formats.glm:HY3",
        "internlm": "agentrl.chat.formats.hermes:INTERNLM",
        "jamba": "agentrl.chat.formats.mistral:JAMBA",
        "lfm2": "agentrl.chat.formats.pythonic:LFM2",
        "llama4_json": "agentrl.chat.formats.llama3_json:LLAMA4",
        "nemotron_nano": "agentrl.chat.formats.llama3_json:NEMOTRON_NANO",
        "olmo3": "agentrl.chat.formats.pythonic:OLMO3",
        "seed_oss": "agentrl.chat.formats.qwen3_coder:SEED_OSS",
        "xlam": "agentrl.chat.formats.llama3_json:XLAM",
    },
)
"""How models write tool calls; in addition, the same key chooses the families of the `renderers` package."""

_FSDP = "agentrl.workers.fsdp:FSDPPolicy"
POLICY_BACKENDS = Registry("training strategy", "actor_rollout_ref.actor.strategy", {"fsdp": _FSDP, "fsdp2": _FSDP})
"""Factories of a `PolicyBackend`, which holds and steps the policy (see `agentrl.workers.backend`)."""
_FSDP_CRITIC = "agentrl.workers.fsdp:FSDPCritic"
CRITIC_BACKENDS = Registry("training strategy", "critic.strategy", {"fsdp": _FSDP_CRITIC, "fsdp2": _FSDP_CRITIC})
"""Factories of a `CriticBackend`, likewise."""

CHECKPOINT_WRITERS = Registry(
    "checkpoint writer",
    "actor_rollout_ref.actor.checkpoint.writer",
    {"safetensors": "agentrl.checkpoint.state:WorkerState"},
    functions=True,
)
"""Factories of a `StateWriter` of parameters and their optimizer (see `agentrl.checkpoint.state`)."""

_ESTIMATORS, _LOSSES = "agentrl.algorithms.estimators", "agentrl.algorithms.policy_losses"
_BY_FILE = (
    *("bi_level_gae", "decoupled_gae", "gae", "gdpo", "gigpo", "gpg", "grpo", "grpo_passk", "grpo_turn", "maxrl"),
    *("online_dpo", "opo", "optimal_token_baseline", "rae", "reinforce_plus_plus", "reinforce_plus_plus_baseline"),
    *("remax", "rloo", "rlsd"),
)
ADVANTAGE_ESTIMATORS = Registry(
    "advantage estimator",
    "algorithm.adv_estimator",
    {
        **{name: f"{_ESTIMATORS}.{name}:{name}" for name in _BY_FILE},
        "tir_optimal_token_baseline": f"{_ESTIMATORS}.optimal_token_baseline:optimal_token_baseline",  # verl's name
    },
    takes=("columns", "config"),
)
"""Functions from `EstimatorColumns` to `Advantages`, which declare further columns (`agentrl.config.declaration`).
"""
POLICY_LOSSES = Registry(
    "policy loss",
    "actor_rollout_ref.actor.policy_loss.loss_mode",
    {
        **{
            name: f"{_LOSSES}.{name}:{name}"
            for name in ("cispo", "dro", "geo_mean", "gpg", "gspo", "m2po", "sapo", "topr", "vanilla")
        },
        **{name: f"{_LOSSES}.covariance:{name}" for name in ("clip_cov", "kl_cov")},
        **{name: f"{_LOSSES}.dppo:{name}" for name in ("dppo_kl", "dppo_tv")},
    },
    takes=("columns", "config"),
    needing_options=("dro",),
)
"""Functions from `LossColumns` to `TokenLoss`, which declare likewise."""
_TRL = "agentrl.data.row_formats.trl"
ROW_FORMATS = Registry(
    "row format",
    "data.row_format",
    {
        "alpaca": "agentrl.data.row_formats.alpaca:FORMAT",
        "auto": "agentrl.data.row_formats.choose:AUTO",
        "messages": f"{_TRL}:MESSAGES",
        "prompt_completion": f"{_TRL}:PROMPT_COMPLETION",
        "sharegpt": "agentrl.data.row_formats.sharegpt:FORMAT",
        "text": f"{_TRL}:TEXT",
    },
)
"""`RowFormat` objects, which make transcripts of the columns of rows (see `agentrl.data.row_formats.format`)."""
UNPAIRED_LOSSES: dict[str, Rows] = {"apo_zero_unpaired": "single", "kto": "mismatched"}
"""Our losses of preferences that take no pairs, with what they declare, so that reading rows imports none of them."""
PAIR_LOSSES = Registry(
    "loss of preferences",
    "loss",
    {
        "dpo": "agentrl.algorithms.pair_losses:sigmoid",
        **{name: f"agentrl.algorithms.pair_losses:{name}" for name in ("ipo", "sigmoid", "sppo", *UNPAIRED_LOSSES)},
    },
    functions=True,
)
"""Functions of `Pairs` that return the loss of each pair [P], or of `Judged` that return the loss of each conversation
[U] and declare it; chosen by `python -m agentrl.preferences`, those of pairs by online_dpo, too."""
_DIVERGENCES = "agentrl.algorithms.divergences"
DIVERGENCES = Registry(
    "divergence",
    "distillation.divergence",
    {name: f"{_DIVERGENCES}:{name}" for name in ("forward_kl", "js", "reverse_kl")},
    functions=True,
)
"""Functions of log-probs of the policy and of a teacher [M, S] that return the divergence of each row [M]."""
GROUP_FILTERS = Registry(
    "filter of groups",
    "algorithm.filter_groups.rule",
    {"differ": "agentrl.algorithms.filtering:differ"},
    functions=True,
)
"""Functions of a prompt's trajectories that say whether these teach (see `agentrl.algorithms.filtering`)."""
AGENT_LOOPS = Registry(
    "agent loop",
    "agent_name",
    {
        "openai_proxy": "agentrl.openai_api.agent_loop:OpenAIProxyLoop",
        "react": "agentrl.agent_loop.react:ReactLoop",
        "retool": "agentrl.agent_loop.tagged:ReToolLoop",
        "search_r1": "agentrl.agent_loop.tagged:SearchR1Loop",
        "single_turn": "agentrl.agent_loop.single_turn:SingleTurnLoop",
        "single_turn_calls": "agentrl.agent_loop.single_turn:SingleTurnCallsLoop",
        "tool_agent": "agentrl.agent_loop.tool_agent:ToolAgentLoop",
    },
    base="agentrl.agent_loop.base:AgentLoop",
    group="agent_loops",
    targets=False,  # rows choose, and data sets come from anywhere
)
"""How the policy acts on a row. Users' own are named in the YAML of `rollout.agent.agent_loop_config_path`."""

AGENT_STARTERS = Registry(
    "starter of agents",
    "actor_rollout_ref.rollout.agent.openai_proxy.start",
    {
        "auto": "agentrl.agents.auto:build_auto",
        "container": "agentrl.agents.container:build",
        "function": "agentrl.agents.function:build",
        "pool": "agentrl.agents.pool:build_pool",
        "process": "agentrl.agents.command:build",
        "remote": "agentrl.agents.pool:build_remote",
    },
    functions=True,
)
"""Functions from `AgentOptions` to an `Agent` that speaks to the OpenAI endpoint (see `agentrl.agents.agent`)."""

CONTAINERS = Registry(
    "starter of containers",
    "actor_rollout_ref.rollout.agent.openai_proxy.container.starter",
    {"command_line": "agentrl.containers.command_line:CommandLine"},
    base="agentrl.containers.contract:Containers",
    group="containers",
)
"""Starters of containers for `openai_proxy.start=container` (see `agentrl.containers.contract`)."""

HARNESSES = Registry(
    "harness",
    "actor_rollout_ref.rollout.agent.openai_proxy.harness",
    {},
    base="agentrl.agents.harness:Harness",
    group="harnesses",
)
"""Programs that act on a task by themselves, made ready for a session (see `agentrl.agents.harness`)."""

STOP_CONDITIONS = Registry(
    "stop condition",
    "actor_rollout_ref.rollout.multi_turn.stop_conditions",
    {name: f"agentrl.agent_loop.stopping:{name}" for name in ("answer_tag",)},
    functions=True,
)
"""Functions of an `Episode` and the policy's last turn, a `Reply`, that return the status to end with, or None."""

TURN_OBSERVERS = Registry(
    "turn observer",
    "actor_rollout_ref.rollout.agent.observers",
    {},
    base="agentrl.agent_loop.observer:TurnObserver",
    group="turn_observers",
)
"""Observers of each turn of a trajectory as it is recorded."""

STEP_OBSERVERS = Registry(
    "step observer",
    "trainer.observers",
    {},
    base="agentrl.trainer.observer:StepObserver",
    group="step_observers",
)
"""Observers of each training step."""

WATCHES = Registry(
    "watch",
    "trainer.checks.watches",
    {"checks": "agentrl.checks.watch:Checks"},
    base="agentrl.observe.watch:Watch",
    group="watches",
)
"""Watches of updates and trajectories, where they happen."""

LOGGERS = Registry(
    "logger",
    "trainer.logger",
    {
        "console": "agentrl.observe.tracking:Console",
        "jsonl": "agentrl.observe.tracking:JsonLines",
        "mlflow": "agentrl.observe.remote_sinks:MLflow",
        "swanlab": "agentrl.observe.remote_sinks:SwanLab",
        "tensorboard": "agentrl.observe.tracking:Tensorboard",
        "trackio": "agentrl.observe.remote_sinks:Trackio",
        "wandb": "agentrl.observe.remote_sinks:Wandb",
    },
    base="agentrl.observe.tracking:Sink",
)
"""Destinations of the metrics of each step."""

SCORERS = Registry(
    "scorer",
    "reward_model.scorers",
    {
        "code": "agentrl.reward.code:CodeJudge.compute_score",
        "final_answer": "agentrl.reward.final_answer:compute_score",
        "gsm8k": "agentrl.reward.gsm8k:compute_score",
        "interaction": "agentrl.reward.interaction:compute_score",
        "judge": "agentrl.reward.judge:ModelJudge.compute_score",
        "logs": "agentrl.reward.logs:compute_score",
        "math": "agentrl.reward.math:compute_score",
        "reported": "agentrl.reward.reported:compute_score",
        "search_qa": "agentrl.reward.search_qa:compute_score",
        "turn_rewards": "agentrl.reward.turn_rewards:compute_score",
    },
    group="scorers",
)
"""Functions that score a trajectory; see `agentrl.reward.scorer.ARGUMENTS`. `agentrl.reward.sources` has the data
sources of ours; `code` and `judge` are methods of objects that ask servers, which the manager makes."""

REWARD_MANAGERS = Registry(
    "reward manager",
    "reward_model.reward_manager",
    {
        "dapo": "agentrl.reward.dapo:DapoRewardManager",
        "naive": "agentrl.reward.manager:NaiveRewardManager",
    },
    base="agentrl.reward.contract:RewardManager",
    group="reward_managers",
)
"""Reward managers: they score trajectories one at a time, or all of a prompt."""

SAMPLERS = Registry(
    "sampler",
    "data.sampler.name",
    {
        "curriculum": "agentrl.data.curriculum:Curriculum",
        **{name: f"agentrl.data.sampler:{name.title()}" for name in ("sequential", "shuffled")},
    },
    base="agentrl.data.sampler:Sampler",
)
"""The order in which a training takes its rows."""

SUITES = Registry("suite", "--suite", {}, group="suites")
"""Benchmarks of `python -m agentrl.evaluate --suite`."""

DIALECTS = Registry("dialect", "dialect", {}, group="dialects")
"""Other trainers' ways to write configs (see `agentrl.config.dialect`). The entry points `agentrl.packages` name the
dialect that knows a package's classes, where it has another name than the package."""
