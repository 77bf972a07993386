"""A teacher behind a real server on loopback: the same numbers as of one that is loaded, or a clear error."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from agentrl.algorithms.distillation import IMPOSSIBLE
from agentrl.config.sections.distillation import DistillationConfig
from agentrl.config.sections.model import ModelConfig
from agentrl.errors import ConfigError, TrainingError
from agentrl.workers.teacher import ServedTeacher, TeacherWorker
from tests.naming import naming
from tests.workers.conftest import BatchMaker
from tests.workers.teacher_server import TeacherServer, serving


@pytest.fixture(scope="module")
def server(tiny_policy: Path) -> Iterator[TeacherServer]:
    with serving(tiny_policy) as found:
        yield found


def config_of(server: TeacherServer, policy: Path, *, base: str = "", **keys: Any) -> DistillationConfig:
    own: dict[str, Any] = {name: keys.pop(name) for name in ("api", "model", "api_key_env", "timeout") if name in keys}
    teacher: dict[str, Any] = {"base_url": server.url + base, "tokenizer": str(policy), **own}
    return DistillationConfig.model_validate({"teacher": teacher, **keys})


def scores(config: DistillationConfig, policy: Path, make_batch: BatchMaker) -> torch.Tensor:
    batch = make_batch()
    batch = batch.with_fields(teacher=torch.zeros(batch.num_tokens, dtype=torch.int32))
    worker = TeacherWorker(config, ModelConfig(path=str(policy)), device="cpu", temperature=1.0)
    return worker.compute_teacher_scores(batch)[0]


@pytest.mark.parametrize(
    ("api", "scope"),
    [
        ("sglang", "sampled"),
        ("sglang", "top_k"),
        ("prompt_logprobs", "sampled"),
        ("prompt_logprobs", "top_k"),
        ("echo", "sampled"),
    ],
)
def test_a_server_gives_what_loaded_weights_give(
    server: TeacherServer, tiny_policy: Path, make_batch: BatchMaker, api: str, scope: str
) -> None:
    keys: dict[str, Any] = {"scope": scope} | ({"top_k": 7} if scope == "top_k" else {})
    base, model = ("", None) if api == "sglang" else ("/v1", "m")
    server.bodies.clear()
    served = scores(config_of(server, tiny_policy, base=base, api=api, model=model, **keys), tiny_policy, make_batch)
    loaded = DistillationConfig.model_validate({"teacher": {"path": str(tiny_policy)}, **keys})
    expected = scores(loaded, tiny_policy, make_batch)
    assert served.shape == expected.shape == (len(served), 15 if scope == "top_k" else 1)
    assert (served - expected).abs().max() < 1e-5
    batch = make_batch()
    assert len(server.bodies) == len(batch), "one request a sequence"
    if api == "sglang":
        first = [int(mask.nonzero()[0]) for mask in batch.mask.split(batch.lengths.tolist())]
        assert sorted(body["logprob_start_len"] + 1 for body in server.bodies) == sorted(first)


def test_ids_of_the_teacher_alone_are_impossible(
    server: TeacherServer, tiny_policy: Path, make_batch: BatchMaker
) -> None:
    config = config_of(server, tiny_policy, scope="top_k", top_k=3)
    batch = make_batch(prompts=1, n=1)
    teacher = ServedTeacher(config.teacher, config, vocab=100)
    found = teacher.score(batch)[batch.mask]
    ids, logprobs = found[:, 1:].chunk(2, dim=1)
    beyond = logprobs == IMPOSSIBLE
    assert beyond.any() and (ids[beyond] == 0).all() and (ids < 100).all()


def other_tokens(answer: dict[str, Any]) -> object:
    value, token, text = answer["meta_info"]["input_token_logprobs"][-1]
    answer["meta_info"]["input_token_logprobs"][-1] = (value, token + 1, text)
    return answer


FAULTS: list[tuple[Callable[[dict[str, Any]], object], str]] = [
    (
        lambda answer: {"detail": "a dull answer"},
        r"expected log-probs of \d+ given tokens \('meta_info'\), found .*dull",
    ),
    (other_tokens, "it is about other tokens"),
    (lambda answer: [], "it is no object"),
    (lambda answer: 404, "not here"),
    (lambda answer: 401, "status 401"),
]


@pytest.mark.parametrize(("fault", "told"), FAULTS)
def test_faults_of_a_server_end_the_run_with_a_way_on(
    server: TeacherServer,
    tiny_policy: Path,
    make_batch: BatchMaker,
    fault: Callable[[dict[str, Any]], object],
    told: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(server, "change", fault)
    with pytest.raises(TrainingError, match=f"{server.url}.*{told}(.|\n)*goes on from the newest checkpoint"):
        scores(config_of(server, tiny_policy), tiny_policy, make_batch)


def test_a_server_that_fails_for_a_while_costs_time(
    server: TeacherServer, tiny_policy: Path, make_batch: BatchMaker, monkeypatch: pytest.MonkeyPatch
) -> None:
    expected = scores(config_of(server, tiny_policy), tiny_policy, make_batch)
    failing = iter([500, 503, 429])
    monkeypatch.setattr(server, "change", lambda answer: next(failing, answer))
    assert torch.equal(scores(config_of(server, tiny_policy), tiny_policy, make_batch), expected)


def test_the_key_is_sent_and_never_shown(
    server: TeacherServer, tiny_policy: Path, make_batch: BatchMaker, monkeypatch: pytest.MonkeyPatch
) -> None:
    with naming(ConfigError, "distillation.teacher.api_key_env", "TEACHER_KEY"):
        scores(config_of(server, tiny_policy, api_key_env="TEACHER_KEY"), tiny_policy, make_batch)
    of_source = {"math/*": config_of(server, tiny_policy, api_key_env="TEACHER_KEY").teacher.model_dump()}
    several = DistillationConfig.model_validate({"by_source": of_source})
    with naming(ConfigError, "distillation.by_source.math/*.api_key_env", "TEACHER_KEY"):
        scores(several, tiny_policy, make_batch)
    monkeypatch.setenv("TEACHER_KEY", "s3cret-key")
    monkeypatch.setattr(server, "change", lambda answer: {"said": server.headers[-1]["Authorization"]})
    with pytest.raises(TrainingError) as caught:
        scores(config_of(server, tiny_policy, api_key_env="TEACHER_KEY"), tiny_policy, make_batch)
    assert "Bearer [secret]" in str(caught.value) and "s3cret-key" not in str(caught.value)


def test_echo_has_no_ids_of_other_tokens(server: TeacherServer, tiny_policy: Path, make_batch: BatchMaker) -> None:
    with naming(ConfigError, "distillation.teacher.api=echo"):
        scores(config_of(server, tiny_policy, api="echo", model="m", scope="top_k"), tiny_policy, make_batch)
