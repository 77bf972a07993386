"""The simulator of training steps: cases worked by hand."""

from __future__ import annotations

import json
import re
import shlex
import sys
from pathlib import Path

import pytest

from agentrl.plan import many_steps, rollout_times
from agentrl.plan.rollout_times import simulate
from agentrl.plan.simulated_servers import Session, Speed
from agentrl.plan.sizing import ModelShape, Work, attention_flops, forward_flops, update_flops
from agentrl.plan.step_times import Cluster, Plan, Training, gpu_memory, host_memory
from agentrl.trajectory import ToolAnswer, ToolCallRecord, Trajectory, Transcript, Turn
from agentrl.trajectory.parquet import write_trajectories
from labs.cluster import step_simulation
from tests.naming import naming

AT_ONCE = Speed(prefill=1e12, prefill_fixed=0.0, step_fixed=1.0, step_each=0.0, max_running=2, kv_tokens=10_000)
"""A second a step, whatever runs."""
SHAPE = ModelShape(layers=2, hidden=8, heads=4, kv_heads=2, head_dim=2, intermediate=16, vocab=10)


def session(name: str, answers: list[int], *, prompt: int = 100, tool: float = 0.0) -> Session:
    between = len(answers) - 1
    return Session(
        name, 0, prompt, answers, [7] * between, [tool] * between, context=prompt, left=answers[0] if answers else 0
    )


def test_rollouts_take_the_longest_trajectory_and_its_tools() -> None:
    assert simulate([session("0/0", [10]), session("0/1", [30])], 1, AT_ONCE, concurrent=2).all == pytest.approx(30)
    times = simulate([session("0/0", [10, 10], tool=5.0), session("0/1", [3])], 1, AT_ONCE, concurrent=2)
    assert (times.half, times.all, times.tools) == pytest.approx((3, 25, 2.5))
    assert times.busy == pytest.approx(20 / 25)


def test_what_has_no_slot_waits() -> None:
    three = [session(f"0/{k}", [10]) for k in range(3)]
    assert simulate(three, 1, AT_ONCE, concurrent=3).all == pytest.approx(20)
    three = [session(f"0/{k}", [10]) for k in range(3)]
    assert simulate(three, 1, AT_ONCE, concurrent=1).all == pytest.approx(30)
    three = [session(f"{k}/0", [10]) for k in range(3)]
    assert simulate(three, 3, AT_ONCE, concurrent=3).all == pytest.approx(10)


def test_a_step_costs_its_requests_and_the_tokens_that_they_have() -> None:
    by_token = Speed(1e12, 0.0, step_fixed=0.0, step_each=0.0, step_token=0.1)
    assert simulate([session("0/0", [10])], 1, by_token, concurrent=1).all == pytest.approx(10 * (100 + 5) * 0.1)
    by_request = Speed(1e12, 0.0, step_fixed=0.0, step_each=0.5)
    two = [session("0/0", [10]), session("0/1", [20])]
    assert simulate(two, 1, by_request, concurrent=2).all == pytest.approx(10 * 2 * 0.5 + 10 * 0.5)


@pytest.mark.parametrize(
    ("most", "answers"), [(50, [10, 10, 10]), (23, [10, 6]), (27, [10, 10]), (17, [10]), (18, [10, 1]), (4, [4])]
)
def test_a_trajectory_is_cut_where_its_tokens_end(most: int, answers: list[int]) -> None:
    cut_short = session("0/0", [10, 10, 10], tool=1.0)
    many_steps.cut(cut_short, most)
    assert (cut_short.answers, cut_short.left) == (answers, answers[0])
    assert len(cut_short.observations) == len(cut_short.tools) == len(answers) - 1


