"""Checkpoints go from any number of ranks to any other, bit for bit."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file
from torch.distributed.checkpoint.hf_storage import HuggingFaceStorageReader
from torch.distributed.checkpoint.state_dict_loader import load

from agentrl.errors import CheckpointError
from tests.checkpoint.ranks_of_state import Part, same
from tests.forked import forked

SHARDINGS = ("two", "four", "replicas", "tensor")


@pytest.fixture(scope="module")
def written(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What ranks_of_state.py, which checks its own loads, wrote: one state in several shardings."""
    work = tmp_path_factory.mktemp("sharded")
    ran = forked([Path(__file__).with_name("ranks_of_state.py"), work], timeout=150)
    assert ran.returncode == 0, ran.stderr
    return work


@pytest.mark.parametrize("name", SHARDINGS)
def test_one_process_loads_what_many_ranks_wrote(written: Path, name: str) -> None:
    part = Part(seed=3, sharding=None)
    part.state.load(written / name)
    assert same(part.whole(), load_file(written / "two.reference"))


@pytest.mark.parametrize("name", SHARDINGS)
def test_every_element_is_written_once_and_by_all_ranks(written: Path, name: str) -> None:
    reference = load_file(written / "two.reference")
    bytes_by_shard = [
        sum(tensor.nbytes for tensor in load_file(path).values()) for path in (written / name).glob("*.safetensors")
    ]
    assert len(bytes_by_shard) == (2 if name == "two" else 4)
    assert sum(bytes_by_shard) == sum(tensor.nbytes for tensor in reference.values())
    assert min(bytes_by_shard) > 0


def test_torch_reads_it_without_us(written: Path) -> None:
    reference = load_file(written / "two.reference")
    found = {name: torch.empty_like(tensor) for name, tensor in reference.items()}
    load(found, storage_reader=HuggingFaceStorageReader(str(written / "tensor")))
    assert same(found, reference)


def test_a_shard_that_is_missing_or_of_another_save_is_told(written: Path, tmp_path: Path) -> None:
    part = Part(seed=3, sharding=None)
    before = part.whole()
    for path in (written / "four").iterdir():
        (tmp_path / path.name).write_bytes(path.read_bytes())
    third = tmp_path / "shard-00003-of-00004.safetensors"
    third.write_bytes((written / "replicas" / third.name).read_bytes())
    with pytest.raises(CheckpointError, match=r"half-written, \d+ elements of '.*' are there, of float32"):
        part.state.load(tmp_path)
    third.unlink()
    with pytest.raises(CheckpointError, match=r"half-written, shard-00003-of-00004\.safetensors is missing"):
        part.state.load(tmp_path)
    assert same(part.whole(), before)


def test_nothing_in_it_is_pickled(written: Path) -> None:
    for path in (written / "four").iterdir():
        if path.name == "state.json":
            json.loads(path.read_text())
        else:
            with safe_open(path, "pt") as shard:
                assert set(json.loads(shard.metadata()["DCP_SHARDING_INFO"])) == set(shard.keys())
