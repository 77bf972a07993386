"""`python -m agentrl.verl check`: launch scripts are read, never run."""

from __future__ import annotations

import logging
import re
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from agentrl.config import Config, load_config
from agentrl.config.checks import idle_keys
from agentrl.config.keys import differing, flatten, leaf_keys
from agentrl.verl.__main__ import main
from agentrl.verl.check import judge, launches, page
from agentrl.verl.launch import arguments
from agentrl.verl.shell import UNKNOWN, commands
from tests.conftest import PROJECT
from tests.naming import assert_names

STARTS_A_PROCESS = ("subprocess.Popen", "os.system", "os.exec", "os.posix_spawn", "os.fork", "os.forkpty", "os.spawn")
_WATCHED: list[str] = []
_IS_WATCHING = [False]


def _watch(event: str, _: object) -> None:
    if _IS_WATCHING[0] and event.startswith(STARTS_A_PROCESS):
        _WATCHED.append(event)


sys.addaudithook(_watch)


@pytest.fixture
def no_process() -> Iterator[None]:
    """Fails the test if a process was started in it."""
    _WATCHED.clear()
    _IS_WATCHING[0] = True
    yield
    _IS_WATCHING[0] = False
    assert _WATCHED == []


SCRIPT = """\
#!/bin/bash
set -x
MODEL=${MODEL:-Qwen/Qwen2.5-0.5B-Instruct}   # the policy
responses=$((2 * (3 + 1)))
GPUS=$(nvidia-smi -L | wc -l)
COMMON=(
    actor_rollout_ref.actor.use_kl_loss=False  # no reference
    "trainer.experiment_name=a run"
)
if [ -n "$DEBUG" ]; then
    COMMON+=(trainer.total_training_steps=1)
    BATCH=8
else
    BATCH=256
fi
cat > /tmp/never.yaml <<EOF
python3 -m verl.trainer.main_ppo not.a.command=1
EOF
PYTHONUNBUFFERED=1 python3 -m verl.trainer.main_ppo \\
    data.train_files=/data/train.parquet \\
    data.val_files='/data/test.parquet' \\
    data.train_batch_size=$BATCH \\
    actor_rollout_ref.model.path="$MODEL" critic.model.path=$MODEL \\
    actor_rollout_ref.rollout.n=$responses \\
    actor_rollout_ref.rollout.name=vllm \\
    trainer.n_gpus_per_node=$GPUS \\
    trainer.logger='["console"]' \\
    "${COMMON[@]}" \\
    $@ 2>&1 | tee log.txt
"""


@pytest.mark.usefixtures("no_process")
def test_variables_are_substituted_and_nothing_else_is_done() -> None:
    (launch,) = launches(SCRIPT)
    assert launch.module == "verl.trainer.main_ppo"
    assert launch.words == [
        "data.train_files=/data/train.parquet",
        "data.val_files=/data/test.parquet",
        "actor_rollout_ref.model.path=Qwen/Qwen2.5-0.5B-Instruct",
        "critic.model.path=Qwen/Qwen2.5-0.5B-Instruct",
        "actor_rollout_ref.rollout.n=8",
        "actor_rollout_ref.rollout.name=vllm",
        'trainer.logger=["console"]',
        "actor_rollout_ref.actor.use_kl_loss=False",
        "trainer.experiment_name=a run",
    ]
    assert launch.unknown == [
        "data.train_batch_size=$BATCH",
        "trainer.n_gpus_per_node=$GPUS",
        '"${COMMON[@]}"',
    ], "what is computed, and what is set under a condition"