def test_sessions_are_read_from_a_runs_trajectories(tmp_path: Path) -> None:
    transcript = Transcript()
    transcript.append_prompt([1] * 11)
    transcript.append_sampled([2] * 5, [-1.0] * 5, 0)
    transcript.append_observed([3] * 4)
    transcript.append_sampled([2] * 6, [-1.0] * 6, 0)
    transcript.append_observed([3] * 2)  # a tool's answer that came too late to be answered
    calls = [
        ToolCallRecord("search", {}, ToolAnswer(seconds=0.5)),
        ToolCallRecord("search", {}, ToolAnswer(seconds=2.0)),
    ]
    turns = [Turn("assistant", "", 0, 11, 16, calls), Turn("tool", "", 0, 16, 20), Turn("assistant", "", 0, 20, 26)]
    write_trajectories(
        tmp_path,
        [Trajectory("train/1/3/0", 3, transcripts=[transcript], turns=turns)],
        step=1,
        split="train",
        turn_reward_coef=1.0,
    )
    other = Trajectory("train/2/0/0", 0, transcripts=[transcript], turns=turns)
    for number in (1, 2):
        write_trajectories(tmp_path, [other], step=2, split="train", share=(number, 2), turn_reward_coef=1.0)
    failed = Trajectory("train/1000000/0/0", 0)
    write_trajectories(tmp_path, [failed], step=1_000_000, split="train", turn_reward_coef=1.0)
    of_two_workers, (found,) = rollout_times.recorded(tmp_path)
    assert len(of_two_workers) == 2
    (tmp_path / "train_000001.parquet").write_bytes(b"")
    assert len(next(rollout_times.recorded(tmp_path))) == 2, "older steps are not read for the newest one"
    assert (found.group, found.prompt, found.context, found.left) == (3, 11, 11, 5)
    assert (found.answers, found.observations, found.tools) == ([5, 6], [4], [2.0])


def test_passes_take_their_flops_over_what_ranks_reach() -> None:
    cluster = Cluster(gpus_per_node=2, flops=1e6, mfu_forward=0.5, mfu_update=0.25, link=1e15)
    training = Training(cluster, Plan(prompts=1, n=4, recompute=False), SHAPE)
    sessions = [session(f"0/{k}", [20]) for k in range(4)]
    work = Work.from_lengths([120, 120], 40)  # of a rank
    assert training.forward("old_log_prob", sessions).seconds == pytest.approx(forward_flops(SHAPE, work) / 0.5e6)
    update = update_flops(SHAPE, work, recompute=False, recompute_head=False)
    assert training.update("update_actor", sessions).compute == pytest.approx(update / 0.25e6)


def test_logits_are_made_again_unless_the_head_works_in_parts_that_have_room_for_the_sequence() -> None:
    cluster = Cluster(flops=1e6, mfu_update=0.25, gpus_per_node=1)
    sessions = [session(f"0/{k}", [answer]) for k, answer in enumerate([10, 20, 30, 40])]
    work = Work.from_lengths([110, 120, 130, 140], 100)
    for by_parts, again in ((False, 1.0), (True, 0.7)):
        plan = Plan(prompts=1, n=4, recompute=0, chunk_logits=25 * SHAPE.vocab, by_parts=by_parts)
        update = update_flops(SHAPE, work, recompute=0, recompute_head=again)
        found = Training(cluster, plan, SHAPE).update("update_actor", sessions)
        assert found.compute == pytest.approx(update / 0.25e6)


def test_gathering_weights_bounds_a_pass_where_the_network_is_slow() -> None:
    cluster = Cluster(nodes=2, gpus_per_node=1, network=100.0, link=1e9)
    training = Training(cluster, Plan(prompts=1, n=4, micro_tokens=240), SHAPE)
    sessions = [session(f"0/{k}", [20]) for k in range(4)]
    weights = SHAPE.params * 2 / 2  # bfloat16; one of two ranks has half already
    assert training.forward("old_log_prob", sessions).seconds == pytest.approx(weights / 100)
    assert training.update("update_actor", sessions).traffic == pytest.approx((2 * weights + 2 * weights) / 100), (
        "weights twice, gradients in float32"
    )


def test_copies_of_a_model_gather_within_and_add_gradients_between_them() -> None:
    cluster = Cluster(nodes=2, gpus_per_node=2, network=100.0, link=1000.0)
    training = Training(cluster, Plan(prompts=1, n=4, micro_tokens=240, fsdp_size=2), SHAPE)
    sessions = [session(f"0/{k}", [20]) for k in range(4)]
    half = SHAPE.params * 2 / 2  # bfloat16; gradients are float32
    assert training.forward("old_log_prob", sessions).traffic == pytest.approx(half / 1000)
    assert training.update("update_actor", sessions).traffic == pytest.approx(4 * half / 1000 + 2 * half / 50)
    assert gpu_memory(training).moments["optimizer step"]["optimizer"] == SHAPE.params * 8 / 2


def test_attention_that_is_slower_counts_for_more() -> None:
    sessions = [session("0/0", [20])]
    even, slow = (
        Training(Cluster(gpus_per_node=1, attention_slower=slower), Plan(prompts=1, recompute=False), SHAPE)
        for slower in (1.0, 3.0)
    )
    rate = even.cluster.flops * even.cluster.mfu_update
    more = slow.update("", sessions).compute - even.update("", sessions).compute
    assert more == pytest.approx(2 * 3 * attention_flops(SHAPE, Work.from_lengths([120], 20)) / rate)


