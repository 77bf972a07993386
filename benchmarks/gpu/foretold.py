"""Forecasts of `agentrl.plan` for a row, as columns next to the measurement, and the figures that the row gives a plan.

Forecasts take the assumed figures, never those of a report. On a CPU the rates of this process stand for a data sheet.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch

from agentrl.plan import speeds
from agentrl.plan.measured import Columns, DecodingRow, UpdateRow
from agentrl.plan.simulated_servers import Session
from agentrl.plan.sizing import ModelShape
from agentrl.plan.step_times import Cluster, Plan, Training
from agentrl.runtime.room import room
from agentrl.trajectory.batch import RaggedBatch
from agentrl.workers.plan import learns_by_parts
from benchmarks.gpu.orchestrate import Value
from benchmarks.gpu.part import Setting
from benchmarks.gpu.states import CHUNK_LOGITS


@dataclass(frozen=True, slots=True)
class Device:
    """A device with its rates that were measured in this process."""

    asked: Setting
    product: float
    """FLOPs a second of one large product."""
    copy: float
    """Bytes a second that a copy reads and writes."""

    def cluster(self, *, by_graphs: bool) -> Cluster:
        """Take the figures that a plan assumes of this device."""
        if self.asked.device == "cuda":
            figures = speeds.on_gpu(torch.cuda.get_device_name(), self.asked.dtype)
            figures |= {} if by_graphs else speeds.one_by_one()
        else:
            figures = speeds.on_cpu(self.product, self.copy / 2)
        values = {name: figure.value for name, figure in figures.items()}
        return Cluster(nodes=1, gpus_per_node=1, memory=room(self.asked.device), **values)

    def decoding(
        self, shape: ModelShape, requests: int, contexts: float, step: float, *, by_graphs: bool
    ) -> dict[str, Value]:
        """Make the columns of a decoding step.

        contexts: tokens of all requests. step: seconds.
        """
        cluster, plan = self.cluster(by_graphs=by_graphs), Plan(dtype=self._dtype)
        assumed = Training(cluster, plan, shape).speed()
        used = self.copy / cluster.bandwidth
        bare = cluster.model_copy(update={"bandwidth_used": used, "step_fixed": 0.0, "step_each": 0.0})
        least = Training(bare, plan, shape).speed().step(requests, contexts)
        foretold = assumed.step(requests, contexts)
        figures = DecodingRow(
            requests=requests,
            by_graphs=by_graphs,
            bandwidth_used=used,
            ms_beyond_reading=(step - least) * 1e3,
        )
        return {"foretold_ms_a_step": foretold * 1e3, "step_by_foretold": step / foretold} | _cells(figures)

    def update(
        self,
        shape: ModelShape,
        batch: RaggedBatch,
        micro_batch: int,
        seconds: float,
        *,
        recomputed: float,
        compiled: bool,
        log_prob_seconds: float | None = None,
    ) -> dict[str, Value]:
        """Make the columns of an update of one optimizer step, and of log-probs where they were measured.

        recomputed: part of the layers that its backward pass computes again.
        """
        cluster = self.cluster(by_graphs=True)
        plan = Plan(
            prompts=1,
            mini_batch=1,
            micro_tokens=micro_batch,
            dtype=self._dtype,
            recompute=recomputed,
            chunk_logits=CHUNK_LOGITS,
            by_parts=learns_by_parts(self.asked.device, 1, has_router_losses=False),
        )
        training = Training(cluster, plan, shape)
        sessions = [
            Session(str(row), 0, length - sampled, [sampled], [], [])
            for row, (length, sampled) in enumerate(
                zip(batch.lengths.tolist(), batch.policy_tokens.tolist(), strict=True)
            )
        ]
        update, scoring = training.update("update_actor", sessions), training.forward("old_log_prob", sessions)
        figures = UpdateRow(
            parameters=shape.params,
            micro_batch=micro_batch,
            compiled=compiled,
            mfu_update=cluster.mfu_update * update.compute / (seconds - update.serial),
        )
        columns: dict[str, Value] = {
            "foretold_update_seconds": update.seconds,
            "update_by_foretold": seconds / update.seconds,
        }
        if log_prob_seconds is not None:
            part = cluster.mfu_forward * scoring.compute / log_prob_seconds
            figures = figures.model_copy(update={"mfu_forward": part})
            columns |= {
                "foretold_log_prob_seconds": scoring.seconds,
                "log_probs_by_foretold": log_prob_seconds / scoring.seconds,
            }
        return columns | _cells(figures)

    @property
    def _dtype(self) -> Literal["bfloat16", "float32"]:
        return "bfloat16" if self.asked.dtype == "bfloat16" else "float32"


def _cells(figures: Columns) -> dict[str, Value]:
    return figures.model_dump(exclude_none=True)
