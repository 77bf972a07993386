"""Which device a run takes, and what it says of a GPU that torch cannot use. The GPU here is a pretended one."""

from __future__ import annotations

from pathlib import Path
from typing import Literal

import pytest
import torch

from agentrl.config.sections.model import PlainModelConfig
from agentrl.config.sections.trainer import Device, TrainerConfig
from agentrl.errors import ConfigError
from agentrl.runtime import device
from agentrl.runtime.device import note_precision, note_ranks, resolve_device, visible_gpu
from tests.naming import assert_names, naming


@pytest.fixture
def fake_gpu(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A program `nvidia-smi` that tells of a GPU, first on PATH, beside a torch that is a build for the CPU."""
    program = tmp_path / "nvidia-smi"
    program.write_text('#!/bin/sh\n[ "$1" = -L ] && echo "GPU 0: NVIDIA H200 (UUID: GPU-0)"\n')
    program.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    monkeypatch.setattr(device, "_warned", False)
    monkeypatch.setattr(device, "_NVIDIA_GPUS", tmp_path / "none")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(torch.version, "cuda", None)
    return program


def test_a_cpu_build_beside_a_gpu_is_told_once_and_never_where_the_cpu_was_chosen(fake_gpu: Path) -> None:
    said: list[str] = []
    assert resolve_device("cpu", said.append) == "cpu" and said == []
    assert [resolve_device("auto", said.append) for _ in range(3)] == ["cpu"] * 3
    (warning,) = said
    for words in (
        "NVIDIA H200",
        f"torch {torch.__version__} is a build for the CPU",
        "CONSTRAINTS=constraints/cuda.txt",
    ):
        assert words in warning
    assert "trainer.device=cpu" in warning


def test_cuda_beside_a_torch_that_cannot_is_refused_with_the_way_out(
    fake_gpu: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with naming(ConfigError, "NVIDIA", "H200", "CPU", "constraints/cuda.txt"):
        resolve_device("cuda", print)
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    with naming(ConfigError, "NVIDIA", "H200", "CUDA", "13.0", "TORCH_INDEX"):
        resolve_device("cuda", print)
    fake_gpu.unlink()
    with naming(ConfigError, "CUDA", "trainer.device=cpu"):
        resolve_device("cuda", print)


@pytest.mark.parametrize("hidden", ["", "-1"])
def test_a_gpu_that_the_user_hides_is_not_spoken_of(
    fake_gpu: Path, monkeypatch: pytest.MonkeyPatch, hidden: str
) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", hidden)
    said: list[str] = []
    assert resolve_device("auto", said.append) == "cpu" and said == []


@pytest.mark.parametrize(
    "program",
    [
        None,
        "#!/bin/sh\necho 'NVIDIA-SMI has failed because it could not communicate with the NVIDIA driver'\nexit 9\n",
        "#!/bin/sh\necho 'No devices were found'\n",
        "no program at all",
    ],
)
def test_without_nvidia_smi_the_drivers_own_list_counts(fake_gpu: Path, tmp_path: Path, program: str | None) -> None:
    fake_gpu.unlink()
    if program is not None:
        fake_gpu.write_text(program)
        fake_gpu.chmod(0o755)
    assert visible_gpu() is None
    place = tmp_path / "none" / "0000:01:00.0"
    place.mkdir(parents=True)
    (place / "information").write_text("Model: \t\t NVIDIA A100-SXM4-80GB\nIRQ:   \t\t 45\n")
    assert visible_gpu() == "NVIDIA A100-SXM4-80GB"


def test_torch_with_a_gpu_takes_it_without_asking_for_names(fake_gpu: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(device, "visible_gpu", lambda: pytest.fail("it was looked for"))
    assert resolve_device("auto", print) == resolve_device("cuda", print) == "cuda"
    assert resolve_device("cpu", print) == "cpu"


@pytest.mark.parametrize(
    ("device", "path", "dtype", "told"),
    [
        ("cuda", "Qwen/Qwen3-0.6B", "float32", True),
        ("cuda", "Qwen/Qwen3-0.6B", "bfloat16", False),
        ("cuda", "quickstart", "float32", False),
        ("cpu", "Qwen/Qwen3-0.6B", "float32", False),
    ],
)
def test_float32_on_a_gpu_is_noted(device: str, path: str, dtype: Literal["float32", "bfloat16"], told: bool) -> None:
    said: list[str] = []
    note_precision(device, PlainModelConfig(path=path, dtype=dtype), "actor_rollout_ref.model", said.append)
    assert [one.endswith("actor_rollout_ref.model.dtype=bfloat16 trained weights stay float32") for one in said] == [
        True
    ] * told


def test_ranks_that_share_a_cpu_are_told_of_unless_the_cpu_was_chosen() -> None:
    said: list[str] = []
    cases: list[tuple[Device, int, str]] = [
        ("auto", 8, "cuda"),
        ("auto", 1, "cpu"),
        ("cpu", 8, "cpu"),
        ("auto", 8, "cpu"),
    ]
    for chosen, ranks, at_work in cases:
        note_ranks(at_work, TrainerConfig(device=chosen, n_gpus_per_node=ranks), said.append)
    (warning,) = said
    assert_names(warning, "trainer.n_gpus_per_node=8", "no CUDA device", "trainer.device=cuda")
