"""``capt convert`` of the toy task."""

from pathlib import Path

from capt.pretrain.convert.card import About
from capt.pretrain.convert.output import export_folder
from capt.pretrain.engine.checkpoint import find_best, load_module, open_checkpoint
from capt.pretrain.engine.durable import write_tensors
from tests.toy.config import ToyJob
from tests.toy.task import ToyModel

TARGETS = ("safetensors",)


def load(path: Path) -> ToyModel:
    checkpoint = find_best(path)
    width = open_checkpoint(checkpoint, ToyJob, "toy").width
    return load_module(checkpoint, "model", lambda: ToyModel(width))


def command(checkpoint: Path, out: Path, *, to: str, overwrite: bool = False, about: About | None = None) -> Path:
    with export_folder(out, overwrite=overwrite) as folder:
        write_tensors(folder / "model.safetensors", dict(load(checkpoint).named_parameters()), {"format": "pt"})
    return out
