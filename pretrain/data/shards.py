"""Token shards: a corpus as one long stream of token ids on disk, read by memory map.

A shard set is a folder::

    shard-00000.bin ...   the stream, cut every ``shard_tokens`` tokens; uint16 (uint32 for more than 65,536 ids)
    documents.bin         int64: where each document begins in the stream, and where the last one ends
    manifest.json         format, tokenizer, source, counts, and every file's size and SHA-256; written last

In the stream every document ends with ``</s>``, so that a training window is one slice of it
(``pretrain.data.packing``). ``pretrain.data.shard_writer`` writes shard sets.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from functools import cached_property
from pathlib import Path

import numpy as np
from jaxtyping import Int32, Int64

from pretrain.base.errors import DataError
from pretrain.base.hashing import check_size
from pretrain.base.verification import Verifier
from pretrain.data.manifest import DOCUMENTS, MANIFEST, Manifest, Tokenizer, TokenizerRecord, token_dtype

_REMEDY = "; prepare the data again"


class ShardSet:
    """An opened shard set. ``documents`` and ``tokens`` (document ends included) are its totals.

    Sending one to another process is cheap: only the name of the folder is sent.
    """

    def __init__(self, folder: Path, manifest: Manifest) -> None:
        self.folder, self.manifest = folder, manifest
        self.documents, self.tokens = manifest.documents, manifest.tokens

    @classmethod
    def open(cls, folder: Path, verifier: Verifier | None = None, *, verify: bool = True) -> ShardSet:
        """Open the shard set in ``folder``; sizes are always compared with the manifest.

        ``verifier`` compares every file's SHA-256 as well, and looks at every id and document, all its ranks together.
        Without one, or with ``verify=False``, what the files hold is taken as it is.

        Raises ``DataError`` naming the missing, truncated or changed file, what was expected and what was found.
        """
        with verifier.ranks.synchronize_errors() if verifier is not None else nullcontext():
            manifest = Manifest.read(folder)
            for name, record in manifest.records().items():
                check_size(folder / name, record, DataError, _REMEDY)
        if verifier is not None and verify:
            verifier.verify(folder, manifest.records(), hint=_REMEDY, inspections=manifest.inspections())
        return cls(folder, manifest)

    def __reduce__(self) -> tuple[Callable[[Path], ShardSet], tuple[Path]]:
        return ShardSet.open, (self.folder,)

    @property
    def rows_without_text(self) -> int:
        """The rows of tables that were left out when the shards were made."""
        return sum(int(part.get("rows_without_text", 0)) for part in self.manifest.source)

    def check_tokenizer(self, tokenizer: Tokenizer) -> None:
        """Raise ``DataError`` when these shards were made with another tokenizer."""
        made_with = self.manifest.tokenizer
        if made_with.fingerprint != tokenizer.fingerprint:
            raise DataError(
                f"{self.folder} was tokenized with the tokenizer {made_with.fingerprint}, this job uses"
                f" {tokenizer.fingerprint}: set tokenizer.path to that tokenizer, or prepare the data again"
            )
        if made_with != TokenizerRecord.from_tokenizer(tokenizer):
            raise DataError(f"{self.folder / MANIFEST} is damaged: its tokenizer's ids are not those of the tokenizer")

    def read(self, start: int, stop: int) -> Int32[np.ndarray, " tokens"]:
        """Read tokens ``start .. stop-1`` of the stream (fewer at its end)."""
        size = self.manifest.shard_tokens
        stop = min(stop, self.tokens)
        out = np.empty(max(0, stop - start), dtype=np.int32)
        at = start
        while at < stop:
            shard, offset = divmod(at, size)
            part = self._shards[shard][offset : offset + stop - at]
            if not len(part):
                raise DataError(f"{self.folder / self.manifest.shards[shard]} ends before token {at}{_REMEDY}")
            out[at - start : at - start + len(part)] = part
            at += len(part)
        return out

    @cached_property
    def starts(self) -> Int64[np.ndarray, " borders"]:
        """The place in the stream where each document begins, and where the last one ends (memory-mapped)."""
        return np.memmap(self.folder / DOCUMENTS, dtype="<i8", mode="r")

    @cached_property
    def _shards(self) -> list[np.ndarray]:
        dtype = token_dtype(self.manifest.tokenizer.vocab_size)
        return [np.memmap(self.folder / name, dtype=dtype, mode="r") for name in self.manifest.shards]
