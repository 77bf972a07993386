"""The command line of an SGLang server, and what is read from its log."""

from __future__ import annotations

import pytest

from agentrl.engines.servers.startup_log import StartupLog, last_error
from agentrl.engines.sglang.options import CPU_TOKENS, SGLangArguments
from agentrl.engines.sglang.process import SGLangProcess
from agentrl.errors import ConfigError
from agentrl.system.json_value import JSON


def value_of(argv: list[str], flag: str) -> str:
    assert argv.count(flag) == 1, f"{flag} in {argv}"
    return argv[argv.index(flag) + 1]


def test_a_server_on_a_cpu() -> None:
    argv = SGLangArguments("/m", device="cpu", dtype="bfloat16", context_length=256, max_num_seqs=16).argv(7001)
    expected = {
        "--model-path": "/m",
        "--host": "127.0.0.1",
        "--port": "7001",
        "--device": "cpu",
        "--dtype": "float32",
        "--attention-backend": "torch_native",
        "--sampling-backend": "pytorch",
        "--context-length": "264",
        "--max-running-requests": "16",
        "--max-total-tokens": str(4 * 256 * 16),
        "--weight-version": "0",
    }
    assert {flag: value_of(argv, flag) for flag in expected} == expected
    assert {"--enable-deterministic-inference", "--incremental-streaming-output", "--skip-server-warmup"} <= set(argv)
    assert "--enable-memory-saver" not in argv


@pytest.mark.parametrize(("policy", "first"), [(None, True), ("fcfs", True), ("lpm", False)])
def test_the_earliest_prompt_goes_first_unless_the_user_chose_another_order(policy: str | None, first: bool) -> None:
    argv = SGLangArguments("/m", extra={} if policy is None else {"schedule_policy": policy}).argv(7001)
    assert ("--enable-priority-scheduling" in argv) is first
    assert ("--disable-priority-preemption" in argv) is first


def test_a_server_on_gpus() -> None:
    argv = SGLangArguments(
        "/m", tensor_model_parallel_size=4, base_gpu_id=4, gpu_memory_utilization=0.6, enable_memory_saver=True
    ).argv(7001)
    expected = {
        "--device": "cuda",
        "--dtype": "bfloat16",
        "--tensor-parallel-size": "4",
        "--base-gpu-id": "4",
        "--mem-fraction-static": "0.6",
    }
    assert {flag: value_of(argv, flag) for flag in expected} == expected
    assert {"--enable-memory-saver", "--incremental-streaming-output", "--enable-fp32-lm-head"} <= set(argv)
    exact = [SGLangArguments("/m", dtype="float32"), SGLangArguments("/m", extra={"enable_fp32_lm_head": False})]
    assert all("--enable-fp32-lm-head" not in one.argv(7001) for one in exact)
    of_the_cpu = {"--attention-backend", "--max-total-tokens", "--enable-deterministic-inference", "--context-length"}
    assert not of_the_cpu & set(argv)


@pytest.mark.parametrize(
    ("context", "seqs", "tokens"),
    [(32768, 256, CPU_TOKENS), (1_000_000, 1, 1_000_000), (None, 4, CPU_TOKENS)],
)
def test_the_kv_cache_of_a_cpu_is_bounded_but_holds_one_context(context: int | None, seqs: int, tokens: int) -> None:
    argv = SGLangArguments("/m", device="cpu", context_length=context, max_num_seqs=seqs).argv(1)
    assert value_of(argv, "--max-total-tokens") == str(tokens)


def test_the_users_own_arguments_win() -> None:
    extra: dict[str, JSON] = {
        "log_level": "debug",
        "--attention-backend": "triton",
        "enable_deterministic_inference": False,
        "sampling_backend": None,
        "trust_remote_code": True,
        "lora_paths": ["a", "b"],
        "json_model_override_args": {"rope_theta": 5},
    }
    argv = SGLangArguments("/m", device="cpu", extra=extra).argv(1)
    assert value_of(argv, "--log-level") == "debug"
    assert value_of(argv, "--attention-backend") == "triton"
    assert not {"--enable-deterministic-inference", "--sampling-backend"} & set(argv)
    assert argv[argv.index("--trust-remote-code") :] == [
        *["--trust-remote-code", "--lora-paths", "a", "b", "--json-model-override-args", '{"rope_theta": 5}']
    ]


