"""Feature files of every known kind are read as what they are, and others are refused by name."""

from __future__ import annotations

import base64
import itertools
from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np
import pytest

from capt.pretrain.base.errors import DataError
from capt.pretrain.regions.importing import import_regions
from capt.pretrain.regions.picture import Picture
from capt.pretrain.regions.store import RegionStore
from capt.pretrain.regions.tsv import FIELDS, TsvLayout, decode, parse_row
from capt.pretrain.regions.tsv_layout import FileType, infer_layout
from tests.families.pictures.regions.pictures import encode, random_pictures

BOTTOM_UP = ("img_id", "img_w", "img_h", "num_boxes", "boxes", "features")
WITH_CLASSES = (*BOTTOM_UP[:5], "objects_conf", "attrs_conf", "objects_id", "attrs_id", "features")
VILBERT = (*BOTTOM_UP, "cls_prob")
SWAPPED = ("img_id", "img_w", "img_h", *FIELDS[3:])
TYPES = {"fp16": "<f2", "fp32": "<f4", "fp64": "<f8"}


def _pictures(count: int = 12, size: int = 16) -> list[Picture]:
    """Pictures as detectors see them: many regions, features of 0 and more, boxes that reach the edges."""
    pictures = []
    for picture in random_pictures(count, size=size, regions=(3, 9), seed=5):
        boxes = picture.boxes.copy()
        boxes[0] = [0, 0, picture.width, picture.height]
        pictures.append(picture._replace(boxes=boxes, features=np.maximum(picture.features, 0)))
    return pictures


def _write(
    path: Path,
    pictures: Sequence[Picture],
    fields: Sequence[str] = FIELDS,
    *,
    features: str = "<f4",
    box_type: str = "<f4",
    columns: int = 4,
    size_form: bool = False,
    normalised: bool = False,
    python_bytes: bool = False,
    header: Sequence[str] = (),
    ids: str = "<i8",
) -> None:
    rows = ["\t".join(header)] if header else []
    for picture in pictures:
        assert picture.objects is not None
        assert picture.attributes is not None
        boxes = picture.boxes.astype(np.float64)
        lengths = boxes[:, 2:] - boxes[:, :2]
        area = lengths.prod(axis=1, keepdims=True)
        scale = np.array([picture.width, picture.height] * 2) if normalised else np.ones(4)
        more = {4: [], 5: [area / scale[:2].prod()], 6: [lengths / scale[:2]]}
        more[7] = [*more[6], *more[5]]
        values = np.hstack([np.hstack([boxes[:, :2], lengths]) if size_form else boxes])
        arrays = {
            "boxes": np.hstack([values / scale, *more[columns]]).astype(box_type),
            "features": picture.features.astype(features),
            "objects_id": picture.objects.ids.astype(ids), "objects_conf": picture.objects.scores.astype("<f4"),
            "attrs_id": picture.attributes.ids.astype(ids), "attrs_conf": picture.attributes.scores.astype("<f4"),
            "cls_prob": np.random.default_rng(0).random((len(boxes), 11)).astype("<f4"),
        }  # fmt: skip
        texts = {name: base64.b64encode(array.tobytes()) for name, array in arrays.items()}
        shown = {name: repr(text) if python_bytes else text.decode() for name, text in texts.items()}
        numbers = {"img_w": picture.width, "img_h": picture.height, "num_boxes": len(boxes), "img_id": picture.id}
        rows.append("\t".join(str({**shown, **numbers}[name]) for name in fields))
    path.write_text("\n".join(rows) + "\n")


def _imported(path: Path, **options: FileType) -> RegionStore:
    out = path.with_suffix(".store")
    import_regions(out, [path], workers=1, feature_dtype="fp32", **options)  # type: ignore[arg-type]
    return RegionStore.open(out)


def _require_same(store: RegionStore, pictures: Sequence[Picture], tolerance: float = 1e-6) -> None:
    for picture in pictures:
        read = store.picture(picture.id)
        assert (read.width, read.height) == (picture.width, picture.height)
        assert np.allclose(read.features, picture.features, rtol=tolerance, atol=tolerance)
        assert np.allclose(read.boxes, picture.boxes, rtol=tolerance, atol=1e-3 + 700 * tolerance)


