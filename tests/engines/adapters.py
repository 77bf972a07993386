"""Adapters that servers are sent and serve unmerged: what every software that can must do.

A subclass gives the fixtures `serving` and `own_server`, servers with the keys of the fixture `adapters`.
"""

from __future__ import annotations

import asyncio
import copy
import math
import os
import signal
from collections.abc import AsyncIterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import PreTrainedModel

from agentrl.config.sections.model import ModelConfig
from agentrl.engines.contract import EngineError, Generation, SamplingParams
from agentrl.engines.servers.adapters import check_held
from agentrl.engines.servers.engine import ServerEngine
from agentrl.engines.servers.model import ModelFacts
from agentrl.engines.servers.process import ServerProcess
from agentrl.engines.servers.supervisor import Server
from agentrl.engines.servers.sync import AdapterSender, TensorSender
from agentrl.engines.sglang.client import SGLangClient
from agentrl.engines.vllm.client import VLLMClient
from agentrl.engines.weights import Adapter, Weights
from agentrl.errors import ConfigError
from agentrl.model.lora import Lora
from agentrl.system.http import http_client
from tests.engines.contract import MAX_MODEL_LEN
from tests.naming import naming
from tests.waiting import until

PROMPT = [5, 17, 30, 44, 101, 7]
RANK = 4


class Policy:
    """A policy with adapters, which `learn` changes."""

    def __init__(self, reference: PreTrainedModel, path: Path, rank: int = RANK) -> None:
        self.model = copy.deepcopy(reference)
        self.lora = Lora(self.model, ModelConfig(path=str(path), lora_rank=rank, lora_alpha=8), 0)
        self.params = dict(self.model.named_parameters())

    def learn(self, seed: int) -> Policy:
        generator = torch.Generator().manual_seed(seed)
        with torch.no_grad():
            for param in self.lora.adapters(self.params).values():
                param.normal_(0.0, 0.3, generator=generator)
        return self

    @property
    def adapter(self) -> Adapter:
        named = {name: param.detach().clone() for name, param in self.lora.adapters(self.params).items()}
        config = {"r": self.lora.config.r, "lora_alpha": self.lora.config.lora_alpha}
        shapes = {name: tuple(tensor.shape) for name, tensor in named.items()}
        targets = sorted(self.lora.config.target_modules or ())
        return Adapter(config | {"peft_type": "LORA", "target_modules": targets}, shapes, lambda: iter(named.items()))

    def write(self, folder: Path) -> Path:
        """Write the adapter as peft does."""
        folder.mkdir()
        self.lora.write(folder, self.params)
        return folder

    @property
    def weights(self) -> Weights:
        return replace(Weights.from_tensors(self.lora.unmerged(self.params)), adapter=self.adapter)

    @torch.no_grad()
    def gap(self, answer: Generation, start: int = 0) -> float:
        """Largest difference to the forward pass of peft, from the answer's token `start` on."""
        ids = torch.tensor([PROMPT + answer.ids])
        logprobs = self.model(ids).logits[0].log_softmax(-1)
        found = logprobs[len(PROMPT) - 1 : -1].gather(1, ids[0, len(PROMPT) :, None])[:, 0]
        return float((found - torch.tensor(answer.logprobs))[start:].abs().max())


@pytest.fixture(scope="module")
def players(reference: PreTrainedModel, model_dir: Path) -> dict[str, Policy]:
    """Two frozen policies by name."""
    return {name: Policy(reference, model_dir).learn(seed) for seed, name in enumerate(("old", "older"), 10)}


