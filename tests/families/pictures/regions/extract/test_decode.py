"""Pictures that anybody may have made: right pixels, or one named error."""

from __future__ import annotations

import struct
import zlib
from io import BytesIO

import numpy as np
import pytest
from PIL import Image

from capt.pretrain.base.errors import DataError
from capt.pretrain.regions.extract.parts import MOST_PIXELS
from capt.pretrain.regions.extract.prepare import decode
from tests.families.pictures.regions.extract.support import as_bytes, picture


def _decoded(content: bytes, most: int = MOST_PIXELS) -> np.ndarray:
    image = decode(content, most)
    assert image.mode == "RGB"
    return np.asarray(image)


def test_every_kind_of_pixel_becomes_rgb() -> None:
    rgb = picture()
    expected = np.asarray(rgb).astype(int)
    for mode in ("RGB", "RGBA", "CMYK"):
        kind = "TIFF" if mode == "CMYK" else "PNG"
        assert np.abs(_decoded(as_bytes(rgb.convert(mode), kind)) - expected).max() <= 1, mode
    grey = np.asarray(rgb.convert("L"))
    for mode in ("L", "LA"):
        assert (_decoded(as_bytes(rgb.convert("L").convert(mode))) == grey[..., None]).all()
    palette = rgb.quantize(64)
    assert (_decoded(as_bytes(palette, "GIF")) == np.asarray(palette.convert("RGB"))).all()
    bits = rgb.convert("1")
    assert (_decoded(as_bytes(bits)) == np.asarray(bits.convert("RGB"))).all()


def test_greys_of_16_bits_keep_their_upper_byte() -> None:
    values = np.array([[0, 255, 256, 32768, 65535]], dtype=np.uint16)
    assert _decoded(as_bytes(Image.fromarray(values)))[0, :, 0].tolist() == [0, 0, 1, 128, 255]


def test_what_is_transparent_lies_on_white() -> None:
    image = Image.new("RGBA", (2, 1), (200, 0, 0, 0))
    image.putpixel((1, 0), (200, 0, 0, 255))
    assert _decoded(as_bytes(image))[0].tolist() == [[255, 255, 255], [200, 0, 0]]
    palette = Image.new("P", (2, 1))
    palette.putpalette([200, 0, 0, 0, 200, 0])
    palette.putpixel((1, 0), 1)
    assert _decoded(as_bytes(palette, transparency=0))[0].tolist() == [[255, 255, 255], [0, 200, 0]]


@pytest.mark.parametrize("orientation", range(1, 9))
def test_the_rotation_that_exif_asks_for_is_applied(orientation: int) -> None:
    turns = {1: lambda a: a, 2: np.fliplr, 3: lambda a: np.rot90(a, 2), 4: np.flipud, 5: lambda a: a.transpose(1, 0, 2)}
    turns |= {6: lambda a: np.rot90(a, -1), 7: lambda a: np.rot90(a.transpose(1, 0, 2), 2), 8: np.rot90}
    exif = Image.Exif()
    exif[0x0112] = orientation
    assert (_decoded(as_bytes(picture(), exif=exif)) == turns[orientation](np.asarray(picture()))).all()


def _segment(exif: bytes) -> bytes:
    """A JPEG whose EXIF is these bytes, which Pillow would not write."""
    whole = as_bytes(picture(), "JPEG")
    return whole[:2] + b"\xff\xe1" + struct.pack(">H", len(exif) + 8) + b"Exif\0\0" + exif + whole[2:]


SIX = b"\x12\x01\x03\0\x01\0\0\0\x06\0\0\0"  # the entry that asks for a quarter of a turn


