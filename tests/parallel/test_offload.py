"""What lies in host memory when. Without a second device the moves themselves cannot be made: `meta` stands for the
host, from which nothing comes back, or the moves are only noted."""

from __future__ import annotations

import platform
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from torch import nn
from torch.autograd.graph import saved_tensors_hooks

from agentrl.config.sections.actor import ActorConfig
from agentrl.config.sections.model import ModelConfig
from agentrl.config.sections.optim import OptimConfig
from agentrl.config.sections.parallel import ActorFSDPConfig
from agentrl.optim.optimizer import Optim
from agentrl.parallel import offload
from agentrl.parallel.offload import Offload
from tests.naming import naming
from tests.workers.conftest import BatchMaker, WorkerMaker, fsdp, same_weights
from tests.workers.made import policy_worker


class NotedOffload(Offload):
    """Notes where parameters would go, and leaves them where they are."""

    def __init__(self, *, enabled: bool = True) -> None:
        self.moves: list[str] = []
        super().__init__(nn.Linear(1, 1), torch.device("cuda"), enabled=enabled)

    def _move(self, device: torch.device) -> None:
        self.moves.append(device.type)


def test_parameters_are_on_the_device_while_the_role_works(
    make_worker: WorkerMaker, make_batch: BatchMaker, tmp_path: Path
) -> None:
    worker, batch = make_worker(), make_batch()
    noted = fsdp(worker).offload = NotedOffload()
    assert noted.moves == ["cpu"]
    work = {
        "log-probs": lambda: worker.compute_log_probs(batch),
        "update": lambda: worker.update(batch, step=1),
        "save": lambda: worker.save(tmp_path),
        "load": lambda: worker.load(tmp_path),
        "weights": lambda: list(worker.weights().read()),
    }
    for name, run in work.items():
        noted.moves.clear()
        run()
        assert noted.moves == ["cuda", "cpu"], name
    noted.moves.clear()
    batch = batch.with_fields(advantages=None)
    with naming(ValueError, "advantages", "missing"):
        worker.update(batch, step=2)
    assert not noted.moves
    with noted, noted:
        assert noted.moves == ["cuda"]
    assert noted.moves == ["cuda", "cpu"]


@pytest.mark.parametrize("enabled", [True, False])
def test_the_devices_memory_is_given_back_when_parameters_leave_it(
    enabled: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    given = []
    monkeypatch.setattr(torch.cuda, "empty_cache", lambda: given.append("back"))
    context = NotedOffload(enabled=enabled)
    given.clear()
    with context:
        with context:
            pass
        assert not given
    assert given == (["back"] if enabled else [])
    assert context.moves == (["cpu", "cuda", "cpu"] if enabled else [])


def test_a_server_that_wakes_for_new_weights_finds_the_devices_memory(
    make_worker: WorkerMaker, monkeypatch: pytest.MonkeyPatch
) -> None:
    worker, given = make_worker(), []
    monkeypatch.setattr(torch.cuda, "empty_cache", lambda: given.append("back"))
    worker.weights()
    assert not given
    fsdp(worker).device = torch.device("cuda")
    worker.weights()
    assert given == ["back"]


@pytest.mark.parametrize("name", ["adamw", "muon"])
def test_optimizer_state_goes_home_after_each_step(name: str) -> None:
    params = {"a": nn.Parameter(torch.ones(3, 2)), "b": nn.Parameter(torch.ones(2))}
    config = OptimConfig(name=name, lr=0.1, adamw_lr=0.1 if name == "muon" else None)
    home, plain = (Optim(params, {"a"}, config, 10, where) for where in (torch.device("meta"), None))
    for optim in (plain, home):
        for param in params.values():
            param.grad = torch.ones_like(param)
        optim.step(1)
    expected = {key: (value.shape, value.dtype) for key, value in plain.state().items()}
    assert {key: (value.shape, value.dtype) for key, value in home.state().items()} == expected
    assert {value.device.type for value in home.state().values() if value.ndim} == {"meta"}
    assert {value.device.type for value in plain.state().values()} == {"cpu"}
    home.load_state(plain.state())
    assert {value.device.type for value in home.state().values() if value.ndim} == {"meta"}


def test_offloaded_activations_are_the_inputs_of_the_layers_and_change_nothing(
    make_worker: WorkerMaker, make_batch: BatchMaker, tiny_policy: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    batch = make_batch()
    config = ActorConfig(ppo_mini_batch_size=4, optim=OptimConfig(lr=1e-2))
    model = ModelConfig(path=str(tiny_policy), enable_gradient_checkpointing=True)
    plain = make_worker(config, model)
    saving = make_worker(config, model.model_copy(update={"enable_activation_offload": True}))
    plain.update(batch, step=1)
    copied: list[torch.Tensor] = []

    def to_host(tensor: torch.Tensor) -> torch.Tensor:
        copied.append(tensor.clone())
        return copied[-1]

    monkeypatch.setattr(offload, "save_on_cpu", lambda pin_memory: saved_tensors_hooks(to_host, lambda tensor: tensor))
    saving.update(batch, step=1)
    hidden, layers = fsdp(saving).model.base.config.hidden_size, fsdp(saving).model.base.config.num_hidden_layers
    assert len(copied) == layers
    assert {tensor.shape[-1] for tensor in copied} == {hidden}
    assert same_weights(plain, saving)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_offloading_frees_the_device_and_changes_nothing(make_batch: BatchMaker, tiny_policy: Path) -> None:

    batch, results = make_batch(), []
    for away in (False, True):
        away_from = ActorFSDPConfig(param_offload=away)
        worker = policy_worker(
            ModelConfig(path=str(tiny_policy)),
            ActorConfig(ppo_mini_batch_size=4, optim=OptimConfig(lr=1e-2), fsdp_config=away_from),
            device="cuda",
            temperature=1.0,
            log_prob_max_tokens=4096,
            total_steps=10,
            seed=1,
        )
        for step in (1, 2):
            worker.update(batch, step=step)
        results.append({name: tensor.cpu().clone() for name, tensor in fsdp(worker).named_tensors()})
        device = "cpu" if away else "cuda"
        held = [*fsdp(worker).tensors.values(), *(value for value in fsdp(worker).optim.state().values())]
        assert {tensor.device.type for tensor in held if tensor.ndim} == {device}
    assert all(torch.allclose(results[1][name], tensor, atol=1e-6) for name, tensor in results[0].items())


FREED = """
import sys, psutil, torch
from agentrl.parallel.offload import give_back
used = psutil.Process().memory_info
for megabytes in (40, 400):
    pieces = [b"x" * (64 << 10) for _ in range(16 * megabytes)]
    last = b"x" * (64 << 10)  # else the C library gives the memory before it back by itself
    del pieces
    before = used().rss
    give_back(torch.device("cpu"))
    print(before - used().rss >> 20)
"""


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="other C libraries keep memory in other ways")
def test_a_small_models_memory_is_kept_and_much_is_given_back() -> None:
    small, large = map(int, subprocess.check_output([sys.executable, "-c", FREED], text=True).split())
    assert small < 20 and large > 300
