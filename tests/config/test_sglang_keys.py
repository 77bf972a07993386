"""The keys of SGLang servers and of the agent that talks to the endpoint in front of them."""

from __future__ import annotations

import importlib.util
from pathlib import Path

import pytest

from agentrl.config import RolloutConfig, load_config
from agentrl.config.installed import is_installed
from agentrl.errors import ConfigError, install_extra
from tests.config.loading import OWN, load
from tests.naming import Names, assert_names

ROLLOUT = "actor_rollout_ref.rollout"
PROXY = f"{ROLLOUT}.agent.openai_proxy"
SGLANG = f"{ROLLOUT}.name=sglang"
ATTACHED = f"{ROLLOUT}.server_urls=http://node1:30000"


def rollout(*overrides: str) -> RolloutConfig:
    return load(*overrides).actor_rollout_ref.rollout


def rollout_by_hydra(*overrides: str) -> RolloutConfig:
    """Through the grammar of the command line."""
    return load_config([*OWN, *overrides]).actor_rollout_ref.rollout


def refused(*overrides: str) -> str:
    with pytest.raises(ConfigError) as error:
        rollout(*overrides)
    return str(error.value)


@pytest.mark.usefixtures("sglang_missing")
def test_servers_cannot_be_started_without_sglang() -> None:
    message = refused(SGLANG)
    assert_names(message, f"{ROLLOUT}.name=sglang", "SGLang")
    servers, embedded = f"{ROLLOUT}.server_urls=[http://host:30000]", f"{ROLLOUT}.name=embedded"
    for way_out in (install_extra("sglang"), "make setup-sglang", servers, embedded):
        assert way_out in message


@pytest.mark.usefixtures("sglang_missing")
def test_attaching_needs_no_sglang() -> None:
    assert rollout(SGLANG, ATTACHED).server_urls == ["http://node1:30000"]


@pytest.mark.usefixtures("sglang_installed")
def test_sglang_is_found_without_being_imported() -> None:
    """The package of the fixture fails when it is imported."""
    assert rollout(SGLANG).name == "sglang"


def test_a_folder_is_no_installation(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Such as a clone of a project's repository in the working directory: Python takes it for a package, too."""
    (tmp_path / "a_clone").mkdir()
    monkeypatch.syspath_prepend(str(tmp_path))
    assert importlib.util.find_spec("a_clone") is not None
    assert not is_installed("a_clone")


@pytest.mark.usefixtures("sglang_installed")
def test_server_arguments_on_the_command_line() -> None:
    """SGLang's own arguments are a free mapping: with and without +, and values of any kind."""
    key = f"{ROLLOUT}.engine_kwargs.sglang"
    given = rollout_by_hydra(
        SGLANG, f"{key}.attention_backend=fa3", f"+{key}.page_size=64", f"{key}.json_model={{a: [1, 2.5]}}"
    )
    assert given.engine_kwargs.sglang == {"attention_backend": "fa3", "page_size": 64, "json_model": {"a": [1, 2.5]}}


@pytest.mark.usefixtures("sglang_installed")
def test_server_arguments_in_a_yaml(tmp_path: Path) -> None:
    (tmp_path / "job.yaml").write_text(
        "defaults: [train, _self_]\n"
        "data: {train_files: x.parquet}\n"
        "actor_rollout_ref: {model: {path: m}, rollout: {name: sglang, num_servers: 4, engine_kwargs: {sglang: "
        "{attention_backend: fa3}}}}\n"
    )
    config = load_config(["--config-path", str(tmp_path), "--config-name", "job"]).actor_rollout_ref.rollout
    assert (config.num_servers, config.engine_kwargs.sglang) == (4, {"attention_backend": "fa3"})


@pytest.mark.usefixtures("sglang_installed")
@pytest.mark.parametrize(
    ("argument", "instead"),
    [
        ("tp_size=2", f"{ROLLOUT}.tensor_model_parallel_size"),
        ("mem-fraction-static=0.8", f"{ROLLOUT}.gpu_memory_utilization"),
        ("model_path=other", "actor_rollout_ref.model.path"),
        ("port=30000", "addresses"),
    ],
)
def test_a_server_argument_that_a_key_sets(argument: str, instead: Names) -> None:
    key = f"{ROLLOUT}.engine_kwargs.sglang"
    message = refused(SGLANG, f"{key}.{argument}")
    assert_names(message, f"{key}.{argument.partition('=')[0]}")
    assert_names(message, instead)


@pytest.mark.parametrize(
    "override",
    [
        "num_servers=2",
        "tensor_model_parallel_size=2",
        "gpu_memory_utilization=0.8",
        "engine_kwargs.sglang.attention_backend=fa3",
        "free_cache_engine=true",
        "max_server_restarts=0",
    ],
)
def test_what_only_a_start_can_set_conflicts_with_attaching(override: str) -> None:
    message = refused(SGLANG, ATTACHED, f"{ROLLOUT}.{override}")
    assert message.startswith(f"{ROLLOUT}.{override.partition('=')[0].removesuffix('.attention_backend')}=")
    assert_names(message, f"{ROLLOUT}.server_urls=null")


@pytest.mark.usefixtures("sglang_installed")
@pytest.mark.parametrize("override", ["free_cache_engine=true", "gpu_memory_utilization=0.8"])
def test_what_only_a_gpu_has(override: str) -> None:
    assert_names(refused(SGLANG, f"{ROLLOUT}.{override}", "trainer.device=cpu"), "trainer.device=cuda")
    rollout(SGLANG, f"{ROLLOUT}.{override}", "trainer.device=cuda")


@pytest.mark.parametrize(
    ("given", "urls"),
    [
        ("http://node1:30000/", ["http://node1:30000"]),
        ("[http://a:1,https://b/sglang/]", ["http://a:1", "https://b/sglang"]),
        ("'http://[::1]:30000'", ["http://[::1]:30000"]),
    ],
)
def test_server_urls(given: str, urls: list[str]) -> None:
    assert rollout_by_hydra(SGLANG, f"{ROLLOUT}.server_urls={given}").server_urls == urls


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        ("[]", ("found []", "least one")),
        ("node1:30000", ("URLs", "http://host:30000")),
        ("ftp://node1", ("URLs", "http://host:30000")),
        ("'http://:30000'", ("URLs", "http://host:30000")),
        ("http://node1:port", ("URLs", "http://host:30000")),
        ("http://node1:99999", ("URLs", "http://host:30000")),
        ("[http://a:1,http://a:1/]", "URL"),
        ("7", "found 7"),
    ],
)
def test_server_urls_that_are_none(given: str, expected: Names) -> None:
    message = refused(SGLANG, f"{ROLLOUT}.server_urls={given}")
    assert message.startswith(f"{ROLLOUT}.server_urls: expected ")
    assert_names(message, expected)


