"""The command for GPU machines, on a CPU: injected faults, its parts at tiny size, the wheels that it needs."""

from __future__ import annotations

import importlib
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from agentrl.plan.measured import DecodingRow, UpdateRow
from agentrl.quickstart.tiny_policy import make_tiny_policy
from benchmarks.gpu import curve, engine, marked_tests, orchestrate, profile, quickstart, states, update, wheels
from benchmarks.gpu.__main__ import PARTS, parts
from benchmarks.gpu.orchestrate import ROW, Part, Report, Result, Value, run_parts
from benchmarks.gpu.part import Setting
from benchmarks.gpu.report import markdown
from benchmarks.training.update_utilization import SHAPES
from tests.conftest import PROJECT
from tests.naming import assert_names, naming

FIGURES: dict[str, type[DecodingRow] | type[UpdateRow]] = {
    "engine": DecodingRow,
    "update": UpdateRow,
    "chosen": UpdateRow,
}
"""Parts whose rows give figures to `python -m agentrl.plan --measured`."""
SAY = f"""
import json, os, subprocess, sys, time
def row(label, **values):
    print({ROW!r} + json.dumps([label, values]), flush=True)
"""


def fake(name: str, program: str, limit: float = 60.0) -> Part:
    return Part(name, f"a fake part: {name}", (sys.executable, "-S", "-c", SAY + program), limit)


def run(folder: Path, fakes: list[Part], **options: float | bool | None) -> Report:
    before = folder / "report.json"
    report = Report.read(before) if before.exists() else Report("cpu", tiny=True)
    run_parts(fakes, report, folder, markdown, say=lambda line: None, **options)  # type: ignore[arg-type]
    assert Report.read(before) == report
    return report


def limits(tmp_path: Path) -> Iterator[tuple[Path, float]]:
    """Limits that double, each with a folder: on a busy machine a part takes seconds to start."""
    for number in range(1, 8):
        folder = tmp_path / str(number)
        folder.mkdir()
        yield folder, 2.0**number / 2


def test_injected_faults_cost_only_their_own_part(tmp_path: Path) -> None:
    """Fault injection: parts that hang, crash, write nonsense, or leave a process behind that holds their pipe."""
    child, hang = "subprocess.Popen(['sleep', '3600'])\n", "row('before', value=1)\ntime.sleep(3600)"
    hanging = ("hangs", "hangs with a child")
    for folder, limit in limits(tmp_path):
        fakes = [
            fake("hangs", hang, limit),
            fake("hangs with a child", f"{child}{hang}", limit),
            fake("crashes", "row('before', value=1)\nos.abort()"),
            fake("exits", "print('no room | left')\nsys.exit(3)"),
            fake("leaves a child", f"{child}row('a', value=True)"),
            fake(
                "writes nonsense",
                f"print({ROW!r} + '[1')\nprint({ROW!r} + '3', flush=True)\nos.write(1, bytes([255, 10]))",
            ),
            fake("works", "row('a', value=0.5)\nrow('b', other='x')\nrow('a', value=123456.0)"),
        ]
        report = run(folder, fakes)
        if all(report.parts[name].rows for name in hanging):
            break
    assert {name: part.status for name, part in report.parts.items()} == {
        "hangs": f"timed out after {limit:.0f} s",
        "hangs with a child": f"timed out after {limit:.0f} s",
        "crashes": "failed: ended by SIGABRT",
        "exits": "failed: exit status 3",
        "leaves a child": "done",
        "writes nonsense": "done",
        "works": "done",
    }
    for name in (*hanging, "crashes"):
        assert report.parts[name].rows == {"before": {"value": 1}}
    assert report.parts["works"].rows == {"a": {"value": 123456.0}, "b": {"other": "x"}}
    page = (folder / "report.md").read_text()
    assert "| works | done |" in page and "| a | 123,456 |  |" in page and "no room | left" in page
    assert sorted(path.name for path in folder.iterdir()) == ["log.txt", "report.json", "report.md"]


