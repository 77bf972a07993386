"""10,000 damaged and forged checkpoints: each refused in words, an older whole one taken, nothing done outside."""

from __future__ import annotations

import json
import os
import random
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import tenacity

from agentrl.checkpoint import manifest, remote
from agentrl.checkpoint.manager import CheckpointManager
from agentrl.checkpoint.manifest import STATE_FILE, write_record
from agentrl.checkpoint.remote import ObjectStore
from agentrl.errors import CheckpointError
from agentrl.observe.display import Display
from agentrl.observe.open import open_display
from agentrl.system.json_value import JSON
from tests.naming import assert_names, naming

CASES = 100
"""Checkpoints a test."""
DEEP = 100_000
WRONG: list[JSON] = [None, True, -1, 1.5, 1e400, "x", "", [], [1], {}, {"x": 1}, [[[]]], 10**30, "\ud800", ["\0"]]
FILES = ("policy/shard-1.safetensors", "policy/state.json", "critic/deep/weights.bin")


class Forgery:
    """One checkpoint to spoil: `path` is of step 2, beside that of step 1."""

    def __init__(self, path: Path, outside: Path, draw: random.Random) -> None:
        self.path, self.outside, self.draw = path, outside, draw

    @property
    def state(self) -> Path:
        return self.path / STATE_FILE

    @property
    def older(self) -> Path:
        return self.path.with_name("step_000001")

    def any_file(self) -> Path:
        return self.path / self.draw.choice([*FILES, STATE_FILE])

    def seal(self, record: dict[str, Any]) -> None:
        """Write a record as a forger would, who knows how checksums are made."""
        record.pop("checksum", None)
        write_record(self.path, record)

    def record(self) -> dict[str, Any]:
        record: dict[str, Any] = json.loads(self.state.read_text())
        return record


def cut(one: Forgery) -> None:
    file = one.any_file()
    content = file.read_bytes()
    file.write_bytes(content[: one.draw.randrange(len(content) - 2)])


def grow(one: Forgery) -> None:
    with one.any_file().open("ab") as file:
        file.write(one.draw.randbytes(one.draw.randrange(1, 50)) + b"x")


def flip_a_bit(one: Forgery) -> None:
    file = one.any_file()
    content = bytearray(file.read_bytes())
    printable = [at for at, byte in enumerate(content) if byte > 0x20]  # a blank in state.json may become another
    content[one.draw.choice(printable)] ^= 1 << one.draw.randrange(7)
    file.write_bytes(content)


def lose(one: Forgery) -> None:
    one.any_file().unlink()


def swap_two_files(one: Forgery) -> None:
    first, second = (one.path / name for name in one.draw.sample(FILES, 2))
    content = first.read_bytes()
    first.write_bytes(second.read_bytes())
    second.write_bytes(content)


def swap_with_the_older(one: Forgery) -> None:
    name = one.draw.choice([*FILES, STATE_FILE])
    shutil.copyfile(one.older / name, one.path / name)


def swap_folders(one: Forgery) -> None:
    shutil.rmtree(one.path)
    shutil.copytree(one.older, one.path)


def link(one: Forgery) -> None:
    """What the link leads to is just what was written."""
    place = one.path / one.draw.choice([*FILES, STATE_FILE, "policy", "critic", "critic/deep"])
    target = one.outside / "moved"
    place.rename(target)
    place.symlink_to(target if one.draw.random() < 0.5 else os.path.relpath(target, place.parent))


def no_file(one: Forgery) -> None:
    file = one.any_file()
    file.unlink()
    makes: list[Callable[[Path], None]] = [Path.mkdir, os.mkfifo, lambda path: path.symlink_to(path)]
    one.draw.choice(makes)(file)


def add_a_shard(one: Forgery) -> None:
    name = one.draw.choice(["policy/shard-2.safetensors", "critic/.x.safetensors", "x.safetensors"])
    if one.draw.random() < 0.5:
        (one.path / name).symlink_to(one.outside / "secret")
    else:
        shutil.copyfile(one.path / FILES[0], one.path / name)


