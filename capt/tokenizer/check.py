"""Checks that our tokenizer gives the same ids as SentencePiece, and as ``transformers``."""

from __future__ import annotations

import logging
from collections.abc import Iterable, Sequence
from itertools import chain, pairwise
from pathlib import Path
from typing import TYPE_CHECKING

from tokenizers.normalizers import Normalizer

from capt.pretrain.base.errors import DataError
from capt.pretrain.base.parallel import batched
from capt.tokenizer.encode import TextTokenizer, load_tokenizer

if TYPE_CHECKING:
    from sentencepiece import SentencePieceProcessor

logger = logging.getLogger(__name__)

LINES = 1000
"""Texts that are compared together."""

TRICKY = (
    "",
    " ",
    "a",
    "  two  spaces   three ",
    "\ttabs\t\tand\nline\r\nends\n",
    "no\u00a0break, \u3000wide, zero\u200bwidth\ufeff, soft\u00adhyphen",
    "control \x00 \x01 \x1b \x7f \x85 characters",
    "<s> </s> <pad> <unk> <mask> a<s>b</s>c<pad>d<unk>e<mask>f",
    "[CLS] [SEP] [PAD] [UNK] [MASK] <|endoftext|>",
    "<0x41><0x0A> <0xFF>",
    "\u201cquotes\u201d \u2018single\u2019 \u2014 dash\u2026 ½ ™ ﬁne №5 ①",
    "naïve café e\u0301 Vie\u0323\u0302t ệ",
    "日本語のテキスト、中文文本。한국어 \u1112\u1161\u11ab\u1100\u1173\u11af",
    "Ελληνικά русский עברית العربية हिन्दी ไทย",
    "😀 👍🏽 👨\u200d👩\u200d👧 🏳️\u200d🌈 🇬🇧",
    "\U0010ffff \ue000 \ufffd \U00020000",
    "aaaaaaaaaaaaaaaaaaaaaaaa ------------------======= ........ banananananas",
    "1234567890 3.14159 1,000,000 0x1F 2^10",
    "def f(x: int) -> str:\n    return f'{x!r}'  # comment",
    "http://example.org/a?b=c&d=%20#e user@example.org C:\\path\\file.txt",
    "x" * 2000,
)
"""Texts on which exports are known to go wrong."""


def check_round_trip(
    tokenizer: TextTokenizer,
    processor: SentencePieceProcessor,
    texts: Iterable[str],
    where: Path,
    *,
    unicode: Normalizer,
    trained: bool = False,
) -> int:
    """Compare ids with those of SentencePiece on ``TRICKY`` and ``texts``, lines of real text; return how many.

    SentencePiece gets ``TRICKY`` as normalised by ``unicode``, and of a ``trained`` model all lines: it does not sort
    combining marks. Then the log says how many lines get other ids without. Of a model from elsewhere the lines come as
    they are, and the same pieces in another order pass with a warning: segmentations of equal score, see `train`.

    Raises:
        DataError: a text gets other ids. The message says how many do, and shows the first.
    """
    total = ties = alone = wrong = 0
    first = ""
    lines = chain(((text, True) for text in TRICKY), ((text, trained) for text in texts))
    # Both kinds of text are compared in batches: the corpus may be larger than memory.
    for batch in batched(lines, LINES):
        for (text, normalised), ids in zip(batch, tokenizer.encode_batch([text for text, _ in batch]), strict=True):
            ours = ids.tolist()
            theirs = processor.encode(unicode.normalize_str(text) if normalised else text)
            if ours == theirs:
                # Counted where SentencePiece alone, without the steps before it, gives other ids.
                alone += trained and ours != processor.encode(text)
            elif not trained and _is_tie(processor, ours, theirs):
                ties += 1
            else:
                wrong += 1
                first = first or _difference(tokenizer, text, ours, theirs)
        total += len(batch)
    if wrong:
        raise DataError(
            f"{where}: the export does not tokenize like SentencePiece, so nothing was written: {wrong} of {total} "
            f"lines differ; {first}"
        )
    if ties:
        logger.warning("%s: %d of %d lines got pieces of equal score in another order", where, ties, total)
    if alone:
        logger.info(
            "%s: sentencepiece.model by itself gives other ids for %d of %d lines, whose marks or characters NFKC "
            "writes otherwise; use tokenizer.json",
            where, alone, total,
        )  # fmt: skip
    return total


