"""Selection of the rows of a table of pairs by a condition, and of hard negatives by their scores. No torch."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import islice
from pathlib import Path

from capt.pretrain.data.formats import Choose, ReadOptions, TableRow, has_header
from capt.pretrain.data.row_filter import RowFilter, Tally, kept_rows
from capt.pretrain.data.tables import read_table
from capt.pretrain.pairs.cells import SIMILARITIES


@dataclass(frozen=True)
class Selection:
    """The rows, and the hard negatives of a row, that are read.

    Attributes:
        where: condition on the columns of a row (`RowFilter`); None = every row.
        negatives_below: a hard negative is kept if its score is below this share of the lowest of its positives; where
            that is negative, as far below it as the share of a positive one would be. None = whatever its score.
        stored_negatives: the first ones that are kept; a row with fewer is left out. None = all, whatever their number.
        scores: lowest and highest score of two texts; a row with another is refused. None = any number is one.
    """

    where: str | None = None
    negatives_below: float | None = None
    stored_negatives: int | None = None
    scores: tuple[float, float] | None = SIMILARITIES

    @cached_property
    def _filter(self) -> RowFilter | None:
        return None if self.where is None else RowFilter(self.where)

    def rows(self, path: Path, split: str, left_out: Tally, choose: Choose = list) -> Iterator[TableRow]:
        """Yield the rows of a table of which the condition is true; see `kept_rows`."""
        where = self._filter
        columns = choose if where is None else where.choosing(path, choose)
        rows = read_table(path, split, ReadOptions(choose=columns))
        yield from kept_rows(where, path, rows, typed=not has_header(path), left_out=left_out)

    @property
    def selects_negatives(self) -> bool:
        """Return whether hard negatives are kept by their scores or their number."""
        return self.negatives_below is not None or self.stored_negatives is not None

    def negatives(self, positives: Sequence[float], scores: Sequence[float]) -> list[int] | None:
        """Return the places of the hard negatives that are kept; None where they are too few."""
        places: Iterable[int] = range(len(scores))
        if self.negatives_below is not None:
            least = min(positives)
            # Of a positive score its share, to the bit.
            limit = least - abs(least) + self.negatives_below * abs(least)
            places = (place for place, score in enumerate(scores) if score < limit)
        # The first ones alone are looked for: a row may have thousands.
        kept = list(islice(places, self.stored_negatives))
        return None if len(kept) < (self.stored_negatives or 0) else kept


EVERYTHING = Selection()
"""Every row, and every hard negative."""
