"""Infer the layout of a feature file from the first rows: fields, counts, lengths and ranges.

No published file describes itself. Each program that writes one has its own order of fields, types and boxes, and a
wrong reading often gives numbers of the right shape. So every known reading is tried, and one is taken only where the
rows leave no other.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from itertools import islice, product
from pathlib import Path
from typing import Literal, NamedTuple, get_args

import numpy as np

from capt.pretrain.base.errors import DataError
from capt.pretrain.base.files import open_regular
from capt.pretrain.regions.picture import TOLERANCE
from capt.pretrain.regions.tsv import (
    FIELDS,
    LABELS,
    LONGEST_ROW,
    LXMERT,
    Boxes,
    TsvLayout,
    decoded,
    decoded_length,
    edges_of,
    is_python_bytes,
    parse_row,
    split_row,
)

FileType = Literal["fp16", "fp32", "fp64"]

_ROWS, _BYTES = 64, 32 << 20
"""Rows and bytes of a file that are inspected."""
_MOST_VALUES = 1 << 18
"""Features of a row that are inspected."""
_KNOWN = (
    LXMERT,
    TsvLayout(
        title="bottom-up attention's files", fields=["img_id", "img_w", "img_h", "num_boxes", "boxes", "features"]
    ),
    TsvLayout(
        title="ViLBERT's files", fields=["img_id", "img_w", "img_h", "num_boxes", "boxes", "features", "cls_prob"]
    ),
    TsvLayout(
        title="files of bottom-up attention with classes",
        fields=[
            *("img_id", "img_w", "img_h", "num_boxes", "boxes"),
            *("objects_conf", "attrs_conf", "objects_id", "attrs_id", "features"),
        ],
    ),
)  # fmt: skip
_NAMES = {
    **{name: name for name in FIELDS},
    **{"image_id": "img_id", "image_h": "img_h", "image_w": "img_w", "height": "img_h", "width": "img_w"},
    **{"cls_idx": "objects_id", "cls_prob": "objects_conf", "attr_idx": "attrs_id", "attr_prob": "attrs_conf"},
    **{"num_box": "num_boxes", "bbox": "boxes"},
}
"""Names in the first line of a file, and what they are called here."""
_FEATURES: dict[FileType, str] = {"fp16": "<f2", "fp32": "<f4", "fp64": "<f8"}
_FLOATS, _INTEGERS = {2: "<f2", 4: "<f4", 8: "<f8"}, {2: "<i2", 4: "<i4", 8: "<i8"}
_SPREAD, _FINITE, _ENOUGH = 6.0, 0.5, 16
"""A type is believed up to this deviation of the binary logarithms of features (a normal distribution has 1.6, bytes of
another type have 9 and more) and from this share of finite rows on; one other than fp32, from this many features on."""


class _Sample(NamedTuple):
    """A row whose fields have the form of a layout's: sizes are numbers, arrays base64 of whole items a region."""

    width: int
    height: int
    regions: int
    texts: dict[str, bytes]
    bytes: dict[str, int]


def infer_layout(path: Path, feature_type: FileType | None = None) -> TsvLayout:
    """Infer the layout of a file.

    Args:
        path: of the file.
        feature_type: of its features; None = inferred from their magnitudes.

    Raises:
        DataError: no known layout fits the rows, or several do.
    """
    lines = _first_lines(path)
    # Names in the first line decide which field is which; else every known order is tried.
    header = _header(lines[0])
    if header is not None:
        lines = lines[1:]
        missing = [name for name in ("img_id", "img_h", "img_w", "num_boxes", "boxes", "features")
                   if name not in header.fields]  # fmt: skip
        if missing or not lines:
            raise DataError(f"{path}, row 1: the names of the fields lack {missing[0] if missing else 'any row'}")
    rows = [split_row(line) for line in lines]
    candidates = [header] if header is not None else list(_KNOWN)
    found = [(layout, _samples(rows, layout)) for layout in candidates]
    # The order that the most rows fit.
    layout, samples = max(found, key=lambda one: len(one[1]))
    layout = layout.model_copy(update={"python_bytes": any(map(is_python_bytes, lines[0].strip().split(b"\t")))})
    # No row fits: say what is wrong with the first one, by the order with its number of fields.
    if not samples:
        if len(rows[0]) not in {len(known.fields) for known in candidates}:
            raise DataError(
                f"{path}, row 1: {_count(rows[0])}; known are "
                + "; ".join(f"{len(known.fields)}: {', '.join(known.fields)} ({known.title})" for known in candidates)
            )
        layout = next(known for known in candidates if len(known.fields) == len(rows[0]))
        try:
            parse_row(lines[0], layout)
        except DataError as problem:
            raise DataError(f"{path}, row 1: {problem}") from None
        return layout
    try:
        # Boxes first: they decide which of two fields is the width, which everything else depends on.
        with np.errstate(all="ignore"):  # bytes of another type may overflow as numbers
            layout = _with_boxes(layout, samples)
            layout = _with_labels(layout, samples)
            return _with_features(layout, samples, feature_type)
    except DataError as problem:
        raise DataError(f"{path}: {problem}") from None


