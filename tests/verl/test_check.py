"""`python -m agentrl.verl check`: launch scripts are read, never run."""

from __future__ import annotations

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
    assert "a part of verl's asynchronous trainers that is not part of agentrl" in capsys.readouterr().out
    assert main(["check", "python -m recipe.own.main_own x=1"]) == 1
    assert "a recipe's own trainer" in capsys.readouterr().out
    assert main(["check", "ls"]) == 2


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
