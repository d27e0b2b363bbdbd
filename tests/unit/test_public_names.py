"""A public name means one thing: none is defined in several modules without a reason. Constants are read beside their
module, and are not looked at."""

from __future__ import annotations

import ast
from collections import defaultdict
from pathlib import Path

ROOT = Path(__file__).parents[2] / "capt"

SHARED = {
    "each module's own, which nobody imports from another": "BatchT app log logger main",
    "what a task, a command, a backend, an exporter or a probe must have: found by this name": (
        "EvaluateOptions RehearsedTask apex as_text check command describe_inputs descriptors gpus interfaces "
        "load_model plan register rehearse run_sections shared_memory start validate write"
    ),
    "a verb of the command line, and the function that does it": (
        "clean compare convert encode evaluate export inspect interpolate merge mine neighbors perplexity prepare "
        "reconstruct report resume sample sweep train"
    ),
    "an argument or option of commands, beside what it is made into": (
        "Cluster DType Launcher Model Number Pooler Pooling Precision Run Sentences Text Tokens Words"
    ),
    "a section of the jobs of one task, which a job names by its key": (
        "ContrastSection DataSection Family ModelSection Normalization ObjectiveSection Section Share"
    ),
    "the same step of several families, each for its own data": (
        "build_model checked completed describe_initial_model encode_texts estimate family_of find_sets from_hf "
        "initialise_weights is_annotations is_number is_questions json_object load_weights objective_of "
        "open_corpus parse_hf_config parse_row partial_folder parts_of picture_name read_annotations read_answers "
        "read_description read_documents read_examples read_heads read_job read_json read_manifest read_questions "
        "read_rows read_sections read_splits read_table require_fit row_set source_path start_from summarize "
        "task_of to_hf validation_batches write_pairs write_pictures"
    ),
    "a short word of two rooms that do not meet": (
        "Answer Block Check Columns Constant Counts Document Embeddings EncodedTexts Figures Files Form Groups Keys "
        "Kind Labels Launch Level Metric Metrics Name Numbers Pair Pairs Place Ranks Rows Scores Side Span "
        "Split Splits Stage State Table TextTask Vectors ask attend candidates check_cluster check_here check_ids "
        "check_precision cluster colour cut decode describe draw embed exists judge look_up predict predicted rank_of "
        "remove serve table versions"
    ),
}
"""Names of several modules, by the reason for which they stay."""


def public_names(source: str) -> set[str]:
    """The public names that a module defines."""
    names: set[str] = set()
    for node in ast.parse(source).body:
        match node:
            case ast.ClassDef(name=name) | ast.FunctionDef(name=name) | ast.AsyncFunctionDef(name=name):
                names.add(name)
            case ast.Assign(targets=targets):
                names |= {target.id for target in targets if isinstance(target, ast.Name)}
            case ast.AnnAssign(target=ast.Name(id=name)):
                names.add(name)
    return {name for name in names if not (name.startswith("_") or name.isupper())}


def test_a_new_public_name_is_of_one_module() -> None:
    modules: dict[str, list[str]] = defaultdict(list)
    for path in sorted(ROOT.rglob("*.py")):
        for name in public_names(path.read_text()):
            modules[name].append(str(path.relative_to(ROOT)))
    assert len(modules) > 2000
    known = {name for names in SHARED.values() for name in names.split()}
    new = {name: paths for name, paths in modules.items() if len(paths) > 1 and name not in known}
    assert not new, f"say in the name whose it is, or give the reason in SHARED: {new}"


def test_the_names_of_a_module_are_found() -> None:
    assert public_names("A = a = 1\nb: int = 2\n_c = 3\nclass De:\n    e = 4\ndef f(): g = 5") == {"a", "b", "De", "f"}