def _first_lines(path: Path) -> list[bytes]:
    with open_regular(path) as file:
        lines, left = [], _BYTES
        for line in islice(iter(lambda: file.readline(LONGEST_ROW + 1), b""), _ROWS):
            lines.append(line)
            left -= len(line)
            if left < 0:
                break
    if not lines:
        raise DataError(f"{path}: the file is empty")
    return lines


def _header(line: bytes) -> TsvLayout | None:
    names = [field.decode(errors="replace").strip().lower() for field in split_row(line)]
    # Four known names: a row of values has none.
    if sum(name in _NAMES for name in names) < 4:
        return None
    # one that is not the picture's classes: probabilities of all of them have no classes beside them
    known = [_NAMES.get(name, name) for name in names]
    has = set(known)
    fields = [
        name if name not in LABELS or f"{name.split('_')[0]}_id" in has else raw
        for name, raw in zip(known, names, strict=True)
    ]
    return TsvLayout(title="the first line", fields=fields, header=True)


def _count(fields: Sequence[bytes]) -> str:
    return f"{len(fields)} field{'' if len(fields) == 1 else 's'} separated by tabs, and no known file has that number"


def _samples(rows: Sequence[Sequence[bytes]], layout: TsvLayout) -> list[_Sample]:
    return [sample for row in rows if (sample := _sample(row, layout)) is not None]