def test_a_prompt_that_is_computed_once_counts_once() -> None:
    training = Training(Cluster(gpus_per_node=1), Plan(prompts=1, n=2, share_prompts=True), SHAPE)
    work, _ = training.work([session("0/0", [20]), session("0/1", [30])])
    assert work == Work(100 + 20 + 30, 120**2 + 130**2 - 100**2, 50)


def test_memory_is_the_sum_of_what_is_there_at_the_fullest_moment() -> None:
    params = SHAPE.params
    cluster = Cluster(gpus_per_node=2, memory=1e6)
    memory = gpu_memory(Training(cluster, Plan(reserve=0.0, engine_memory=0.5), SHAPE))
    step = memory.moments["optimizer step"]
    assert step == {
        "reserve": 0,
        "engine": 5e5,
        "weights": 2 * params,
        "gradients": 2 * params,
        "optimizer": 4 * params,
    }
    assert memory.total("optimizer step") == 5e5 + 8 * params
    assert memory.fits == (max(map(memory.total, memory.moments)) <= 1e6)
    alone = gpu_memory(Training(cluster, Plan(reserve=0.0, rollout_gpus=1, offload_optimizer=True), SHAPE))
    assert "rollout" not in alone.moments and "optimizer" not in alone.moments["update"]
    assert alone.moments["update"]["weights"] == 4 * params
    frozen = gpu_memory(Training(cluster, Plan(reserve=0.0, lora_rank=1), SHAPE)).moments["update"]
    assert frozen["weights beside adapters"] == params
    assert frozen["gradients"] == SHAPE.lora_params(1) * 2


def test_a_teacher_is_paid_for_in_memory_and_time() -> None:
    cluster = Cluster(nodes=1, gpus_per_node=2)
    teacher = ModelShape(layers=4, hidden=16, heads=4, kv_heads=2, head_dim=4, intermediate=32, vocab=10)
    for scope, head, width in (("sampled", 0, 1), ("top_k", 0, 7), ("full", 10 * 16 * 2, 17)):
        training = Training(cluster, Plan(reserve=0.0, scope=scope, top_k=3), SHAPE, teacher)
        assert gpu_memory(training).moments["rollout"]["teacher"] == teacher.params * 2 / 2 + head
        assert host_memory(training, 100)["a teacher's scores"] == 100 * 4 * width
    two = [session("0/0", [10]), session("1/0", [10])]
    alone = Training(cluster, Plan(), teacher).forward("teacher", two)
    assert training.passes(two)[-2] == alone and alone.compute > training.forward("x", two).compute


def test_a_plan_that_cannot_be_placed_is_refused() -> None:
    with naming(ValueError, "sequence_parallel=3"):
        Training(Cluster(), Plan(sequence_parallel=3), SHAPE)
    seventy = step_simulation.MODELS["Llama-3.3-70B"]
    with naming(ValueError, "141 GB"):
        Training(Cluster(), Plan(tp=2), seventy).speed()


@pytest.mark.parametrize(("page", "number"), [("docs/scale.md", 3), ("docs/gpu.md", 1)])
def test_the_commands_of_the_pages_about_sizing_run(page: str, number: int, monkeypatch: pytest.MonkeyPatch) -> None:
    text = (Path(__file__).parents[2] / page).read_text(encoding="utf-8")
    # The second and third block of scale.md are those of test_async_simulation.py.
    block, *others = re.findall(r"^```sh\n(.*?)^```", text, re.MULTILINE | re.DOTALL)
    assert len(others) == number - 1
    for line in block.splitlines():
        python, dash_m, module, *options = shlex.split(line)
        assert (python, dash_m, module) == ("python", "-m", "labs.cluster.step_simulation")
        monkeypatch.setattr(sys, "argv", [module, *options, "--prompts", "2", "--n", "2"])
        step_simulation.main()


def test_the_command_prints_stages_and_memory(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    command = ["step_simulation", "--prompts", "4", "--n", "2", "--mini-batch", "2", "--reference", "--free-engine"]
    monkeypatch.setattr(sys, "argv", [*command, "--json"])
    step_simulation.main()
    told = json.loads(capsys.readouterr().out)
    assert list(told["stages"]) == ["rollout", "old_log_prob", "ref_log_prob", "update_actor", "sync_weights", "save"]
    assert told["fits"]
    assert told["seconds"] == pytest.approx(sum(stage["seconds"] for stage in told["stages"].values()))
    monkeypatch.setattr(sys, "argv", command)
    step_simulation.main()
    assert "dominates" in capsys.readouterr().out
