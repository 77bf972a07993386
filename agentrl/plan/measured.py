"""Figures from the report of a GPU, which the kit `benchmarks.gpu` writes, in place of assumed ones.

The kit's rows have the columns of `DecodingRow` and `UpdateRow`. Their values are what the plan would have had to
assume to foretell the row, so a plan with a report foretells the report's own rows.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, ClassVar, TypeVar

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from agentrl.errors import ConfigError
from agentrl.plan.speeds import Figure, Figures, from_one

OPTION = "--measured"
PARTS = "environment engine update-0.5B update-1.5B"
"""The kit's parts that a plan takes figures from."""
AGAIN = f"python -m benchmarks.gpu --parts {PARTS} --out FOLDER, on the GPU of the plan, writes one: FOLDER/report.json"
DTYPE = "bfloat16"
"""Type that the kit computes in on a GPU."""
OF_UPDATES: tuple[str, ...] = ("mfu_update", "mfu_forward")
OF_DECODING: tuple[str, ...] = ("bandwidth_used", "step_fixed", "step_each")
"""Fields of `Cluster` that a report's rows give."""
Above = Annotated[float, Field(gt=0, allow_inf_nan=False)]
Value = str | float | int | bool | None
"""A cell of a report's row."""


class Columns(BaseModel):
    """Columns of a report's row. A column has a space where its field has an underscore."""

    model_config = ConfigDict(frozen=True, alias_generator=lambda name: name.replace("_", " "), populate_by_name=True)
    marker: ClassVar[str]
    """A column that only such rows have."""


class DecodingRow(Columns):
    """A decoding step of the embedded engine, mean over an answer."""

    marker = "ms beyond reading"
    requests: int = Field(gt=0)
    by_graphs: bool
    bandwidth_used: Above
    """A copy's rate over the data sheet's."""
    ms_beyond_reading: float = Field(allow_inf_nan=False)
    """Milliseconds that are left when weights and contexts are read at a copy's rate, and products are computed as
    fast as is assumed."""


class UpdateRow(Columns):
    """An update of a policy."""

    marker = "mfu update"
    parameters: int = Field(gt=0)
    micro_batch: int = Field(gt=0)
    """Its tokens."""
    compiled: bool
    mfu_update: Above
    """Part of the peak that the update reached, with what its backward pass computes again."""
    mfu_forward: Above | None = None


ColumnsT = TypeVar("ColumnsT", bound=Columns)


class _Part(BaseModel):
    rows: dict[str, dict[str, Value]]


class _Report(BaseModel):
    device: str
    tiny: bool
    parts: dict[str, _Part]


@dataclass(frozen=True, slots=True)
class Measured:
    """Rows of a report that a plan can use."""

    file: Path
    gpu: str
    decoding: Sequence[DecodingRow]
    updates: Sequence[UpdateRow]

    @staticmethod
    def read(file: Path, gpu: str) -> Measured:
        """Read the report of a GPU. Raises ConfigError for another file, another GPU, and no row with figures."""
        try:
            report = _Report.model_validate_json(file.read_bytes())
        except OSError as error:
            raise ConfigError(f"{OPTION} {file}: cannot be read: {error.strerror}. {AGAIN}") from None
        except ValidationError as error:
            raise _refused(file, (), error) from None
        if report.device != "cuda" or report.tiny:
            key, wanted = ("tiny", "false") if report.device == "cuda" else ("device", "cuda")
            found = "true" if report.device == "cuda" else report.device
            raise ConfigError(f"{OPTION} {file}: {key}: expected {wanted}, found {found}: a trial of the kit. {AGAIN}")
        environment = report.parts.get("environment", _Part(rows={}))
        of = environment.rows.get("GPU", {}).get("value", "no such row")
        if of != gpu:
            raise ConfigError(
                f"{OPTION} {file}: parts.environment.rows.GPU.value: expected {gpu}, the GPU of this plan, found {of}. "
                f"{AGAIN}"
            )
        made = Measured(file, gpu, list(_rows(file, report, DecodingRow)), list(_rows(file, report, UpdateRow)))
        if not made.decoding and not made.updates:
            expected, found = f"{DecodingRow.marker} or {UpdateRow.marker}", ", ".join(report.parts) or "no part"
            raise ConfigError(
                f"{OPTION} {file}: parts.*.rows: expected a row with a column {expected}, found none in {found}. "
                f"{AGAIN}"
            )
        return made

    def decoding_figures(self, *, by_graphs: bool) -> Figures:
        """Take figures of the embedded engine; none where it was not measured in this way."""
        rows = [row for row in self.decoding if row.by_graphs == by_graphs]
        if not rows:
            return {}
        requests, beyond = [row.requests for row in rows], [row.ms_beyond_reading / 1e3 for row in rows]
        several = len(set(requests)) > 1
        each = max(0.0, statistics.linear_regression(requests, beyond).slope) if several else 0.0
        fixed = statistics.median(rest - each * count for count, rest in zip(requests, beyond, strict=True))
        return from_one(
            self._origin,
            {
                "bandwidth_used": statistics.median(row.bandwidth_used for row in rows),
                "step_fixed": max(0.0, fixed),
                "step_each": each,
            },
        )

    def update_figures(self, parameters: int, micro_batch: int, *, compiled: bool) -> Figures:
        """Take figures of the passes from the row of the nearest model, and of its micro-batches the nearest."""

        def distance(row: UpdateRow) -> tuple[float, float]:
            return abs(math.log(row.parameters / parameters)), abs(math.log(row.micro_batch / micro_batch))

        rows = sorted((row for row in self.updates if row.compiled == compiled), key=distance)
        found: dict[str, Figure] = {}
        if rows:
            found["mfu_update"] = Figure(rows[0].mfu_update, self._origin)
        if forward := next((row.mfu_forward for row in rows if row.mfu_forward is not None), None):
            found["mfu_forward"] = Figure(forward, self._origin)
        return found

    @property
    def _origin(self) -> str:
        return f"measured ({self.file}, {self.gpu})"


def _rows(file: Path, report: _Report, kind: type[ColumnsT]) -> Iterator[ColumnsT]:
    """Find the rows that have these columns. Raises ConfigError for one whose values cannot be."""
    for name, part in report.parts.items():
        for label, values in part.rows.items():
            if kind.marker in values:
                try:
                    yield kind.model_validate(values)
                except ValidationError as error:
                    raise _refused(file, ("parts", name, "rows", label), error) from None


def _refused(file: Path, place: Sequence[str], error: ValidationError) -> ConfigError:
    first: Mapping[str, object] = error.errors()[0]
    inner = first["loc"]
    assert isinstance(inner, tuple)
    key = ".".join(map(str, (*place, *inner))) or "its text"
    found = repr(first["input"])[:80]
    return ConfigError(
        f"{OPTION} {file}: no report of the kit: {key}: {str(first['msg']).lower()}, found {found}. {AGAIN}"
    )