def _sample(row: Sequence[bytes], layout: TsvLayout) -> _Sample | None:
    if len(row) != len(layout.fields):
        return None
    texts = dict(zip(layout.fields, row, strict=True))
    numbers = [texts[name] for name in ("img_w", "img_h", "num_boxes")]
    if not all(text.isdigit() and 0 < len(text) < 10 and int(text) for text in numbers):
        return None
    width, height, regions = map(int, numbers)
    arrays = {name: texts[name] for name in (*LABELS, "boxes", "features") if name in texts}
    try:
        lengths = {name: decoded_length(text, name) for name, text in arrays.items()}
    except DataError:
        return None
    if any(length % regions for length in lengths.values()) or not lengths["boxes"] or not lengths["features"]:
        return None
    return _Sample(width, height, regions, arrays, {name: length // regions for name, length in lengths.items()})


def _most_frequent(samples: Sequence[_Sample], name: str) -> tuple[int, list[_Sample]]:
    """Return the usual number of bytes of a region in an array, and the samples that have it."""
    # Rows whose arrays are cut short must not decide.
    usual = Counter(sample.bytes[name] for sample in samples).most_common(1)[0][0]
    return usual, [sample for sample in samples if sample.bytes[name] == usual]


def _with_boxes(layout: TsvLayout, samples: Sequence[_Sample]) -> TsvLayout:
    """Add the type, form and unit of boxes, and the order of width and height, that fit the most rows.

    Where several readings fit the same number of rows, that of the usual files is taken. Boxes that all end within
    the first pixel are parts of the picture.

    Raises:
        DataError: boxes have another length than known ones.
    """
    usual, samples = _most_frequent(samples, "boxes")
    readings = list(_readings(layout, usual))
    if not readings:
        raise DataError(
            f"boxes has {usual} bytes a region; known are 4 to 7 numbers of 2, 4 or 8 bytes: the edges, then width, "
            "height, area"
        )
    fits = [sum(_fits(sample, reading, layout) for sample in samples) for reading in readings]
    if not max(fits):
        return readings[0]  # the pass over all rows names the first box that is wrong
    fitting = [reading for reading, count in zip(readings, fits, strict=True) if count == max(fits)]
    # Parts of the picture fit as pixels too, all in the first pixel: they are believed before these.
    return next((reading for reading in fitting if reading.normalised), fitting[0])


def _readings(layout: TsvLayout, usual: int) -> Iterator[TsvLayout]:
    """Yield the possible meanings of boxes of this number of bytes, that of the usual files first."""
    types = [
        (usual // size, kinds[size])
        for kinds, size in product((_FLOATS, _INTEGERS), (4, 2, 8))
        if usual % size == 0 and 4 <= usual // size <= 7
    ]
    forms: tuple[Boxes, ...] = get_args(Boxes)
    orders = [layout.fields] if layout.header else [layout.fields, _exchanged(layout.fields)]
    for normalised, form, fields in product((False, True), forms, orders):
        for columns, dtype in types:
            if normalised and (fields is not layout.fields or dtype in _INTEGERS.values()):
                continue  # parts of width and height say nothing of which is which
            types_ = layout.types | {"boxes": dtype}
            update = {"types": types_, "columns": columns, "boxes": form, "normalised": normalised, "fields": fields}
            yield layout.model_copy(update=update)


def _exchanged(fields: Sequence[str]) -> list[str]:
    """Return the fields with width and height in the other order."""
    other = {"img_w": "img_h", "img_h": "img_w"}
    return [other.get(field, field) for field in fields]


def _fits(sample: _Sample, reading: TsvLayout, layout: TsvLayout) -> bool:
    """Return whether a reading gives boxes that lie in their picture, of which one has an area."""
    width, height = sample.width, sample.height
    if reading.fields != layout.fields:
        width, height = height, width
    try:
        values = decoded(sample.texts["boxes"], "boxes", reading.types["boxes"]).reshape(sample.regions, -1)
        if not np.isfinite(values).all() or (reading.normalised and np.abs(values[:, :4]).max() > 1 + TOLERANCE):
            return False
        # The same check as for any picture: edges within it, in order.
        boxes = edges_of(values, width, height, reading).astype(np.float64)
    except DataError:
        return False
    edges = boxes / [width, height, width, height]
    inside = (edges >= -TOLERANCE) & (edges <= 1 + TOLERANCE)
    lengths = boxes[:, 2:] - boxes[:, :2]
    return bool(inside.all() and (lengths >= 0).all() and (lengths > 0).all(axis=1).any())


def _with_labels(layout: TsvLayout, samples: Sequence[_Sample]) -> TsvLayout:
    """Add the types of classes and scores; the pass over all rows names a value that fits none."""
    types = dict(layout.types)
    for name in LABELS:
        if name not in layout.fields:
            continue
        usual, alike = _most_frequent(samples, name)
        kinds = (_INTEGERS, _FLOATS) if name.endswith("_id") else (_FLOATS,)
        # Classes are numbers of a list, scores from 0 to 1.
        most = 1 << 20 if name.endswith("_id") else 1 + TOLERANCE
        for dtype in (kind[usual] for kind in kinds if usual in kind):
            try:
                values = np.concatenate([decoded(sample.texts[name], name, dtype) for sample in alike])
            except DataError:
                continue
            whole = not name.endswith("_id") or (np.isfinite(values).all() and (values == np.rint(values)).all())
            if whole and (values >= -TOLERANCE).all() and (values <= most).all():
                types[name] = dtype
                break
    return layout.model_copy(update={"types": types})


def _with_features(layout: TsvLayout, samples: Sequence[_Sample], given: FileType | None) -> TsvLayout:
    """Add the type of features.

    Bytes that are read as another type than they are give numbers of all magnitudes, so a type is believed by how much
    the magnitudes of its numbers differ. The usual type, fp32, is taken unless it is not believed, or another differs
    much less.

    Raises:
        DataError: no type is believed.
    """
    if given is None:
        usual, samples = _most_frequent(samples, "features")
        spreads = {
            kind: _spread(samples, dtype)
            for kind, dtype in _FEATURES.items()
            if usual % np.dtype(dtype).itemsize == 0
        }  # fmt: skip
        believed = {kind: spread for kind, spread in spreads.items() if spread <= _SPREAD}
        if not believed:
            raise DataError(
                f"features has {usual} bytes a region, and read as {', '.join(_FEATURES)} they are no features (their "
                "magnitudes differ as those of other bytes do); if they are right, name their type: --file-dtype"
            )
        # Fp32 is usual: another type must fit far better to be taken.
        least = min(believed, key=believed.__getitem__)
        believed_usual = believed.get("fp32", np.inf)
        given = least if believed_usual > 3 * believed[least] + 1 else "fp32"
    return layout.model_copy(update={"types": layout.types | {"features": _FEATURES[given]}})


def _spread(samples: Sequence[_Sample], dtype: str) -> float:
    """Return the deviation of the binary logarithms of features read as ``dtype``; infinite where that cannot be.

    Numbers of a wider type whose lower halves are 0 would be every other number 0.
    """
    parts = []
    for sample in samples:
        try:
            parts.append(decoded(sample.texts["features"], "features", dtype)[:_MOST_VALUES].astype(np.float64))
        except DataError:
            continue
    finite = [part for part in parts if np.isfinite(part).all()]
    if len(finite) < max(1, _FINITE * len(parts)):
        return np.inf
    values = np.concatenate(finite)
    # Every other number 0: halves of a wider type whose lower bits are empty.
    if len(values) >= _ENOUGH and all(not part[0::2].any() for part in finite) and values.any():
        return np.inf
    magnitudes = np.abs(values[values != 0])
    if dtype != _FEATURES["fp32"] and len(magnitudes) < _ENOUGH:
        return np.inf
    if not len(magnitudes):
        return 0.0
    return float(np.log2(magnitudes).std())
