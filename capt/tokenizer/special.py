"""The special tokens of a tokenizer: which ids they are, and their places around one text or a pair of texts."""

from __future__ import annotations

import logging
import re
from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields
from pathlib import Path

from tokenizers import AddedToken, Encoding, Regex, Tokenizer, models, normalizers, pre_tokenizers, processors

from capt.pretrain.base.errors import DataError

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class SpecialIds:
    """The ids of the special tokens; BERT calls ``bos`` and ``eos``, which surround a text, ``[CLS]`` and ``[SEP]``."""

    bos: int
    pad: int
    eos: int
    unk: int
    mask: int


NEVER_IN_TEXT = -1e4
"""Unigram score of a piece that represents no text: below any sequence of pieces that spells its name."""

ROLES = tuple(field.name for field in fields(SpecialIds))
TRAINED = {"bos": "<s>", "pad": "<pad>", "eos": "</s>", "unk": "<unk>", "mask": "<mask>"}
_BYTE_PIECE = re.compile("<0x[0-9A-F]{2}>")
_WELL_KNOWN = {
    "bos": ("<s>", "[CLS]", "<|endoftext|>"),
    "pad": ("<pad>", "[PAD]"),
    "eos": ("</s>", "[SEP]", "<|endoftext|>"),
    "unk": ("<unk>", "[UNK]", "<|endoftext|>"),
    "mask": ("<mask>", "[MASK]"),
}
ROLE_NAMES = frozenset(name for names in _WELL_KNOWN.values() for name in names)
"""Names that represent no text in any folder."""


def resolve_special_ids(
    tokenizer: Tokenizer, declared: Mapping[str, str], where: Path, *, add_missing: bool
) -> SpecialIds:
    """Find the id of every role, register those tokens as special in ``tokenizer``, and set its template.

    Text that reads like the name of a special token, or of a byte piece, stays text: see `_keep_text_as_text`.

    A role is looked up by its ``declared`` token, otherwise by the well-known names. What is missing is appended at the
    end of the vocabulary if ``add_missing``, by its declared name or as in `TRAINED`; the ids that exist do not move.

    Raises:
        DataError: a role has no token in the vocabulary and ``add_missing`` is false, or the folder puts other special
            tokens around a text than encoders here are given.
    """
    vocabulary = tokenizer.get_vocab(with_added_tokens=True)
    # A declared token counts alone, even where a well-known one is there too.
    candidates = {role: (declared[role],) if role in declared else _WELL_KNOWN[role] for role in ROLES}
    present = {role: next((name for name in names if name in vocabulary), None) for role, names in candidates.items()}
    tokens = {role: name or declared.get(role, TRAINED[role]) for role, name in present.items()}
    missing = [role for role, name in present.items() if name is None]
    if missing and not add_missing:
        raise DataError(
            f"{where}: the tokenizer has no {' and no '.join(missing)} token; name tokens of its vocabulary in "
            f"tokenizer_config.json ({', '.join(f'{role}_token' for role in missing)}), "
            f"or append {', '.join(tokens[role] for role in missing)}: --add-missing of capt tokenizer export for a "
            "SentencePiece model, add_missing=True in Python"
        )
    for role in missing:
        logger.warning("%s: %s appended to the vocabulary as the %s token", where, tokens[role], role)
    registered = {token.content for token in tokenizer.get_added_tokens_decoder().values() if token.special}
    tokenizer.add_special_tokens(
        [
            # a mask takes the space before it, as in RoBERTa: " <mask>" represents " word"
            AddedToken(tokens[role], normalized=False, special=True, lstrip=role == "mask")
            for role in ROLES
            if tokens[role] not in registered
        ]
    )
    # Once more: tokens may have been appended.
    vocabulary = tokenizer.get_vocab(with_added_tokens=True)
    special = SpecialIds(**{role: vocabulary[tokens[role]] for role in ROLES})
    _set_template(tokenizer, special, where)
    _keep_text_as_text(tokenizer, special, where)
    logger.debug("%s: special ids %s", where, asdict(special))
    return special


