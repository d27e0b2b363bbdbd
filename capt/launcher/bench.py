"""``capt bench``: run the benchmarks of a source checkout and keep their results with what they were measured on.

A benchmark is a module ``tests/benchmarks/bench_NAME.py``. It prints its result as one JSON object on its last line of
output (``{"rows": [{...}, ...]}`` becomes a table; ``{"sections": [{"title": ..., "text": ..., "rows": [...]}, ...]}``
several with words), and exits with another code than 0 when it misses its bound.
"""

from __future__ import annotations

import ast
import datetime
import json
import logging
import os
import shlex
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from capt.launcher import machine
from capt.launcher.environment import inherited
from capt.pretrain.base.errors import ConfigError, did_you_mean
from capt.pretrain.engine.provenance import provenance

log = logging.getLogger(__name__)

_CHECKOUT = Path(__file__).resolve().parents[2]


def find_benchmarks(names: Sequence[str], root: Path = _CHECKOUT) -> dict[str, Path]:
    """The benchmarks of these names (all without names) in a checkout.

    Raises:
        ConfigError: this is not a checkout, or there is no benchmark of a name.
    """
    folder = root / "tests" / "benchmarks"
    found = {path.stem.removeprefix("bench_"): path for path in sorted(folder.glob("bench_*.py"))}
    if not found:
        raise ConfigError(f"no benchmarks in {folder}: capt bench runs in a source checkout (pip install -e .)")
    for name in names:
        if name not in found:
            raise ConfigError(f"no benchmark {name!r}; {did_you_mean(name, list(found), 'there are:')}")
    return {name: found[name] for name in names or found}


def run_benchmarks(benchmarks: dict[str, Path], out: Path, options: Sequence[str] = ()) -> int:
    """Run benchmarks one after the other and write ``out/NAME.json`` and ``out/NAME.md``; 1 if any failed, else 0.

    ``options`` are of the benchmark itself. One that fails without a result leaves earlier files.

    Raises:
        ConfigError: there are options, and not exactly one benchmark that they could be of.
    """
    if options and len(benchmarks) != 1:
        raise ConfigError(f"{' '.join(options)}: options of a benchmark need exactly one: capt bench NAME -- OPTIONS")
    out.mkdir(parents=True, exist_ok=True)
    failed = []
    for name, path in benchmarks.items():
        log.info("%s ...", name)
        record = _run(name, path, options)
        if record["exit_code"] != 0:
            failed.append(name)
        page = out / f"{name}.md"
        if record["exit_code"] != 0 and record["result"].keys() == {"output"} and page.exists():
            log.error("%s: exit code %d and no result; %s stays as it is", name, record["exit_code"], page)
            continue
        (out / f"{name}.json").write_text(json.dumps(record, indent=1) + "\n", encoding="utf-8")
        page.write_text(markdown(record), encoding="utf-8")
        log.info("%s: exit code %d after %.0f s, %s", name, record["exit_code"], record["seconds"], page)
    if failed:
        log.error("failed: %s", ", ".join(failed))
    return 1 if failed else 0


def markdown(record: dict[str, Any]) -> str:
    """A result as a page: what, where, with which versions, the numbers."""
    facts = {
        "Command": f"`{record['command']}`",
        "Date": record["date"],
        "Hardware": record["hardware"],
        "Versions": ", ".join(f"{name} {version}" for name, version in record["versions"].items()),
        "Revision": record["revision"],
        "Exit code": f"{record['exit_code']} ({record['seconds']:.0f} s)",
    }
    lines = [f"# {record['title']}", "", *(f"- {name}: {value}" for name, value in facts.items()), ""]
    result = dict(record["result"])
    lines += _table(result.pop("rows", []))
    for section in result.pop("sections", []):
        lines += [f"## {section['title']}", "", *([section["text"], ""] if section.get("text") else [])]
        lines += _table(section.get("rows", []))
    text = result.pop("output", "")
    lines += [f"- {name}: {_cell(value)}" for name, value in result.items()]
    lines += ["```", text.rstrip(), "```"] if text else []
    return "\n".join(lines).rstrip() + "\n"


def _table(rows: Sequence[dict[str, Any]]) -> list[str]:
    if not rows:
        return []
    columns = list(dict.fromkeys(column for row in rows for column in row))
    cells = [[row.get(column, "") for column in columns] for row in rows]
    return [_row(columns), _row(["---"] * len(columns)), *map(_row, cells), ""]


def _run(name: str, path: Path, options: Sequence[str]) -> dict[str, Any]:
    words = ["-m", f"tests.benchmarks.{path.stem}", *options]
    command = [sys.executable, *words]
    begin = time.monotonic()
    root, env = path.parents[2], inherited()
    # The checkout is measured, and not a package that is installed.
    env["PYTHONPATH"] = os.pathsep.join(filter(None, [str(root), env.get("PYTHONPATH")]))
    done = subprocess.run(command, cwd=root, env=env, stdout=subprocess.PIPE, text=True, check=False)
    versions = dict(provenance())
    revision = versions.pop("revision")
    return {
        "name": name,
        "title": _title(path),
        "command": shlex.join(["python", *words]),
        "date": datetime.date.today().isoformat(),
        "hardware": machine.hardware_summary(),
        "versions": versions,
        "revision": revision,
        "exit_code": done.returncode,
        "seconds": round(time.monotonic() - begin, 1),
        "result": _result(done.stdout),
    }


def _title(path: Path) -> str:
    docstring = ast.get_docstring(ast.parse(path.read_text(encoding="utf-8"))) or path.stem
    return docstring.splitlines()[0].rstrip(".")


def _result(output: str) -> dict[str, Any]:
    lines = [line for line in output.splitlines() if line.strip()]
    try:
        result = json.loads(lines[-1]) if lines else None
    except ValueError:
        result = None
    return result if isinstance(result, dict) else {"output": output[-4000:]}


def _row(cells: Sequence[Any]) -> str:
    return "| " + " | ".join(_cell(cell) for cell in cells) + " |"


def _cell(value: Any) -> str:
    text = f"{value:.4g}" if isinstance(value, float) else str(value)
    return text.replace("|", "\\|").replace("\n", " ")