@pytest.mark.parametrize("name", ["port", "--host", "model-path", "tp", "incremental_streaming_output"])
def test_what_would_break_agentrl_is_refused(name: str) -> None:
    with pytest.raises(ConfigError, match=rf"actor_rollout_ref\.rollout\.engine_kwargs\.sglang\.{name}: .* cannot be"):
        SGLangArguments("/m", extra={name: 1})


LOG = """\
[2026-11-21 05:00:00] server_args={'model_path': '/m'}
[2026-11-21 05:00:01 TP0] Load weight begin. avail mem=21.83 GB
[2026-11-21 05:00:01 TP1] Load weight begin. avail mem=21.83 GB
Multi-thread loading shards:   0% Completed | 0/2 [00:00<?, ?it/s]\rMulti-thread loading shards:  50% Completed | 1/2
[2026-11-21 05:00:09 TP0] Load weight end. elapsed=8.01 s, type=Qwen3ForCausalLM
[2026-11-21 05:00:10 TP0] KV Cache is allocated. dtype: torch.float32, #tokens: 16384, K size: 0.00 GB
[2026-11-21 05:00:11] The server is fired up and ready to roll!
"""
STAGES = [
    *["configured", "loading weights", "loading weights: 0%", "loading weights: 50%", "weights loaded in 8.01 s"],
    *["KV cache of 16384 tokens", "ready"],
]


@pytest.mark.parametrize("piece", [1, 7, 10_000])
def test_stages_are_told_once_however_the_log_comes(piece: int) -> None:
    log = StartupLog(SGLangProcess.stages)
    assert [stage for at in range(0, len(LOG), piece) for stage in log.read(LOG[at : at + piece])] == STAGES


SCHEDULER = """\
[2026-11-21 05:00:01 TP1] Scheduler hit an exception: Traceback (most recent call last):
  File "scheduler.py", line 1, in run_scheduler_process
    scheduler = Scheduler(server_args, port_args)
                ^^^^^^^^^^^^^^^^^
  File "pool.py", line 99, in __post_init__
    raise RuntimeError(msg)
RuntimeError: Not enough memory.
Please try to increase --mem-fraction-static.

[2026-11-21 05:00:02] Received sigquit from a child process. It usually means the child failed.
"""
MAIN = """\
Traceback (most recent call last):
  File "engine.py", line 3, in wait
    raise RuntimeError(
RuntimeError: Rank 0 scheduler died during initialization (exit code: -9).
"""
CHAINED = """\
Traceback (most recent call last):
  File "a.py", line 1, in f
pkg.errors.ValidationError: Repo id

The above exception was the direct cause of the following exception:

Traceback (most recent call last):
  File "b.py", line 1, in g
OSError: not a model: Repo id
"""
USAGE = """\
usage: sglang serve [-h] [--port PORT]
                    [--x X]
sglang serve: error: unrecognized arguments: --y
"""


@pytest.mark.parametrize(
    ("log", "error"),
    [
        (SCHEDULER, "RuntimeError: Not enough memory.\nPlease try to increase --mem-fraction-static."),
        (SCHEDULER + MAIN, "RuntimeError: Not enough memory.\nPlease try to increase --mem-fraction-static."),
        (MAIN, "RuntimeError: Rank 0 scheduler died during initialization (exit code: -9)."),
        (CHAINED, "OSError: not a model: Repo id"),
        (USAGE, "sglang serve: error: unrecognized arguments: --y"),
        ("one\n\ntwo\n", "one\ntwo"),
        ("", "nothing in its log"),
    ],
    ids=["scheduler", "both", "main", "chained", "usage", "no exception", "empty"],
)
def test_the_last_error_is_the_reason(log: str, error: str) -> None:
    assert last_error(log, SGLangProcess.aftermath) == error
