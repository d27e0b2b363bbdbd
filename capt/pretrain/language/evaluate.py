"""``capt evaluate`` of a trained encoder: every metric is given with its protocol."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from jaxtyping import Float, Int
from torch import Tensor
from torch.nn import functional as F

from capt.pretrain.base.distributed import device, rank, world_size
from capt.pretrain.base.errors import CheckpointError, ConfigError, DataError
from capt.pretrain.contrast.metrics import MaskedTokenAccumulator, PairAccumulator
from capt.pretrain.contrastive.metrics import contrast_metrics, noise_metrics, token_metrics
from capt.pretrain.data.config import CorruptionConfig, DataConfig
from capt.pretrain.data.corruption import Corruptor
from capt.pretrain.data.paths import resolve_paths
from capt.pretrain.data.prepare import prepare
from capt.pretrain.data.shards import PackedDataset
from capt.pretrain.data.sts_files import Pairs, find_sets
from capt.pretrain.engine.evaluations import Figures, Section, keep_sections, sections_as_text, write_result
from capt.pretrain.engine.provenance import provenance, used_versions
from capt.pretrain.language.batches import LanguageAssembler, LanguageBatch, validation_batches
from capt.pretrain.language.load import LoadedLanguageModel, load_hf, load_model
from capt.pretrain.language.prepare import vocabulary_of
from capt.pretrain.language.sts import encode_texts, score_rows, word_figures
from capt.pretrain.models.heads import MLMOutput, mean_over_tokens, take_rows
from capt.pretrain.models.hf_config import local_folder
from capt.pretrain.models.hf_folder import is_hf

# Vectors that an encoder gives for whole sequences, one by each of several poolers.


POOLERS = {
    "cls": "final hidden state of <s>, head not used",
    "mean": "mean final hidden state of all tokens but padding, head not used",
    "head": "aggregation head, unit rows",
}


class Representations:
    """The representations of a model in evaluation mode by ``poolers`` (keys of ``POOLERS``), in fp32.

    ``head`` needs a model with an aggregation head; it reads what it read in training (``model.pooling``).
    """

    def __init__(self, trained: LoadedLanguageModel, poolers: Sequence[str]) -> None:
        self.model = trained.model.to(device()).eval()
        self.tokenizer = trained.tokenizer
        self.poolers = tuple(poolers)

    @torch.no_grad()
    def encode_views(self, batch: LanguageBatch) -> tuple[dict[str, tuple[Tensor, Tensor]], MLMOutput]:
        """The (n, h) rows of the originals and of the corrupted for each pooler, and the MLM sums of the corrupted."""
        batch = batch.to(device())
        n = len(batch.tokens)
        # Both views in one pass, as in training.
        views = torch.cat([batch.tokens, batch.corrupted])
        documents = None if batch.documents is None else batch.documents.repeat(2, 1)
        hidden = self.model.encoder(views, padded=batch.padded, documents=documents)
        pairs = {name: (rows[:n], rows[n:]) for name, rows in self._pool(hidden, views).items()}
        return pairs, self.model.mlm(take_rows(hidden[n:], batch.positions), batch.labels)

    @torch.no_grad()
    def encode_texts(self, texts: Sequence[str]) -> Float[np.ndarray, "n w"]:
        """Vectors of ``<s> text </s>``, cut to the position table: h columns for each pooler, side by side."""
        ids = self.tokenizer.encode_framed(texts, self.model.encoder.max_positions)
        longest, pad = max(map(len, ids)), self.tokenizer.special.pad
        tokens = torch.tensor([row + [pad] * (longest - len(row)) for row in ids], device=device())
        hidden = self.model.encoder(tokens, padded=any(len(row) < longest for row in ids))
        return torch.cat(list(self._pool(hidden, tokens).values()), dim=1).cpu().numpy()

    def _pool(self, hidden: Float[Tensor, "n L h"], tokens: Int[Tensor, "n L"]) -> dict[str, Tensor]:
        hidden = hidden.float()
        pools = {"cls": hidden[:, 0], "mean": mean_over_tokens(hidden, tokens, self.model.encoder.pad_id)}
        if self.model.aggregation is not None:
            pools["head"] = self.model.aggregation(pools[self.model.config.pooling])
        return {name: pools[name] for name in self.poolers}


RATES = (0.15, 0.3)
TEMPERATURE = 0.05
"""Fixed, so that checkpoints trained under different temperatures compare."""


@dataclass(frozen=True)
class Settings:
    """Settings of an evaluation; see `evaluate`."""

    batch: int
    seed: int
    samples: int
    length: int


def evaluate(
    checkpoint: Path | LoadedLanguageModel,
    *,
    text: Sequence[Path] = (),
    sts: Path | Sequence[Pairs] | None = None,
    out: Path | None = None,
    batch: int = 32,
    seed: int = 1,
    poolers: Sequence[str] = tuple(POOLERS),
    samples: int = 512,
    length: int | None = None,
) -> dict[str, Any]:
    """Evaluate an encoder on held-out text and on semantic textual similarity.

    On each text, with 15% and with 30% of its tokens chosen for masking: MLM loss and accuracy, and by each pooler
    `contrast_metrics` (on unit rows) and `noise_metrics`. On each STS set: `score_rows`. The numbers of two
    checkpoints compare where their protocol lines are the same.

    Args:
        checkpoint: checkpoint folder, run folder (its best checkpoint, else the newest), or a loaded model.
        text: files of held-out text.
        sts: a folder for `find_sets` (dev and test of STS-B, test of the others), or the sets themselves.
        out: JSON file to write the result to as well.
        batch: windows or sentences a forward pass.
        seed: decides which windows are chosen and how they are corrupted.
        poolers: of ``cls``, ``mean`` and ``head``; the head is left out where the checkpoint has none (MLM alone).
        samples: windows of each text, at most.
        length: tokens of a window; unset = as the checkpoint was trained.

    Returns:
        ``checkpoint``, ``versions`` and ``sections`` (each `Section` as a mapping); `as_text` is for people.

    Raises:
        ConfigError: nothing to evaluate on, an unknown pooler, or ``length`` does not fit the position table.
        CheckpointError: as `load_model`; or only the head is asked for and there is none.
        DataError: text or STS files that cannot be used.
    """
    if not text and sts is None:
        raise ConfigError(
            "nothing to evaluate on: give files of held-out text (--text), a folder with STS sets (--sts), or a BEIR "
            "folder or a file of pairs to search in (--retrieval)"
        )
    unknown = [pooler for pooler in poolers if pooler not in POOLERS]
    if unknown or not poolers:
        raise ConfigError(f"poolers {', '.join(unknown) or '(none)'}: choose from {', '.join(POOLERS)}")
    sets = find_sets(sts) if isinstance(sts, Path) else sts or []
    trained = checkpoint if isinstance(checkpoint, LoadedLanguageModel) else load_model(checkpoint)
    settings = Settings(batch, seed, samples, length or trained.job.data.sequence_length)
    if not 8 <= settings.length <= trained.model.config.max_positions:
        raise ConfigError(f"length {length}: this checkpoint takes 8 to {trained.model.config.max_positions} tokens")
    representations = Representations(trained, _available_poolers(trained, poolers))
    sections = [part for path in text for part in _text_sections(trained, representations, path, settings)]
    sections += [_sts_section(representations, pairs, settings) for pairs in sets]
    result = {
        "checkpoint": str(trained.checkpoint),
        "versions": provenance(),
        "sections": [section.model_dump() for section in sections],
    }
    if out is not None and rank() == 0:
        write_result(out, result)
    return result


def command(
    checkpoint: Path,
    *,
    text: Sequence[Path] = (),
    sts: Path | None = None,
    out: Path | None = None,
    pooler: Sequence[str] = (),
    samples: int = 512,
    length: int | None = None,
    batch: int = 32,
    seed: int = 1,
    before: bool = False,
) -> dict[str, Any]:
    """`evaluate` with the options of the command line, of a checkpoint or a Hugging Face folder.

    The result is stored in the run (``evaluation-<checkpoint>.json``). Earlier results for the same checkpoint stay
    there, except sections of the same name, which are replaced. With ``before`` the model that the run was started from
    is measured alike, and the result has its sections under this name.

    Raises:
        ConfigError: ``before``, and the checkpoint's job has no ``model.init``.
        UserError: as `evaluate` does.
    """
    poolers = pooler or tuple(POOLERS)
    # File names first: a wrong one is told before a model is loaded.
    resolve_paths([str(path) for path in text], "--text")
    source = load_hf(checkpoint) if is_hf(checkpoint) else load_model(checkpoint)
    start = source.job.model.init
    if before and (start is None or is_hf(checkpoint)):
        raise ConfigError(f"--before: {checkpoint} is not a run that was started from another model (model.init)")
    # The other model too, and whether it takes the windows: not after an hour of measuring the first one.
    there = load_hf(local_folder(start)) if before and start is not None else None
    window = length or source.job.data.sequence_length
    if there is not None and window > (room := there.model.config.max_positions):
        raise ConfigError(f"--before: {start} takes at most {room} tokens, and windows have {window}; --length {room}")
    sets = find_sets(sts) if sts is not None else None
    given: dict[str, Any] = {"text": text, "sts": sets, "batch": batch, "seed": seed, "samples": samples}
    result = evaluate(source, **given, poolers=poolers, length=length)
    if not is_hf(checkpoint) and rank() == 0:
        keep_sections(Path(result["checkpoint"]), result)
    if there is not None:
        # A model from elsewhere has no aggregation head, but for our own exports.
        shared = [pooler for pooler in poolers if pooler != "head" or there.model.aggregation is not None]
        result["before"] = evaluate(there, **given, poolers=shared or ["mean"], length=window)["sections"]
    if out is not None and rank() == 0:
        write_result(out, result)
    return result


def as_text(result: dict[str, Any]) -> str:
    """The result of `evaluate` for people, and what the run has changed where that was measured."""
    return "\n".join([sections_as_text(result), *_changes(result.get("before", ()), result["sections"])])


def _changes(before: Sequence[Mapping[str, Any]], after: Sequence[Mapping[str, Any]]) -> list[str]:
    """A table of what both have measured, before the run and after it; empty where nothing was measured before."""
    if not before:
        return []
    lines = ["", f"{'what the run has changed':<58}{'before':>12}{'after':>12}{'change':>12}"]
    for old, new in zip(before, after, strict=True):
        pairs = {"": (old["metrics"], new["metrics"])}
        pairs |= {
            f", {name}": (old["poolers"][name], new["poolers"][name])
            for name in old["poolers"]
            if name in new["poolers"]
        }
        for pooler, (earlier, later) in pairs.items():
            # All figures of the whole model; the few of a pooler that compare before and after.
            for name in earlier.keys() & later.keys() if not pooler else [n for n in _COMPARED_METRICS if n in earlier]:
                if not pooler and name.startswith("spearman/"):
                    continue  # of words alone: no run changes it
                first, last = earlier[name], later[name]
                label = f"{new['name']}{pooler}, {name}"
                lines.append(f"  {label:<56}{first:>12.4f}{last:>12.4f}{last - first:>+12.4f}")
    return lines


_COMPARED_METRICS = ("spearman", "retrieval/to_corrupted", "drift")
"""The metrics of a pooler that are compared with those before a run."""


def _available_poolers(trained: LoadedLanguageModel, poolers: Sequence[str]) -> list[str]:
    present = [pooler for pooler in poolers if pooler != "head" or trained.model.aggregation is not None]
    if not present:
        raise CheckpointError(
            f"{trained.checkpoint}: trained without contrast, so there is no aggregation head; use pooler cls or mean"
        )
    return present


def _text_sections(
    trained: LoadedLanguageModel, model: Representations, path: Path, settings: Settings
) -> list[Section]:
    trained_on = trained.job.data
    data = DataConfig(
        source="files",
        files=[str(path)],
        text_column=trained_on.text_column,
        missing=trained_on.missing,
        document_start=trained_on.document_start,
        sequence_length=settings.length,
        cross_document_attention=trained_on.cross_document_attention,
        # The whole file is measured, and is prepared as text of training is.
        validation_fraction=0.0,
        workers=trained_on.workers,
        cache=trained_on.cache,
    )
    shards = prepare(data, trained.tokenizer, "train")
    assert shards is not None, "only validation text may be absent"
    windows = PackedDataset(shards, settings.length)
    if len(windows) < 2:
        raise DataError(f"{path}: fills {len(windows)} window of {settings.length} tokens; two or more are needed")
    return [_masked_section(trained, model, windows, data, rate, settings) for rate in RATES]


def _masked_section(
    trained: LoadedLanguageModel,
    model: Representations,
    windows: PackedDataset,
    data: DataConfig,
    rate: float,
    settings: Settings,
) -> Section:
    assembler = LanguageAssembler(
        windows,
        Corruptor(CorruptionConfig(rate=rate), vocabulary_of(trained.tokenizer), settings.length),
        seed=settings.seed,
        stream="corruption/evaluation",
        shuffle=True,
        pad_id=trained.model.config.pad_id,
        cross_document_attention=data.cross_document_attention,
    )
    samples = min(settings.samples, len(windows))
    # Sums over masked tokens, and both views of every window by each pooler, over all ranks.
    tokens, pairs = MaskedTokenAccumulator(), {pooler: PairAccumulator() for pooler in model.poolers}
    for batch, valid in validation_batches(assembler, samples, settings.batch, world_size(), rank()):
        views, sums = model.encode_views(batch)
        tokens.update(*sums)
        for pooler, (x, x_hat) in views.items():
            pairs[pooler].update(x[:valid], x_hat[:valid])
    poolers: dict[str, Figures] = {}
    for pooler, accumulator in pairs.items():
        x, x_hat = accumulator.gather()
        # The contrast is measured on unit rows, noise on rows as they are.
        unit = F.normalize(x, dim=1), F.normalize(x_hat, dim=1)
        poolers[pooler] = {**contrast_metrics(*unit, TEMPERATURE), **noise_metrics(x, x_hat)}
    attention = "across" if data.cross_document_attention else "within"
    protocol = (
        f"{samples} of {len(windows)} windows of {settings.length} tokens, seed {settings.seed}, attention {attention} "
        f"documents; mask_tokens {rate:.0%} (80/10/10); contrast at temperature {TEMPERATURE}; {_measured_with(model)}"
    )
    # A head that was never trained has nothing to measure.
    metrics = token_metrics(*tokens.totals()) if trained.has_mlm else {}
    name = f"{Path(data.files[0]).name}, {rate:.0%} masked"
    return Section(name=name, protocol=protocol, metrics=dict(metrics), systems=poolers)


def _sts_section(model: Representations, pairs: Pairs, settings: Settings) -> Section:
    rows = encode_texts([*pairs.first, *pairs.second], model.encode_texts, settings.batch)
    columns = np.split(rows, len(model.poolers), axis=1)
    poolers: dict[str, Figures] = {
        name: dict(score_rows(pairs, part)) for name, part in zip(model.poolers, columns, strict=True)
    }
    protocol = (
        f"SimCSE: Spearman of cosine over all {len(pairs.gold)} pairs together, words joined by one space, max length "
        f"{model.model.config.max_positions} tokens, no prompt, nothing random; tf-idf and word-counts are no model; "
        f"{_measured_with(model)}"
    )
    return Section(name=f"{pairs.name} {pairs.split}", protocol=protocol, metrics=word_figures(pairs), systems=poolers)


def _measured_with(model: Representations) -> str:
    pooled = ", ".join(f"{pooler} = {POOLERS[pooler]}" for pooler in model.poolers)
    dtype = str(next(model.model.parameters()).dtype).removeprefix("torch.")
    return f"{pooled}; {dtype} on {device().type}; {used_versions()}"
