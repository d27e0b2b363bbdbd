"""The sections of the ``ace`` job that say where negatives come from and what is learned from them. Imports no torch.

Defaults are those of word2vec where it has the same thing, else those of ``docs/decisions.md``.
"""

from __future__ import annotations

from typing import Literal

from pydantic import Field, NonNegativeFloat, PositiveFloat, model_validator

from pretrain.config.base import NonNegativeInt, PathField, PositiveInt, Section


class NegativesSection(Section):
    """Where the negatives of a pair come from. ``mixture`` is lambda of the paper's section 2.2."""

    number: PositiveInt = Field(5, le=65_536, description="negatives of each pair of words, in expectation")
    sampler: Literal["noise", "generator", "mixture"] = Field(
        "noise", description="noise: unigram^0.75; generator: the learned softmax; mixture: both"
    )
    mixture: float = Field(
        0.5, ge=0.0, le=1.0, description="sampler mixture: share of the negatives that the noise draws"
    )
    power: NonNegativeFloat = Field(0.75, le=10, description="exponent of the words' counts in the noise; 0 = uniform")
    weights: Literal["uniform", "self_adversarial"] = Field(
        "uniform", description="self_adversarial: softmax of alpha times the discriminator's own scores"
    )
    alpha: PositiveFloat = Field(1.0, description="inverse temperature of the self-adversarial weights")
    block: PositiveInt = Field(
        32, le=4096, description="consecutive centre words that share their noise (the plain skip-gram step)"
    )
    shared: PositiveInt = Field(
        64, le=65_536, description="noise words that a block shares; their weight makes `number` of each pair"
    )


class ObjectiveSection(Section):
    """What is learned from a pair and its negatives."""

    type: Literal["sgns", "nce", "margin"] = Field(
        "sgns", description="sgns: sigmoid(s); nce: sigmoid(s - log k q(w)) with the known density q; margin: ranking"
    )
    margin: PositiveFloat = Field(1.0, description="margin: how far a positive must score above a negative")


class GeneratorSection(Section):
    """The generator: two tables of its own, a softmax over the vocabulary, trained with REINFORCE."""

    type: Literal["adagrad", "sparse_adam", "sgd"] = Field("sparse_adam", description="optimizer of the generator")
    lr: PositiveFloat = Field(1e-2, description="learning rate of the generator")
    every: PositiveInt = Field(16, description="updates of the discriminator for one of the generator")
    samples: int = Field(
        5, ge=2, le=65_536, description="words drawn for each centre; their weight makes `number` of each pair"
    )
    precision: Literal["fp32", "bf16"] = Field(
        "fp32", description="of the products over the vocabulary; bf16 draws from the softmax of rounded scores"
    )
    reward: Literal["d", "softplus"] = Field(
        "d", description="d: D(x, y), the discriminator's sigmoid; softplus: -log(1 - D(x, y))"
    )
    normalise: bool = Field(True, description="(r - mean) / deviation over the batch, then a sigmoid")
    temperature: PositiveFloat = Field(0.5, description="normalise: the sigmoid's argument is divided by this")
    baseline: Literal["none", "constant", "batch_mean", "self_critical"] = Field(
        "none",
        description="what is taken from the reward (it matters with masks or importance alone); constant: 0.5; "
        "self_critical: the reward of the argmax",
    )
    entropy: NonNegativeFloat = Field(
        0.0, description="weight of max(0, log entropy_words - H(G(.|x))), which keeps G from collapsing; 0 = none"
    )
    entropy_words: PositiveInt = Field(
        100, description="entropy: G is pushed up while below the entropy of this many words"
    )
    importance: bool = Field(False, description="also learn from the noise's negatives, weighted by G / noise")
    importance_clip: PositiveFloat = Field(10.0, description="largest importance weight")
    mask_false_negatives: bool = Field(
        False, description="negatives that are words of the centre's own window count for nothing"
    )
    collapse: NonNegativeFloat = Field(
        0.05, le=1, description="share of distinct words among G's samples below which the progress line says COLLAPSED"
    )


def check_parts(negatives: NegativesSection, objective: ObjectiveSection) -> None:
    """Raise ``ValueError`` where sampler, weights and objective exclude each other."""
    if objective.type == "nce" and negatives.weights == "self_adversarial":
        raise ValueError(
            "objective.type nce needs the density that the negatives are drawn from, and negatives.weights "
            "self_adversarial changes it: set negatives.weights=uniform"
        )


class ModelSection(Section):
    """Two tables of word vectors: ``input`` for centre words, whose rows are the embeddings, and ``context``."""

    dim: PositiveInt = Field(300, le=65_536, description="width of the word vectors")
    init: PathField | None = Field(
        None, description="start from these vectors: a run, a checkpoint, or a file of word2vec or GloVe"
    )
    context_init: Literal["zeros", "copy", "random"] = Field(
        "zeros", description="init without a context table (GloVe's files): zeros, the input vectors, or random"
    )
    freeze_input: NonNegativeInt = Field(0, description="init: the input table stays as it is for this number of steps")

    @model_validator(mode="after")
    def _frozen_only_when_given(self) -> ModelSection:
        if self.freeze_input and self.init is None:
            raise ValueError("model.freeze_input keeps vectors that model.init gives: set model.init")
        return self
