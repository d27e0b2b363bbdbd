"""The configuration of the ``latent`` job: encoder, decoder, posterior, critics and the objective. Imports no torch.

The defaults are those of a plain VAE on PTB in the released code of the paper (Contrastive Latent Variable Models for
Neural Text Generation, UAI 2022). A preset sets what makes a row of the paper's tables.
"""

from __future__ import annotations

import math
from typing import ClassVar, Literal

from pydantic import Field, NonNegativeFloat, PositiveFloat, model_validator

from capt.pretrain.config.base import NonNegativeInt, PositiveInt, Section
from capt.pretrain.config.schema import (
    BatchSection,
    EngineSection,
    Job,
    OptimizerSection,
    ScheduleSection,
    ValidateSection,
)
from capt.pretrain.latent.text_files import DataSection, describe_files

# Files that measurements of a run are kept in, inside its run folder, where reports find them.


EVALUATION = "evaluation-{split}.json"
"""The result of ``capt evaluate`` on a split."""

GENERATED_TEXT = "generated.json"
"""The perplexities of generated text, by ``capt latent perplexity``."""

CODES = "codes"
"""The folder of a clusters run with the codes of each validation, ``step-00005000.npy`` of shape (K, 500, 2)."""


class ModelSection(Section):
    """One-layer LSTM encoder and decoder; for clusters, MLPs whose layers have the width ``hidden``."""

    embedding: PositiveInt = Field(256, le=65_536, description="width of the word vectors, encoder and decoder each")
    hidden: PositiveInt = Field(256, le=65_536, description="width of the LSTMs; on clusters of the layers")
    latent: PositiveInt = Field(32, le=65_536, description="dimensions of z")
    noise: PositiveInt = Field(32, le=65_536, description="dimensions of the noise of an implicit posterior")
    encoder_dropout: NonNegativeFloat = Field(0.0, lt=1, description="dropout of the encoder's word vectors")
    dropout: NonNegativeFloat = Field(
        0.5, lt=1, description="dropout of the decoder's word vectors and before its softmax"
    )
    init_range: PositiveFloat = Field(0.1, le=1000, description="every weight starts uniform in plus or minus this")
    posterior: Literal["gaussian", "linear", "mlp", "point", "none"] = Field(
        "gaussian",
        description="gaussian: mean and variance of each x; linear: one layer on [h(x); noise], as released (a"
        " Gaussian with one covariance); mlp: as written (Eq. 2); point: no noise (AE); none: no z (a language model)",
    )
    compile: bool = Field(False, description="no longer used; accepted so that older configurations still load")


class CriticSection(Section):
    """f(x, z) and g(z): the dual functions of KL(q(z|x) || p) and of KL(q(z) || p)."""

    loss: Literal["dual", "circle"] = Field("dual", description="Eq. 3 or the improved dual function")
    circle: Literal["code", "single_exp", "mean_inside", "sum_inside"] = Field(
        "code", description="code: as released; mean_inside: Eq. 13; sum_inside: Eq. 18; single_exp: without exp of exp"
    )
    squared: Literal["none", "all", "posterior"] = Field(
        "none", description="L_SQ of Eq. 17: over the prior's draws as well (all, as released) or not"
    )
    squared_on: Literal["g", "f"] = Field("g", description="the critic of L_SQ; g as released, f in Eq. 17")
    squared_in_encoder: bool = Field(False, description="L_SQ on g joins the encoder's loss (released, for MI)")
    trained: Literal["both", "f"] = Field("both", description="both: f and g, also where g only reports; f: f alone")
    layers: PositiveInt = Field(3, le=1000, description="hidden layers")
    hidden: PositiveInt = Field(512, le=65_536, description="width of the hidden layers")
    updates: PositiveInt = Field(5, description="updates of the critics per step")
    lr: PositiveFloat = Field(1e-5, description="learning rate of the critics")
    clamp: PositiveFloat = Field(
        20.0, le=1e38, description="values of f and g above this are cut before exp, and counted"
    )


