"""``distillation`` of a ``capt_pairs`` job: what a teacher has said of its texts, and the losses of it. No torch."""

from __future__ import annotations

from typing import Any, Literal

from pydantic import Field, NonNegativeFloat, PositiveFloat, model_validator

from capt.pretrain.config.base import PathField, Section, StorePlace

VECTOR_LOSSES = ("cosine", "mse", "listwise")
"""The losses of a teacher's vectors: keys of ``distillation`` with their factors."""


class PairDistillation(Section):
    """Scores by a teacher of a row's own documents (``pos_scores`` and ``neg_scores``), and its vectors of texts."""

    weight: NonNegativeFloat = Field(
        0.0, description="factor of the divergence from a teacher's scores; 0 = scores are not read"
    )
    temperature: PositiveFloat = Field(1.0, description="temperature by which the teacher's scores are divided")
    vectors: StorePlace | None = Field(
        None,
        description="a teacher's vectors of all texts: what capt encode has written (the folder or address of the "
        "store, or of one kind of vectors in it), a table with a text and its vector, or a .npy file; null = none",
    )
    query_vectors: StorePlace | None = Field(
        None, description="those of queries, where a prompt or a path of their own makes others; null = vectors"
    )
    vector_column: str | None = Field(
        None, description="column of a table that holds the vectors; null = vector, embedding or label"
    )
    ids: PathField | None = Field(
        None,
        description="a .npy file: a table whose row i has the text of vector i, or its id, where corpus has the texts",
    )
    corpus: PathField | None = Field(None, description="texts of the ids, as for data.corpus")
    cosine: NonNegativeFloat = Field(
        0.0, description="factor of 1 - cosine of a text's vector and the teacher's, in the mean over all texts"
    )
    mse: NonNegativeFloat = Field(0.0, description="factor of their mean squared difference")
    listwise: NonNegativeFloat = Field(
        0.0, description="factor of the divergence of a text's softmax over the cosines with the step's other texts"
    )
    listwise_temperature: PositiveFloat = Field(0.02, description="temperature of both softmaxes of listwise")
    projection: Literal["drop", "beside", "export"] = Field(
        "drop",
        description="a linear map to a teacher of another width: drop = trained, and left out of the export; beside = "
        "in a file beside it; export = part of the model, whose vectors are then of the teacher's space",
    )
    teacher: dict[str, Any] | None = Field(
        None, description="what the vectors say of the teacher; filled in by the job"
    )

    @model_validator(mode="after")
    def _names_vectors(self) -> PairDistillation:
        weights = {name: getattr(self, name) for name in VECTOR_LOSSES}
        if self.vectors is None and (used := next((name for name, weight in weights.items() if weight), None)):
            raise ValueError(f"distillation.{used} applies to a teacher's vectors: set distillation.vectors")
        beside = ("query_vectors", "vector_column", "ids", "corpus")
        if self.vectors is None and (used := next((name for name in beside if getattr(self, name) is not None), None)):
            raise ValueError(f"distillation.{used} is beside a teacher's vectors: set distillation.vectors as well")
        if self.vectors is not None and not any(weights.values()):
            raise ValueError(
                "distillation.vectors is read for a loss: set distillation.cosine, distillation.mse or "
                "distillation.listwise above 0"
            )
        return self

    def projected_width(self, width: int) -> int | None:
        """The width of the map from vectors of ``width`` to the teacher's that no export has; None without one."""
        pointwise = self.cosine or self.mse
        if self.teacher is None or not pointwise or self.teacher["dimension"] == width:
            return None
        return int(self.teacher["dimension"])
