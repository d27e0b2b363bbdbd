"""From a picture to a model's input, as the model folder's ``preprocessor_config.json`` says.

transformers' processors are used in their Pillow form, whether or not torchvision is installed: the two forms resize a
little differently, and features must not depend on the machine.
"""

from __future__ import annotations

from io import BytesIO
from typing import TYPE_CHECKING

from capt.pretrain.base.errors import DataError, UserError

if TYPE_CHECKING:
    from PIL import Image
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from jaxtyping import Float
from torch import Tensor

from capt.pretrain.base.errors import CheckpointError, shown
from capt.pretrain.base.quiet import quiet_transformers
from capt.pretrain.models.hf_folder import read_json
from capt.pretrain.regions.extract.families import Family

# Decode pictures that anybody may have made: named formats only, bounded before a pixel is decoded.


FORMATS = ("PNG", "JPEG", "WEBP", "BMP", "GIF", "TIFF")
"""Formats that are decoded, as Pillow calls them (its JPEG reads MPO, too). None of them runs another program, as EPS
does."""

_GREYS_OF_16_BITS = ("I;16", "I;16B", "I;16L", "I;16N")


def decode(content: bytes, most_pixels: int) -> Image.Image:
    """The picture in a file's bytes, upright and in RGB.

    The rotation that EXIF asks for is applied; EXIF that cannot be read asks for none. What is transparent is on
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
    # 16 bits to 8 by their upper half, whatever Pillow's own conversion does.
    if image.mode in _GREYS_OF_16_BITS:
        return image.point(lambda grey: grey * (1 / 256), "L").convert("RGB")
    if image.mode in ("I", "F"):
        raise DataError(f"pixels of the kind {image.mode!r} have no known range; save it with 8 bits a colour")
    if image.mode in ("RGBA", "LA", "PA", "RGBa", "La") or "transparency" in image.info:
        # On white, as paper is: the colours of transparent pixels mean nothing.
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


_KEYS = (
    "size", "crop_size", "crop_pct", "resample", "do_resize", "do_center_crop", "do_rescale", "rescale_factor",
    "do_normalize", "image_mean", "image_std", "do_pad", "pad_size", "include_top", "patch_size", "max_num_patches",
)  # fmt: skip
"""The settings of a processor that decide the pixels of a model's input."""

_PILLOW: dict[str, tuple[str, dict[str, Any]]] = {
    "DINOv3ViTImageProcessor": (
        "ViTImageProcessor",
        {"image_mean": [0.485, 0.456, 0.406], "image_std": [0.229, 0.224, 0.225], "resample": 2},
    ),
}
"""Processors that have no Pillow form, the one that does the same, and their own defaults."""

_LARGEST = 4096
"""Pixels of the longest side of a model's input."""

_MOST_PATCHES = 1 << 14
"""Patches of a model's input."""

_LONGEST = 16 * _LARGEST
"""Pixels of the longest side of a picture that a processor has resized by its short side, before the crop."""

Box = tuple[float, float, float, float]


class PreparedPicture(NamedTuple):
    """A picture as a model sees it.

    Attributes:
        pixels: normalised.
        seen: left, top, right and bottom edge of what the model sees, in pixels of the picture.
    """

    pixels: Float[Tensor, "3 height width"]
    seen: Box


