"""``capt data``: prepare and inspect corpora, pairs and mixtures."""

from __future__ import annotations

import re
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from capt.launcher.commands import options as o
from capt.pretrain.base.errors import ConfigError
from capt.pretrain.base.files import read_text
from capt.pretrain.base.stores import is_url

if TYPE_CHECKING:
    from capt.pretrain.data.filters import DocumentFilters
    from capt.pretrain.data.shards import ShardSet, ShardSummary
    from capt.pretrain.language.config import LanguageJob
    from capt.pretrain.pairs.config import PairJob
    from capt.pretrain.pairs.inspect import PairSummary
    from capt.pretrain.pairs.known import LeftOut
    from capt.tokenizer.encode import TextTokenizer

app = typer.Typer(help="Prepare and inspect corpora.", rich_markup_mode=None)


@app.command(
    epilog="\b\nExample: capt data prepare capt_small data.files=corpus.txt tokenizer.path=tok --out shards\n"
    "Example: capt data prepare capt_small 'data.files=web/*.jsonl.zst' tokenizer.path=tok --out shards --workers 16 "
    "--filter min_words=50 --filter exact=true"
)
def prepare(
    context: typer.Context,
    config: o.Config,
    overrides: o.Overrides = None,
    out: Annotated[
        str | None,
        typer.Option(
            help="Folder for the shards, or the address of one in a store, to be named by data.shards (default: the "
            "cache). Work that was killed is continued there, and other hosts that run the same command help."
        ),
    ] = None,
    work: Annotated[
        Path | None,
        typer.Option(
            help="Where --out is in a store: a folder for the work that is not finished, which hosts that help share."
        ),
    ] = None,
    workers: Annotated[
        int | None, typer.Option(min=1, max=1024, help="Processes (default: data.workers, or one per usable core).")
    ] = None,
    filter: Annotated[
        list[str] | None,
        typer.Option(
            metavar="KEY=VALUE",
            help="Leave documents out, with --out: min_words=N, max_words=N, exact=true (equal ones). May be repeated.",
        ),
    ] = None,
    steps: Annotated[Path | None, typer.Option(help="A YAML file of the keys of --filter.")] = None,
    license: Annotated[str | None, typer.Option(help="The licence of the text, for the data card.")] = None,
) -> None:
    """Tokenize a job's text into shards, training its tokenizer first if it has none."""
    o.quiet(context)
    from capt.pretrain.data.prepare import prepare as prepare_cached
    from capt.pretrain.data.prepare import prepare_folder
    from capt.pretrain.data.sources import named
    from capt.pretrain.language.prepare import tokenizer_folder
    from capt.tokenizer.encode import load_tokenizer

    if workers is not None:
        overrides = [*(overrides or []), f"data.workers={workers}"]
    job = _language_job(config, overrides)
    declared = _filters(steps, filter or [])
    if out is None and (declared.names or license):
        raise ConfigError("--filter, --steps and --license belong to shards in a folder: name it by --out")
    store = o.written_place(out) if out is not None and is_url(out) else None
    if store is not None and work is None:
        raise ConfigError(
            f"--out {store} is in a store: name a folder of this host, or of a shared disk, for the work by --work; it "
            "takes about half the bytes of the text"
        )
    if work is not None and store is None:
        raise ConfigError("--work belongs to an address of a store as --out")
    with o.progress_bar("preparing") as progress:
        folder = tokenizer_folder(job, progress)
        loaded = load_tokenizer(folder)
        sets: list[ShardSet | None] = []
        cards: list[str | Path] = []
        for name, data in job.data.parts():
            with named(name):
                if out is None:
                    sets += [prepare_cached(data, loaded, split, progress) for split in ("train", "validation")]
                elif data.shards is None:
                    place = f"{out.rstrip('/')}/{name}".rstrip("/") if store is not None else None
                    made = prepare_folder(
                        data, loaded, Path(work or out) / name, progress, filters=declared, license=license, store=place
                    )
                    sets += made.values()
                    cards += [f"{place}/card.md"] if place is not None else (Path(out) / name).glob("card.md")
    for shards in sets:
        if shards is not None:
            without = shards.rows_without_text
            skipped = f"; {without} rows without text were left out" if without else ""
            typer.echo(f"{shards.folder}: {shards.documents} documents, {shards.tokens} tokens{skipped}")
    for card in cards:
        typer.echo(f"{card}: what they are made of")
    use = f"data.shards={out} " if out and not job.data.mixture else ""
    if out and job.data.mixture:
        use = f"shards: {out}/NAME in place of files in data.mixture, "
    typer.echo(f"use them with: {use}tokenizer.path={folder}")


