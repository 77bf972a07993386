"""Rows with images: verl's shapes, and what is wrong with them said with file and row."""

from __future__ import annotations

import io
import struct
import zlib
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from PIL import Image as Pillow

from agentrl.chat import Chat
from agentrl.data.dataset import FileDataset
from agentrl.errors import DataError
from agentrl.quickstart.tiny_policy import make_tiny_policy
from agentrl.trajectory import Message
from agentrl.trajectory.picture import Picture, pictures_in
from tests.naming import Names, assert_names, naming
from tests.vision.tiny import encoded, picture

PNG, OTHER = encoded(1), encoded(2, 16, 32)
ASKED = "<image>What is it?"


def row(images: Any, content: Any = ASKED) -> dict[str, Any]:
    return {"prompt": [{"role": "user", "content": content}], "data_source": "x", "images": images}


def written(folder: Path, *rows: dict[str, Any]) -> str:
    pq.write_table(pa.Table.from_pylist(list(rows)), folder / "rows.parquet")
    return str(folder / "rows.parquet")


def parts(file: str, number: int = 0, **options: Any) -> list[Any]:
    content = FileDataset(file, **options)[number].prompt[0]["content"]
    assert isinstance(content, list)
    return [part.get("text", part.get("image")) for part in content]


def test_placeholders_take_the_images_in_order(tmp_path: Path) -> None:
    file = written(
        tmp_path,
        row([{"bytes": PNG, "path": None}, {"bytes": OTHER, "path": "x.png"}], "a<image>b<image>"),
        row(None, "1 <image> is text where there is no image"),
    )
    assert parts(file) == ["a", Picture(PNG), "b", Picture(OTHER)]
    assert FileDataset(file)[1].prompt[0]["content"] == "1 <image> is text where there is no image"


@pytest.mark.parametrize("images", [[{"path": "shots/a.png"}], ["shots/a.png"], [PNG]])
def test_images_by_path_and_by_bytes(tmp_path: Path, images: list[Any]) -> None:
    (tmp_path / "shots").mkdir()
    (tmp_path / "shots" / "a.png").write_bytes(PNG)
    assert parts(written(tmp_path, row(images))) == [Picture(PNG), "What is it?"]


def test_contents_in_parts(tmp_path: Path) -> None:
    content = [{"type": "image", "text": None}, {"type": "text", "text": "What <image> is it?"}]
    assert parts(written(tmp_path, row([PNG], content))) == [Picture(PNG), "What <image> is it?"]
    own = [{"type": "image", "image": {"bytes": PNG}}, {"type": "text", "text": "What?"}]
    assert parts(written(tmp_path, row(None, own))) == [Picture(PNG), "What?"]


def bomb(side: int) -> bytes:
    """A PNG of 57 bytes that says it has `side` by `side` pixels."""

    def chunk(kind: bytes, data: bytes) -> bytes:
        return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))

    header = struct.pack(">IIBBBBB", side, side, 8, 2, 0, 0, 0)
    return b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", header) + chunk(b"IDAT", b"") + chunk(b"IEND", b"")


@pytest.mark.parametrize(
    ("images", "content", "said"),
    [
        ([PNG], "no place", ("1 images", "(<image>)")),
        ([PNG], "<image><image>", "(<image>)"),
        ([PNG, b"no image"], "<image><image>", "image 1"),
        ([bomb(100_000)], ASKED, "image 0"),
        ([bomb(9000)], ASKED, ("9000 x 9000", "67108864")),
        (["../secret.png"], ASKED, "leads out of"),
        (["/etc/passwd"], ASKED, "leads out of"),
        (["a.png"], ASKED, "No such file"),
        ([encoded(1, 1, 1000)], ASKED, ("1 x", "1000 pixels")),
        ([PNG], [{"type": "video"}], "'video'"),
    ],
)
def test_what_is_wrong_with_images_is_said_with_file_and_row(
    tmp_path: Path, chat: Chat, images: list[Any], content: Any, said: Names
) -> None:
    fine = [PNG] if isinstance(images[0], bytes) else ["x.png"]
    file = written(
        tmp_path, row(fine, ASKED if isinstance(content, str) else [{"type": "image"}]), row(images, content)
    )
    (tmp_path / "x.png").write_bytes(PNG)
    with pytest.raises(DataError) as error:
        FileDataset(file).filter_overlong(lambda sample: len(chat.render(sample.prompt)), 500)
    assert_names(error.value, file, "row 1", said)
    dataset = FileDataset(file, on_bad_row="skip")
    dataset.filter_overlong(lambda sample: len(chat.render(sample.prompt)), 500)
    assert len(dataset) == dataset.bad.count == 1


def test_a_column_of_something_else(tmp_path: Path) -> None:
    file = written(tmp_path, row(3, "hi"))
    with naming(DataError, "column images", "data.image_key=null"):
        FileDataset(file)
    assert FileDataset(file, image_key=None)[0].prompt[0]["content"] == "hi"


def test_a_model_without_images_refuses_them(tmp_path: Path) -> None:
    text = Chat.from_pretrained(str(make_tiny_policy(tmp_path / "text", seed=0)))
    assert text.vision is None
    file = written(tmp_path, row([PNG]))
    with naming(DataError, "row 0", "/text"):
        FileDataset(file).filter_overlong(lambda sample: len(text.render(sample.prompt)), 500)


def test_a_prompts_length_counts_image_tokens(tmp_path: Path, chat: Chat) -> None:
    file = written(tmp_path, row([PNG]))
    sample = FileDataset(file)[0]
    ids = chat.render(sample.prompt)
    without = chat.render([{"role": "user", "content": "What is it?"}])
    assert len(ids) == len(without) + 2 + 6
    assert [one.image.tokens for one in chat.images(ids, sample.prompt)] == [6]
    assert list(pictures_in(sample.prompt)) == [picture(1)]


def test_an_image_is_looked_at_upright(chat: Chat) -> None:
    """A photo that is to be turned, and one with an alpha channel, are the same to every engine."""
    upright = picture(5, 24, 16).decode()
    exif = Pillow.Exif()
    exif[0x0112] = 6
    file = io.BytesIO()
    upright.transpose(Pillow.Transpose.ROTATE_90).save(file, "PNG", exif=exif)
    turned = Picture(file.getvalue())
    assert turned.size == (24, 16)
    assert turned.decode().tobytes() == upright.tobytes()
    assert Picture(turned.plain()).decode().tobytes() == upright.tobytes()
    assert chat.vision is not None
    assert (chat.vision.image(turned).patches == chat.vision.image(picture(5, 24, 16)).patches).all()
    assert picture(5).plain() == picture(5).data


def test_text_never_makes_an_image(chat: Chat) -> None:
    spelled = "<|vision_start|><|image_pad|><|vision_end|>"
    said: list[Message] = [
        {"role": "user", "content": spelled},
        {"role": "assistant", "content": spelled},
        {"role": "user", "content": [{"type": "text", "text": spelled}, {"type": "image", "image": picture(1)}]},
    ]
    ids = chat.render(said)
    assert ids.count(chat.media_token_ids[0]) == 6
    assert len(chat.images(ids, said)) == 1
    assert chat.decode(ids).count(spelled) == 3
