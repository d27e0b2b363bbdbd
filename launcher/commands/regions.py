"""``capt regions``: region features of pictures, from feature files or from one's own pictures, in one store."""

from __future__ import annotations

import typer

from launcher.commands import extract

app = typer.Typer(help="Import, extract and inspect region features of pictures.", rich_markup_mode=None)
extract.register(app)
