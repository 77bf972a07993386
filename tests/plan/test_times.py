"""The plan of times: the cluster and the plan that a config asks for, and the advice that follows from a step."""

from __future__ import annotations

import itertools
import json
from pathlib import Path

import pytest

from agentrl.config import Config, load_config
from agentrl.errors import ConfigError
from agentrl.plan import __main__ as command
from agentrl.plan import speeds
from agentrl.plan.many_steps import Way
from agentrl.plan.memory import MemoryPlan
from agentrl.plan.step_times import Cluster
from agentrl.plan.times import TimePlan, advice, best, cluster_of, only_generate
from agentrl.trajectory import ToolAnswer, ToolCallRecord, Trajectory, Transcript, Turn
from agentrl.trajectory.parquet import write_trajectories
from tests.naming import naming
from tests.plan.test_memory import SHAPE

ROLLOUT, ACTOR = "actor_rollout_ref.rollout", "actor_rollout_ref.actor"
SLOW = Cluster(gpus_per_node=1, memory=1e9, flops=1e9, bandwidth=1e9)


@pytest.fixture
def words(tmp_path: Path) -> list[str]:
    (tmp_path / "config.json").write_text(json.dumps(SHAPE), encoding="utf-8")
    return [
        f"actor_rollout_ref.model.path={tmp_path}",
        f"trainer.default_local_dir={tmp_path}/run",
        "trainer.device=cpu",
        "data.train_batch_size=2",
        f"{ACTOR}.ppo_mini_batch_size=2",
        f"{ROLLOUT}.n=4",
        "data.max_prompt_length=40",
        "data.max_response_length=80",
    ]


def planned(words: list[str], *further: str, cluster: Cluster = SLOW) -> TimePlan:
    memory = MemoryPlan(load_config([*words, *further], "train", Config), "cpu", 1e9)
    return TimePlan(memory, cluster, speeds.assumed())


def test_a_step_has_the_stages_of_its_roles(words: list[str]) -> None:
    plain = planned(words)
    assert [stage.name for stage in plain.step.stages if stage.seconds] == [
        "rollout",
        "old_log_prob",
        "update_actor",
        "sync_weights",
    ]
    more = planned(words, f"{ACTOR}.use_kl_loss=true", "algorithm.adv_estimator=gae", "trainer.save_freq=5")
    names = [stage.name for stage in more.step.stages if stage.seconds]
    assert {"ref_log_prob", "values", "update_critic", "save"} < set(names)
    assert more.step.seconds > plain.step.seconds


def test_a_faster_machine_takes_less_and_a_longer_answer_more(words: list[str]) -> None:
    fast = Cluster(gpus_per_node=1, memory=1e9, flops=2e9, bandwidth=1e9)
    slow_update, fast_update = (plan.step.stages[2] for plan in (planned(words), planned(words, cluster=fast)))
    assert slow_update.compute == pytest.approx(2 * fast_update.compute)
    assert planned(words, "data.max_response_length=320").step.seconds > 1.3 * planned(words).step.seconds


@pytest.mark.parametrize(
    ("device", "keys", "by_parts"),
    [
        ("cuda", [], True),
        ("cpu", [], False),
        ("cuda", ["trainer.n_gpus_per_node=2"], False),
        ("cuda", [f"{ACTOR}.strategy_options.moe_z_loss_coeff=0.1"], False),
    ],
)
def test_the_head_works_in_parts_where_an_update_takes_it_so(
    device: str, keys: list[str], by_parts: bool, words: list[str]
) -> None:
    config = load_config([*words, "trainer.device=auto", *keys], "train", Config)
    plan = TimePlan(MemoryPlan(config, device, 1e11), SLOW, speeds.assumed())
    assert plan._plan.by_parts is by_parts


