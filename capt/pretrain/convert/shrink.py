"""``capt shrink``: an encoder with a part of its layers and of its vocabulary, compared with what it is made of."""

from __future__ import annotations

import logging
import re
import shutil
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import median
from typing import Any

import torch
from jaxtyping import Int
from torch import Tensor

from capt.pretrain.base.errors import CheckpointError, ConfigError, DataError, quoted
from capt.pretrain.base.files import write_json
from capt.pretrain.base.parallel import batched
from capt.pretrain.convert.huggingface import check_tokenizer
from capt.pretrain.convert.merge import other_files
from capt.pretrain.convert.output import refuse_existing, write_export
from capt.pretrain.convert.reference import TEXTS, require_close, tokenize
from capt.pretrain.engine.durable import write_tensors
from capt.pretrain.models.encoder import Encoder
from capt.pretrain.models.foreign.encoder import PretrainedEncoder, load_encoder, read_encoder
from capt.pretrain.models.hf_config import SENTENCE_FILES, TOKENIZER_FILES, local_folder
from capt.pretrain.models.hf_folder import BUFFER, is_hf, read_json, read_tensors
from capt.pretrain.models.sentence_folder import SETTINGS, encoder_folder
from capt.tokenizer.encode import TextTokenizer, load_tokenizer
from capt.tokenizer.shrink import ShrunkTokenizer, count_pieces, shrink_tokenizer

logger = logging.getLogger(__name__)

_LAYER = re.compile(r"((?:^|.*?\.)layers?\.)(\d+)(\..*)")
_ROWS = re.compile(
    r"(.*\.)?(word_embeddings|tok_embeddings|decoder|lm_head|vocab_projector|generator_lm_head|predictions)\.(weight|bias)"
)
"""Tensors with a row for each id: the table, and the matrix and the bias of a language-model head."""
_LAYERS = ("num_hidden_layers", "n_layers")
_FROM_PADDING = ("roberta", "xlm-roberta", "camembert", "mpnet")
"""Families whose positions begin after the id of padding, which must stay what it is."""
_SEGMENTS = {"bert": 2, "electra": 2, "albert": 2}
"""Token types of a ``config.json`` that does not say how many."""
_VOCABULARIES = (*TOKENIZER_FILES[:7], "spm.model", "sentencepiece.bpe.model")
_HEADS = ("bottleneck.safetensors", "bottleneck.json")
"""Heads of pretraining that know the whole vocabulary."""
_COMPARED, _LENGTH, _TURNS = 64, 128, 5
"""Texts whose states are compared, tokens of one at most, and turns of the two models in the measurement."""
_BLOCK = 1024

_Texts = Callable[[], Iterable[str]]


@dataclass(frozen=True)
class Shrinkage:
    """Layers, pieces, parameters, bytes of weights and texts a second, each before and after, and what was compared.

    Attributes:
        texts: texts that both tokenizers have read.
        whole: those all of whose pieces are kept; their ids map one to one.
        different: those whose pieces are others.
        difference: largest difference of hidden states and of logits at kept ids, relative to the largest of them.
    """

    layers: tuple[int, int]
    pieces: tuple[int, int]
    parameters: tuple[int, int]
    bytes: tuple[int, int]
    speed: tuple[float, float]
    texts: int
    whole: int
    different: int
    difference: float

    def to_json(self) -> dict[str, Any]:
        """The figures by name."""
        return asdict(self)

    def lines(self) -> Iterator[str]:
        """The figures as a person reads them."""
        yield f"layers: {self.layers[0]} -> {self.layers[1]}; pieces: {self.pieces[0]:,} -> {self.pieces[1]:,}"
        if self.texts:
            equal = "equal to the last bit" if self.difference == 0 else f"equal within {self.difference:.1e}"
            yield f"texts all of whose pieces are kept: {self.whole:,} of {self.texts:,}; their ids map one to one"
            yield f"hidden states and logits at kept ids, of the same layers with the whole vocabulary: {equal}"
            share = self.different / self.texts
            yield f"texts that are tokenised differently: {self.different:,} of {self.texts:,} ({share:.2%})"
        smaller = self.bytes[1] / self.bytes[0]
        yield f"parameters: {self.parameters[0]:,} -> {self.parameters[1]:,}"
        yield f"weights: {self.bytes[0] / 1e6:,.1f} MB -> {self.bytes[1] / 1e6:,.1f} MB ({smaller:.0%})"
        before, after = self.speed
        yield f"texts a second here, in turns: {before:,.1f} -> {after:,.1f} ({after / before:.2f} times)"


