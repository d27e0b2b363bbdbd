"""Encoding of texts against sentence-transformers, and exact search against the matrix product that it needs.

``python -m tests.benchmarks.bench_retrieval`` encodes 256 texts of 4 to 120 words, uniformly drawn, with a RoBERTa of 3
layers x 384 and random weights: ours into a new store (`capt.pretrain.retrieval.encode`), sentence-transformers'
``encode`` as it comes, batches of 32 sorted by length. Then it searches the 100 best of 65,536 and 131,072 documents
for 1,024 queries of 384 dimensions, and puts the time beside that of the one product of all queries and documents in
blocks of the same size. Both sides take turns in one process; a ratio is the median over the rounds of the ratio within
a round. Times are processor time on one thread, which other work on the machine lengthens least. It exits with 1 when a
bound is missed.
"""

from __future__ import annotations

import argparse
import json
import random
import statistics
import tempfile
import time
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch

from capt.pretrain.base.quiet import quiet_libraries
from capt.pretrain.retrieval.encode import embed, rows_of
from capt.pretrain.retrieval.encoders import TextEncoder, load_text_encoder
from capt.pretrain.retrieval.options import EncodeOptions, EncoderOptions
from capt.pretrain.retrieval.search import BLOCK, TopK, unit_rows
from tests.finetune import sentence, write_encoder

SIZE = {"num_hidden_layers": 3, "hidden_size": 384, "num_attention_heads": 12, "intermediate_size": 1536}
TEXTS, WORDS = 256, (4, 120)
QUERIES, DIMENSION, BEST = 1024, 384, 100
ENCODE_BOUND, SEARCH_BOUND = 1.5, 1.3


def in_turns(sides: Mapping[str, Callable[[], object]], rounds: int) -> dict[str, list[float]]:
    """Processor seconds of each side in each round; a first round does not count."""
    seconds: dict[str, list[float]] = {name: [] for name in sides}
    for number in range(rounds + 1):
        for name, side in sides.items():
            begin = time.process_time()
            side()
            if number:
                seconds[name].append(time.process_time() - begin)
    return seconds


def row(name: str, ratios: list[float], bound: float, *, at_least: bool, **facts: Any) -> dict[str, Any]:
    """A row of the result."""
    value = statistics.median(ratios)
    return {
        "name": name,
        "ratio": round(value, 2),
        "of rounds": f"{min(ratios):.2f} to {max(ratios):.2f}",
        "bound": bound,
        "ok": value >= bound if at_least else value <= bound,
        **{key: round(statistics.median(seconds), 3) for key, seconds in facts.items()},
    }


def texts() -> list[str]:
    """Texts of mixed lengths, in random order."""
    generator = random.Random(1)
    out = []
    for _ in range(TEXTS):
        words: list[str] = []
        count = generator.randint(*WORDS)
        while len(words) < count:
            words += sentence(generator).split()
        out.append(" ".join(words[:count]))
    return out


def encode(folder: Path, rounds: int) -> dict[str, Any]:
    """Texts a second of ours over those of sentence-transformers, which gives the same vectors."""
    from sentence_transformers import SentenceTransformer
    from sentence_transformers.sentence_transformer.modules import Pooling, Transformer

    source = write_encoder(folder / "encoder", "RobertaForMaskedLM", max_position_embeddings=514, **SIZE)
    encoder = load_text_encoder(source, EncoderOptions())
    transformer = Transformer(str(source), max_seq_length=512)
    pooling = Pooling(transformer.get_embedding_dimension(), pooling_mode="mean")
    other = SentenceTransformer(modules=[transformer, pooling], device="cpu")
    given = texts()
    store = embed(encoder, given, "document", EncodeOptions(str(folder / "first")))
    worst = float(np.abs(rows_of(store, given) - other.encode(given, show_progress_bar=False)).max())
    assert worst < 1e-5, f"the vectors differ by {worst}"
    sides = {
        "ours": partial(_into_new_store, encoder, given, folder),
        "theirs": partial(other.encode, given, show_progress_bar=False),
    }
    seconds = in_turns(sides, rounds)
    ratios = [b / a for a, b in zip(seconds["ours"], seconds["theirs"], strict=True)]
    return row(
        "encode: texts/s / those of sentence-transformers", ratios, ENCODE_BOUND, at_least=True,
        **{"seconds": seconds["ours"], "seconds of the other side": seconds["theirs"]},
    )  # fmt: skip


def _into_new_store(encoder: TextEncoder, given: list[str], folder: Path) -> None:
    with tempfile.TemporaryDirectory(dir=folder) as store:
        embed(encoder, given, "document", EncodeOptions(str(store)))


def search(documents: int, rounds: int) -> dict[str, Any]:
    """Time of the search over that of the product of all queries and documents."""
    generator = np.random.default_rng(1)
    queries = unit_rows(generator.standard_normal((QUERIES, DIMENSION), dtype=np.float32))
    rows = unit_rows(generator.standard_normal((documents, DIMENSION), dtype=np.float32))
    order = generator.permutation(documents)

    def ours() -> None:
        best = TopK(queries, BEST, order)
        for start in range(0, documents, BLOCK):
            best.update(start, rows[start : start + BLOCK])
        best.result()

    def product() -> None:
        parts = torch.from_numpy(queries).split(512)
        for start in range(0, documents, BLOCK):
            block = torch.from_numpy(rows[start : start + BLOCK]).T
            for part in parts:
                torch.mm(part, block)

    seconds = in_turns({"ours": ours, "product": product}, rounds)
    ratios = [a / b for a, b in zip(seconds["ours"], seconds["product"], strict=True)]
    return row(
        f"search of {documents:,} documents: time / that of one product", ratios, SEARCH_BOUND, at_least=False,
        **{"seconds": seconds["ours"], "seconds of the other side": seconds["product"]},
    )  # fmt: skip


def main() -> int:
    """Measure, print, and say whether every bound is met."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=5)
    rounds = parser.parse_args().rounds
    torch.set_num_threads(1)
    quiet_libraries(debug=False)
    with tempfile.TemporaryDirectory() as folder:
        rows = [encode(Path(folder), rounds)]
    rows += [search(documents, rounds) for documents in (65_536, 131_072)]
    print(json.dumps({"rows": rows}), flush=True)
    return 0 if all(each["ok"] for each in rows) else 1


if __name__ == "__main__":
    raise SystemExit(main())
