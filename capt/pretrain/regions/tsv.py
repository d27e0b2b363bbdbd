"""Feature files of bottom-up attention and its descendants: one picture a line, tab-separated fields, arrays as base64.

LXMERT's files have the ten fields of ``FIELDS``: sizes are text in pixels, classes int64, the other arrays fp32; boxes
are left, top, right and bottom edge in pixels. Both fields of objects, or of attributes, may be empty in all rows: then
the file has no such labels. Other files differ in their fields, types and boxes, which a `TsvLayout` says
(`capt.pretrain.regions.tsv_layout` finds it).
"""

from __future__ import annotations

import base64
import binascii
from typing import Literal, NamedTuple

import numpy as np
from pydantic import Field

from capt.pretrain.base.errors import DataError, counted, shown
from capt.pretrain.base.records import Record
from capt.pretrain.regions.picture import Labels, Picture

FIELDS = (
    *("img_id", "img_h", "img_w", "objects_id", "objects_conf", "attrs_id", "attrs_conf"),
    *("num_boxes", "boxes", "features"),
)
LABELS = ("objects_id", "objects_conf", "attrs_id", "attrs_conf")
LONGEST_ROW = 64 << 20
"""Bytes of a row: 36 regions of 2,048 features have 400 KB, so this is room for some 6,000 regions."""
_DTYPES = {
    "objects_id": "<i8", "objects_conf": "<f4", "attrs_id": "<i8", "attrs_conf": "<f4", "boxes": "<f4",
    "features": "<f4",
}  # fmt: skip

_PYTHON_BYTES = "; fields written by Python 3 as b'...', which was taken off"

Boxes = Literal["corners", "size"]
"""Left, top, right and bottom edge; or left and top edge, width and height."""


class TsvLayout(Record):
    """The fields of a file's rows.

    Attributes:
        title: whose files have these fields.
        fields: in their order, by the names of ``FIELDS``; others are not read.
        header: whether the first line holds the names of the fields.
        types: numpy's type of each array.
        boxes: what the first four numbers of a box are.
        columns: numbers of a box; those after the fourth follow from the first four.
        normalised: whether boxes are parts of the picture's width and height instead of pixels.
        python_bytes: whether fields are written as Python 3 shows bytes, ``b'...'``.
    """

    title: str = "LXMERT's files"
    fields: list[str] = Field(default=list(FIELDS))
    header: bool = False
    types: dict[str, str] = Field(default=_DTYPES)
    boxes: Boxes = "corners"
    columns: int = 4
    normalised: bool = False
    python_bytes: bool = False

    def item_bytes(self, field: str) -> int:
        """Bytes of one value of an array."""
        return np.dtype(self.types[field]).itemsize

    def __str__(self) -> str:
        edges = "left, top, right, bottom" if self.boxes == "corners" else "left, top, width, height"
        more = f" and {self.columns - 4} more" if self.columns > 4 else ""
        unit = "in parts of the picture" if self.normalised else "in pixels"
        named = "named in the first line" if self.header else self.title
        types = {field: np.dtype(self.types[field]).name for field in ("features", "boxes")}
        return (
            f"{', '.join(self.fields)} ({named}); features {types['features']}; boxes {types['boxes']}, {edges}{more} "
            f"{unit}{_PYTHON_BYTES if self.python_bytes else ''}"
        )


LXMERT = TsvLayout()


class TsvRow(NamedTuple):
    """A row whose fields have the lengths that they should have; its arrays are still text.

    Attributes:
        name: of the picture.
        width: in pixels.
        height: in pixels.
        regions: how many.
        size: features of a region.
        texts: the fields of arrays by name; empty for labels that the file has not.
        layout: of the file.
    """

    name: str
    width: int
    height: int
    regions: int
    size: int
    texts: dict[str, bytes]
    layout: TsvLayout

    @property
    def labels(self) -> tuple[bool, bool]:
        """Presence of classes of objects, and of attributes."""
        return bool(self.texts["objects_id"]), bool(self.texts["attrs_id"])


def split_row(line: bytes) -> list[bytes]:
    """The fields of a line. What Python 3 writes around bytes, ``b'...'``, is not part of a field."""
    return [
        field[2:-1].replace(b"\\n", b"") if is_python_bytes(field) else field
        for field in line.rstrip(b"\r\n").split(b"\t")
    ]


def is_python_bytes(field: bytes) -> bool:
    """Return whether a field is written as Python 3 shows bytes."""
    return len(field) > 2 and field[:2] in (b"b'", b'b"') and field[-1:] == field[1:2]


