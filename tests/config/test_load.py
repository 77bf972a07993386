"""Loading: values, grammar, flags, and what each wrong key or value gets."""

from __future__ import annotations

import importlib
import re
from collections.abc import Callable
from pathlib import Path

import pytest
import yaml

import agentrl.config.load as loading
from agentrl.__main__ import COMMANDS
from agentrl.config import Config, PreferencesConfig, SFTConfig, config_to_dict, load_config, write_config
from agentrl.config.keys import defaults, flatten, leaf_keys, nearest
from agentrl.config.sections.offline import GenerateConfig
from agentrl.config.sections.sft import TuningConfig
from agentrl.errors import ConfigError
from agentrl.system.config_files import configs_dir
from tests.naming import assert_names, naming

MODEL = "actor_rollout_ref.model.path=some/model"
DATA = "data.train_files=train.parquet"
ACTOR, ROLLOUT = "actor_rollout_ref.actor", "actor_rollout_ref.rollout"


def refused(*argv: str) -> str:
    with pytest.raises(ConfigError) as error:
        load_config(argv)
    return str(error.value)


@pytest.mark.parametrize("text", ["trainer=null", "actor_rollout_ref.rollout=3", "actor_rollout_ref={}"])
def test_a_section_takes_no_value(text: str) -> None:
    assert text.partition("=")[0] in refused(text)


def test_defaults_stand_in_the_schema_alone() -> None:
    """Our YAML holds choices and recipes, whose keys exist and whose values are no defaults.

    Files in a dialect lie elsewhere: they are written in its keys, and hold its defaults even where they are ours.
    """
    leaves, default = leaf_keys(Config), flatten(defaults(Config), leaf_keys(Config))
    for path in configs_dir().rglob("*.yaml"):
        group = path.relative_to(configs_dir()).parent.as_posix()
        if group in ("tools", "interactions"):
            continue
        tree = yaml.safe_load(path.read_text()) or {}
        tree.pop("defaults", None)
        values = flatten(tree if group.startswith("recipe") else {group: tree}, leaves) if tree else {}
        repeated = {key for key, value in values.items() if value == default[key]}
        assert repeated <= {"algorithm.adv_estimator", f"{ACTOR}.clip_ratio_low"}, path


def test_generate_takes_short_keys() -> None:
    given = ["data.path=a", "data.output_path=b", "model.path=c", "++rollout.top_k=3", "data.n_samples=5"]
    config = load_config(given, "generate", GenerateConfig)
    rollout = config.actor_rollout_ref.rollout
    assert (config.actor_rollout_ref.model.path, rollout.top_k, rollout.n) == ("c", 3, 5)
    assert config.data.max_prompt_length == 512, "what suits the quickstart's policy suits no other"
    with naming(ConfigError, "actor_rollout_ref.rollout.temperature"):
        load_config([*given, "rollout.temperatur=1"], "generate", GenerateConfig)
    for key in ("rollout.temperature", "rollout.val_kwargs.temperature"):
        with naming(ConfigError, f"actor_rollout_ref.{key}", "0.01"):
            load_config([f"actor_rollout_ref.{key}=1e-38"])


def test_generate_takes_the_yaml_of_a_training(tmp_path: Path) -> None:
    (tmp_path / "job.yaml").write_text(
        "defaults: [train, _self_]\n"
        "data: {train_files: x.parquet, train_batch_size: 8}\n"
        "actor_rollout_ref: {model: {path: m, lora_rank: 8}, actor: {use_kl_loss: true}}\n"
        "trainer: {nnodes: 2}\n"
    )
    argv = ["--config-path", str(tmp_path), "--config-name", "job", "data.path=a", "data.output_path=b"]
    config = load_config(argv, "generate", GenerateConfig)
    assert config.actor_rollout_ref.model.path == "m"
    assert config.actor_rollout_ref.rollout.multi_turn.tool_config_path is None, "no recipe is for generating"
    with naming(ConfigError, "trainer.nnodes=2", "no effect"):
        load_config([*argv, "trainer.nnodes=2"], "generate", GenerateConfig)
    with naming(ConfigError, "key trainer.nodes", "unknown"):
        load_config([*argv, "trainer.nodes=2"], "generate", GenerateConfig)


