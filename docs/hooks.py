"""What the pages do not say twice: the key tables and the command line are written out from the code at build time.

A page asks for it with a line ``<!-- generated: keys -->`` or ``<!-- generated: cli -->``.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from pydantic import BaseModel, ValidationError

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # mkdocs' own script starts without the checkout

_MARKER = re.compile(r"^<!-- generated: (\w+) -->$", re.M)


def on_page_markdown(markdown: str, **_: Any) -> str:
    """mkdocs' hook: replace every marker of a page."""
    writers: dict[str, Callable[[], str]] = {"keys": keys_markdown, "cli": cli_markdown}
    return _MARKER.sub(lambda match: writers[match[1]](), markdown)


def keys_markdown(task: str = "capt_language") -> str:
    """A heading and a table for every section of a task's jobs, from the pydantic schema."""
    from pretrain.tasks import job_class

    job = job_class(task)
    blocks = []
    for section, model in sections(job):
        rows = [f"| `{section}.{key}` | {kind} | {default} | {about} |" for key, kind, default, about in _rows(model)]
        head = f"## {section}\n\n{_prose(model)}\n\n| key | value | default | meaning |\n|---|---|---|---|"
        blocks.append("\n".join([head, *rows]))
    return "\n\n".join(blocks)


def sections(job: type[BaseModel], prefix: str = "") -> Iterator[tuple[str, type[BaseModel]]]:
    """Every section with the dotted name under which a configuration holds it, nested ones after their own."""
    for name, field in job.model_fields.items():
        model = field.annotation
        if isinstance(model, type) and issubclass(model, BaseModel):
            dotted = f"{prefix}{field.alias or name}"
            yield dotted, model
            yield from sections(model, f"{dotted}.")


def _rows(model: type[BaseModel]) -> Iterator[tuple[str, str, str, str]]:
    properties = model.model_json_schema(by_alias=True)["properties"]
    try:
        defaults: dict[str, Any] | None = model.model_validate({}).model_dump(mode="json", by_alias=True)
    except ValidationError:
        defaults = None
    for key, schema in properties.items():
        if "$ref" in schema or "allOf" in schema:
            continue  # a section of its own
        default = "required" if defaults is None else f"`{_yaml(defaults[key])}`"
        yield key, _kind(schema), default, _cell(schema.get("description", ""))


def _kind(schema: dict[str, Any]) -> str:
    if "anyOf" in schema:
        return " or ".join(_kind(option) for option in schema["anyOf"])
    if "enum" in schema or "const" in schema:
        return ", ".join(f"`{_yaml(value)}`" for value in schema.get("enum", [schema.get("const")]))
    names = {"null": "`null`", "array": "list", "object": "mapping", "boolean": "`true`, `false`", "string": "text"}
    words = {"exclusiveMinimum": "> {}", "minimum": ">= {}", "exclusiveMaximum": "< {}", "maximum": "<= {}"}
    bounds = [text.format(_yaml(schema[word])) for word, text in words.items() if word in schema]
    name = "path" if schema.get("format") == "path" else names.get(schema["type"], schema["type"])
    return " ".join([name, ", ".join(bounds)]).strip()


def _yaml(value: Any) -> str:
    if value is None or isinstance(value, bool):
        return {None: "null", True: "true", False: "false"}[value]
    if isinstance(value, float):
        return f"{value:g}"
    return str(value).replace(str(Path.home()), "~")


def _prose(model: type[BaseModel]) -> str:
    return re.sub(r"``(.+?)``", r"`\1`", " ".join((model.__doc__ or "").split()))


def _cell(text: str) -> str:
    return text.replace("|", "\\|").replace("<", "&lt;")


def cli_markdown() -> str:
    """The help of every verb, as ``capt VERB --help`` prints it."""
    import typer

    from launcher.cli import app

    blocks = []
    for name, command in verbs(typer.main.get_command(app)):
        context = command.make_context(f"capt {name}", [], resilient_parsing=True, terminal_width=100)
        blocks.append(f"## capt {name}\n\n```text\n{command.get_help(context).strip()}\n```")
    return "\n\n".join(blocks)


def verbs(group: Any, prefix: str = "") -> Iterator[tuple[str, Any]]:
    """All commands of a command group, with the words that call them."""
    for name, command in group.commands.items():
        if hasattr(command, "commands"):
            yield from verbs(command, f"{prefix}{name} ")
        else:
            yield f"{prefix}{name}", command
