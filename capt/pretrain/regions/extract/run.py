"""The extraction: pictures in, a region store out, a few pictures in memory at a time."""

from __future__ import annotations

import logging
import warnings
from collections import Counter
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from hashlib import sha256
from itertools import chain, islice
from pathlib import Path, PurePath
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import torch

from capt.pretrain.base.errors import ConfigError, DataError, UserError, counted
from capt.pretrain.base.parallel import ProgressCallback
from capt.pretrain.regions.extract.detector import cell_boxes, detect, feature_map, pooled
from capt.pretrain.regions.extract.find import Found, find_pictures, read_picture
from capt.pretrain.regions.extract.folder import VisionModel, load_vision_model
from capt.pretrain.regions.extract.parts import ExtractedPart, ExtractOptions, Read, parts_beside
from capt.pretrain.regions.extract.prepare import Preparation, PreparedPicture, decode, require_finite
from capt.pretrain.regions.manifest import FeatureType, PictureSource, StoreManifest
from capt.pretrain.regions.picture import Damage, Labels, Picture
from capt.pretrain.regions.writer import write_store

if TYPE_CHECKING:
    from PIL.Image import Image

logger = logging.getLogger(__name__)

PART = 4096
"""Pictures of a part: what an interruption costs."""
_THREADS = 4
"""Threads that read and decode pictures while the model computes."""


class _Input(NamedTuple):
    found: Found
    sha256: str
    width: int
    height: int
    prepared: PreparedPicture


class _Places:
    """The pictures of each place: their number, a digest of their names and files, and those left out."""

    def __init__(self, left_out: Sequence[str] = ()) -> None:
        self._left_out = list(left_out)
        self._digests: dict[str, Any] = {}
        self._counts: Counter[str] = Counter()

    def add(self, one: Read) -> None:
        self._digests.setdefault(one.place, sha256()).update(f"{one.sha256}  {one.name}\n".encode())
        self._counts[one.place] += 1

    def __iter__(self) -> Iterator[PictureSource]:
        """To be called when all pictures were read."""
        left_out: dict[str, list[str]] = {place: [] for place in self._digests}
        for where in self._left_out:
            # Of places in one another the inner one has it.
            if holding := [place for place in left_out if _is_of(where, place)]:
                left_out[max(holding, key=len)].append(where)
        for place, digest in self._digests.items():
            yield PictureSource(
                name=place, sha256=digest.hexdigest(), pictures=self._counts[place], left_out=left_out[place]
            )


def _is_of(where: str, place: str) -> bool:
    """Return whether ``where`` is a file in the folder ``place``, or ``place`` itself, or in the archive ``place``."""
    return where.startswith(f"{place}: ") or PurePath(where).is_relative_to(place)


def extract_regions(
    places: Sequence[Path], out: Path, options: ExtractOptions, progress: ProgressCallback | None = None
) -> tuple[StoreManifest, Damage]:
    """Write the region features of all pictures in ``places`` to the new store ``out``.

    The order is that of the pictures' names. The store appears whole or not at all. After an interruption the same call
    continues where it stopped (`capt.pretrain.regions.extract.parts`).

    Args:
        places: folders, files and ``.tar`` archives.
        out: a folder that does not exist or is empty.
        options: which model, how, and what to do with damaged pictures.
        progress: called as pictures are done.

    Returns:
        The store's manifest, and what was left out.

    Raises:
        CheckpointError: the model folder is not one that the backend runs safely.
        ConfigError: an option does not fit the model or this machine.
        DataError: there are no pictures, or one cannot be used and damaged ones are not to be skipped.
    """
    import PIL  # noqa: F401 (its absence is said now, and not after a model was loaded)

    damage = Damage(options.skip_damaged)
    found = find_pictures(places, options.names, damage)
    device = _device(options.device)
    model = load_vision_model(options.model, options.backend)
    model.network.to(device, torch.bfloat16 if options.precision == "bf16" else torch.float32)
    preparation = Preparation(model.folder, model.family, "own" if options.backend == "detr" else options.fit)
    dtype: FeatureType = "fp16" if options.dtype == "fp16" else "fp32"
    made_by = features_of(model, preparation, options)
    logger.info("%s, %s on %s", counted(len(found), "picture"), model.family.model, device)
    with (
        warnings.catch_warnings(),
        torch.inference_mode(),
        parts_beside(out, {"dtype": dtype, **made_by}, dtype, made_by) as parts,
    ):
        warnings.filterwarnings("ignore", module="PIL")  # it warns of what is decided here, by name

        def make_part(number: int, some: Sequence[Found], files: str, done: int) -> ExtractedPart:
            read: list[Read] = []
            own = Damage(options.skip_damaged)
            pictures = _pictures(_inputs(some, preparation, options, own), read, model, options, device)
            counting = _counted(pictures, done, len(found), own, progress)
            return parts.write(number, files, counting, read, own.skipped)

        made: list[ExtractedPart] = []
        for number, start in enumerate(range(0, len(found), PART)):
            some = found[start : start + PART]
            files = _digest(some)
            part = parts.find(number, files)
            # A part that was made with --skip-damaged does not count without it: it would hide what is damaged.
            if part is None or (part.skipped and not options.skip_damaged):
                part = make_part(number, some, files, start)
            damage.skipped += part.skipped
            made.append(part)
        # The parts are put together in their order, into a store without parts.
        places_read = _Places(damage.skipped)
        for one in chain.from_iterable(part.read for part in made):
            places_read.add(one)
        manifest = write_store(
            out,
            chain.from_iterable(part.pictures() for part in made),
            feature_dtype=dtype,
            features_of=made_by,
            sources=places_read,
        )
    return manifest, damage


