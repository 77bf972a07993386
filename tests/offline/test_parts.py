"""An output file that is written in parts has one writer."""

from __future__ import annotations

from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq

from agentrl.errors import DataError
from agentrl.offline.responses import Parts
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
