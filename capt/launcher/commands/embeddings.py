"""``capt embeddings``: neighbours of words, and the negatives that a generator draws for them."""

from __future__ import annotations

from dataclasses import asdict
from math import exp
from pathlib import Path
from typing import Annotated

import typer

from capt.launcher.commands import options as o

app = typer.Typer(help="Show neighbours and generated negatives of words.", no_args_is_help=False)

Words = Annotated[list[str], typer.Argument(metavar="WORD...", help="Words to look up.")]


@app.command(epilog="\b\nExample: capt embeddings neighbors runs/ace queen king --top 5 --also 45-50")
def neighbors(
    context: typer.Context,
    run: Annotated[
        Path, typer.Argument(metavar="RUN", help="A run (its best checkpoint), a checkpoint, or a file of vectors.")
    ],
    words: Words,
    top: Annotated[int, typer.Option(min=1, help="Nearest words of each word.")] = 5,
    also: Annotated[
        list[str] | None,
        typer.Option(metavar="FIRST-LAST", help="Further ranks, such as 45-50 (may be repeated)."),
    ] = None,
    json: o.Json = False,
) -> None:
    """Show the words with the highest cosine to each word, and those at further ranks (Table 1)."""
    o.quiet(context)

    from capt.pretrain.embeddings.load import load_embeddings
    from capt.pretrain.embeddings.neighbors import neighbors as find_neighbors
    from capt.pretrain.embeddings.neighbors import read_ranks

    ranks = [range(1, top + 1), *map(read_ranks, also or ())]
    vectors = load_embeddings(run)
    found = [find_neighbors(vectors, word, ranks) for word in words]
    if json:
        o.echo_json(
            [
                {"word": word, "neighbors": [asdict(n) for each in of_word for n in each]}
                for word, of_word in zip(words, found, strict=True)
            ]
        )
        return
    labels = [f"{wanted.start}-{wanted.stop - 1}" for wanted in ranks]
    width = max(8, 2 + max(map(len, labels)))
    for word, of_word in zip(words, found, strict=True):
        o.say(word)
        for label, each in zip(labels, of_word, strict=True):
            shown = "  ".join(f"{n.word} {n.cosine:.3f}" for n in each) or f"only {len(vectors):,} words"
            o.say(f"  {label:<{width}}{shown}")


@app.command(epilog="\b\nExample: capt embeddings negatives runs/ace sword")
def negatives(
    context: typer.Context,
    run: Annotated[Path, typer.Argument(metavar="RUN", help="A run with a generator, or one of its checkpoints.")],
    words: Words,
    number: Annotated[int, typer.Option("-n", "--number", min=1, max=10_000, help="Words of each kind.")] = 5,
    seed: Annotated[int, typer.Option(min=0, help="Seed of the draws.")] = 1,
    json: o.Json = False,
) -> None:
    """Show what the generator draws as negatives: its most probable words, and others that it drew (Table 3)."""
    o.quiet(context)

    from capt.pretrain.embeddings.neighbors import load_generator, negatives_of

    generator = load_generator(run)
    found = [negatives_of(generator, word, number, seed) for word in words]
    if json:
        o.echo_json([asdict(each) for each in found])
        return
    for each in found:
        o.say(f"{each.word}: entropy {each.entropy:.2f} nats, as {exp(each.entropy):,.0f} equally probable words")
        for kind, drawn in (("hard", each.hard), ("easy", each.easy)):
            o.say(f"  {kind}  " + ("  ".join(f"{n.word} {n.probability:.1e}" for n in drawn) or "nothing else"))