def other_text(one: Forgery) -> None:
    texts = [b"", b"[1]", b"null", b'"x"', b"3", b"{}", b"NaN", b"\xff\xfe", b'{"a":"\xc3"}', b"\0" * 50, b"{" * DEEP]
    texts += [b"[" * DEEP, b'{"a":' * DEEP, b"[" * DEEP + b"]" * DEEP, b"9" * DEEP, b'{"format":' + b"9" * DEEP + b"}"]
    texts.append(one.state.read_text().encode("utf-16"))
    one.state.write_bytes(one.draw.choice(texts))


def nest(one: Forgery) -> None:
    depth = one.draw.choice([200, 400, 900, 990, DEEP])
    deep = one.draw.choice([b"[" * depth + b"]" * depth, b'{"a":' * depth + b"1" + b"}" * depth])
    key = one.draw.choice([b'"state": ', b'"fingerprint": ', b'"files": ', b'"versions": ', b'"step": '])
    one.state.write_bytes(one.state.read_bytes().replace(key, key + deep + b', "more": ', 1))


def wrong_value(one: Forgery) -> None:
    """Any value anywhere, by chance and not by a forger."""
    record = one.record()
    place: Any = record
    while True:
        key = one.draw.choice([*place] if isinstance(place, dict) else range(len(place)))
        if not (isinstance(place[key], dict | list) and place[key] and one.draw.random() < 0.7):
            break
        place = place[key]
    if one.draw.random() < 0.2 and isinstance(place, dict):
        del place[key]
    else:
        place[key] = one.draw.choice([value for value in WRONG if value != place[key]])
    one.state.write_text(json.dumps(record))


def forged_type(one: Forgery) -> None:
    record = one.record()
    name = one.draw.choice(FILES)
    places: list[tuple[dict[str, Any], str, tuple[type, ...]]] = [
        (record, "format", ()),
        (record, "step", ()),
        (record, "versions", ()),
        (record, "fingerprint", (dict,)),
        (record, "state", (dict,)),
        (record, "files", ()),
        (record["versions"], "torch", (str,)),
        (record["files"], name, ()),
        (record["files"][name], "bytes", ()),
        (record["files"][name], "xxh3", ()),
    ]
    place, key, right = one.draw.choice(places)
    if one.draw.random() < 0.1 and key not in ("torch", name):
        del place[key]
    elif one.draw.random() < 0.1 and (place is record or key in ("bytes", "xxh3")):
        place["more"] = 1
    else:
        # Another whole number as the format is another agentrl's, and refused elsewhere.
        wrong = [value for value in WRONG if type(value) not in (*right, *([int] if key == "format" else []))]
        empty = key in ("versions", "files")  # nothing listed is nothing wrong
        place[key] = one.draw.choice([value for value in wrong if not (empty and value == {})])
    one.seal(record)


def forged_name(one: Forgery) -> None:
    record = one.record()
    secret = one.outside / "secret"
    entry = {"bytes": secret.stat().st_size, "xxh3": manifest._checksum(secret)}
    outside = [str(secret), os.path.relpath(secret, one.path), f"policy/../../../{one.outside.name}/secret"]
    odd = ["", ".", "..", "/", "~/x", "policy", "policy/", "./" + FILES[0], "policy//x", f"{FILES[0]}/x", STATE_FILE]
    odd += [
        "x\0y",
        "x" * 5000,
        "y/" * 200 + "x",
        "y/" * 3000 + "x",
        "\ud800",
        "a\nb",
        "..\\secret",
        "\x1b[2J",
        "policy/../" + FILES[1],
    ]
    record["files"][one.draw.choice(outside + odd)] = entry
    one.seal(record)


RECORDS = (other_text, nest, wrong_value, forged_type, forged_name)
"""Faults of the record, which an object store can hold, too."""
FAULTS = (
    cut,
    grow,
    flip_a_bit,
    lose,
    swap_two_files,
    swap_with_the_older,
    swap_folders,
    link,
    no_file,
    add_a_shard,
    *RECORDS,
    *RECORDS,
)


