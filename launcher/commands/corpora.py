"""``capt tokenizer`` and ``capt data``: from text to token shards."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, cast

import typer

from capt.launcher.commands import options as o

if TYPE_CHECKING:
    from capt.pretrain.data.shards import ShardSummary
    from capt.pretrain.language.config import LanguageJob

tokenizer_app = typer.Typer(help="Train, use and export tokenizers.", rich_markup_mode=None)
data_app = typer.Typer(help="Prepare and inspect corpora.", rich_markup_mode=None)

Text = Annotated[list[str], typer.Argument(metavar="TEXT...", help=".txt, .jsonl, .parquet (also .gz), or patterns.")]
Folder = Annotated[Path, typer.Option(help="New folder to write.")]


@tokenizer_app.command(epilog="\b\nExample: capt tokenizer train 'corpus/*.txt.gz' --out tok --vocab-size 8192")
def train(
    text: Text,
    out: Folder,
    vocab_size: Annotated[int, typer.Option(min=1, help="Pieces, special tokens included.")] = 8192,
    kind: Annotated[str, typer.Option("--type", help="unigram or bpe.")] = "unigram",
    byte_fallback: Annotated[bool, typer.Option(help="Spell unknown characters as bytes.")] = True,
    normalization: Annotated[
        str, typer.Option(help="nmt_nfkc, nfkc, either with _cf (case folded), or identity.")
    ] = "nmt_nfkc",
    missing: Annotated[
        str, typer.Option(help="Rows of a table without text: skip leaves them out and says how many, or refuse.")
    ] = "skip",
    max_length: Annotated[int, typer.Option(min=8, help="model_max_length of the exported tokenizer.")] = 512,
    max_sentences: Annotated[int, typer.Option(min=1, help="Sentences to train on, sampled by seed.")] = 500_000,
    seed: Annotated[int, typer.Option(min=0)] = 0,
    json: o.Json = False,
) -> None:
    """Train a SentencePiece tokenizer; its Hugging Face export is checked to give the same ids."""
    from dataclasses import asdict

    from capt.launcher.progress import progress_bar
    from capt.pretrain.base.errors import ConfigError
    from capt.pretrain.data.config import DataConfig
    from capt.pretrain.data.prepare import tokenizer_corpus
    from capt.tokenizer.train import Kind, Normalization
    from capt.tokenizer.train import train as train_tokenizer

    if missing not in (choices := ("skip", "refuse")):
        raise ConfigError(f"--missing {missing}: choose one of {', '.join(choices)}")
    data = DataConfig.model_validate({"source": "files", "files": text, "missing": missing, "validation_fraction": 0.0})
    with progress_bar("reading text") as progress:
        report = train_tokenizer(
            tokenizer_corpus(data, progress),
            out,
            vocab_size=vocab_size,
            type=cast(Kind, kind),  # checked there, as normalization is
            byte_fallback=byte_fallback,
            normalization=cast(Normalization, normalization),
            model_max_length=max_length,
            max_sentences=max_sentences,
            seed=seed,
        )
    if json:
        o.echo_json(asdict(report))
    else:
        typer.echo(
            f"{out}: {report.vocab_size} pieces from {report.used} of {report.sentences} sentences "
            f"in {report.seconds} s; {report.checked} lines have the same ids in SentencePiece and in tokenizer.json"
        )


@tokenizer_app.command(epilog="\b\nExample: echo 'A line of text.' | capt tokenizer encode tok --pieces")
def encode(
    tokenizer: Annotated[Path, typer.Argument(metavar="TOKENIZER", help="A tokenizer folder.")],
    text: Annotated[
        list[Path] | None,
        typer.Argument(metavar="[TEXT...]", help="UTF-8 text files; standard input if none is given."),
    ] = None,
    pieces: Annotated[bool, typer.Option("--pieces", help="Print the pieces instead of their ids.")] = False,
) -> None:
    """Print the ids of each line of text, without special tokens around it."""
    from capt.pretrain.base.files import read_lines
    from capt.tokenizer.encode import load_tokenizer

    loaded = load_tokenizer(tokenizer)
    lines = read_lines(text) if text else (line.rstrip("\r\n") for line in sys.stdin)
    for batch in _batches(lines):
        for ids in loaded.encode_batch(batch):
            words = [loaded.backend.id_to_token(int(i)) for i in ids] if pieces else ids
            typer.echo(" ".join(map(str, words)))


@tokenizer_app.command(epilog="\b\nExample: capt tokenizer export sentencepiece.model tok --text corpus/sample.txt")
def export(
    model: Annotated[
        Path, typer.Argument(metavar="MODEL", help="A SentencePiece .model, or the folder that holds one.")
    ],
    out: Annotated[Path, typer.Argument(metavar="OUT", help="New folder to write.")],
    text: Annotated[list[Path] | None, typer.Option(help="Text whose ids are compared as well.")] = None,
    max_length: Annotated[int, typer.Option(min=8, help="model_max_length of the exported tokenizer.")] = 512,
    add_missing: Annotated[
        bool, typer.Option("--add-missing", help="Append special tokens that the model lacks.")
    ] = False,
) -> None:
    """Write a SentencePiece model as tokenizer.json, or refuse when any line would get other ids."""
    from capt.pretrain.base.files import read_lines
    from capt.tokenizer.export import export as export_tokenizer

    lines = export_tokenizer(
        model, out, texts=read_lines(text or []), model_max_length=max_length, add_missing=add_missing
    )
    typer.echo(f"{out}: {lines} lines have the same ids as in SentencePiece")


@data_app.command(
    epilog="\b\nExample: capt data prepare capt_small data.files=corpus.txt tokenizer.path=tok --out shards"
)
def prepare(
    context: typer.Context,
    config: o.Config,
    overrides: o.Overrides = None,
    out: Annotated[
        Path | None, typer.Option(help="Folder for the shards, to be named by data.shards (default: the cache).")
    ] = None,
) -> None:
    """Tokenize a job's text into shards, training its tokenizer first if it has none."""
    o.quiet(context)
    from capt.launcher.progress import progress_bar
    from capt.pretrain.data.prepare import prepare as prepare_cached
    from capt.pretrain.data.prepare import prepare_folder
    from capt.pretrain.language.prepare import tokenizer_folder
    from capt.tokenizer.encode import load_tokenizer

    job = _language_job(config, overrides)
    with progress_bar("preparing") as progress:
        folder = tokenizer_folder(job, progress)
        loaded = load_tokenizer(folder)
        if out is None:
            sets = [prepare_cached(job.data, loaded, split, progress) for split in ("train", "validation")]
        else:
            sets = list(prepare_folder(job.data, loaded, out, progress).values())
    for shards in sets:
        if shards is not None:
            without = shards.rows_without_text
            skipped = f"; {without} rows without text were left out" if without else ""
            typer.echo(f"{shards.folder}: {shards.documents} documents, {shards.tokens} tokens{skipped}")
    place = f"data.shards={out} " if out else ""
    typer.echo(f"use them with: {place}tokenizer.path={folder}")


