"""A config that is read back from a run names no code, command, host or foreign place without --trust."""

from __future__ import annotations

import importlib
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from agentrl.config import Config, load_config
from agentrl.config.keys import Key, all_keys, leaf_keys, nested
from agentrl.config.rules import Names, Uses
from agentrl.config.sections.distillation import TeacherConfig
from agentrl.config.sections.offline import EvaluateConfig, GenerateConfig
from agentrl.config.sections.reward import ScorerConfig
from agentrl.config.sections.roles import RoleConfig
from agentrl.config.sections.sft import PreferencesConfig, SFTConfig
from agentrl.errors import ConfigError
from agentrl.system.config_files import configs_dir
from agentrl.view.__main__ import main as view
from tests.config.hostile_run import Hostile, hostile_run
from tests.naming import assert_names

__all__ = ["hostile_run"]  # a fixture

SCHEMAS = (Config, SFTConfig, PreferencesConfig, GenerateConfig, EvaluateConfig)
INNER = (TeacherConfig, ScorerConfig, RoleConfig)
ROLLOUT = "actor_rollout_ref.rollout"
MODEL = "actor_rollout_ref.model"
DATA = {
    # Models, adapters and files of data: read, never run. Jinja templates run in a sandbox.
    *("path", "adapter", "tokenizer", "ref.path", "critic.path", "data.path", "data.train_files", "data.val_files"),
    *("expert.files", "model.path", "model.chat_template", "model.chat_template_kwargs", "model.override_config"),
    "model.chat_template_date",
    *("model.lora_adapter_path", "reward_model.model.path", "distillation.teacher.path"),
    *("distillation.teacher.tokenizer", "trainer.resume_from_path", "reward_model.judge.prompt", "val_files"),
    "multi_turn.compaction.prompt_file",
    # Names of columns, modules of a model, metrics, jobs, and of models elsewhere.
    *("data.prompt_key", "data.image_key", "data.messages_key", "data.tools_key", "data.chosen_key"),
    *(
        "data.steps",
        "data.rejected_key",
        "data.feedback_key",
        "data.response_key",
        "data.data_source_key",
        "data.reward_model_key",
    ),
    *("model.exclude_modules", "model.target_modules", "algorithm.filter_groups.metric"),
    *("trainer.metric_for_best_model", "trainer.experiment_name", "trainer.project_name", "tools.client_id"),
    *("model", "policy", "distillation.teacher.model", "reward_model.judge.model", "reward_model.judge.data_sources"),
    *("privileged", "distillation.teacher.privileged", "agent.default_agent_loop"),
    # Options of what another key names, which is ours, or refused.
    "algorithm.rollout_correction.reject",
    *("kwargs", "options", "loss_options", "strategy_options", "reward_model.reward_manager_options"),
    *("custom_reward_function.name", "custom_reward_function.reward_kwargs", "data.custom_cls.name"),
    *("policy_loss.options", "algorithm.adv_options", "divergence_options", "observer_options", "engine_options"),
    "reward_model.judge.extra_body",
    # Their entries have keys of their own.
    *("optim.groups", "rollout.roles", "distillation.by_source", "reward_model.scorers"),
}
"""Ends of the keys whose value may be a text or a mapping, and is data."""


def keys() -> Iterator[tuple[str, str, Key]]:
    for schema in (*SCHEMAS, *INNER):
        for path, key in all_keys(schema).items():
            yield schema.__name__, path, key


def named_by(key: Key) -> bool:
    return any(isinstance(rule, Uses | Names) for rule, _ in key.rules)


def test_every_key_that_holds_a_text_says_whether_it_names_more_than_data() -> None:
    """A new key is declared `Uses`, `Writes` or `Names`, or it is data, and is listed here."""
    found = {
        f"{schema}: {path}"
        for schema, path, key in keys()
        if re.search(r"\bstr\b|dict|Any", re.sub(r"typing.Literal\[[^\]]*\]", "", str(key.field.annotation)))
        and not named_by(key)
        and not any(path == end or path.endswith(f".{end}") for end in DATA)
    }
    assert found == set()
    for schema, path, key in keys():
        if "trust" in path or "url" in path or "env" in path or "host" in path or "command" in path:
            assert named_by(key) or path.endswith("recompute"), f"{schema}: {path}"