@torch.no_grad()
def shrink_model(
    source: Path, out: Path, *, layers: Sequence[int] | None = None, texts: _Texts | None = None,
    number: int | None = None, overwrite: bool = False,
) -> Shrinkage:  # fmt: skip
    """Write the model ``source`` with the ``layers`` that are named, and the pieces that ``texts`` need, into ``out``.

    Args:
        source: a Hugging Face or sentence-transformers folder of any family with an encoder here, or a hub id.
        out: a new folder.
        layers: those to keep, ascending, negative ones from the last; None = all.
        texts: gives the texts whose pieces are kept; None = the whole vocabulary.
        number: keep this number of pieces at most for their counts; None = all that occur.
        overwrite: replace an older export.

    Raises:
        ConfigError: nothing is asked for, or layers that this encoder does not have or cannot do without.
        CheckpointError: the folder is damaged or of no known family, ``out`` is taken, or what is written differs.
        DataError: the tokenizer cannot be made smaller, or there is no text.
    """
    if layers is None and texts is None:
        raise ConfigError("nothing is left out: give --layers, --vocabulary-of, or both")
    refuse_existing(out, overwrite=overwrite)
    folder = local_folder(source, SENTENCE_FILES)
    if folder.resolve().is_relative_to(out.resolve()):
        raise ConfigError(f"{out}: the model {source} is in it; give another folder")
    if not is_hf(folder):
        raise ConfigError(
            f"{source}: no Hugging Face folder; make one of a run first: capt convert {quoted(source)} OUT --to hf"
        )
    encoder = encoder_folder(folder)
    config, whole = read_json(encoder / "config.json"), read_encoder(folder)
    kept = _require_layers(config, layers)
    shrunk = _shrunk(config, whole.tokenizer, texts, number, _prompts(folder))
    tensors = {name: x for name, x in read_tensors(encoder).items() if not BUFFER.fullmatch(name)}
    before = sum(x.numel() for x in tensors.values()), sum(x.numel() * x.element_size() for x in tensors.values())
    written = _with_layers(tensors, kept) if layers is not None else tensors
    described = _described(config, kept if layers is not None else None)
    if shrunk is not None:
        written = _with_rows(written, config, shrunk)
        described = _with_ids(described, shrunk)
    after = sum(x.numel() for x in written.values()), sum(x.numel() * x.element_size() for x in written.values())
    place, found = encoder.relative_to(folder), []

    def write(target: Path) -> None:
        (target / place).mkdir(parents=True, exist_ok=True)
        write_tensors(target / place / "model.safetensors", written, {"format": "pt"})
        write_json(target / place / "config.json", described)
        if shrunk is not None:
            segments = config.get("type_vocab_size", _SEGMENTS.get(str(config["model_type"]), 0))
            has_types = config["model_type"] != "mpnet" and segments > 1
            shrunk.tokenizer.save(target / place, types=has_types)
        for inner in other_files(folder, place):
            is_vocabulary = inner.parent == place and inner.name in _VOCABULARIES
            if inner.name != "README.md" and not (shrunk is not None and (is_vocabulary or inner.name in _HEADS)):
                (target / inner).parent.mkdir(parents=True, exist_ok=True)
                shutil.copyfile(folder / inner, target / inner)

    def check(target: Path) -> float:
        found.append(_compare(target, whole, kept if layers is not None else None, shrunk, texts))
        return found[0].difference

    card = f"# {out.name}\n\n{source.name} with layers {', '.join(map(str, kept))}"
    card += f" and {len(shrunk.old_ids):,} pieces" if shrunk is not None else ""
    write_export(
        out, write=write, check=check, card=f"{card}; made by `capt shrink`.\n", agrees="the model that it is made of",
        overwrite=overwrite,
    )  # fmt: skip
    pieces = whole.tokenizer.vocab_size
    return Shrinkage(
        (_number_of_layers(config), len(kept)), (pieces, pieces if shrunk is None else len(shrunk.old_ids)),
        (before[0], after[0]), (before[1], after[1]), **asdict(found[0]),
    )  # fmt: skip


