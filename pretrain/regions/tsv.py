"""LXMERT's feature files: one picture a line, ten tab-separated fields, arrays as base64 of little-endian bytes.

The fields are those of ``FIELDS``. Sizes are text in pixels, classes int64, the other arrays fp32. Boxes are left, top,
right and bottom edge in pixels. Both fields of objects, or of attributes, may be empty in all rows: then the file has
no such labels.
"""

from __future__ import annotations

import base64
import binascii
from typing import NamedTuple

import numpy as np

from pretrain.base.errors import DataError, counted, shown
from pretrain.regions.picture import Labels, Picture

FIELDS = (
    *("img_id", "img_h", "img_w", "objects_id", "objects_conf", "attrs_id", "attrs_conf"),
    *("num_boxes", "boxes", "features"),
)
LONGEST_ROW = 64 << 20
"""Bytes of a row: 36 regions of 2,048 features have 400 KB, so this is room for some 6,000 regions."""
_DTYPES = {
    "objects_id": "<i8", "objects_conf": "<f4", "attrs_id": "<i8", "attrs_conf": "<f4", "boxes": "<f4",
    "features": "<f4",
}  # fmt: skip


class Row(NamedTuple):
    """A row whose fields have the lengths that they should have; its arrays are still text.

    Attributes:
        name: of the picture.
        width: in pixels.
        height: in pixels.
        regions: how many.
        size: features of a region.
        texts: the fields of arrays by name; empty for labels that the file has not.
    """

    name: str
    width: int
    height: int
    regions: int
    size: int
    texts: dict[str, bytes]

    @property
    def labels(self) -> tuple[bool, bool]:
        """Whether there are classes of objects, and of attributes."""
        return bool(self.texts["objects_id"]), bool(self.texts["attrs_id"])


def parse_row(line: bytes) -> Row:
    """A line of the file, without decoding its arrays.

    Raises:
        DataError: it has other than ten fields; a name, size or number of boxes that is none; or an array whose length
            does not fit the number of boxes, as that of a truncated row. The message does not name the file.
    """
    fields = line.rstrip(b"\r\n").split(b"\t")
    if len(fields) != len(FIELDS):
        found, short = counted(len(fields), "field"), len(fields) < len(FIELDS)
        what = "the row is truncated, or not of such a file" if short else "a tab, or the next row, got into it"
        raise DataError(f"{found}, not the {len(FIELDS)} of LXMERT's files ({', '.join(FIELDS)}): {what}")
    texts = dict(zip(FIELDS, fields, strict=True))
    try:
        name = texts.pop("img_id").decode()
    except UnicodeDecodeError:
        raise DataError("img_id is not UTF-8 text") from None
    height, width, regions = (_number(texts.pop(field), field) for field in ("img_h", "img_w", "num_boxes"))
    lengths = {field: _decoded_length(text, field) for field, text in texts.items()}
    expected = {"boxes": 16 * regions}
    for labels in ("objects", "attrs"):
        if texts[f"{labels}_id"] or texts[f"{labels}_conf"]:
            expected |= {f"{labels}_id": 8 * regions, f"{labels}_conf": 4 * regions}
    for field, length in expected.items():
        if lengths[field] != length:
            raise DataError(f"{field} has {lengths[field]} bytes; num_boxes is {regions}, so it must have {length}")
    size, rest = divmod(lengths["features"], 4 * regions)
    if rest or not size:
        raise DataError(
            f"features has {lengths['features']} bytes, no multiple of {regions} x 4: the row is truncated, or "
            "num_boxes is wrong"
        )
    return Row(name, width, height, regions, size, texts)


def decode(row: Row) -> Picture:
    """The picture of a row. Raises ``DataError`` for a field that is not base64."""
    arrays = {field: _decoded(text, field) for field, text in row.texts.items()}
    has_objects, has_attributes = row.labels
    return Picture(
        row.name,
        row.width,
        row.height,
        arrays["features"].reshape(row.regions, row.size),
        arrays["boxes"].reshape(row.regions, 4),
        Labels(arrays["objects_id"], arrays["objects_conf"]) if has_objects else None,
        Labels(arrays["attrs_id"], arrays["attrs_conf"]) if has_attributes else None,
    )


def encode(picture: Picture) -> bytes:
    """The picture as a line of a file: what `decode` gives back, features in fp32."""

    def text(values: np.ndarray | None, field: str) -> bytes:
        return b"" if values is None else base64.b64encode(np.ascontiguousarray(values, dtype=_DTYPES[field]).data)

    objects, attributes = (labels or (None, None) for labels in (picture.objects, picture.attributes))
    fields = [
        *(picture.id.encode(), str(picture.height).encode(), str(picture.width).encode()),
        *(text(objects[0], "objects_id"), text(objects[1], "objects_conf")),
        *(text(attributes[0], "attrs_id"), text(attributes[1], "attrs_conf")),
        *(str(len(picture.features)).encode(), text(picture.boxes, "boxes"), text(picture.features, "features")),
    ]
    return b"\t".join(fields) + b"\n"


def _number(text: bytes, field: str) -> int:
    if not 0 < len(text) < 10 or not text.isdigit() or int(text) == 0:
        raise DataError(f"{field} is {shown(text.decode(errors='replace'))}, not a whole number from 1")
    return int(text)


def _decoded_length(text: bytes, field: str) -> int:
    """How many bytes a base64 text stands for."""
    if len(text) % 4:
        raise DataError(f"{field} is no whole base64 text ({len(text):,} characters): the row is truncated")
    return len(text) // 4 * 3 - text[-2:].count(b"=")


def _decoded(text: bytes, field: str) -> np.ndarray:
    try:
        return np.frombuffer(base64.b64decode(text, validate=True), dtype=_DTYPES[field])
    except binascii.Error as problem:
        raise DataError(f"{field} is not base64 ({problem})") from None