class ObjectiveSection(Section):
    """-ELBO, whose regulariser has a weight that goes to ``beta_end``."""

    removed: ClassVar = {"beta_start": 0.1, "svi_momentum": 0.5}

    regularizer: Literal["exact", "f", "g", "none"] = Field(
        "exact", description="exact KL; the dual with f; with g (the MI variants); none"
    )
    critic_term: Literal["mean", "mean_inside", "sum_inside"] = Field(
        "mean",
        description="what the encoder minimises of f or g. mean: their mean, as released and in Eq. 4 and 7;"
        " mean_inside: log(1 + exp(-mean)) of Eq. 15 and 16; sum_inside: with the sum of Eq. 19. These two lead q(z|x)"
        " away from the prior",
    )
    views: Literal[1, 2] = Field(1, description="how many times a step encodes and reconstructs a sentence")
    swap: NonNegativeFloat = Field(0.0, lt=1, description="probability of swapping adjacent words in the second view")
    beta: Literal["constant", "anneal", "cyclical"] = Field(
        "anneal", description="constant: beta_end; anneal: from 0.1 up to beta_end once; cyclical: again in each cycle"
    )
    beta_end: NonNegativeFloat = Field(1.0, description="beta after annealing")
    anneal_epochs: PositiveFloat = Field(10.0, description="beta grows by 1 / anneal_epochs per epoch")
    cycle_epochs: PositiveFloat = Field(10.0, description="length of a cycle of beta: cyclical")
    svi_steps: NonNegativeInt = Field(0, description="semi-amortised: gradient steps on each posterior (SaVAE)")
    svi_lr: PositiveFloat = Field(1.0, description="SaVAE: learning rate of those gradient steps")
    svi_clip: PositiveFloat = Field(5.0, description="SaVAE: largest gradient norm of those gradient steps")
    aggressive_updates: NonNegativeInt = Field(
        0, description="LagVAE: largest number of updates of the encoder alone before each step, while MI still rises"
    )


class ContrastSection(Section):
    """InfoNCE between the two views of a sentence (Eq. 10); the negatives are the sentences of all ranks."""

    weight: NonNegativeFloat = Field(0.0, description="factor of InfoNCE in the total loss; 0 = no contrast")
    over: Literal["z", "h"] = Field("z", description="the latent variable, or the encoder's output (Table 3)")
    negatives: Literal["other_view", "own_view"] = Field(
        "other_view",
        description="other_view: a sentence is told from the second views of the others, z_j^+, as released;"
        " own_view: from their first views, z_j, as Eq. 10 writes",
    )
    temperature: PositiveFloat = Field(0.05, description="temperature of InfoNCE")
    mean_pair: bool = Field(False, description="the batch's mean z and mean z+ as one more pair (released)")
    prior_negatives: NonNegativeInt = Field(
        0, le=65_536, description="draws of the prior for each pair, as negatives (released: 3)"
    )
    mask_duplicates: bool = Field(
        False, description="inputs that are equal are not negatives of each other; as released they are"
    )
    queue: NonNegativeInt = Field(
        0,
        le=2**31 - 1,
        description="rows of earlier batches, over all ranks, as negatives, of the view that contrast.negatives names",
    )


class LatentBatchSection(BatchSection):
    """Sentences of one length, as released, or of similar lengths, the shorter ones padded."""

    lengths: Literal["auto", "equal", "similar"] = Field(
        "auto",
        description="equal: batches of one length, as released; similar: sentences ordered by length, padded, in the"
        " fewest batches; auto: equal where such batches are 3/4 full on average (PTB, Yahoo, Yelp), else similar",
    )


class LatentSchedule(ScheduleSection):
    """A schedule in epochs, which become steps once the data is known."""

    max_steps: PositiveInt = Field(1_000_000_000, description="optimizer steps; with epochs an upper bound")
    type: Literal["linear", "cosine", "constant", "wsd"] = Field("constant", description="decay after the warmup")
    epochs: PositiveFloat | None = Field(40.0, description="passes over the training data; null = max_steps alone")


