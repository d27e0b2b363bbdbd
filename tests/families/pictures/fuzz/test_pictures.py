"""Pictures and archives of pictures from somebody else."""

from __future__ import annotations

import io
import tarfile
from contextlib import suppress
from functools import partial
from pathlib import Path

import pytest
from PIL import Image

from capt.pretrain.base.errors import DataError
from capt.pretrain.regions.extract.find import find_pictures, read_picture
from capt.pretrain.regions.extract.prepare import decode
from capt.pretrain.regions.picture import Damage
from tests.families.pictures.regions.extract.support import as_bytes, picture
from tests.fuzz.harness import check, inputs, library, mutated

MOST = 1_000_000


def _pictures() -> list[bytes]:
    exif = Image.Exif()
    exif[0x0112] = 6
    kinds = [as_bytes(picture(), kind) for kind in ("PNG", "WEBP", "GIF", "BMP", "TIFF")]
    animated = as_bytes(picture(), "GIF", save_all=True, append_images=[picture(seed=1)])
    inks = as_bytes(picture().convert("CMYK"), "JPEG")
    return [*kinds, as_bytes(picture(), "JPEG", exif=exif), animated, inks, as_bytes(picture().quantize(9))]


def _use(content: bytes) -> None:
    image = decode(content, MOST)
    assert image.mode == "RGB"
    assert image.width * image.height <= MOST


@pytest.mark.filterwarnings("ignore")  # as the extraction does
def test_pictures() -> None:
    whole, codes = _pictures(), set()
    for number, rng in inputs("pictures", 400):
        outcome = library(partial(_use, mutated(rng, rng.choice(whole))))
        check(outcome, f"pictures:{number}")
        codes.add(outcome.code)
    assert codes == {0, 2}


def _read(path: Path) -> None:
    for found in find_pictures([path], "stem", Damage(True)):
        with suppress(DataError):  # which the extraction reports with the picture's name
            read_picture(found)


def test_archives(tmp_path: Path) -> None:
    out = io.BytesIO()
    with tarfile.open(fileobj=out, mode="w") as tar:
        for name in ("a.png", "deep/b.jpg", "c.txt"):
            info = tarfile.TarInfo(name)
            info.size = 700
            tar.addfile(info, io.BytesIO(bytes(700)))
    codes = set()
    for number, rng in inputs("archives", 200):
        content = mutated(rng, out.getvalue())
        head = rng.randrange(0, 2048, 512)  # damages that hit a member's head, with its sum set right
        if rng.random() < 0.5 and len(content) >= head + 512:
            block = bytearray(content[head : head + 512])
            for _ in range(3):
                block[rng.randrange(148)] = rng.choice(b"\0/.01789\xff\x80")
            block[148:156] = b" " * 8
            block[148:156] = b"%06o\0 " % sum(block)
            content = content[:head] + bytes(block) + content[head + 512 :]
        (tmp_path / "p.tar").write_bytes(content)
        outcome = library(partial(_read, tmp_path / "p.tar"))
        check(outcome, f"archives:{number}")
        codes.add(outcome.code)
        assert [path.name for path in tmp_path.iterdir()] == ["p.tar"]
    assert codes == {0, 2}