@pytest.fixture(scope="module")
def adapters(players: Mapping[str, Policy], tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """Keys of a server that serves adapters of RANK, and those of `players` from its start."""
    folder = tmp_path_factory.mktemp("frozen")
    return {
        "lora_rank": RANK,
        "frozen": {name: str(one.write(folder / name)) for name, one in players.items()},
    }


class AdapterContract:
    """Tests of one software."""

    client: type[SGLangClient | VLLMClient]
    engine_type: type[ServerEngine]
    too_wide: str
    """What a server says about adapters of a larger rank than it was started for."""
    long = 200
    """Tokens of an answer in whose middle the adapter changes."""

    def engine_of(
        self,
        process: ServerProcess,
        reference: PreTrainedModel,
        folder: Path,
        *,
        ours: bool = False,
    ) -> ServerEngine:
        """Make an engine that sends adapters to a server, which is started again where it is `ours`."""
        http = http_client()
        shapes = {name: tuple(tensor.shape) for name, tensor in reference.state_dict().items()}
        return self.engine_type(
            [Server(self.client(process.url, http, process.key), process if ours else None)],
            http,
            ModelFacts(reference.config.vocab_size, shapes),
            AdapterSender(TensorSender(torch.float32, 1 << 20), folder),
            max_model_len=MAX_MODEL_LEN,
            deterministic=True,
        )

    @pytest.fixture
    def policy(self, reference: PreTrainedModel, model_dir: Path) -> Policy:
        return Policy(reference, model_dir)

    @pytest.fixture
    async def engine(
        self, serving: ServerProcess, reference: PreTrainedModel, tmp_path: Path
    ) -> AsyncIterator[ServerEngine]:
        engine = self.engine_of(serving, reference, tmp_path / "adapters")
        yield engine
        await engine.close()

    async def test_adapters_are_served_unmerged_and_only_they_are_sent_again(
        self, engine: ServerEngine, policy: Policy, tmp_path: Path
    ) -> None:
        base = sum(tensor.nbytes for _, tensor in policy.weights.read())
        adapter = sum(4 * math.prod(shape) for shape in policy.adapter.shapes.values())
        for version in (1, 2, 3):
            report = await engine.update_weights(policy.learn(version).weights, version)
            assert report.bytes == adapter + (base if version == 1 else 0)
            answer = await engine.generate(PROMPT, params(), "s")
            assert policy.gap(answer) < 2e-5
            assert [span.version for span in answer.versions] == [version]
            assert len([*(tmp_path / "adapters").iterdir()]) == 1
        merged = Weights.from_tensors((name, tensor.clone()) for name, tensor in policy.lora.merged(policy.params))
        await engine.update_weights(merged, 4)
        again = await engine.generate(PROMPT, params(), "s")
        assert again.ids == answer.ids and policy.gap(again) < 2e-5 and again.versions[0].version == 4
        assert (await engine.health()).metrics["adapter_bases"] == 2

    @pytest.mark.parametrize("in_flight", [False, True])
    async def test_a_running_request_goes_on_with_the_new_adapter(
        self, engine: ServerEngine, policy: Policy, in_flight: bool
    ) -> None:
        await engine.update_weights(policy.learn(1).weights, 1)
        call = asyncio.create_task(engine.generate(PROMPT, params(self.long), "s"))
        await until(lambda: any(running.partial.ids for running in engine._calls.values()))
        old = copy.deepcopy(policy)
        new = policy.learn(2)
        await (engine.update_in_flight if in_flight else engine.update_weights)(new.weights, 2)
        answer = await call
        assert [span.version for span in answer.versions] == [1, 2] and len(answer.ids) == self.long
        change = answer.versions[1].start
        begun = replace(answer, ids=answer.ids[:change], logprobs=answer.logprobs[:change])
        assert old.gap(begun) < 2e-5 and new.gap(answer, change) < 2e-5
        assert (await engine.health()).metrics["failovers"] == 0

    async def test_an_adapter_of_another_base_or_rank_changes_nothing(
        self, engine: ServerEngine, reference: PreTrainedModel, model_dir: Path, policy: Policy
    ) -> None:
        await engine.update_weights(policy.learn(1).weights, 1)
        before = await engine.generate(PROMPT, params(), "s")
        adapter = policy.adapter
        wide = {name: (shape[0], shape[1] + 1) for name, shape in adapter.shapes.items()}
        with naming(ValueError, "another base"):
            await engine.update_weights(replace(policy.weights, adapter=replace(adapter, shapes=wide)), 2)
        answer = await engine.generate(PROMPT, params(), "s")
        assert answer.ids == before.ids and answer.versions[0].version == 1
        with pytest.raises(EngineError, match=self.too_wide):
            await engine.update_weights(Policy(reference, model_dir, rank=4 * RANK).weights, 2)

    async def test_frozen_adapters_answer_next_to_the_policys(
        self, engine: ServerEngine, policy: Policy, players: Mapping[str, Policy]
    ) -> None:
        for version in (1, 2):
            await engine.update_weights(policy.learn(version).weights, version)
            asked = [engine.generate(PROMPT, replace(params(), adapter=name), name) for name in players]
            own, *others = await asyncio.gather(engine.generate(PROMPT, params(), "own"), *asked)
            assert policy.gap(own) < 2e-5
            assert all(one.gap(answer) < 2e-5 for one, answer in zip(players.values(), others, strict=True))

    async def test_a_server_says_which_frozen_adapters_it_has(
        self, serving: ServerProcess, adapters: Mapping[str, Any]
    ) -> None:
        async with http_client() as http:
            client = self.client(serving.url, http, serving.key)
            folders = {name: Path(folder) for name, folder in adapters["frozen"].items()}
            await check_held(client, folders)
            wrong = {"old": folders["older"]}
            with naming(ConfigError, "older=", "--lora-paths"):
                await check_held(client, wrong)

    @pytest.mark.slice(0, "kill")
    async def test_a_server_that_was_started_again_gets_base_and_adapters(
        self,
        own_server: ServerProcess,
        reference: PreTrainedModel,
        policy: Policy,
        players: Mapping[str, Policy],
        tmp_path: Path,
    ) -> None:
        process, older = own_server, players["older"]
        engine = self.engine_of(process, reference, tmp_path / "adapters", ours=True)
        try:
            await engine.update_weights(policy.learn(1).weights, 1)
            assert process.pid is not None
            os.kill(process.pid, signal.SIGKILL)
            answer = await engine.generate(PROMPT, params(), "s")
            assert policy.gap(answer) < 2e-5 and answer.versions[0].version == 1
            assert older.gap(await engine.generate(PROMPT, replace(params(), adapter="older"), "s")) < 2e-5
            assert (await engine.health()).metrics["adapter_bases"] == 2
        finally:
            await engine.close()


def params(tokens: int = 24, seed: int = 3) -> SamplingParams:
    return SamplingParams(max_new_tokens=tokens, temperature=1.0, seed=seed)


def check_sent(metrics: Sequence[Mapping[str, float]], bases: int, *, in_flight: bool = False) -> None:
    """Check that a run sent the base once to so many servers, and the same bytes of adapters after each step."""
    sent = [line["sync/bytes"] for line in metrics]
    assert len(sent) > 1 and sent[0] > 2 * sent[1] and len({*sent[1:]}) == 1
    for line in metrics:
        # In flight the gap is also that of older adapters.
        assert in_flight or line["rollout/logprob_gap_max_abs"] < 1e-4, "servers and trainer have different adapters"
        assert line["actor/grad_norm"] > 0 and line["engine/failovers"] == 0
    assert metrics[-1]["engine/adapter_bases"] == bases