class LatentValidate(ValidateSection):
    """Validation once per epoch, on all sentences, by an importance-weighted bound (``nelbo_iw``)."""

    per_epoch: PositiveInt | None = Field(1, description="validations per epoch; null = every validate.every steps")
    samples: PositiveInt = Field(1_000_000, description="held-out sentences, at most")
    draws: PositiveInt = Field(
        4, multiple_of=2, le=65_536, description="draws for nelbo_iw, half of the posterior and half of the prior"
    )


class LatentOptimizer(OptimizerSection):
    """Adam as released; ``clip`` bounds the gradient norms of the encoder and of the decoder, each."""

    lr: PositiveFloat = Field(1e-3, description="peak learning rate of encoder and decoder")
    betas: tuple[float, float] = Field((0.9, 0.999), description="decay of Adam's two moments")
    eps: PositiveFloat = Field(1e-8, description="added to the root of the squared gradients")
    weight_decay: NonNegativeFloat = Field(0.0, description="decay of matrices; vectors do not decay")
    clip: NonNegativeFloat = Field(5.0, description="largest gradient norm of encoder and of decoder; 0 = off")


class LatentEngine(EngineSection):
    """Three small modules that are updated in turn; nothing is sharded."""

    zero_stage: Literal[0] = Field(0, description="nothing is sharded")
    precision: Literal["fp32", "bf16"] = Field("fp32", description="precision of the forward pass; weights stay fp32")