def test_keys_of_a_file_with_every_key_count_where_they_are_no_defaults(tmp_path: Path) -> None:
    write_config(load_config([]), tmp_path / "config.yaml")
    argv = ["--config-path", str(tmp_path), "--config-name", "config"]
    assert load_config([*argv, "algorithm.norm_adv_by_std_in_grpo=false"]).algorithm.lam == 1.0
    assert_names(refused(*argv, "algorithm.lam=1.0"), "algorithm.lam=1.0", "no effect")
    assert_names(
        refused(*argv, "algorithm.norm_adv_by_std_in_grpo=false", "algorithm.adv_estimator=rloo"),
        "algorithm.norm_adv_by_std_in_grpo=false",
        "no effect",
    )


def test_without_arguments_it_is_the_quickstart() -> None:
    config = load_config([])
    assert (config.data.train_files, config.data.val_files) == ("quickstart", "quickstart")
    assert config.actor_rollout_ref.rollout.multi_turn.tool_config_path == str(
        configs_dir() / "tools" / "quickstart.yaml"
    )
    assert config.actor_rollout_ref.actor.optim.lr > 1e-5
    assert config.trainer.default_local_dir == "runs/quickstart"


def test_one_pass_makes_the_whole_config(monkeypatch: pytest.MonkeyPatch) -> None:
    """One composition where no recipe applies, two where one may, and one validation, after which no value changes."""
    loading.hydras_own()  # composed once a process
    passes: list[str] = []

    def counted(name: str) -> None:
        healthy = getattr(loading, name)

        def once_more(*given: object) -> object:
            passes.append(name)
            return healthy(*given)

        monkeypatch.setattr(loading, name, once_more)

    counted("hydra_compose")
    counted("validate")
    tools = f"{ROLLOUT}.multi_turn.tool_config_path"
    config = load_config([MODEL, DATA, f"{tools}=tools/quickstart.yaml"])
    assert sorted(passes) == ["hydra_compose", "validate"]
    assert config.actor_rollout_ref.rollout.multi_turn.tool_config_path == str(configs_dir() / "tools/quickstart.yaml")
    passes.clear()
    load_config([])
    assert sorted(passes) == ["hydra_compose", "hydra_compose", "validate"]


def test_the_quickstart_values_do_not_reach_another_model_or_other_data() -> None:
    config = load_config([MODEL, DATA])
    values = {**flatten(config_to_dict(config), leaf_keys(Config))}
    default = flatten(defaults(Config), leaf_keys(Config))
    changed = {key for key in default if values[key] != default[key]}
    assert changed == {"actor_rollout_ref.model.path", "data.train_files", "trainer.default_local_dir"}


def test_quickstart_tools_follow_the_data_and_its_learning_rate_the_model() -> None:
    other_model, other_data = load_config([MODEL]), load_config([DATA])
    assert other_model.actor_rollout_ref.actor.optim.lr == 1e-6
    assert other_model.actor_rollout_ref.rollout.multi_turn.tool_config_path is not None
    assert other_data.actor_rollout_ref.actor.optim.lr > 1e-5
    assert other_data.actor_rollout_ref.rollout.multi_turn.tool_config_path is None
    assert other_data.data.val_files is None


