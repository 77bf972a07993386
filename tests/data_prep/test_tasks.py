"""Task folders become rows where the solution passes the check and doing nothing does not, in real containers."""

from __future__ import annotations

import os
import shlex
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pyarrow.parquet as pq
import pytest

from data_prep.tasks import LeftOut, built, main, moved, read
from tests.containers.conftest import LINE, mounts, names, need_containers, root
from tests.e2e.conftest import forked_command
from tests.e2e.test_docs import commands
from tests.e2e.test_train import lines
from tests.naming import assert_names, naming
from tests.runs import Overrides

__all__ = ["root"]
IMAGE = f"localhost/agentrl-test-tasks-{os.getpid()}:1"  # workers of one run share the store
MOUNTS = mounts()
RIGHT = {
    "instruction.md": "Write the sum of 2 and 3 into answer.txt.",
    "image": IMAGE,
    "files/read.me": "Numbers: 2, 3.",
    "tests/run.sh": "grep -qx 5 answer.txt || { echo the sum is wrong; exit 1; }",
    "solution/solve.sh": "test -e read.me && echo 5 > answer.txt",
}


@pytest.fixture(scope="module")
def image(root: Path) -> Iterator[str]:
    """An image of empty folders, into which this machine's are mounted."""
    need_containers()
    packed = subprocess.run(["tar", "-cf", "-", "-C", str(root), "."], capture_output=True, check=True).stdout
    subprocess.run([*LINE, "import", "-", IMAGE], input=packed, capture_output=True, check=True)
    yield IMAGE
    subprocess.run([*LINE, "rmi", "--force", IMAGE], capture_output=True, check=False)


def laid(folder: Path, **changes: str | None) -> Path:
    """Write a task whose files are those of RIGHT but for the changes; `__` stands for a slash, None for no file."""
    for path, text in {**RIGHT, **{name.replace("__", "/"): text for name, text in changes.items()}}.items():
        if text is not None:
            (folder / path).parent.mkdir(parents=True, exist_ok=True)
            (folder / path).write_text(text)
    return folder


def prepare(folder: Path, out: Path, *more: str) -> int:
    """Run the command of docs/data.md with other folders."""
    (shown,) = [line for line in commands("docs/data.md") if "data_prep.tasks" in line]
    words = [*shlex.split(shown)[3:], "--folder", str(folder), "--out", str(out), "--command-line", shlex.join(LINE)]
    return main([*words, "--arguments", shlex.join(MOUNTS), "--memory-megabytes", "256", *more])


