"""A picture as a line of LXMERT's feature files."""

from __future__ import annotations

from base64 import b64encode

import numpy as np

from pretrain.regions.picture import Picture


def tsv_row(picture: Picture) -> str:
    """The ten fields of a picture with labels, with the end of the line.

    ``img_id, img_h, img_w, objects_id, objects_conf, attrs_id, attrs_conf, num_boxes, boxes, features``; arrays are
    base64 of little-endian int64 (classes) and float32.
    """
    assert picture.objects is not None
    assert picture.attributes is not None
    arrays = [
        (picture.objects.ids, "<i8"),
        (picture.objects.scores, "<f4"),
        (picture.attributes.ids, "<i8"),
        (picture.attributes.scores, "<f4"),
    ]
    labels = [_encoded(values, kind) for values, kind in arrays]
    fields = [picture.id, str(picture.height), str(picture.width), *labels, str(len(picture.boxes))]
    return "\t".join([*fields, _encoded(picture.boxes, "<f4"), _encoded(picture.features, "<f4")]) + "\n"


def _encoded(values: np.ndarray, kind: str) -> str:
    return b64encode(np.ascontiguousarray(values, dtype=kind).tobytes()).decode("ascii")