def test_grammar() -> None:
    config = load_config(
        [
            "data.train_files=[a.parquet,b/*.parquet]",
            "+data.train_batch_size=64",
            "++data.shuffle=False",
            f"{ACTOR}.optim.betas=[0.8,0.9]",
            "actor_rollout_ref.model.chat_template_kwargs.enable_thinking=false",
            "trainer.experiment_name=20260101",
            "trainer.logger=console",
            "~data.seed",
        ]
    )
    assert config.data.train_files == ["a.parquet", "b/*.parquet"]
    assert (config.data.train_batch_size, config.data.shuffle, config.data.seed) == (64, False, 1)
    assert config.actor_rollout_ref.actor.optim.betas == (0.8, 0.9)
    assert config.actor_rollout_ref.model.chat_template_kwargs == {"enable_thinking": False}
    assert config.trainer.default_local_dir == "runs/20260101"
    assert config.trainer.logger == ["console"]


@pytest.mark.parametrize("name", ["1e-3", "1e3", "0x10", "nan", ".5"])
def test_a_name_stays_as_it_was_written(name: str) -> None:
    assert load_config([f"trainer.experiment_name={name}"]).trainer.experiment_name == name


@pytest.mark.parametrize(("batch", "size"), [(1, 1), (4, 4), (16, 16), (20, 10), (32, 16)])
def test_a_batch_needs_no_size_of_mini_batches(batch: int, size: int) -> None:
    assert load_config([f"data.train_batch_size={batch}"]).actor_rollout_ref.actor.ppo_mini_batch_size == size


def test_group_choice_and_later_override() -> None:
    config = load_config([MODEL, "algorithm=ppo", "algorithm.lam=0.95", "critic.optim.lr=2e-5"])
    assert (config.algorithm.adv_estimator, config.algorithm.lam) == ("gae", 0.95)
    assert config.critic.optim.lr == 2e-5


def test_deleting_a_recipe_value_gives_the_default_of_the_schema() -> None:
    assert load_config(["~trainer.total_training_steps"]).trainer.total_training_steps is None


@pytest.mark.parametrize(
    ("override", "named"),
    [
        ("data.train_batchsize=3", "data.train_batch_size"),
        ("train_batch_size=3", "data.train_batch_size"),
        ("actor_rollout_ref.actor.lr=1e-5", f"{ACTOR}.optim.lr"),
        ("trainer.experiment=x", "trainer.experiment_name"),
        ("+actor_rollout_ref.rollout.temprature=1", f"{ROLLOUT}.temperature"),
        ("~trainer.sed", "trainer.seed"),
        ("data.seed.deep=1", "data.seed"),
    ],
)
def test_unknown_key_names_the_nearest(override: str, named: str) -> None:
    message = refused(override)
    assert message.startswith("unknown key ")
    assert override.lstrip("+~").split("=")[0] in message
    assert named in message


def test_unknown_key_unlike_any_points_to_the_list() -> None:
    assert_names(refused("zzz.qqq=1"), "key zzz.qqq", "--cfg", "unknown")


def test_nearest_prefers_the_same_section() -> None:
    assert nearest("critic.optim.lrr", leaf_keys(Config))[0] == "critic.optim.lr"
    correction = "algorithm.rollout_correction.rollout_is"
    assert nearest(f"{ACTOR}.rollout_is", [*leaf_keys(Config), f"{ACTOR}.rollout_n"])[0] == correction


@pytest.mark.parametrize(
    ("override", "key", "found"),
    [
        ("data.train_batch_size=abc", "data.train_batch_size", "'abc'"),
        ("data.train_batch_size=0", "data.train_batch_size", "found 0"),
        ("data.shuffle=maybe", "data.shuffle", "'maybe'"),
        ("data.train_files=[[1]]", "data.train_files", "[[1]]"),
        (f"{ACTOR}.optim.betas=[0.1]", f"{ACTOR}.optim.betas", "[0.1]"),
        (f"{ACTOR}.optim.lr=nan", f"{ACTOR}.optim.lr", "nan"),
        (f"{ACTOR}.loss_agg_mode=mean", f"{ACTOR}.loss_agg_mode", "'token-mean'"),
        ("trainer.n_gpus_per_node=0", "trainer.n_gpus_per_node", "greater than 0"),
        ("algorithm.kl_ctrl=null", "algorithm.kl_ctrl", "None"),
    ],
)
def test_wrong_value_names_key_expectation_and_finding(override: str, key: str, found: str) -> None:
    message = refused(override)
    assert message.startswith(f"{key}: expected ")
    assert found in message