def test_tasks_are_tried_and_each_reason_is_told(
    image: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    tasks = tmp_path / "tasks"
    laid(tasks / "right")
    solved = {"solution/solve.sh": "cp solution/right.txt answer.txt", "solution/right.txt": "5\n"}
    laid(tasks / "by_files", **solved)
    laid(tasks / "wrong", **{"solution/solve.sh": "echo 6 > answer.txt"})
    laid(tasks / "fails", **{"solution/solve.sh": "exit 3"})
    laid(tasks / "placeless", **{"task.toml": ""})
    laid(tasks / "idle", **{"tests/run.sh": "exit 0"})
    laid(tasks / "bare", **{"image": None})
    laid(tasks / "elsewhere", **{"image": "localhost/not-there:1"})
    laid(tasks / "odd_name", **{"image": "--privileged"})
    laid(tasks / "silent", **{"instruction.md": None})
    laid(tasks / "untested", **{"tests/run.sh": None})
    (laid(tasks / "linked") / "files" / "link").symlink_to("/etc/passwd")
    assert prepare(tasks, tmp_path / "out") == 0
    said = capsys.readouterr().out
    rows = pq.read_table(tmp_path / "out" / "train.parquet").to_pylist()
    assert [row["extra_info"]["task"] for row in rows] == ["by_files", "right"]
    row = rows[1]
    assert row["prompt"] == [{"role": "user", "content": RIGHT["instruction.md"]}]
    assert row["extra_info"]["image"] == image
    assert row["extra_info"]["files"] == [{"path": "read.me", "text": RIGHT["files/read.me"]}]
    assert row["extra_info"]["check_files"] == [{"path": "tests/run.sh", "text": RIGHT["tests/run.sh"]}]
    reasons = {line.split()[1].rstrip(":"): line for line in said.splitlines() if line.startswith("[")}
    for name, reason in {
        "wrong": "the solution does not pass the check: the sum is wrong",
        "fails": "solution/solve.sh ended with status 3",
        "placeless": "give --workdir, the WORKDIR of its image",
        "idle": "passes though nothing was done",
        "bare": "expected a file `image` with a name, or environment/Dockerfile",
        "elsewhere": "build --tag localhost/not-there:1",
        "odd_name": "expected the name of an image, found '--privileged'",
        "silent": "instruction.md: not there",
        "untested": "tests: not there",
        "linked": "link: a link; copy the file itself",
    }.items():
        assert reason in reasons[name], reasons[name]
    assert_names(said, "2 of 12 tasks", '["localhost/*"]', f"container.image={image}")
    assert [name for name in names() if f"-{os.getpid()}-" in name] == []


def test_a_dockerfile_is_built_once_and_sees_neither_tests_nor_solution(
    image: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    tasks = tmp_path / "tasks"
    laid(tasks / "made", **{"image": None, "environment/Dockerfile": f"FROM {image}\nCOPY . /seen\n"})
    laid(tasks / "broken", **{"image": None, "environment/Dockerfile": "FROM localhost/not-there:2\n"})
    harbor = {"tests/run.sh": None, "tests/test.sh": "cd /tests && sh judge.sh > /logs/verifier/reward.txt"}
    harbor |= {"tests/judge.sh": "grep -qx 5 ../answer.txt && echo 1 || echo 0", "task.toml": "[environment]\n"}
    harbor |= {"solution/solve.sh": "cp /solution/right.txt answer.txt", "solution/right.txt": "5\n", "image": None}
    dockerfile = f"FROM {image}\nCOPY . /seen\n"
    laid(tasks / "harbors", **{**harbor, "environment/Dockerfile": dockerfile, "environment/own.txt": "here"})
    needy = "[environment]\ngpus = 1\n"
    laid(tasks / "needy", **{**harbor, "environment/Dockerfile": dockerfile, "task.toml": needy})
    more = ("--build-arguments", "--network none --isolation oci --pull-never", "--timeout", "60", "--workdir", "/work")
    assert prepare(tasks, tmp_path / "out", *more) == 0
    said = capsys.readouterr().out
    assert "2 of 4 tasks" in said, said
    other, row = pq.read_table(tmp_path / "out" / "train.parquet").to_pylist()
    assert_names(said, "needy", "gpus")
    made = row["extra_info"]["image"]
    try:
        assert made.startswith("agentrl-task/made:")
        limits = ("--network", "none", "--ulimit", "nofile=1024:1024", "--ulimit", "nproc=1000:1000")
        words = [*LINE, "run", "--rm", *MOUNTS, *limits, made, "ls", "/seen"]
        listed = subprocess.run(words, capture_output=True, text=True, check=False)
        assert listed.returncode == 0 and listed.stdout == "Dockerfile\n", listed
        assert "broken: left out: podman" in said and "not-there" in said
    finally:
        built = [made, other["extra_info"]["image"]]
        subprocess.run([*LINE, "rmi", "--force", *built], capture_output=True, check=False)


@pytest.mark.parametrize(
    "part", ["", "instruction.md", "image", "files", "tests", "solution", "environment", "environment/Dockerfile"]
)
def test_no_part_of_a_task_leads_out_of_its_folder(tmp_path: Path, part: str) -> None:
    """A data set would put files of this machine into rows, and into its containers."""
    task = laid(tmp_path / "task", **({} if part == "image" else {"image": None, "environment/Dockerfile": "FROM x"}))
    (tmp_path / "elsewhere").mkdir()
    moved = (task / part).rename(tmp_path / "elsewhere" / "part")
    (task / part).symlink_to(moved)
    with naming(LeftOut, str(task / part), "a link"):
        read(task, ["false"], None)


def changed(task: Path, part: str, content: bytes) -> Path:
    (task / part).parent.mkdir(exist_ok=True)
    (task / part).write_bytes(content)
    return task


@pytest.mark.parametrize(
    ("part", "content", "said"),
    [
        ("instruction.md", b"caf\xe9", "instruction.md: no UTF-8 text"),
        ("image", b"caf\xe9", "image: no UTF-8 text"),
        ("image", "café".encode(), "expected the name of an image"),
        ("files/large", b"x" * (1 + (16 << 20)), "files: a row cannot hold it.*16,777,216 characters"),
        (os.fsdecode(b"files/caf\xe9"), b"x", "files: a row cannot hold it.*UTF-8"),
        (os.fsdecode(b"tests/caf\xe9"), b"x", "tests: a row cannot hold it.*UTF-8"),
        ("task.toml", b'environment = "text"', r"task.toml: expected a table \[environment\], found 'text'"),
        ("task.toml", b"a = " + b"[" * 5000, "task.toml: "),
        ("task.toml", b"a = '\xe9'", "task.toml: no UTF-8 text"),
    ],
)
def test_a_task_that_no_row_can_hold_is_left_out(tmp_path: Path, part: str, content: bytes, said: str) -> None:
    task = changed(laid(tmp_path / "task"), part, content)
    with pytest.raises(LeftOut, match=said):
        read(task, ["false"], None)


def test_a_tasks_texts_keep_their_ends_of_lines(tmp_path: Path) -> None:
    task = changed(laid(tmp_path / "task"), "files/a.csv", b"a,b\r\n1,2\r\n")
    assert read(task, ["false"], None).files["a.csv"] == "a,b\r\n1,2\r\n"


@pytest.mark.parametrize("text", ["${HERE}/tests/a", "$(pwd)/logs", "a/tests", "/tests-2", "../logs"])
def test_paths_that_are_none_of_harbors_stay(text: str) -> None:
    assert moved(text, "/app") == text
    assert moved(f"cat '/tests/a' {text}", "/app") == f"cat '/app/tests/a' {text}"


def test_each_environment_has_a_tag_of_its_own(tmp_path: Path) -> None:
    """Two that shared one would share the image that was built first."""

    def tag(name: str, *words: str, **files: str) -> str:
        environment = tmp_path / name / "task" / "environment"
        for path, text in {"Dockerfile": "FROM x", **files}.items():
            (environment / path).parent.mkdir(parents=True, exist_ok=True)
            (environment / path).write_text(text)
        if name == "empty":
            (environment / "folder").mkdir()
        if name == "mode":
            (environment / "a").chmod(0o755)
        return built(environment.parent, ["true", *words])

    tags = [
        *(tag("one", a="bc"), tag("other", ab="c"), tag("mode", a="bc"), tag("empty", a="bc")),
        *(tag("word", "--build-arg=A=1", a="bc"), tag("deep", **{"a/b": "c"})),
    ]
    assert len(set(tags)) == len(tags) and tag("same", a="bc") == tags[0]


def test_rows_for_the_shell_come_with_its_tool(image: str, tmp_path: Path, small_run: Overrides) -> None:
    laid(tmp_path / "tasks" / "right")
    assert prepare(tmp_path / "tasks", tmp_path / "out", "--tool", "bash") == 0
    (row,) = pq.read_table(tmp_path / "out" / "train.parquet").to_pylist()
    assert (row["agent_name"], row["data_source"]) == ("tool_agent", "tools/tasks")
    given = row["extra_info"]["tools_kwargs"]["bash"]["create_kwargs"]
    assert given["image"] == image and given["check_files"][0]["path"] == "tests/run.sh"
    keys = [f"data.train_files={tmp_path}/out/train.parquet", "data.val_files=null", "data.train_batch_size=1"]
    keys += ["actor_rollout_ref.actor.ppo_mini_batch_size=1", "custom_reward_function.path=null"]
    keys += [f"actor_rollout_ref.rollout.multi_turn.tool_config_path={tmp_path}/out/tools.yaml"]
    done = forked_command(small_run(*keys, "trainer.total_training_steps=1"), tmp_path)
    assert done.returncode == 0, done.stderr
    (metrics,) = (line for line in lines(tmp_path / "run") if "score/mean" in line)
    assert metrics["score/mean"] == metrics["left_out/failed"] == 0
    assert [name for name in names() if "agentrl-" in name and f"-{os.getpid()}-" in name] == []


def test_a_folder_without_tasks_and_one_without_a_good_task_write_nothing(
    image: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "empty" / ".git").mkdir(parents=True)
    assert prepare(tmp_path / "empty", tmp_path / "out") == 2
    laid(tmp_path / "tasks" / "bare", image=None)
    assert prepare(tmp_path / "tasks", tmp_path / "out") == 2
    said = capsys.readouterr().err
    assert_names(said, "folder of folders", "no task")
    assert not (tmp_path / "out").exists()


def here(folder: Path, out: Path, *more: str) -> int:
    """Run the command for tasks of this machine, with the keys of docs/data.md."""
    return main(["--start", "process", "--folder", str(folder), "--out", str(out), *more])


def test_tasks_for_this_machine_need_no_image_and_a_solution_only_if_it_is_to_be_tried(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    tasks, out = tmp_path / "tasks", tmp_path / "out"
    laid(tasks / "right", image=None)
    laid(tasks / "unsolved", image=None, **{"solution/solve.sh": None})
    laid(tasks / "wrong", image=None, **{"solution/solve.sh": "echo 6 > answer.txt"})
    laid(tasks / "idle", image=None, **{"solution/solve.sh": None, "tests/run.sh": "exit 0"})
    laid(tasks / "mute", image=None, **{"instruction.md": " \n"})
    laid(tasks / "half", image=None, **{"solution/solve.sh": None, "solution/right.txt": "5"})
    laid(tasks / "harbors", image=None, **{"task.toml": ""})
    (tasks / ".git").mkdir()
    assert here(tasks, out) == 0
    said = capsys.readouterr().out
    rows = pq.read_table(out / "train.parquet").to_pylist()
    assert [row["extra_info"]["task"] for row in rows] == ["right", "unsolved"]
    assert all(row["extra_info"].get("image") is None for row in rows)
    reasons = {line.split()[1].rstrip(":"): line for line in said.splitlines() if line.startswith("[")}
    assert reasons.keys() == {"right", "unsolved", "wrong", "idle", "mute", "half", "harbors"}
    assert_names(reasons["unsolved"], "kept", "solution/solve.sh")
    assert_names(reasons["wrong"], "left out", "the sum is wrong")
    assert_names(reasons["idle"], "left out", "nothing")
    assert_names(reasons["mute"], "left out", "instruction.md", "empty")
    assert_names(reasons["half"], "left out", "solution/solve.sh")
    assert_names(reasons["harbors"], "left out", "--start process")
    assert_names(said, f"data.train_files={out}/train.parquet", "data.train_batch_size=2", "openai_proxy.harness")
    assert "container" not in said


@pytest.mark.parametrize("wrong", [["--tool", "bash"], ["--workdir", "/app"]])
def test_what_containers_alone_have_is_refused_for_this_machine(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], wrong: list[str]
) -> None:
    laid(tmp_path / "tasks" / "right", image=None)
    assert here(tmp_path / "tasks", tmp_path / "out", *wrong) == 2
    assert_names(capsys.readouterr().err, "--start process", wrong[0])


def test_a_task_in_place_of_the_folder_of_tasks_is_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert here(laid(tmp_path / "right"), tmp_path / "out") == 2
    assert_names(capsys.readouterr().err, f"--folder {tmp_path / 'right'}", "the folder that holds it")