@app.command(
    epilog="\b\nExample: capt data inspect pairs.jsonl --tokenizer tok\n"
    "Example: capt data inspect shards/train --tokenizer tok --sequence-length 128\n"
    "Example: capt data inspect --job my_mixture.yaml data.view=crop"
)
def inspect(
    paths: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="[PATH...] [a.b=c ...]",
            help="A shard set (a folder with a manifest.json); or pairs of texts: .jsonl, .csv, .tsv, .txt, .parquet, "
            "a BEIR folder, a data set of the hub. With --job also keys to set in the job.",
        ),
    ] = None,
    tokenizer: Annotated[
        Path | None,
        typer.Option(
            help="The tokenizer: shards are shown as text, pairs as the encoder reads them. A model also has one."
        ),
    ] = None,
    sequence_length: Annotated[int, typer.Option(min=8, help="Tokens per window, or of a text of a pair.")] = 128,
    samples: Annotated[
        int | None, typer.Option(min=0, help="Windows or rows to show; default 3, and 10 pairs of views.")
    ] = None,
    job: Annotated[
        str | None,
        typer.Option(
            metavar="CONFIG",
            help="A job of pairs: its files, prompts, lengths and the tokenizer of model.init; both views of some rows "
            "of one text. Or a job of text: both views of some samples, and the shares of the sources of data.mixture.",
        ),
    ] = None,
    form: Annotated[str, typer.Option(help="Pairs: the form of the rows, if the columns do not say.")] = "auto",
    corpus: Annotated[str | None, typer.Option(help="Pairs: where the texts of document ids are.")] = None,
    columns: Annotated[
        list[str] | None,
        typer.Option(metavar="ROLE=NAME", help="Pairs: the column of query, positive, negative, score or text."),
    ] = None,
    split: Annotated[
        str, typer.Option(help="Pairs: the split of a data set of the hub, or of BEIR's qrels.")
    ] = "train",
    json: o.Json = False,
) -> None:
    """Verify a shard set and show its windows; show pairs as the encoder sees them; show the views of a job of text."""

    from capt.pretrain.pairs.data_config import PairSource
    from capt.pretrain.pairs.inspect import is_pairs, left_out_of, summarize_pairs, views_of

    # A file may be called like a key; then it is a file.
    keys = [path for path in paths or [] if _KEY.match(path) and not Path(path).exists()]
    files = [Path(path).expanduser() for path in paths or [] if path not in keys]
    if job is None and keys:
        raise ConfigError(f"{keys[0]}: keys belong to a job; name it by --job")
    if job is None and not files:
        raise ConfigError("nothing to inspect: name a shard set or files of pairs, or a job of pairs by --job")
    if job is None and len(files) == 1 and not is_pairs(files[0]):
        _inspect_shards(files[0], tokenizer, sequence_length, 3 if samples is None else samples, json)
        return
    if job is not None and not files and _inspect_text(job, keys, 10 if samples is None else samples, json):
        return
    of_views, samples = (10, 3) if samples is None else (samples, samples)
    views: dict[str, list[tuple[str, str]]] = {}
    if job is not None:
        pairs = _job_of_pairs(job, keys, files, reads_init=tokenizer is None)
        sources, model = [*pairs.data.each()], pairs.model.init
    else:
        # `read_pairs` refuses what is wrong in the words of a command.
        source = PairSource.model_construct(
            name="", files=[*map(str, files)], form=form, columns=dict(map(_role, columns or [])), split=split,
            corpus=Path(corpus).expanduser() if corpus is not None else None, query_length=sequence_length,
            document_length=sequence_length,
        )  # fmt: skip
        sources, model = [source], None
    named = tokenizer or model
    loaded = _tokenizer_of(named) if named is not None else None
    summaries = [summarize_pairs(source, loaded, samples) for source in sources]
    found = left_out_of(summaries)
    # Rows of one text have their views, which the job draws.
    if job is not None and of_views and any(summary.positives == 0 for summary in summaries):
        views = views_of(pairs, of_views)
    shown = zip(sources, summaries, found, strict=True)
    if json:
        rows = []
        for source, summary, each in shown:
            row = {key: value for key, value in asdict(summary).items() if key != "keys"}
            row["left_out"] = each and each._asdict()
            rows.append(row | ({"views": views[source.name]} if source.name in views else {}))
        o.echo_json(rows)
        return
    for source, summary, each in shown:
        _show_pairs(summary, each, has_tokens=loaded is not None)
        if source.name in views:
            _show_views(source.view, views[source.name])


