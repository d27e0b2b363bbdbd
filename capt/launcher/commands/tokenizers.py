"""``capt tokenizer``: train, use and export tokenizers."""

from __future__ import annotations

import io
import sys
from dataclasses import asdict
from pathlib import Path
from typing import Annotated, cast

import typer

from capt.launcher.commands import options as o
from capt.pretrain.base.errors import ConfigError
from capt.pretrain.base.files import read_lines
from capt.pretrain.base.parallel import batched

app = typer.Typer(help="Train, use and export tokenizers.", rich_markup_mode=None)

Text = Annotated[
    list[str], typer.Argument(metavar="TEXT...", help=".txt, .jsonl, .csv, .parquet (also .gz, .zst), or patterns.")
]
_BATCH = 1024
"""Lines that are encoded together."""
Folder = Annotated[Path, typer.Option(help="New folder to write.")]


@app.command(epilog="\b\nExample: capt tokenizer train 'corpus/*.txt.gz' --out tok --vocab-size 8192")
def train(
    text: Text,
    out: Folder,
    vocab_size: Annotated[int, typer.Option(min=1, help="Pieces, special tokens included.")] = 8192,
    kind: Annotated[str, typer.Option("--type", help="unigram or bpe.")] = "unigram",
    byte_fallback: Annotated[bool, typer.Option(help="Spell unknown characters as bytes.")] = True,
    normalization: Annotated[
        str, typer.Option(help="nmt_nfkc, nfkc, either with _cf (case folded), or identity.")
    ] = "nmt_nfkc",
    text_column: Annotated[
        str, typer.Option(help="Column or key with the text of a .jsonl, .csv or .parquet row.")
    ] = "text",
    missing: Annotated[
        str, typer.Option(help="Rows of a table without text: skip leaves them out and says how many, or refuse.")
    ] = "skip",
    max_length: Annotated[int, typer.Option(min=8, help="model_max_length of the exported tokenizer.")] = 512,
    max_sentences: Annotated[int, typer.Option(min=1, help="Sentences to train on, sampled by seed.")] = 500_000,
    seed: Annotated[int, typer.Option(min=0)] = 0,
    json: o.Json = False,
) -> None:
    """Train a SentencePiece tokenizer; its Hugging Face export is checked to give the same ids."""
    from capt.pretrain.data.config import DataConfig
    from capt.pretrain.data.prepare import tokenizer_corpus
    from capt.tokenizer.train import Kind, Normalization
    from capt.tokenizer.train import train as train_tokenizer

    if missing not in (choices := ("skip", "refuse")):
        raise ConfigError(f"--missing {missing}: choose one of {', '.join(choices)}")
    data = DataConfig.model_validate(
        {"source": "files", "files": text, "text_column": text_column, "missing": missing, "validation_fraction": 0.0}
    )
    with o.progress_bar("reading text") as progress:
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
    o.answer(
        asdict(report),
        lambda: (
            f"{out}: {report.vocab_size} pieces from {report.used} of {report.sentences} sentences "
            f"in {report.seconds} s; {report.checked} lines have the same ids in SentencePiece and in tokenizer.json"
        ),
        json=json,
    )


@app.command(epilog="\b\nExample: echo 'A line of text.' | capt tokenizer encode tok --pieces")
def encode(
    tokenizer: Annotated[Path, typer.Argument(metavar="TOKENIZER", help="A tokenizer folder.")],
    text: Annotated[
        list[Path] | None,
        typer.Argument(metavar="[TEXT...]", help="UTF-8 text files; standard input if none is given."),
    ] = None,
    pieces: Annotated[bool, typer.Option("--pieces", help="Print the pieces instead of their ids.")] = False,
) -> None:
    """Print the ids of each line of text, without special tokens around it."""
    from capt.tokenizer.encode import load_tokenizer

    loaded = load_tokenizer(tokenizer)
    if isinstance(sys.stdin, io.TextIOWrapper):
        sys.stdin.reconfigure(newline="\n")  # what ends a line in a file ends one here
    lines = read_lines(text) if text else (line.rstrip("\r\n") for line in sys.stdin)
    for batch in batched(lines, _BATCH):
        for ids in loaded.encode_batch(batch):
            words = [loaded.backend.id_to_token(int(i)) for i in ids] if pieces else ids
            typer.echo(" ".join(map(str, words)))


@app.command(epilog="\b\nExample: capt tokenizer export sentencepiece.model tok --text corpus/sample.txt")
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
    from capt.tokenizer.export import export as export_tokenizer

    lines = export_tokenizer(
        model, out, texts=read_lines(text or []), model_max_length=max_length, add_missing=add_missing
    )
    typer.echo(f"{out}: {lines} lines have the same ids as in SentencePiece")