def agreement(tokenizer: TextTokenizer, processor: SentencePieceProcessor, texts: Sequence[str]) -> int:
    """The number of ``texts`` that get SentencePiece's ids, or a segmentation of equal score."""
    pairs = [
        (ids.tolist(), processor.encode(text)) for text, ids in zip(texts, tokenizer.encode_batch(texts), strict=True)
    ]
    return sum(ours == theirs or _is_tie(processor, ours, theirs) for ours, theirs in pairs)


def _is_tie(processor: SentencePieceProcessor, ours: list[int], theirs: list[int]) -> bool:
    """Return whether both are the same pieces in another order, for the same text."""
    # Added tokens are behind the pieces, and SentencePiece does not know them.
    if sorted(ours) != sorted(theirs) or max(ours) >= processor.get_piece_size():
        return False
    return "".join(map(processor.id_to_piece, ours)) == "".join(map(processor.id_to_piece, theirs))


def check_with_transformers(folder: Path, texts: Sequence[str]) -> int:
    """Load ``folder`` with ``transformers.AutoTokenizer`` and compare it with ours; return the number of texts.

    Compared are the special ids, the vocabulary size, and the ids of ``texts`` and ``TRICKY``, single and in pairs
    (each text with the next), with special tokens around them. "<mask>" within a text is text to us, and to
    ``transformers`` only with ``split_special_tokens=True``, which is therefore set here.

    Raises:
        DataError: anything differs.
    """
    from transformers import AutoTokenizer

    ours = load_tokenizer(folder)
    theirs = AutoTokenizer.from_pretrained(folder)
    special = ours.special
    for name, expected in (
        ("bos_token_id", special.bos),
        ("cls_token_id", special.bos),
        ("pad_token_id", special.pad),
        ("eos_token_id", special.eos),
        ("sep_token_id", special.eos),
        ("unk_token_id", special.unk),
        ("mask_token_id", special.mask),
    ):
        if getattr(theirs, name) != expected:
            raise DataError(f"{folder}: transformers takes {name} for {getattr(theirs, name)}, it is {expected}")
    if len(theirs) != ours.vocab_size:
        raise DataError(f"{folder}: transformers has {len(theirs)} tokens, the vocabulary has {ours.vocab_size}")
    # Pairs as well: where two texts meet, families differ in their separators, which single texts do not show.
    lines = [*texts, *TRICKY]
    singles = [[special.bos, *ids.tolist(), special.eos] for ids in ours.encode_batch(lines)]
    pairs = [pair.ids for pair in ours.backend.encode_batch(list(pairwise(lines)))]
    loaded = chain(
        theirs(lines, split_special_tokens=True, verbose=False)["input_ids"],
        theirs(lines[:-1], lines[1:], split_special_tokens=True, verbose=False)["input_ids"],
    )
    for index, (expected_ids, ids) in enumerate(zip([*singles, *pairs], loaded, strict=True)):
        if ids != expected_ids:
            what = "text" if index < len(lines) else "pair that begins with"
            raise DataError(
                f"{folder}: transformers tokenizes the {what} {_shorten(lines[index % len(lines)])} differently: "
                f"{_pieces(ours, ids)}, not {_pieces(ours, expected_ids)}"
            )
    return len(lines)


def _difference(tokenizer: TextTokenizer, text: str, ours: Sequence[int], theirs: Sequence[int]) -> str:
    # The longer of two that begin alike differs where the shorter ends.
    differ = (i for i, (a, b) in enumerate(zip(ours, theirs, strict=False)) if a != b)
    same = next(differ, min(len(ours), len(theirs)))
    return (
        f"{_shorten(text)} gives {_pieces(tokenizer, ours[same:])}, not {_pieces(tokenizer, theirs[same:])}, after "
        f"{same} equal pieces"
    )


def _pieces(tokenizer: TextTokenizer, ids: Sequence[int]) -> list[str | None]:
    return [tokenizer.backend.id_to_token(i) for i in ids[:6]]


def _shorten(text: str) -> str:
    return repr(text if len(text) <= 60 else text[:57] + "...")