def parse_row(line: bytes, layout: TsvLayout = LXMERT) -> TsvRow:
    """A line of the file, without decoding its arrays.

    Raises:
        DataError: it has other than the layout's fields; a name, size or number of boxes that is none; or an array
            whose length does not fit the number of boxes, as that of a truncated row. The message does not name the
            file.
    """
    fields = split_row(line)
    if len(fields) != len(layout.fields):
        found, short = counted(len(fields), "field"), len(fields) < len(layout.fields)
        what = "the row is truncated, or not of such a file" if short else "a tab, or the next row, got into it"
        raise DataError(f"{found}, not the {len(layout.fields)} of {layout.title} ({', '.join(layout.fields)}): {what}")
    # Fields of labels that the file lacks are empty, as in files whose labels are.
    texts = dict.fromkeys(LABELS, b"") | dict(zip(layout.fields, fields, strict=True))
    try:
        name = texts["img_id"].decode()
    except UnicodeDecodeError:
        raise DataError("img_id is not UTF-8 text") from None
    height, width, regions = (_number(texts[field], field) for field in ("img_h", "img_w", "num_boxes"))
    texts = {field: texts[field] for field in (*LABELS, "boxes", "features")}
    # Lengths are compared before anything is decoded: a damaged row costs no memory.
    lengths = {field: decoded_length(text, field) for field, text in texts.items()}
    expected = {"boxes": layout.columns * layout.item_bytes("boxes") * regions}
    for labels in ("objects", "attrs"):
        pair = [field for field in (f"{labels}_id", f"{labels}_conf") if field in layout.fields]
        # Labels may be empty in a whole file, but not one field of a pair alone.
        if any(texts[field] for field in pair):
            expected |= {field: layout.item_bytes(field) * regions for field in pair}
    for field, length in expected.items():
        if lengths[field] != length:
            raise DataError(f"{field} has {lengths[field]} bytes; num_boxes is {regions}, so it must have {length}")
    item = layout.item_bytes("features")
    size, rest = divmod(lengths["features"], item * regions)
    if rest or not size:
        raise DataError(
            f"features has {lengths['features']} bytes, no multiple of {regions} x {item}: the row is truncated, or "
            "num_boxes is wrong"
        )
    return TsvRow(name, width, height, regions, size, texts, layout)


def decode(row: TsvRow) -> Picture:
    """The picture of a row. Raises ``DataError`` for a field that is not base64, or boxes that are not as laid out."""
    layout = row.layout
    arrays = {field: decoded(text, field, layout.types[field]) for field, text in row.texts.items()}
    has_objects, has_attributes = row.labels
    return Picture(
        row.name,
        row.width,
        row.height,
        arrays["features"].reshape(row.regions, row.size),
        edges_of(arrays["boxes"].reshape(row.regions, layout.columns), row.width, row.height, layout),
        _labels(arrays, "objects") if has_objects else None,
        _labels(arrays, "attrs") if has_attributes else None,
    )


def edges_of(values: np.ndarray, width: int, height: int, layout: TsvLayout) -> np.ndarray:
    """Left, top, right and bottom edge of each box in pixels.

    Raises:
        DataError: the numbers after the fourth are not width, height or area of the box.
    """
    if layout == LXMERT or (layout.columns, layout.boxes, layout.normalised) == (4, "corners", False):
        return values if values.dtype == np.float32 else values.astype(np.float32)
    boxes = values[:, :4].astype(np.float64)
    # Width and height of the box, to which its left and top edge are added.
    if layout.boxes == "size":
        boxes[:, 2:] += boxes[:, :2]
    _check_more(values[:, 4:].astype(np.float64), boxes, width, height)
    if layout.normalised:
        boxes *= [width, height, width, height]
    return boxes.astype(np.float32)


def _check_more(more: np.ndarray, boxes: np.ndarray, width: int, height: int) -> None:
    """Require that the numbers after the edges are what other files have there: width, height, area, or two of them."""
    if not more.shape[1]:
        return
    sizes = boxes[:, 2:] - boxes[:, :2]
    area = sizes.prod(axis=1, keepdims=True)
    # One number is the area in pixels or in parts, two are width and height, three are all of these.
    expected = {1: [area, area / (width * height)], 2: [sizes], 3: [np.hstack([sizes, area])]}[more.shape[1]]
    if not any(np.allclose(more, truth, rtol=1e-2, atol=1e-2) for truth in expected):
        raise DataError("boxes: the numbers after the edges are not width, height or area of the box")


def _labels(arrays: dict[str, np.ndarray], what: str) -> Labels:
    ids, scores = arrays[f"{what}_id"].astype(np.int64, copy=False), arrays[f"{what}_conf"]
    # Classes without confidences are certain.
    return Labels(ids, scores.astype(np.float32, copy=False) if len(scores) else np.ones(len(ids), dtype=np.float32))


def _number(text: bytes, field: str) -> int:
    if not 0 < len(text) < 10 or not text.isdigit() or int(text) == 0:
        raise DataError(f"{field} is {shown(text.decode(errors='replace'))}, not a whole number from 1")
    return int(text)


def decoded_length(text: bytes, field: str) -> int:
    """Return the number of bytes that a base64 text represents. Raises ``DataError`` where it is cut."""
    if len(text) % 4:
        raise DataError(f"{field} is not a whole base64 text ({len(text):,} characters): the row is truncated")
    # Four characters represent three bytes; each `=` at the end one byte less.
    return len(text) // 4 * 3 - text[-2:].count(b"=")


def decoded(text: bytes, field: str, dtype: str) -> np.ndarray:
    """The values of a base64 text. Raises ``DataError`` where it is none."""
    try:
        return np.frombuffer(base64.b64decode(text, validate=True), dtype=dtype)
    except (binascii.Error, ValueError) as problem:
        raise DataError(f"{field} is not base64 ({problem})") from None
