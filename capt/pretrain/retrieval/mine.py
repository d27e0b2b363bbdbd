"""Mine hard negatives for a file of pairs: exact search, filters, and an audit that refuses bad output."""

from __future__ import annotations

import json
import logging
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from itertools import islice
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from capt.pretrain.base.atomic import new_folder, require_new
from capt.pretrain.base.distributed import rank, synchronize_errors
from capt.pretrain.base.errors import DataError
from capt.pretrain.base.files import write_json, write_text
from capt.pretrain.base.overlap import same_text, text_hash
from capt.pretrain.base.parallel import ProgressCallback, batched
from capt.pretrain.base.randomness import derive
from capt.pretrain.engine.provenance import provenance
from capt.pretrain.pairs.known import positives_by_query
from capt.pretrain.retrieval.audit import faults, histogram, page
from capt.pretrain.retrieval.data import Document, PairRow, is_collection, read_documents, read_pair_rows
from capt.pretrain.retrieval.encode import embed, rows_of
from capt.pretrain.retrieval.encoders import TextEncoder, load_text_encoder
from capt.pretrain.retrieval.options import EncodeOptions, EncoderOptions, Rules
from capt.pretrain.retrieval.passages import PassageCutter
from capt.pretrain.retrieval.rankings import search
from capt.pretrain.retrieval.rerankers import PairScorer, load_reranker, score_pairs
from capt.pretrain.retrieval.search import by_id
from capt.pretrain.retrieval.sources import SourceOptions, find_sources, read_sources
from capt.pretrain.retrieval.store import require_dtype

logger = logging.getLogger(__name__)

PAIRS, AUDIT, PAGE = "pairs.jsonl", "audit.json", "audit.html"
_SCORES = ("pos_scores", "neg_scores", "positive_scores", "negative_scores")
_EXAMPLES = 20
_CUT_TOGETHER = 1024
"""Documents that are cut into passages together."""


@dataclass(frozen=True)
class _Found:
    """The documents that a query may have as negatives, the best first, and what is known of its positives."""

    texts: list[str]
    scores: list[float]
    positive: float
    """The lowest score of a positive: every negative must keep its distance from all of them."""
    consistent: bool


class _Labels(NamedTuple):
    """A cross-encoder's scores of the positives and of the negatives that a row has."""

    positives: list[float]
    negatives: list[float]