def attacks(hostile: Hostile) -> dict[str, Any]:
    """A value of each key that names code, a command, a host, a variable, or a place."""
    target, away = f"{hostile.module}:Thing", "http://192.0.2.1:8000"
    special = {
        f"{ROLLOUT}.agent.openai_proxy.command": ["sh", "-c", f"touch {hostile.marker}"],
        f"{ROLLOUT}.agent.openai_proxy.train": target,
        f"{ROLLOUT}.roles": {"black": {"policy": "small", "base_url": away}},
        f"{ROLLOUT}.server_urls": [away],
        "reward_model.rollout.server_urls": [away],
        "reward_model.scorers": {"x": {"name": target, "kwargs": {}}},
        "distillation.by_source": {"x": {"path": "m", "trust_remote_code": True}},
        f"{ROLLOUT}.multi_turn.tool_config_path": str(hostile.tools),
        f"{ROLLOUT}.multi_turn.format": f"template:{target}",
        "data.custom_cls.path": target,
    }
    found: dict[str, Any] = {}
    for path, key in all_keys(Config).items():
        kind = str(key.field.annotation)
        if path in special:
            found[path] = special[path]
        elif "trust_remote_code" in path:
            found[path] = True
        elif named_by(key):
            text = target if any(isinstance(rule, Names) for rule, _ in key.rules) else "/nowhere/at_all"
            found[path] = {"a": {"b": text}} if "dict" in kind else [text] if "list" in kind else text
    return found


def test_each_key_that_names_more_than_data_is_refused_by_name(hostile: Hostile) -> None:
    found: dict[str, Any] = attacks(hostile)
    assert len(found) > 50
    hostile.config(**found)
    said = hostile.refused()
    for key in found:
        assert re.search(rf"^{re.escape(key)}[.=].* names ", said, re.MULTILINE), key
    assert_names(said, "--trust")
    for key in leaf_keys(Config):
        assert key in found or f"\n{key}=" not in said, "only those"


def test_what_the_user_sets_is_the_users(hostile: Hostile) -> None:
    hostile.config(**{"custom_reward_function.path": str(hostile.module), f"{MODEL}.trust_remote_code": True})
    mine = [f"{MODEL}.trust_remote_code=false", "~custom_reward_function.path"]
    assert not load_config([*hostile.words, *mine]).actor_rollout_ref.model.trust_remote_code
    assert "custom_reward_function.path=" in hostile.refused(mine[0])
    assert load_config([*hostile.words, "--trust"]).actor_rollout_ref.model.trust_remote_code


def test_what_only_data_names_is_read_back_as_it_is(hostile: Hostile) -> None:
    hostile.config("algorithm.adv_estimator=rloo", "trainer.experiment_name=theirs")
    assert load_config(hostile.words).algorithm.adv_estimator == "rloo"
    ours = configs_dir() / "tools" / "quickstart.yaml"
    hostile.config(**{f"{ROLLOUT}.multi_turn.tool_config_path": str(ours)})
    load_config(hostile.words)


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("defaults: [elsewhere, _self_]\n", "defaults="),
        ("hydra: {searchpath: ['pkg://evil']}\n", "hydra="),
        ("dialect: evil.py:Thing\n", "dialect=evil.py:Thing"),
        ("trainer: {experiment_name: '${oc.env:HOME}'}\n", "the value '${oc.env:HOME}'"),
        ("# @package actor_rollout_ref\nmodel: {trust_remote_code: true}\n", "a line `# @package`"),
    ],
)
def test_files_and_values_elsewhere_are_refused_before_they_are_read(hostile: Hostile, text: str, says: str) -> None:
    (hostile.folder / "config.yaml").write_text(text)
    (hostile.folder / "elsewhere.yaml").write_text("custom_reward_function: {path: evil.py}\n")
    assert says in hostile.refused()


