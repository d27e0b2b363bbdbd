"""Find pictures: in folders, as files, and in tar archives, sorted by their names."""

from __future__ import annotations

import logging
import os
import stat
import tarfile
from collections.abc import Iterator, Sequence
from itertools import pairwise
from pathlib import Path, PurePosixPath
from typing import NamedTuple

from capt.pretrain.base.errors import DataError, counted
from capt.pretrain.base.files import open_regular, printable
from capt.pretrain.regions.picture import ENDINGS, Damage, check_name, picture_name

logger = logging.getLogger(__name__)

MOST_BYTES = 256 << 20
"""Bytes of the largest file that is read as a picture."""


class Found(NamedTuple):
    """The place of a picture: a file, or ``size`` bytes of an archive from ``offset`` on."""

    name: str
    where: str
    place: str
    path: Path
    offset: int = 0
    size: int | None = None


def find_pictures(places: Sequence[Path], names: str, damage: Damage) -> list[Found]:
    """The pictures of folders (with those below), files and ``.tar`` archives, sorted by name.

    Args:
        places: folders, files and archives.
        names: ``stem`` = a picture is called by its file's name without the ending; ``path`` = with the folders below
            the given one.
        damage: is told of links, FIFOs and devices.

    Raises:
        DataError: nothing is found, a place is missing, two pictures have the same name, or an archive is damaged.
    """
    found: list[Found] = []
    others: list[str] = []
    for place in places:
        if place.is_dir():
            found += _in_folder(place, names, damage, others)
        elif place.suffix.lower() == ".tar":
            found += _in_archive(place, names, damage, others)
        elif place.name.lower().endswith((".tar.gz", ".tgz", ".tar.bz2", ".tar.xz", ".zip")):
            raise DataError(
                f"{place}: archives are read in place, so compressed ones are not: unpack it, or make a .tar"
            )
        else:
            # Opened only to refuse what is no regular file.
            with open_regular(place):
                found.append(Found(_name(PurePosixPath(place), names), str(place), str(place), place))
    if others:
        logger.info(
            "%s without a picture's ending left out: %s%s",
            *(counted(len(others), "file"), ", ".join(others[:3]), ", ..." if len(others) > 3 else ""),
        )
    if not found:
        raise DataError(f"{', '.join(map(str, places))}: no pictures ({', '.join(ENDINGS)})")
    return _sorted(found, names)


def read_picture(found: Found) -> bytes:
    """The bytes of a picture's file. Raises ``DataError`` for an empty one and for one of more than `MOST_BYTES`."""
    size = MOST_BYTES if found.size is None else found.size
    if size > MOST_BYTES:
        raise DataError(f"over {MOST_BYTES:,} bytes, which is the most that is read of a picture")
    with open_regular(found.path) as file:
        file.seek(found.offset)
        # One byte more than the limit tells a file that is too large from one that just fits.
        content = file.read(size + (found.size is None))
    if len(content) > MOST_BYTES:
        raise DataError(f"over {MOST_BYTES:,} bytes, which is the most that is read of a picture")
    if not content:
        raise DataError("an empty file")
    if found.size is not None and len(content) < size:
        raise DataError(f"the archive ends after {len(content)} of its {size} bytes")
    return content


def _in_folder(folder: Path, names: str, damage: Damage, others: list[str]) -> Iterator[Found]:
    """Walk without following links. Folders and files whose names begin with a dot are left out."""
    # A stack of folders and not recursion: folders may be nested deeply.
    open_ = [folder]
    while open_:
        with os.scandir(open_.pop()) as entries:
            for entry in entries:
                path = Path(entry.path)
                picture = path.suffix.lower() in ENDINGS
                if entry.is_symlink() and (picture or path.is_dir()):
                    damage.report(path, "a link, which is not followed; give the place it leads to")
                elif entry.is_dir(follow_symlinks=False):
                    if not entry.name.startswith("."):
                        open_.append(path)
                elif not picture or entry.name.startswith("."):
                    others.append(str(path))
                elif not stat.S_ISREG(entry.stat(follow_symlinks=False).st_mode):
                    damage.report(path, "not a regular file")
                else:
                    yield Found(_name(PurePosixPath(path.relative_to(folder)), names), str(path), str(folder), path)


def _in_archive(archive: Path, names: str, damage: Damage, others: list[str]) -> Iterator[Found]:
    try:
        # `r:` refuses packed archives, whose members have no place in the file.
        with open_regular(archive) as file, tarfile.open(fileobj=file, mode="r:") as tar:
            for member in tar:
                path, where = PurePosixPath(member.name), f"{archive}: {member.name}"
                picture = path.suffix.lower() in ENDINGS
                if member.isdir():
                    continue
                if not picture or path.name.startswith("."):
                    others.append(where)
                elif not member.isreg() or member.issparse():
                    damage.report(where, "not a regular file")
                else:
                    yield Found(_name(path, names), where, str(archive), archive, member.offset_data, member.size)
                tar.members = []  # type: ignore[attr-defined]  # or it keeps them all
    except (tarfile.TarError, EOFError, ValueError, OverflowError) as error:
        if isinstance(error, DataError):
            raise
        raise DataError(f"{archive}: not a whole tar archive: {' '.join(str(error).split())}") from None


def _name(path: PurePosixPath, names: str) -> str:
    name = picture_name(path.name if names == "stem" else str(path))
    try:
        name.encode()
    except UnicodeEncodeError:
        raise DataError(f"{str(path)!a}: the name is not UTF-8 text; rename the file") from None
    try:
        check_name(name)
    except DataError as problem:
        raise DataError(f"{printable(str(path))}: {problem}; rename the file") from None
    return name


def _sorted(found: list[Found], names: str) -> list[Found]:
    found.sort(key=lambda picture: picture.name.encode())
    for one, other in pairwise(found):
        if one.name == other.name:
            remedy = "; --names path tells them apart by their folders" if names == "stem" else ""
            raise DataError(f"{one.where} and {other.where} are both called {one.name!r}{remedy}")
    return found
