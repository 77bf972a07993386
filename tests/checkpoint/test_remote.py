"""Checkpoints in an object store: a real S3 server on loopback that goes down and comes back, and a plain folder."""

from __future__ import annotations

import json
import runpy
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from urllib.parse import urlsplit

import boto3
import fsspec
import pytest
import tenacity
from moto.server import ThreadedMotoServer

from agentrl.checkpoint import remote as object_store
from agentrl.checkpoint.manager import CheckpointManager
from agentrl.checkpoint.manifest import write_record
from agentrl.checkpoint.remote import ObjectStore
from agentrl.errors import CheckpointError, ConfigError
from agentrl.observe.open import open_display
from agentrl.train import main
from tests.e2e.test_docs import commands, write_files
from tests.e2e.test_train import lines
from tests.naming import assert_names, naming
from tests.runs import Overrides

BUCKET = "trainings"


class Server:
    """An S3 server, which remembers what it holds while it is down."""

    def __init__(self) -> None:
        self.port = 0
        self.up()

    def up(self) -> None:
        self._server = ThreadedMotoServer(ip_address="127.0.0.1", port=self.port, verbose=False)
        self._server.start()
        _, self.port = self._server.get_host_and_port()

    def down(self) -> None:
        self._server.stop()


@pytest.fixture(scope="module")
def server() -> Iterator[Server]:
    started = Server()
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("AWS_ENDPOINT_URL", f"http://127.0.0.1:{started.port}")
        patch.setenv("AWS_DEFAULT_REGION", "us-east-1")
        patch.setenv("AWS_MAX_ATTEMPTS", "1")
        for key in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"):
            patch.setenv(key, "of-this-test")
        boto3.client("s3").create_bucket(Bucket=BUCKET)
        yield started
    started.down()


