"""LXMERT's feature files: what a row says, and how a bad one is named."""

from __future__ import annotations

import base64
import csv
import sys
from pathlib import Path

import numpy as np
import pytest

from capt.pretrain.base.errors import DataError
from capt.pretrain.regions.picture import Labels, Picture
from capt.pretrain.regions.tsv import FIELDS, decode, parse_row
from tests.families.pictures.regions.pictures import encode, random_pictures


def _read_as_lxmert_does(path: Path) -> list[dict[str, object]]:
    """`load_obj_tsv` of airsplay/lxmert, src/utils.py, without its boxes' decoration."""
    csv.field_size_limit(sys.maxsize)
    rows = []
    with path.open() as file:
        for item in csv.DictReader(file, FIELDS, delimiter="\t"):
            row: dict[str, object] = {key: int(item[key]) for key in ("img_h", "img_w", "num_boxes")}
            row["img_id"] = item["img_id"]
            boxes = int(item["num_boxes"])
            for key, shape, dtype in (
                ("objects_id", (boxes,), np.int64), ("objects_conf", (boxes,), np.float32),
                ("attrs_id", (boxes,), np.int64), ("attrs_conf", (boxes,), np.float32),
                ("boxes", (boxes, 4), np.float32), ("features", (boxes, -1), np.float32),
            ):  # fmt: skip
                row[key] = np.frombuffer(base64.b64decode(item[key]), dtype=dtype).reshape(shape)
            rows.append(row)
    return rows


def test_rows_are_those_that_lxmert_reads(tmp_path: Path) -> None:
    pictures = list(random_pictures(8))
    path = tmp_path / "f.tsv"
    path.write_bytes(b"".join(encode(picture) for picture in pictures))
    for picture, row, line in zip(
        pictures, _read_as_lxmert_does(path), path.read_bytes().splitlines(keepends=True), strict=True
    ):
        ours = decode(parse_row(line))
        assert (ours.id, ours.width, ours.height) == (row["img_id"], row["img_w"], row["img_h"])
        assert (ours.id, ours.width, ours.height) == picture[:3]
        assert ours.objects is not None
        assert ours.attributes is not None
        for mine, theirs, truth in (
            (ours.features, row["features"], picture.features), (ours.boxes, row["boxes"], picture.boxes),
            (ours.objects.ids, row["objects_id"], (picture.objects or ours.objects).ids),
            (ours.attributes.scores, row["attrs_conf"], (picture.attributes or ours.attributes).scores),
        ):  # fmt: skip
            assert np.array_equal(mine, theirs)  # type: ignore[arg-type]
            assert np.array_equal(mine, truth)


def test_a_file_may_have_no_labels() -> None:
    picture = next(random_pictures(1, labels=False))
    assert decode(parse_row(encode(picture))).objects is None


def test_line_ends_of_csv_are_no_part_of_the_features() -> None:
    line = encode(next(random_pictures(1)))
    assert np.array_equal(decode(parse_row(line[:-1] + b"\r\n")).features, decode(parse_row(line)).features)


def _with(**change: bytes) -> bytes:
    n, certain = 3, np.ones(3, np.float32)
    picture = Picture(
        "p", 50, 40, np.ones((n, 5), np.float32), np.ones((n, 4), np.float32),
        Labels(np.arange(n), certain), Labels(np.arange(n), certain),
    )  # fmt: skip
    texts = dict(zip(FIELDS, encode(picture).rstrip(b"\n").split(b"\t"), strict=True))
    return b"\t".join({**texts, **change}.values())


@pytest.mark.parametrize(
    ("line", "message"),
    [
        (b"", "1 field, not the 10 of LXMERT's files"),
        (_with()[:100], "fields, not the 10"),
        (_with()[:-3], "features is not a whole base64 text .*truncated"),
        (_with()[:-4], "features has 57 bytes, no multiple of 3 x 4: the row is truncated"),
        (_with(features=b""), "features has 0 bytes"),
        (_with(num_boxes=b"4"), "boxes has 48 bytes; num_boxes is 4, so it must have 64"),
        (_with(num_boxes=b"0"), "num_boxes is '0'"),
        (_with(num_boxes=b"99999999999999999999"), "num_boxes is '9999"),
        (_with(img_h=b"-4"), "img_h is '-4', not a whole number"),
        (_with(img_w="\u0664".encode()), "img_w is"),
        (_with(img_id=b"\xff"), "img_id is not UTF-8"),
        (_with(objects_id=b""), "objects_id has 0 bytes; num_boxes is 3, so it must have 24"),
        (_with(attrs_conf=base64.b64encode(b"1" * 15)), "attrs_conf has 15 bytes"),
        (_with(features=b"!" * 80), "features is not base64"),
        (_with(features=b"AA==" * 20 + b"AAAA" * 6), "features is not base64|no multiple"),
        (_with(boxes=b"b'" + b"A" * 61 + b"'"), r"boxes is not a whole base64 text \(61 characters\)"),
    ],
)
def test_a_bad_row_is_named(line: bytes, message: str) -> None:
    with pytest.raises(DataError, match=message):
        decode(parse_row(line))