def fill(step: int) -> dict[str, Callable[[Path], None]]:
    def policy(dir: Path) -> None:
        (dir / "shard-1.safetensors").write_text(f"weights {step} ")
        (dir / "state.json").write_text(f'{{"ranks": {step}}}')

    def critic(dir: Path) -> None:
        (dir / "deep").mkdir()
        (dir / "deep" / "weights.bin").write_text(f"values {step} " * 20)

    return {"policy": policy, "critic": critic}


def save(checkpoints: CheckpointManager, step: int) -> None:
    state: dict[str, JSON] = {"step": step, "loader": {"epoch": 1, "order": [3, 1, 2]}, "config": {"a": {"b": None}}}
    checkpoints.save(step, fill(step), state)


def contents(dir: Path) -> dict[str, bytes]:
    return {name: (dir / name).read_bytes() for name in manifest.listing(dir)}


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing here is about a machine that loses power, or a store that is slow."""
    for module in ("manager", "manifest"):
        monkeypatch.setattr(f"agentrl.checkpoint.{module}.flush_to_disk", lambda path: None)
    monkeypatch.setattr(remote, "WAITS", tenacity.wait_none())


@pytest.mark.slice(3, "hostile")
@pytest.mark.parametrize("seed", range(100))
def test_each_is_refused_in_words_and_an_older_one_is_taken(tmp_path: Path, seed: int) -> None:
    original = CheckpointManager(tmp_path / "original", keep=None, fingerprint={"model": "tiny"})
    save(original, 1)
    save(original, 2)
    with open_display("test") as display:
        for case in range(CASES):
            fault = FAULTS[(seed * CASES + case) % len(FAULTS)]
            check(fault, random.Random(f"{seed}/{case}"), original.dir, tmp_path / f"{case}-{fault.__name__}", display)


def test_more_files_than_a_checkpoint_has_are_refused_before_they_are_looked_at(tmp_path: Path) -> None:
    checkpoints = CheckpointManager(tmp_path / "here", keep=1)
    save(checkpoints, 1)
    forged = Forgery(tmp_path / "here" / "step_000001", tmp_path, random.Random(0))
    files = {f"policy/{number}": {"bytes": 0, "xxh3": ""} for number in range(50_001)}
    forged.seal(forged.record() | {"files": files})
    with naming(CheckpointError, "state.json", "50,000 files", "found 50,001", "damaged"):
        checkpoints.load(forged.path)


def check(fault: Callable[[Forgery], None], draw: random.Random, original: Path, root: Path, display: Display) -> None:
    outside, here, warnings = root / "outside", root / "here", list[str]()
    outside.mkdir(parents=True)
    (outside / "secret").write_text("not to be touched")
    from_store = fault in RECORDS and draw.random() < 0.5
    spoilt = (root / "store" / "checkpoints" if from_store else here) / "step_000002"
    shutil.copytree(original, spoilt.parent)
    fault(Forgery(spoilt, outside, draw))
    before, store = contents(outside), None
    if from_store:
        shutil.copytree(original / "step_000001", here / "step_000001")
        store = ObjectStore(f"file://{root / 'store'}", warn=warnings.append)

    checkpoints = CheckpointManager(here, keep=1, fingerprint={"model": "tiny"}, store=store, warn=warnings.append)
    checkpoints.fetch(display)
    assert checkpoints.latest() == here / "step_000001"
    assert_names(warnings[0], "step_000002", "older one")
    assert len(warnings) == 1, warnings
    assert len(warnings[0].encode()) < 2000
    assert checkpoints.load(here / "step_000001")["step"] == 1
    assert contents(here / "step_000001") == contents(original / "step_000001")
    if from_store:
        assert not (here / "step_000002").exists()
    else:
        with pytest.raises(CheckpointError, match="step_000002"):
            checkpoints.load(spoilt)
    if fault in (link, no_file, add_a_shard):  # removing what is old removes links and not where they lead
        save(checkpoints, 3)
        assert [path.name for path in here.iterdir()] == ["step_000003"]
    assert contents(outside) == before
    assert sorted(path.name for path in root.iterdir() if path.name != "store") == ["here", "outside"]
    shutil.rmtree(root)
