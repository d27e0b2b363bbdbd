"""The ``capt`` command. Each command imports what it needs when it runs, so ``capt --help`` answers immediately."""

from __future__ import annotations

import io
import itertools
import logging
import re
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, redirect_stdout
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Annotated, Any

import typer
import typer.core

from capt.launcher.commands import COMMANDS
from capt.launcher.commands.options import with_options
from capt.pretrain.base.errors import ConfigError, user_text
from capt.pretrain.base.process import coloured, error_line, open_closed_streams, takes_colours, with_value_of_resume
from capt.pretrain.base.stores import STORES, without_secrets
from capt.pretrain.registry import entry_point_values, load_entry

app = typer.Typer(
    help="Contrastive pretraining, from raw text to a Hugging Face encoder, on one laptop or a cluster.",
    epilog="\b\nExample: capt pretrain capt_tiny data.files=my.txt --nproc 2\n\n"
    "Exit codes: 0 done, 1 failed, 2 bad input, 75 stopped early but resumable. "
    "--debug, after any command, shows the stack trace of an error.",
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
    context_settings={"help_option_names": ["-h", "--help"]},
)


def _print_version(wanted: bool) -> None:
    if wanted:
        try:
            typer.echo(f"capt {version('capt-pretraining')}")
        except PackageNotFoundError:
            typer.echo("capt, run from its source tree and not installed")
        raise typer.Exit


@app.callback(help=app.info.help, epilog=app.info.epilog)
def _options(
    version: Annotated[
        bool, typer.Option("--version", callback=_print_version, is_eager=True, help="Print the version and exit.")
    ] = False,
) -> None: ...


class _Command(typer.core.TyperCommand):
    """A command that refuses the address of a store where it takes a path: ``Path`` would make a folder of it."""

    def invoke(self, ctx: Any) -> Any:
        for parameter in self.params:
            value = ctx.params.get(parameter.name or "")
            for path in value if isinstance(value, list) else [value]:
                if isinstance(path, Path) and (found := _STORE.match(str(path))):
                    address = f"{found[1]}://{str(path)[found.end() :]}"
                    raise ConfigError(
                        f"{parameter.opts[0]}: {without_secrets(address)} is in a store, and this takes a path of this "
                        "machine; copy between them with the tool of the store"
                    )
        return super().invoke(ctx)


_STORE = re.compile(rf"({'|'.join(STORES)}):/+(?=.)", re.IGNORECASE)


_rows: set[str] = set()
"""The rows that were added."""


def add_commands(rows: Mapping[str, str]) -> None:
    """Add commands to the command line: groups, and modules that register theirs. Raises ``ConfigError``."""
    for name, path in rows.items():
        _rows.add(name)
        is_group = ":" in path
        found = load_entry(path, "capt.commands", f"capt {name}", "MODULE:APP" if is_group else "a module")
        before = len(app.registered_commands)
        if is_group:
            app.add_typer(found, name=name)
        else:
            found.register(app)
        for command in found.registered_commands if is_group else app.registered_commands[before:]:
            command.cls = _Command
            if command.callback is not None:
                command.callback = with_options(command.callback)


add_commands(COMMANDS)


def _add_installed(words: Sequence[str]) -> None:
    """Add the commands of other distributions, unless the words begin with one of ours: the search takes its time."""
    ours = [group.name for group in app.registered_groups]
    ours += [command.name or command.callback.__name__ for command in app.registered_commands if command.callback]
    if next((word for word in words if not word.startswith("-")), None) in ours:
        return
    for name, path in entry_point_values("capt.commands").items():
        if name not in _rows:
            try:
                add_commands({name: path})
            except ConfigError as error:
                logging.getLogger("capt").warning("%s", error)


def main(arguments: Sequence[str] | None = None) -> None:
    """Run ``capt`` and exit: one ``error:`` line and code 2 for what the user can mend by typing (`exit_code_of`)."""
    if arguments is None:  # the command itself, and not a test or a program that calls it
        open_closed_streams()
    given = with_value_of_resume(sys.argv[1:] if arguments is None else arguments)
    debug = "--debug" in given
    logging.basicConfig(level=logging.WARNING, format="[capt] %(message)s")
    logging.getLogger("capt").setLevel(logging.DEBUG if debug else logging.INFO)  # other libraries only warn
    _add_installed(given)
    if given in ([], *([group.name] for group in app.registered_groups)):
        given = [*given, "--help"]
    words = [word for word in given if word != "--debug"]
    try:
        with _coloured_help(words):
            result = app(words, prog_name="capt", standalone_mode=False, obj={"debug": debug})
    except typer.Abort:
        sys.exit(130)
    except Exception as error:
        text = _usage(error) if isinstance(error, typer.TyperException) else user_text(error)
        if debug or text is None:
            raise
        from capt.pretrain.engine.run_folder import exit_code_of

        _die(text, exit_code_of(error))
    sys.exit(result if isinstance(result, int) else 0)


_HELP = (
    (re.compile(r"^()(Usage|Arguments|Options|Commands)(?=:)", re.MULTILINE), "1;33"),
    (re.compile(r"^(  )(\S+(?: \S+)*)(?=  +\S|\n {8,}\S)", re.MULTILINE), "36"),  # what a list explains
    (re.compile(r"^(  Example: )(.+)$", re.MULTILINE), "32"),
)
"""Parts of a help text, and their colours."""


@contextmanager
def _coloured_help(words: Sequence[str]) -> Iterator[None]:
    """Give the help of a command colours where a terminal shows it."""
    own = itertools.takewhile(lambda word: word != "--", words)
    if not {"-h", "--help"} & set(own) or not takes_colours(sys.stdout):
        yield
        return
    held = io.StringIO()
    try:
        with redirect_stdout(held):
            yield
    finally:
        text = held.getvalue()
        for pattern, code in _HELP:
            text = pattern.sub(r"\1" + coloured(r"\2", code), text)
        sys.stdout.write(text)


def _usage(error: typer.TyperException) -> str:
    """Say what is wrong with a command line, with the ``--help`` of the command where it is known."""
    text, context = error.format_message(), getattr(error, "ctx", None)
    return f"{text.rstrip('.')} ({context.command_path} --help)" if context is not None else text


def _die(text: str, code: int) -> None:
    typer.echo(error_line(" ".join(text.splitlines()), sys.stderr), err=True)
    sys.exit(code)


if __name__ == "__main__":
    main()
