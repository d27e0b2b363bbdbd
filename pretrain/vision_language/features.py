"""``regions.json`` of a checkpoint: what made the region features that its model was trained on."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

from pydantic import Field

from capt.pretrain.base.errors import CheckpointError
from capt.pretrain.base.files import write_json
from capt.pretrain.base.records import Record, read_record
from capt.pretrain.regions.picture import feature_differences
from capt.pretrain.regions.store import RegionStore

REGIONS = "regions.json"


class FeatureKind(Record):
    """What made the features of a store, and how many columns they have."""

    feature_size: Annotated[int, Field(gt=0, le=1 << 20)]
    features_of: dict[str, Any]

    @classmethod
    def of(cls, store: RegionStore) -> FeatureKind:
        """Return the kind of the features in an open store."""
        return cls(feature_size=store.manifest.feature_size, features_of=store.manifest.features_of)

    def save(self, folder: Path) -> Path:
        """Write ``regions.json`` into ``folder``; returns the file, which travels with every checkpoint."""
        path = folder / REGIONS
        write_json(path, self.model_dump())
        return path


def read_features(checkpoint: Path) -> FeatureKind | None:
    """What the model of a checkpoint was trained on; None where it does not say."""
    try:
        return read_record(FeatureKind, checkpoint / REGIONS, error=CheckpointError)
    except FileNotFoundError:
        return None


def require_features(
    store: RegionStore, trained_on: FeatureKind, source: str, *, allow_other: bool | None = None
) -> None:
    """Refuse a store whose features are not of the kind that a model was trained on.

    Args:
        store: of the job.
        trained_on: what the model has seen.
        source: names the model in the error.
        allow_other: another kind of the same size is meant, as ``data.allow_other_features`` of the job says; None for
            a job without this key, in which such features are never meant.

    Raises:
        CheckpointError: the size differs, or the kind does.
    """
    mine = FeatureKind.of(store)
    if mine.feature_size != trained_on.feature_size:
        raise CheckpointError(
            f"data.regions {store.folder} has {mine.feature_size} features a region, and {source} was trained on "
            f"{trained_on.feature_size}: name the store that it was trained on, or one made in the same way"
        )
    different = feature_differences(mine.features_of, trained_on.features_of)
    if different and not allow_other:
        remedy = "name a store made in the same way"
        if allow_other is not None:
            remedy += ", or data.allow_other_features=true if they are meant"
        raise CheckpointError(
            f"data.regions {store.folder} holds features of another kind than {source} was trained on ({different}): "
            f"such features mean other things; {remedy}"
        )
