"""The training loop where something fails, is left out or is already done: through the real command, in process."""

from __future__ import annotations

import json
import shutil
import sys
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow
import pyarrow.parquet as pq
import pytest
from safetensors.torch import load_file

from agentrl.checkpoint.export import STEP_FILE
from agentrl.checkpoint.recovery import Continuation
from agentrl.engines.embedded.engine import EmbeddedEngine
from agentrl.engines.weights import SyncReport, Weights
from agentrl.errors import WorkerDied
from agentrl.train import main
from agentrl.trainer.run import validation_due
from agentrl.trainer.step import Trainer
from agentrl.trainer.validation import validate
from agentrl.trajectory import Transcript
from agentrl.trajectory.parquet import read_trajectories
from tests.config.loading import load
from tests.e2e.test_train import lines
from tests.naming import assert_names
from tests.runs import Overrides

LOOPS = '''
import asyncio

from agentrl.agent_loop import AgentLoop
from agentrl.errors import DataError
from agentrl.trajectory import Status


class Uneven(AgentLoop):
    """Of five trajectories of a prompt two are whole, of the first prompt one; the others fail in several ways."""

    async def run(self, episode):
        _, group, k = episode.trajectory.uid.rsplit("/", 2)
        await episode.start(episode.sample.prompt)
        await episode.generate()
        if k == "1":
            raise ConnectionError("broken")
        if k == "2" or (group, k) == ("0", "4"):
            raise DataError("an odd row")
        if k == "3":
            await asyncio.sleep(60)
        episode.finish(Status.COMPLETED)


class Careless(AgentLoop):
    """From the second step on it cannot deal with one trajectory of each prompt."""

    async def run(self, episode):
        split, step, _, k = episode.trajectory.uid.split("/")
        await episode.start(episode.sample.prompt)
        reply = await episode.generate()
        if (split, k) == ("train", "1") and step != "1":
            reply.message.text + 1
        episode.finish(Status.COMPLETED)


class Silent(AgentLoop):
    """The policy never says anything."""

    async def run(self, episode):
        await episode.start(episode.sample.prompt)
        episode.finish(Status.ABORTED if episode.trajectory.uid.endswith("0") else Status.LENGTH)
'''


@pytest.fixture
def loops(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[str], list[str]]:
    """Overrides for rows that run the loop of that name."""
    (tmp_path / "loops_of_a_user.py").write_text(LOOPS)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, "loops_of_a_user", raising=False)  # another test's file
    (tmp_path / "loops.yaml").write_text(
        "- {name: uneven, _target_: loops_of_a_user.Uneven}\n- {name: silent, _target_: loops_of_a_user.Silent}\n"
        "- {name: careless, _target_: loops_of_a_user.Careless}\n"
    )
    rows = [{"prompt": [{"role": "user", "content": f"What is {n} + 2?"}], "data_source": "x"} for n in range(8)]
    pq.write_table(pyarrow.Table.from_pylist(rows), tmp_path / "rows.parquet")

    def overrides(name: str) -> list[str]:
        agent = "actor_rollout_ref.rollout.agent"
        return [
            f"data.train_files={tmp_path}/rows.parquet",
            f"data.val_files={tmp_path}/rows.parquet",
            f"{agent}.default_agent_loop={name}",
            f"{agent}.agent_loop_config_path={tmp_path}/loops.yaml",
            f"{agent}.max_failed_fraction=0.8",
            "actor_rollout_ref.rollout.multi_turn.tool_config_path=null",
        ]

    return overrides


@pytest.mark.parametrize(
    ("changes", "after"),
    [
        (["trainer.test_freq=5"], [5, 10, 12]),
        (["trainer.test_freq=5", "trainer.val_after_train=false"], [5, 10, 12]),
        (["trainer.test_freq=-1"], [12]),
        (["trainer.test_freq=-1", "trainer.val_after_train=false"], []),
    ],
)
def test_the_last_step_is_validated_unless_nothing_asks_for_it(changes: list[str], after: list[int]) -> None:
    trainer = load("data.val_files=val.parquet", *changes).trainer
    assert [step for step in range(1, 13) if validation_due(trainer, step, 12)] == after