# ---- layers


def _number_of_layers(config: Mapping[str, Any]) -> int:
    return int(next(config[key] for key in _LAYERS if key in config))


def _require_layers(config: Mapping[str, Any], layers: Sequence[int] | None) -> list[int]:
    """Return the layers to keep. Raises ``ConfigError`` for those that are not there, or do not go together."""
    there = _number_of_layers(config)
    if layers is None:
        return list(range(there))
    named, layers = layers, [number + there if number < 0 else number for number in layers]
    if not layers or sorted({*layers}) != layers or not 0 <= layers[0] <= layers[-1] < there:
        raise ConfigError(
            f"--layers {','.join(map(str, named))}: some of 0 to {there - 1}, ascending, as 0,2,4; -1 is the last one"
        )
    if config["model_type"] == "modernbert":
        if layers[0] != 0:
            raise ConfigError("--layers: ModernBERT's layer 0 alone has no norm before its attention: begin with 0")
        kinds = _kinds(config, layers)
        period = next((n for n in range(1, len(kinds) + 1) if kinds == [kinds[0] if i % n == 0 else _LOCAL
                       for i in range(len(kinds))]), None)  # fmt: skip
        if period is None:
            globals_ = ", ".join(str(i) for i, kind in enumerate(_kinds(config, range(there))) if kind != _LOCAL)
            raise ConfigError(
                f"--layers: of these every n-th one must see the whole sequence, as layers {globals_} do; keep all of "
                "those alone, or the same number of local ones between two of them"
            )
    if config["model_type"] == "albert" and config.get("num_hidden_groups", 1) != 1:
        raise ConfigError("--layers: the layers of this ALBERT share weights in groups, and cannot be told apart")
    return list(layers)


_LOCAL = "sliding_attention"


def _kinds(config: Mapping[str, Any], layers: Iterable[int]) -> list[str]:
    """The kind of attention of each layer of a ModernBERT."""
    every = config.get("global_attn_every_n_layers", 3)
    kinds = config.get("layer_types")
    return [kinds[i] if kinds else _LOCAL if i % every else "full_attention" for i in layers]


def _with_layers(tensors: Mapping[str, Tensor], kept: Sequence[int]) -> dict[str, Tensor]:
    """The tensors of the layers that are kept under their new numbers, and those of no layer."""
    new, found = {old: place for place, old in enumerate(kept)}, {}
    for name, tensor in tensors.items():
        match = _LAYER.fullmatch(name)
        if match is None:
            found[name] = tensor
        elif int(match[2]) in new:
            found[f"{match[1]}{new[int(match[2])]}{match[3]}"] = tensor
    return found


def _described(config: Mapping[str, Any], kept: Sequence[int] | None) -> dict[str, Any]:
    """The keys of a ``config.json`` with the number of layers, and of a ModernBERT their kinds."""
    if kept is None:
        return dict(config)
    changes: dict[str, Any] = {key: len(kept) for key in _LAYERS if key in config}
    if config["model_type"] == "modernbert":
        kinds = _kinds(config, kept)
        second = next((i for i, kind in enumerate(kinds) if i and kind != _LOCAL), len(kinds))
        # Releases before transformers 5 read the period alone.
        changes |= {"layer_types": kinds, "global_attn_every_n_layers": second}
    return {**config, **changes}


# ---- vocabulary


_LONGEST_WORD = 64
"""Letters of the first word of a text that are read behind a prompt."""


