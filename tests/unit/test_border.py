"""Every place where the source opens, parses, unpacks, loads or starts something, against a list that people have read.

What a file from somebody else can reach is here: a new ``open``, ``subprocess``, ``torch.load``, YAML, archive, pickle
or ``eval`` is a new way in. It is in ``REVIEWED`` with the reason why it is a safe one, or goes through
`capt.pretrain.base.files`.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2] / "capt"
PACKAGES = ("tokenizer", "pretrain", "finetune", "launcher")

MODULES = (
    "bz2",
    "ctypes",
    "gzip",
    "lzma",
    "marshal",
    "pickle",
    "runpy",
    "shelve",
    "subprocess",
    "tarfile",
    "yaml",
    "zipfile",
)
CALLS = (
    *("__import__", "compile", "eval", "exec", "open", "os.fdopen", "os.open", "os.popen", "os.system", "mmap.mmap"),
    *("importlib.import_module", "load_file", "np.fromfile", "np.load", "np.memmap", "safe_open", "torch.load"),
)
METHODS = ("extractall", "open", "read_bytes", "read_text", "write_bytes", "write_text")

OUT = "writes a result of ours where the user asked for it"
TEXT = "a corpus: any file that the user names, read as text and never interpreted"
SHARDS = "a shard set: checked against its manifest before it is mapped"
STORE = "a region store: checked against its manifest before it is mapped"
TENSORS = "safetensors: a header in JSON and numbers, no code"
OWN = "a file of ours beside the run, whose folder is the user's"
TOOL = "a program with a fixed list of arguments, no shell"
REGISTRY = "a module named in the source or in an entry point of an installed package, never in a file"

WORK = "arrays of ours, without pickles, in the folder that the user writes to"
REVIEWED: dict[str, tuple[str, str]] = {
    "pretrain/convert/output.py": (".write_text", OUT),
    "pretrain/retrieval/teacher.py": ("np.load", "the user's arrays, allow_pickle=False"),
    "pretrain/regions/manifest.py": (".open", STORE),
    "pretrain/regions/extract/prepare.py": (".open", "Pillow, on bytes within bounds: named formats, few pixels"),
    "pretrain/regions/extract/find.py": ("tarfile.open", "only the table of a tar, of which nothing is extracted"),
    "pretrain/regions/importing.py": (".open", OWN),
    "pretrain/regions/writer.py": ("os.open", "arrays of ours, no link" + "; " + "writes a store"),
    "pretrain/vision_language/microworld/generate.py": (".open .write_text", OUT),
    "pretrain/vision_language/microworld/pictures.py": (".open .write_text", OUT),
    "finetune/encoding.py": ("np.load", "a cache of ours, allow_pickle=False"),
    "finetune/glue/submission.py": ("zipfile.ZipFile zipfile.ZipInfo", OUT),
    "launcher/backends/__init__.py": ("importlib.import_module", REGISTRY),
    "launcher/supervisor/activity.py": (".read_text", "/proc"),
    "launcher/backends/deepspeed.py": ("subprocess.run", "pdsh: every word checked or quoted for the remote shell"),
    "launcher/supervisor/processes.py": (".read_text subprocess.Popen", "/proc; the planned command or ssh, no shell"),
    "launcher/kubernetes/apply.py": (
        "subprocess.run yaml.safe_load_all",
        "kubectl: no word of the user, the manifest on its stdin; a text of ours",
    ),
    "launcher/kubernetes/manifests.py": ("yaml.dump_all", "writes"),
    "launcher/supervisor/calls.py": ("os.fdopen os.open", "connections of the nodes, in JSON and checked; /dev/null"),
    "launcher/backends/slurm.py": ("subprocess.run", "sbatch: the script's words are quoted"),
    "launcher/requeue.py": ("subprocess.run", "scontrol: one word, that Slurm itself has set; with a time limit"),
    "launcher/allocation.py": ("subprocess.run", "scontrol: one word, that Slurm itself has set"),
    "launcher/bench.py": (".read_text .write_text subprocess.run", "benchmarks of the source checkout; " + OUT),
    "launcher/commands/cache.py": (".read_text", "/proc"),
    "launcher/commands/config.py": ("yaml.safe_dump", "writes"),
    "launcher/commands/data.py": (".open", SHARDS),
    "launcher/machine.py": (".read_text", "/proc/cpuinfo"),
    "launcher/preflight/probe.py": (
        "open os.fdopen os.open subprocess.run",
        "installed packages, hashed; a new file of ours, no link, read again; nvidia-smi, with a time limit",
    ),
    "launcher/preflight/survey.py": (".read_bytes", "the probe's own source"),
    "launcher/supervisor/heartbeats.py": (".read_text mmap.mmap", "/proc; memory without a name, shared with a rank"),
    "launcher/supervisor/ranks.py": ("os.open", "our own temporary folders, no link followed"),
    "launcher/supervisor/node.py": ("os.open subprocess.Popen", "/dev/null; nvidia-smi; " + TOOL),
    "pretrain/retrieval/index_files.py": (".open", "writes an index"),
    "launcher/commands/search.py": (".open", "an index of ours, mapped by the lengths that its record gives"),
    "pretrain/retrieval/store.py": (".open np.fromfile np.memmap", "numbers of ours, each row with a checksum"),
    "launcher/sweep/trial_log.py": (".open", OWN),
    "launcher/sweep/trial.py": (".open", OWN),
    "pretrain/config/reader.py": ("yaml.SafeLoader yaml.dump", "writes" + "; " + "plain types alone, within bounds"),
    "pretrain/contrast/shards.py": ("safe_open", TENSORS),
    "pretrain/convert/card.py": ("yaml.safe_dump", "writes"),
    "pretrain/convert/merge.py": ("safe_open", TENSORS),
    "pretrain/data/docstrings.py": (".read_bytes .read_text", "installed packages and their records, not run"),
    "pretrain/base/leases.py": (".read_text .write_text", "words that are compared, in the user's own folder"),
    "pretrain/data/bulk.py": (".open np.load", WORK),
    "pretrain/data/prepare.py": (".open", SHARDS),
    "pretrain/data/targets.py": (".open", SHARDS),
    "pretrain/data/shard_cache.py": (".open np.memmap os.open", SHARDS + "; its files by hash"),
    "pretrain/reliability/uploads.py": (".open .read_bytes", OWN),
    "pretrain/base/arrays.py": (".open np.memmap", "writes; numbers, of the length and header that a record gives"),
    "pretrain/data/shard_writer.py": (".open .write_text np.fromfile", "writes the cache; " + WORK),
    "pretrain/engine/rank.py": ("ctypes.CDLL", "libc's mallopt"),
    "pretrain/engine/callbacks/performance.py": (".read_bytes", "of a private temporary folder"),
    "pretrain/engine/checkpoint/load.py": ("safe_open", TENSORS),
    "pretrain/engine/durable.py": (".open", "the safetensors file that was written just before"),
    "pretrain/reliability/local/storage.py": (".read_text", "/proc and /sys"),
    "pretrain/reliability/local/replicate.py": (".open", "files of another host, private"),
    "pretrain/engine/heartbeat.py": ("mmap.mmap", "memory without a name, inherited from the launcher"),
    "pretrain/engine/provenance.py": (
        "subprocess.run .read_text", "git, in the source checkout; /proc/cpuinfo, of the kernel; " + TOOL,
    ),
    "finetune/visual/dumps.py": ("importlib.import_module", REGISTRY),
    "pretrain/report/document.py": (".read_text", "a template of the package"),
    "pretrain/embeddings/vectors.py": ("gzip.GzipFile", OUT),
    "pretrain/language/import_hf.py": (".write_text", OUT),
    "pretrain/language/inputs.py": (".open", SHARDS),
    "pretrain/latent/kenlm.py": ("subprocess.run", "lmplz and query; " + TOOL),
    "pretrain/latent/corpus.py": (".read_text", TEXT),
    "pretrain/models/hf_folder.py": ("safe_open", TENSORS),
    "pretrain/registry.py": ("importlib.import_module", REGISTRY),
    "tokenizer/export.py": (".write_bytes", OUT),
    "pretrain/base/process.py": ("ctypes.CDLL open os.open .read_text", "/dev/null; libc's prctl; /proc"),
    "pretrain/engine/checkpoint/layout.py": ("os.open", "the folder of checkpoints, no link"),
    "pretrain/base/atomic.py": ("os.open", "what was just written, for fsync, and locks on folders of ours"),
    "pretrain/base/verification.py": (".open", "what was just written"),
    "pretrain/base/files.py": ("gzip.GzipFile os.fdopen os.open zipfile.ZipFile", TEXT + "; " + "the border itself"),
}  # fmt: skip


def found() -> Iterator[tuple[str, str, int]]:
    """File, call and line of everything that is watched."""
    for path in (path for package in PACKAGES for path in sorted((ROOT / package).rglob("*.py"))):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Call) and (call := watched(node)):
                yield str(path.relative_to(ROOT)), call, node.lineno


def watched(node: ast.Call) -> str:
    """The name of a call that is watched; empty for others. A method counts whatever its object is called, but for
    modules and classes of ours whose own opening of files is on the list."""
    name = ast.unparse(node.func)
    if name in CALLS or re.fullmatch(rf"({'|'.join(MODULES)})\.[\w.]+", name):
        return name
    if (
        isinstance(node.func, ast.Attribute)
        and node.func.attr in METHODS
        and not name.startswith(("os.", "safe_files.", "RegionStore."))
    ):
        return f".{node.func.attr}"
    return ""


def test_every_place_is_on_the_list_and_no_other() -> None:
    lines = {(path, call): line for path, call, line in found()}
    reviewed = {(path, call) for path, (calls, _) in REVIEWED.items() for call in calls.split()}
    new = [f"{path}:{line}: {call}" for (path, call), line in lines.items() if (path, call) not in reviewed]
    assert new == [], "use capt.pretrain.base.files, or look at what can come in here and give the reason in REVIEWED"
    assert reviewed - lines.keys() == set(), "these are no more: take them out of REVIEWED"


def test_nothing_is_ever_unpickled_evaluated_or_run_by_a_shell() -> None:
    for path in (path for package in PACKAGES for path in sorted((ROOT / package).rglob("*.py"))):
        for node in ast.walk(ast.parse(path.read_text())):
            if not isinstance(node, ast.Call):
                continue
            name, keywords = ast.unparse(node.func), {word.arg: ast.unparse(word.value) for word in node.keywords}
            where = f"{path.relative_to(ROOT)}:{node.lineno}: {name}"
            assert name not in ("eval", "exec", "__import__", "os.system", "os.popen", "yaml.load"), where
            assert name.split(".")[0] not in ("pickle", "marshal", "shelve", "runpy"), where
            assert name.split(".")[-1] not in ("extract", "extractall"), where
            assert name != "torch.load" or keywords.get("weights_only") == "True", where
            assert keywords.get("shell", "False") == "False", where
            assert keywords.get("allow_pickle", "False") == "False", where
            assert keywords.get("trust_remote_code", "False") == "False", where


@pytest.mark.parametrize(
    ("code", "call"),
    [
        ("open(p)", "open"),
        ("torch.load(f)", "torch.load"),
        ("subprocess.run(['x'])", "subprocess.run"),
        ("yaml.load(t)", "yaml.load"),
        ("(folder / 'x').read_text()", ".read_text"),
        ("zipfile.ZipFile(p).extractall()", ".extractall"),
        ("pickle.loads(b)", "pickle.loads"),
        ("json.loads(t)", ""),
        ("read_text(path)", ""),
    ],
)
def test_the_list_would_miss_nothing_new(code: str, call: str) -> None:
    (expression,) = ast.parse(code).body
    assert isinstance(expression, ast.Expr)
    assert isinstance(expression.value, ast.Call)
    assert watched(expression.value) == call
