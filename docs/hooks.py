"""What the pages do not say twice is written from the code when they are built; formulas become MathML.

A page asks for a table with a line ``<!-- generated: keys glue -->`` (a task's type, or ``sweep``),
``<!-- generated: cli -->``, ``<!-- generated: families -->`` or ``<!-- generated: metrics -->`` (``metrics noise``).
MathML is what browsers show without a script, so the site needs no network.
"""

from __future__ import annotations

import html
import json
import re
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, get_args, get_origin

from latex2mathml.converter import convert
from pydantic import BaseModel
from pydantic_core import to_jsonable_python

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # mkdocs' own script starts without the checkout

from capt.pretrain.models.architecture import ENCODERS, EncoderConfig, encoder_class

_FORMULA = re.compile(
    r'<(div|span) class="arithmatex">\\([(\[])(.*?)\\[)\]]</\1>', re.S
)  # as pymdownx.arithmatex writes it
_MARKER = re.compile(r"^<!-- generated: (\w+)(?: (\w+))? -->$", re.M)


def on_page_markdown(markdown: str, **_: Any) -> str:
    """mkdocs' hook: replace every marker of a page."""
    writers: dict[str, Callable[..., str]] = {
        "keys": keys_markdown, "cli": cli_markdown, "metrics": metrics_markdown, "families": families_markdown
    }  # fmt: skip
    return _MARKER.sub(lambda match: writers[match[1]](*filter(None, [match[2]])), markdown)


def on_page_content(content: str, **_: Any) -> str:
    """mkdocs' hook: formulas of a page, those of docstrings included, from LaTeX to MathML."""
    return _FORMULA.sub(lambda match: _mathml(match[1], match[2] == "[", match[3]), content)


def _mathml(tag: str, display: bool, latex: str) -> str:
    formula = convert(html.unescape(latex).strip(), display="block" if display else "inline")
    return f'<{tag} class="formula">{formula}</{tag}>'


def keys_markdown(task: str) -> str:
    """A heading and a table for every section of a task's jobs (or of a sweep), from the pydantic schema."""
    from capt.launcher.sweep.config import Sweep
    from capt.pretrain.registry import job_class

    job = Sweep if task == "sweep" else job_class(task)
    blocks = [_block("Outside of sections", "", "", job)]
    for section, model in sections(job):
        blocks.append(_block(section, f"{section.partition(' ')[0]}.", f"{_prose(model)}\n\n", model))
    return "\n\n".join(blocks)


def _block(heading: str, prefix: str, prose: str, model: type[BaseModel]) -> str:
    rows = [f"| `{prefix}{key}` | {kind} | {default} | {about} |" for key, kind, default, about in _rows(model)]
    head = f"## {heading}\n\n{prose}| key | value | default | meaning |\n|---|---|---|---|"
    return "\n".join([head, *rows])


def sections(job: type[BaseModel], prefix: str = "") -> Iterator[tuple[str, type[BaseModel]]]:
    """Every section with the dotted name under which a configuration holds it, nested ones after their own.

    A mapping of sections is written with ``NAME`` for its keys; of several kinds of a section each is one.
    """
    for name, field in job.model_fields.items():
        dotted = f"{prefix}{field.alias or name}"
        kind: Any = field.annotation
        if get_origin(kind) is dict:
            dotted, kind = f"{dotted}.NAME", get_args(kind)[1]
        models = [m for m in (get_args(kind) or (kind,)) if isinstance(m, type) and issubclass(m, BaseModel)]
        if EncoderConfig in models:
            models = encoders_by_keys()
        for model in models:
            yield (f"{dotted} ({_type_of(model)})" if len(models) > 1 else dotted), model
            yield from sections(model, f"{dotted}.")


def encoders_by_keys() -> list[type[EncoderConfig]]:
    """One encoder for each set of keys: families that run on the model of transformers have the same ones."""
    kinds = [encoder_class(arch) for arch in ENCODERS]
    return [
        kind for n, kind in enumerate(kinds) if set(kind.model_fields) not in [set(k.model_fields) for k in kinds[:n]]
    ]


def families_markdown() -> str:
    """What each family of encoders can do here, from the registry."""
    from capt.pretrain.models.config import RobertaConfig
    from capt.pretrain.models.foreign.config import TransformersConfig
    from capt.pretrain.models.foreign.families import FAMILIES

    lines = [
        "| `model.arch` | `model_type` of `config.json` | computed by | documents apart | exported as | fine-tuned as |"
    ]
    lines.append("|---|---|---|---|---|---|")
    for arch in ENCODERS:
        kind = encoder_class(arch)
        classifier = FAMILIES.get(kind.hf.types[0]) or kind.hf.classifier
        types = ", ".join(f"`{name}`" for name in kind.hf.types)
        by = "our RoBERTa" if issubclass(kind, RobertaConfig) else "our own encoder"
        by = "transformers" if issubclass(kind, TransformersConfig) else by
        apart = "yes" if kind.packs_documents else "no"
        tuned = "" if classifier is None else f"`{classifier.architecture}`"
        lines.append(f"| `{arch}` | {types} | {by} | {apart} | `{kind.hf.masked_lm}` | {tuned} |")
    return "\n".join(lines)


def _type_of(model: type[BaseModel]) -> str:
    fields = model.model_fields
    return str(get_args(fields["type"].annotation)[0] if "type" in fields else fields["arch"].default)


def _rows(model: type[BaseModel]) -> Iterator[tuple[str, str, str, str]]:
    fields = {field.alias or name: field for name, field in model.model_fields.items()}
    for key, schema in model.model_json_schema(by_alias=True)["properties"].items():
        if '"$ref"' in json.dumps(schema):
            continue  # a section of its own
        field = fields[key]
        given = to_jsonable_python(field.get_default(call_default_factory=True)) if not field.is_required() else None
        default = "required" if field.is_required() else f"`{_yaml(given)}`"
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


def metrics_markdown(of: str = "") -> str:
    """The validation metrics: those of masked tokens and of the head, or those of noise on the encoder's own output."""
    from capt.pretrain.contrastive.metrics import METRICS

    rows = [(row.of, name, _cell(about)) for row in METRICS for name, about in zip(row.names, row.about, strict=True)]
    if of == "noise":
        table = [f"| `{name}` | {about} |" for kind, name, about in rows if kind == of]
        return "\n".join(["| metric | what it is |", "|---|---|", *table])
    needs = {"tokens": "no", "pairs": "yes"}
    table = [f"| `{name}` | {about} | {needs[kind]} |" for kind, name, about in rows if kind in needs]
    return "\n".join(["| metric | what it is | needs the head |", "|---|---|---|", *table])


def cli_markdown() -> str:
    """The help of every command, as ``capt COMMAND --help`` prints it on a terminal of 80 columns."""
    import typer

    from capt.launcher.cli import app

    blocks = []
    for name, command in commands(typer.main.get_command(app)):
        context = command.make_context(f"capt {name}", [], resilient_parsing=True, terminal_width=82)
        blocks.append(f"## capt {name}\n\n```text\n{command.get_help(context).strip()}\n```")
    return "\n\n".join(blocks)


def commands(group: Any, prefix: str = "") -> Iterator[tuple[str, Any]]:
    """All commands of a command group, with the words that call them."""
    for name, command in group.commands.items():
        if hasattr(command, "commands"):
            yield from commands(command, f"{prefix}{name} ")
        else:
            yield f"{prefix}{name}", command