def test_adapters_that_servers_serve_are_sent_alone(words: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    lora = [*words, "actor_rollout_ref.model.lora_rank=8"]
    whole = {stage.name: stage for stage in planned(lora).step.stages}["sync_weights"]
    monkeypatch.setattr("agentrl.config.sections.training.why_not_served", lambda *_: None)  # needs SGLang
    served = planned([*lora, "actor_rollout_ref.model.lora_merge=false"])
    sent = {stage.name: stage for stage in served.step.stages}["sync_weights"]
    assert "of adapters" in sent.note and "by tensor" in whole.note and sent.seconds > 0


def test_lengths_of_an_earlier_run_are_taken(words: list[str], tmp_path: Path) -> None:
    assert planned(words).lengths.startswith("assumed: ")
    folder = tmp_path / "run" / "trajectories"
    folder.mkdir(parents=True)
    made = recorded_trajectory(answer=9, observed=5, seconds=3.0)
    write(folder, made)
    plan = planned(words)
    assert plan.lengths == f"as in the newest step of {folder}"
    assert plan.step.tokens == 2 * 4 * (20 + 9 + 5 + 9) and plan.step.rollout.tools == 3.0


def test_machines_come_from_the_config(words: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(speeds, "rates", lambda shape: (8e9, 1e9))
    two = planned(words, "trainer.n_gpus_per_node=2")
    cluster, figures = cluster_of(two.memory)
    assert (cluster.nodes, cluster.gpus_per_node, cluster.flops) == (1, 2, 4e9), "ranks share the processor"
    lines = {line.partition(": ")[0]: line for line in speeds.described(figures)}
    assert "4 GFLOP/s in matrix products" in lines["this CPU now"] and "1 GB/s in a copy" in lines["this CPU now"]
    assert "updates at 0.85" in lines[speeds.ASSUMED]
    assert (cluster.bandwidth, cluster.host_copy) == (2e9, 1e9), "a copy reads and writes each byte"
    apart = planned(words, f"{ROLLOUT}.nnodes=3", f"{ROLLOUT}.n_gpus_per_node=2", "trainer.n_gpus_per_node=4")
    assert only_generate(apart.memory.config) == 6
    cluster, _ = cluster_of(apart.memory)
    assert (cluster.nodes, cluster.gpus_per_node) == (5, 2)


def test_a_rate_counts_what_other_work_takes(monkeypatch: pytest.MonkeyPatch) -> None:
    now, took = [0.0], itertools.cycle([0.125, 0.375])

    def call() -> None:
        now[0] += next(took)

    monkeypatch.setattr(speeds, "perf_counter", lambda: now[0])
    assert speeds.mean_seconds(call) == 0.25


@pytest.mark.parametrize(
    ("name", "known", "flops"),
    [
        ("NVIDIA H100 80GB HBM3", "H100", 989e12),
        ("NVIDIA H100 PCIe", "H100 PCIe", 756e12),
        ("NVIDIA T4", "none", 989e12),
    ],
)
def test_a_gpus_speeds_are_its_data_sheets(
    words: list[str], monkeypatch: pytest.MonkeyPatch, name: str, known: str, flops: float
) -> None:
    monkeypatch.setattr("torch.cuda.get_device_name", lambda: name)
    config = load_config([*words, "actor_rollout_ref.model.dtype=bfloat16"], "train", Config)
    cluster, figures = cluster_of(MemoryPlan(config, "cuda", 80e9))
    assert cluster.flops == flops and known in figures["flops"].origin
    assert figures["mfu_update"].origin == figures["bandwidth_used"].origin == speeds.ASSUMED


def test_the_smallest_bound_that_is_nearly_the_fastest_is_chosen() -> None:
    ways = [(Way("", bound), seconds) for bound, seconds in ((0, 30.0), (1, 20.0), (2, 10.4), (4, 10.0), (8, 10.0))]
    assert best(ways)[0].bound == 2


def test_slow_tools_gain_by_a_bound_and_a_busy_processor_does_not(words: list[str], tmp_path: Path) -> None:
    folder = tmp_path / "run" / "trajectories"
    folder.mkdir(parents=True)
    waits = [recorded_trajectory(answer=2, observed=5, seconds=wait) for wait in (0.0, 0.0, 0.0, 400.0)]
    write(folder, *waits)
    slow = planned(words, "data.train_batch_size=4", f"{ROLLOUT}.n=2")
    chosen, _ = best(ways := list(slow.by_bound()))
    assert chosen.bound > 0 and gain(ways) > 2
    assert f"async_training.max_staleness={chosen.bound}" in next(advice(slow, chosen))
    linear = SLOW.model_copy(update={"bandwidth": 1e15, "step_fixed": 0.0})
    none = f"{ROLLOUT}.multi_turn.tool_config_path=null"
    busy = planned([words[0], f"trainer.default_local_dir={tmp_path}/other", *words[2:], none], cluster=linear)
    assert gain(list(busy.by_bound())) < 1.2, "a processor that is never idle gains nothing"


def gain(ways: list[tuple[Way, float]]) -> float:
    """Seconds of a step in turn over those of the fastest way."""
    return ways[0][1] / min(seconds for _, seconds in ways)


def test_an_engine_without_room_is_refused_in_words(words: list[str]) -> None:
    none = planned(words, cluster=Cluster(gpus_per_node=1, memory=1e3, flops=1e9, bandwidth=1e9))
    with naming(ConfigError, "engine_memory=0.5", "model"):
        none.training  # noqa: B018 - computed when it is read


def test_the_command_prints_times(words: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert command.main(words) == 0
    said = capsys.readouterr().out
    for part in ("rollouts and updates in turn", "bottleneck: ", "best bound: ", "lengths: assumed"):
        assert part in said


def recorded_trajectory(*, answer: int, observed: int, seconds: float) -> Trajectory:
    """Two answers with a tool's between."""
    transcript = Transcript()
    transcript.append_prompt([1] * 20)
    transcript.append_sampled([2] * answer, [-1.0] * answer, 0)
    transcript.append_observed([3] * observed)
    transcript.append_sampled([2] * answer, [-1.0] * answer, 0)
    ends = 20 + answer, 20 + answer + observed, 20 + 2 * answer + observed
    calls = [ToolCallRecord("search", {}, ToolAnswer(seconds=seconds))]
    turns = [
        Turn("assistant", "", 0, 20, ends[0], calls),
        Turn("tool", "", 0, ends[0], ends[1]),
        Turn("assistant", "", 0, ends[1], ends[2]),
    ]
    return Trajectory("train/1/0/0", 0, transcripts=[transcript], turns=turns)


def write(folder: Path, *trajectories: Trajectory) -> None:
    """Write a step's trajectories as a run does."""
    write_trajectories(folder, list(trajectories), step=7, split="train", turn_reward_coef=1.0)