def _digest(found: Sequence[Found]) -> str:
    """Describe the pictures: their names, places, and the state of their files."""
    digest, states = sha256(), dict[Path, tuple[int, int]]()
    for one in found:
        # One look at each archive, whatever number of pictures it holds.
        if one.path not in states:
            status = one.path.stat()
            states[one.path] = status.st_size, status.st_mtime_ns
        text = f"{one.name}\0{one.where}\0{one.offset}\0{one.size}\0{states[one.path]}\n"
        digest.update(text.encode(errors="surrogateescape"))
    return digest.hexdigest()


def features_of(model: VisionModel, preparation: Preparation, options: ExtractOptions) -> dict[str, Any]:
    """Describe the origin of the features for a store's manifest: equal exactly where features may be mixed."""
    described = {
        "backend": options.backend,
        "class": model.family.model,
        "weights_sha256": model.weights,
        "config_sha256": model.config_sha256,
        "preprocessing": preparation.description,
        "options": options.of_features,
    }
    if options.backend == "detr":
        labels = getattr(model.config, "id2label", None) or {}
        described["object_names"] = [str(labels[key]) for key in sorted(labels)]
    return described


def _inputs(
    found: Sequence[Found], preparation: Preparation, options: ExtractOptions, damage: Damage
) -> Iterator[list[_Input]]:
    """Batches of pictures; those that cannot be used are missing from them."""

    def load(one: Found) -> _Input | str:
        try:
            content = read_picture(one)
            image: Image = decode(content, options.most_pixels)
            return _Input(one, sha256(content).hexdigest(), *image.size, require_finite(preparation(image)))
        except DataError as error:
            return str(error)
        except UserError:
            raise
        except (ValueError, ArithmeticError) as error:  # a processor refuses a picture of 1 x 10,000 pixels
            return f"cannot be made a model's input: {error}"

    left = iter(found)
    with ThreadPoolExecutor(_THREADS) as pool:
        # The next batch is read and decoded while the model computes this one.
        ahead = list(islice(left, options.batch))
        loading = [pool.submit(load, one) for one in ahead]
        while ahead:
            following = list(islice(left, options.batch))
            then = [pool.submit(load, one) for one in following]
            batch = []
            for one, future in zip(ahead, loading, strict=True):
                loaded = future.result()
                if isinstance(loaded, str):
                    damage.report(one.where, loaded)
                else:
                    batch.append(loaded)
            yield batch
            ahead, loading = following, then


def _pictures(
    inputs: Iterator[list[_Input]], read: list[Read], model: VisionModel, options: ExtractOptions, device: torch.device
) -> Iterator[Picture]:
    for batch in inputs:
        by_size: dict[torch.Size, list[_Input]] = {}
        for one in batch:
            by_size.setdefault(one.prepared.pixels.shape, []).append(one)
        done = {
            picture.id: picture
            for group in by_size.values()  # pictures of other sizes would pad each other and change the features
            for picture in _run(group, model, options, device)
        }
        # In the order in which they were found, not that of their sizes.
        for one in batch:
            read.append(Read(one.found.place, one.found.name, one.sha256))
            yield done[one.found.name]


def _run(group: list[_Input], model: VisionModel, options: ExtractOptions, device: torch.device) -> Iterator[Picture]:
    # Pictures in the type of the weights, which is that of the computation.
    pixels = torch.stack([one.prepared.pixels for one in group]).to(device, next(model.network.parameters()).dtype)
    if options.backend == "detr":
        detections = detect(model, pixels, threshold=options.threshold, most=options.most)
        for one, found in zip(group, detections, strict=True):
            boxes = found.boxes * np.array([one.width, one.height] * 2, dtype=np.float32)
            labels = Labels(found.classes, found.scores)
            yield Picture(one.found.name, one.width, one.height, found.features, boxes, labels)
        return
    features = feature_map(model, pixels)
    rows, columns = features.shape[-2:]
    cells = pooled(features, options.cells).flatten(2).transpose(1, 2).float().cpu().numpy()
    for one, values in zip(group, cells, strict=True):
        boxes = cell_boxes(rows, columns, options.cells, one.prepared.seen)
        yield Picture(one.found.name, one.width, one.height, values, boxes)


def _counted(
    pictures: Iterator[Picture], done: int, total: int, damage: Damage, progress: ProgressCallback | None
) -> Iterator[Picture]:
    for number, picture in enumerate(pictures, done + 1):
        yield picture
        if progress is not None:
            progress(number + len(damage.skipped), total)


def _device(name: str) -> torch.device:
    if name == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        device = torch.device(name)
        torch.empty(1, device=device)
    except (RuntimeError, AssertionError) as error:  # AssertionError: a torch that was built without CUDA
        raise ConfigError(f"--device {name}: {str(error).splitlines()[0]}") from None
    return device