def test_it_goes_on_with_what_is_not_done(tmp_path: Path) -> None:
    mark = tmp_path / "mark"
    once = fake("once", f"open({str(mark)!r}, 'a').write('x')\nrow('a', value=1)")
    fails = fake("fails", f"sys.exit(0 if os.path.getsize({str(mark)!r}) > 1 else 1)")
    folder = tmp_path / "out"
    folder.mkdir()
    assert [part.status for part in run(folder, [once, fails]).parts.values()] == ["done", "failed: exit status 1"]
    assert run(folder, [once, fails]).parts["fails"].status == "failed: exit status 1" and mark.read_text() == "x"
    assert [part.status for part in run(folder, [once, fails], again=True).parts.values()] == ["done", "done"]
    assert mark.read_text() == "xx"


def test_a_budget_ends_parts_and_leaves_the_rest_out(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(orchestrate, "LEAST", 0.5)
    fakes = [fake("long", "row('a', value=1)\ntime.sleep(3600)", 3600.0), fake("next", "row('a', value=1)")]
    for folder, budget in limits(tmp_path):
        report = run(folder, fakes, budget=budget)
        if report.parts["long"].rows:
            break
    assert report.parts["long"].status == f"timed out after {budget:.0f} s" and report.parts["long"].rows
    assert report.parts["next"].status == "not run: the budget was used up"


def test_a_command_that_is_ended_leaves_its_rows_and_no_process(tmp_path: Path) -> None:
    """Fault injection: SIGTERM while a part hangs."""
    hang = SAY + "row(1, pid=os.getpid())\ntime.sleep(3600)"
    program = (
        "import sys\nimport benchmarks.gpu.__main__ as command\nfrom benchmarks.gpu.orchestrate import Part\n"
        f"hang = Part('hang', '', (sys.executable, '-c', {hang!r}), 3600.0)\n"
        "command.parts = lambda *_, **__: [hang]\nsys.exit(command.main())\n"
    )
    words = [sys.executable, "-c", program, "--device=cpu", f"--out={tmp_path}"]
    with subprocess.Popen(words, cwd=PROJECT, stdout=subprocess.DEVNULL) as command:
        file = tmp_path / "report.json"
        while not file.exists() or '"pid"' not in file.read_text():
            assert command.poll() is None
            time.sleep(0.05)
        command.send_signal(signal.SIGTERM)
        assert command.wait() == 128 + signal.SIGTERM
    part = Report.read(tmp_path / "report.json").parts["hang"]
    assert part.status == "interrupted"
    pid = part.rows["1"]["pid"]
    assert isinstance(pid, int)
    with pytest.raises(ProcessLookupError):
        os.kill(pid, 0)


def test_the_command_runs_a_real_part(tmp_path: Path) -> None:
    words = ["--device", "cpu", "--parts", "environment", "--out", str(tmp_path)]
    done = subprocess.run([sys.executable, "-m", "benchmarks.gpu", *words], cwd=PROJECT, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    report = json.loads((tmp_path / "report.json").read_text())
    rows = report["parts"]["environment"]["rows"]
    assert rows["python"]["value"].startswith("3.") and rows["matrix product, TFLOP/s"]["value"] > 0
    (tmp_path / "report.json").write_text("[]")
    done = subprocess.run([sys.executable, "-m", "benchmarks.gpu", *words], cwd=PROJECT, capture_output=True, text=True)
    assert_names(done.stderr, "no report")
    assert done.returncode == 2


def test_every_part_is_a_module_and_tiny_ones_are_asked_for_on_a_cpu() -> None:
    for name, module, limit, about, _ in PARTS:
        assert callable(importlib.import_module(f"benchmarks.gpu.{module}").main), name
        assert limit > 0 and about
    on_cpu, on_gpu = parts("cpu", True, None), parts("cuda", False, None)
    assert all("--tiny" in part.words for part in on_cpu) and not any("--tiny" in part.words for part in on_gpu)
    assert [part.name for part in on_gpu] == [part[0] for part in PARTS if part[0] not in ("pretrained", "gsm8k")]
    assert [part[0] for part in PARTS[:4]] == ["environment", "tests", "engine", "profile"], "what waits longest"
    with_model = parts("cuda", False, None, model="models/a", gsm8k="data/g")
    assert [part.name for part in with_model] == [part[0] for part in PARTS]
    assert all(part.words[part.words.index("--model") + 1] == "models/a" for part in with_model)
    assert [part.name for part in with_model if "data/g" in part.words] == ["gsm8k"]
    assert [part.name for part in parts("cuda", False, ["engine", "tests"])] == ["tests", "engine"]


def test_a_report_is_compared_number_by_number(tmp_path: Path) -> None:
    rows: dict[str, dict[str, Value]] = {"a": {"ms": 2.0, "name": "x", "good": True, "new": 3}, "b": {"ms": 1.0}}
    last = Report("cpu", True, {"p": Result("done", rows={"a": {"ms": 8.0, "name": "y", "good": True, "new": None}})})
    page = markdown(Report("cpu", True, {"p": Result("done", rows=rows), "q": Result("done", rows=rows)}), last)
    assert "| a | 2 (0.25) | x | yes | 3 |" in page and "| b | 1 |  |  |  |" in page
    assert page.count("(0.25)") == 1
    words = ["--device=cpu", "--parts=environment", f"--out={tmp_path}", f"--against={tmp_path}/none.json"]
    done = subprocess.run([sys.executable, "-m", "benchmarks.gpu", *words], cwd=PROJECT, capture_output=True, text=True)
    assert done.returncode == 2 and "none.json" in done.stderr


@pytest.mark.slice(0, "long run")
@pytest.mark.timeout(1800)
def test_the_curve_goes_on_where_it_was_stopped(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    make_tiny_policy(tmp_path / "model", seed=1)
    for name in ("examples", "configs", "tools", "agentrl", "data_prep", "interactions", "sandbox"):
        (tmp_path / name).symlink_to(PROJECT / name)
    problem = {"question": "Two and two?", "answer": "It is 2+2=<<2+2=4>>4.\n#### 4"}
    for split in ("train", "test"):
        (tmp_path / f"{split}.jsonl").write_text(36 * (json.dumps(problem) + "\n"))
    asked = Setting("cpu", True, "tiny", str(tmp_path / "model"), "float32")
    for _ in range(2):
        curve.run(asked, tmp_path, tmp_path)
        lines = [line for line in capsys.readouterr().out.splitlines() if line.startswith(ROW)]
        found = dict(json.loads(line[len(ROW) :]) for line in lines)
        assert found["steps done"] == {"seen": 2}
        assert found["val/success_greedy, last"]["step"] == 2


@pytest.mark.slice(1, "matrix")
@pytest.mark.parametrize(
    ("module", "rows", "column"),
    [
        ("update", {"512 tokens", "512 tokens, compiled"}, "of the matrix product"),
        (
            "profile",
            {"tiny, no layers computed again, head in parts", "tiny, all layers computed again, compiled"},
            "device busy",
        ),
        ("chosen", {"tiny, auto", "tiny, all layers computed again"}, "foretold GB"),
        ("engine", {"1 requests", "4 requests", "1 requests, transformers' generate"}, "decoded tokens a second"),
        ("logprobs", {"packed", "padded"}, "seconds"),
        (
            "footprint",
            {"tiny, without checkpointing, 512 tokens: update"},
            "foretold GB",
        ),
        ("offload", {"nothing offloaded", "param_offload", "enable_activation_offload"}, "update seconds"),
        ("shared", {"bfloat16, 50% prompt: flat / shared", "float32, 75% prompt: shared"}, "update seconds"),
        ("attention", {"tiny, capped: as it trains", "tiny, capped: one at a time"}, "ms"),
        ("chunks", {"2^17 logits", "2^19 logits"}, "seconds"),
        ("pretrained", {"seconds of the supervised warm-up", "seconds a step, rollout"}, "seen"),
    ],
)
def test_parts_at_tiny_size(
    module: str,
    rows: set[str],
    column: str,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(sys, "argv", [module, "--device=cpu", "--tiny", f"--model={tmp_path}"])
    if module == "pretrained":
        make_tiny_policy(tmp_path, seed=1)
    for one in (profile, update):  # tests/model/test_compiled.py runs it
        monkeypatch.setattr(one, "compile_layers", lambda layers, device: None)
    importlib.import_module(f"benchmarks.gpu.{module}").main()
    lines = [line for line in capsys.readouterr().out.splitlines() if line.startswith(ROW)]
    found = dict(json.loads(line[len(ROW) :]) for line in lines)
    assert rows <= set(found) and not any("error" in values for values in found.values())
    assert all(found[name][column] > 0 for name in rows)
    if module == "profile":
        kinds = [
            values["part of the kernels"]
            for name, values in found.items()
            if name.startswith("tiny, no layers computed again: ")
            and name.rpartition(": ")[2] in (*profile.KINDS, profile.REST)
        ]
        assert sum(kinds) == pytest.approx(1, abs=1e-3) and len(kinds) >= 4
    columns = FIGURES.get(module)
    if columns is not None:
        counted = [columns.model_validate(values) for values in found.values() if columns.marker in values]
        foretold = "foretold ms a step" if module == "engine" else "foretold update seconds"
        assert len(counted) == sum(values.get(foretold, 0) > 0 for values in found.values()) >= 2
    if module == "logprobs":
        assert 0 < found["packed against padded"]["largest difference"] < 1e-4
    if module == "chunks":
        assert found["2^19 logits, an update"]["seconds in parts"] > 0
    if module == "shared":
        assert 0 < found["float32, shared, against float32, flat"]["gradients off"] < 1e-5
        assert [found[f"float32, {share} prompt: shared"]["computed"] for share in ("25%", "50%", "75%")] == [
            pytest.approx(1 - share * 7 / 8, abs=0.01) for share in (0.25, 0.5, 0.75)
        ]
    if module == "attention":
        assert found["tiny, capped: as it trains"]["gradients off float32"] < 1e-5


def test_the_marked_tests_are_found_where_they_are() -> None:
    found = [str(file.relative_to(PROJECT)) for file in marked_tests.files()]
    assert {"tests/model/test_packed.py", "tests/engines/test_embedded.py", "tests/parallel/test_offload.py"} <= set(
        found
    )
    assert not any("sglang" in name for name in found)
    line = "tests/model/test_packed.py::test_a[mistral, window 7-dtype0] PASSED    [ 50%]"
    assert marked_tests.outcome(line) == ("tests/model/test_packed.py::test_a[mistral, window 7-dtype0]", "passed")
    assert marked_tests.outcome("collected 7 items") is None


def test_the_quickstart_part_reads_whole_lines_of_a_run_that_goes_on(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    first = {"step": 0, "val/success_sampled": 0.1, "val/success_greedy": 0.06}
    later = {"time/step": 2.0, "time/rollout": 1.5, "perf/tokens_per_second": 9.0}
    lines = [json.dumps(step) for step in (first, {"step": 1, **later}, first | later | {"step": 2})]
    file = tmp_path / "metrics.jsonl"
    assert quickstart.read(file) == []
    file.write_text("\n".join(lines) + '\n{"step": 3, "ti')
    steps = quickstart.read(file)
    assert [step["step"] for step in steps] == [0, 1, 2]
    quickstart.tell(steps, 7.0, {"val/success_greedy": (0.1, 1.0)})
    said = capsys.readouterr().out
    assert '["seconds a step, rollout", {"seen": 1.5}]' in said
    assert '["success, greedy last", {"seen": 0.06, "documented for a CPU": 1.0}]' in said
    assert '["success, sampled last", {"seen": 0.1, "documented for a CPU": null}]' in said


def test_kernels_are_sorted_by_their_names() -> None:
    """Names as torch's profiler shows them on a Hopper GPU."""
    for name, kind in (
        ("nvjet_hsh_128x256_64x4_1x2_h_bz_coopA_TNT", "matrix products"),
        ("sm90_xmma_gemm_bf16bf16_bf16f32_f32_tn_n_tilesize128x128x64", "matrix products"),
        ("void cutlass::Kernel2<cutlass_80_tensorop_bf16_s16816gemm_relu_bf16_256x128>", "matrix products"),
        ("void pytorch_flash::flash_bwd_dq_dk_dv_loop_seqk_parallel_kernel<...>", "attention"),
        ("triton_tem_fused_flex_attention_0", "attention"),
        ("Memcpy HtoD (Pinned -> Device)", "copies and fills"),
        (
            "void at::native::(anonymous namespace)::multi_tensor_apply_kernel<FusedAdamMathFunctor>",
            next(iter(profile.KINDS.keys() - {"attention", "matrix products", "copies and fills"})),
        ),
        ("void at::native::vectorized_elementwise_kernel<4, at::native::MulFunctor<float>>", profile.REST),
        ("triton_red_fused__to_copy_mean_mul_pow_0", profile.REST),
    ):
        assert profile.kind_of(name) == kind, name


def test_the_time_in_which_a_kernel_ran_is_counted_once() -> None:
    spans = [(0.0, 4.0), (2.0, 3.0), (3.0, 6.0), (8.0, 9.0)]
    assert profile.covered(profile.Kernel("a", begin, end, 1.0) for begin, end in spans) == 7.0
    assert profile.covered([]) == 0.0


def test_a_shape_is_cut_to_the_layers_that_a_device_has_room_for() -> None:
    whole = SHAPES["1.5B"]
    needs = sum(states.update_bytes(whole, 8192, autocast=True).values())
    assert states.fitting(whole, 8192, needs, autocast=True) == whole
    fewer = states.fitting(whole, 8192, needs - 1, autocast=True)
    assert fewer.layers == whole.layers - 1 and fewer.hidden == whole.hidden
    assert states.fitting(whole, 8192, 0.0, autocast=True).layers == 1
    # 16 bytes a parameter, and its bfloat16 copy
    assert needs > 18 * whole.params


def test_the_least_time_of_a_decoding_step_reads_weights_and_contexts_once() -> None:
    shape = SHAPES["7B"]
    weights = shape.params - shape.head_params
    assert engine.least_step(shape, 0, 1e12, 2) == pytest.approx(2 * weights / 1e12)
    added = engine.least_step(shape, 1000, 1e12, 2) - engine.least_step(shape, 0, 1e12, 2)
    assert added == pytest.approx(1000 * 57_344 / 1e12)


# The wheels


def test_what_a_machine_lacks_follows_from_its_list_and_our_metadata() -> None:
    have = wheels.read_have(wheels.HAVE.read_text(encoding="utf-8"))
    assert have["torch"] == "2.11.0" and have["typing-extensions"] is None
    lack = wheels.lacking(wheels.wanted(), have, "3.12")
    assert {"hydra-core", "omegaconf", "pydantic", "pydantic-core", "orjson", "pytest-asyncio"} <= set(lack.missing)
    assert lack.missing["antlr4-python3-runtime"] == "4.9.3"
    assert not set(lack.missing) & set(have)
    assert not any(name.startswith(("nvidia", "torch", "ray", "wandb", "moto")) for name in lack.missing)
    assert lack.too_old == []


def test_a_machine_with_everything_lacks_nothing_and_old_versions_are_told() -> None:
    nothing = wheels.lacking(wheels.wanted(), {}, "3.12").missing
    assert wheels.lacking(wheels.wanted(), dict.fromkeys(nothing), "3.12").missing == {}
    lack = wheels.lacking(["rich>=13.7", "torch>=2.11"], {"torch": "2.4.0", "rich": "14.0"}, "3.12")
    assert lack.too_old == ["torch 2.4.0, and agentrl needs >=2.11"]
    marked = ["tomli>=2; python_version < '3.11'", "orjson; sys_platform == 'win32'", "pyyaml; extra == 'x'"]
    assert wheels.lacking(marked, {}, "3.12").missing == {}


def test_lists_of_packages_are_read_as_pip_writes_them() -> None:
    text = "# a comment\nPyYAML==6.0.3\ntyping_extensions\n\nagentrl @ file:///somewhere\ntorch==2.11.0+cu130  # here\n"
    assert wheels.read_have(text) == {
        "pyyaml": "6.0.3",
        "typing-extensions": None,
        "agentrl": None,
        "torch": "2.11.0+cu130",
    }


def test_wheels_that_are_too_much_to_carry_are_refused_with_the_largest(tmp_path: Path) -> None:
    for name, megabytes in (("small", 1), ("large", 3)):
        (tmp_path / f"{name}-1-py3-none-any.whl").write_bytes(bytes(megabytes * 1_000_000))
    assert wheels.check_size(tmp_path, 4.0) == "2 wheels, 4.0 of at most 4 MB"
    with naming(SystemExit, "2 wheels", "4.0", "3 MB", "large-1", "3.0", "--have"):
        wheels.check_size(tmp_path, 3.0)


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_without_a_gpu_nothing_is_measured_and_no_report_is_begun(tmp_path: Path) -> None:
    words = [sys.executable, "-m", "benchmarks.gpu", f"--out={tmp_path}/report"]
    done = subprocess.run(words, cwd=PROJECT, capture_output=True, text=True, check=False)
    assert done.returncode == 2 and not (tmp_path / "report").exists()
    assert_names(done.stderr, "CUDA", torch.__version__, "--device cpu", "docs/gpu.md")
