"""Decode pictures that anybody may have made: named formats only, bounded before a pixel is decoded."""

from __future__ import annotations

from io import BytesIO
from typing import TYPE_CHECKING

from pretrain.base.errors import DataError, UserError

if TYPE_CHECKING:
    from PIL import Image

FORMATS = ("PNG", "JPEG", "WEBP", "BMP", "GIF", "TIFF")
"""Formats that are decoded, as Pillow calls them (its JPEG reads MPO, too). None of them runs another program, as EPS
does."""

_GREYS_OF_16_BITS = ("I;16", "I;16B", "I;16L", "I;16N")


def decode(content: bytes, most_pixels: int) -> Image.Image:
    """The picture in a file's bytes, upright and in RGB.

    The rotation that EXIF asks for is applied; EXIF that cannot be read asks for none. What is transparent lies on
    white. Greys of 16 bits keep their upper 8. Of several pictures in an MPO, as telephones write it, the first is
    taken.

    Raises:
        DataError: it is none of `FORMATS`, damaged, truncated, animated, without pixels, of more than ``most_pixels``,
            or of a kind of pixels that has no known range.
    """
    from PIL import Image, UnidentifiedImageError

    try:
        with Image.open(BytesIO(content), formats=FORMATS) as image:
            _check(image, most_pixels)
            image.load()
            return _rgb(image)
    except UserError:
        raise
    except Image.DecompressionBombError:
        raise DataError(
            f"more pixels than Pillow decodes, perhaps a decompression bomb (at most {most_pixels:,})"
        ) from None
    except UnidentifiedImageError:
        raise DataError(f"not a picture, or its beginning is damaged (readable: {', '.join(FORMATS)})") from None
    except MemoryError:
        raise
    except Exception as error:  # each of Pillow's decoders raises what it likes: SyntaxError, struct.error, ...
        raise DataError(f"damaged or truncated ({type(error).__name__}: {error})") from None


def _check(image: Image.Image, most_pixels: int) -> None:
    """Refuse by what the file's head says, before memory is taken."""
    width, height = image.size
    if width < 1 or height < 1:
        raise DataError(f"{width} x {height} pixels: there is nothing to see")
    if width * height > most_pixels:
        raise DataError(
            f"{width} x {height} pixels are more than {most_pixels:,}, perhaps a decompression bomb; "
            "--most-pixels allows more"
        )
    frames = getattr(image, "n_frames", 1)
    if frames > 1 and image.format != "MPO":
        raise DataError(f"animated, or several pages: {frames} pictures in one file; save the one that is meant")


def _rgb(image: Image.Image) -> Image.Image:
    from PIL import Image

    image = _upright(image)
    if image.mode in _GREYS_OF_16_BITS:
        return image.point(lambda grey: grey * (1 / 256), "L").convert("RGB")
    if image.mode in ("I", "F"):
        raise DataError(f"pixels of the kind {image.mode!r} have no known range; save it with 8 bits a colour")
    if image.mode in ("RGBA", "LA", "PA", "RGBa", "La") or "transparency" in image.info:
        image = image.convert("RGBA")
        return Image.alpha_composite(Image.new("RGBA", image.size, "white"), image).convert("RGB")
    return image.convert("RGB")


def _upright(image: Image.Image) -> Image.Image:
    from PIL import ExifTags, Image

    try:
        orientation = image.getexif().get(ExifTags.Base.Orientation)
    except MemoryError:
        raise
    except Exception:  # no TIFF header, a directory that ends early: the pixels are whole nevertheless
        return image
    turns = {
        2: Image.Transpose.FLIP_LEFT_RIGHT,
        3: Image.Transpose.ROTATE_180,
        4: Image.Transpose.FLIP_TOP_BOTTOM,
        5: Image.Transpose.TRANSPOSE,
        6: Image.Transpose.ROTATE_270,
        7: Image.Transpose.TRANSVERSE,
        8: Image.Transpose.ROTATE_90,
    }
    # not ImageOps.exif_transpose, which fails where the other entries of EXIF cannot be written again
    return image.transpose(turns[orientation]) if orientation in turns else image