class Preparation:
    """The processor of a model folder.

    Args:
        folder: holds ``preprocessor_config.json``.
        family: which processors it may name.
        fit: ``whole``, ``crop`` or, for a detector, ``own``: the processor's own way, which keeps the whole picture.

    Raises:
        CheckpointError: the file is missing, names code to run or a processor that is not known here, or asks for
            something that cannot be followed.
    """

    def __init__(self, folder: Path, family: Family, fit: str) -> None:
        self._path, self._fit, self._flexible = folder / "preprocessor_config.json", fit, family.flexible
        self._processor = _processor(read_json(self._path), family, self._path)
        self._input = (0, 0) if fit == "own" or self._flexible else self._input_size()
        if self._flexible and fit == "crop":
            raise CheckpointError(f"{self._path}: this model sees whole pictures in their proportions: --fit whole")

    @property
    def description(self) -> dict[str, Any]:
        """Return the settings that decide the pixels of the model's input, for the manifest of a store."""
        values = self._processor.to_dict()
        kept = {key: values[key] for key in _KEYS if values.get(key) is not None}
        return {"processor": values["image_processor_type"], "fit": self._fit, **kept}

    def __call__(self, image: Image.Image) -> PreparedPicture:
        """Prepare one picture. Raises ``ValueError`` for one so narrow that it would be resized to gigabytes."""
        if self._flexible:
            return PreparedPicture(self._of_patches(image), _whole(*image.size))
        # Resized here, to the model's input whatever the proportions; the processor does the rest.
        if self._fit == "whole":
            height, width = self._input
            options = {"do_resize": False, "do_center_crop": False}
            pixels = self._run(image.resize((width, height), self._resample), **options)
            return PreparedPicture(pixels, _whole(*image.size))
        self._refuse_narrow(*image.size)
        pixels = self._run(image)
        return PreparedPicture(pixels, _whole(*image.size) if self._fit == "own" else self._visible_part(*image.size))

    @property
    def _resample(self) -> Any:
        from PIL import Image

        return Image.Resampling(int(self._processor.resample))

    def _run(self, image: Image.Image, **options: Any) -> Tensor:
        prepared = self._processor(images=[image], return_tensors="pt", **options)
        pixels: Tensor = prepared["pixel_values"][0]
        return pixels.float()

    def _of_patches(self, image: Image.Image) -> Tensor:
        """The picture that the processor has cut into patches, put together again and without its padding."""
        prepared = self._processor(images=[image], return_tensors="pt")
        # The processor fills up to a number of patches; those behind the picture are left out.
        rows, columns = (int(number) for number in prepared["spatial_shapes"][0])
        side = int(self._processor.patch_size)
        patches = prepared["pixel_values"][0][: rows * columns].float()
        cells = patches.view(rows, columns, side, side, -1)
        pixels: Tensor = cells.permute(4, 0, 2, 1, 3).reshape(-1, rows * side, columns * side)
        return pixels

    def _refuse_narrow(self, width: int, height: int) -> None:
        size = self._processor.size
        if not size.get("shortest_edge") or size.get("longest_edge"):
            return
        longest = int(size["shortest_edge"]) * max(width, height) // min(width, height)
        if longest > _LONGEST:
            raise ValueError(f"{width} x {height} pixels would be resized to a length of {longest}, over {_LONGEST}")

    def _input_size(self) -> tuple[int, int]:
        """Height and width of the model's input."""
        size, crop = self._processor.size, getattr(self._processor, "crop_size", None)
        # After the crop the input is as large as the crop.
        if self._processor.do_center_crop and crop:
            size = crop
        height, width = (
            (size["height"], size["width"])
            if size.get("height") and size.get("width")
            else (size.get("shortest_edge"), size.get("shortest_edge"))
        )
        if not (isinstance(height, int) and isinstance(width, int) and 1 <= height <= _LARGEST >= width >= 1):
            raise CheckpointError(f"{self._path}: size {shown(dict(size))} does not say how large the input is")
        if self._fit == "crop" and not self._processor.do_resize:
            raise CheckpointError(f"{self._path}: do_resize is false; --fit whole is possible")
        return height, width

    def _visible_part(self, width: int, height: int) -> Box:
        """Return the part of a picture that the processor's own way leaves.

        It resizes the picture so that its short side has ``size.shortest_edge`` pixels (ConvNeXt's: divided by
        ``crop_pct``; and from 384 pixels on it stretches it to a square), and cuts the middle out.
        """
        size, input_height, input_width = self._processor.size, *self._input
        short = size.get("shortest_edge")
        crop_pct = getattr(self._processor, "crop_pct", None)
        # ConvNeXt's processor stretches to a square from 384 pixels on.
        if crop_pct is not None and short >= 384:
            return _whole(width, height)
        if crop_pct is not None:
            short = int(short / crop_pct)
        elif not self._processor.do_center_crop and short is None:
            return _whole(width, height)
        if short is None:
            resized = (size["width"], size["height"])
        else:
            longer = int(short * max(width, height) / min(width, height))
            resized = (short, longer) if width <= height else (longer, short)
        if crop_pct is None and not self._processor.do_center_crop:
            return _whole(width, height)
        if resized[0] < input_width or resized[1] < input_height:
            raise CheckpointError(f"{self._path}: the crop is larger than what it is cut from; --fit whole is possible")
        # The middle of the resized picture, back in pixels of the original.
        left, top = (resized[0] - input_width) // 2, (resized[1] - input_height) // 2
        x, y = width / resized[0], height / resized[1]
        return (left * x, top * y, (left + input_width) * x, (top + input_height) * y)


def _whole(width: int, height: int) -> Box:
    return 0.0, 0.0, float(width), float(height)


def _processor(keys: dict[str, Any], family: Family, path: Path) -> Any:
    from transformers.models.auto.image_processing_auto import get_image_processor_class_from_name

    named = keys.get("image_processor_type") or keys.get("feature_extractor_type") or family.processors[0]
    # `ConvNextFeatureExtractor` and `ViTImageProcessorFast` are other names of the same processor.
    name = str(named).replace("FeatureExtractor", "ImageProcessor").removesuffix("Fast").removesuffix("Pil")
    if name not in family.processors:
        raise CheckpointError(f"{path}: image_processor_type is {shown(named)}; known: {', '.join(family.processors)}")
    # Defaults that the other class would have otherwise.
    name, defaults = _PILLOW.get(name, (name, {}))
    keys = defaults | keys
    most = keys.get("max_num_patches")
    if most is not None and not (isinstance(most, int) and 0 < most <= _MOST_PATCHES):
        raise CheckpointError(f"{path}: max_num_patches is {shown(most)}; it is a number from 1 to {_MOST_PATCHES}")
    # Sizes of somebody else's file: without a bound one picture could fill the memory.
    for key in ("size", "crop_size", "pad_size", "patch_size"):
        sides = keys.get(key)
        for side in sides.values() if isinstance(sides, dict) else [sides]:
            if isinstance(side, int | float) and not side <= _LARGEST:
                raise CheckpointError(f"{path}: {key} is {shown(sides)}; at most {_LARGEST} pixels are possible")
    with quiet_transformers():
        try:
            processor_class = get_image_processor_class_from_name(f"{name}Pil")
            processor = processor_class(**{key: keys[key] for key in _KEYS if key in keys and keys[key] is not None})
        except Exception as error:  # it raises what it likes for values that it does not
            raise CheckpointError(f"{path}: not a {name}: {' '.join(str(error).split())[:300]}") from None
    return processor


def require_finite(prepared: PreparedPicture) -> PreparedPicture:
    """The picture itself; raises ``ValueError`` where it has no pixels, or some that are not numbers."""
    if 0 in prepared.pixels.shape or not torch.isfinite(prepared.pixels).all():
        raise ValueError(f"as a model's input it has the shape {tuple(prepared.pixels.shape)}, or is not finite")
    return prepared
