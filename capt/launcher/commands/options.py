"""Parts that several commands share: arguments, objects of options, a progress bar, JSON output."""

from __future__ import annotations

import inspect
import json
import re
import secrets
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import MISSING, dataclass, fields, is_dataclass, make_dataclass, replace
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, TypeVar, get_type_hints

import typer

from capt.launcher.backends import LAUNCHERS, WORK_LAUNCHERS
from capt.pretrain.base.errors import ConfigError, repeated
from capt.pretrain.base.files import finite, read_json, write_json
from capt.pretrain.base.parallel import ProgressCallback
from capt.pretrain.base.stores import WRITABLE, check_url, is_url, without_secrets

if TYPE_CHECKING:
    from capt.launcher.plan import Options
    from capt.pretrain.retrieval.options import EncodeOptions


_T = TypeVar("_T")


def one_class(command: str, kinds: Sequence[Any]) -> Any:
    """Return a class with the options of all ``kinds``. Raises ``ConfigError`` where two have one of the same name."""
    if twice := repeated(each.name for kind in dict.fromkeys(kinds) for each in fields(kind)):
        raise ConfigError(f"{command}: {twice} is an option of two kinds; give one another name")
    # The fields of a class come after those of the bases that follow it.
    return make_dataclass("EveryOption", [], bases=tuple(reversed(kinds)), frozen=True)


def with_options(command: Callable[..., Any]) -> Callable[..., Any]:
    """Give typer the fields of each dataclass among the parameters of ``command`` as options of their own.

    So an option is declared once, in the class of which the command, and what it calls, takes an object.
    """
    given = inspect.signature(command, eval_str=True).parameters.values()
    kinds: dict[str, Any] = {each.name: each.annotation for each in given if is_dataclass(each.annotation)}
    if not kinds:
        return command
    shown: list[inspect.Parameter] = []
    for each in given:
        hints = get_type_hints(kinds[each.name], include_extras=True) if each.name in kinds else {}
        for field in fields(kinds[each.name]) if each.name in kinds else ():
            default = inspect.Parameter.empty if field.default is MISSING else field.default
            if field.default_factory is not MISSING:
                default = field.default_factory()
            shown.append(
                inspect.Parameter(field.name, each.KEYWORD_ONLY, default=default, annotation=hints[field.name])
            )
        shown += [] if each.name in kinds else [each.replace(kind=each.KEYWORD_ONLY)]

    def call(**values: Any) -> Any:
        made = {name: chosen(kind, values) for name, kind in kinds.items()}
        parts = {field.name for kind in kinds.values() for field in fields(kind)}
        return command(**{name: value for name, value in values.items() if name not in parts}, **made)

    call.__name__, call.__doc__ = command.__name__, command.__doc__
    call.__signature__ = inspect.Signature(shown)  # type: ignore[attr-defined]
    call.__annotations__ = {each.name: each.annotation for each in shown}
    return call


def chosen(kind: type[_T], given: Mapping[str, Any]) -> _T:
    """Make an object of a dataclass of the values that have the names of its fields."""
    return kind(**{field.name: given[field.name] for field in fields(kind) if field.name in given})  # type: ignore[arg-type]


Config = Annotated[
    str, typer.Argument(metavar="CONFIG", help="A YAML file, or the name of a shipped job (capt config list).")
]
Overrides = Annotated[list[str] | None, typer.Argument(metavar="[a.b=c ...]", help="Keys to set on top of the file's.")]
Run = Annotated[Path, typer.Argument(metavar="RUN", help="A run folder.")]
Json = Annotated[bool, typer.Option("--json", help="Print JSON.")]

OwnOptions = Annotated[
    list[str] | None,
    typer.Option("--option", "-o", metavar="NAME=VALUE", help="An option of the checkpoint's task (may be repeated)."),
]

