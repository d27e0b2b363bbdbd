"""Tables in parquet files, in batches whose size in memory is bounded, whatever a file unpacks to."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from io import BufferedReader
from typing import IO, Any

import pyarrow
import pyarrow.compute
import pyarrow.parquet

from capt.pretrain.base.errors import DataError
from capt.pretrain.base.files import most_unpacked, parse_json, printable, require_ratio
from capt.pretrain.base.parallel import batched
from capt.pretrain.data.csv_rows import require_one_of_each
from capt.pretrain.data.formats import ColumnTypes, FileSpan, Format, ReadOptions, TableRow, TextFile
from capt.pretrain.data.paths import size_of

_TEXTS = (
    pyarrow.types.is_string,
    pyarrow.types.is_large_string,
    pyarrow.types.is_binary,
    pyarrow.types.is_large_binary,
)


_WRITTEN = {
    str: pyarrow.string(),
    int: pyarrow.int64(),
    float: pyarrow.float64(),
    list: pyarrow.list_(pyarrow.string()),
}
_ROWS_OF_GROUP = 1 << 16
"""Rows that are written as a group, and are in memory until then."""


class Parquet(Format):
    """Parquet, up to 256 rows at a time. A part of a file is some of its row groups."""

    packed = False
    parts = "groups"
    writes = True

    def write(self, file: IO[bytes], columns: ColumnTypes, rows: Iterable[Mapping[str, Any]]) -> None:
        """Write the rows in groups."""
        schema = pyarrow.schema([(name, _WRITTEN[kind]) for name, kind in columns.items()])
        with pyarrow.parquet.ParquetWriter(file, schema) as writer:
            for group in batched(rows, _ROWS_OF_GROUP):
                writer.write_table(pyarrow.Table.from_pylist(group, schema=schema))

    def rows(self, path: TextFile, raw: BufferedReader, reading: ReadOptions) -> Iterator[TableRow]:
        """Yield the rows. Raises ``DataError``: the file is damaged, or unpacks to far more than text does."""
        number = 0
        with _damage(path):
            table = pyarrow.parquet.ParquetFile(raw)
            if listed := _listed_texts(table):
                table = pyarrow.parquet.ParquetFile(raw, metadata=table.metadata, read_dictionary=listed)
            require_one_of_each(path, table.schema_arrow.names)
            columns = reading.choose(table.schema_arrow.names)
            # Before the first batch: a row group unpacks as a whole.
            _require_ratio(path, table)
            size, span = 0, reading.span or FileSpan(0, table.metadata.num_row_groups)
            number = sum(table.metadata.row_group(group).num_rows for group in range(span.begin))
            for batch in table.iter_batches(
                batch_size=_rows_at_once(path, table), columns=columns, row_groups=list(range(span.begin, span.end))
            ):
                size += sum(_size(column) for column in batch.columns)
                require_ratio(path, size, size_of(path))
                names = batch.schema.names
                for cells in zip(*(column.to_pylist() for column in batch.columns), strict=True):
                    number += 1
                    yield TableRow(f"{path}, row {number}", number, dict(zip(names, cells, strict=True)))

    def classes(self, path: TextFile, raw: BufferedReader) -> dict[str, list[str]]:
        """Return the names of the classes that ``datasets`` keeps in the schema.

        A column of ``ClassLabel`` holds numbers, and one of lists of them as well.
        """
        with _damage(path):
            schema = pyarrow.parquet.read_schema(raw)
        content = (schema.metadata or {}).get(b"huggingface")
        if content is None:
            return {}
        described = parse_json(content, f"{path} (the description of its columns by datasets)")
        for key in ("info", "features"):
            described = described.get(key) if isinstance(described, dict) else None
        found = {name: _names_of(kind) for name, kind in described.items()} if isinstance(described, dict) else {}
        return {name: names for name, names in found.items() if names and name in schema.names}

    def groups(self, path: TextFile, raw: BufferedReader, size: int) -> list[FileSpan]:
        """Divide the row groups, the smallest parts that can be read by themselves. The footer alone is read."""
        with _damage(path):
            metadata = pyarrow.parquet.ParquetFile(raw).metadata
        spans, begin, held = [], 0, 0
        for number in range(metadata.num_row_groups):
            group = metadata.row_group(number)
            held += sum(group.column(i).total_compressed_size for i in range(group.num_columns))
            if held >= size or number == metadata.num_row_groups - 1:
                spans.append(FileSpan(begin, number + 1))
                begin, held = number + 1, 0
        return spans


@contextmanager
def _damage(path: TextFile) -> Iterator[None]:
    """Name the file where what is read in the block is damaged. Raises ``DataError``."""
    try:
        yield
    # A DataError is a ValueError, and would count as damage below.
    except DataError:
        raise
    except (pyarrow.ArrowException, OSError, ValueError) as error:  # ValueError: bytes that are not UTF-8, too
        raise DataError(f"{path} is not a readable parquet file: {printable(str(error))}") from None


def _names_of(kind: Any) -> list[str]:
    """Return the names of a ``ClassLabel``, or of the one in a list, in their order."""
    # A list is written as Sequence, List or LargeList with a feature, and by old releases as a list of one.
    while isinstance(kind, list) or (isinstance(kind, dict) and "feature" in kind):
        kind = kind["feature"] if isinstance(kind, dict) else kind[0] if kind else None
    names = kind.get("names") if isinstance(kind, dict) and kind.get("_type") == "ClassLabel" else None
    if not isinstance(names, list) or not all(isinstance(name, str) and name.strip() for name in names):
        return []
    names = [name.strip() for name in names]  # as the cells of other tables are read
    return names if len(set(names)) == len(names) else []


def _listed_texts(table: pyarrow.parquet.ParquetFile) -> list[str]:
    """Return the columns of texts in lists, which are read as numbers of a dictionary.

    A list may hold one text a million times: what a batch of such rows unpacks to is then known before it is unpacked.
    """
    columns = [table.schema.column(i) for i in range(table.metadata.num_columns)]
    is_text = ("STRING", "NONE")
    return [
        column.path
        for column in columns
        if column.max_repetition_level and column.physical_type == "BYTE_ARRAY" and column.logical_type.type in is_text
    ]


def _require_ratio(path: TextFile, table: pyarrow.parquet.ParquetFile) -> None:
    """Refuse by its own account a file that unpacks to far more than text does: a group of rows is read as a whole."""
    groups = [table.metadata.row_group(i) for i in range(table.metadata.num_row_groups)]
    lists = [table.schema.column(i).max_repetition_level > 0 for i in range(table.metadata.num_columns)]
    # Values of a list may take no bits of the file, and eight bytes each in memory.
    size = sum(
        max(column.total_uncompressed_size, 8 * column.num_values if in_list else 0)
        for group in groups
        for column, in_list in zip(map(group.column, range(group.num_columns)), lists, strict=True)
    )
    require_ratio(path, size, size_of(path))


def _rows_at_once(path: TextFile, table: pyarrow.parquet.ParquetFile) -> int:
    """Count the rows of a batch: no text is longer than what its column unpacks to, and each may be the longest one."""
    groups = [table.metadata.row_group(i) for i in range(table.metadata.num_row_groups)]
    sizes = (group.column(i).total_uncompressed_size for group in groups for i in range(group.num_columns))
    longest: int = max(sizes, default=0)
    return max(1, min(256, most_unpacked(size_of(path)) // max(1, longest)))


def _size(column: pyarrow.Array) -> int:
    """Return the bytes of a column: a text of its dictionary may occur in a million rows, or in a list of one."""
    kind, types = column.type, pyarrow.types
    if types.is_list(kind) or types.is_large_list(kind) or types.is_fixed_size_list(kind):
        return 8 * len(column) + _size(column.flatten())
    if types.is_map(kind):
        begin, end = column.offsets[0].as_py(), column.offsets[-1].as_py()
        return 8 * len(column) + sum(_size(part[begin:end]) for part in (column.keys, column.items))
    if types.is_struct(kind):
        return len(column) + sum(map(_size, column.flatten()))
    value = kind.value_type if types.is_dictionary(kind) else None
    if value is None or not any(test(value) for test in _TEXTS):
        return int(column.nbytes)
    lengths = pyarrow.compute.binary_length(column.dictionary).take(column.indices)
    return int(pyarrow.compute.sum(lengths, min_count=0).as_py())
