"""The configuration of the ``capt_language`` job: an encoder with masked-language-model and CAPT losses. No torch."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar, Literal

from pydantic import Field, NonNegativeFloat, PositiveFloat, SerializeAsAny, model_validator

from capt.pretrain.bottleneck.config import BottleneckSection
from capt.pretrain.config.base import PositiveInt, Section
from capt.pretrain.config.contrast import ContrastSection, check_validation_samples
from capt.pretrain.config.retrieval import PooledRetrieval
from capt.pretrain.config.schema import Job, LoaderSection, ValidateSection
from capt.pretrain.contrastive.metrics import names_of
from capt.pretrain.data.config import TEXT_KEYS, CorruptionConfig, DataConfig
from capt.pretrain.models.architecture import EncoderConfig
from capt.pretrain.models.config import RobertaConfig
from capt.pretrain.models.tokenizer import TokenizerSection


class MaskedSection(Section):
    """The masked-language-model loss on the corrupted view, and its head."""

    views: Literal["second", "both"] = Field(
        "second", description="the views whose tokens are masked and predicted, where data.view draws spans"
    )

    weight: NonNegativeFloat = Field(
        1.0, description="factor of the loss in the total; 0 = contrast alone, and the loss is only measured"
    )
    head: Literal["random", "identity"] = Field(
        "random",
        description="the head over a model.init that has none: random weights, or near the identity, so that words are "
        "scored by the products of hidden states and word embeddings, and the encoder is changed less",
    )


class LanguageValidate(ValidateSection):
    """Validation on held-out text, the same samples, noise and temperature at every step and for every run."""

    samples: PositiveInt = Field(512, description="held-out sequences")
    temperature: PositiveFloat = Field(
        0.05, description="temperature of the validation loss, the same at every step so that runs compare"
    )
    retrieval: PooledRetrieval = PooledRetrieval()


class LanguageJob(Job):
    """The configuration of an encoder trained with masked language modelling and the CAPT loss."""

    pretrains: ClassVar[bool] = True
    shares_unevenly: ClassVar[bool] = True

    data: DataConfig
    tokenizer: TokenizerSection = TokenizerSection()
    model: SerializeAsAny[EncoderConfig] = RobertaConfig()
    mlm: MaskedSection = MaskedSection()
    contrast: ContrastSection = ContrastSection()
    bottleneck: BottleneckSection = BottleneckSection()
    corruption: CorruptionConfig = CorruptionConfig()
    loader: LoaderSection = LoaderSection()
    validate_: LanguageValidate = Field(LanguageValidate(), alias="validate")

    @property
    def sample_tokens(self) -> int:
        """Tokens of a window."""
        return self.data.sequence_length

    @model_validator(mode="after")
    def _positions_suffice(self) -> LanguageJob:
        # Left open, the number of positions is that of model.init.
        open_ = self.model.init is not None and "max_positions" not in self.model.model_fields_set
        if not open_ and self.data.sequence_length > self.model.max_positions:
            raise ValueError(
                f"data.sequence_length {self.data.sequence_length} is longer than the position table: "
                f"model.max_positions is {self.model.max_positions}"
            )
        if fault := self.documents_fault(self.model):
            raise ValueError(fault)
        return self

    @property
    def masks(self) -> bool:
        """True if tokens are masked and predicted, be it only to measure how well."""
        return self.data.views.corrupts or self.mlm.weight > 0 or self.bottleneck.on

    @property
    def trained_pooling(self) -> Literal["cls", "mean"] | None:
        """The pooling of the vector that the bottleneck trains; None without one."""
        return (self.bottleneck.pooling or self.model.pooling) if self.bottleneck.on else None

    @property
    def noise_pools(self) -> tuple[str, ...]:
        """Poolings of which the invariance to corruption is measured: none where the views are different spans."""
        return ("cls", "mean") if self.data.views.draw is None else ()

    def documents_fault(self, model: EncoderConfig) -> str:
        """Return why ``model`` cannot attend as ``data.cross_document_attention`` says; empty where it can."""
        if self.data.cross_document_attention or model.packs_documents:
            return ""
        return (
            f"data.cross_document_attention is false, and model.arch {model.arch} cannot keep attention inside "
            "documents; set it to true"
        )

    @model_validator(mode="after")
    def _something_is_trained(self) -> LanguageJob:
        if not self.mlm.weight and not self.contrast.weight and not self.bottleneck.on:
            raise ValueError(
                "mlm.weight and contrast.weight are both 0: nothing is trained; raise one of them, or set "
                "bottleneck.head"
            )
        view, name = self.data.views, self.data.view
        if not view.corrupts and not self.contrast.weight:
            raise ValueError(
                f"data.view {name} belongs to the contrast, and contrast.weight is 0: raise it, or leave view out"
            )
        if self.mlm.views == "both" and view.draw is None:
            raise ValueError(f"mlm.views both masks both spans, and data.view {name} draws none: set crop or neighbour")
        if self.mlm.views == "both" and not self.mlm.weight:
            raise ValueError("mlm.views both masks the first span too, and mlm.weight 0 predicts nothing: leave it out")
        if view.draw is None and not view.corrupts:
            if self.bottleneck.on:
                raise ValueError(
                    f"data.view {name} leaves the text as it is, and a bottleneck's encoder reads a corrupted one: set "
                    "data.view to corrupted, crop or neighbour"
                )
            if self.mlm.weight:
                raise ValueError(
                    f"data.view {name} leaves the text as it is, so that nothing is masked: set mlm.weight=0, or "
                    "data.view=corrupted"
                )
            if not self.model.dropout and not self.model.attention_dropout:
                raise ValueError(f"data.view {name}: model.dropout is 0, so that both views are the same; raise it")
        if self.mlm.head == "identity" and self.model.init is None:
            raise ValueError("mlm.head=identity is for a model.init without a language-model head; name one")
        return self

    @model_validator(mode="after")
    def _searches_in_time(self) -> LanguageJob:
        retrieval = self.validate_.retrieval
        retrieval.check_rhythm(self.validate_.every, self.checkpoint.best)
        if retrieval.folders and retrieval.pooling == "head" and not self.contrast.weight:
            raise ValueError("validate.retrieval.pooling head: contrast.weight 0 trains no head; set mean or cls")
        return self

    @classmethod
    def replaced_by(cls, below: Mapping[str, Any], above: Mapping[str, Any]) -> Mapping[str, Any]:
        """Text that is named later takes the place of text that was named before, whatever its kind."""
        old, new = below.get("data"), above.get("data")
        if not isinstance(old, Mapping) or not isinstance(new, Mapping) or not any(new.get(key) for key in TEXT_KEYS):
            return below
        return {**below, "data": {key: value for key, value in old.items() if key not in (*TEXT_KEYS, "temperature")}}

    def metric_names(self) -> frozenset[str]:
        """Names of the metrics of masked tokens and noise, and of contrast and bottleneck where they are trained."""
        noise = [f"noise/{pool}/{name}" for pool in self.noise_pools for name in names_of("noise")]
        pairs = names_of("pairs") if self.contrast.weight > 0 else ()
        searched = self.validate_.retrieval.metric_names()
        tokens = names_of("tokens") if self.masks else ()
        of_sources = [f"{name}/{part.name}" for name in tokens for part in self.data.mixture]
        heads = [f"{kind}/{head}" for head in self.bottleneck.heads for kind in ("loss", "accuracy")]
        return frozenset(["validation_samples", *tokens, *of_sources, *noise, *pairs, *searched, *heads])

    def checkpoint_bytes(self) -> int | None:
        """Encoder, heads, moments, average and queue; None for sizes that ``init`` or a tokenizer brings."""
        model = self.model
        rows = model.vocab_size or (None if self.tokenizer.path else self.tokenizer.vocab_size)
        if model.init is not None or rows is None:
            return None
        contrast = self.contrast.weight > 0
        heads = model.hidden * model.hidden + 2 * model.hidden * model.ffn * contrast
        heads += self.bottleneck.elements(model.hidden, model.ffn, model.embedding_size, rows)
        model = model.model_copy(update={"vocab_size": rows})
        parameters, matrices = model.elements + heads, model.elements - model.model_copy(update={"layers": 0}).elements
        average = 4 * ((contrast and self.contrast.momentum is not None) or self.checkpoint.ema is not None)
        weights = parameters * (4 + average) + 4 * self.optimizer.moments(parameters, matrices)
        return weights + (self.queue_bytes() or 0)

    def queue_bytes(self) -> int | None:
        """Bytes of the queue, whose rows are as wide as the encoder; None for one that ``init`` brings."""
        if self.model.init is not None or not self.contrast.weight:
            return None
        return self.contrast.queue_bytes(self.model.hidden)

    def check_inputs(self) -> list[str]:
        """Describe the corpus, the tokenizer and ``model.init``; see `capt.pretrain.language.inputs.describe_inputs`.

        Refuse ``validate.samples=1`` too: validation compares samples with each other.
        """
        check_validation_samples(self.validate_.samples)
        from capt.pretrain.language.inputs import check_model, describe_inputs

        tokenizer = self.tokenizer
        trained = f"{tokenizer.type} of {tokenizer.vocab_size} ids, trained on the corpus"
        lines = describe_inputs(self.data, self.model.init, tokenizer.path, trained_tokenizer=trained)
        lines += self.validate_.retrieval.describe()
        return lines + check_model(self.model, self.data.sequence_length, tokenizer.path)


JOB = LanguageJob