def test_all_wrong_keys_are_named_at_once() -> None:
    wrong = ["data.seed=x", "trainer.sed=1", "~critic.lr", "algorithm=3", "data.return_full_prompt=true", "data.sead=1"]
    message = refused(*wrong)
    found = [line.partition(";")[0].partition(": ")[0] for line in message.splitlines()]
    assert found == [
        "unknown key critic.lr",
        "algorithm",
        "data.return_full_prompt=true would change the result, and is not here",
        "unknown key data.sead",
        "unknown key trainer.sed",
        "data.seed",
    ]


def test_all_keys_that_do_not_fit_are_named_at_once() -> None:
    wrong = ["critic.ppo_epochs=2", "trainer.val_only=true", "data.val_files=null", f"{ACTOR}.ppo_mini_batch_size=9"]
    message = refused(*wrong)
    assert [line.partition(" ")[0] for line in message.splitlines()] == [
        "trainer.val_only=true",
        "critic.ppo_epochs=2",
        f"{ACTOR}.ppo_mini_batch_size=9",
    ]


@pytest.mark.parametrize(
    ("override", "says"),
    [
        ("data.seed=1,2", "data.seed=[a,b]"),
        ("data.seed=[1", "[1"),
        ("algorithm=nope", "grpo"),
        ("trainer.experiment_name=${nope.nope}", "nope"),
    ],
)
def test_faults_of_the_grammar(override: str, says: str) -> None:
    assert says in refused(override)


def test_a_file_that_is_nowhere() -> None:
    message = refused(f"{ROLLOUT}.multi_turn.tool_config_path=nope.yaml")
    assert_names(message, f"{ROLLOUT}.multi_turn.tool_config_path", "nope.yaml")
    assert str(configs_dir()) in message