@data_app.command(epilog="\b\nExample: capt data inspect shards/train --tokenizer tok --sequence-length 128")
def inspect(
    shards: Annotated[Path, typer.Argument(metavar="SHARDS", help="A shard set: a folder with a manifest.json.")],
    tokenizer: Annotated[
        Path | None, typer.Option(help="The tokenizer of the shards, to show text instead of ids.")
    ] = None,
    sequence_length: Annotated[int, typer.Option(min=8, help="Tokens per window.")] = 128,
    samples: Annotated[int, typer.Option(min=0, help="Windows to show.")] = 3,
    json: o.Json = False,
) -> None:
    """Verify a shard set and show how many documents and tokens it holds and how they pack into windows."""
    from dataclasses import asdict

    from capt.pretrain.base.verification import Verifier
    from capt.pretrain.data.shards import ShardSet, summarize
    from capt.tokenizer.encode import load_tokenizer

    opened = ShardSet.open(shards, Verifier(again=True))
    loaded = load_tokenizer(tokenizer) if tokenizer else None
    if loaded is not None:
        opened.check_tokenizer(loaded)
    decode = loaded.decode if loaded is not None else lambda ids: " ".join(map(str, ids))
    summary = summarize(opened, sequence_length, decode, samples)
    if json:
        o.echo_json({"folder": str(shards), **asdict(summary)})
    else:
        _show(summary, sequence_length)


def _show(summary: ShardSummary, sequence_length: int) -> None:
    typer.echo(f"{summary.documents} documents, {summary.tokens} tokens")
    typer.echo(f"a document has {summary.shortest} to {summary.longest} tokens, {summary.mean:.1f} on average:")
    for lower, count in summary.histogram.items():
        typer.echo(f"  {lower:>10} to {2 * lower - 1:<10} {count}")
    typer.echo(f"{summary.windows} windows of {sequence_length}, {summary.real_tokens:.2%} of their tokens are text")
    for sample in summary.samples:
        o.say(f"  | {sample}")


def _language_job(config: str, overrides: list[str] | None) -> LanguageJob:
    from capt.pretrain.base.errors import ConfigError
    from capt.pretrain.config.load import load_job
    from capt.pretrain.language.config import LanguageJob

    job = load_job(config, overrides or [])
    if not isinstance(job, LanguageJob):
        raise ConfigError(f"{config}: task.type is {job.task.type}; only capt_language jobs read text")
    return job


def _batches(lines: Iterator[str], size: int = 1024) -> Iterator[list[str]]:
    batch: list[str] = []
    for line in lines:
        batch.append(line)
        if len(batch) == size:
            yield batch
            batch = []
    if batch:
        yield batch
