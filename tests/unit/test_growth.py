"""Cost of a file from somebody else: time as its length, whatever its names are, and memory as its bytes.

A file is wide (columns, keys) or long (rows that differ), and its last name comes twice where that is an error: the
search for it goes over all. Times are of the processor; a square would make a hundred of ten. What a packed file holds
is bounded before it is unpacked.
"""

from __future__ import annotations

import base64
import gc
import gzip
import json
import re
import time
import tracemalloc
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pyarrow
import pyarrow.parquet
import pytest
from sentencepiece import sentencepiece_model_pb2
from tokenizers import Tokenizer, models, pre_tokenizers

from capt.finetune.labels.config import LabelsData
from capt.finetune.labels.data import read_splits
from capt.finetune.visual.dumps import coverage_problems
from capt.launcher.ssh import read_hostfile
from capt.pretrain.base import files
from capt.pretrain.base.errors import DataError, UserError, did_you_mean, repeated
from capt.pretrain.base.files import require_stored
from capt.pretrain.data.config import TextPart, check_mixture
from capt.pretrain.data.files import FileCorpus
from capt.pretrain.embeddings.similarity import read_sections, read_set
from capt.pretrain.embeddings.vectors import WordVectors, read_vectors
from capt.pretrain.latent.corpus import read
from capt.pretrain.models.hf_folder import read_tensor_file
from capt.pretrain.pairs.data_config import PairData
from capt.pretrain.pairs.forms import read_pairs
from capt.pretrain.regions.tsv_layout import infer_layout
from capt.pretrain.retrieval.data import read_collections, read_pair_rows
from capt.pretrain.vision_language.data.answers import load_table
from capt.pretrain.vision_language.data.read import read_examples
from capt.tokenizer.encode import load_tokenizer

Make = Callable[[Path, int], Any]
SPECIAL = ["<s>", "<pad>", "</s>", "<unk>", "<mask>"]


def _write(path: Path, lines: Iterable[str]) -> Path:
    path.write_text("".join(f"{line}\n" for line in lines), encoding="utf-8")
    return path


def _names(count: int, *, twice: bool = False) -> list[str]:
    names = [f"n{i}" for i in range(count)]
    return [*names, names[-1]] if twice else names


def _wide(path: Path, count: int, *, separator: str = ",", twice: bool = False, first: Sequence[str] = ()) -> Path:
    names = [*first, *_names(count, twice=twice)]
    rows = ([*(f"text {i} of {name}" for name in first), *["1"] * (len(names) - len(first))] for i in range(4))
    return _write(path, map(separator.join, [names, *rows]))


def _object(path: Path, count: int, *, twice: bool = False, **first: str) -> Path:
    def line(i: int) -> str:
        own = {key: f"{value} {i}" for key, value in first.items()}
        return (
            "{"
            + ", ".join(f'"{key}": {json.dumps(own.get(key, 1))}' for key in [*own, *_names(count, twice=twice)])
            + "}"
        )

    return _write(path, map(line, range(4)))


def _parquet(path: Path, count: int, *first: str) -> Path:
    columns: dict[str, Any] = {name: [f"text {i} of {name}" for i in range(4)] for name in first}
    pyarrow.parquet.write_table(pyarrow.table(columns | {name: [1, 2, 3, 4] for name in _names(count)}), path)
    return path


def _labels(path: Path) -> object:
    return read_splits(LabelsData(train=path))


def _pairs(path: Path) -> object:
    return list(read_pairs([path]))


def _text(path: Path) -> object:
    return list(FileCorpus([path], "text", None).pieces())


def _beir(folder: Path, count: int) -> Path:
    (folder / "qrels").mkdir(exist_ok=True)
    _write(folder / "corpus.jsonl", (json.dumps({"_id": f"d{i}", "text": f"text {i}"}) for i in range(count)))
    _write(folder / "queries.jsonl", (json.dumps({"_id": f"q{i}", "text": f"query {i}"}) for i in range(count)))
    _write(folder / "qrels" / "test.tsv", ["query-id\tcorpus-id\tscore", *(f"q{i}\td{i}\t1" for i in range(count))])
    _write(folder / "qrels" / "train.tsv", ["query-id\tcorpus-id\tscore", *(f"q0\td{i}\t1" for i in range(count))])
    return folder