def _shrunk(
    config: Mapping[str, Any], tokenizer: TextTokenizer, texts: _Texts | None, number: int | None, prompts: list[str]
) -> ShrunkTokenizer | None:
    if texts is None:
        return None
    counts = count_pieces(tokenizer, texts())
    if not counts:
        raise DataError("--vocabulary-of: there is no text whose pieces could be counted")
    first = tokenizer.special.pad + 1 if config["model_type"] in _FROM_PADDING else 0
    for prompt in prompts:
        counts += _pieces_after(tokenizer, prompt, texts)
    # A prompt comes before every text, and is none of the texts.
    return shrink_tokenizer(tokenizer, counts, number, {*range(first), *count_pieces(tokenizer, prompts)})


def _pieces_after(tokenizer: TextTokenizer, prompt: str, texts: _Texts) -> Counter[int]:
    """The pieces of the first word of each text behind a prompt, where a space may be part of it."""
    if not prompt:
        return Counter()
    first = [words[0][:_LONGEST_WORD] for text in texts() if (words := text.split(maxsplit=1))]
    found = count_pieces(tokenizer, (prompt + word for word in first))
    found.subtract({i: count * len(first) for i, count in count_pieces(tokenizer, [prompt]).items()})
    return +found


def _prompts(folder: Path) -> list[str]:
    """The prompts of a sentence-transformers folder; none of another one."""
    path = folder / SETTINGS
    prompts = read_json(path).get("prompts") if path.is_file() else None
    return [text for text in prompts.values() if isinstance(text, str)] if isinstance(prompts, dict) else []


def _with_rows(tensors: Mapping[str, Tensor], config: Mapping[str, Any], shrunk: ShrunkTokenizer) -> dict[str, Tensor]:
    """The tensors with the rows of the ids that are kept."""
    rows, old = config["vocab_size"], torch.from_numpy(shrunk.old_ids)
    return {
        name: x.index_select(0, old) if _ROWS.fullmatch(name) and x.shape[0] == rows else x
        for name, x in tensors.items()
    }


def _with_ids(config: Mapping[str, Any], shrunk: ShrunkTokenizer) -> dict[str, Any]:
    """The keys of a ``config.json`` with the new ids; one that is not kept is left out."""
    found: dict[str, Any] = {}
    for key, value in config.items():
        if not key.endswith("_token_id") or value is None:
            found[key] = value
        elif isinstance(value, list):
            found[key] = [shrunk.new_ids[i] for i in value if i in shrunk.new_ids]
        elif value in shrunk.new_ids:
            found[key] = shrunk.new_ids[value]
    return {**found, "vocab_size": len(shrunk.old_ids)}


# ---- the comparison


@dataclass(frozen=True)
class _Compared:
    speed: tuple[float, float]
    texts: int
    whole: int
    different: int
    difference: float


def _compare(
    folder: Path, whole: PretrainedEncoder, kept: Sequence[int] | None, shrunk: ShrunkTokenizer | None,
    texts: _Texts | None,
) -> _Compared:  # fmt: skip
    """Compare what is in ``folder`` with the encoder that it is made of, and load it with the other libraries.

    Raises:
        CheckpointError: a text gets other ids than it should, or a state or a logit differs.
    """
    after = load_encoder(read_encoder(folder), str(folder), dropout=0.0, attention_dropout=0.0).eval()
    counted, samples = _read_by_both(whole.tokenizer, shrunk, texts)
    old = tokenize(samples or [""], whole.tokenizer, min(_LENGTH, after.max_positions))
    new = old if shrunk is None else _mapped(old, shrunk.new_ids)
    # The same layers with all rows: what is compared is the vocabulary.
    state, keys = whole.state, whole.hf_config
    if kept is not None:
        state, keys = _with_layers(state, kept), _described(keys, kept)
    settings: dict[str, Any] = {"dropout": 0.0, "attention_dropout": 0.0}
    cut = load_encoder(PretrainedEncoder(keys, state, whole.tokenizer), str(folder), **settings).eval()
    difference = 0.0
    theirs = cut(old, padded=True)[old != cut.pad_id]
    ours = after(new, padded=True)[new != after.pad_id]
    difference = max(difference, require_close("hidden states", theirs, ours))
    rows = slice(None) if shrunk is None else torch.from_numpy(shrunk.old_ids)
    logits = theirs @ cut.word_embedding.weight.T
    ids = after.vocab_size if shrunk is None else len(shrunk.old_ids)
    difference = max(
        difference, require_close("logits", logits[:, rows][:, :ids], ours @ after.word_embedding.weight[:ids].T)
    )
    del cut, logits
    _check_libraries(folder, after, shrunk)
    before = load_encoder(whole, str(folder), **settings).eval()
    return _Compared(_speed(before, old, after, new), *counted, difference)


