"""Names of the classes of objects and attributes in a store."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from capt.pretrain.base.errors import DataError, counted
from capt.pretrain.base.files import read_lines
from capt.pretrain.regions.manifest import StoreManifest, StoreShape


@dataclass(frozen=True)
class ClassNames:
    """Names of object and attribute classes in the order of their numbers; None = the numbers themselves."""

    objects: list[str] | None = None
    attributes: list[str] | None = None

    @classmethod
    def of(cls, manifest: StoreManifest, objects: Path | None = None, attributes: Path | None = None) -> ClassNames:
        """Read names from files of one a line; without files, take those of the store or its detector.

        Raises:
            DataError: a file cannot be read, or there are fewer names than the store has classes.
        """
        known: tuple[list[str], list[str]] = (
            manifest.object_names or [str(name) for name in manifest.features_of.get("object_names") or ()],
            manifest.attribute_names,
        )
        names = cls(
            *(
                (default or None) if path is None else read_names(path)
                for path, default in zip((objects, attributes), known, strict=True)
            )
        )
        names.require(manifest, objects, attributes)
        return names

    def require(self, shape: StoreShape, *files: Path | None) -> None:
        """Raise ``DataError`` that names the file where it has fewer names than there are classes."""
        counts = (shape.object_classes, shape.attribute_classes)
        for names, count, file in zip((self.objects, self.attributes), counts, files, strict=True):
            if names is not None and len(names) < count:
                where = file or "the store's manifest.json"
                raise DataError(f"{where}: {counted(len(names), 'name')} for {count} classes; one a line is needed")


NUMBERS = ClassNames()
"""No names: classes are called by their numbers."""


def read_names(path: Path) -> list[str]:
    """Names of one a line; of several for a class (``headlight,headlights``), the first."""
    return [line.split(",")[0].strip() for line in read_lines([path])]