def _keep_text_as_text(tokenizer: Tokenizer, special: SpecialIds, where: Path) -> None:
    """Add a step to ``tokenizer`` where the name of a special token in a text would become that token.

    Most vocabularies can spell these names. A unigram model without a piece for ``<``, and one of whole words, cannot,
    and would take the token itself. Where a character without a piece is ``<unk>``, the step puts another such
    character in its place; where it is written in bytes, the step splits the text there, which leaves the bytes alone.
    """
    # Without added tokens: those are found by another way than pieces.
    vocabulary = tokenizer.get_vocab(with_added_tokens=False)
    special_tokens = tokenizer.get_added_tokens_decoder().items()
    # of a name of one character there is no other spelling
    names = {token.content: i for i, token in special_tokens if token.special and len(token.content) > 1}
    names |= {name: i for name, i in vocabulary.items() if _BYTE_PIECE.fullmatch(name)}
    letters = set("".join(piece for piece in vocabulary if piece not in names))
    unknown = str(tokenizer.id_to_token(special.unk))
    if not isinstance(tokenizer.model, models.Unigram) or letters.isdisjoint(unknown):
        names.pop(unknown, None)  # a text that reads so is unknown as a whole in any case
    tokenizer.encode_special_tokens = True

    def taken() -> list[str]:
        # Alone, and within a text, where a space before it may be part of the piece. One call, for there are hundreds.
        cases = [(name, i, text) for name, i in names.items() for text in (name, f"a{name} {name}")]
        encoded = tokenizer.encode_batch([text for *_, text in cases], add_special_tokens=False)
        found = {name for (name, i, text), each in zip(cases, encoded, strict=True) if _has(name, i, text, each)}
        return [name for name in names if name in found]

    if not (wrong := taken()):
        return
    # A character of Unicode's private use that no piece has.
    absent = next(chr(code) for code in range(0xE000, 0xF900) if chr(code) not in letters)
    patterns = []
    for name in wrong:
        # The first letter of the name that no piece has: without it the rest is spelt as text.
        at = next((i for i, c in enumerate(name) if c not in letters), 0)
        patterns.append(f"(?<={re.escape(name[:at])}){re.escape(name[at])}(?={re.escape(name[at + 1 :])})")
    pattern = Regex("|".join(patterns))
    # Where unknown characters are <unk>, one may replace another; where they are bytes, it would give other bytes.
    if special.unk in tokenizer.encode(absent, add_special_tokens=False).ids:
        step = normalizers.Replace(pattern, absent)
        tokenizer.normalizer = normalizers.Sequence([n for n in (tokenizer.normalizer, step) if n is not None])
    else:
        split = pre_tokenizers.Split(pattern, "isolated")
        tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
            [p for p in (tokenizer.pre_tokenizer, split) if p is not None]
        )
    if still := taken():
        logger.warning("%s: the text %s is taken for the special token of this name", where, " and ".join(still))


def _has(name: str, token: int, text: str, encoded: Encoding) -> bool:
    """Return whether ``token`` is that of ``name`` in a text."""
    return token in encoded.ids and any(
        i == token and text[start:end].strip() == name
        for i, (start, end) in zip(encoded.ids, encoded.offsets, strict=True)
    )


def _set_template(tokenizer: Tokenizer, special: SpecialIds, where: Path) -> None:
    """Set the template of a tokenizer that puts nothing around a text, as GPT-2's; check that of any other.

    What a tokenizer makes of a pair of texts is its own: see `pair_template`.
    """
    a = tokenizer.encode("a", add_special_tokens=False).ids
    bos, eos = tokenizer.id_to_token(special.bos), tokenizer.id_to_token(special.eos)
    # Pairs are [CLS] A [SEP] B [SEP] with token types 0 and 1, or <s> A </s> </s> B </s>.
    bert = bos == "[CLS]"
    single = tokenizer.encode("a")
    # Nothing is put around a text.
    if single.ids == a:
        tokenizer.post_processor = processors.TemplateProcessing(
            single=f"{bos} $A {eos}",
            pair=f"{bos} $A {eos} $B:1 {eos}:1" if bert else f"{bos} $A {eos} {eos} $B {eos}",
            special_tokens=[(bos, special.bos), (eos, special.eos)],
        )
        return
    if single.ids != [special.bos, *a, special.eos]:
        raise DataError(
            f"{where}: the post_processor of tokenizer.json makes {' '.join(single.tokens)} of the text a; "
            f"encoders here read {bos} a {eos}"
        )


@dataclass(frozen=True)
class PairTemplate:
    """The special tokens of a pair of texts: ``before A between B after``.

    Attributes:
        before: ids in front of the first text.
        between: ids of the special tokens between the texts.
        after: ids behind the second text.
        types: token types of ``before``, of all tokens of A, of ``between``, of B and of ``after``, in this order.
    """

    before: tuple[int, ...]
    between: tuple[int, ...]
    after: tuple[int, ...]
    types: tuple[int, ...]

    @property
    def added(self) -> int:
        """The number of special tokens."""
        return len(self.before) + len(self.between) + len(self.after)

    @property
    def second_type(self) -> int | None:
        """The place in ``types`` from which on they are 1; None where all are 0.

        Raises:
            DataError: they are others, or go back to 0.
        """
        if list(self.types) != sorted(self.types) or set(self.types) - {0, 1}:
            raise DataError(
                f"the post_processor of tokenizer.json gives the parts of a pair the token types {self.types}; an "
                "encoder that reads them here has 0, and from some part on 1"
            )
        return self.types.index(1) if 1 in self.types else None


def pair_template(tokenizer: Tokenizer) -> PairTemplate:
    """The template by which ``tokenizer`` puts a pair of texts together, as the library and AutoTokenizer do.

    Raises:
        DataError: it does not put each text there once, the first one first.
    """
    a, b = (tokenizer.encode(text, add_special_tokens=False).ids for text in "ab")
    pair = tokenizer.encode("a", "b")
    texts = [number for number in pair.sequence_ids if number is not None]
    first, second = (pair.sequence_ids.index(number) if number in texts else 0 for number in (0, 1))
    end, last = first + len(a), second + len(b)
    once = pair.special_tokens_mask.count(0) == len(a) + len(b)
    if not once or texts != [0] * len(a) + [1] * len(b) or pair.ids[first:end] != a or pair.ids[second:last] != b:
        raise DataError(
            f"the post_processor of tokenizer.json makes {' '.join(pair.tokens)} of the pair a, b; a row here has the "
            "first text, and after it the second one"
        )
    kinds = pair.type_ids
    return PairTemplate(
        before=tuple(pair.ids[:first]),
        between=tuple(pair.ids[end:second]),
        after=tuple(pair.ids[last:]),
        types=(*kinds[: first + 1], *kinds[end : second + 1], *kinds[last:]),
    )
