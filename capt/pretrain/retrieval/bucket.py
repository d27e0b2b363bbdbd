"""Vectors of texts in an object store: written as blocks, and read through the bounded cache of the host.

``URL/<key>/`` holds the vectors of one `VectorIdentity`. A block is two files that never change, ``NAME.rows`` and
``NAME.ids`` as in a `VectorStore`; NAME is the SHA-256 of each, and the ids are written last. So every file that is
fetched is compared with its name, a folder that was copied from a store is a `VectorStore`, and a kill loses at most
the block that was not uploaded yet. ``index.json`` lists the blocks, for servers that list no files.
"""

from __future__ import annotations

import json
import logging
import re
import time
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import asdict
from hashlib import sha256
from pathlib import Path
from typing import Any

import numpy as np
from jaxtyping import Float

from capt.pretrain.base.errors import DataError
from capt.pretrain.base.files import parse_json
from capt.pretrain.base.stores import WRITABLE, MissingError, put_bytes, read_small, tree, without_secrets
from capt.pretrain.base.verification import ExpectedFile
from capt.pretrain.data.shard_cache import ShardCache
from capt.pretrain.retrieval.quantize import Ranges
from capt.pretrain.retrieval.store import ENCODER, ID, IDENTITY, RANGES, VectorIdentity, Vectors

logger = logging.getLogger(__name__)

BLOCK_BYTES = 64 << 20
"""Bytes of vectors in a block, unless `BLOCK_SECONDS` end it."""
BLOCK_SECONDS = 60.0
"""The age at which a block is uploaded: what a host that is lost may have to encode again."""
_INDEX = "index.json"
_MOST_INDEX = 1 << 28
_NAME = re.compile(r"([0-9a-f]{64})-([0-9a-f]{64})", re.ASCII)
_REMEDY = "; remove the block from the store, its texts are encoded again"