Nproc = Annotated[
    int | None,
    typer.Option(
        min=1, max=512, help="Processes on this host (default: one for each GPU, or one; capt resume: as before)."
    ),
]
Hostfile = Annotated[Path | None, typer.Option(help="Lines 'host slots=N': run on these hosts over ssh.")]
Include = Annotated[
    str | None,
    typer.Option(
        metavar="HOST[:SLOT,...]@...", help="Run on these hosts of the hostfile (and slots of them) only, as DeepSpeed."
    ),
]
Exclude = Annotated[
    str | None,
    typer.Option(metavar="HOST[:SLOT,...]@...", help="Leave these hosts of the hostfile (or slots of them) out."),
]
Nodes = Annotated[
    int | None,
    typer.Option(
        min=1,
        help="Hosts of the hostfile, Slurm nodes or pods that run the job; the others are spares (default: none).",
    ),
]
Launcher = Annotated[
    str | None,
    typer.Option(
        help=f"{', '.join(LAUNCHERS)}, or an entry point of capt.launchers (default: local; ssh with --hostfile)."
    ),
]
MasterAddr = Annotated[str | None, typer.Option(help="Address of the first host, as the others reach it.")]
MasterPort = Annotated[int | None, typer.Option(min=1, max=65535, help="Port of the rendezvous on the first host.")]
Cluster = Annotated[
    Path | None, typer.Option(help="Settings of Slurm or Kubernetes (a copy of a file in capt/configs/cluster).")
]


@dataclass(frozen=True)
class LaunchOptions:
    """Options of the commands that start a job: where its processes run, and what starts them."""

    nproc: Nproc = None
    hostfile: Hostfile = None
    include: Include = None
    exclude: Exclude = None
    nodes: Nodes = None
    launcher: Launcher = None
    master_addr: MasterAddr = None
    master_port: MasterPort = None
    cluster: Cluster = None

    def checked(self) -> Options:
        """Return them as the launcher takes them. Raises ``ConfigError`` naming the one that is not valid."""
        from capt.launcher.plan import Options

        return Options.given(**vars(self))


@dataclass(frozen=True)
class RankOptions:
    """Options of work that ranks share."""

    nproc: Nproc = None
    hostfile: Hostfile = None
    launcher: Annotated[
        str | None, typer.Option(help=f"{', '.join(WORK_LAUNCHERS)} (default: local; ssh with --hostfile).")
    ] = None


Preflight = Annotated[
    bool,
    typer.Option("--preflight/--no-preflight", help="Examine the hosts before the start, and refuse what would fail."),
]
Resume = Annotated[
    str | None,
    typer.Option(
        metavar="auto", help="auto: begin the run, or resume it where run.dir holds one of the same job (run.resume)."
    ),
]
DryRun = Annotated[bool, typer.Option("--dry-run", help="Show commands, environment and files; start nothing.")]


def debug(context: typer.Context) -> bool:
    """Tell whether ``--debug`` was given."""
    return bool(context.obj and context.obj["debug"])


def quiet(context: typer.Context) -> None:
    """Keep DeepSpeed's chatter out of the answer; before anything imports it."""
    from capt.pretrain.base.quiet import quiet_libraries

    quiet_libraries(debug=debug(context))


def echo_json(value: Any) -> None:
    """Print a value as JSON, which has neither NaN nor infinity: such a number is null."""
    typer.echo(json.dumps(finite(value), indent=1, sort_keys=True, default=str, allow_nan=False))


def echo_line(value: Any) -> None:
    """Print a value as JSON in a line of its own, as `echo_json`."""
    typer.echo(json.dumps(finite(value), ensure_ascii=False, allow_nan=False))


_CONTROL = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f\u202a-\u202e\u2066-\u2069]")


def say(text: object) -> None:
    """Print names or texts of others; control characters, on which a terminal would act, are shown as codes."""
    typer.echo(_CONTROL.sub(lambda found: ascii(found[0])[1:-1], str(text)))


def answer(value: Any, text: Callable[[], object], *, json: bool) -> None:
    """Print ``value`` as JSON, or the text for people."""
    if json:
        echo_json(value)
    else:
        say(text())


def source_path(given: str) -> Path:
    """Return a folder or a hub id as it was typed; what reads it is loaded when there is one to read."""
    from capt.pretrain.models.hf_config import source_path as parse

    return parse(given)


_SILENT = 2.0
"""Seconds after which a command that has said nothing yet says what it does."""


@contextmanager
def explained(what: str) -> Iterator[None]:
    """Say on stderr what the command does, where the block takes more than two seconds."""
    timer = threading.Timer(_SILENT, lambda: typer.echo(f"[capt] {what}", err=True))
    timer.daemon = True
    timer.start()
    try:
        yield
    finally:
        timer.cancel()