def test_a_group_of_files_in_the_runs_folder_is_not_ours(hostile: Hostile) -> None:
    hostile.config()
    (hostile.folder / "algorithm").mkdir()
    (hostile.folder / "algorithm" / "ppo.yaml").write_text(f"adv_estimator: {hostile.module}:Thing\n")
    assert_names(hostile.refused("algorithm=ppo"), "algorithm=ppo")


def test_a_file_of_every_key_is_read_back_wherever_it_lies(tmp_path: Path) -> None:
    tree = {"every_key": True} | nested({f"{MODEL}.trust_remote_code": True, f"{MODEL}.path": "x"})
    (tmp_path / "job.yaml").write_text(yaml.safe_dump(tree))
    words = ["--config-path", str(tmp_path), "--config-name", "job"]
    with pytest.raises(ConfigError, match=r"trust_remote_code=true names code"):
        load_config(words)
    del tree["every_key"]
    (tmp_path / "job.yaml").write_text(yaml.safe_dump(tree | {"defaults": ["train", "_self_"]}))
    assert load_config(words).actor_rollout_ref.model.trust_remote_code, "a YAML file of the user's own"


def test_no_run_is_written_outside(hostile: Hostile, tmp_path: Path) -> None:
    for key, value in {
        "trainer.default_local_dir": str(tmp_path / "other"),
        "trainer.experiment_name": "../../other",  # the folder's default follows it
        "trainer.rollout_data_dir": "~/other",
    }.items():
        (hostile.folder / "config.yaml").write_text(yaml.safe_dump(nested({key: value})))
        assert_names(hostile.refused(), "outside")
    hostile.config(**{"trainer.default_local_dir": str(hostile.folder)})
    assert load_config(hostile.words).trainer.default_local_dir == str(hostile.folder)


REWARD = "custom_reward_function.path"
COMMANDS = {
    **{"train": REWARD, "plan.__main__": REWARD, "generate": REWARD, "evaluate": REWARD},
    **{"sft": "trainer.checkpoint.writer", "preferences": "loss"},
}
"""A key of each command that names code."""


@pytest.mark.parametrize("command", COMMANDS)
def test_every_command_that_reads_a_run_refuses_its_code(
    command: str, hostile: Hostile, capsys: pytest.CaptureFixture[str]
) -> None:
    key, target = COMMANDS[command], str(hostile.module)
    tree = nested({key: target if key == REWARD else f"{target}:Thing"})
    (hostile.folder / "config.yaml").write_text(yaml.safe_dump(tree))
    own = ["data.path=rows.parquet", "data.output_path=out.parquet"] if command in ("generate", "evaluate") else []
    assert importlib.import_module(f"agentrl.{command}").main([*hostile.words, *own]) == 2
    said = capsys.readouterr().err
    assert f"\n{key}={target}" in said and "Give --trust" in said
    assert not hostile.marker.exists()


def test_the_viewer_shows_a_hostile_run_and_runs_none_of_it(hostile: Hostile, tmp_path: Path) -> None:
    hostile.config(**{"custom_reward_function.path": str(hostile.module), f"{MODEL}.trust_remote_code": True})
    assert view([str(hostile.folder), "--export", str(tmp_path / "page.html")]) == 0
    assert not hostile.marker.exists()


@pytest.mark.parametrize("flags", [[], ["--trust"]])
def test_few_bytes_of_a_config_that_is_read_back_cannot_stand_for_many(tmp_path: Path, flags: list[str]) -> None:
    lists = [f"b{place}: &a{place} [{', '.join([f'*a{place - 1}'] * 9)}]" for place in range(1, 7)]
    (tmp_path / "config.yaml").write_text("\n".join(["a: &a0 [1, x]", *lists, ""]))
    (tmp_path / "metrics.jsonl").touch()
    with pytest.raises(ConfigError) as caught:
        load_config([f"--config-path={tmp_path}", "--config-name=config", *flags])
    assert_names(str(caught.value), str(tmp_path / "config.yaml"), "aliases")