@pytest.mark.parametrize(
    ("script", "words"),
    [
        ('A=1; B="$A$A"; echo ${B}2', ["echo", "112"]),
        ("A='x y'; echo $A \"$A\" '$A'", ["echo", "x", "y", "x y", "$A"]),
        ("echo ${A:-b} ${A-c} ${A:+d}e", ["echo", "b", "c", "e"]),
        ("A=; echo ${A:-b} [${A-c}]", ["echo", "b", "[]"]),
        ("A=1024; echo $((A * 20 + 2)) $(( $A / 3 ))", ["echo", "20482", "341"]),
        ("A=(x 'y z'); A+=(w); echo \"${A[@]}\"", ["echo", "x", "y z", "w"]),
        ("export A=2 B; echo $A", ["echo", "2"]),
        ("echo a\\\n  b # c \\\n", ["echo", "a", "b"]),
        ("echo $(rm -rf /) `id` x", ["echo", UNKNOWN, UNKNOWN, "x"]),
        ("echo ${A##*/} $B", ["echo", UNKNOWN, UNKNOWN]),
        ("for A in 1 2; do B=3; done; echo $A $B", ["echo", UNKNOWN, UNKNOWN]),
        ("A=1\nif true; then A=1; fi; echo $A", ["echo", "1"]),
        ("echo a > b 2>&1 < c", ["echo", "a"]),
        ('echo a#b "c # d"', ["echo", "a#b", "c # d"]),
        ("A=$((1 + $(id)))\necho $A", ["echo", UNKNOWN]),
        ('echo "$(pwd)/x" $PWD/y', ["echo", f"{Path.cwd()}/x", f"{Path.cwd()}/y"]),
        (
            "A=~/x; echo $A ~/y ${B:-~/z} '~/q' a~/b",
            ["echo", *(f"{Path.home()}/{one}" for one in "xyz"), "~/q", "a~/b"],
        ),
        ("echo a \\", ["echo", "a"]),
        ("cd /tmp && echo $(pwd)", ["echo", UNKNOWN]),
    ],
)
@pytest.mark.usefixtures("no_process")
def test_shell_words(script: str, words: list[str]) -> None:
    assert [command.words for command in commands(script) if command.words[0] == "echo"] == [words]


@given(st.text(alphabet="aA=$(){}[]`'\"\\ \n;|&<>#@:-+/0n", max_size=60))
@settings(max_examples=200, deadline=None)
def test_any_text_is_read_without_starting_a_process(text: str) -> None:
    _WATCHED.clear()
    _IS_WATCHING[0] = True
    try:
        commands("A=`touch x`\n" + text)
    finally:
        _IS_WATCHING[0] = False
    assert _WATCHED == []


@pytest.mark.usefixtures("no_process")
def test_the_equivalent_command_gives_the_same_config() -> None:
    command = [
        "data.train_files=/data/train.parquet",
        "data.val_files=/data/test.parquet",
        "algorithm.adv_estimator=grpo",
        "actor_rollout_ref.rollout.name=embedded",
        "actor_rollout_ref.rollout.n=4",
        "actor_rollout_ref.actor.optim.lr_warmup_steps_ratio=0.1",
        "trainer.n_gpus_per_node=1",
        "trainer.logger=[console]",
    ]
    (launch,) = launches("python3 -m verl.trainer.main_ppo " + " ".join(command))
    report = judge(launch)
    assert report.is_accepted
    ours, verls = load_config(report.equivalent), load_config(arguments(command, "ppo_trainer"))
    mine, theirs = (flatten(config.model_dump(mode="json"), leaf_keys(Config)) for config in (ours, verls))
    other = {key for key, value in theirs.items() if mine[key] != value}
    assert other <= idle_keys(verls, differing(verls)).keys(), "only what has no effect may be left out"


@pytest.mark.usefixtures("no_process")
def test_a_command_may_be_one_long_word_and_its_default_contradict(capsys: pytest.CaptureFixture[str]) -> None:
    keys = [
        "reward_model.reward_manager=dapo",
        "+reward.reward_manager.name=naive",
        "trainer.project_name=" + "x" * 300,
    ]
    assert main(["check", " ".join(["python3 -m verl.trainer.main_ppo", *keys])]) in (0, 1)
    assert_names(capsys.readouterr().out, "reward.reward_manager.name=naive and reward_model.reward_manager=dapo")


def test_a_file_that_is_no_text_is_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "run.sh").write_bytes(b"\xff\xfe")
    assert main(["check", str(tmp_path / "run.sh")]) == 2
    assert_names(capsys.readouterr().err, str(tmp_path / "run.sh"), "UTF-8")


