"""``capt latent``: sentences that a trained latent-variable model generates."""

from __future__ import annotations

from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from capt.launcher.commands import options as o
from capt.pretrain.base.errors import ConfigError, DataError

if TYPE_CHECKING:
    from capt.pretrain.latent.models import LoadedLatentModel

app = typer.Typer(help="Sample, encode, reconstruct and interpolate sentences.", no_args_is_help=False)

Model = Annotated[Path, typer.Argument(metavar="RUN", help="A run (its best checkpoint) or a checkpoint.")]
Words = Annotated[int, typer.Option(min=1, help="Largest number of words in a generated sentence.")]
Unknown = Annotated[bool, typer.Option("--unk/--no-unk", help="Whether the word for unknown ones may be written.")]
Sentences = Annotated[
    list[str] | None,
    typer.Argument(metavar="[SENTENCE...]", help="Sentences (default: the first ones of the test text)."),
]
Number = Annotated[int, typer.Option("-n", "--number", min=1, help="Sentences of the test text.")]


@app.command(epilog="\b\nExample: capt latent sample runs/ptb_vae -n 20")
def sample(
    context: typer.Context,
    run: Model,
    number: Annotated[int, typer.Option("-n", "--number", min=1, max=1_000_000, help="Sentences.")] = 10,
    seed: Annotated[int, typer.Option(min=0, help="Seed of the draws.")] = 1,
    max_words: Words = 78,
    top_p: Annotated[
        float | None,
        typer.Option(help="Draw each word from the most probable ones of this probability (default: the best word)."),
    ] = None,
    unk: Unknown = True,
    json: o.Json = False,
) -> None:
    """Draw codes from the prior and decode each into a sentence."""
    o.quiet(context)
    from capt.pretrain.latent.evaluation.text import sample as draw_sentences
    from capt.pretrain.latent.models import load_model

    sentences = draw_sentences(load_model(run), number, seed, max_words, top_p=top_p, unknown=unk)
    _show([{"sentence": text} for text in sentences], json)


@app.command(epilog="\b\nExample: capt latent encode runs/ptb_vae 'prices fell' 'the board approved the plan' --json")
def encode(
    context: typer.Context,
    run: Model,
    sentences: Sentences = None,
    number: Number = 10,
    json: o.Json = False,
) -> None:
    """Write the vector of each sentence, the mean of its code: a line of the sentence and its numbers, with tabs."""
    o.quiet(context)
    from capt.pretrain.latent.evaluation.text import mean_codes
    from capt.pretrain.latent.models import load_model

    model = load_model(run)
    given = sentences or _test_sentences(model, number)
    codes = mean_codes(model, given).tolist()
    if json:
        o.echo_json([{"sentence": sentence, "vector": code} for sentence, code in zip(given, codes, strict=True)])
        return
    for sentence, code in zip(given, codes, strict=True):
        o.say("\t".join([" ".join(sentence.split()), *(f"{value:.6g}" for value in code)]))


@app.command(epilog="\b\nExample: capt latent reconstruct runs/ptb_vae 'the company said it expects a profit'")
def reconstruct(
    context: typer.Context,
    run: Model,
    sentences: Sentences = None,
    number: Number = 10,
    max_words: Words = 78,
    unk: Unknown = True,
    json: o.Json = False,
) -> None:
    """Encode each sentence and decode its code greedily."""
    o.quiet(context)
    from capt.pretrain.latent.evaluation.text import reconstruct as decode_codes
    from capt.pretrain.latent.models import load_model

    model = load_model(run)
    given = sentences or _test_sentences(model, number)
    decoded = decode_codes(model, given, max_words, unknown=unk)
    _show([{"sentence": a, "reconstruction": b} for a, b in zip(given, decoded, strict=True)], json)


@app.command(epilog="\b\nExample: capt latent interpolate runs/ptb_vae 'prices fell' 'the board approved the plan'")
def interpolate(
    context: typer.Context,
    run: Model,
    first: Annotated[str, typer.Argument(help="The sentence at t = 0.")],
    second: Annotated[str, typer.Argument(help="The sentence at t = 1.")],
    steps: Annotated[int, typer.Option(min=2, help="Number of points, both ends included.")] = 11,
    max_words: Words = 78,
    unk: Unknown = True,
    json: o.Json = False,
) -> None:
    """Decode points on the straight line between the codes of two sentences."""
    o.quiet(context)
    from capt.pretrain.latent.evaluation.text import interpolate as decode_between
    from capt.pretrain.latent.models import load_model

    points = decode_between(load_model(run), first, second, steps, max_words, unknown=unk)
    _show([{"t": f"{t:.2f}", "sentence": text} for t, text in points], json)


@app.command(epilog="\b\nExample: capt latent perplexity runs/ptb_vae --by kenlm")
def perplexity(
    context: typer.Context,
    run: Model,
    by: Annotated[str, typer.Option(help="builtin, or kenlm (make kenlm builds its programs).")] = "builtin",
    data: Annotated[Path | None, typer.Option(help="Folder with the texts; default where the job read them.")] = None,
    programs: Annotated[Path | None, typer.Option(help="Folder of KenLM's lmplz and query.")] = None,
    number: Annotated[int, typer.Option("-n", "--number", min=2, help="Generated sentences, as in the paper.")] = 1280,
    seed: Annotated[int, typer.Option(min=0, help="Seed of the draws.")] = 1,
    json: o.Json = False,
) -> None:
    """Forward and reverse perplexity of generated sentences, by 5-gram models."""
    o.quiet(context)
    from capt.pretrain.latent.evaluate import meaning
    from capt.pretrain.latent.evaluation.forward_reverse import generated_perplexities
    from capt.pretrain.latent.models import load_model

    if by not in ("builtin", "kenlm"):
        raise ConfigError(f"--by {by!r}: choose builtin or kenlm")
    model = load_model(run)
    perplexities = generated_perplexities(model, by=by, data=data, programs=programs, number=number, seed=seed)  # type: ignore[arg-type]
    if json:
        o.echo_json({"by": by, "number": number, "seed": seed, **perplexities})
        return
    for name, value in perplexities.items():
        o.say(f"{name:<28} {value:10.2f}   {meaning(name)}")


def _test_sentences(model: LoadedLatentModel, number: int) -> list[str]:
    """The first sentences of the test text that the job names."""
    from capt.pretrain.latent.corpus import read
    from capt.pretrain.latent.text_files import file_of

    data = model.job.data
    file = file_of(data, "test")
    if file is None:
        raise DataError(f"{data.path}: no file whose name says test; give sentences")
    return [" ".join(words) for words in islice(read(file, data.format), number)]


def _show(rows: list[dict[str, str]], json: bool) -> None:
    if json:
        o.echo_json(rows)
        return
    for row in rows:
        for name, text in row.items():
            o.say(f"{name + ':':<16}{text}" if len(row) > 1 else text)
        if len(row) > 1:
            o.say("")
