"""Adapters sent as they are: the base goes to each server once, by any other sender, and then A and B after each step.

Adapters travel as files in peft's format, which servers load by themselves.
"""

from __future__ import annotations

import asyncio
import json
import secrets
import shutil
from collections.abc import Callable, Collection, Sequence
from pathlib import Path

from safetensors.torch import save_file

from agentrl.engines.contract import EngineError
from agentrl.engines.servers.client import WeightReceiver
from agentrl.engines.servers.sync.delta import DeltaSender
from agentrl.engines.servers.sync.disk import remove_others
from agentrl.engines.servers.sync.update import Comparison, Update, WeightSender
from agentrl.engines.weights import Adapter, Weights
from agentrl.model.lora import CONFIG, WEIGHTS
from agentrl.system.metrics import Metrics
from agentrl.system.publish import published_directory

TIMEOUT = 300.0
"""Seconds for a server to load an adapter."""


class AdapterSender:
    """A WeightSender that hands the base to another one, and adapters to the servers that have the base.

    A server that was started again, or that failed, is sent the base again. Weights without an adapter go to the other
    sender each time.
    """

    def __init__(
        self,
        inner: WeightSender,
        folder: Path,
        notify: Callable[[str], None] = lambda _: None,
        frozen: Collection[str] = (),
    ) -> None:
        """`folder`: of this sender alone, which all servers see. `notify`: says if the policy merges them.

        `frozen`: names of further adapters, which were made for the base as it is.
        """
        self._frozen = frozen
        self._inner, self.dtype, self.bytes_sent = inner, inner.dtype, 0
        self.compared: Comparison = "none"
        self._folder, self._notify, self._said = folder.absolute(), notify, False
        self._based: dict[str, str] = {}
        """By server that has the base, the version that it must name."""
        self._bases = 0

    async def send(self, servers: Sequence[WeightReceiver], weights: Weights, version: int) -> dict[str, Exception]:
        """Send the base to servers without it, and the adapter to all. Requests with an earlier one must have ended."""
        update, adapter = Update(servers, version, TIMEOUT), weights.adapter
        if adapter is None and self._frozen:
            raise EngineError(
                f"{', '.join(self._frozen)}: the policy's strategy gives its adapters merged into the base"
            )
        infos = await update.infos()
        labels = {one.url: self._based.pop(one.url, None) for one in servers}
        self.bytes_sent, self.compared = 0, "none"
        lacking = [one for one in update.servers if adapter is None or labels[one.url] != infos[one.url].weight_version]
        if lacking:
            await update.each("dropping adapters", lambda one: one.use_adapter(None, None, version, TIMEOUT), lacking)
            update.drop(await self._inner.send([one for one in lacking if one in update.servers], weights, version))
            self._bases += sum(one in update.servers for one in lacking)
            self.bytes_sent, self.compared = self._inner.bytes_sent, self._inner.compared
        if adapter is None:
            if not self._said:
                self._said = True
                self._notify("servers get whole weights: the policy's strategy gives its adapters merged")
            return update.faults
        folder = self._folder / f"v{version}-{secrets.token_hex(4)}"
        await self._write(adapter, folder)
        await update.each("loading the adapter", lambda one: one.use_adapter(folder.name, folder, version, TIMEOUT))
        await asyncio.to_thread(remove_others, folder)
        self._based |= {one.url: str(version) for one in update.servers}
        return update.faults

    def add_metrics(self, metrics: Metrics) -> None:
        """Record how often a server was sent the base, and the other sender's metrics."""
        metrics.sum("adapter_bases", self._bases)
        if isinstance(self._inner, DeltaSender):
            self._inner.add_metrics(metrics)

    async def close(self) -> None:
        """Remove the files, and free the other sender's memory, files or group."""
        await asyncio.to_thread(shutil.rmtree, self._folder, ignore_errors=True)
        await self._inner.close()

    async def _write(self, adapter: Adapter, folder: Path) -> None:
        """Write an adapter in peft's format and the servers' dtype."""
        tensors = {name: tensor.to("cpu", self.dtype, copy=True).contiguous() for name, tensor in adapter.read()}
        with published_directory(folder) as partial:
            (partial / CONFIG).write_text(json.dumps(adapter.config), encoding="utf-8")
            await asyncio.to_thread(save_file, tensors, partial / WEIGHTS, {"format": "pt"})
        self.bytes_sent += sum(tensor.nbytes for tensor in tensors.values())