@pytest.mark.filterwarnings("ignore:Corrupt EXIF")
@pytest.mark.parametrize(
    "exif",
    [b"", b"b'Exif\\x00\\x00MM'", b"\0\x08\0\x02\x01\x12\0\x03", b"II*\0\xff\xff\xff\xff", b"II*\0\x08\0\0\0\x01",
     b"II*\0\x08\0\0\0\x01\0" + SIX.replace(b"\x06", b"\x63")],
)  # fmt: skip
def test_exif_that_says_nothing_costs_no_picture(exif: bytes) -> None:
    content = _segment(exif)
    assert (_decoded(content) == np.asarray(Image.open(BytesIO(content)))).all()
    for kind in ("PNG", "WEBP"):
        assert _decoded(as_bytes(picture(), kind, exif=b"Exif\0\0" + exif)).shape == (40, 60, 3), kind


def test_a_rotation_is_applied_whatever_else_exif_holds() -> None:
    broken = b"\x0f\x01\x02\0\xff\xff\0\0\xff\xff\0\0"  # the maker's name, far behind the end
    content = _segment(b"II*\0\x08\0\0\0\x02\0" + SIX + broken)
    with pytest.warns(UserWarning, match="EXIF|Tag data"):
        assert _decoded(content).shape == (60, 40, 3)


def test_the_ending_of_a_name_does_not_matter_but_the_format_does() -> None:
    assert _decoded(as_bytes(picture(), "WEBP", lossless=True)).shape == (40, 60, 3)
    with pytest.raises(DataError, match=r"not a picture"):
        decode(as_bytes(picture(), "PPM"), MOST_PIXELS)
    with pytest.raises(DataError, match=r"not a picture"):  # Pillow would start Ghostscript
        decode(b"%!PS-Adobe-3.0 EPSF-3.0\n%%BoundingBox: 0 0 10 10\n%%EndComments\n", MOST_PIXELS)


@pytest.mark.parametrize("kind", ["PNG", "JPEG", "WEBP", "GIF", "BMP", "TIFF"])
def test_a_truncated_file_is_refused(kind: str) -> None:
    content = as_bytes(picture(), kind)
    assert _decoded(content).shape == (40, 60, 3)
    for length in (0, 3, len(content) // 2):
        with pytest.raises(DataError, match=r"not a picture|damaged or truncated"):
            decode(content[:length], MOST_PIXELS)


def test_a_damaged_checksum_is_refused() -> None:
    content = bytearray(as_bytes(picture()))
    content[len(content) // 2] ^= 0xFF
    with pytest.raises(DataError, match="damaged or truncated"):
        decode(bytes(content), MOST_PIXELS)


def _png_head(width: int, height: int) -> bytes:
    """A PNG of a few bytes that claims to have many pixels."""

    def chunk(kind: bytes, body: bytes) -> bytes:
        return struct.pack(">I", len(body)) + kind + body + struct.pack(">I", zlib.crc32(kind + body))

    head = chunk(b"IHDR", struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0))
    return b"\x89PNG\r\n\x1a\n" + head + chunk(b"IDAT", zlib.compress(bytes(100))) + chunk(b"IEND", b"")


@pytest.mark.filterwarnings("ignore::PIL.Image.DecompressionBombWarning")  # as the extraction does
def test_a_decompression_bomb_is_refused_by_its_head() -> None:
    with pytest.raises(DataError, match=r"decompression bomb"):
        decode(_png_head(60_000, 60_000), MOST_PIXELS)
    with pytest.raises(DataError, match=r"9500 x 9500 pixels are more than 89,478,485.*--most-pixels"):
        decode(_png_head(9500, 9500), MOST_PIXELS)
    with pytest.raises(DataError, match="60 x 40 pixels are more than 2,399"):
        decode(as_bytes(picture()), 2399)
    assert _decoded(as_bytes(picture()), 2400).shape == (40, 60, 3)


def test_an_animation_is_refused() -> None:
    with pytest.raises(DataError, match="animated, or several pages: 2 pictures"):
        decode(as_bytes(picture(), "GIF", save_all=True, append_images=[picture(seed=1)]), MOST_PIXELS)


def test_pixels_without_a_range_are_refused() -> None:
    with pytest.raises(DataError, match="'F' have no known range"):
        decode(as_bytes(picture().convert("F"), "TIFF"), MOST_PIXELS)
