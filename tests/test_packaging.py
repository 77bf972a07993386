"""The wheel: what is in it works from any directory, beside a user's own folders."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import tomllib
import zipfile
from pathlib import Path

import pytest
from packaging.requirements import Requirement

from agentrl.__main__ import COMMANDS
from agentrl.errors import install_extra

PROJECT = Path(__file__).resolve().parent.parent


def run(program: str, installed: Path, cwd: Path) -> str:
    """Run in `cwd` with the installed wheel before, and the checkout off, the import path."""
    guard = f"import sys; sys.path = [p for p in sys.path if p != {str(PROJECT)!r}]\n"
    done = subprocess.run(
        [sys.executable, "-c", guard + program],
        cwd=cwd,
        env={**os.environ, "PYTHONPATH": str(installed)},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_every_source_and_config_file_is_in_the_wheel(agentrl_wheel: Path) -> None:
    inside = set(zipfile.ZipFile(agentrl_wheel).namelist())
    for folder, place in [(name, name) for name in ("agentrl", "data_prep", "sandbox", "tools", "interactions")] + [
        ("configs", "agentrl/_configs")
    ]:
        for file in (PROJECT / folder).rglob("*"):
            if file.is_file() and "__pycache__" not in file.parts:
                assert f"{place}/{file.relative_to(PROJECT / folder)}" in inside
    assert not any(name.startswith(("tests/", "benchmarks/", "labs/", "configs/")) for name in inside)


def test_an_older_python_is_refused_by_name(tmp_path: Path) -> None:
    program = "import sys; sys.version_info = (3, 10, 1); sys.version = '3.10.1 (main)'; import agentrl"
    environment = {**os.environ, "PYTHONPATH": str(PROJECT)}
    done = subprocess.run(
        [sys.executable, "-c", program], cwd=tmp_path, env=environment, capture_output=True, text=True
    )
    assert done.returncode == 1
    assert f"agentrl needs Python 3.11 or newer; {sys.executable} is 3.10.1. Make an environment" in done.stderr


def test_the_config_loads_from_an_empty_directory(installed: Path, tmp_path: Path) -> None:
    program = (
        "import agentrl\n"
        f"assert agentrl.__file__.startswith({str(installed)!r}), agentrl.__file__\n"
        "from agentrl.config import load_config\n"
        "from agentrl.system.config_files import configs_dir\n"
        "config = load_config([])\n"
        "print(configs_dir())\n"
        "print(config.actor_rollout_ref.rollout.multi_turn.tool_config_path)\n"
    )
    configs = installed / "agentrl" / "_configs"
    assert run(program, installed, tmp_path).split() == [str(configs), str(configs / "tools" / "quickstart.yaml")]


def test_a_users_folder_of_tools_adds_to_ours(installed: Path, tmp_path: Path) -> None:
    (tmp_path / "tools").mkdir()
    (tmp_path / "tools" / "mine.py").write_text("def double(x: int) -> int:\n    return 2 * x\n")
    program = (
        "import tools.mine, tools.calculator, interactions.gsm8k, data_prep.gsm8k\n"
        "print(tools.mine.__file__)\nprint(tools.calculator.__file__)\n"
    )
    mine, ours = run(program, installed, tmp_path).split()
    assert Path(mine) == tmp_path / "tools" / "mine.py"
    assert Path(ours) == installed / "tools" / "calculator.py"


def test_a_users_own_yaml_builds_on_the_installed_one(installed: Path, tmp_path: Path) -> None:
    (tmp_path / "job.yaml").write_text("defaults: [train, _self_]\ntrainer: {experiment_name: job}\n")
    program = (
        "from agentrl.config import load_config\n"
        "print(load_config(['--config-path', '.', '--config-name', 'job']).trainer.default_local_dir)\n"
    )
    assert run(program, installed, tmp_path).strip() == "runs/job"


def test_the_retriever_runs_from_the_wheel(installed: Path, tmp_path: Path) -> None:
    pytest.importorskip("tantivy", reason="the extra `retriever` is not installed")
    (tmp_path / "c.jsonl").write_text('{"contents": "Zed"}\n')
    program = (
        "import runpy, sys\n"
        "sys.argv = ['retriever', 'index', 'c.jsonl', 'made']\n"
        "runpy.run_module('tools.retriever', run_name='__main__', alter_sys=True)\n"
    )
    assert run(program, installed, tmp_path).strip() == "made: 1 documents"
    assert (tmp_path / "made" / "retriever.json").exists()


@pytest.fixture(scope="module")
def bare(agentrl_wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Folder of the commands of an environment that has the wheel, and beneath it the packages that it depends on."""
    home = tmp_path_factory.mktemp("bare")
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", str(home)], check=True)
    pip = [sys.executable, "-m", "pip", "--python", str(home / "bin" / "python"), "install", "--no-deps", "--no-index"]
    subprocess.run([*pip, str(agentrl_wheel)], check=True, capture_output=True)
    ours = next((home / "lib").glob("python*/site-packages"))
    (ours / "dependencies.pth").write_text(
        str(Path(pytest.__file__).parent.parent) + "\n"
    )  # no .pth of its own is read
    return home / "bin"


