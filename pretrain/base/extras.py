"""Which extra of the distribution installs a package that cannot be imported."""

from __future__ import annotations

_EXTRAS = {
    "train": (
        "datasets", "deepspeed", "fairscale", "google", "huggingface_hub", "packaging", "pyarrow", "pydantic", "rich",
        "scipy", "sentencepiece", "sklearn", "tensorboard", "tokenizers", "transformers", "typer", "yaml",
    ),
    "sweep": ("optuna", "ray"),
    "report": ("matplotlib",),
    "export": ("sentence_transformers",),
    "onnx": ("onnx", "onnxruntime", "onnxscript"),
    "vision": ("PIL",),
    "track": ("mlflow", "wandb"),
}  # fmt: skip
EXTRA_OF = {package: extra for extra, packages in _EXTRAS.items() for package in packages}
"""The name under which a package is imported -> the extra of pyproject.toml that installs it."""


def missing_package(error: ModuleNotFoundError) -> str | None:
    """What to install, in one sentence, for an import that failed; None for a module that belongs to no extra."""
    package = (error.name or "").partition(".")[0]
    if package not in EXTRA_OF:
        return None
    return f"the package {package} is not installed: {how_to_install(EXTRA_OF[package])}"


def how_to_install(extra: str) -> str:
    """The command that installs an extra; the distribution is on no index."""
    return f"pip install '.[{extra}]' in a checkout"
