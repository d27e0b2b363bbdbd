from __future__ import annotations

from itertools import pairwise
from pathlib import Path

import pytest
from pydantic import ValidationError

from capt.launcher.commands.data import _filters
from capt.pretrain.base.errors import ConfigError
from capt.pretrain.data.filters import DocumentFilters, filters_of


def test_words() -> None:
    filters = filters_of(DocumentFilters(min_words=2, max_words=3))
    left_out = [[name for name, leaves_out in filters.items() if leaves_out("x " * n)] for n in range(1, 5)]
    assert left_out == [["min_words"], [], [], ["max_words"]]
    assert all(
        list(DocumentFilters.model_fields).index(a) < list(DocumentFilters.model_fields).index(b)
        for a, b in pairwise(filters)
    )


@pytest.mark.parametrize(
    ("keys", "message"),
    [
        ({"min_words": 5, "max_words": 4}, "min_words 5 is more than max_words 4"),
        ({"min_wrods": 4}, "Extra inputs are not permitted"),
    ],
)
def test_filters_that_cannot_be_meant(keys: dict[str, object], message: str) -> None:
    with pytest.raises(ValidationError, match=message):
        DocumentFilters.model_validate(keys)


def test_filters_of_the_command_line(tmp_path: Path) -> None:
    file = tmp_path / "steps.yaml"
    file.write_text("min_words: 50\nmax_words: 900\nexact: true\n")
    declared = _filters(file, ["min_words=20"])
    assert declared == DocumentFilters(min_words=20, max_words=900, exact=True)
    assert declared.names == ["min_words", "max_words", "exact"]
    for filters, message in (
        (["min_words"], r"--filter min_words: write KEY=VALUE"),
        (["min_wrods=3"], r"--filter min_wrods=3: min_wrods: Extra inputs .* \(known keys: min_words, max_words"),
        (["max_words=0"], r"--filter max_words=0: max_words: Input should be greater than 0"),
    ):
        with pytest.raises(ConfigError, match=message):
            _filters(None, filters)