@pytest.mark.parametrize(
    ("override", "expected"),
    [
        ("num_servers=0", "found 0"),
        ("tensor_model_parallel_size=1.5", ("integer", "found 1.5")),
        ("gpu_memory_utilization=0", "found 0"),
        ("gpu_memory_utilization=1.1", "found 1.1"),
        ("engine_kwargs.sglang=3", ("dictionary", "found 3")),
        ("server_start_timeout=0", "found 0"),
        ("health_check_interval=0", "found 0"),
        ("max_server_restarts=-1", "found -1"),
        ("free_cache_engine=maybe", ("boolean", "found 'maybe'")),
        ("update_weights_bucket_megabytes=0", "found 0"),
        ("update_weights_checksum=2", ("boolean", "found 2")),
        ("agent.openai_proxy.target=agents/mine.py", ("package.module:function", "path/to/file.py:function")),
        ("agent.openai_proxy.target='mine:3'", ("package.module:function", "path/to/file.py:function")),
        ("agent.openai_proxy.command=[]", "1 item"),
        ("agent.openai_proxy.command='python agent.py'", "valid list"),
        ("agent.openai_proxy.train=mine", ("package.module:function", "auto")),
        ("agent.openai_proxy.train=[]", ("model", "one model")),
    ],
)
def test_wrong_values(override: str, expected: Names) -> None:
    key, _, _ = override.partition("=")
    message = refused(SGLANG, f"{ROLLOUT}.{override}")
    assert message.startswith(f"{ROLLOUT}.{key}: expected ")
    assert_names(message, expected)


@pytest.mark.parametrize("target", ["pkg.agents.mine:run", "agents/mine.py:run", "'../my agents/mine.py:Agent.run'"])
def test_an_agent_in_python(target: str) -> None:
    assert rollout_by_hydra(f"{PROXY}.target={target}").agent.openai_proxy.target == target.strip("'")


def test_an_agent_by_its_command() -> None:
    given = rollout_by_hydra(f"{PROXY}.command=[python,agent.py,--turns,3]").agent.openai_proxy
    assert given.command == ["python", "agent.py", "--turns", "3"]


def test_what_of_a_session_is_trained_on() -> None:
    for given, read in (("main", "main"), ("[a,b]", ["a", "b"]), ("mine.py:choose", "mine.py:choose")):
        assert rollout_by_hydra(f"{PROXY}.train={given}").agent.openai_proxy.train == read


def test_an_agent_is_either_a_function_or_a_command() -> None:
    message = refused(f"{PROXY}.target=pkg:run", f"{PROXY}.command=[python,agent.py]")
    assert_names(message, f"{PROXY}.target=pkg:run", f"{PROXY}.command=['python', 'agent.py']", "conflicts")