def command(folder: Path, cwd: Path, *words: str) -> subprocess.CompletedProcess[str]:
    """Run the installed `agentrl`."""
    environment = {key: value for key, value in os.environ.items() if key != "PYTHONPATH"}
    return subprocess.run([str(folder / "agentrl"), *words], cwd=cwd, env=environment, capture_output=True, text=True)


def test_the_console_command_runs_the_modules(bare: Path, tmp_path: Path) -> None:
    listed = command(bare, tmp_path, "--help")
    assert listed.returncode == 0 and all(f"agentrl {name} " in listed.stdout for name in COMMANDS)
    wrong = command(bare, tmp_path, "trian")
    assert wrong.returncode == 2 and "error: no command 'trian'; did you mean 'train'?" in wrong.stderr
    unknown = command(bare, tmp_path, "train", "trainer.totl_training_steps=1")
    assert unknown.returncode == 2 and "did you mean trainer.total_training_steps?" in unknown.stderr, unknown.stderr
    (tmp_path / "tools").mkdir()
    (tmp_path / "tools" / "mine.py").write_text("def double(x: int) -> int:\n    return 2 * x\n")
    (tmp_path / "tools.yaml").write_text("tools:\n  - {function: tools.mine.duble}\n")
    mine = "actor_rollout_ref.rollout.multi_turn.tool_config_path=tools.yaml"
    found = command(bare, tmp_path, "train", mine, "quickstart.train_rows=8", "quickstart.val_rows=4")
    assert "did you mean 'double'?" in found.stdout + found.stderr, "tools of the folder that it starts in are found"


@pytest.mark.parametrize("name", COMMANDS)
def test_every_command_is_a_module_that_runs(name: str) -> None:
    import importlib.util

    spec = importlib.util.find_spec(f"agentrl.{name}")
    assert spec is not None
    source = Path(spec.origin or "")
    if spec.submodule_search_locations:
        source = source.with_name("__main__.py")
    assert '__name__ == "__main__"' in source.read_text()


@pytest.mark.parametrize("top", ["data_prep", "tools"])
def test_a_users_package_that_hides_one_of_ours_is_named(bare: Path, tmp_path: Path, top: str) -> None:
    hiding = tmp_path / top / "__init__.py"
    hiding.parent.mkdir()
    hiding.touch()
    done = command(bare, tmp_path, "train", "trainer.total_training_steps=1", "quickstart.train_rows=8")
    assert done.returncode == 2
    assert f"{hiding} hides agentrl's own `{top}/`; rename that" in done.stdout + done.stderr


@pytest.mark.slice(0, "long run")
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("python", ["python3.11", "python3.12"])
def test_a_wheel_in_an_empty_environment_trains(python: str, agentrl_wheel: Path, tmp_path: Path) -> None:
    """Every package comes from the index, as a user's does."""
    if shutil.which(python) is None or subprocess.run([python, "--version"], capture_output=True).returncode:
        pytest.skip(f"{python} is not on this machine")
    environment = {key: value for key, value in os.environ.items() if key != "PYTHONPATH"}
    subprocess.run([python, "-m", "venv", str(tmp_path / "venv")], check=True)
    pip = [str(tmp_path / "venv" / "bin" / "python"), "-m", "pip", "install", "-q", "-c", "constraints/cpu.txt"]
    done = subprocess.run([*pip, str(agentrl_wheel)], cwd=PROJECT, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-3000:]
    words = ["train", "trainer.total_training_steps=2", "data.train_batch_size=4"]
    trained = command(tmp_path / "venv" / "bin", tmp_path, *words, "actor_rollout_ref.actor.ppo_mini_batch_size=4")
    assert trained.returncode == 0, trained.stdout[-3000:] + trained.stderr[-3000:]
    assert (tmp_path / "runs" / "quickstart" / "policy" / "config.json").is_file()


