"""Known positives: what a step, a file and the figures leave out is what loops over sets of texts say."""

from __future__ import annotations

import json
import random
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from capt.pretrain.base.verification import Verifier
from capt.pretrain.pairs.batches import PairAssembler
from capt.pretrain.pairs.data_config import PairData, PairSource
from capt.pretrain.pairs.inspect import left_out_of, summarize_pairs
from capt.pretrain.pairs.known import Candidates, Compared, left_out
from capt.pretrain.pairs.prepare import prepare_source
from capt.pretrain.pairs.sources import text_key
from capt.tokenizer.encode import load_tokenizer
from tests.bipartite import Bipartite
from tests.finetune import write_vocabulary
from tests.pairs import write_pairs

BATCH = 12


def _steps(data: Bipartite, compared: Compared, world: int = 1, parts: int = 1, mixed: bool = True) -> list[list[Any]]:
    """The batches of each rank in some steps."""
    makers = [
        PairAssembler(
            data.sources, data.sampler(BATCH, mixed=mixed), batch=BATCH, parts=parts, world=world, rank=rank, seed=1,
            bucketing=False, compared=compared,
        )
        for rank in range(world)
    ]  # fmt: skip
    return [[maker(BATCH * step) for maker in makers] for step in range(3)]


@pytest.mark.parametrize("seed", range(6))
@pytest.mark.parametrize("queue", [False, True])
def test_a_document_is_left_out_where_a_row_gives_it_to_the_query_and_nowhere_else(seed: int, queue: bool) -> None:
    """A row of any source counts, drawn or not, by way of copies too; with a queue for documents beyond the step."""
    generator = random.Random(seed)
    data = Bipartite.draw(generator, generator.choice([(30,), (20, 17), (13, 14, 15)]), generator.randint(5, 25))
    given = data.given
    everything = {document for _, document in given}
    undrawn = 0
    for step in _steps(data, Compared(queue=queue), world=2, parts=2, mixed=bool(seed % 2)):
        batches = [batch for rank in step for batch in rank]
        assert len({str(batch.known.tolist()) for batch in batches}) == 1
        samples = [
            pair for batch in batches for pair in zip(batch.query_keys.tolist(), batch.keys.tolist(), strict=True)
        ]
        hard = [key for batch in batches for key in batch.negative_keys.tolist()]
        documents = everything if queue else {*(own for _, own in samples), *hard}
        drawn, known = {*samples}, {tuple(pair) for pair in batches[0].known.tolist()}
        for query, own in samples:
            for document in documents:
                is_known = (query, document) in given
                assert (document == own or (query, document) in known) == is_known
                undrawn += is_known and (query, document) not in drawn
    assert undrawn, "a positive that was not drawn is tried"


def _expected(data: Bipartite, step: list[list[Any]], compared: Compared) -> Candidates:
    """Count candidate after candidate."""
    queries = documents = left = alone = 0
    given = data.given
    samples = [
        (query, own, bool(data.sources[source].source.in_batch), part if not compared.whole else 0, rank,
         [key for key, owner in zip(batch.negative_keys.tolist(), batch.owners.tolist(), strict=True) if owner == i])
        for rank, batches in enumerate(step) for part, batch in enumerate(batches)
        for i, (query, own, source) in enumerate(
            zip(batch.query_keys.tolist(), batch.keys.tolist(), batch.sources.tolist(), strict=True))
    ]  # fmt: skip
    for i, (query, _, in_batch, part, rank, hard) in enumerate(samples):
        in_batch &= compared.in_batch != "none"
        seen = [*hard]
        for j, (_, other, is_there, its_part, its_rank, its_hard) in enumerate(samples):
            together = (
                in_batch and is_there and part == its_part and (compared.in_batch == "global" or rank == its_rank)
            )
            if i != j and together:
                seen += [other, *([] if compared.own_hard else its_hard)]
        known = sum((query, document) in given for document in seen) if compared.masks else 0
        queries, documents, left = queries + 1, documents + len(seen), left + known
        alone += len(seen) == known
    return Candidates(queries, documents, left, alone)