@app.command(epilog="\b\nExample: capt data duplicates pairs.jsonl --against beir/nfcorpus")
def duplicates(
    train: Annotated[
        list[Path],
        typer.Argument(
            metavar="TRAIN...", help="Training texts: files, folders or data sets of the hub, as for pairs."
        ),
    ],
    against: Annotated[list[Path], typer.Option(help="Evaluation texts, in the same forms (may be repeated).")],
    threshold: Annotated[
        float, typer.Option(min=0.1, max=1.0, help="Jaccard similarity from which texts are nearly equal.")
    ] = 0.8,
    near: Annotated[bool, typer.Option(help="Look for nearly equal texts as well.")] = True,
    words: Annotated[int, typer.Option(min=1, help="Texts with fewer words are not compared.")] = 5,
    split: Annotated[str, typer.Option(help="The split of a data set of the hub.")] = "train",
    samples: Annotated[int, typer.Option(min=0, help="Texts to show.")] = 5,
    json: o.Json = False,
) -> None:
    """Find evaluation texts that are equal or nearly equal to training texts."""
    from capt.pretrain.pairs.duplicates import find_duplicates

    found = find_duplicates(train, against, threshold=threshold if near else None, words=words, split=split)
    if json:
        o.echo_json(asdict(found))
        return
    for name, texts in (("equal", found.equal), ("nearly equal", found.near)):
        if name == "equal" or near:
            typer.echo(f"{len(texts):,} of {found.compared:,} evaluation texts are {name} to a training text")
    typer.echo(
        f"{found.trained:,} training texts; {found.short:,} texts have fewer than {words} words, and were not compared"
    )
    for match in sorted([*found.equal, *found.near], key=lambda match: -match.similarity)[:samples]:
        o.say(f"{match.similarity:.2f}  {match.place}: {match.text[:200]}")
        o.say(f"      {match.trained_place}: {match.trained_text[:200]}")


_KEY = re.compile(r"[a-z_]+(\.[a-z_]+)+=")


def _role(text: str) -> tuple[str, str]:
    role, separator, name = text.partition("=")
    if not (separator and name):
        raise ConfigError(f"--columns {text}: write ROLE=NAME, for example query=question")
    return role, name


def _tokenizer_of(path: Path) -> TextTokenizer:
    """The tokenizer in a folder, in a model of Hugging Face, or in a run or checkpoint of ours."""
    from capt.pretrain.engine.checkpoint import find_best
    from capt.pretrain.models.hf_config import TOKENIZER_FILES, local_folder
    from capt.tokenizer.encode import load_tokenizer

    folder = local_folder(path, TOKENIZER_FILES)
    if (folder / "checkpoints").is_dir() or (folder / "manifest.json").is_file():
        folder = find_best(folder) / "tokenizer"
    return load_tokenizer(folder)


def _job_of_pairs(config: str, overrides: list[str], files: list[Path], *, reads_init: bool) -> PairJob:
    """The job of pairs, which reads ``files`` where there are any."""
    from capt.pretrain.config.load import load_job
    from capt.pretrain.pairs.config import PairJob
    from capt.pretrain.pairs.load import with_own_length

    if files:
        overrides = [*overrides, f"data.files=[{', '.join(map(str, files))}]"]
    job = load_job(config, overrides)
    if not isinstance(job, PairJob):
        raise ConfigError(f"{config}: task.type is {job.task.type}; only capt_pairs jobs read pairs")
    if reads_init or job.model.init.is_dir():
        job = with_own_length(job, _MOST_POSITIONS)
    return job


_MOST_POSITIONS = 2**20
"""More than any tokenizer's own limit, which holds beside it."""


def _show_pairs(summary: PairSummary, left_out: LeftOut | None, *, has_tokens: bool) -> None:
    counts = summary.counts
    for path, described in counts.columns.items():
        o.say(f"{path}: {described}")
    typer.echo(
        f"{counts.rows:,} rows, {counts.used:,} usable: {summary.positives:,} positives and {summary.negatives:,} "
        "negatives"
    )
    if left_out is not None:
        typer.echo(left_out.text)
    unit = "tokens" if has_tokens else "characters"
    for name, lengths, side in (
        ("query", summary.query, summary.query_side),
        ("document", summary.document, summary.document_side),
    ):
        if lengths.texts:
            mean = lengths.total / lengths.texts
            prompt = f" with the prompt {side.prompt!r}" if side.prompt else ""
            o.say(f"a {name} has {lengths.shortest:,} to {lengths.longest:,} {unit}, {mean:.1f} on average{prompt}")
            if lengths.cut:
                typer.echo(f"  {lengths.cut:,} of {lengths.texts:,} are longer than {lengths.limit}, and are cut")
    for sample in summary.samples:
        o.say(sample.place + (f"  score {sample.score:g}" if sample.score is not None else ""))
        for text in sample.texts:
            o.say(f"  {text.role:>8} | {' '.join(text.pieces) or text.text}")
            if text.ids:
                typer.echo(f"  {'cut' if text.is_cut else '':>8} | {' '.join(map(str, text.ids))}")
        if sample.more:
            typer.echo(f"  {'':>8} | and {sample.more:,} more")


