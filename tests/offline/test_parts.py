"""An output file that is written in parts has one writer."""

from __future__ import annotations

from collections.abc import Mapping
from itertools import pairwise
from pathlib import Path
from types import SimpleNamespace
from typing import cast

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from agentrl.config.keys import nested
from agentrl.config.sections.offline import GenerateConfig
from agentrl.data.contract import Dataset
from agentrl.errors import DataError
from agentrl.offline.decisive import decisive
from agentrl.offline.generate import IDLE, ROLLOUT, settings
from agentrl.offline.responses import InputRows, Parts
from agentrl.system.json_value import JSON
from agentrl.trajectory.sample import Sample
from tests.forked import forked
from tests.naming import naming

SECOND = """
import sys
from pathlib import Path
from agentrl.errors import DataError
from agentrl.offline.responses import Parts
try:
    Parts(Path(sys.argv[1]), {}).close()
except DataError as error:
    sys.exit(str(error))
"""


def test_a_second_command_waits_for_the_first(tmp_path: Path) -> None:
    output = tmp_path / "out.parquet"
    (tmp_path / "second.py").write_text(SECOND)
    rows = [pa.table({"row": [2 * part, 2 * part + 1]}) for part in range(2)]
    with Parts(output, {}) as parts:
        parts.add(rows[0])
        with naming(DataError, "data.output_path", output, "this process"):
            Parts(output, {})
        second = forked([tmp_path / "second.py", output], tmp_path)
        assert second.returncode == 1 and f"{output} is being written by process" in second.stderr
    assert forked([tmp_path / "second.py", output], tmp_path).returncode == 0
    with Parts(output, {}) as parts:
        assert parts.done == 2
        parts.add(rows[1])
        output.write_bytes(b"somebody's")
        with naming(DataError, "data.output_path", output, "exists already"):
            parts.publish()
        assert output.read_bytes() == b"somebody's"
        output.unlink()
        parts.publish()
    assert pq.read_table(output)["row"].to_pylist() == [0, 1, 2, 3]
    assert {path.name for path in tmp_path.iterdir()} == {"second.py", output.name}


def test_a_command_that_ends_before_its_first_part_leaves_nothing(tmp_path: Path) -> None:
    with Parts(tmp_path / "out.parquet", {}):
        pass
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("reward_model.reward_manager", "dapo"),
        ("reward_model.judge.prompt", "judge.jinja"),
        (f"{ROLLOUT}.max_model_len", 512),
        (f"{ROLLOUT}.agent.agent_loop_config_path", "loops.yaml"),
        (f"{ROLLOUT}.agent.trajectory_timeout", 5.0),
        (f"{ROLLOUT}.engine_kwargs.sglang", {"quantization": "fp8"}),
        ("data.image_key", "pictures"),
    ],
)
def test_a_key_that_rows_depend_on_is_compared(key: str, value: JSON) -> None:
    before, after = decisive(config_of({}), IDLE), decisive(config_of({key: value}), IDLE)
    assert [one for one in before if after[one] != before[one]] == [key]


def test_keys_of_hardware_and_faults_are_not_compared() -> None:
    others: dict[str, JSON] = {
        f"{ROLLOUT}.gpu_memory_utilization": 0.3,
        f"{ROLLOUT}.agent.on_code_error": "count",
        "reward_model.judge.max_concurrent": 7,
        "trainer.device": "cuda",
        "data.batch_size": 3,
    }
    assert decisive(config_of(others), IDLE) == decisive(config_of({}), IDLE)


def test_the_content_of_files_that_keys_name_is_compared(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    keys: dict[str, JSON] = {
        f"{ROLLOUT}.multi_turn.tool_config_path": "tools.yaml",
        f"{ROLLOUT}.agent.observers": ["watch.py:Watch"],
        "reward_model.scorers": {"mine": "score.py:score"},
        "actor_rollout_ref.model.chat_template": "~{{ messages }}" * 99,
        "tools.cassette": "record",
        "tools.cassette_path": "tape.jsonl",
    }
    names = ("tools.yaml", "watch.py", "score.py", "tape.jsonl")
    for name in names:
        Path(name).write_text("before")
    found = [decisive(config_of(keys), IDLE)]
    for name in names:
        Path(name).write_text("after")
        found.append(decisive(config_of(keys), IDLE))
    differing = [[key for key in old if old[key] != new[key]] for old, new in pairwise(found)]
    assert differing == [*([f"content of {name}"] for name in names[:3]), []], "a cassette grows"


def test_weights_that_were_trained_on_in_their_folder_are_compared(tmp_path: Path) -> None:
    file, data = tmp_path / "model.safetensors", SimpleNamespace(fingerprint="rows")
    keys: dict[str, JSON] = {"actor_rollout_ref.model.path": str(tmp_path)}
    found = []
    for content in (bytes(3_000_000), bytes(1_000_000) + b"x" * 1_000_000 + bytes(1_000_000)):
        file.write_bytes(content)
        found.append(settings(config_of(keys), cast(Dataset, data)))
    before, after = found
    assert [key for key in before if before[key] != after[key]] == [f"weights of {tmp_path}"]


def config_of(keys: Mapping[str, JSON]) -> GenerateConfig:
    own: dict[str, JSON] = {"data.path": "rows", "data.output_path": "out", "actor_rollout_ref.model.path": "model"}
    return GenerateConfig.model_validate(nested({**own, **keys}))


def test_rows_with_dictionaries_in_structs_are_joined(tmp_path: Path) -> None:
    """As polars writes categories: each row group has a dictionary of its own."""
    source, output = tmp_path / "rows.parquet", tmp_path / "out.parquet"
    words = [pa.array(list(text)).dictionary_encode() for text in ("aab", "ccd")]
    groups = [pa.table({"word": one, "info": pa.StructArray.from_arrays([one], ["word"])}) for one in words]
    with pq.ParquetWriter(source, groups[0].schema) as writer:
        for group in groups:
            writer.write_table(group)
    rows = InputRows([str(source)], ())
    samples = [Sample([], "x", "", file=str(source), row=number) for number in range(6)]
    with Parts(output, {}) as parts:
        for some in (samples[:2], samples[2:4], samples[4:]):
            parts.add(rows.take(some))
        parts.publish()
    assert [row["info"]["word"] for row in pq.read_table(output).to_pylist()] == list("aabccd")
    assert pq.read_table(output)["word"].to_pylist() == list("aabccd")


def test_a_column_that_a_file_has_twice_is_named(tmp_path: Path) -> None:
    one = pa.array([1])
    pq.write_table(pa.table([one, one], names=["x", "x"]), tmp_path / "rows.parquet")
    with naming(DataError, "rows.parquet", "column x", "found several"):
        InputRows([str(tmp_path / "rows.parquet")], ())