def place(given: str) -> str:
    """Return an absolute path (ranks on other hosts may have another working folder), or an address in a store.

    Raises ``ConfigError``.
    """
    if not is_url(given):
        return str(Path(given).absolute())
    try:
        return check_url(given)
    except ValueError as error:
        raise ConfigError(f"{without_secrets(given)} {error}") from None


def written_place(given: str) -> str:
    """Return `place`, where it can be written to. Raises ``ConfigError``."""
    found = place(given)
    if is_url(found) and found.partition("://")[0].lower() not in WRITABLE:
        known = ", ".join(f"{name}://" for name in WRITABLE)
        raise ConfigError(f"--out {found}: such a store is only read; known: {known}, or a folder")
    return found


_INTERVAL = 60.0
"""Seconds between two lines of progress in a log."""


def progress_lines(what: str) -> ProgressCallback:
    """Return a function of (done, total) that writes to stderr, once an interval, the part done and the time left."""
    of = first = 0
    began = drawn = time.monotonic()

    def tell(done: int, total: int) -> None:
        nonlocal of, first, began, drawn
        now = time.monotonic()
        if total != of:  # what an earlier start has done says nothing about the speed
            of, first, began = total, done, now
        if now - drawn < _INTERVAL or not 0 < done <= total:
            return
        drawn = now
        left = (now - began) * (total - done) / (done - first) if done > first else None
        then = "" if left is None else f", about {timedelta(seconds=round(left))} left"
        typer.echo(f"{what}: {done / total:.0%}{then}", err=True)

    return tell


@contextmanager
def progress_bar(what: str, *, lines: bool = True) -> Iterator[ProgressCallback | None]:
    """Yield a function of (done, total) that draws a bar on stderr.

    Where that is no terminal it is `progress_lines`, or None without ``lines``: for work that writes to a log itself.
    """
    if not sys.stderr.isatty():
        yield progress_lines(what) if lines else None
        return
    from rich.console import Console
    from rich.progress import BarColumn, Progress, TaskProgressColumn, TextColumn, TimeRemainingColumn

    columns = (TextColumn("{task.description}"), BarColumn(), TaskProgressColumn(), TimeRemainingColumn())
    with Progress(*columns, console=Console(stderr=True), transient=True) as bar:
        task = bar.add_task(what, total=None)
        yield lambda done, total: bar.update(task, completed=done, total=total)


def carry_out(
    call: str, folder: Path, ranks: RankOptions, arguments: Mapping[str, Any], what: str = "encoding"
) -> dict[str, Any]:
    """Return what the function ``call``, ``MODULE:NAME``, gives, in this process or on the ranks that are asked for.

    Args:
        call: a function that all ranks call, with ``progress`` among its keywords.
        folder: where ranks read what to do, and rank 0 writes the result; all hosts must see it.
        ranks: no options are this process alone.
        arguments: paths, texts, numbers and objects of options.
        what: precedes the bar of this process.

    Raises:
        UserError: as the function; or the options are wrong. `typer.Exit` with the code of ranks that failed.
    """
    from capt.launcher.plan import Options

    work, options = {"call": call, **arguments}, Options.given(**vars(ranks))
    if options == Options():
        from capt.pretrain.retrieval.work import perform

        with progress_bar(what, lines=False) as progress:
            return perform(work, progress)
    from pydantic_core import to_jsonable_python

    from capt.launcher.start import start_work

    file = folder.absolute() / f".work-{secrets.token_hex(8)}.json"
    result = file.with_suffix(".out")
    try:
        write_json(file, to_jsonable_python(work), private=True)
        if code := start_work("capt.pretrain.retrieval", file, options):
            raise typer.Exit(code)
        found: dict[str, Any] = read_json(result)
        return found
    finally:
        for path in (file, result):
            with suppress(OSError):
                path.unlink(missing_ok=True)


def shared_folder(store: str) -> Path:
    """Return the folder in which ranks are given work: that of the vectors, or of a store the working folder."""
    return Path.cwd() if is_url(store) else Path(store)


def with_place(options: EncodeOptions) -> EncodeOptions:
    """Return the options with an absolute store. Raises ``ConfigError`` where it is no place."""
    return options if options.store is None else replace(options, store=place(options.store))