def _inspect_text(config: str, overrides: list[str], count: int, json: bool) -> bool:
    """Show what a job of text sees of each source of its ``data.mixture``, and both views of its first samples.

    False for a job of another kind.
    """

    from capt.pretrain.config.load import load_job
    from capt.pretrain.data.mixture_dataset import MixtureDataset, source_shares
    from capt.pretrain.language.config import LanguageJob

    job = load_job(config, overrides)
    if not isinstance(job, LanguageJob):
        return False
    from capt.pretrain.language.prepare import first_views, prepare_windows, tokenizer_folder
    from capt.tokenizer.encode import load_tokenizer

    with o.progress_bar("preparing") as progress:
        loaded = load_tokenizer(tokenizer_folder(job, progress))
        windows, _ = prepare_windows(job, loaded, progress)
    if not isinstance(windows, MixtureDataset):
        views = first_views(job, loaded, windows, count)
        if json:
            o.echo_json({"view": job.data.view, "views": views})
        else:
            _show_views(job.data.view, views)
        return True
    samples = job.batch_sizes.samples_before(job.schedule.max_steps)
    sources = source_shares(windows.order, samples)
    if json:
        o.echo_json([asdict(source) for source in sources])
        return True
    typer.echo(f"{samples:,} samples of {job.data.sequence_length} tokens in {job.schedule.max_steps:,} steps:")
    for source in sources:
        o.say(f"  {source}")
    _show_views(job.data.view, first_views(job, loaded, windows, count))
    return True


def _show_views(name: str, views: list[tuple[str, str]]) -> None:
    typer.echo(f"data.view {name}: both views of the first samples")
    for number, (first, second) in enumerate(views, start=1):
        o.say(f"  {number:>4} | {first}")
        o.say(f"       | {second}")


def _inspect_shards(folder: Path, tokenizer: Path | None, sequence_length: int, samples: int, json: bool) -> None:
    from capt.pretrain.base.verification import Verifier
    from capt.pretrain.data.shards import ShardSet, summarize
    from capt.tokenizer.encode import load_tokenizer

    opened = ShardSet.open(folder, Verifier(again=True))
    loaded = load_tokenizer(tokenizer) if tokenizer else None
    if loaded is not None:
        opened.check_tokenizer(loaded)
    decode = loaded.decode if loaded is not None else lambda ids: " ".join(map(str, ids))
    summary = summarize(opened, sequence_length, decode, samples)
    if json:
        o.echo_json({"folder": str(folder), **asdict(summary)})
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


def _filters(file: Path | None, filters: list[str]) -> DocumentFilters:
    """The filters that a YAML file declares, and those of ``--filter``."""
    from pydantic import ValidationError

    from capt.pretrain.base.records import first_fault
    from capt.pretrain.config.reader import NotYamlError, read_yaml
    from capt.pretrain.data.filters import DocumentFilters

    declared: dict[str, Any] = {}
    places = [(str(file), read_text(file, error=ConfigError))] if file is not None else []
    for text in filters:
        key, separator, value = text.partition("=")
        if not separator:
            raise ConfigError(f"--filter {text}: write KEY=VALUE, for example min_words=50")
        places.append((f"--filter {text}", f"{key}: {value}"))
    for place, text in places:
        try:
            found = read_yaml(text, place)
            if not isinstance(found, dict):
                raise ConfigError(f"{place}: keys and values are needed, for example min_words: 50")
            declared |= found
            DocumentFilters.model_validate(declared)
        except NotYamlError as error:
            raise ConfigError(f"{place}: {error}") from None
        except ValidationError as error:
            known = ", ".join(DocumentFilters.model_fields)
            raise ConfigError(f"{place}: {first_fault(error)} (known keys: {known})") from None
    return DocumentFilters.model_validate(declared)


def _language_job(config: str, overrides: list[str] | None) -> LanguageJob:
    from capt.pretrain.config.load import load_job
    from capt.pretrain.language.config import LanguageJob

    job = load_job(config, overrides or [])
    if not isinstance(job, LanguageJob):
        raise ConfigError(f"{config}: task.type is {job.task.type}; only capt_language jobs read text")
    return job