FORMS = {
    "pixels": {},
    "64 bits": {"box_type": "<f8"},
    "normalised": {"normalised": True},
    "normalised, 64 bits": {"normalised": True, "box_type": "<f8"},
    "normalised, 16 bits": {"normalised": True, "box_type": "<f2"},
    "with area": {"columns": 5},
    "normalised, with area": {"normalised": True, "columns": 5},
    "normalised, with width and height": {"normalised": True, "columns": 6},
    "normalised, with width, height and area": {"normalised": True, "columns": 7},
    "width and height": {"size_form": True},
    "normalised width and height": {"size_form": True, "normalised": True},
}


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("fields", [FIELDS, BOTTOM_UP, WITH_CLASSES, VILBERT], ids=["lxmert", "bua", "classes", "vil"])
def test_every_layout_is_told_by_its_rows(tmp_path: Path, fields: tuple[str, ...], form: str) -> None:
    pictures = _pictures()
    half = FORMS[form].get("box_type") == "<f2"
    for features, python_bytes in itertools.product(TYPES.values(), (False, True)):
        path = tmp_path / f"{features[1:]}{python_bytes}.tsv"
        _write(path, pictures, fields, features=features, python_bytes=python_bytes, **FORMS[form])  # type: ignore[arg-type]
        layout = infer_layout(path)
        assert layout.types["features"] == features
        assert (layout.normalised, layout.python_bytes) == ("normalised" in form, python_bytes)
        for picture, line in zip(pictures, path.read_bytes().splitlines(), strict=True):
            read = decode(parse_row(line, layout))
            assert (read.id, read.width, read.height) == picture[:3]
            tolerance = 1e-3 if "2" in features else 1e-6
            assert np.allclose(read.features, picture.features, rtol=tolerance, atol=tolerance)
            assert np.allclose(read.boxes, picture.boxes, rtol=1e-3 if half else 1e-5, atol=1.0 if half else 1e-2)
            assert read.objects is None or np.array_equal(read.objects.ids, picture.objects.ids)  # type: ignore[union-attr]
            assert (read.objects is not None) == ("objects_id" in fields)


@pytest.mark.parametrize("fields", [FIELDS, SWAPPED, BOTTOM_UP], ids=["lxmert", "swapped", "bua"])
@pytest.mark.parametrize("features", TYPES)
def test_a_store_holds_what_the_file_means(tmp_path: Path, fields: tuple[str, ...], features: str) -> None:
    pictures = _pictures()
    _write(tmp_path / "f.tsv", pictures, fields, features=TYPES[features], ids="<i4")
    store = _imported(tmp_path / "f.tsv")
    _require_same(store, pictures, 1e-3 if features == "fp16" else 1e-6)
    read_as = store.manifest.sources[0].read_as
    assert f"features float{features[2:]}; boxes float32, left, top, right, bottom in pixels" in read_as
    assert read_as.startswith(", ".join(fields))


@pytest.mark.parametrize("names", [("image_id", "image_w", "image_h", "num_boxes", "boxes", "features"),
                                   ("features", "boxes", "num_boxes", "img_h", "img_w", "img_id")])  # fmt: skip
def test_names_in_the_first_line_say_the_order(tmp_path: Path, names: tuple[str, ...]) -> None:
    known = {"image_id": "img_id", "image_w": "img_w", "image_h": "img_h"}
    pictures = _pictures()
    _write(tmp_path / "f.tsv", pictures, [known.get(name, name) for name in names], header=names)
    store = _imported(tmp_path / "f.tsv")
    _require_same(store, pictures)
    assert "named in the first line" in store.manifest.sources[0].read_as


def _values(rng: np.random.Generator) -> dict[str, np.ndarray]:
    n = (40, 32)
    return {
        "rectified": np.maximum(rng.normal(size=n), 0),
        "normal": rng.normal(size=n),
        "of length 1": rng.normal(size=n) / 6,
        "in one octave": rng.uniform(0.5, 1, n),
        "positive": rng.lognormal(0, 1.5, n),
        "few": rng.normal(size=(3, 8)),
        "sparse": np.where(rng.random(n) < 0.97, 0, rng.normal(size=n)),
        "integers": rng.integers(0, 200, n).astype(float),
        "one hot": np.eye(40, 32) + 0.0,
        "bf16": np.maximum(rng.normal(size=n), 0).astype("<f4").view("<u4") >> 16 << 16,
    }


