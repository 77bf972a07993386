"""Transport by where the servers run."""

from __future__ import annotations

from agentrl.engines.servers.sync import distributed, tensor
from agentrl.engines.servers.sync.update import SenderSetting, WeightSender


def build(setting: SenderSetting) -> WeightSender:
    """Hand over memory to servers on this machine, and broadcast to others."""
    return (tensor if setting.local else distributed).build(setting)