OF_AN_INDEX = re.compile(
    r"""(?<![\w/.-])agentrl\[[\w{}.,-]+\](?=['"`\s,;:)\]=<>~!@]|$)  # a requirement with extras, wherever it stands
    |\b(?:install|uv\ add|uvx|pipx\ run|--with)\b[^\n`|;&]*?[\s'"](?:agentrl(?:[=<>~!@][^\n'"]*)?)(?=['"`\s,;:)]|$)""",
    re.VERBOSE,
)
"""Words that let an installer look for `agentrl` in a package index."""
EXTRAS = re.compile(r"(?:install[^\n`]*'\.\[|install_extra\(['\"])([\w,-]+)")
TEXTS = (".py", ".md", ".yaml", ".yml", ".toml", ".sh", ".sbatch", ".ipynb", ".txt", ".Dockerfile", ".js", ".html")


def texts() -> dict[str, str]:
    """Read every text that a user may take a command from, by path."""
    rooms = [path for path in PROJECT.iterdir() if path.is_dir() and not path.name.startswith((".venv", ".git"))]
    files = [file for room in [*rooms, PROJECT / ".github"] for file in room.rglob("*")] + list(PROJECT.iterdir())
    return {
        str(file.relative_to(PROJECT)): file.read_text(encoding="utf-8")
        for file in files
        if (file.suffix in TEXTS or file.name == "Makefile") and file.is_file()
    }


@pytest.mark.parametrize(
    "command",
    [
        "pip install 'agentrl[gguf]'",
        "pip install agentrl",
        "needs: uv add 'agentrl>=0.1'",
        "uvx agentrl view",
        "dependencies: [agentrl[ray]]",
        "f'pip install agentrl[{extra}], or leave it out'",
    ],
)
def test_a_command_that_asks_an_index_is_found(command: str) -> None:
    assert OF_AN_INDEX.search(command)


def test_nothing_tells_a_user_to_install_agentrl_from_an_index() -> None:
    """The package index's `agentrl` is another project (docs/decisions/080-the-distributions-name.md)."""
    found = {
        f"{path}: {match[0]}"
        for path, text in texts().items()
        for match in OF_AN_INDEX.finditer(text)
        # The requirements of our own extras are met by the project that is being installed.
        if path not in ("pyproject.toml", "tests/test_packaging.py")
    }
    assert found == set()


def test_every_extra_that_a_message_or_page_names_is_declared() -> None:
    project = tomllib.loads((PROJECT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    declared = project["optional-dependencies"]
    named = {
        (path, extra)
        for path, text in texts().items()
        for match in EXTRAS.finditer(text)
        for extra in match[1].split(",")
    }
    assert len(named) > 25
    assert [one for one in sorted(named) if one[1] not in declared] == []
    for requirement in (Requirement(line) for lines in declared.values() for line in lines):
        assert requirement.name != project["name"] or requirement.extras <= set(declared)


def test_one_function_writes_how_an_extra_is_installed() -> None:
    assert install_extra("hub").count("[hub]") == 2
    writers = {
        path for path, text in texts().items() if path.endswith(".py") and re.search(r"install[^\n]*'\.\[", text)
    }
    assert {path for path in writers if not path.startswith("tests/")} == {"agentrl/errors.py"}


LAST_WITH_A_HOLE = {
    "aiohttp": "3.14.2",  # CVE-2026-69244
    "h11": "0.15.0",  # CVE-2025-43859
    "jinja2": "3.1.5",  # CVE-2025-27516
    "starlette": "1.3.0",  # CVE-2026-54283
}


@pytest.mark.parametrize("package", LAST_WITH_A_HOLE)
def test_no_version_with_a_known_hole_is_good_enough(package: str) -> None:
    """Strangers' templates and requests are read by these."""
    project = tomllib.loads((PROJECT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    (found,) = [one for one in map(Requirement, project["dependencies"]) if one.name == package]
    assert not found.specifier.contains(LAST_WITH_A_HOLE[package])


def test_actions_of_ci_are_named_by_commit() -> None:
    """A tag can be moved to other code."""
    files = (PROJECT / ".github").rglob("*.yml")
    actions = [name for file in files for name in re.findall(r"\buses:\s*(\S+)", file.read_text(encoding="utf-8"))]
    assert actions and [name for name in actions if not re.search(r"@[0-9a-f]{40}$", name)] == []
