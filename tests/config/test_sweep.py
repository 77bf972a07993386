"""Several jobs from one command line, and Hydra's own keys and flags."""

from __future__ import annotations

import logging
from pathlib import Path

import pytest
import yaml
from omegaconf import OmegaConf

from agentrl.config import Config, load_config
from agentrl.config.hydra_section import FILLED_IN, SEARCHPATH, leaves
from agentrl.config.load import hydras_own
from agentrl.config.sweep import Job, folder_name, load_jobs
from agentrl.errors import ConfigError, NothingLeft, UserError
from agentrl.trainer.sweep import run_jobs

MODEL = "actor_rollout_ref.model.path=some/model"
RUN = "trainer.default_local_dir"


def jobs(*words: str) -> list[Job[Config]]:
    return load_jobs(["-m", MODEL, "data.train_files=a.parquet", *words], "train", Config)


def refused(*words: str) -> str:
    with pytest.raises(ConfigError) as error:
        load_jobs([MODEL, "data.train_files=a.parquet", *words], "train", Config)
    return str(error.value)


def test_a_sweep_is_every_combination_each_in_a_folder_of_its_own() -> None:
    found = jobs(
        "trainer.seed=1,2", "data.seed=range(3,5)", "trainer.experiment_name=mine", "data.shuffle=choice(true)"
    )
    assert [job.name for job in found] == [
        f"trainer.seed={seed},data.seed={order},data.shuffle=True" for seed in (1, 2) for order in (3, 4)
    ]
    assert [(job.config.trainer.seed, job.config.data.seed) for job in found] == [(1, 3), (1, 4), (2, 3), (2, 4)]
    names = [job.config.trainer.experiment_name for job in found]
    assert names == [f"mine/{job.name}" for job in found]
    assert [job.config.trainer.default_local_dir for job in found] == [f"runs/mine/{job.name}" for job in found]


def test_folders_of_ones_own_that_are_apart_are_kept() -> None:
    (one, other) = jobs("trainer.experiment_name=a,b")
    assert [job.config.trainer.default_local_dir for job in (one, other)] == ["runs/a", "runs/b"]
    (one, other) = jobs("trainer.seed=1,2", f"{RUN}=x/${{trainer.seed}}")
    assert [job.config.trainer.default_local_dir for job in (one, other)] == ["x/1", "x/2"]


def test_a_sweep_over_the_choices_of_a_group() -> None:
    assert [job.config.algorithm.adv_estimator for job in jobs("algorithm=grpo,ppo")] == ["grpo", "gae"]


@pytest.mark.parametrize("words", [[], ["trainer.seed=7"], ["+trainer.seed=7"]])
def test_a_sweep_without_lists_is_one_job_as_hydras(words: list[str]) -> None:
    assert jobs(*words) == load_jobs([MODEL, "data.train_files=a.parquet", *words], "train", Config)


def test_folder_names_are_safe_and_apart() -> None:
    assert folder_name(["a.b=1", "+c=x"]) == "a.b=1,c=x"
    odd = [folder_name([f"path={text}"]) for text in ("a/b", "a b", "../../x", "y" * 500, "y" * 501)]
    assert len(set(odd)) == 5 and all("/" not in name and len(name) < 140 for name in odd)


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (["-m", "trainer.seed=range(3,1)"], "trainer.seed: no value is listed"),
        (["-m", "trainer.sed=1"], "unknown key trainer.sed"),
        (["-m", "trainer.seed=interval(1,2)"], "trainer.seed=a,b"),
        (["-m", "algorithm=glob(*)"], "listed"),
        (["-m", "algorithm=grpo,nope"], "job algorithm=nope: the config cannot be put together"),
        (["-m", "trainer.seed=1,x"], "job trainer.seed=x: trainer.seed: expected"),
        (["trainer.logger=[console"], "trainer.logger=[console: this is no override"),
        (["-m", "trainer.seed=1,2", "trainer.logger=[console"], "lists as [a,b]"),
        (["trainer.project_name=a&(b"], "quotes inside those of the shell"),
        (["-m", "trainer.sed=1,2"], "did you mean trainer.seed"),
        (["trainer.seed=1,2"], "--multirun"),
        (["hydra.sweeper.params.x=1"], "--multirun"),
        (["-m", "hydra.sweeper.params.trainer.seed='1,2'"], "key=a,b"),
        (["hydra/launcher=joblib"], "one after another"),
        (["-m", "hydra/launcher=basic,joblib"], "one after another"),
        (["hydra/sweeper=ax"], "--multirun"),
        (["hydra.job.chdir=true"], "working directory"),
        (["hydra.mode=MULTIRUN"], "--multirun"),
        (["hydra.verbose=true"], SEARCHPATH),
        (["hydra.output_subdir=x"], "config.yaml"),
        (["hydra.run.dir=a"], RUN),
        (["-m", "trainer.seed=1,2", "hydra.sweep.dir=a"], RUN),
        (["-m", "trainer.seed=1,2", "hydra.sweep.subdir=${hydra.job.num}"], RUN),
        (["--config-dir", "/nowhere/at/all"], "no such folder"),
        (["--cfg", "job", "--package", "actor_rollout_ref.rolout"], "did you mean actor_rollout_ref.rollout"),
    ],
)
def test_what_is_not_taken_is_refused_in_words(words: list[str], says: str) -> None:
    assert says in refused(*words)