@pytest.mark.usefixtures("no_process")
def test_a_script_is_judged(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    script = tmp_path / "run.sh"
    script.write_text(SCRIPT.replace("name=vllm", "name=embedded"))
    assert main(["check", str(script)]) == 0
    told = capsys.readouterr().out
    assert "line 19: verl.trainer.main_ppo, as ppo_trainer" in told
    assert "critic.path=Qwen/Qwen2.5-0.5B-Instruct" in told
    assert "python -m agentrl.train" in told
    assert "trainer.n_gpus_per_node=$GPUS" in told
    assert main(["check", "python -m verl.trainer.main_ppo async_flow.x=1"]) == 1
    assert_names(capsys.readouterr().out, "asynchronous")
    assert main(["check", "python -m recipe.own.main_own x=1"]) == 1
    assert_names(capsys.readouterr().out, "recipe's")
    assert main(["check", "ls"]) == 2


def test_a_file_that_is_not_there_and_help(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["check", "nofile.sh"]) == 2
    assert_names(capsys.readouterr().err, "nofile.sh")
    for words in (["--help"], ["check", "-h"]):
        assert main(words) == 0
        assert capsys.readouterr().out.startswith("python -m agentrl.verl check SCRIPT")
    assert main([]) == 2


def test_a_path_with_an_apostrophe() -> None:
    """Hydra's grammar takes it for a quotation mark; bash has taken its own off already."""
    (launch,) = launches(
        "python -m verl.trainer.main_ppo data.train_files=/tmp/o\\'brien/x.parquet trainer.n_gpus_per_node=1 "
        f"\"trainer.default_local_dir=/tmp/o'brien's run\" {ROLLOUT}.name=embedded"
    )
    assert judge(launch).faults == []
    config = load_config(arguments(launch.words, "ppo_trainer"))
    assert (config.data.train_files, config.trainer.default_local_dir) == (
        "/tmp/o'brien/x.parquet",
        "/tmp/o'brien's run",
    )


@pytest.mark.usefixtures("no_process")
def test_code_that_a_command_names_is_not_imported(tmp_path: Path) -> None:
    code = tmp_path / "mine.py"
    code.write_text("raise AssertionError('imported')\n")
    (launch,) = launches(
        f"python -m verl.trainer.main_ppo custom_reward_function.path={code} actor_rollout_ref.rollout.name=embedded "
        f"data.sampler.name={code}:Sampler trainer.n_gpus_per_node=1"
    )
    judge(launch)


def test_a_flag_whose_value_is_not_known_is_left_out() -> None:
    (launch,) = launches('python3 -m verl.trainer.main_ppo --config-path "$HERE/config" trainer.n_gpus_per_node=1')
    assert launch.words == ["trainer.n_gpus_per_node=1"]
    assert launch.unknown == ["--config-path", ".../config"]


def test_defaults_of_a_first_release_are_told() -> None:
    (launch,) = launches("python3 -m verl.trainer.main_ppo actor_rollout_ref.actor.ppo_micro_batch_size=8")
    report = judge(launch)
    assert report.config_name == "ppo_0_2_trainer"
    assert "dialect=verl-0.2: the defaults of verl 0.2 hold" in page(report)


ACTOR, ROLLOUT, CORRECTION = "actor_rollout_ref.actor", "actor_rollout_ref.rollout", "algorithm.rollout_correction"
SWITCHED_OFF = {
    "algorithm.kl_ctrl.kl_coef=0.001": "up to 0.3.0, which has no such key, subtracts the KL from the reward",
    "algorithm.kl_penalty=low_var_kl": "it needs algorithm.use_kl_in_reward=true",
    f"{ACTOR}.clip_ratio=0.3": "up to 0.3.0 this is both bounds",
    f"{ACTOR}.kl_loss_coef=0.01": f"it needs {ACTOR}.use_kl_loss=true",
    f"{ACTOR}.policy_loss.kl_cov_ratio=0.1": "loss_mode=kl_cov",
    "actor_rollout_ref.model.lora_alpha=32": "lora_rank",
    "actor_rollout_ref.model.lora.alpha=32": "lora.rank",
    f"{ROLLOUT}.val_kwargs.n=4": "val_kwargs.temperature is above 0",
    f"{ROLLOUT}.n_gpus_per_node=4": "rollout.nnodes above 0",
    "custom_reward_function.name=mine": "read with path alone",
    "data.custom_cls.name=Mine": "data.custom_cls.path",
    "data.sampler.class_name=Mine": "data.sampler.class_path",
    "reward_model.overlong_buffer.len=64": "the reward manager dapo and enable=true",
    "reward_model.max_length=64": "reward_model.enable",
    "algorithm.filter_groups.metric=acc": "filter_groups.enable",
    "algorithm.filter_groups.max_num_gen_batches=5": "filter_groups.enable",
    f"{CORRECTION}.rollout_is_threshold=2.0": "read with rollout_is alone",
    f"{CORRECTION}.rollout_rs_threshold=2.0": "rollout_rs alone",
    "algorithm.gdpo_reward_keys=[a]": "with gdpo it is",
    "trainer.resume_from_path=some": "resume_mode=resume_path",
    "critic.optim.lr=1e-5": "it needs algorithm.adv_estimator=gae",
    f"{ACTOR}.optim.lr_warmup_steps_ratio=0.1": "lr_warmup_steps gives no number",
}
"""Words of commands in which another key leaves them without effect, with a part of what is said of each."""


def test_what_another_key_switches_off_is_said_at_the_start_and_is_not_the_same(
    caplog: pytest.LogCaptureFixture,
) -> None:
    words = ["algorithm.adv_estimator=grpo", f"{ACTOR}.optim.lr_warmup_steps=10", f"{ROLLOUT}.name=embedded"]
    words += ["trainer.n_gpus_per_node=1", *SWITCHED_OFF]
    (launch,) = launches(f"python3 -m verl.trainer.main_ppo {' '.join(words)}")
    report = judge(launch)
    assert report.faults == []
    assert report.idle.keys() == {word.partition("=")[0] for word in SWITCHED_OFF}
    told = page(report)
    same, _, rest = told.partition("without effect in this command")
    with caplog.at_level(logging.WARNING, "agentrl.config"):
        load_config(arguments(launch.words, "ppo_trainer"))
    (note,) = [text for text in caplog.messages if text.startswith("without effect in this command:")]
    for word, why in SWITCHED_OFF.items():
        key = word.partition("=")[0]
        assert f"    {key}" not in same, "it is not the same, and not translated"
        for text in (rest, note):
            (line,) = [line for line in text.splitlines() if line.strip().startswith(f"{key}=")]
            assert " has no effect: " in line and why in line, line


def test_a_key_whose_value_another_key_replaces_is_not_the_same() -> None:
    words = f"actor_rollout_ref.hybrid_engine=False {ROLLOUT}.free_cache_engine=True"
    (launch,) = launches(f"python3 -m verl.trainer.main_ppo {words}")
    report = judge(launch)
    assert f"{ROLLOUT}.free_cache_engine" not in report.translation.same
    assert report.idle == {
        f"{ROLLOUT}.free_cache_engine": f"{ROLLOUT}.free_cache_engine=true has no effect: "
        "actor_rollout_ref.hybrid_engine=false sets it to false"
    }


@pytest.mark.parametrize(
    ("switch", "word"),
    [
        ("algorithm.use_kl_in_reward=True", "algorithm.kl_ctrl.kl_coef=0.001"),
        (f"{ACTOR}.use_kl_loss=True", f"{ACTOR}.kl_loss_coef=0.01"),
        (f"{CORRECTION}.rollout_rs=token_k2", f"{CORRECTION}.rollout_rs_threshold=2.0"),
        (f"{ACTOR}.clip_ratio_low=null", f"{ACTOR}.clip_ratio=0.3"),
        ("actor_rollout_ref.model.lora_rank=8", "actor_rollout_ref.model.lora_alpha=32"),
    ],
)
def test_what_is_switched_on_has_an_effect(switch: str, word: str) -> None:
    (launch,) = launches(f"python3 -m verl.trainer.main_ppo {switch} {word} {ROLLOUT}.name=embedded")
    assert judge(launch).idle == {}


def test_a_file_of_ones_own_is_told_of_its_keys_without_effect(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """The defaults under it are nobody's mistake."""
    (tmp_path / "mine.yaml").write_text(
        "defaults: [ppo_trainer, _self_]\nalgorithm: {kl_ctrl: {kl_coef: 0.002}, adv_estimator: grpo}\n"
        "actor_rollout_ref: {rollout: {name: embedded}}\ntrainer: {n_gpus_per_node: 1}\n"
    )
    with caplog.at_level(logging.WARNING, "agentrl.config"):
        load_config([f"--config-path={tmp_path}", "--config-name=mine"])
    (note,) = [text for text in caplog.messages if text.startswith("without effect in this command:")]
    assert [line.split("=")[0].strip() for line in note.splitlines()[1:]] == ["algorithm.kl_ctrl.kl_coef"]


def test_search_r1s_commands_take_its_defaults() -> None:
    assert arguments(["max_turns=2"], "ppo_trainer")[0] == "--config-name=search_r1_trainer"
    assert arguments(["data.seed=2"], "ppo_trainer")[0] == "--config-name=ppo_trainer"


def test_verls_own_folder_of_yaml_is_ours() -> None:
    given = ["--config-path=./config", "--config-name=ppo_megatron_trainer.yaml", "data.seed=2"]
    assert arguments(given, "ppo_trainer") == given[1:]


def commands_of_the_page(section: str) -> list[str]:
    """The words of the command that a section of docs/verl.md shows, in order, without its module."""
    text = (PROJECT / "docs" / "verl.md").read_text(encoding="utf-8").partition(f"\n## {section}\n")[2]
    (launch,) = launches(text.partition("```bash\n")[2].partition("```")[0])
    return launch.words


AUTHORS = {
    "actor_rollout_ref.actor.ppo_mini_batch_size": "256",
    "actor_rollout_ref.actor.use_invalid_action_penalty": "True",
    "actor_rollout_ref.rollout.multi_turn.interaction_config_path": None,
}
"""Values of verl-agent's script for ALFWorld where the page's command has others."""


def test_a_command_of_verl_agents_is_translated_once_it_has_an_environment(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "alfworld.yaml").write_text("interaction: []\n")
    words = [*commands_of_the_page("Commands of verl-agent"), "actor_rollout_ref.rollout.name=embedded"]
    (launch,) = launches(f"python3 -m verl.trainer.main_ppo {' '.join(words)} trainer.n_gpus_per_node=1")
    report = judge(launch)
    assert report.config_name == "verl_agent_trainer"
    assert report.faults == []
    config = load_config(arguments(launch.words, "ppo_trainer"))
    assert config.algorithm.adv_options == {"step_advantage_w": 1.0, "step_gamma": 0.95, "over_turns": True}
    assert config.algorithm.norm_adv_by_std_in_grpo and config.algorithm.adv_estimator == "gigpo"
    turns = config.actor_rollout_ref.rollout.multi_turn
    assert (turns.max_assistant_turns, turns.max_user_turns, turns.max_tokens_per_turn) == (50, 50, 512)
    assert config.actor_rollout_ref.rollout.n == 8 and config.data.max_response_length == 25600
    assert config.actor_rollout_ref.actor.entropy_coeff == 0.001, "the fork's default, which its scripts leave out"
    assert re.search(r"verl_agent_trainer: its defaults hold.*\.entropy_coeff=0\.001 \(0\)", page(report))
    without = [word for word in launch.words if not word.startswith("algorithm.gigpo.mode")]
    assert not load_config(arguments(without, "ppo_trainer")).algorithm.norm_adv_by_std_in_grpo, "its default"


@pytest.mark.parametrize("key", AUTHORS)
def test_the_authors_own_value_is_refused_with_what_to_write(key: str) -> None:
    words = [word for word in commands_of_the_page("Commands of verl-agent") if not word.startswith(f"{key}=")]
    words += [f"{key}={AUTHORS[key]}"] if AUTHORS[key] else []
    (launch,) = launches(f"python3 -m verl.trainer.main_ppo {' '.join(words)} actor_rollout_ref.rollout.name=embedded")
    (fault,) = [one for one in judge(launch).faults if "trainer.n_gpus_per_node" not in one]
    said = {"use_invalid_action_penalty": "write actor_rollout_ref.actor.use_invalid_action_penalty=false"}
    said |= {"ppo_mini_batch_size": "write a divisor of data.train_batch_size=16"}
    said |= {"interaction_config_path": "give actor_rollout_ref.rollout.multi_turn.interaction_config_path"}
    assert said[key.rpartition(".")[2]] in fault