@pytest.mark.parametrize(
    "compared",
    [
        Compared(), Compared(whole=False), Compared(in_batch="local"), Compared(whole=False, in_batch="local"),
        Compared(in_batch="none"), Compared(own_hard=True), Compared(queue=True), Compared(masks=False),
    ],
    ids=str,
)  # fmt: skip
def test_the_candidates_of_a_step_are_counted(compared: Compared) -> None:
    found = []
    for seed in range(4):
        generator = random.Random(seed)
        data = Bipartite.draw(generator, (20, 17), (3, 6, 12, 40)[seed], alone=seed % 2)
        for step in _steps(data, compared, world=3, parts=2, mixed=True):
            expected = _expected(data, step, compared)
            assert {batch.candidates for rank in step for batch in rank} == {expected}
            found.append(expected)
    assert any(each.left_out for each in found) == compared.masks
    assert any(each.alone for each in found) == (compared.masks or compared.in_batch == "none")


@pytest.mark.parametrize("seed", range(5))
def test_the_share_of_a_file_is_the_mean_over_all_draws_of_two_rows(seed: int, tmp_path: Path) -> None:
    """In the log of a job, which reads encoded rows, and in `capt data inspect`, which reads the files."""
    generator = random.Random(seed)
    data = Bipartite.draw(generator, (15, 9), (1, 2, 5, 8, 20)[seed])
    given = data.given
    summaries = []
    for number, rows in enumerate(data.rows):
        path = tmp_path / f"{number}.jsonl"
        path.write_text("".join(json.dumps({"query": query, "pos": own}) + "\n" for query, own, _ in rows))
        summaries.append(summarize_pairs(PairSource(name="a", files=[str(path)]), None))
    for source, rows, inspected in zip(data.sources, data.rows, left_out_of(summaries), strict=True):
        share, alone = 0.0, 0
        for i, (query, _, _) in enumerate(rows):
            kept = 0.0
            for j, (_, positives, _) in enumerate(rows):
                is_known = [(text_key(query), text_key(text)) in given for text in positives]
                share += (i != j) * np.mean(is_known) / len(rows) / (len(rows) - 1)
                kept += (i != j) * (1 - np.mean(is_known))
            alone += kept < 1e-9
        found = left_out(source.keys, [each.known for each in data.sources])
        assert found == inspected == (pytest.approx(share), alone)
        assert found.alone == (len(rows) if seed == 0 else found.alone)


def test_the_index_on_disk_is_that_of_the_rows(tmp_path: Path) -> None:
    write_vocabulary(tmp_path)
    path = write_pairs(tmp_path / "pairs.jsonl", 40, positives=3)
    path.write_text(path.read_text() + path.read_text().upper().replace('"QUERY"', '"query"').replace('"POS"', '"pos"')
                    .replace('"NEG"', '"neg"').replace(" X", " y"))  # fmt: skip
    (source,) = PairData(files=[str(path)], sequence_length=24).each()
    tokenizer = load_tokenizer(tmp_path)
    prepared = prepare_source(source, [path], 0.2, tokenizer, 64, Verifier(tmp_path / "cache"))
    for rows in (prepared.train, prepared.held_out):
        assert rows is not None
        assert rows.index is not None
        keys = rows.keys
        pairs = {
            (int(query), int(keys.values[place]))
            for i, query in enumerate(keys.queries) for place in range(keys.starts[i], keys.starts[i + 1])
        }  # fmt: skip
        assert {tuple(pair) for pair in rows.known.pairs(np.unique(keys.queries)).tolist()} == pairs
        assert max(Counter(query for query, _ in pairs).values()) == 5, "both rows of a query, their copies once"
        assert len(rows.known.pairs(np.array([-7, 3]))) == 0