def mine(
    pairs: Sequence[Path],
    corpus: Path | None,
    model: Path,
    out: Path,
    options: EncodeOptions,
    encoder_options: EncoderOptions,
    rules: Rules,
    *,
    cross_encoder: Path | None = None,
    progress: ProgressCallback | None = None,
) -> dict[str, Any]:
    """Write the folder ``out`` with the pairs and their negatives, and the audit of them. Collective over all ranks.

    A negative is a document near to the query that is not a known positive of it (:mod:`capt.pretrain.pairs.known`),
    nor one after a title, nor the query itself, and passes `Rules`. With a cross-encoder, its scores take the place of
    the encoder's in `Rules`, and are written as ``pos_scores`` and ``neg_scores``.

    Args:
        pairs: files for `read_pair_rows`.
        corpus: see `read_documents`, or a folder of documents, whose passages are those of a search; one that has a
            positive in it, or is in one, is no negative. Without it, the positives of ``pairs``.
        model: see `load_text_encoder`.
        out: new folder.
        options: how texts are encoded and kept.
        encoder_options: pooling, length and prompts, where they are not the model's own.
        rules: which documents become negatives.
        cross_encoder: see `load_reranker`.
        progress: called with documents encoded.

    Returns:
        The audit.

    Raises:
        DataError: a file cannot be used, ``out`` is taken, or the audit refuses the output.
    """
    require_dtype(options.dtype)
    rules.check()
    # Reading and encoding take minutes: a rank that fails there must not leave the others in a collective.
    with synchronize_errors(patient=True):
        require_new(out)
        # Both models before any work: one that does not fit must not be found after hours of encoding.
        encoder = load_text_encoder(model, encoder_options)
        teacher = load_reranker(cross_encoder) if cross_encoder is not None else None
        rows = list(read_pair_rows(pairs))
        has_files = corpus is not None and corpus.is_dir() and not is_collection(corpus)
        if corpus is None:
            documents = _distinct(_positives_of(rows))
        else:
            documents = _distinct(_passages(corpus, encoder, out) if has_files else read_documents(corpus))
        titled = _titled(corpus) if corpus and not has_files else {}
        _refuse_before_encoding(rows, documents, rules)
    found = _search(encoder, rows, documents, titled, options, rules, progress, are_passages=has_files)
    labels = None
    if teacher is not None:  # a cross-encoder orders the candidates anew, and its scores are the teacher's labels
        found, labels = _with_scores(rows, found, _cross_scores(teacher, rows, found, options, progress))
    with synchronize_errors():
        lines, audit = _choose(rows, found, labels, rules)
        audit = {
            "pairs": [str(path) for path in pairs], "corpus": str(corpus) if corpus else "the positives",
            "documents": len(documents), "model": str(model), "protocol": encoder.protocol(),
            "cross_encoder": str(cross_encoder) if cross_encoder else None, "rules": asdict(rules),
            "versions": provenance(), **audit,
        }  # fmt: skip
        if rank() == 0:
            with new_folder(out) as folder:
                write_text(folder / PAIRS, "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in lines))
                write_json(folder / AUDIT, audit)
                write_text(folder / PAGE, page(audit))
    return audit


def _refuse_before_encoding(rows: Sequence[PairRow], documents: Sequence[str], rules: Rules) -> None:
    """Refuse what the texts and the rules decide alone. Raises ``DataError``."""
    harmful = faults([{"query": row.query, "pos": row.positives, "neg": row.negatives} for row in rows])
    if harmful:
        number, fault = harmful[0]
        raise DataError(f"{rows[number].where}: {fault} ({len(harmful)} such rows); remove it from the row")
    if not rules.number:
        return
    if rules.first >= len(documents):
        raise DataError(f"--first {rules.first}: the corpus has {len(documents)} different documents; lower it")
    if rules.short != "refuse":
        return
    names, positives = set(map(same_text, documents)), positives_by_query((row.query, row.positives) for row in rows)
    for row in rows:
        query = same_text(row.query)
        left = len(names) - len(names & {*positives[query], query}) - rules.first
        if left < rules.number:
            raise DataError(
                f"{row.where}: the corpus has {len(documents)} different documents and leaves {max(0, left)} negatives "
                f"for the row: lower --number ({rules.number}), or say --short keep"
            )


def _positives_of(rows: Sequence[PairRow]) -> Iterator[tuple[str, str]]:
    for row in rows:
        for text in row.positives:
            yield text_hash(text).hex(), text


def _passages(folder: Path, encoder: TextEncoder, apart: Path) -> Iterator[Document]:
    """The passages of the files in a folder, as a search of the encoder has them; ``apart`` is no source."""
    cutter = PassageCutter(encoder)
    documents = read_sources(find_sources([str(folder)], apart.resolve()), SourceOptions())
    for window in batched(documents, _CUT_TOGETHER):
        for document, passages in zip(window, cutter.passages_of([each.text for each in window]), strict=True):
            for begin, end in passages:
                yield f"{document.name}:{begin}", document.text[begin:end]


def _distinct(documents: Iterator[tuple[str, str]]) -> list[str]:
    """The texts of a corpus, each once, in an order that does not depend on that of the files."""
    # Texts that differ in case or spaces are one document, or a copy of a positive would pass for a negative.
    texts = {same_text(text): text for _, text in documents if text.strip()}
    if not texts:
        raise DataError("an empty corpus: there is nothing to mine in")
    return [texts[name] for name in sorted(texts)]


def _titled(corpus: Path) -> dict[str, str]:
    """Return a document without its title."""
    both = zip(read_documents(corpus), read_documents(corpus, titles=False), strict=True)
    return {same_text(text): same_text(bare) for (_, text), (_, bare) in both if text != bare}


def _search(
    encoder: TextEncoder,
    rows: Sequence[PairRow],
    documents: Sequence[str],
    titled: Mapping[str, str],
    options: EncodeOptions,
    rules: Rules,
    progress: ProgressCallback | None,
    *,
    are_passages: bool,
) -> list[_Found]:
    # A query is encoded and searched once, however many rows it has.
    queries = list(dict.fromkeys(row.query for row in rows))
    positives = positives_by_query((row.query, row.positives) for row in rows)
    of_queries = embed(encoder, queries, "query", options)
    of_documents = embed(
        encoder,
        # The positives too: their scores are needed, whether the corpus has them or not.
        [*documents, *(text for texts in positives.values() for text in texts.values())],
        "document",
        options,
        progress,
        total=len(documents),
    )
    vectors, scoring = rows_of(of_queries, queries), encoder.scoring
    names = [same_text(text) for text in documents]
    alone = [titled.get(name, name) for name in names]
    # How far a ranking is read: up to ``last`` documents are left after the query itself and every copy of a positive.
    copies = Counter(alone)
    excluded = 1 + max(sum(max(1 + are_passages, copies[name]) for name in own) for own in positives.values())
    nearest = search(
        vectors,
        iter(documents),
        of_documents,
        min(len(documents), rules.last + excluded),
        by_id(documents),
        scoring,
    )
    left = scoring.rows(vectors)
    found = {}
    for number, query in enumerate(queries):
        its_own = positives[same_text(query)]
        own = rows_of(of_documents, its_own.values())
        scores = scoring.pairs(
            left[number : number + 1], scoring.rows(own), np.zeros(len(own), dtype=np.int64), np.arange(len(own))
        )
        ranked = [i for i in nearest.numbers[number].tolist() if i >= 0 and names[i] != same_text(query)]
        # The positives and the query itself leave the ranking; what is nearer than the best positive is ahead of it.
        place = {i: nearest.scores[number, column] for column, i in enumerate(nearest.numbers[number].tolist())}
        kept = [i for i in ranked if names[i] not in its_own and alone[i] not in its_own]
        if are_passages:  # they overlap, and are cut elsewhere than the positives
            kept = [i for i in kept if not any(own in names[i] or names[i] in own for own in its_own)]
        best = float(scores.max())
        ahead = sum(float(place[i]) > best for i in kept)
        found[query] = _Found(
            [documents[i] for i in kept[: rules.last]],
            [float(place[i]) for i in kept[: rules.last]],
            # The lowest score of all positives: a margin must hold for each of them.
            float(scores.min()),
            not rules.keep_top or ahead < rules.keep_top,
        )
    return [found[row.query] for row in rows]


def _cross_scores(
    teacher: PairScorer,
    rows: Sequence[PairRow],
    found: Sequence[_Found],
    options: EncodeOptions,
    progress: ProgressCallback | None,
) -> list[list[float]]:
    """The cross-encoder's scores of each row's positives, of the documents that were found, and of its negatives."""
    texts = [[*row.positives, *each.texts, *row.negatives] for row, each in zip(rows, found, strict=True)]
    pairs = [(row.query, text) for row, its_own in zip(rows, texts, strict=True) for text in its_own]
    scores = iter(score_pairs(teacher, pairs, options, progress))
    return [list(islice(scores, len(its_own))) for its_own in texts]


def _with_scores(
    rows: Sequence[PairRow], found: Sequence[_Found], scores: Sequence[list[float]]
) -> tuple[list[_Found], list[_Labels]]:
    """Return what was found with the cross-encoder's scores for the encoder's, and the scores of what rows have."""
    changed, labels = [], []
    for number, (row, each) in enumerate(zip(rows, found, strict=True)):
        ends = len(row.positives), len(row.positives) + len(each.texts)
        own, others, negatives = (scores[number][part] for part in map(slice, (0, *ends), (*ends, None)))
        # Equal scores keep the order of the search.
        order = sorted(range(len(others)), key=lambda i: (-others[i], i))
        changed.append(_Found([each.texts[i] for i in order], [others[i] for i in order], min(own), each.consistent))
        labels.append(_Labels(own, negatives))
    return changed, labels


def _choose(
    rows: Sequence[PairRow], found: Sequence[_Found], labels: Sequence[_Labels] | None, rules: Rules
) -> tuple[list[dict[str, Any]], dict[str, Any]]:
    """The rows to write, and their audit. Raises ``DataError`` where that refuses them."""
    removed: Counter[str] = Counter()
    looked = 0
    lines: list[dict[str, Any]] = []
    examples: list[dict[str, Any]] = []
    positives: list[float] = []
    negatives: list[float] = []
    short: list[str] = []
    written: list[str] = []
    for number, (pair, each) in enumerate(zip(rows, found, strict=True)):
        if not each.consistent:
            removed["row: its positive is not near"] += 1
            continue
        # What the rules leave of the ranking, with the reason for each document that they refuse.
        candidates = list(range(rules.first, min(rules.last, len(each.texts))))
        looked += len(candidates)
        # Rows may come with negatives of their own, which are kept.
        known = {same_text(text) for text in pair.negatives}
        kept = []
        for i in candidates:
            reason = _refused(each.scores[i], each.positive, rules) or (
                "already a negative" if same_text(each.texts[i]) in known else ""
            )
            if reason:
                removed[reason] += 1
            else:
                kept.append(i)
        # Drawn by the text of the query, so that the order of the rows decides nothing.
        if rules.choice == "random" and len(kept) > rules.number:
            generator = np.random.default_rng(derive(rules.seed, "mine", text_hash(pair.query).hex()))
            # Sorted again by rank, best first, as the top ones are.
            kept = sorted(generator.choice(kept, rules.number, replace=False).tolist())
        kept = kept[: rules.number]
        if len(kept) < rules.number:
            short.append(pair.where)
            if rules.short == "drop":
                removed["row: too few negatives"] += 1
                continue
        texts, scores = [each.texts[i] for i in kept], [each.scores[i] for i in kept]
        positives.append(each.positive)
        negatives += scores
        line = _line(pair, texts, scores, None if labels is None else labels[number])
        # A row with scores for its old negatives alone could not be read by the pair task.
        if any(name in pair.others and name not in line for name in _SCORES):
            removed["row scores: the new negatives have none"] += 1
        lines.append(line)
        written.append(pair.where)
        if len(examples) < _EXAMPLES:
            shown = [{"text": text, "score": score} for text, score in zip(texts, scores, strict=True)]
            examples.append(
                {"query": pair.query, "positives": pair.positives, "score": each.positive, "negatives": shown}
            )
    # Refuse the whole output sooner than write a bad one.
    if short and rules.short == "refuse":
        raise DataError(
            f"{len(short)} of {len(rows)} rows have fewer than {rules.number} negatives, the first is {short[0]}: "
            f"look further (--last), ease the margins, or say --short keep (the default) or --short drop"
        )
    if not lines:
        raise DataError("no row is left: ease --keep-top, the margins or --number")
    # The same rules once more over the whole output, as rows of one query are seen together.
    harmful = faults(lines)
    if harmful:
        number, fault = harmful[0]
        raise DataError(
            f"{written[number]}: the output is refused: {fault} ({len(harmful)} such rows); remove it from the row"
        )
    audit = {
        "rows_read": len(rows), "rows_written": len(lines), "rows_with_too_few_negatives": len(short),
        "candidates": looked,
        "removed": {name: {"count": count, "share": count / max(1, len(rows) if name.startswith("row") else looked)}
                    for name, count in sorted(removed.items())},
        "positive_scores": histogram(positives), "negative_scores": histogram(negatives), "examples": examples,
    }  # fmt: skip
    return lines, audit


def _refused(score: float, positive: float, rules: Rules) -> str:
    """The rule that a document breaks, or nothing."""
    if rules.max_score is not None and score > rules.max_score:
        return "above --max-score"
    if rules.margin is not None and score > positive - rules.margin:
        return "within --margin of the positive"
    if rules.relative_margin is not None and score > positive - abs(positive) * rules.relative_margin:
        return "within --relative-margin of the positive"
    return ""


def _line(pair: PairRow, texts: list[str], scores: list[float], labels: _Labels | None) -> dict[str, Any]:
    """The row as the pair task reads it; every field of the input that has no meaning for it stays."""
    own: dict[str, Any] = {"query": pair.query, "pos": pair.positives, "neg": [*pair.negatives, *texts]}
    left_out = {*own, *(_SCORES if texts or labels is not None else ())}  # a score for each negative, or for none
    # Every row, or a job could not train on their scores.
    if labels is not None:
        own |= {"pos_scores": labels.positives, "neg_scores": [*labels.negatives, *scores]}
    return {**{name: value for name, value in pair.others.items() if name not in left_out}, **own}