class BucketVectors(Vectors):
    """The vectors of one identity at ``root``, an address that is listed in `capt.pretrain.base.stores.STORES`.

    Args:
        root: the folder of all identities in the store.
        identity: decides the vectors.
        cache: the folder of this host's cache.
        limit: bytes that the files of stores may have there.
    """

    folder: str

    def __init__(self, root: str, identity: VectorIdentity, cache: Path, limit: int) -> None:
        super().__init__(identity)
        self.url = f"{root.rstrip('/')}/{identity.key}"
        self.folder = without_secrets(self.url)
        self._scheme = root.partition("://")[0].lower()
        self._blocks: list[str] = []
        self._files: dict[str, ExpectedFile] = {}
        self._cache = ShardCache(
            self.url, [], self._files, {}, cache / "stored", limit, check=True, key="--cache-bytes", remedy=_REMEDY
        )
        self._indexed, self._described = -1, False
        self._open: list[tuple[np.ndarray, np.ndarray]] = []
        self._open_bytes, self._began = 0, 0.0
        self._uploading: Future[None] | None = None
        self._uploader = ThreadPoolExecutor(1)
        self._find_ranges()
        self.reload()

    def _find_ranges(self) -> None:
        if self.identity.dtype != "int8":
            return
        place = f"{self.folder}/{RANGES}"
        try:
            found = parse_json(read_small(f"{self.url}/{RANGES}"), place)
        except MissingError:
            return
        self.ranges = Ranges.read(found, self.identity.dimension, place)

    def calibrate(self, ranges: Ranges) -> None:
        """Write the ranges down, unless there are some. Raises ``DataError``."""
        self._find_ranges()
        if self.ranges is None:
            self._require_writable()
            put_bytes(json.dumps(ranges.record()).encode(), f"{self.url}/{RANGES}")
            self.ranges = ranges

    def reload(self) -> None:
        """Index the blocks that the store has by now. Raises ``DataError``."""
        width = self.identity.columns * self._type.itemsize
        # Sorted, so that of a text that two blocks have every rank takes the same vector.
        for name, sizes in sorted(self._listed().items()):
            if f"{name}.ids" in self._files or "ids" not in sizes:  # its writer was killed, or is about to write them
                continue
            count = sizes["ids"] // ID.itemsize
            if not count or sizes != {"ids": count * ID.itemsize, "rows": count * width}:
                logger.warning("%s/%s: the block is not whole, and its texts are encoded again", self.folder, name)
                continue
            for ending, digest in zip(("rows", "ids"), name.split("-"), strict=True):
                self._files[f"{name}.{ending}"] = ExpectedFile(sizes[ending], digest)
            # The ids are copied to memory, and their file may leave the cache.
            ids = self._cache.map(f"{name}.ids", ID).copy()
            self._cache.release(f"{name}.ids")
            self._blocks.append(name)
            self._index(ids, range(count))

    def _listed(self) -> dict[str, dict[str, int]]:
        """The bytes of the two files of each block."""
        # A web server lists no files; the index tells what was there when it was written.
        if self._scheme in ("http", "https"):
            try:
                found = json.loads(read_small(f"{self.url}/{_INDEX}", limit=_MOST_INDEX))
                files = [(str(name), int(size)) for name, size in found.items()]
            except MissingError:
                return {}
            except (ValueError, AttributeError, TypeError):
                raise DataError(f"{self.folder}/{_INDEX} is no list of blocks; capt encode writes one") from None
        else:
            files = [(file.name, file.size) for file in tree(self.url)]
            self._indexed = dict(files).get(_INDEX, -1)
        blocks: dict[str, dict[str, int]] = {}
        for file, size in files:
            name, _, ending = file.partition(".")
            if _NAME.fullmatch(name) and ending in ("rows", "ids"):
                blocks.setdefault(name, {})[ending] = size
        return blocks

    def repair(self, rank: int = 0, world: int = 1) -> int:
        """Return 0: what is fetched is compared with its SHA-256."""
        return 0

    def add(self, texts: Sequence[bytes], rows: Float[np.ndarray, "n d"]) -> None:
        """Append the vectors of a batch; a block that is full is uploaded in the background. Raises ``DataError``."""
        kept, ids = self._packed(texts, rows)
        # After the check of the numbers, which says more than a store that cannot be written.
        self._require_writable()
        if not self._open:
            self._began = time.monotonic()
        self._open.append((kept, ids))
        self._open_bytes += kept.nbytes
        self.added += len(texts)
        # A block ends by age as well, so that a slow encoder does not lose hours with its host.
        if self._open_bytes >= BLOCK_BYTES or time.monotonic() - self._began >= BLOCK_SECONDS:
            self._upload()

    def _require_writable(self) -> None:
        if self._scheme not in WRITABLE:
            raise DataError(
                f"{self.folder}: a text has no vector there, and {self._scheme}:// is only read; encode into "
                f"{', '.join(f'{name}://' for name in WRITABLE)} or a folder"
            )

    def close(self) -> None:
        """Upload the rest. Raises ``DataError``."""
        if self._open:
            self._upload()
        self._wait()

    def _upload(self) -> None:
        """Write the open block in the background, after the one before it."""
        # One upload at a time: a block waits in memory only while the next one fills.
        self._wait()
        block, self._open, self._open_bytes = self._open, [], 0
        rows, ids = (np.concatenate(parts).tobytes() for parts in zip(*block, strict=True))
        self._uploading = self._uploader.submit(self._write, rows, ids)

    def _wait(self) -> None:
        uploading, self._uploading = self._uploading, None
        if uploading is not None:
            uploading.result()

    def _write(self, rows: bytes, ids: bytes) -> None:
        name = f"{sha256(rows).hexdigest()}-{sha256(ids).hexdigest()}"
        if not self._described:
            put_bytes(json.dumps(asdict(self.identity), indent=1).encode(), f"{self.url}/{IDENTITY}")
            self._described = True
        put_bytes(rows, f"{self.url}/{name}.rows")
        # The ids last: without them nobody reads the rows.
        put_bytes(ids, f"{self.url}/{name}.ids")

    def finish(self, added: int) -> None:
        """Write the list of blocks. Raises ``DataError`` where ``added`` of them would be missing from it."""
        content = json.dumps({name: self._files[name].size for name in sorted(self._files)}, indent=0).encode()
        # Where nothing was added only the length of the stored list is compared: it is not fetched again.
        is_listed = not added and len(content) == self._indexed
        if self._scheme not in WRITABLE or is_listed or not self._files:
            return
        try:
            put_bytes(content, f"{self.url}/{_INDEX}")
        except DataError as error:
            if added:
                raise
            logger.warning("%s; it lists fewer blocks than there are", error)  # of a writer that was killed

    def note(self, encoder: Mapping[str, Any]) -> None:
        """Write ``encoder.json`` into a store that can be written."""
        if self._scheme in WRITABLE:
            put_bytes(json.dumps(dict(encoder), indent=1).encode(), f"{self.url}/{ENCODER}")

    def noted(self) -> dict[str, Any]:
        """Read ``encoder.json``."""
        try:
            found: dict[str, Any] = json.loads(read_small(f"{self.url}/{ENCODER}", limit=1 << 20))
        except (MissingError, ValueError):
            return {}
        return found

    @contextmanager
    def _mapped(self, segment: int) -> Iterator[np.ndarray]:
        name = f"{self._blocks[segment]}.rows"
        try:
            yield self._cache.map(name, self._type).reshape(-1, self.identity.columns)
        finally:
            self._cache.release(name)

    def _damaged(self, segment: int, row: int) -> str:
        return f"{self.folder}/{self._blocks[segment]}.rows: row {row} is not what was encoded{_REMEDY}"
