"""The region store: region features of many pictures in memory-mapped files that all processes of a host share."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import nullcontext
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from jaxtyping import Bool, Float, Float32, Int64

from capt.pretrain.base.arrays import map_array
from capt.pretrain.base.cache import default_cache
from capt.pretrain.base.errors import DataError, counted, shown
from capt.pretrain.base.verification import Verifier
from capt.pretrain.regions.manifest import StoreManifest, fetched, read_manifest
from capt.pretrain.regions.picture import ENDINGS, TOLERANCE, Labels, Picture, are_one, other_forms, tails_of

Rows = Int64[np.ndarray, " n"]
_REMEDY = "; import the store again"


class Regions(NamedTuple):
    """The regions of ``n`` pictures, filled up to the picture with the most of them (``R``).

    Attributes:
        features: zeros where there is no region.
        boxes: left, top, right and bottom edge divided by the picture's width and height.
        present: True where there is a region.
        object_ids: 0 where there is no region; None in a store without object labels.
        object_scores: 0 where there is no region.
        attribute_ids: as for objects.
        attribute_scores: as for objects.
    """

    features: Float[np.ndarray, "n R size"]
    boxes: Float32[np.ndarray, "n R 4"]
    present: Bool[np.ndarray, "n R"]
    object_ids: Int64[np.ndarray, "n R"] | None
    object_scores: Float32[np.ndarray, "n R"] | None
    attribute_ids: Int64[np.ndarray, "n R"] | None
    attribute_scores: Float32[np.ndarray, "n R"] | None


_ENDINGS = (*ENDINGS, *(ending.upper() for ending in ENDINGS))


class RegionStore:
    """A store that is open for reading. Files are mapped, so that opening costs nothing and processes share memory.

    Picture ``i`` has the regions ``offsets[i]`` to ``offsets[i + 1] - 1`` of all arrays of regions. Names of pictures
    are sorted, so that one is found without a table in memory. Sending a store to another process sends its folder.
    """

    def __init__(self, folder: Path, manifest: StoreManifest) -> None:
        self.folder, self.manifest = folder, manifest
        arrays = {
            name: map_array(folder / f"{name}.npy", layout, _REMEDY) for name, layout in manifest.arrays().items()
        }
        self._offsets = arrays["offsets"]  # int64 [N + 1]
        self._sizes = arrays["sizes"]  # int32 [N, 2]: width, height
        self._names = arrays["names"]  # bytes [N], UTF-8, sorted
        self._name_rows = arrays["name_rows"]  # int64 [N]: the picture that names[i] names
        self._features = arrays["features"]  # fp16 or fp32 [regions, size]
        self._boxes = arrays["boxes"]  # fp32 [regions, 4], pixels
        self._labels = {
            what: (arrays[f"{what}_ids"], arrays[f"{what}_scores"], classes)  # int32, fp32 [regions]
            for what, classes in (("object", manifest.object_classes), ("attribute", manifest.attribute_classes))
            if classes
        }
        self._check()

    @classmethod
    def open(
        cls, folder: Path | str, verifier: Verifier | None = None, *, verify: bool = True, cache: Path | None = None
    ) -> RegionStore:
        """Open the store in ``folder``; lengths and all that leads from a name to its regions are always checked.

        That at an address (``s3://...``) is copied into ``cache`` first (`fetched`). ``verifier`` compares every file's
        SHA-256 as well, all its ranks together. Without one, or with
        ``verify=False``, what the files hold is taken as it is.

        Raises:
            DataError: there is no store, or it does not fit its manifest.
        """
        with verifier.ranks.synchronize_errors() if verifier is not None else nullcontext():
            # All ranks ask for the copy, and one of each host makes it.
            if isinstance(folder, str):
                folder = fetched(folder, cache or default_cache())
            store = cls(folder, read_manifest(folder))
        if verifier is not None and verify:
            verifier.verify(folder, store.manifest.records(), hint=_REMEDY)
        return store

    def __reduce__(self) -> tuple[Callable[[Path], RegionStore], tuple[Path]]:
        return RegionStore.open, (self.folder,)

    def __len__(self) -> int:
        return self.manifest.pictures

    def find(self, names: Sequence[str]) -> Rows:
        """The row of each picture, -1 for one that the store does not hold.

        A picture of COCO is found by its number as well as by its name with the subset
        (`capt.pretrain.regions.picture`).

        A name may have an ending and folders that the store lacks (`capt.pretrain.regions.picture`): of ``a/1.jpg`` the
        store may have ``a/1`` or, where it has no ``a/1``, ``1``.

        Raises:
            DataError: a number is that of pictures of two subsets, or two names with other folders are one picture of
                the store.
        """
        rows = self._find([name.encode(errors="surrogatepass") for name in names])
        # Only names that are absent: a store that has a picture by that very name has priority.
        for find in (self._find_tails, self._find_other_forms):
            if (absent := np.flatnonzero(rows < 0)).size:
                rows[absent] = find([names[place] for place in absent.tolist()])
        self._require_one_each(names, rows)
        return rows

    def rows(self, names: Sequence[str], source: str = "data") -> Rows:
        """The row of each picture. Raises ``DataError`` that counts and names the first of those that are absent."""
        rows = self.find(names)
        if (rows < 0).any():
            absent = list(dict.fromkeys(name for name, row in zip(names, rows, strict=True) if row < 0))
            raise DataError(
                f"{source}: {counted(len(absent), 'picture')} not in the region store {self.folder}: "
                f"{', '.join(shown(name) for name in absent[:3])}{', ...' if len(absent) > 3 else ''}; "
                "capt regions import makes a store that holds them"
            )
        return rows

    def names(self, start: int = 0, stop: int | None = None) -> list[str]:
        """Names of pictures in sorted order."""
        return [name.decode(errors="replace") for name in self._names[start:stop].tolist()]

    def counts(self, rows: Rows) -> Rows:
        """The number of regions of each picture."""
        counts: Rows = self._offsets[rows + 1] - self._offsets[rows]
        return counts

    def sizes(self, rows: Rows) -> Int64[np.ndarray, "n 2"]:
        """Width and height of each picture in pixels."""
        sizes: np.ndarray = self._sizes[rows].astype(np.int64)
        return sizes

    def regions(self, rows: Rows, most: int | None = None) -> Regions:
        """The regions of the pictures ``rows``, filled up to ``most`` (None = the largest number in one of them).

        Raises:
            DataError: a box or a class of the store is not valid.
        """
        starts, counts = self._offsets[rows], self.counts(rows)
        most = int(counts.max(initial=1)) if most is None else most

        def filled(values: np.ndarray, dtype: Any = None) -> Any:
            # a picture's regions are together: copying them whole is several times faster than indexing rows
            out = np.zeros((len(rows), most, *values.shape[1:]), dtype=dtype or values.dtype)
            for to, start, count in zip(out, starts.tolist(), counts.tolist(), strict=True):
                to[:count] = values[start : start + count]
            return out

        boxes = filled(self._boxes)
        with np.errstate(all="ignore"):  # what comes of a damaged box is refused in the next line
            boxes /= np.tile(self._sizes[rows].astype(np.float32), 2)[:, None]
        self._require(rows, (boxes >= -TOLERANCE) & (boxes <= 1 + TOLERANCE), "boxes that are not in the picture")
        labels: list[Any] = []
        for what in ("object", "attribute"):
            if what not in self._labels:
                labels += [None, None]
                continue
            ids, scores, classes = self._labels[what]
            labels += [filled(ids, np.int64), filled(scores)]
            self._require(rows, (labels[-2] >= 0) & (labels[-2] < classes), f"{what} classes over {classes - 1}")
        return Regions(filled(self._features), boxes, np.arange(most) < counts[:, None], *labels)

    def picture(self, name: str) -> Picture:
        """A picture as it was written. Raises ``DataError`` for one that the store does not hold."""
        (row,) = self.rows([name])
        part = slice(*self._offsets[row : row + 2].tolist())
        width, height = self._sizes[row].tolist()
        labels = {what: Labels(ids[part], scores[part]) for what, (ids, scores, _) in self._labels.items()}
        return Picture(
            name, width, height, self._features[part], self._boxes[part], labels.get("object"), labels.get("attribute")
        )

    def places(self, rows: Rows, parts: Float[np.ndarray, " n"]) -> Rows:
        """A region of each picture, by its number among all regions of the store.

        Args:
            rows: the pictures.
            parts: which region of each, as a part of their number: at least 0 and below 1.
        """
        counts = self.counts(rows)
        places: Rows = self._offsets[rows] + np.minimum((parts * counts).astype(np.int64), counts - 1)
        return places

    def features_at(self, places: Int64[np.ndarray, " k"]) -> Float[np.ndarray, "k size"]:
        """The features of regions by their number among all regions of the store."""
        taken: np.ndarray = self._features[places]
        return taken

    def _find(self, encoded: Sequence[bytes]) -> Rows:
        width = self._names.dtype.itemsize  # of the same type, or searchsorted would copy all names
        # A name that does not fit would be cut, and might then equal another one.
        fitting = [name if len(name) <= width and b"\0" not in name else b"" for name in encoded]
        wanted = np.array(fitting, dtype=self._names.dtype)
        places = np.minimum(np.searchsorted(self._names, wanted), len(self) - 1)
        rows: Rows = np.where(self._names[places] == wanted, self._name_rows[places], -1)
        return rows

    def _find_tails(self, names: Sequence[str]) -> Rows:
        """The row of the longest part of each name that the store has, with an ending or without; -1 for none."""
        forms = {
            name: [[tail, *(f"{tail}{ending}" for ending in _ENDINGS)] for tail in tails_of(name)]
            for name in dict.fromkeys(names)
        }
        every = [form.encode(errors="surrogatepass") for tails in forms.values() for tail in tails for form in tail]
        rows = iter(self._find(every).tolist())
        places = {}
        for name, tails in forms.items():
            found = [[row for _ in tail if (row := next(rows)) >= 0] for tail in tails]
            places[name] = next((each[0] for each in found if each), -1)
        return np.array([places[name] for name in names], dtype=np.int64)

    def _require_one_each(self, names: Sequence[str], rows: Rows) -> None:
        """Refuse names that differ in their folders and are one picture here."""
        named: dict[int, str] = {}
        pairs = zip(names, rows.tolist(), strict=True)
        for name, row in dict.fromkeys((name, row) for name, row in pairs if row >= 0 and "/" in name):
            first = named.setdefault(row, name)
            if not are_one(first, name):
                raise DataError(
                    f"{self.folder}: {shown(first)} and {shown(name)} are both its picture "
                    f"{shown(tails_of(name)[-1])}: make the store with --names path, or give each picture a name of "
                    "its own, here and in the data"
                )

    def _find_other_forms(self, names: Sequence[str]) -> Rows:
        """The row of each name in the other form, -1 for none. All together: millions of sentences may need it."""
        # Bytes that follow the digits and `_` in ASCII, so that all names of the form lie between.
        numbers, coco = self._has_names_between(b"0", b":"), self._has_names_between(b"COCO_", b"COCO`")
        known = {name: other_forms(tails_of(name)[-1], numbers=numbers, coco=coco) for name in dict.fromkeys(names)}
        rows = iter(self._find([form.encode() for forms in known.values() for form in forms]).tolist())
        places = dict.fromkeys(known, -1)
        for name, forms in known.items():
            found = [(form, row) for form in forms if (row := next(rows)) >= 0]
            if len(found) > 1:
                raise DataError(
                    f"{self.folder}: picture {name} may be {found[0][0]} or {found[1][0]}: the data must say which"
                )
            if found:
                places[name] = found[0][1]
        return np.array([places[name] for name in names], dtype=np.int64)

    def _has_names_between(self, start: bytes, stop: bytes) -> bool:
        places = np.searchsorted(self._names, np.array([start, stop], dtype=self._names.dtype))
        return bool(places[0] < places[1])

    def _check(self) -> None:
        """Check the arrays that lead from a name to regions, so that no reader leaves them."""
        counts = np.diff(self._offsets)
        faults = {
            "offsets": self._offsets[0] != 0
            or self._offsets[-1] != self.manifest.regions
            or counts.min() < 1
            or counts.max() != self.manifest.most_regions,
            "sizes": self._sizes.min() < 1,
            # Strictly ascending: sorted, and none twice.
            "names": not self._names[0] or not (self._names[1:] > self._names[:-1]).all(),
            "name_rows": self._name_rows.min() < 0 or self._name_rows.max() >= len(self),
        }
        for name, wrong in faults.items():
            if wrong:
                raise DataError(f"{self.folder / name}.npy: damaged: its values do not fit the store{_REMEDY}")

    def _require(self, rows: Rows, good: np.ndarray, what: str) -> None:
        if not good.all():
            row = rows[np.argmin(good.reshape(len(rows), -1).all(axis=1))]
            name = self._names[np.flatnonzero(self._name_rows == row)[:1]].tolist()
            raise DataError(
                f"{self.folder}: picture {shown(name[0].decode(errors='replace') if name else row)} has {what}{_REMEDY}"
            )