@pytest.mark.parametrize("kind", TYPES)
def test_the_type_of_features_is_told_by_their_magnitudes(tmp_path: Path, kind: str) -> None:
    for seed in range(5):
        for name, values in _values(np.random.default_rng(seed)).items():
            if name == "bf16":
                values = values.astype("<u4").view("<f4")
            if name in ("integers", "one hot", "few") and kind != "fp32":
                continue  # a handful of round numbers may be of another type: see the next test
            (picture,) = random_pictures(1, size=values.shape[1], regions=(len(values), len(values)))
            _write(tmp_path / "f.tsv", [picture._replace(features=values)], features=TYPES[kind])
            assert infer_layout(tmp_path / "f.tsv").types["features"] == TYPES[kind], (name, seed)


def test_a_picture_without_a_feature_above_zero_tells_no_type(tmp_path: Path) -> None:
    first, second = _pictures(2)
    _write(tmp_path / "a.tsv", [first, second._replace(features=np.zeros_like(second.features))])
    assert infer_layout(tmp_path / "a.tsv").types["features"] == "<f4"


@pytest.mark.parametrize("kind", TYPES)
def test_a_type_that_is_named_is_taken(tmp_path: Path, kind: FileType) -> None:
    pictures = [picture._replace(features=np.ones((len(picture.features), 8))) for picture in _pictures()]
    _write(tmp_path / "f.tsv", pictures, features=TYPES[kind])
    _require_same(_imported(tmp_path / "f.tsv", file_dtype=kind), pictures)


def _bytes_of_another_kind(path: Path) -> None:
    pictures = [
        picture._replace(features=np.random.default_rng(3).integers(0, 1 << 32, (len(picture.boxes), 16)))
        for picture in _pictures()
    ]
    _write(path, pictures, features="<u4")


def _in_thousandths(path: Path) -> None:
    pictures = [picture._replace(boxes=picture.boxes * 1000 / max(picture.width, picture.height))
                for picture in _pictures()]  # fmt: skip
    _write(path, [picture for picture in pictures if max(picture.width, picture.height) < 600])


def _spoil_area(path: Path) -> None:
    _write(path, _pictures(), columns=5)
    lines = []
    for line in path.read_text().splitlines():
        fields = line.split("\t")
        boxes = np.frombuffer(base64.b64decode(fields[8]), "<f4").reshape(-1, 5).copy()
        boxes[:, 4] = 0.25
        lines.append("\t".join([*fields[:8], base64.b64encode(boxes.tobytes()).decode(), fields[9]]))
    path.write_text("\n".join(lines) + "\n")


REFUSED: dict[str, tuple[Callable[[Path], object], str]] = {
    "other bytes": (_bytes_of_another_kind, "features has 64 bytes a region.*fp16, fp32, fp64.*--file-dtype"),
    "boxes in thousandths": (_in_thousandths, "row 1: picture .* box 1 .* is not in the picture"),
    "boxes of nine numbers": (
        lambda path: path.write_text(
            "\t".join(["p", "40", "50", "1", *(base64.b64encode(np.ones(n, "<f4").tobytes()).decode() for n in (9, 4))])
            + "\n"
        ),
        "f.tsv: boxes has 36 bytes a region; known are 4 to 7 numbers",
    ),
    "three fields": (lambda path: path.write_text("p\t3\tAAAA\n"), r"row 1: 3 fields.*10: img_id.*6: img_id, img_w"),
    "a header without boxes": (
        lambda path: path.write_text("image_id\timage_w\timage_h\tnum_boxes\tfeatures\nx\t1\t1\t1\tAAAA\n"),
        "row 1: the names of the fields lack boxes",
    ),
    "no width and height": (
        lambda path: _write(path, _pictures(), ("img_id", "num_boxes", "boxes", "features")), "row 1: 4 fields",
    ),
    "an area that is none": (
        _spoil_area,
        "not width, height or area",
    ),
}  # fmt: skip


@pytest.mark.parametrize("case", REFUSED)
def test_what_cannot_be_told_is_refused_by_name(tmp_path: Path, case: str) -> None:
    write, message = REFUSED[case]
    write(tmp_path / "f.tsv")
    with pytest.raises(DataError, match=message):
        _imported(tmp_path / "f.tsv")


def test_the_files_of_lxmert_are_read_as_before(tmp_path: Path) -> None:
    (tmp_path / "f.tsv").write_bytes(b"".join(map(encode, _pictures())))
    assert infer_layout(tmp_path / "f.tsv") == TsvLayout()