class LatentJob(Job):
    """The configuration of a latent-variable model of sentences or of the synthetic clusters."""

    pretrains: ClassVar[bool] = True

    data: DataSection
    model: ModelSection = ModelSection()
    critic: CriticSection = CriticSection()
    objective: ObjectiveSection = ObjectiveSection()
    contrast: ContrastSection = ContrastSection()
    batch: LatentBatchSection = LatentBatchSection(global_=32, micro=32)
    schedule: LatentSchedule = LatentSchedule()
    optimizer: LatentOptimizer = LatentOptimizer()
    engine: LatentEngine = LatentEngine()
    validate_: LatentValidate = Field(LatentValidate(), alias="validate")

    @property
    def has_critics(self) -> bool:
        """True if there are critics: for every implicit posterior."""
        return self.model.posterior in ("linear", "mlp")

    @model_validator(mode="after")
    def _parts_fit(self) -> LatentJob:
        posterior, objective = self.model.posterior, self.objective
        allowed = {
            "gaussian": ("exact",),
            "linear": ("exact", "f", "g"),
            "mlp": ("f", "g"),
            "point": ("none",),
            "none": ("none",),
        }[posterior]
        # What has a density can take the exact KL; an implicit posterior needs a critic, and a point has no KL at all.
        if objective.regularizer not in allowed:
            raise ValueError(
                f"objective.regularizer {objective.regularizer} does not fit model.posterior {posterior}: "
                f"it takes {' or '.join(allowed)}"
            )
        if posterior == "linear" and self.model.noise < self.model.latent:
            raise ValueError(
                f"model.noise {self.model.noise} is less than model.latent {self.model.latent}: noise would not reach "
                "every dimension of z, which then has no density; raise model.noise or set model.posterior=mlp"
            )
        if self.contrast.weight > 0 and objective.views != 2:
            raise ValueError("contrast.weight above 0 compares two views: set objective.views=2")
        if objective.swap > 0 and objective.views != 2:
            raise ValueError("objective.swap applies to the second view: set objective.views=2")
        if self.contrast.over == "h" and (self.contrast.mean_pair or self.contrast.prior_negatives):
            raise ValueError("contrast.mean_pair and contrast.prior_negatives are vectors of z: set contrast.over=z")
        if objective.svi_steps and posterior != "gaussian":
            raise ValueError("objective.svi_steps improves a mean and a variance: set model.posterior=gaussian")
        if objective.svi_steps and self.engine.precision != "fp32":
            raise ValueError("objective.svi_steps differentiates twice by differences: set engine.precision=fp32")
        if objective.svi_steps and objective.views != 1:
            raise ValueError("objective.svi_steps improves the posterior of one view: set objective.views=1")
        if objective.aggressive_updates and (objective.svi_steps or posterior != "gaussian"):
            raise ValueError("objective.aggressive_updates needs model.posterior=gaussian without svi_steps")
        if objective.aggressive_updates and self.contrast.weight > 0:
            raise ValueError("objective.aggressive_updates trains the encoder on -ELBO alone: set contrast.weight=0")
        if self.data.clusters is not None:
            self._clusters_fit()
        if objective.critic_term != "mean" and objective.regularizer not in ("f", "g"):
            raise ValueError(
                f"objective.critic_term {objective.critic_term} needs a critic: set objective.regularizer=f or g"
            )
        squares_g = self.critic.squared != "none" and self.critic.squared_on == "g"
        if self.critic.trained == "f" and (objective.regularizer == "g" or squares_g):
            raise ValueError("critic.trained f leaves no g for objective.regularizer or critic.squared")
        if self.critic.squared != "none" and objective.views != 2:
            raise ValueError("critic.squared compares two views: set objective.views=2")
        if self.critic.squared_in_encoder and objective.views != 2:
            raise ValueError("critic.squared_in_encoder compares two views: set objective.views=2")
        return self

    def metric_names(self) -> frozenset[str]:
        """Names of validation's metrics: on text those that the posterior has, on clusters how well they separate."""
        if self.data.clusters is not None:
            return frozenset(("loss", "accuracy", "purity", "purity_cosine", "silhouette", "probe"))
        names = {"sentences", "scored_a_sentence", "unknown_share", "rec", "ppl_rec", "loss"}
        if self.model.posterior != "point":
            names |= {"nelbo_iw", "ppl_iw", "ppl_known"}
        if self.model.posterior in ("gaussian", "linear"):
            names |= {"kl_exact", "nelbo_exact", "ppl_exact", "mi_batch", "mi_aggregate"}
        if self.has_critics:
            names |= {"kl_dual", "kl_dual_clamped", "nelbo_dual", "ppl_dual"}
            names |= {"kl_aggregate_dual", "mi_dual"} if self.critic.trained == "both" else set()
        return frozenset(names | ({"au", "au_sampled"} if self.model.posterior != "none" else set()))

    def check_inputs(self) -> list[str]:
        """Describe the files of the three splits; for clusters no file is read."""
        if self.data.clusters is not None:
            return [f"corpus: one-hot vectors of {self.data.clusters} classes"]
        return describe_files(self.data)

    def _clusters_fit(self) -> None:
        if self.model.posterior not in ("gaussian", "mlp"):
            raise ValueError("data.clusters takes model.posterior gaussian or mlp")
        if self.model.dropout or self.model.encoder_dropout:
            raise ValueError("data.clusters has no words to drop: set model.dropout=0 and model.encoder_dropout=0")
        if self.objective.swap or self.objective.svi_steps or self.objective.aggressive_updates:
            raise ValueError("data.clusters has no words to swap, and neither SVI steps nor aggressive updates")
        if self.engine.precision != "fp32":
            raise ValueError("data.clusters has matrices too small for bf16: set engine.precision=fp32")
        if self.schedule.epochs is not None:
            raise ValueError("data.clusters has no epochs: set schedule.epochs=null and schedule.max_steps")

    def completed(self, batches: int, lengths: Literal["auto", "equal", "similar"]) -> LatentJob:
        """The job with its epochs turned into steps, once the number of batches per epoch and their rule are known."""
        schedule, validate = self.schedule, self.validate_
        steps = schedule.max_steps
        if schedule.epochs is not None:
            steps = min(steps, math.ceil(schedule.epochs * batches))
        every = validate.every if validate.per_epoch is None else max(1, math.ceil(batches / validate.per_epoch))
        return self.model_copy(
            update={
                "batch": self.batch.model_copy(update={"lengths": lengths}),
                "schedule": schedule.model_copy(update={"max_steps": steps}),
                "validate_": validate.model_copy(update={"every": every}),
            }
        )


JOB = LatentJob
