"""``capt search``: a search over one's own documents, its index, and its measure."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
import typer.core

from capt.launcher.commands import options as o
from capt.pretrain.base.errors import ConfigError, counted
from capt.pretrain.retrieval.options import EncoderOptions

if TYPE_CHECKING:
    from capt.pretrain.retrieval.index import Hit
    from capt.pretrain.retrieval.rerankers import PairScorer

_ASK = "ask"


class SearchGroup(typer.core.TyperGroup):
    """Commands, of which `default_command` is meant where no other is named: its first word is an index."""

    default_command = _ASK

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        """Put the default command before words that name none."""
        is_named = not args or args[0] in (*self.commands, "--help", "-h")
        return super().parse_args(ctx, args if is_named else [_ASK, *args])


app = typer.Typer(
    cls=SearchGroup,
    no_args_is_help=False,
    help="Search your own documents.\n\nFirst capt search build DOCUMENTS --model FOLDER --out INDEX, then "
    'capt search INDEX "what is asked". capt search ask --help shows the options of a question.',
)

_Index = Annotated[Path, typer.Argument(metavar="INDEX", help="A folder that capt search build has written.")]

Rerank = Annotated[
    Path | None,
    typer.Option(
        parser=o.source_path,
        metavar="MODEL",
        help="A reranker, a run or a folder, that orders the first documents anew.",
    ),
]
Model = Annotated[
    Path | None,
    typer.Option(parser=o.source_path, metavar="FOLDER", help="Where the index's encoder is now, if it has moved."),
]


@app.command(
    "build",
    epilog="\b\nExample: capt search build documents --model exported-st --out index\n\n"
    "Documents are files, folders and patterns of text (.txt, .md), HTML, csv, tsv, jsonl and parquet, BEIR folders, "
    "and the same in a store (s3://, gs://, az://, hf://, https://). The index then holds these documents and no "
    "others: give the same command after a change or an interruption.",
)
def build_search(
    context: typer.Context,
    documents: Annotated[list[str], typer.Argument(metavar="DOCUMENTS...", help="Files, folders, addresses.")],
    *,
    model: Annotated[
        Path, typer.Option(parser=o.source_path, metavar="FOLDER", help="As for capt encode: what makes the vectors.")
    ],
    out: Annotated[Path, typer.Option(metavar="INDEX", help="Folder of the index, new or built before.")],
    text_column: Annotated[str, typer.Option(help="Column or key with the text of a row of a table.")] = "text",
    lines: Annotated[
        bool, typer.Option("--lines", help="Each line of a .txt or .md is a document, and not the whole file.")
    ] = False,
    overlap: Annotated[
        int | None,
        typer.Option(min=0, help="Tokens that a passage shares with the one before it; default an eighth of it."),
    ] = None,
    encoder: EncoderOptions,
    dtype: Annotated[str, typer.Option(help="What vectors are stored in: fp32 or fp16.")] = "fp32",
    tokens: Annotated[
        int | None,
        typer.Option(min=1, help="Tokens of a batch at most, with padding; default 2,048, on a GPU 65,536."),
    ] = None,
    approximate: Annotated[
        bool | None,
        typer.Option(
            "--approximate/--exact",
            help="Find the nearest vectors by a graph (faiss), with its recall in the log; default from a million on.",
        ),
    ] = None,
    json: o.Json = False,
) -> None:
    """Build an index of documents, or bring it up to date; only what is new is encoded."""
    o.quiet(context)
    from capt.pretrain.retrieval.index import BuildOptions, build_index
    from capt.pretrain.retrieval.sources import SourceOptions
    from capt.pretrain.retrieval.store import require_dtype

    sources = SourceOptions(text_column, lines)
    options = BuildOptions(encoder, sources, require_dtype(dtype), tokens, overlap, approximate)
    with o.progress_bar("encoding", lines=False) as progress:
        report = build_index(documents, model, out, options, progress=progress)
    if json:
        o.echo_json(vars(report))
        return
    o.say(
        f"{out}: {counted(report.documents, 'document')} in {counted(report.passages, 'passage')}; {report.added:,} "
        f"added, {report.changed:,} changed, {report.removed:,} removed, {counted(report.encoded, 'passage')} encoded"
    )


@app.command(
    _ASK,
    epilog='\b\nExample: capt search index "what is asked" --top 5\n\n'
    "Without a question they are read from the standard input, one a line, or typed at a prompt: the model is loaded "
    "once.",
)
def ask(
    context: typer.Context,
    index: _Index,
    queries: Annotated[list[str] | None, typer.Argument(metavar="[QUESTION...]", help="What is asked.")] = None,
    top: Annotated[int, typer.Option(min=1, help="Documents for each question.")] = 10,
    mode: Annotated[str, typer.Option(help="hybrid: vectors and words, fused by reciprocal ranks; dense; bm25.")] = (
        "hybrid"
    ),
    where: Annotated[
        list[str] | None,
        typer.Option(metavar="FIELD=VALUE", help="Only documents with this value (may be repeated); file is a field."),
    ] = None,
    rerank: Rerank = None,
    model: Model = None,
    json: o.Json = False,
) -> None:
    """Answer questions from an index: file and line, id, score, and the passage that was found."""
    o.quiet(context)
    wanted = dict(_field(each) for each in where or [])
    from capt.pretrain.retrieval.index import SearchIndex

    found = SearchIndex.open(index, model)
    reranker = _reranker(rerank)
    is_typed = not queries and sys.stdin.isatty()
    if not queries:
        # Wrong options and a model that is missing are said before the first question is typed or read.
        found.search(["a question"], top, mode, where=wanted, reranker=reranker)
    for query in queries or _questions(is_typed=is_typed):
        (hits,) = found.search([query], top, mode, where=wanted, reranker=reranker)
        if json:
            o.echo_line({"query": query, "hits": [hit.as_json() for hit in hits]})
        else:
            _show(query, hits, with_query=not is_typed)


@app.command(
    "measure",
    epilog="\b\nExample: capt search measure index questions.csv\n\n"
    "questions.csv has the columns query and document: a question, and the id of a document that answers it, as capt "
    "search shows it; a question with several such documents has several rows.",
)
def measure_search(
    context: typer.Context,
    index: _Index,
    questions: Annotated[Path, typer.Argument(metavar="QUESTIONS", help="csv, tsv, jsonl or parquet.")],
    rerank: Rerank = None,
    model: Model = None,
    json: o.Json = False,
) -> None:
    """Measure an index on questions of your own: hybrid, dense and bm25, with the intervals of the differences."""
    o.quiet(context)
    from capt.pretrain.engine.evaluations import sections_as_text
    from capt.pretrain.retrieval.index import SearchIndex
    from capt.pretrain.retrieval.index_measure import measure_index

    result = measure_index(SearchIndex.open(index, model), questions, _reranker(rerank))
    o.answer(result, lambda: sections_as_text(result, "index:", ".4f"), json=json)


@app.command("export", epilog="\b\nExample: capt search export index --out exported-index --to parquet")
def export_search(
    index: _Index,
    out: Annotated[Path, typer.Option(help="New folder.")],
    to: Annotated[
        str, typer.Option(help="npy: vectors.npy, and passages.jsonl in the same order. parquet: both in one table.")
    ] = "npy",
) -> None:
    """Write the passages and vectors of an index for a database, or for another program."""
    from capt.pretrain.retrieval.index import SearchIndex
    from capt.pretrain.retrieval.index_measure import export_index

    found = SearchIndex.open(index)
    export_index(found, out, to)
    o.say(f"{out}: {counted(found.record.passages, 'passage')}, {found.vectors.shape[1]} dimensions")


def _reranker(model: Path | None) -> PairScorer | None:
    if model is None:
        return None
    from capt.pretrain.retrieval.rerankers import load_reranker

    return load_reranker(model)


def _field(given: str) -> tuple[str, str]:
    name, sign, value = given.partition("=")
    if not sign or not name:
        raise ConfigError(f"--where {given}: FIELD=VALUE is expected, such as author=Keynes")
    return name, value


def _questions(*, is_typed: bool) -> Iterator[str]:
    """Yield the lines of the standard input, or what is typed at a prompt; blank ones are left out."""
    while True:
        if is_typed:
            typer.echo("question> ", nl=False, err=True)
        line = sys.stdin.readline()
        if not line:
            return
        if line.strip():
            yield line.strip()


_SHOWN = 200
"""Characters of a passage that are shown."""


def _show(query: str, hits: list[Hit], *, with_query: bool) -> None:
    if with_query:
        o.say(query)
    for hit in hits:
        name = "" if hit.document == hit.file else f"  {hit.document}"
        o.say(f"  {hit.score:.4f}  {hit.place}{name}")
        text = " ".join(hit.passage.split())
        o.say(f"          {text[:_SHOWN]}{'...' if len(text) > _SHOWN else ''}")
    if not hits:
        o.say("  nothing found")