def test_failed_trajectories_are_counted_and_the_rest_is_trained_on(
    small_run: Overrides, loops: Callable[[str], list[str]], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    more = [
        "actor_rollout_ref.rollout.agent.trajectory_timeout=2",
        "actor_rollout_ref.rollout.agent.max_retries=1",
        "actor_rollout_ref.rollout.val_kwargs.n=4",
        "actor_rollout_ref.rollout.n=5",
        "trainer.total_training_steps=1",
        "algorithm.filter_groups.enable=true",
    ]
    assert main([*small_run(), *loops("uneven"), *more]) == 0
    told = capsys.readouterr().out
    assert (
        "13 of 20 trajectories failed: DataError 5 in uneven; ConnectionError 4 in uneven; timeout 4 in uneven" in told
    )
    assert "4 fresh tries: ConnectionError 4 in uneven" in told
    start, step = lines(tmp_path / "run")
    assert start["val/failed"] == pytest.approx(24 / 40), "of four sampled and one greedy a prompt"
    assert (step["left_out/failed"], step["left_out/unscored"]) == (9, 4)
    assert (step["failure/ConnectionError"], step["failure/DataError"]) == (4, 5)
    assert step["status/timeout"] == 0.2
    assert step["trajectory/retries/ConnectionError"] == 4
    assert step["trajectory/retries"] == 4, "the broken ones were tried again, the odd rows and the late ones not"
    assert step["group/groups"] == 4
    assert step["group/groups_of_one"] == 1
    assert step["train/filtered_fraction"] >= 1 / 7, "the lone survivor teaches nothing"
    assert step["actor/grad_norm"] > 0
    written = read_trajectories(next((tmp_path / "run" / "trajectories").glob("train_*[0-9].parquet")))
    assert Counter(t.score is None for t in written) == {True: 13, False: 7}


def test_an_error_of_a_users_code_ends_the_run_with_all_before_it_kept_or_is_counted(
    small_run: Overrides, loops: Callable[[str], list[str]], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run, keys = tmp_path / "run", [*small_run(), *loops("careless"), "trainer.total_training_steps=2"]
    assert main(keys) == 2
    message = capsys.readouterr().err
    place = f"{tmp_path}/loops_of_a_user.py:{LOOPS.splitlines().index('            reply.message.text + 1') + 1}"
    first, where, row, advice = message.splitlines()
    assert first.startswith("error: agent loop careless (loops_of_a_user.Careless.run): TypeError: ")
    assert where == f"  {place} in run: reply.message.text + 1"
    assert f"{tmp_path}/rows.parquet, row " in row and "trajectory train/2/" in row
    assert "actor_rollout_ref.rollout.agent.on_code_error=count" in advice
    assert [line["step"] for line in lines(run)] == [0, 1]
    assert [path.name for path in (run / "checkpoints").iterdir()] == ["step_000001"]

    assert main([*keys, "actor_rollout_ref.rollout.agent.on_code_error=count"]) == 0
    said = capsys.readouterr()
    assert "resumed from" in said.out and said.out.count(place) == 1
    assert (lines(run)[-1]["failure/CodeError"], lines(run)[-1]["trajectory/retries"]) == (4, 0)


@pytest.mark.slice(2, "matrix")
@pytest.mark.parametrize("changes", [["algorithm=grpo"], ["algorithm=ppo"], ["algorithm.adv_estimator=grpo_turn"]])
@pytest.mark.parametrize("kl", [[], ["algorithm.use_kl_in_reward=true"]])
def test_a_step_without_a_policy_token_changes_nothing(
    small_run: Overrides, loops: Callable[[str], list[str]], tmp_path: Path, changes: list[str], kl: list[str]
) -> None:
    base = [override for override in small_run() if "filter_groups" not in override]
    more = ["trainer.total_training_steps=1", "trainer.val_before_train=false", *changes, *kl]
    assert main([*base, *loops("silent"), *more]) == 0
    (step,) = lines(tmp_path / "run")
    assert step["left_out/no_policy_tokens"] == 12
    assert not [name for name in step if name.startswith("actor/grad") or name.startswith("critic/")]


@pytest.mark.slice(1, "matrix")
@pytest.mark.parametrize("equal", [3, 4])
def test_filtering_groups_changes_no_weight_and_no_metric(small_run: Overrides, tmp_path: Path, equal: int) -> None:
    """Where so many of four groups are equal: one of two mini-batches, or both of them, have nothing else in them."""
    (tmp_path / "equal.py").write_text(
        "def compute_score(solution_str, trajectory):\n"
        f"    return 0.5 if trajectory.group < {equal} else len(solution_str) % 7 / 7\n"
    )
    more = [
        f"custom_reward_function.path={tmp_path}/equal.py",
        "trainer.total_training_steps=1",
        "data.val_files=null",
    ]
    metrics, weights = {}, {}
    for enable in ("true", "false"):
        run = tmp_path / enable
        assert main(small_run(*more, f"algorithm.filter_groups.enable={enable}", run_dir=run)) == 0
        line = lines(run)[-1]
        assert line["train/filtered_fraction"] == (equal / 4 if enable == "true" else 0), "of the sequences"
        assert line["group/groups_equal"] == equal
        assert (line["actor/grad_norm"] > 0) == (equal < 4)
        counted = ("train/filtered_fraction", "train/policy_tokens", "train/loss_weight")
        measured = ("time/", "perf/", "sync/seconds", "rollout/loop_delay_seconds", "trajectory/", *counted)
        metrics[enable] = {name: value for name, value in line.items() if not name.startswith(measured)}
        weights[enable] = load_file(run / "policy" / "model.safetensors")
    assert metrics["true"] == pytest.approx(metrics["false"], rel=1e-4, abs=1e-6)
    for name, tensor in weights["true"].items():
        apart = (tensor - weights["false"][name]).square().mean().sqrt()
        assert apart < 1e-2 * 1e-3, f"{name}: AdamW's step is 1e-3, and shows the rounding of gradients of almost 0"


def test_an_embedded_engine_without_its_cache_during_updates_learns_the_same(
    small_run: Overrides, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    held: list[int] = []
    sent = EmbeddedEngine.update_weights

    async def update_weights(self: EmbeddedEngine, weights: Weights, version: int) -> SyncReport:
        held.append(self._cache.own.memory.used)
        return await sent(self, weights, version)

    monkeypatch.setattr(EmbeddedEngine, "update_weights", update_weights)
    weights = {}
    for free in ("true", "false"):
        run = tmp_path / free
        keys = [f"actor_rollout_ref.rollout.free_cache_engine={free}", "trainer.total_training_steps=2"]
        assert main(small_run(*keys, run_dir=run)) == 0
        weights[free] = load_file(run / "policy" / "model.safetensors")
        assert all((used == 0) == (free == "true") for used in held[-2:]), "after each of two updates"
    assert all(weights["true"][name].equal(tensor) for name, tensor in weights["false"].items())


def test_masked_trajectories_are_in_no_loss_and_in_every_baseline(small_run: Overrides, tmp_path: Path) -> None:
    """Most answers are cut; the number of those that are left out, and of no others, follows the list of endings."""
    base = [*small_run("trainer.total_training_steps=1", "data.val_files=null")]
    metrics = {}
    for name, masked in (("none", "[]"), ("other", "[malformed]"), ("cut", "[length]")):
        run = tmp_path / name
        more = [f"algorithm.masked_statuses={masked}", f"trainer.default_local_dir={run}"]
        assert main([*base, "data.max_response_length=8", *more]) == 0
        metrics[name] = lines(run)[-1]
    cut = round(metrics["none"]["status/length"] * 16)
    assert cut > 8
    assert metrics["none"]["left_out/masked"] == 0
    assert metrics["cut"]["left_out/masked"] == cut
    assert metrics["cut"]["train/sequences"] <= 16 - cut
    assert metrics["cut"]["reward/mean"] == metrics["none"]["reward/mean"]
    assert metrics["cut"]["group/groups"] == 4


def test_the_nll_of_successes_and_scorers_numbers_reach_the_update(small_run: Overrides, tmp_path: Path) -> None:
    (tmp_path / "two.py").write_text(
        "def compute_score(solution_str, trajectory):\n"
        "    return {'score': float(trajectory.uid.endswith('0')), 'form': len(solution_str) % 3}\n"
    )
    more = [
        f"custom_reward_function.path={tmp_path}/two.py",
        "trainer.total_training_steps=1",
        "data.val_files=null",
        "actor_rollout_ref.actor.success_nll_coef=0.1",
        "algorithm.adv_estimator=gdpo",
        "algorithm.adv_options.reward_keys=[score,form]",
    ]
    base = [override for override in small_run(*more) if "filter_groups" not in override]
    assert main(base) == 0
    step = lines(tmp_path / "run")[-1]
    assert step["success/rate"] == 0.25
    assert 0 < step["actor/success_nll"] < 50 and step["actor/grad_norm"] > 0


def test_remax_draws_a_greedy_trajectory_of_each_prompt_beside_the_others(small_run: Overrides, tmp_path: Path) -> None:
    """It is scored and recorded, and neither trained on nor counted in the step's metrics."""
    (tmp_path / "told.py").write_text(
        "def compute_score(solution_str, trajectory):\n    return 0.25 if trajectory.baseline else 1.0\n"
    )
    base = [override for override in small_run() if "filter_groups" not in override]
    more = [f"custom_reward_function.path={tmp_path}/told.py", "data.val_files=null", "trainer.total_training_steps=1"]
    assert main([*base, *more, "algorithm.adv_estimator=remax", "actor_rollout_ref.rollout.n=2"]) == 0
    step = lines(tmp_path / "run")[-1]
    assert (step["reward/mean"], step["group/groups"], step["group/groups_without_greedy"]) == (1.0, 4, 0)
    assert step["train/sequences"] == 8, "also groups of equal rewards are better than 0.25"
    assert step["actor/grad_norm"] > 0
    written = read_trajectories(next((tmp_path / "run" / "trajectories").glob("train_*[0-9].parquet")))
    assert Counter(t.uid.rpartition("/")[2] for t in written) == {"0": 4, "1": 4, "greedy": 4}
    assert all((t.score == 0.25) == t.uid.endswith("greedy") for t in written)


def test_the_critic_learns_from_all_and_the_policys_schedule_waits_for_it(small_run: Overrides, tmp_path: Path) -> None:
    base = [override for override in small_run() if "filter_groups" not in override]
    warm = [f"{role}.optim.lr_warmup_steps=1" for role in ("critic", "actor_rollout_ref.actor")]
    run = [*base, *warm, "algorithm=ppo", "critic.optim.lr=1e-3", "trainer.val_before_train=false"]
    run += ["trainer.critic_warmup=1", "actor_rollout_ref.actor.optim.lr_scheduler_type=linear"]
    assert main([*run, "trainer.total_training_steps=3"]) == 0
    steps = lines(tmp_path / "run")
    assert [step.get("actor/lr") for step in steps] == [None, pytest.approx(5e-4), pytest.approx(1e-3)]
    assert [step["critic/lr"] for step in steps] == pytest.approx([5e-4, 1e-3, 1e-3])
    assert [step.get("train/filtered_fraction") for step in steps] == [None, 0, 0]


def test_reinforce_plus_plus_is_not_filtered_by_group(small_run: Overrides, tmp_path: Path) -> None:
    base = [override for override in small_run("trainer.total_training_steps=1") if "filter_groups" not in override]
    assert main([*base, "algorithm.adv_estimator=reinforce_plus_plus"]) == 0
    assert lines(tmp_path / "run")[-1]["train/filtered_fraction"] == 0


def test_val_only_of_a_trained_run_validates_it_and_keeps_its_metrics(
    small_run: Overrides, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    def contents(run: Path) -> dict[Path, bytes]:
        files = (path for path in run.rglob("*") if path.is_file() and "val_only" not in path.parts)
        return {path: path.read_bytes() for path in files}

    assert main(small_run("trainer.total_training_steps=2", "data.val_batch_size=4")) == 0
    before, files = lines(tmp_path / "run"), contents(tmp_path / "run")
    assert main(small_run("trainer.total_training_steps=2", "trainer.val_only=true")) == 0
    *_, done, look = capsys.readouterr().out.rstrip().splitlines()
    assert done.endswith("run/val_only holds metrics.jsonl, reward.png, trajectories/")
    assert look.endswith(f" -m agentrl.view {tmp_path}/run/val_only")
    assert contents(tmp_path / "run") == files, "what the run wrote of its training is as it was"
    (after,) = lines(tmp_path / "run" / "val_only")
    assert after["step"] == 2
    for name in ("val/success_greedy", "val/reward_greedy", "val/reward_sampled"):
        assert after[name] == before[-1][name], "the same policy and random numbers, however rows are batched"
    assert len(list((tmp_path / "run" / "val_only" / "trajectories").glob("val_000002_*"))) == 2


@pytest.mark.parametrize("bound", [0, 1])
def test_a_fault_that_has_passed_ends_no_later_start(
    small_run: Overrides, tmp_path: Path, capsys: pytest.CaptureFixture[str], bound: int
) -> None:
    """A batch whose trajectories failed is in the ledger and the journal before the run ends for it."""
    (tmp_path / "judge.py").write_text(
        "from pathlib import Path\n"
        "from agentrl.errors import InfrastructureError\n"
        "scored = []\n"
        "def compute_score(data_source, solution_str, ground_truth, extra_info=None):\n"
        "    scored.append(solution_str)\n"
        f"    if len(scored) > 20 and not Path({str(tmp_path / 'mended')!r}).exists():\n"
        "        raise InfrastructureError('the server is down')\n"
        "    return float(len(solution_str) % 5)\n"
    )
    overrides = small_run(
        *(f"async_training.max_staleness={bound}", f"custom_reward_function.path={tmp_path}/judge.py"),
        *("trainer.save_freq=1", "data.val_files=null", "trainer.total_training_steps=4"),
    )
    assert main(overrides) == 2
    assert "the server is down" in capsys.readouterr().err
    (tmp_path / "mended").touch()
    assert main(overrides) == 0
    assert [line["step"] for line in lines(tmp_path / "run")] == [1, 2, 3, 4]
    assert all(not line["left_out/failed"] for line in lines(tmp_path / "run")[2:])


def test_a_run_killed_before_its_export_exports_when_started_again(
    small_run: Overrides, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    overrides = small_run("trainer.total_training_steps=1")
    assert main(overrides) == 0
    run = tmp_path / "run"
    weights = (run / "policy" / "model.safetensors").read_bytes()
    before = (run / "metrics.jsonl").read_text()
    shutil.rmtree(run / "policy")
    assert main(overrides) == 0
    assert (run / "policy" / "model.safetensors").read_bytes() == weights
    assert (run / "policy" / STEP_FILE).read_text() == "1\n"
    assert (run / "metrics.jsonl").read_text() == before
    assert main(overrides) == 0
    said = "".join(capsys.readouterr().out.split())
    start = next(line for line in overrides if line.startswith("actor_rollout_ref.model.path=")).partition("=")[2]
    assert "nothinglefttotrain" in said and f"trainedfrom{start}," in said


def dies_at_first(monkeypatch: pytest.MonkeyPatch, method: str) -> list[int]:
    """The trainer's method ends as if a worker had died when it is called first; the steps of all its calls."""
    called: list[int] = []
    original, after = getattr(Trainer, method), Continuation.after

    def going_back(self: Continuation, *seen: Any) -> WorkerDied:
        self.restarts = -1  # one is allowed, which a run on one device cannot be asked for
        return after(self, *seen)

    def dying(trainer: Trainer, *given: Any) -> Any:
        called.append(trainer.step)
        if len(called) == 1:
            raise WorkerDied("injected")
        return original(trainer, *given)

    monkeypatch.setattr(Trainer, method, dying)
    monkeypatch.setattr(Continuation, "after", going_back)
    return called


def test_after_a_death_a_run_goes_back_to_what_it_was_resumed_from(
    small_run: Overrides, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Not to a newer checkpoint of the continuation that it gave up."""
    assert main(small_run("trainer.total_training_steps=3")) == 0
    assert ["time/save" in line for line in lines(tmp_path / "run")] == [False, False, True, True]
    trained = dies_at_first(monkeypatch, "train_step")
    begin = tmp_path / "run" / "checkpoints" / "step_000002"
    again = ["trainer.total_training_steps=3", "trainer.resume_mode=resume_path", f"trainer.resume_from_path={begin}"]
    assert main(small_run(*again)) == 0
    assert trained == [3, 3]


def test_a_death_in_the_first_validation_does_not_end_the_run(
    small_run: Overrides, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    validated = dies_at_first(monkeypatch, "validate")
    assert main(small_run("trainer.val_only=true")) == 0
    assert validated == [0, 0] and [line["step"] for line in lines(tmp_path / "run" / "val_only")] == [0]


def test_a_run_that_ends_within_the_critic_s_warm_up_says_so(
    small_run: Overrides, capsys: pytest.CaptureFixture[str]
) -> None:
    ppo = [one for one in small_run("algorithm=ppo", "data.val_files=null") if "filter_groups" not in one]
    for warmup, total in ((1, 1), (1, 2)):
        assert main([*ppo, f"trainer.critic_warmup={warmup}", f"trainer.total_training_steps={total}"]) == 0
        said = "".join(capsys.readouterr().out.split())
        assert ("thecriticalonelearns" in said) == (warmup == total)


def test_every_loop_shows_its_own_first_prompt(
    small_run: Overrides, data_dir: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    names = ["single_turn", "react_agent", "tool_agent", "tool_agent"]
    rows = [{"prompt": [{"role": "user", "content": "Hello"}], "data_source": "x", "agent_name": n} for n in names]
    pq.write_table(pyarrow.Table.from_pylist(rows), tmp_path / "mixed.parquet")
    more = [f"data.train_files={tmp_path}/mixed.parquet", "trainer.val_only=true", "data.max_prompt_length=400"]
    assert main(small_run(*more)) == 0
    shown = capsys.readouterr().out.partition("(agent_name=single_turn)")[2]
    single, _, rest = shown.partition("(agent_name=react)")
    react, _, tools = rest.partition("(agent_name=tool_agent)")
    assert "calculator" not in single.replace("_calculator", "")
    assert "- calculator:" in react and "Action Input" in react
    assert "calculator(expression: string)" in tools
    refused = [*more, "data.filter_overlong_prompts=false", "data.max_prompt_length=100"]
    assert main(small_run(*refused)) == 2
    assert "row 1" in capsys.readouterr().err, "a react prompt is measured with its tools"
    assert main(small_run(*refused, "data.truncation=left")) == 0
    assert_names("".join(capsys.readouterr()), "prompts longer", "data.max_prompt_length=100")
    files = (tmp_path / "run" / "val_only" / "trajectories").glob("*.parquet")
    lengths = [one.transcripts[0].prompt_length for file in files for one in read_trajectories(file)]
    assert lengths and max(lengths) == 100


def test_trajectories_of_a_validation_in_parts_have_names_of_their_own(small_run: Overrides, tmp_path: Path) -> None:
    assert main(small_run("trainer.val_only=true", "data.val_batch_size=4")) == 0
    files = sorted((tmp_path / "run" / "val_only" / "trajectories").glob("val_*.parquet"))
    parts = ["greedy", "greedy_000004", "sampled", "sampled_000004"]
    assert [file.stem for file in files] == [f"val_000000_{part}" for part in parts]
    written = [trajectory for file in files for trajectory in read_trajectories(file)]
    assert len({trajectory.uid for trajectory in written}) == len(written) == 12
    assert {trajectory.group for trajectory in written} == set(range(6))
    assert not list((tmp_path / "run").rglob("step_*")), "nothing was trained"


def test_a_step_whose_rewards_teach_nothing_says_so(
    small_run: Overrides, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "flat.py").write_text("def compute_score(**columns):\n    return 1.0\n")
    more = [f"custom_reward_function.path={tmp_path}/flat.py", "trainer.total_training_steps=2", "data.val_files=null"]
    assert main([*small_run(), *more]) == 0
    told = capsys.readouterr().out
    assert told.count("(nothing was learnt from rewards: in every group all rewards are equal)") == 2
    assert_names(told, "2 steps")
    assert [line["train/sequences"] for line in lines(tmp_path / "run") if line["step"]] == [0, 0]


def test_generations_texts_and_profiles_of_rollouts(small_run: Overrides, tmp_path: Path) -> None:
    (tmp_path / "two.py").write_text(
        "def compute_score(solution_str):\n    return {'score': len(solution_str) % 7 / 7, 'acc': 1.0, 'step': 5.0}\n"
    )
    more = [
        "trainer.total_training_steps=1",
        f"custom_reward_function.path={tmp_path}/two.py",
        "trainer.log_val_generations=3",
        f"trainer.rollout_data_dir={tmp_path}/texts",
        f"trainer.validation_data_dir={tmp_path}/val_texts",
        "trainer.profile_steps=[1]",
    ]
    assert main([*small_run(), *more]) == 0
    run = tmp_path / "run"
    tables = {path.name: path.read_text().splitlines() for path in (run / "val_generations").iterdir()}
    assert {name: len(rows) for name, rows in tables.items()} == {"000000.jsonl": 3, "000001.jsonl": 3}
    texts = [json.loads(line) for line in (tmp_path / "texts" / "1.jsonl").read_text().splitlines()]
    written = read_trajectories(next((run / "trajectories").glob("train_*[0-9].parquet")))
    assert [(one["uid"], one["score"], one["reward"]) for one in texts] == [(t.uid, t.score, t.score) for t in written]
    assert all(one["input"].endswith("<|im_start|>assistant\n") and one["output"] for one in texts)
    assert all((one["acc"], one["step"]) == (1.0, 1) for one in texts), "a field keeps its name"
    truths = [one.ground_truth for one in written]
    assert [one["gts"] for one in texts] == truths and all(isinstance(one, str) and one for one in truths)
    assert sorted(path.name for path in (tmp_path / "val_texts").iterdir()) == ["0.jsonl", "1.jsonl"]
    profile = run / "profile" / "step_000001"
    assert "aten::" in (profile / "rank0_rollout.txt").read_text(), "the engine's work is in it"
    assert (profile / "rank0_rollout.json.gz").stat().st_size > 1000


def test_a_sweep_trains_each_job_in_its_folder_and_goes_on_with_what_is_left(
    small_run: Overrides, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = ["-m", *small_run("trainer.total_training_steps=1", "trainer.val_before_train=false"), "trainer.seed=3,4"]
    assert main(words) == 0
    table = capsys.readouterr().out.splitlines()[-3:]
    assert [line.split()[0] for line in table] == ["job", "trainer.seed=3", "trainer.seed=4"]
    for seed, line in zip((3, 4), table[1:], strict=True):
        run = tmp_path / "run" / f"trainer.seed={seed}"
        assert line.endswith(str(run)) and " done " in line
        assert f"seed: {seed}" in (run / "config.yaml").read_text()
        assert lines(run)[-1]["step"] == 1
    assert main(words) == 0
    assert [line.count("was done before") for line in capsys.readouterr().out.splitlines()[-2:]] == [1, 1]


@pytest.mark.parametrize(("only", "reaction"), [(False, "warn"), (True, "stop")])
def test_a_fault_of_the_last_validation_is_an_alarm_of_its_step(
    small_run: Overrides,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    only: bool,
    reaction: str,
) -> None:
    during = list[bool]()

    def faulty(*args: Any, **named: Any) -> Any:
        during.append(True)
        try:
            return validate(*args, **named)
        finally:
            during.clear()

    def append(transcript: Transcript, ids: Any, mask: int, logprobs: Any) -> None:
        """In validations a turn's first token counts as observed."""
        transcript.ids.extend(ids)
        transcript.mask.extend([0] * bool(ids and during) + [mask] * (len(ids) - bool(ids and during)))
        transcript.logprobs.extend(logprobs)

    monkeypatch.setattr("agentrl.trainer.step.validate", faulty)
    monkeypatch.setattr(Transcript, "_append", append)
    keys = ["trainer.total_training_steps=1", "trainer.val_before_train=false", "trainer.save_freq=-1"]
    keys += [f"trainer.val_only={only}", f"trainer.checks.on_fault={reaction}", "data.max_response_length=12"]
    assert main(small_run(*keys)) == (0 if reaction == "warn" else 2)
    run, last = (tmp_path / "run" / "val_only", 0) if only else (tmp_path / "run", 1)
    found = [json.loads(line) for line in (run / "alarms.jsonl").read_text().splitlines()]
    assert [(one["step"], one["check"]) for one in found] == [(last, "record")]
    assert all(place.startswith(f"val/{last}/") for place in found[0]["where"])
    (step,) = lines(run)
    assert (step["step"], step["checks/alarms"]) == (last, 1.0) and "val/reward_sampled" in step
    said = capsys.readouterr()
    assert "record: in 1 steps, the last of step" in said.out or f"step {last}: record: " in said.err