def test_files_are_found_beside_the_user_before_ours(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    key = f"{ROLLOUT}.multi_turn.tool_config_path"
    ours = load_config([f"{key}=tools/calculator.yaml"]).actor_rollout_ref.rollout.multi_turn.tool_config_path
    assert ours == str(configs_dir() / "tools" / "calculator.yaml")
    (tmp_path / "tools").mkdir()
    (tmp_path / "tools" / "calculator.yaml").write_text("tools: []")
    mine = load_config([f"{key}=tools/calculator.yaml"]).actor_rollout_ref.rollout.multi_turn.tool_config_path
    assert mine == "tools/calculator.yaml"


def test_own_folder_of_yaml_files(tmp_path: Path) -> None:
    (tmp_path / "job.yaml").write_text(
        "defaults: [ppo_trainer, _self_]\n"
        "hydra: {searchpath: ['file://verl/trainer/config']}\n"
        "data: {train_files: mine.parquet, max_prompt_length: 100}\n"
        "actor_rollout_ref: {hybrid_engine: true, model: {path: mine}, rollout: {n: 4, name: embedded}}\n"
    )
    argv = ["--config-path", str(tmp_path), "--config-name=job", "data.max_response_length=50"]
    config = load_config(argv)
    assert (config.data.max_prompt_length, config.data.max_response_length) == (100, 50)
    assert (config.actor_rollout_ref.rollout.n, config.actor_rollout_ref.actor.optim.lr) == (4, 1e-6)


def test_folders_and_values_with_an_apostrophe(tmp_path: Path) -> None:
    folder = tmp_path / "o'brien's, [own]"
    folder.mkdir()
    (folder / "job.yaml").write_text("defaults: [train, _self_]\ntrainer: {total_epochs: 7}\n")
    words = ["actor_rollout_ref.model.path='it\\'s'", f"data.train_files={tmp_path}/o'brien/x.parquet"]
    for flags in ([f"--config-path={folder}", "--config-name=job"], [f"--config-dir={folder}"]):
        config = load_config([*flags, *words])
        assert config.data.train_files == f"{tmp_path}/o'brien/x.parquet"
        assert config.actor_rollout_ref.model.path == "it's"
    assert_names(refused("data.train_files=[a'b]"), "no override")


def test_own_yaml_that_builds_on_nothing(tmp_path: Path) -> None:
    (tmp_path / "bare.yaml").write_text("data: {train_files: x.parquet}\ntrainer: {experiment_name: bare}\n")
    config = load_config(["--config-path", str(tmp_path), "--config-name", "bare"])
    assert (config.data.train_files, config.trainer.default_local_dir) == ("x.parquet", "runs/bare")


def test_own_yaml_is_judged_like_the_command_line(tmp_path: Path) -> None:
    (tmp_path / "job.yaml").write_text("defaults: [train, _self_]\ndata: {train_batchsize: 3}\n")
    assert "data.train_batch_size" in refused("--config-path", str(tmp_path), "--config-name", "job")
    (tmp_path / "job.yaml").write_text("defaults: [train, _self_]\ncritic: {ppo_epochs: 3}\n")
    assert_names(refused("--config-path", str(tmp_path), "--config-name", "job"), "critic.ppo_epochs=3", "no effect")


RECIPES = sorted(path.stem for path in (configs_dir() / "recipe").glob("*.yaml"))


@pytest.mark.usefixtures("sglang_installed")
@pytest.mark.parametrize("recipe", RECIPES)
@pytest.mark.slice(4, "matrix")
def test_a_key_that_our_recipe_sets_is_no_mistake_of_the_users(recipe: str) -> None:
    """Of a recipe only its files may be missing, which its own script makes."""
    argv = [f"--config-name=recipe/{recipe}", "data.val_files=null"]
    try:
        assert load_config(argv).data.val_files is None
    except ConfigError as error:
        assert re.fullmatch(r"[\w.]+: there is no file runs/\S+ in .*", str(error))


def test_a_key_of_ones_own_over_a_recipe_is_judged(tmp_path: Path) -> None:
    (tmp_path / "job.yaml").write_text(
        "defaults: [recipe/smollm2_gsm8k, _self_]\ndata: {val_files: null}\n"
        "actor_rollout_ref: {actor: {kl_loss_coef: 3}}\n"
    )
    argv = ["--config-path", str(tmp_path), "--config-name", "job"]
    found = refused(*argv, "trainer.test_freq=7")
    assert re.findall(r"^([\w.]+)=", found, re.MULTILINE) == [f"{ACTOR}.kl_loss_coef", "trainer.test_freq"], found
    load_config([*argv, f"{ACTOR}.use_kl_loss=true"])


def test_unknown_config_name_lists_the_known() -> None:
    message = refused("--config-name", "nope")
    assert "ppo_trainer" in message and "sft" in message and "train" in message


def test_cfg_job_prints_what_would_run(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        load_config(["--cfg", "job", MODEL, "trainer.experiment_name=x"])
    assert ended.value.code == 0
    printed = yaml.safe_load(capsys.readouterr().out)
    assert printed == {"every_key": True} | config_to_dict(load_config([MODEL, "trainer.experiment_name=x"]))


@pytest.mark.parametrize("name", COMMANDS)
def test_help_is_of_the_command_and_lists_the_flags_that_it_takes(
    name: str, capsys: pytest.CaptureFixture[str]
) -> None:
    entry = f"agentrl.{name}.__main__" if name == "plan" else f"agentrl.{name}"
    with pytest.raises(SystemExit) as ended:
        importlib.import_module(entry).main(["--help"])
    assert ended.value.code == 0
    text = capsys.readouterr().out
    examples = [line.split()[2] for line in text.splitlines() if line.startswith("  python -m ")]
    assert examples and set(examples) == {f"agentrl.{name}"}
    assert ("--multirun" in text) == (name in ("train", "sft", "preferences"))
    assert ("data.train_files  (default quickstart)" in text) == (name in ("train", "plan"))
    assert ("model.path  (required)" in text) == (name in ("sft", "preferences", "generate"))


ON_FILES: dict[str, Callable[[list[str]], TuningConfig]] = {
    "sft": lambda argv: load_config(argv, "sft", SFTConfig),
    "preferences": lambda argv: load_config(argv, "preferences", PreferencesConfig),
}


@pytest.mark.parametrize("name", ON_FILES)
def test_help_shows_the_defaults_that_hold(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        importlib.import_module(f"agentrl.{name}").main(["--help"])
    shown = dict(re.findall(r"^  ([a-z_.]+)  \(default (.*)\)$", capsys.readouterr().out, re.MULTILINE))
    holds = ON_FILES[name](["data.train_files=x", "model.path=policy"])
    assert float(shown["optim.lr"]) == holds.optim.lr
    assert shown["trainer.experiment_name"] == holds.trainer.experiment_name == name


@pytest.mark.parametrize("name", ON_FILES)
def test_training_on_files_needs_a_model_that_is_there(name: str) -> None:
    """`quickstart` names no model there, and no hub is asked for one."""
    with pytest.raises(ConfigError, match=r"model\.path must be given"):
        ON_FILES[name](["data.train_files=x"])
    with pytest.raises(ConfigError, match="expected a model that is there, found 'quickstart'"):
        ON_FILES[name](["data.train_files=x", "model.path=quickstart"])


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (
            ["--trainer.seed=3", "trainer.val_only=true"],
            "unknown flags --trainer.seed=3; .* no dashes: trainer.seed=3\n",
        ),
        (["trainer.seed=3", "--sed"], "unknown flags --sed; --help lists the flags"),
        (["-trainer.seed=3", "--x"], "unknown flags -trainer.seed=3 --x; overrides have no dashes: trainer.seed=3"),
    ],
)
def test_unknown_flags_are_named(words: list[str], says: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        load_config([MODEL, *words])
    assert ended.value.code == 2
    assert re.search(says, capsys.readouterr().err)


def test_written_config_loads_as_the_same(tmp_path: Path) -> None:
    config = load_config([MODEL, "data.train_batch_size=48", f"{ACTOR}.clip_ratio_high=0.3", "trainer.seed=7"])
    write_config(config, tmp_path / "config.yaml")
    assert [path.name for path in tmp_path.iterdir()] == ["config.yaml"]
    assert load_config(["--config-path", str(tmp_path), "--config-name", "config"]) == config


def test_written_quickstart_config_loads_as_the_same(tmp_path: Path) -> None:
    config = load_config([])
    write_config(config, tmp_path / "config.yaml")
    assert load_config(["--config-path", str(tmp_path), "--config-name", "config"]) == config


def test_sft_needs_its_data() -> None:
    with naming(ConfigError, "data.train_files", "given"):
        load_config([], "sft", SFTConfig)
    config = load_config(["data.train_files=a.parquet", "model.path=m", "optim.lr=1e-4"], "sft", SFTConfig)
    assert (config.data.train_files, config.optim.lr) == ("a.parquet", 1e-4)


def test_a_users_yaml_that_is_not_yaml(tmp_path: Path) -> None:
    (tmp_path / "job.yaml").write_text("trainer:\n  seed: 1\n  seed: 2\n")
    message = refused("--config-path", str(tmp_path), "--config-name", "job")
    assert_names(message, "job.yaml", "duplicate", "seed")


def test_nothing_depends_on_which_keys_were_given() -> None:
    """A command gives all of them, with their defaults: only a value can say what is wanted."""
    files = (configs_dir().parent / "agentrl").rglob("*.py")
    # Adapters read the models of other packages.
    texts = "".join(file.read_text() for file in files if file.parent.name != "adapters")
    assert "def load_config" in texts and "model_fields_set" not in texts