def _vectors(words: int = 8) -> WordVectors:
    return WordVectors(tuple(f"w{i}" for i in range(words)), np.eye(words, dtype=np.float32))


def _regions(path: Path, count: int) -> Path:
    numbers = base64.b64encode(np.zeros(4, dtype=np.float32).tobytes()).decode()
    own = ["img_id", "img_h", "img_w", "num_boxes", "boxes", "features"]
    return _write(
        path,
        [
            "\t".join([*own, *["objects_conf"] * count]),
            "\t".join(["a", "4", "4", "1", numbers, numbers, *[""] * count]),
        ],
    )


def _captions(path: Path, count: int) -> Path:
    return _write(path, (json.dumps({"image": f"{i}.jpg", "caption": f"a picture {i}"}) for i in range(count)))


def _coco(path: Path, count: int) -> Path:
    images = [{"id": i, "file_name": f"{i}.jpg"} for i in range(count)]
    return _write(
        path, [json.dumps({"images": images, "annotations": [{"image_id": i, "caption": "a"} for i in range(count)]})]
    )


def _questions(path: Path, count: int) -> Path:
    return _write(
        path,
        [
            json.dumps(
                [{"img_id": f"p{i}", "sent": "what", "question_id": i, "label": {f"a{i}": 1.0}} for i in range(count)]
            )
        ],
    )


def _tokenizer(where: str, *, special: bool = False) -> Make:
    return lambda folder, count: _byte_level(folder, count, where, special=special)


def _byte_level(folder: Path, count: int, where: str, *, special: bool) -> Path:
    vocabulary = {token: i for i, token in enumerate([*SPECIAL, *sorted(pre_tokenizers.ByteLevel.alphabet())])}
    if where == "vocabulary":
        vocabulary |= {f"Ġn{i}": len(vocabulary) + i for i in range(count)}
    backend = Tokenizer(models.BPE(vocabulary, [("Ġ", "n")] * 0, ignore_merges=True))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel()
    (folder / "tokenizer.json").write_text(backend.to_str())
    token = {"lstrip": False, "rstrip": False, "single_word": False, "normalized": False, "special": special}
    names = [f"<n{i}>" for i in range(count)]
    config: dict[str, Any] = {}
    if where == "added_tokens_decoder":
        config = {where: {str(len(vocabulary) + i): {"content": name, **token} for i, name in enumerate(names)}}
    elif where in ("additional_special_tokens", "control_symbols"):
        config = {where: names}
        if where == "control_symbols":
            config["additional_special_tokens"] = names
    elif where == "added_tokens.json":
        (folder / where).write_text(json.dumps({name: len(vocabulary) + i for i, name in enumerate(names)}))
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    return folder


def _merges(folder: Path, count: int) -> Path:
    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    pairs = [(a, b) for a in letters for b in letters][:count]
    names = [*SPECIAL, *letters, *(a + b for a, b in pairs)]
    (folder / "vocab.json").write_text(json.dumps({token: i for i, token in enumerate(dict.fromkeys(names))}))
    _write(folder / "merges.txt", (" ".join(pair) for pair in pairs))
    return folder