@pytest.mark.parametrize("words", [["--resolve"], ["--package", "data"], ["-m", "--cfg", "job"], ["-m", "--info"]])
def test_flags_that_do_not_go_together(words: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        load_config(words)
    assert (ended.value.code == 2 and "leave out" in (said := capsys.readouterr().err)) or "give that, too" in said


def test_values_of_hydras_keys_that_ask_for_nothing_are_taken(tmp_path: Path) -> None:
    (tmp_path / "job.yaml").write_text("defaults: [train, _self_]\nhydra: {output_subdir: null}\n")
    given = [MODEL, "hydra.job.chdir=false", "hydra.output_subdir=null"]
    assert load_config(["--config-path", str(tmp_path), "--config-name", "job", *given]) == load_config([MODEL])


def test_a_command_of_verl_runs_with_hydras_folders_and_says_that_they_have_no_effect(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "mine.yaml").write_text("defaults: [ppo_trainer, _self_]\nhydra: {sweep: {dir: there}}\n")
    words = ["--config-path", str(tmp_path), "--config-name", "mine", MODEL, "actor_rollout_ref.rollout.name=embedded"]
    plain = load_config([*words, "data.train_files=a.parquet"])
    caplog.clear()
    assert load_config([*words, "data.train_files=a.parquet", "hydra.run.dir=here"]) == plain
    assert all(f"{key} has no effect here: {RUN}" in caplog.text for key in ("hydra.run.dir", "hydra.sweep.dir"))


OTHER = {
    "hydra.mode": "MULTIRUN",
    "hydra.sweeper.max_batch_size": 2,
    "hydra.job.num": 3,
    "hydra.job.env_copy": ["PATH"],
    "hydra.job.chdir": True,
    "hydra.sweeper._target_": "x.y",
    "hydra.sweeper.params": {"x": "1"},
}


def other_than(key: str, value: object) -> object:
    """A value that the key may have in Hydra, and has not."""
    match value:
        case _ if key in OTHER:
            return OTHER[key]
        case bool():
            return not value
        case list():
            return ["x"]
        case dict():
            return {"x": "y"}
    return f"{value}x".replace("?", "").replace("$", "")


def test_every_key_of_hydra_is_taken_or_refused_by_name(tmp_path: Path) -> None:
    """In YAML files and on the command line alike, whatever keys Hydra has."""
    others = {
        key: other_than(key, value)
        for key, value in leaves(hydras_own())
        if key != SEARCHPATH and not key.startswith(FILLED_IN)
    }
    assert len(others) > 40
    tree = OmegaConf.create()
    for key, value in others.items():
        OmegaConf.update(tree, key, value, force_add=True)
    (tmp_path / "job.yaml").write_text("defaults: [train, _self_]\n" + OmegaConf.to_yaml(tree))
    said = refused("--config-path", str(tmp_path), "--config-name", "job")
    assert [key for key in others if f"{key} " not in said and f"{key}." not in said] == []
    said = refused(*(f"{key}=x" for key in others))
    assert [key for key in others if f"{key} " not in said] == []


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("hydra: {job: {chdir: true}}", "hydra.job.chdir has no effect here: the working directory stays"),
        ("hydra: {nonsense: 1}", "nonsense"),
        ("hydra: {job: {env_copy: [NO_SUCH_VARIABLE]}}", "hydra.job.env_copy has no effect"),
        ("hydra: {mode: MULTIRUN}", "hydra.mode has no effect here: --multirun"),
        ("hydra: {run: {dir: a}}", f"hydra.run.dir has no effect here: {RUN}"),
        ("hydra: {sweep: {dir: a}}", f"hydra.sweep.dir has no effect here: {RUN}"),
        ("hydra: {sweeper: {params: {trainer.seed: '1,2'}}}", "hydra.sweeper.params.trainer.seed has no effect"),
    ],
)
def test_a_files_keys_of_hydra_are_judged_as_those_of_the_command_line(tmp_path: Path, text: str, says: str) -> None:
    (tmp_path / "job.yaml").write_text(f"defaults: [train, _self_]\n{text}\n")
    assert says in refused("--config-path", str(tmp_path), "--config-name", "job")
    assert says in refused("--config-path", str(tmp_path), "--config-name", "job", "-m", "trainer.seed=1,2")


