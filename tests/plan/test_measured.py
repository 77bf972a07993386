"""Figures of a GPU's report: written by the kit's own columns, read by the plan, and what is refused."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from agentrl.config import Config, load_config
from agentrl.engines.embedded.pages import in_pages
from agentrl.errors import ConfigError
from agentrl.plan import __main__ as command
from agentrl.plan import speeds
from agentrl.plan.measured import PARTS
from agentrl.plan.memory import MemoryPlan
from agentrl.plan.simulated_servers import Session
from agentrl.plan.sizing import ModelShape
from agentrl.plan.step_times import Cluster, Plan, Training
from agentrl.plan.times import TimePlan, advice, cluster_of
from agentrl.trajectory.batch import RaggedBatch
from benchmarks.gpu import foretold
from benchmarks.gpu.__main__ import PARTS as KIT_PARTS
from benchmarks.gpu.foretold import Device
from benchmarks.gpu.orchestrate import Report, Result, Value
from benchmarks.gpu.part import Setting
from benchmarks.gpu.report import markdown
from benchmarks.training.update_utilization import MICRO_BATCHES, SHAPES, made_batch
from tests.e2e.test_docs import commands
from tests.naming import assert_names
from tests.plan.test_memory import SHAPE

H200, PEAK = "NVIDIA H200", 989e12
ROLLOUT, ACTOR, MODEL = "actor_rollout_ref.rollout", "actor_rollout_ref.actor", "actor_rollout_ref.model"
GRAPHS = f"{ROLLOUT}.engine_kwargs.embedded.graphs=false"
KIT = SHAPES["1.5B"]
TRUE = Cluster(nodes=1, gpus_per_node=1, memory=141e9, bandwidth=4.8e12, flops=PEAK).model_copy(
    update={"bandwidth_used": 0.85, "step_fixed": 0.0017, "step_each": 4e-6, "mfu_update": 0.29}
)
"""A GPU as it might be found."""


@pytest.fixture(autouse=True)
def gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda: H200)
    monkeypatch.setattr(foretold, "room", lambda device: 141e9)


@pytest.fixture
def words(tmp_path: Path) -> list[str]:
    (tmp_path / "config.json").write_text(json.dumps(SHAPE), encoding="utf-8")
    return [f"{MODEL}.path={tmp_path}", f"{MODEL}.dtype=bfloat16", f"{ACTOR}.use_torch_compile=false"]


def spaced(columns: dict[str, Value]) -> dict[str, Value]:
    """Name columns as `benchmarks.gpu.part.row` does."""
    return {name.replace("_", " "): value for name, value in columns.items()}


def device() -> Device:
    return Device(Setting("cuda", False, "1.5B", "", "bfloat16"), product=0.8 * PEAK, copy=0.85 * 4.8e12)


def decoding(*, by_graphs: bool = True) -> dict[str, dict[str, Value]]:
    """Rows of the part `engine` on the GPU `TRUE`; one number of requests fell out."""
    true = Training(TRUE, Plan(), KIT).speed()
    rows: dict[str, dict[str, Value]] = {"16 requests": {"error": "out of memory"}}
    for requests in (1, 4, 64, 512):
        step = true.step(requests, requests * 576) + (0 if by_graphs else 0.03)
        columns: dict[str, Value] = {"ms_a_step": step * 1e3}
        columns |= device().decoding(KIT, requests, requests * 576, step, by_graphs=by_graphs)
        rows[f"{requests} requests{'' if by_graphs else ', without graphs'}"] = spaced(columns)
    return rows


def update(shape: ModelShape, *, slower: float = 1.0, compiled: bool = False) -> dict[str, Value]:
    """A row of an update on the GPU `TRUE` with all layers computed again."""
    batch = made_batch(shape, MICRO_BATCHES * 8192, 8192)
    seconds = slower * seconds_of(shape, batch)
    return spaced(
        device().update(shape, batch, 8192, seconds, recomputed=1.0, compiled=compiled, log_prob_seconds=seconds / 3)
    )


def seconds_of(shape: ModelShape, batch: RaggedBatch) -> float:
    """Seconds of an update by the FLOPs that its rows take, worked out apart from `Device`."""
    work = Training(TRUE, Plan(prompts=1, mini_batch=1, micro_tokens=8192, by_parts=True), shape)
    lengths, sampled = batch.lengths.tolist(), batch.policy_tokens.tolist()
    sessions = [
        Session(str(row), 0, length - part, [part], [], [])
        for row, (length, part) in enumerate(zip(lengths, sampled, strict=True))
    ]
    return work.update("update_actor", sessions).seconds


def report(folder: Path, **parts: dict[str, dict[str, Value]]) -> Path:
    environment: dict[str, dict[str, Value]] = {"GPU": {"value": H200}}
    results = {"environment": Result("done", rows=environment)}
    results |= {name.replace("_", "-"): Result("done", rows=rows) for name, rows in parts.items()}
    Report("cuda", False, results).write(folder, markdown)
    return folder / "report.json"


def planned(words: list[str], *further: str) -> MemoryPlan:
    return MemoryPlan(load_config([*words, *further], "train", Config), "cuda", 141e9)


def test_a_plan_with_a_report_foretells_the_reports_own_rows(words: list[str], tmp_path: Path) -> None:
    file = report(tmp_path, engine=decoding(), update_1_5B={"8,192 tokens": update(KIT)})
    cluster, figures = cluster_of(planned(words), file)
    assert cluster.step_fixed == pytest.approx(TRUE.step_fixed, rel=1e-6)
    assert cluster.step_each == pytest.approx(TRUE.step_each, rel=1e-6)
    found, true = (Training(one, Plan(), KIT).speed() for one in (cluster, TRUE))
    assert found.step(300, 300 * 4000) == pytest.approx(true.step(300, 300 * 4000))
    assert cluster.mfu_update == pytest.approx(TRUE.mfu_update)
    lines = list(speeds.described(figures))
    (measured,) = [line for line in lines if line.startswith("measured")]
    assert str(file) in measured and H200 in measured
    assert "updates at 0.29" in measured and "1.7 ms more a step" in measured and "4 µs more" in measured
    assert any(line.startswith("the data sheet of H200: 989 TFLOP/s") for line in lines)
    assert any(line.startswith("assumed") and "B/s to disk" in line for line in lines)


def test_the_way_of_decoding_chooses_the_rows(words: list[str], tmp_path: Path) -> None:
    file = report(tmp_path, engine=decoding() | decoding(by_graphs=False))
    assert cluster_of(planned(words, GRAPHS), file)[0].step_fixed == pytest.approx(0.0317)
    assert cluster_of(planned(words), file)[0].step_fixed == pytest.approx(0.0017)
    servers, _ = cluster_of(planned(words, GRAPHS).with_config(_served(words)), file)
    assert servers.step_fixed == Cluster().step_fixed, "servers are not the embedded engine"


def _served(words: list[str]) -> Config:
    config = load_config(words, "train", Config)
    rollout = config.actor_rollout_ref.rollout.model_copy(update={"name": "sglang"})
    return config.model_copy(
        update={"actor_rollout_ref": config.actor_rollout_ref.model_copy(update={"rollout": rollout})}
    )


def test_the_nearest_models_update_is_taken_and_none_of_the_other_kind(words: list[str], tmp_path: Path) -> None:
    small, large = update(SHAPES["0.5B"], slower=2), update(SHAPES["7B"])
    file = report(tmp_path, update_7B={"8,192 tokens": large}, update_0_5B={"8,192 tokens": small})
    _, figures = cluster_of(planned(words), file)
    assert figures["mfu_update"].value == pytest.approx(small["mfu update"])
    compiled = [*words[:2], f"{ACTOR}.use_torch_compile=true"]
    _, figures = cluster_of(planned(compiled), file)
    assert figures["mfu_update"].value == Cluster().mfu_update
    assert figures["mfu_update"].origin.endswith("has no updates with compiled layers in bfloat16")
    assert figures["step_fixed"].origin.endswith("has no decoding with graphs in bfloat16")
    _, figures = cluster_of(planned([words[0], words[2]]), file)
    assert figures["mfu_update"].origin.endswith("in float32"), "the kit's rows are of bfloat16"


def test_without_a_report_graphs_are_bound_by_bytes_and_single_launches_by_30_ms(words: list[str]) -> None:
    plan = Plan(dtype="bfloat16")
    graphs, one_by_one = (
        Training(cluster_of(planned(words, *further))[0], plan, KIT).speed() for further in ((), (GRAPHS,))
    )
    read = 2 * KIT.params
    assert read / 4.8e12 < graphs.step(1, 576) < 0.01
    assert graphs.step(256, 256 * 8000) - graphs.step(256, 256 * 4000) == pytest.approx(
        2 * 2 * 28 * 256 * 256 * 4000 / (0.7 * 4.8e12)
    )
    assert one_by_one.step(1, 576) > 0.03
    _, figures = cluster_of(planned(words, GRAPHS))
    assert "H200" in figures["step_fixed"].origin


def test_plan_and_engine_decide_by_one_rule(words: list[str]) -> None:
    assert planned(words).decodes_by_graphs
    assert not planned(words, GRAPHS).decodes_by_graphs
    recorded = planned(words, f"{ACTOR}.router_replay.mode=R3")
    assert not recorded.decodes_by_graphs
    assert recorded.moments[0].parts["engine's cache"] == planned(words, GRAPHS).moments[0].parts["engine's cache"]
    assert not MemoryPlan(load_config(words, "train", Config), "cpu", 1e12).decodes_by_graphs
    with_state = in_pages("cuda", None, has_states=True, records_experts=False)
    assert with_state == (False, "a state") and in_pages("cpu", True, has_states=False, records_experts=False)[0]


def test_advice_names_launches_only_where_they_bound_decoding(words: list[str]) -> None:
    for further, named in (((), False), ((GRAPHS,), True)):
        memory = planned(words, f"{ROLLOUT}.multi_turn.tool_config_path=null", *further)
        plan = TimePlan(memory, *cluster_of(memory))
        assert plan.step.dominates.name == "rollout"
        assert any("kernel launches" in line for line in advice(plan, plan.ways[0])) == named


def changed(change: Callable[[dict[str, Any]], object]) -> Callable[[Path], None]:
    def write(file: Path) -> None:
        values = json.loads(file.read_text(encoding="utf-8"))
        change(values)
        file.write_text(json.dumps(values), encoding="utf-8")

    return write


ENGINE = "parts.engine.rows.64 requests"


@pytest.mark.parametrize(
    ("spoil", "names"),
    [
        (Path.unlink, ["No such file"]),
        (lambda file: file.write_text("step 1\n", encoding="utf-8"), ["no report of the kit", "json"]),
        (lambda file: file.write_bytes(b"\xff\x00"), ["no report of the kit"]),
        (changed(lambda values: values.pop("parts")), ["parts: field required"]),
        (changed(lambda values: values["parts"].update(engine=[1])), ["parts.engine", "found [1]"]),
        (changed(lambda values: values.update(device="cpu")), ["device: expected cuda, found cpu"]),
        (changed(lambda values: values.update(tiny=True)), ["tiny: expected false, found true"]),
        (
            changed(lambda values: values["parts"]["environment"]["rows"]["GPU"].update(value="NVIDIA A100")),
            ["parts.environment.rows.GPU.value", "expected NVIDIA H200", "found NVIDIA A100"],
        ),
        (changed(lambda values: values["parts"].pop("environment")), ["expected NVIDIA H200", "found no such row"]),
        (
            changed(lambda values: values["parts"].pop("engine")),
            ["ms beyond reading or mfu update", "found none in environment"],
        ),
        (
            changed(lambda values: values["parts"]["engine"]["rows"]["64 requests"].update({"requests": 0})),
            [f"{ENGINE}.requests", "found 0"],
        ),
        (
            changed(lambda values: values["parts"]["engine"]["rows"]["64 requests"].update({"bandwidth used": "x"})),
            [f"{ENGINE}.bandwidth used", "found 'x'"],
        ),
        (
            changed(
                lambda values: values["parts"]["engine"]["rows"]["64 requests"].update(
                    {"ms beyond reading": float("nan")}
                )
            ),
            [f"{ENGINE}.ms beyond reading: input should be a finite number, found nan"],
        ),
        (
            changed(lambda values: values["parts"]["engine"]["rows"]["64 requests"].pop("by graphs")),
            [f"{ENGINE}.by graphs: field required"],
        ),
    ],
)
def test_another_file_is_refused_by_key(
    words: list[str], tmp_path: Path, spoil: Callable[[Path], object], names: list[str]
) -> None:
    file = report(tmp_path, engine=decoding())
    spoil(file)
    with pytest.raises(ConfigError) as refused:
        cluster_of(planned(words), file)
    for name in (f"--measured {file}: ", "python -m benchmarks.gpu --parts", *names):
        assert name in str(refused.value), str(refused.value)


def test_the_command_takes_the_option_and_refuses_it_on_a_cpu(
    words: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    file = report(tmp_path, engine=decoding())
    assert command.main([words[0], "--measured", str(file), "trainer.device=cpu"]) == 2
    assert f"--measured {file}: trainer.device: expected cuda, found cpu" in capsys.readouterr().err
    monkeypatch.setattr("agentrl.runtime.device.resolve_device", lambda *_: "cuda")
    monkeypatch.setattr("agentrl.runtime.room.room", lambda device: 141e9)
    _, kit, line = commands("docs/plan.md")
    asked, (_, _, module, *given) = kit.split("--parts ")[1].split(" --out")[0], line.split()
    assert (module, asked) == ("agentrl.plan", PARTS) and set(asked.split()) < {part[0] for part in KIT_PARTS}
    places = {"Qwen/Qwen3-0.6B": str(tmp_path), "runs/gpu-report/report.json": str(file)}
    for name, place in places.items():
        given = [word.replace(name, place) for word in given]
    small = [words[2], "data.train_batch_size=2", f"{ACTOR}.ppo_mini_batch_size=2", f"{ROLLOUT}.n=4"]
    assert command.main([*given, *small]) == 0
    said = capsys.readouterr().out
    assert_names(said, file, H200, "1.7 ms")