def _words(folder: Path, count: int) -> Path:
    _write(folder / "vocab.txt", ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", *_names(count)])
    (folder / "tokenizer_config.json").write_text('{"tokenizer_class": "BertTokenizer"}')
    return folder


def _sentencepiece(folder: Path, count: int) -> Path:
    proto = sentencepiece_model_pb2.ModelProto()
    for piece, kind in (("<unk>", 2), ("<s>", 3), ("</s>", 3), ("[PAD]", 3), ("[CLS]", 3), ("[SEP]", 3)):
        proto.pieces.add(piece=piece, score=0.0, type=kind)
    for i in range(count):
        proto.pieces.add(piece="ab"[i % 2] * (1 + i % 400) + str(i), score=-float(i), type=1)
    for piece in "ab0123456789▁":
        proto.pieces.add(piece=piece, score=-1e6, type=1)
    proto.trainer_spec.model_type = 2
    proto.trainer_spec.unk_id = 0
    (folder / "spm.model").write_bytes(proto.SerializeToString())
    (folder / "tokenizer_config.json").write_text('{"tokenizer_class": "DebertaV2Tokenizer"}')
    return folder


def _safetensors(path: Path, count: int) -> Path:
    header = {
        name: {"dtype": "F32", "shape": [1], "data_offsets": [4 * i, 4 * i + 4]} for i, name in enumerate(_names(count))
    }
    text = json.dumps(header).encode()
    path.write_bytes(len(text).to_bytes(8, "little") + text + bytes(4 * count))
    return path


class Reader(NamedTuple):
    """A file of ``size`` names or rows, and what reads it."""

    size: int
    make: Make
    read: Callable[[Any], object]


def _json_rows(path: Path, rows: Iterable[Any]) -> Path:
    return _write(path, map(json.dumps, rows))


def _list(path: Path, count: int) -> Path:
    return _json_rows(path, [[f"text {i} {k}" for i in range(count)] for k in range(2)])


def _negatives(path: Path, count: int) -> Path:
    more = {f"negative_{i}": f"n {i}" for i in range(count)} | {f"x{i}": 1 for i in range(count)}
    return _json_rows(path, ({"query": f"q{k}", "positive": f"p{k}", **more} for k in range(2)))


def _other_keys(path: Path, count: int) -> Path:
    return _json_rows(path, ({"query": f"q{i}", "positive": f"p{i}", f"k{i}": i} for i in range(count)))


def _classes(path: Path, count: int) -> Path:
    return _write(path, ["text,label", *(f"text {i},c{i // 2}" for i in range(2 * count))])


def _sections(path: Path, count: int) -> Path:
    return _write(path, (line for i in range(count) for line in (f": s{i}", "w1 w2 w3 w4")))


def _pictures(path: Path) -> object:
    return read_examples([path])


def _rows_of_pairs(path: Path) -> object:
    return list(read_pair_rows([path]))


def _sources(count: int) -> list[Any]:
    return [{"name": name, "files": ["a"]} for name in _names(count, twice=True)]


def _parts(count: int) -> list[TextPart]:
    return [TextPart(name=name, files=["a"], weight=1.0) for name in _names(count, twice=True)]


READERS = {
    "pairs, csv": Reader(1000, lambda f, n: _wide(f / "a.csv", n, first=("query", "positive")), _pairs),
    "pairs, csv by order": Reader(600, lambda f, n: _wide(f / "a.csv", n), _pairs),
    "pairs, csv twice": Reader(2000, lambda f, n: _wide(f / "a.csv", n, twice=True), _pairs),
    "pairs, tsv": Reader(500, lambda f, n: _wide(f / "a.tsv", n, separator="\t", first=("query", "positive")), _pairs),
    "pairs, jsonl": Reader(500, lambda f, n: _object(f / "a.jsonl", n, query="a", positive="b"), _pairs),
    "pairs, jsonl twice": Reader(2000, lambda f, n: _object(f / "a.jsonl", n, twice=True, query="a"), _pairs),
    "pairs, a list": Reader(40, lambda f, n: _list(f / "a.jsonl", n), _pairs),
    "pairs, parquet": Reader(200, lambda f, n: _parquet(f / "a.parquet", n, "query", "positive"), _pairs),
    "pairs, negatives": Reader(200, lambda f, n: _negatives(f / "a.jsonl", n), _rows_of_pairs),
    "pairs, rows of other keys": Reader(10, lambda f, n: _other_keys(f / "a.jsonl", n), _pairs),
    "retrieval, BEIR": Reader(100, _beir, lambda p: (read_collections(p), read_collections(p, "train"))),
    "retrieval, BEIR as pairs": Reader(20, _beir, lambda p: list(read_pairs([p], split="test"))),
    "labels, csv": Reader(1000, lambda f, n: _wide(f / "a.csv", n, first=("text", "label")), _labels),
    "labels, jsonl": Reader(1000, lambda f, n: _object(f / "a.jsonl", n, text="a", label="b"), _labels),
    "labels, parquet": Reader(200, lambda f, n: _parquet(f / "a.parquet", n, "text", "label"), _labels),
    "labels, classes": Reader(30, lambda f, n: _classes(f / "a.csv", n), _labels),
    "text, csv": Reader(1000, lambda f, n: _wide(f / "a.csv", n, first=("text",)), _text),
    "text, no such column": Reader(1000, lambda f, n: _wide(f / "a.csv", n), _text),
    "text, jsonl": Reader(1000, lambda f, n: _object(f / "a.jsonl", n, text="a"), _text),
    "text, parquet": Reader(200, lambda f, n: _parquet(f / "a.parquet", n, "text"), _text),
    "words": Reader(200, lambda f, n: _write(f / "a.txt", (f"a{i} b{i} {i}" for i in range(n))), read_set),
    "analogies": Reader(200, lambda f, n: _sections(f / "a.txt", n), lambda p: read_sections(p, _vectors())),
    "vectors": Reader(200, lambda f, n: _write(f / "a.txt", (f"w{i} 1 2 3" for i in range(n))), read_vectors),
    "latent text": Reader(2000, lambda f, n: _write(f / "a.txt", _names(n)), lambda p: list(read(p, "text"))),
    "regions, names of fields": Reader(800, lambda f, n: _regions(f / "a.tsv", n), infer_layout),
    "captions": Reader(100, lambda f, n: _captions(f / "a.jsonl", n), _pictures),
    "captions, csv": Reader(1000, lambda f, n: _wide(f / "a.csv", n, first=("image", "caption")), _pictures),
    "captions of COCO": Reader(50, lambda f, n: _coco(f / "a.json", n), _pictures),
    "questions": Reader(100, lambda f, n: _questions(f / "a.json", n), _pictures),
    "answers": Reader(500, lambda f, n: _json_rows(f / "a.json", [{f"a{i}": i for i in range(n)}]), load_table),
    "predictions": Reader(1000, lambda f, n: _names(n), lambda names: coverage_problems([*names, *names], names)),
    "hosts": Reader(300, lambda f, n: _write(f / "hosts", (f"node-{i} slots=8" for i in range(n))), read_hostfile),
    "tokenizer, merges": Reader(500, _merges, load_tokenizer),
    "tokenizer, vocab.txt": Reader(500, _words, load_tokenizer),
    "tokenizer, pieces": Reader(100, _sentencepiece, load_tokenizer),
    "tokenizer, vocabulary": Reader(500, _tokenizer("vocabulary"), load_tokenizer),
    "tokenizer, tokens": Reader(200, _tokenizer("added_tokens_decoder"), load_tokenizer),
    "tokenizer, special tokens": Reader(200, _tokenizer("added_tokens_decoder", special=True), load_tokenizer),
    "tokenizer, tokens without ids": Reader(200, _tokenizer("additional_special_tokens"), load_tokenizer),
    "tokenizer, control symbols": Reader(100, _tokenizer("control_symbols"), load_tokenizer),
    "tokenizer, added_tokens.json": Reader(200, _tokenizer("added_tokens.json"), load_tokenizer),
    "tensors": Reader(100, lambda f, n: _safetensors(f / "model.safetensors", n), read_tensor_file),
    "names": Reader(2000, lambda f, n: _names(n, twice=True), repeated),
    "a name misspelt": Reader(1000, lambda f, n: _names(n), lambda names: did_you_mean("text", names)),
    "sources of a mixture": Reader(500, lambda f, n: _parts(n), check_mixture),
    "sources of pairs": Reader(200, lambda f, n: _sources(n), lambda sources: PairData(sources=sources)),
}


def _seconds(reader: Reader, source: Any, runs: int) -> float:
    best = float("inf")
    for _ in range(runs):
        gc.disable()  # what the other tests hold would be gone through
        begin = time.process_time()
        with suppress(UserError, ValueError):
            reader.read(source)
        best = min(best, time.process_time() - begin)
        gc.enable()
    return best


_OF_FAMILIES = ("words", "analogies", "vectors", "latent", "regions", "captions", "questions", "answers", "predictions")
NAMES = [pytest.param(name, marks=pytest.mark.family if name.startswith(_OF_FAMILIES) else ()) for name in READERS]


@pytest.mark.parametrize("name", NAMES)
def test_ten_times_the_file_takes_ten_times_as_long(name: str, tmp_path: Path) -> None:
    reader = READERS[name]
    sources = []
    for factor in (1, 10):
        folder = tmp_path / str(factor)
        folder.mkdir()
        sources.append(reader.make(folder, factor * reader.size))
    _seconds(reader, sources[0], 1)  # what is imported at the first use
    small = _seconds(reader, sources[0], 3)
    large = _seconds(reader, sources[1], 1)
    assert large < 20 * small + 0.05, f"{1000 * small:.1f} ms, and {1000 * large:.1f} ms for ten times as much"


def _zstd(path: Path) -> None:
    # A frame of 256 MiB of one letter, whose blocks of 128 KiB have four bytes each.
    block = (131072 << 3 | 1 << 1).to_bytes(3, "little") + b"a"
    path.write_bytes(b"\x28\xb5\x2f\xfd\x00\x58" + block * (1 << 11) + b"\x01\x00\x00")


def _gzip(path: Path) -> None:
    path.write_bytes(gzip.compress(b"a" * (16 << 20), mtime=0))


def _one_long_text(path: Path) -> None:
    # 1,000 rows of one text of a megabyte, which the file has once.
    text = pyarrow.array(["a" * 1_000_000]).dictionary_encode().dictionary
    rows = pyarrow.DictionaryArray.from_arrays(np.zeros(1000, dtype=np.int32), text)
    pyarrow.parquet.write_table(
        pyarrow.table({"text": rows}), path, dictionary_pagesize_limit=1 << 30, store_schema=False
    )


@pytest.mark.parametrize(
    ("name", "make"),
    [("a.jsonl.gz", _gzip), ("a.jsonl.zst", _zstd), ("a.txt.zst", _zstd), ("a.csv.zst", _zstd),
     ("a.parquet", _one_long_text)],
)  # fmt: skip
def test_what_a_small_file_holds_is_bounded_before_it_is_unpacked(
    tmp_path: Path, name: str, make: Callable[[Path], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(files, "_ALWAYS", 3 << 19)
    path = tmp_path / name
    make(path)
    before = pyarrow.default_memory_pool().max_memory()
    for reader in (_pairs, _text):
        tracemalloc.start()
        with pytest.raises(DataError, match=rf"{re.escape(name)}: [\d,]+ bytes hold .* more than 200 times their size"):
            reader(path)
        peak = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
        assert peak < 100 << 20
    assert pyarrow.default_memory_pool().max_memory() < max(before, 100 << 20)


def test_arrays_that_are_packed_are_refused(tmp_path: Path) -> None:
    np.savez_compressed(tmp_path / "a.npz", ids=np.zeros(1 << 20))
    with pytest.raises(DataError, match=r"a\.npz: [\d,]+ bytes hold 8,388,7\d\d bytes of arrays, and no more than"):
        require_stored(tmp_path / "a.npz")
    np.savez(tmp_path / "b.npz", ids=np.zeros(1 << 10))
    require_stored(tmp_path / "b.npz")
    (tmp_path / "c.npz").write_bytes(b"PK\x03\x04 and no more")
    with pytest.raises(DataError, match=r"c\.npz: not a whole zip of arrays"):
        require_stored(tmp_path / "c.npz")