def _read_by_both(
    tokenizer: TextTokenizer, shrunk: ShrunkTokenizer | None, texts: _Texts | None
) -> tuple[tuple[int, int, int], list[str]]:
    """Count the texts, those with kept pieces alone, and those with other pieces; and return some of the former."""
    if shrunk is None or texts is None:
        return (0, 0, 0), list(TEXTS)
    number = whole = different = 0
    samples: list[str] = []
    for block in batched(texts(), _BLOCK):
        for text, old, new in zip(
            block, tokenizer.encode_batch(block), shrunk.tokenizer.encode_batch(block), strict=True
        ):
            number += 1
            different += shrunk.old_ids[new].tolist() != old.tolist()
            if all(i in shrunk.new_ids for i in old.tolist()):
                whole += 1
                if shrunk.old_ids[new].tolist() != old.tolist():
                    raise CheckpointError(
                        f"the smaller tokenizer reads {text[:60]!r} in other pieces, and has them; nothing written"
                    )
                if len(samples) < _COMPARED and len(old):
                    samples.append(text)
    return (number, whole, different), samples


def _mapped(tokens: Int[Tensor, "n L"], new_ids: Mapping[int, int]) -> Int[Tensor, "n L"]:
    return torch.tensor([[new_ids[i] for i in row] for row in tokens.tolist()])


def _check_libraries(folder: Path, encoder: Encoder, shrunk: ShrunkTokenizer | None) -> None:
    """Load the folder with transformers, and with sentence-transformers where it is of that library."""
    import transformers

    place = encoder_folder(folder)
    tokenizer = load_tokenizer(place) if shrunk is None else shrunk.tokenizer
    if shrunk is not None:
        check_tokenizer(place, tokenizer)
    tokens = tokenize(TEXTS, tokenizer, min(_LENGTH, encoder.max_positions))
    real = tokens != encoder.pad_id
    loaded = transformers.AutoModel.from_pretrained(place, local_files_only=True, dtype=torch.float32).eval()
    theirs = loaded(input_ids=tokens, attention_mask=real.long()).last_hidden_state
    require_close("transformers, hidden states", encoder(tokens, padded=True)[real], theirs[real])
    if not (folder / "modules.json").is_file():
        return
    try:
        from sentence_transformers import SentenceTransformer
    except ImportError:
        logger.warning("sentence-transformers is not installed: the folder is not loaded with it")
        return
    model: Any = SentenceTransformer(str(folder), device="cpu", trust_remote_code=False, local_files_only=True)
    vectors = torch.as_tensor(model.encode(list(TEXTS), show_progress_bar=False))
    if not bool(vectors.isfinite().all()):
        raise CheckpointError(f"{folder}: sentence-transformers gives vectors that are not finite; nothing written")


def _speed(
    before: Encoder, old: Int[Tensor, "n L"], after: Encoder, new: Int[Tensor, "n L"]
) -> tuple[float, float]:  # fmt: skip
    """Texts a second of both encoders, in turns, so that other work on the machine slows both."""
    rates: tuple[list[float], list[float]] = ([], [])
    for _ in range(_TURNS):
        for rate, encoder, tokens in zip(rates, (before, after), (old, new), strict=True):
            begin = time.perf_counter()
            encoder(tokens, padded=True)
            rate.append(len(tokens) / (time.perf_counter() - begin))
    return median(rates[0]), median(rates[1])