def test_a_files_choice_of_a_group_of_hydras_is_refused(tmp_path: Path) -> None:
    (tmp_path / "job.yaml").write_text("defaults: [train, override hydra/job_logging: disabled, _self_]\n")
    said = refused("--config-path", str(tmp_path), "--config-name", "job")
    assert "hydra/job_logging has no effect" in said and "hydra.job_logging" not in said


def test_config_dir_adds_a_folder(tmp_path: Path) -> None:
    (tmp_path / "algorithm").mkdir()
    (tmp_path / "algorithm" / "mine.yaml").write_text("adv_estimator: rloo\n")
    (tmp_path / "train.yaml").write_text("data: {train_files: not_this_one.parquet}\n")
    config = load_config(["--config-dir", str(tmp_path), MODEL, "algorithm=mine"])
    assert (config.algorithm.adv_estimator, config.data.train_files) == ("rloo", "quickstart")
    (tmp_path / "job.yaml").write_text("defaults: [train, _self_]\ndata: {train_files: mine.parquet}\n")
    config = load_config(["--config-dir", str(tmp_path), "--config-name", "job", MODEL])
    assert config.data.train_files == "mine.parquet"


def test_a_folder_without_the_file_says_what_is_where(tmp_path: Path) -> None:
    (tmp_path / "job.yaml").write_text("")
    said = refused("--config-path", str(tmp_path))
    assert f"--config-name train: no such file in {tmp_path}; there are job in {tmp_path}" in said
    assert "--config-dir" in said


def test_a_section_is_printed(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        load_config(["--cfg", "job", "--resolve", "--package", "actor_rollout_ref.rollout.agent", MODEL])
    assert ended.value.code == 0
    text = capsys.readouterr().out
    assert text.startswith("# @package actor_rollout_ref.rollout.agent\n")
    assert yaml.safe_load(text)["default_agent_loop"] == "single_turn"


def test_info_tells_the_search_path(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    root = logging.getLogger()
    before = root.level, root.handlers[:]
    with pytest.raises(SystemExit) as ended:
        load_config(["--info", "searchpath", "--config-dir", str(tmp_path), MODEL])
    assert ended.value.code == 0
    assert str(tmp_path) in capsys.readouterr().out
    assert (root.level, root.handlers) == before


def test_jobs_run_one_after_another_and_end_with_a_table(capsys: pytest.CaptureFixture[str]) -> None:
    found, ran = jobs("trainer.seed=1,2,3,4"), []

    def work(config: Config) -> dict[str, float]:
        ran.append(config.trainer.seed)
        if config.trainer.seed == 2:
            raise UserError("the second is wrong\nand more")
        if config.trainer.seed == 3:
            raise NothingLeft("done")
        return {"val/success_greedy": config.trainer.seed / 8}

    with pytest.raises(UserError, match=r"1 of 4 jobs failed: trainer\.seed=2"):
        run_jobs(found, work)
    out, err = capsys.readouterr()
    assert ran == [1, 2, 3, 4] and "error: the second is wrong\nand more" in err
    header, *rows = out.split("job 4 of 4: trainer.seed=4\n")[1].splitlines()
    assert header.split() == ["job", "success_greedy", "seconds", "status", "folder"]
    assert [row.split()[:2] for row in rows] == [
        ["trainer.seed=1", "0.125"],
        ["trainer.seed=2", "-"],
        ["trainer.seed=3", "-"],
        ["trainer.seed=4", "0.5"],
    ]
    assert ["failed: the second is wrong" in row for row in rows] == [False, True, False, False]
    assert "was done before" in rows[2]


def test_an_interrupted_sweep_tells_what_was_done(capsys: pytest.CaptureFixture[str]) -> None:
    def work(config: Config) -> dict[str, float]:
        if config.trainer.seed == 2:
            raise KeyboardInterrupt
        return {}

    with pytest.raises(KeyboardInterrupt):
        run_jobs(jobs("trainer.seed=1,2,3"), work)
    assert "trainer.seed=1" in capsys.readouterr().out.splitlines()[-1]
