"""A text encoder without a network, retrieval data, and a small sentence-transformers folder."""

from __future__ import annotations

import functools
import json
import random
import zlib
from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np

from capt.pretrain.engine.task import Role
from capt.pretrain.retrieval.encoders import TextEncoder
from capt.pretrain.retrieval.options import EncoderOptions
from capt.pretrain.retrieval.rerankers import PairScorer
from capt.pretrain.retrieval.store import Pair
from tests.finetune import sentence, write_encoder


@functools.cache
def _of_word(word: str, dimension: int) -> np.ndarray:
    return np.random.default_rng(zlib.crc32(word.encode())).standard_normal(dimension)


class ToyEncoder(TextEncoder):
    """Sums of one random vector for each word; what it has encoded is counted."""

    def __init__(self, dimension: int = 12, **facts: object) -> None:
        self.dimension = dimension
        super().__init__("toy", {"query": "q: "}, EncoderOptions())
        self._facts = {
            "model": "m", "tokenizer": "t", "pooling": "sum", "length": 99, "precision": "fp32", **facts
        }  # fmt: skip
        self.encoded: list[str] = []

    def lengths(self, texts: Sequence[str], role: Role) -> list[int]:
        return [len(text.split()) + 1 for text in texts]

    def encode(self, texts: Sequence[str], role: Role) -> np.ndarray:
        self.encoded += texts
        return np.stack([self._vector(text) for text in texts])

    def _vector(self, text: str) -> np.ndarray:
        rows = [_of_word(word, self.dimension) for word in text.split()] or [np.ones(self.dimension)]
        return np.sum(rows, axis=0).astype(np.float32)


class ToyScorer(PairScorer):
    """A reranker that is a function of a pair; what it has scored is counted."""

    def __init__(self, score: Callable[[str, str], float]) -> None:
        facts = {"model": "m", "tokenizer": "t", "pooling": "score", "length": 99, "precision": "fp32"}
        super().__init__("toy", facts)
        self._score, self.scored = score, 0

    def lengths(self, pairs: Sequence[Pair], role: Role = "text") -> list[int]:
        return [len(text.split()) + 1 for _, text in pairs]

    def scores(self, pairs: Sequence[Pair]) -> np.ndarray:
        self.scored += len(pairs)
        return np.array([self._score(*pair) for pair in pairs], dtype=np.float32)


def write_beir(folder: Path, documents: int = 60, queries: int = 9, seed: int = 0) -> Path:
    """A BEIR folder with graded judgements, copies of texts, unjudged queries and judged documents that are absent."""
    generator = random.Random(seed)
    (folder / "qrels").mkdir(parents=True, exist_ok=True)
    texts = [sentence(generator) for _ in range(documents)]
    texts[-1] = texts[0]
    rows = [{"_id": f"d{i}", "title": "T" if i % 3 else "", "text": text} for i, text in enumerate(texts)]
    (folder / "corpus.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    asked = [{"_id": f"q{i}", "text": sentence(generator, 5)} for i in range(queries)]
    (folder / "queries.jsonl").write_text("".join(json.dumps(row) + "\n" for row in asked))
    lines = ["query-id\tcorpus-id\tscore"]
    for i in range(queries - 1):
        for document in generator.sample(range(documents), 4):
            lines.append(f"q{i}\td{document}\t{generator.choice([0, 1, 1, 2, 3])}")
    lines.append("q0\tabsent\t2")
    (folder / "qrels" / "test.tsv").write_text("\n".join(lines) + "\n")
    return folder


def write_sentence_folder(folder: Path, **changes: object) -> Path:
    """A folder that sentence-transformers wrote: a small BERT with random weights, mean pooling, prompts."""
    from sentence_transformers import SentenceTransformer
    from sentence_transformers.sentence_transformer.modules import Pooling, Transformer

    source = write_encoder(folder.with_name(f"{folder.name}-encoder"), "BertModel", **changes)
    transformer = Transformer(str(source), max_seq_length=24)
    pooling = Pooling(transformer.get_embedding_dimension(), pooling_mode="mean")
    model = SentenceTransformer(
        modules=[transformer, pooling], device="cpu", prompts={"query": "no ", "document": "yes "}
    )
    model.save(str(folder), create_model_card=False)
    return folder
