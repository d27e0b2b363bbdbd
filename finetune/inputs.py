"""A look at what every fine-tuning job starts from, without torch: for dry runs and ``capt config validate``."""

from __future__ import annotations

from pathlib import Path

from capt.pretrain.language.inputs import describe_initial_model as describe_encoder


def describe_initial_model(init: Path) -> str:
    """Where the model of ``model.init`` comes from, in one line; see `capt.pretrain.language.inputs`.

    Raises:
        CheckpointError: as there, or its family has no classifier.
    """
    from capt.pretrain.models.foreign.families import family_of
    from capt.pretrain.models.hf_folder import is_hf, read_json

    told = describe_encoder(init)
    if is_hf(init):
        family_of(read_json(init / "config.json"), str(init / "config.json"))
    return told