@pytest.fixture(autouse=True)
def no_waits(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(object_store, "WAITS", tenacity.wait_none())


@pytest.fixture(params=["s3", "file"])
def url(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    if request.param == "file":
        return f"file://{tmp_path / 'remote'}"
    request.getfixturevalue("server")
    return f"s3://{BUCKET}/{tmp_path.name}"


@pytest.fixture
def make(tmp_path: Path) -> Callable[..., CheckpointManager]:
    def manager(url: str, name: str = "here", warnings: list[str] | None = None) -> CheckpointManager:
        heard: list[str] = [] if warnings is None else warnings
        store = ObjectStore(url, warn=heard.append)
        return CheckpointManager(tmp_path / name, keep=2, store=store, background=True, warn=heard.append)

    return manager


def write(text: str) -> dict[str, Callable[[Path], None]]:
    def fill(dir: Path) -> None:
        (dir / "shard-1").write_text(text * 300_000)
        (dir / "deep").mkdir()
        (dir / "deep" / "empty").touch()

    return {"policy": fill}


def save(manager: CheckpointManager, *steps: int) -> None:
    for step in steps:
        manager.save(step, write(f"{step} "), {"step": step})
    manager.settle()


def test_the_newest_are_there_and_come_back(
    url: str, make: Callable[..., CheckpointManager], capsys: pytest.CaptureFixture[str]
) -> None:
    save(make(url), 1, 2, 3)
    store = ObjectStore(url, warn=lambda text: None)
    assert store.steps() == [2, 3]
    elsewhere = make(url, "elsewhere")
    with open_display("test") as display:
        elsewhere.fetch(display)
        elsewhere.fetch(display)  # there is nothing newer now
    path = elsewhere.latest()
    assert path is not None
    assert elsewhere.load(path) == {"step": 3}
    assert (path / "policy" / "shard-1").read_text() == "3 " * 300_000
    assert capsys.readouterr().out.count("comes from") == 1
    assert list(elsewhere.dir.iterdir()) == [path]

    save(elsewhere, 7)
    behind = make(url)  # has step 3 only
    with open_display("test") as display:
        behind.fetch(display)
    assert behind.latest() == behind.dir / "step_000007"


def test_what_is_not_whole_is_passed_over(url: str, make: Callable[..., CheckpointManager], tmp_path: Path) -> None:
    save(make(url), 1, 2)
    fs, root = fsspec.url_to_fs(url)
    fs.pipe_file(f"{root}/checkpoints/step_000002/policy/shard-1", b"x" * 600_000)
    fs.makedirs(f"{root}/checkpoints/step_000009", exist_ok=True)
    fs.pipe_file(f"{root}/checkpoints/step_000009/shard-1", b"x")
    warnings: list[str] = []
    elsewhere = make(url, "elsewhere", warnings)
    with open_display("test") as display:
        elsewhere.fetch(display)
    assert elsewhere.latest() == tmp_path / "elsewhere" / "step_000001"
    assert len(warnings) == 1
    assert_names(warnings[0], f"{url}/checkpoints/step_000002", "older one")
    save(elsewhere, 3)
    assert ObjectStore(url, warn=warnings.append).steps() == [2, 3]
    assert not fs.exists(f"{root}/checkpoints/step_000009/shard-1"), "half of one that never came"


def test_a_run_that_went_back_leaves_no_later_steps(url: str, make: Callable[..., CheckpointManager]) -> None:
    save(make(url), 10, 20)
    save(make(url, "another"), 5)
    assert ObjectStore(url, warn=lambda text: None).steps() == [5]


def test_a_file_outside_is_never_written(url: str, make: Callable[..., CheckpointManager], tmp_path: Path) -> None:
    save(make(url), 1)
    fs, root = fsspec.url_to_fs(url)
    state = f"{root}/checkpoints/step_000001/state.json"
    record = json.loads(fs.cat_file(state))
    del record["checksum"]
    record["files"]["../../../escaped"] = record["files"]["policy/shard-1"]
    write_record(tmp_path, record)
    fs.pipe_file(state, (tmp_path / "state.json").read_bytes())
    warnings: list[str] = []
    with open_display("test") as display:
        make(url, "elsewhere", warnings).fetch(display)
    assert_names(warnings[0], "'../../../escaped'")
    assert not list(tmp_path.rglob("escaped"))


def test_a_store_that_is_down_costs_a_warning(
    server: Server, make: Callable[..., CheckpointManager], tmp_path: Path
) -> None:
    url = f"s3://{BUCKET}/{tmp_path.name}"
    warnings: list[str] = []
    manager = make(url, warnings=warnings)
    save(manager, 1)
    server.down()
    try:
        save(manager, 2)
        assert len(warnings) == 1
        assert_names(warnings[0], "step_000002", "intact")
        with open_display("test") as display, naming(CheckpointError, "cannot be read"):
            make(url, "elsewhere").fetch(display)  # rather than to start anew
        policy = tmp_path / "policy"
        policy.mkdir()
        (policy / "trained_steps").write_text("2\n")
        assert manager.store is not None
        manager.store.upload_policy(policy, "trained_steps")
        assert_names(warnings[1], "by hand")
    finally:
        server.up()
    assert manager.latest() == manager.dir / "step_000002"
    save(manager, 3)
    assert manager.store.steps() == [1, 3]
    manager.store.upload_policy(policy, "trained_steps")
    names = [
        found["Key"] for found in boto3.client("s3").list_objects_v2(Bucket=BUCKET, Prefix=tmp_path.name)["Contents"]
    ]
    assert f"{urlsplit(url).path[1:]}/policy/trained_steps" in names
    assert len(warnings) == 2


@pytest.mark.parametrize(
    ("url", "said"),
    [
        ("bucket/run", "is no URL"),
        ("s4://bucket/run", "Protocol not known: s4"),
        ("hdfs://127.0.0.1:1/run", "JAVA_HOME|cannot be written"),
        ("s3://no-such-bucket/run", "no-such-bucket/run cannot be written: .*AWS_ENDPOINT_URL"),
    ],
)
def test_an_address_that_cannot_work_is_told_at_the_start(server: Server, tmp_path: Path, url: str, said: str) -> None:
    def buckets() -> list[str]:
        return [bucket["Name"] for bucket in boto3.client("s3").list_buckets()["Buckets"]]

    before = buckets()  # servers of one process have their buckets in common
    with pytest.raises(ConfigError, match=said):
        ObjectStore(url, warn=lambda text: None).check()
    assert buckets() == before and BUCKET in before


def test_a_run_goes_on_from_its_remote_folder(
    server: Server,
    small_run: Overrides,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """The command of docs/checkpoints.md, on a machine that then loses its disk; and the program there."""
    (line,) = (line for line in commands("docs/checkpoints.md") if "remote" in line)
    keys = ["data.val_files=null", *line.split()[3:]]
    assert line.startswith("python -m agentrl.train ")
    fs, root = fsspec.url_to_fs(keys[-1].partition("=")[2])
    assert main(small_run(*keys, "trainer.total_training_steps=1")) == 0
    exported = fs.cat_file(f"{root}/policy/model.safetensors")
    assert exported == (tmp_path / "run" / "policy" / "model.safetensors").read_bytes()
    state = json.loads(fs.cat_file(f"{root}/checkpoints/step_000001/state.json"))["state"]
    assert f"trainer.default_remote_dir={state['config']['trainer']['default_remote_dir']}" == keys[-1]

    assert write_files("docs/checkpoints.md", tmp_path) == ["read.py"]
    folder = tmp_path / "run" / "checkpoints" / "step_000001" / "policy"
    monkeypatch.setattr("sys.argv", ["read.py", str(folder)])
    capsys.readouterr()
    runpy.run_path(str(tmp_path / "read.py"))
    described = json.loads((folder / "state.json").read_text())
    assert f"{len(described['weights']) + len(described['optimizer_tensors'])} tensors" in capsys.readouterr().out

    shutil.rmtree(tmp_path / "run")
    assert main(small_run(*keys, "trainer.total_training_steps=2")) == 0
    assert "step_000001 comes from s3://" in capsys.readouterr().out
    assert [found["step"] for found in lines(tmp_path / "run")] == [2]
    fs.invalidate_cache()
    assert fs.cat_file(f"{root}/policy/trained_steps") == b"2\n"
    assert fs.cat_file(f"{root}/policy/model.safetensors") != exported

    assert main(small_run(*keys, "trainer.resume_mode=disable")) == 2
    assert_names(capsys.readouterr().err, "[1, 2]")
    assert (tmp_path / "run" / "policy").is_dir(), "nothing was moved aside"
