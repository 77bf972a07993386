"""Verification of a weight update by checksums of the parameters that each server holds.

Where the server software's checksums can be predicted, they are compared with the checksums of the sent weights.
Otherwise servers are compared with one another.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping

from agentrl.engines.contract import EngineError
from agentrl.engines.servers.client import WeightChecksums, WeightReceiver
from agentrl.engines.servers.sync.update import Comparison, ExpectedChecksums, Update


async def compare(update: Update, expected: ExpectedChecksums) -> Comparison:
    """Compare the checksums of all servers in the update. Servers that differ are dropped from it with a fault."""
    answers: dict[str, WeightChecksums] = {}

    async def ask(server: WeightReceiver) -> None:
        answers[server.url] = await server.weight_checksums(update.timeout)

    await update.each("checksum", ask)
    if not answers:
        return "none"
    predictions = {url: _predicted(answer, expected) for url, answer in answers.items()}
    if all(prediction is not None for prediction in predictions.values()):
        for server in list(update.servers):
            prediction = predictions[server.url] or {}
            [sums] = answers[server.url].ranks.values()
            _fail_if(
                update, server, [name for name, value in sums.items() if prediction[name] != value], "what was sent"
            )
        return "sent"
    by_key = {
        url: {f"{rank}:{name}": value for rank, sums in answer.ranks.items() for name, value in sums.items()}
        for url, answer in answers.items()
    }
    majority = _majority(by_key)
    for server in list(update.servers):
        sums = by_key[server.url]
        differing = [key for key in sums.keys() | majority.keys() if sums.get(key) != majority.get(key)]
        _fail_if(update, server, differing, "those of the other servers")
    return "servers" if len(answers) > 1 else "none"


def _predicted(answer: WeightChecksums, expected: ExpectedChecksums) -> Mapping[str, str] | None:
    """Predict a server's checksums; None for another algorithm, parameters split over ranks, or an unknown layout."""
    if not answer.predictable or len(answer.ranks) != 1:
        return None
    [sums] = answer.ranks.values()
    return expected.for_parameters(sums.keys())


def _majority(answers: Mapping[str, Mapping[str, str]]) -> dict[str, str | None]:
    """Return the value of each parameter that more than half of the servers have, or None."""
    majority: dict[str, str | None] = {}
    for key in {key for sums in answers.values() for key in sums}:
        value, count = Counter(sums.get(key, "") for sums in answers.values()).most_common(1)[0]
        majority[key] = value if 2 * count > len(answers) else None
    return majority


def _fail_if(update: Update, server: WeightReceiver, differing: list[str], other: str) -> None:
    if differing:
        names = ", ".join(sorted(differing)[:5])
        message = f"{server.url}: {len(differing)} parameters differ from {other}: {names}"
        update.fail(server, "checksum", EngineError(message))
