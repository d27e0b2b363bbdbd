"""``capt plan``: memory is what the allocator gives out, what cannot fit is refused, rates are found in runs."""

from __future__ import annotations

import json
import re
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from deepspeed.runtime.zero.config import DeepSpeedZeroConfig

from capt.launcher.commands import options
from capt.launcher.plan import Launch, Options
from capt.launcher.preflight.run import predicted
from capt.pretrain.base import distributed
from capt.pretrain.base.errors import ConfigError
from capt.pretrain.config.load import load_job
from capt.pretrain.contrastive.views import MARGIN
from capt.pretrain.data.corruption import CorruptionVocabulary, Corruptor
from capt.pretrain.models.config import RobertaConfig
from capt.pretrain.plan import rehearsal, step
from capt.pretrain.plan.advice import Change, changes, without_ballast
from capt.pretrain.plan.devices import CASES, CENTRAL, FAST, SLOW, cluster, device_named
from capt.pretrain.plan.predict import (
    PLAN,
    RESERVE,
    STAGE_3_BUCKET,
    STAGE_3_LIVE,
    collective_seconds,
    predict,
    require_fit,
)
from capt.pretrain.report.write import report
from tests.benchmarks.bench_plan import MEMORY, job_of, tracked_peak
from tests.support import Capt, run_ranks

SMALL = [
    "model.size=custom", "model.layers=2", "model.hidden=32", "model.heads=2", "model.ffn=48", "model.max_positions=16",
    "data.sequence_length=16", "tokenizer.vocab_size=300", "batch.micro=4", "batch.global=64",
]  # fmt: skip


PLAIN_QUEUE = ["contrast.drift=none", "contrast.queue_share=null"]


@pytest.mark.parametrize(
    "overrides",
    [MEMORY[3], MEMORY[4], MEMORY[5], [*MEMORY[3], "optimizer.freeze=1", "optimizer.type=muon"]],
    ids=["bf16", "cached", "kept", "frozen"],
)
def test_memory_is_what_the_allocator_gives_out(overrides: list[str]) -> None:
    tracked = run_ranks(tracked_peak, 1, overrides)[0]
    assert predict(job_of(overrides), cluster("cpu")).memory.total == pytest.approx(tracked, rel=0.03)


@pytest.mark.parametrize(
    ("recompute", "total", "gpu", "optimizer"),  # 64: cached, 32: one micro-batch
    [
        ("none", 64, True, "optimizer.type=muon"),
        ("full", 32, False, "optimizer.freeze=1"),
        pytest.param("full", 32, True, "optimizer.freeze=embeddings", marks=pytest.mark.slow),
        pytest.param("none", 32, False, "optimizer.freeze=2", marks=pytest.mark.slow),
        pytest.param("full", 64, False, "optimizer.type=adamw", marks=pytest.mark.slow),
    ],
)
def test_layers_are_affine(
    recompute: str, total: int, gpu: bool, optimizer: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    sizes = ["model.layers=5", f"batch.global={total}", f"model.activation_checkpointing={recompute}"]
    job = load_job("capt_large", [*SMALL, *sizes, optimizer])
    found = step.rank_step(job, 8, gpu=gpu)
    monkeypatch.setattr(step, "_contrasts", {})  # that of all layers is simulated as well
    assert found == step._simulated_step(step._without_extras(job), 8, gpu=gpu)


def test_a_host_with_a_gpu_plans_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    """A run on a GPU is planned by the process that starts it, where the queue would be on the GPU."""
    job = load_job("capt_large", [*SMALL, "batch.global=32", "run.log_every=1000"])
    planned = rehearsal.simulate_step(job, 2, gpu=True)[:2]
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    assert distributed.device().type == "cuda"
    assert rehearsal.simulate_step(job, 2, gpu=True)[:2] == planned


def test_a_kept_graph_saves_a_pass() -> None:
    """With recomputed layers 4 in place of 5 units of a forward pass."""
    sizes = [*SMALL, "model.hidden=256", "batch.global=32", "model.activation_checkpointing=full"]
    job, devices = load_job("capt_large", sizes), cluster("2xh100")
    found = step.rank_step(job, 2, gpu=True)
    assert found.again.flops * found.parts / found.encoder.flops == pytest.approx(1 / 5, rel=0.1)
    one, two = (predict(load_job("capt_large", [*sizes, f"contrast.keep={n}"]), devices, CASES, found) for n in (1, 2))
    every = predict(job, devices, CASES, found)
    assert every.kept == found.parts
    assert every.seconds < two.seconds < one.seconds
    room = RESERVE + (one.memory.total - RESERVE + 1.5 * found.graph) / (1 - MARGIN)
    assert predict(job, replace(devices, device=replace(devices.device, memory=room)), CASES, found).kept == 2
    large = replace(found, contrast_peak=found.peak + found.graph)  # all kept graphs are there in the contrast
    none, kept = (
        predict(load_job("capt_large", [*sizes, f"contrast.keep={n}"]), devices, CASES, large) for n in (0, 2)
    )
    assert kept.memory.total - none.memory.total == 2 * found.graph


def test_products_are_those_of_the_flop_count() -> None:
    """A step without recomputation computes what the FLOP of MFU say; fused attention computes its weights twice."""
    job = load_job("capt_base", ["batch.global=64", "batch.micro=8", "model.layers=3"])
    found = step.rank_step(job, 8, gpu=True)
    assert found.encoder.flops == pytest.approx(found.flops / 8, rel=0.05)


def test_each_corruption_has_its_labels() -> None:
    job = load_job("capt_tiny", [*SMALL, "corruption.type=mask_tokens+shuffle", "corruption.rate=0.2"])
    corruptor = Corruptor(job.corruption, CorruptionVocabulary(300, 4, (0, 1, 2, 3, 4)), job.data.sequence_length)  # type: ignore[attr-defined]
    batch = rehearsal.rehearse(job, 1).batch
    assert batch.labels.shape[1] == corruptor.slots == 6


def test_spans_are_planned_at_their_lengths() -> None:
    """Spans of a tenth to a half of 200 tokens, in windows of 512: rows of 104 at most, of 62 in the mean."""
    keys = ["data.sequence_length=512", "model.max_positions=512", "data.view=crop", "tokenizer.vocab_size=300"]
    found = rehearsal.rehearse(load_job("capt_tiny", [*keys, "data.passage=200", "batch.micro=4"]), 1)
    assert found.batch.tokens.shape == (4, 104)
    assert found.task.tokens([], 10) == pytest.approx(620, abs=20)
    assert any("of passages of 200 tokens" in each for each in found.assumed)
    # Documents of unknown length are long enough.
    whole = rehearsal.rehearse(load_job("capt_tiny", [*keys, "batch.micro=4"]), 1)
    assert whole.batch.tokens.shape == (4, 512)


def test_a_step_of_pairs_is_planned() -> None:
    tiny = ["model.language_layers=2", "model.vision_layers=2", "model.cross_layers=3"]
    sizes = ["model.size=custom", *tiny, "model.hidden=64", "model.heads=2", "model.ffn=128", "batch.micro=8"]
    found = predict(load_job("capt_vl", [*sizes, "batch.global=64"]), cluster("8xh100"))
    # The FLOP of MFU count the last layer everywhere, which is a third of the cross layers here.
    assert 0.7 < found.step.encoder.flops / (found.step.flops / 8) < 1.05
    assert any("region store" in each for each in found.step.assumed)
    assert found.wire["contrast, all-gather"] > 0


def test_a_step_of_texts_with_negatives_is_planned(monkeypatch: pytest.MonkeyPatch) -> None:
    """In three micro-batches, whose contrast is one over 36 documents of this rank."""
    sizes = {"layers": 2, "hidden": 64, "heads": 2, "ffn": 128}
    tiny = RobertaConfig(size="custom", vocab_size=300, **sizes).to_hf(bos_id=0, eos_id=2)
    monkeypatch.setattr("capt.pretrain.pairs.plan.described_encoder", lambda init, positions: (tiny, ("tiny",)))
    overrides = ["data.files=[none]", "data.negatives=2", "data.sequence_length=32", "batch.global=24", "batch.micro=4"]
    found = step.rank_step(load_job("capt_pairs", [*overrides, "engine.precision=bf16"]), 2, gpu=True)
    assert found.parts == 3
    assert found.encoder.flops == pytest.approx(found.flops / 2 + 3 * found.again.flops, rel=0.05)
    assert found.contrast.flops >= 3 * 2 * (12 * 2) * (36 * 2) * 64 / 2  # of a rank, which has half of the documents
    assert found.tokens == 24 * 4 * 32
    assert found.sent


def tiny_encoder(init: Path, positions: int) -> tuple[dict[str, Any], tuple[str, ...]]:
    tiny = RobertaConfig(size="custom", vocab_size=300, layers=2, hidden=64, heads=2, ffn=128, max_positions=64)
    return tiny.to_hf(bos_id=0, eos_id=2), ("a tiny encoder",)


def test_fine_tuning_is_planned(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Steps follow from what is known of GLUE, and from a table that is here; else they are not told."""
    monkeypatch.setattr("capt.finetune.plan.described_encoder", tiny_encoder)
    rte = predict(load_job("rte", ["data.path=none", "model.init=none", "batch.micro=4"]), cluster("2xh100"))
    assert rte.steps == -(-10 * 2490 // 16)
    assert rte.tokens == 16 * 64
    assert rte.step.encoder.flops == pytest.approx(rte.step.flops / 2, rel=0.05)
    assert rte.step.longest
    mine = ["model.init=none", "data.sequence_length=32"]
    unknown = predict(load_job("mine", [*mine, "data.train=none.csv", "data.kind=regression"]), cluster("cpu"))
    assert (unknown.steps, unknown.to_json()["days"], unknown.tokens) == (None, None, 16 * 32)
    table = tmp_path / "rows.csv"
    table.write_text("text,label\n" + "".join(f"words {n},{'abc'[n % 3]}\n" for n in range(64)))
    job = load_job("mine", [*mine, f"data.train={table}", "data.validation_share=0.5"])
    three = predict(job, cluster("cpu"))
    assert three.steps == 10 * 2
    assert three.step.weights - unknown.step.weights == 2 * 65


def test_what_is_frozen_has_no_gradient_and_no_state(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("capt.finetune.plan.described_encoder", tiny_encoder)
    job = ["data.path=none", "model.init=none", "batch.micro=8", "engine.zero_stage=1", "engine.precision=fp32"]
    plain, frozen, adapted = (
        predict(load_job("rte", [*job, *more]), cluster("2xh100"))
        for more in ([], ["optimizer.freeze=1"], ["model.lora.rank=4"])
    )
    head, layer = 64 * 64 + 64 + 64 * 2 + 2, 7 * 64 + 4 * 64 + 4 * 64 * 64 + 2 * 64 * 128
    assert (frozen.step.weights, frozen.step.trained) == (plain.step.weights, head + layer)
    assert adapted.step.trained == head + 2 * 4 * (128 + 192 + 128 + 192 + 192)
    for found in (frozen, adapted):
        trained = found.step.trained
        assert (found.memory.gradients, found.memory.optimizer) == (4 * trained, 12 * trained // 2)
        assert found.memory.buckets == 8 * trained
        assert sum(size for name, size in found.wire.items() if name.startswith("ZeRO")) == 4 * trained + 2 * trained
        assert found.times["central"].update == pytest.approx(
            plain.times["central"].update * trained / plain.step.trained
        )
    assert frozen.memory.activations < plain.memory.activations


def test_muon_keeps_one_moment_of_a_matrix_and_multiplies() -> None:
    adam, muon = (
        predict(load_job("capt_large", [*SMALL, f"optimizer.type={kind}", "engine.zero_stage=0"]), cluster("h100"))
        for kind in ("adamw", "muon")
    )
    shapes = 2 * [(32, 32), (64, 32), (32, 32), (48, 32), (32, 48)]
    assert adam.memory.optimizer - muon.memory.optimizer == 4 * sum(a * b for a, b in shapes)
    assert muon.step.update == 5 * sum(4 * min(s) ** 2 * max(s) + 2 * min(s) ** 3 for s in shapes)
    assert muon.times["central"].products > adam.times["central"].products


@pytest.mark.parametrize(
    ("config", "flops"), [("ptb/vae", 1.0), ("ptb/lstm_lm", 1.0), ("ptb/clvae_plus_mi", 1.3), ("clusters_k4", None)]
)
def test_latent_jobs_are_planned(config: str, flops: float | None) -> None:
    more = ["data.max_words=20", "data.vocabulary=3000"] if flops else []
    job = load_job(config, [*more, "batch.micro=16" if flops else "batch.micro=128"])
    found = predict(job, cluster("2xh100"))
    assert found.wire
    assert found.steps == (None if flops else 80_000)
    if flops:  # those of MFU leave out the critics
        assert found.step.encoder.flops == pytest.approx(flops * found.step.flops / 2, rel=0.1)
        assert found.tokens == 32 * 21


def test_jobs_whose_step_depends_on_values_are_refused_by_name() -> None:
    with pytest.raises(ConfigError, match=r"objective\.svi_steps: .* cannot be planned"):
        predict(load_job("ptb/sa_vae"), cluster("h100"))
    with pytest.raises(ConfigError, match=r"task\.type ace: .* cannot be planned"):
        predict(load_job("skipgram", ["data.files=[none]"]), cluster("h100"))


def test_an_encoder_that_is_not_here_has_the_positions_that_the_job_needs() -> None:
    small = ["model.size=custom", "model.layers=3", "model.hidden=32", "model.heads=2", "model.ffn=48"]
    job = load_job("modernbert_continue", [*small, "batch.global=8", "batch.micro=4"])
    (assumed,) = predict(job, cluster("1xh100")).step.assumed[:1]
    assert assumed == "the sizes of the job's model section, for model.init FOLDER_OR_HUB_ID is not on this host"


def test_a_prompt_is_part_of_a_text(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("capt.pretrain.pairs.plan.described_encoder", tiny_encoder)
    job = ["data.files=[none]", "data.sequence_length=32", "batch.global=8", "batch.micro=8"]
    plain, prompted = (
        predict(load_job("capt_pairs", [*job, *more]), cluster("h100")).tokens
        for more in ([], ["data.prompts={query: 'search_query: ', document: ''}"])
    )
    assert (plain, prompted) == (8 * 64, 8 * (64 + 4))
    with pytest.raises(ConfigError, match="more than the encoder's 64 positions"):
        predict(load_job("capt_pairs", [*job, "data.sequence_length=64", "data.prompts.query=prompt"]), cluster("h100"))


def test_a_rank_with_fewer_rows_than_a_micro_batch() -> None:
    """Plans what the rank has; parts that differ by a row count as the larger one."""
    few, same, uneven = (
        predict(load_job("capt_large", [*SMALL, *sizes]), devices)
        for sizes, devices in (
            (["batch.micro=16"], cluster("16xh100")),
            (["batch.micro=4"], cluster("16xh100")),
            (["batch.micro=16", "batch.global=63"], cluster("16xh100")),
        )
    )
    assert few.step == same.step
    assert uneven.step.encoder == few.step.encoder
    assert uneven.memory == few.memory


def test_steps_of_a_start_are_counted() -> None:
    wsd = ["schedule.max_steps=900", "schedule.warmup_steps=0", "schedule.type=wsd", "schedule.decay_steps=100"]
    counted = [
        predict(load_job("capt_large", [*SMALL, *wsd, *more]), cluster("8xh100")).steps
        for more in ([], ["schedule.stop_after=50"], ["run.branch_from=runs/other"])
    ]
    assert counted == [900, 50, 100]


def test_twelve_gpus_are_on_two_hosts() -> None:
    given, device = CENTRAL, cluster("h100").device
    eight, twelve, sixteen = (collective_seconds("allreduce_", 10**8, n, given, device) for n in (8, 12, 16))
    assert eight < twelve < sixteen


def test_slow_and_fast_enclose_the_central_case() -> None:
    found = predict(load_job("capt_large", SMALL), cluster("8xh100"))
    least, most = found.bracket
    assert least < found.seconds < most
    assert found.mfu("slow") < found.mfu() < found.mfu("fast") < 1
    assert SLOW.products < CENTRAL.products < FAST.products


@pytest.mark.parametrize(("stage", "states"), [(0, 16), (1, 8 + 12 / 8), (2, 4 + 16 / 8)])
def test_what_is_kept_of_a_parameter_at_each_stage(stage: int, states: float) -> None:
    memory = predict(load_job("capt_large", [*SMALL, f"engine.zero_stage={stage}"]), cluster("8xh100")).memory
    kept = memory.weights + memory.gradients + memory.optimizer
    parameters = memory.weights / 4
    assert kept / parameters == pytest.approx(states, rel=0.01)


def test_weights_are_shared_at_the_last_stage() -> None:
    """Weights that DeepSpeed keeps gathered are not."""
    theirs = DeepSpeedZeroConfig(stage=3)
    assert theirs.reduce_bucket_size == STAGE_3_BUCKET
    assert theirs.max_live_parameters + theirs.prefetch_bucket_size == STAGE_3_LIVE
    job = load_job("capt_large", [*SMALL, "engine.zero_stage=3"])
    found = predict(job, cluster("8xh100"))
    p = found.step.weights
    assert found.memory.weights == 4 * (p + p // 8)
    large = predict(job, cluster("64xh100"), step=replace(found.step, weights=16 * 10**9)).memory
    assert large.weights == 4 * (STAGE_3_LIVE + 10**9 // 4)
    assert large.buckets == found.memory.buckets == 4 * STAGE_3_BUCKET


def test_pure_bf16_halves_what_is_kept_and_sent() -> None:
    plain, pure = (
        predict(load_job("capt_large", [*SMALL, f"engine.precision={name}"]), cluster("8xh100"))
        for name in ("bf16", "bf16_pure")
    )
    assert (pure.memory.weights, pure.memory.gradients) == (plain.memory.weights / 2, plain.memory.gradients / 2)
    assert pure.wire["ZeRO, all-gather"] == pytest.approx(plain.wire["ZeRO, all-gather"] / 2, rel=1e-6)
    ring = 2 * 7 / 8 * 4 * plain.step.trained  # receives a reduce-scatter and an all-gather of the gradients
    assert pure.wire["ZeRO, all-reduce"] == plain.wire["ZeRO, all-reduce"] == pytest.approx(ring, rel=1e-6)
    assert pure.step.encoder.moved < 0.8 * plain.step.encoder.moved


def test_what_does_not_fit_is_refused_and_told_what_would() -> None:
    job, small = load_job("capt_large", [*SMALL, "batch.micro=8"]), cluster("8xh100")
    need = float(predict(job, small).memory.total)
    tight = replace(small, device=replace(small.device, memory=need - 1))
    found = predict(job, tight)
    fitting = changes(job, found)
    assert fitting
    assert all(each.prediction.fits for each in fitting)
    with pytest.raises(ConfigError, match=r"batch\.micro=8: a rank needs .* too much.*it fits with .*"):
        require_fit(found, job, [" ".join(fitting[0].keys)])
    require_fit(predict(job, replace(tight, device=replace(tight.device, memory=need))), job)


@pytest.mark.parametrize(
    ("keys", "needs", "remedy"),
    [
        (["batch.micro=4"], "activations", "batch.micro=4: .* of them for activations; .* too much; lower it, or"),
        (
            ["contrast.queue=1048576", *PLAIN_QUEUE],
            "queue",
            "contrast.queue=1048576: .* of them for the queue; .*; lower it, or",
        ),
        (["batch.micro=4"], "of_weights", "engine.zero_stage=1: .* of them for weights and .*; take more devices with"),
    ],
)
def test_the_remedy_is_for_what_takes_the_memory(keys: list[str], needs: str, remedy: str) -> None:
    job, devices = load_job("capt_large", [*SMALL, "contrast.keep=0", *keys]), cluster("8xh100")
    memory = predict(job, devices).memory
    have = memory.of_weights - 1 if needs == "of_weights" else memory.total - 1
    found = predict(job, replace(devices, device=replace(devices.device, memory=float(have))))
    with pytest.raises(ConfigError, match=remedy):
        require_fit(found, job)


def test_weights_that_do_not_fit_are_shared_by_a_higher_stage() -> None:
    wide = ["model.hidden=512", "contrast.queue=0", "batch.micro=1", "batch.global=8"]
    job, devices = load_job("capt_large", [*SMALL, *wide]), cluster("8xh100")
    states = predict(job.model_copy(update={"engine": job.engine.model_copy(update={"zero_stage": 2})}), devices).memory
    tight = replace(devices, device=replace(devices.device, memory=float(states.total)))
    found = predict(job, tight)
    assert found.memory.of_weights > tight.device.memory
    tried = changes(job, found)
    assert ("engine.zero_stage=2",) in [each.keys for each in tried]
    assert all("engine.zero_stage=2" in each.keys and each.prediction.fits for each in tried)


def test_auto_compiles_on_gpus_alone() -> None:
    auto, plain, compiled = (
        load_job("capt_large", [*SMALL, f"model.compile={value}"]) for value in ("auto", "false", "true")
    )
    for name, same in (("1xcpu", plain), ("1xh100", compiled)):
        devices = cluster(name)
        devices = replace(devices, device=replace(devices.device, memory=80e9))
        times = [predict(job, devices).times["central"].between for job in (auto, same)]
        assert times[0] == times[1]
        assert predict(plain, devices).times["central"].between > predict(compiled, devices).times["central"].between


def test_changes_are_ranked_and_compute_the_same() -> None:
    job = load_job("capt_large", SMALL)
    found = predict(job, cluster("8xh100"))
    speeds = [each.speed for each in changes(job, found)]
    assert speeds == sorted(speeds, reverse=True)
    assert all(speed > 1 for speed in speeds)


def test_a_contrast_is_simulated_once_for_all_encoders(monkeypatch: pytest.MonkeyPatch) -> None:
    """Also where a rank cuts its part of the step otherwise; another queue, or another part of the step, is another."""
    simulate, asked = rehearsal.simulate_contrast, []

    def counted(job: Any, *args: Any, **kwargs: Any) -> rehearsal.Simulated:
        asked.append(1)
        return simulate(job, *args, **kwargs)

    monkeypatch.setattr(step, "simulate_contrast", counted)
    monkeypatch.setattr(step, "_contrasts", {})
    job = load_job("capt_large", [*SMALL, "optimizer.lr=1e-5"])
    plain, again = predict(job, cluster("2xh100")), len(asked)
    assert again == 2  # that of two micro-batches, and that of eight
    deeper = load_job("capt_large", [*SMALL, "optimizer.lr=1e-5", "model.layers=7"])
    assert predict(deeper, cluster("2xh100")).step.contrast == plain.step.contrast
    assert len(asked) == again
    smaller = load_job("capt_large", [*SMALL, "optimizer.lr=1e-5", "batch.micro=2"])
    assert predict(smaller, cluster("2xh100")).step.contrast == plain.step.contrast
    assert len(asked) == again + 1
    for other in ("contrast.queue=512", "batch.global=128", "contrast.hardness=1"):
        changed = load_job("capt_large", [*SMALL, "optimizer.lr=1e-5", other])
        assert predict(changed, cluster("2xh100")).step.contrast != plain.step.contrast


def test_a_change_that_is_as_fast_without_one_of_its_keys_is_not_named() -> None:
    prediction = predict(load_job("capt_large", SMALL), cluster("8xh100"))
    speeds = {("a",): 1.3, ("a", "b"): 1.2, ("b",): 1.1, ("a", "c"): 1.4, ("c",): 1.4, ("a", "b", "c"): 1.5}
    tried = [Change(keys, prediction, speed) for keys, speed in speeds.items()]
    assert [change.keys for change in without_ballast(tried)] == [("a",), ("b",), ("c",), ("a", "b", "c")]


@pytest.mark.parametrize("text", ["8", "x", "0xh100", "00xh100", "8xh10", "-1xh100", "8 x h100", ""])
def test_devices_that_are_none(text: str) -> None:
    with pytest.raises(ConfigError, match="--gpus"):
        cluster(text)


@pytest.mark.parametrize(
    ("name", "kind"),
    [
        ("NVIDIA H100 80GB HBM3", "h100"), ("NVIDIA A100-SXM4-40GB", "a100"), ("NVIDIA GB200", "b200"),
        ("NVIDIA RTX A1000", None), ("NVIDIA L40S", None),
    ],
)  # fmt: skip
def test_devices_by_the_name_of_their_driver(name: str, kind: str | None) -> None:
    found = device_named(name)
    assert (None if found is None else found.name) == kind


def test_what_takes_long_is_said_on_stderr(
    capt: Capt, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    with options.explained("thinking"):
        time.sleep(0.1)
    assert capsys.readouterr().err == ""
    monkeypatch.setattr(options, "_SILENT", 0.0)
    _, out, err = capt("plan", "capt_large", *SMALL, "batch.micro=8", "--gpus", "8xh100", "--json")
    assert json.loads(out)["fits"]
    assert [line.partition(" (")[0] for line in err.splitlines()] == [
        "[capt] simulating a step of one rank on 8 x h100",
        "[capt] simulating changes of the job",
    ]


@pytest.mark.parametrize("words", [["--gpus", "0xh100"], ["batch.mico=4"], ["--save", "none"]])
def test_what_is_refused_is_refused_before_torch_is_imported(words: list[str]) -> None:
    code = (
        "import sys; from capt.launcher.cli import main\n"
        "try: main(['plan', 'capt_tiny', *sys.argv[1:]])\n"
        "finally: assert 'torch' not in sys.modules"
    )
    done = subprocess.run([sys.executable, "-c", code, *words], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr.startswith("error: ")


def test_the_command(capt: Capt) -> None:
    code, out, _ = capt("plan", "capt_large", *SMALL, "--gpus", "8xh100", "--no-advice")
    assert code == 0
    assert "MFU, %" in out
    _, out, _ = capt("plan", "capt_adapt", *SMALL, "schedule.max_steps=300", "--gpus", "1xcpu", "--no-advice")
    line = re.search(r"^(days|hours|minutes|seconds), 300 steps +([0-9.]+) ", out, re.M)
    assert line is not None, "no line says how long the steps take"
    assert line[1] != "days"
    assert float(line[2]) >= 1
    slow = "a CPU without units for it"
    assert slow not in out
    _, out, _ = capt("plan", "capt_tiny", *SMALL, "engine.precision=bf16", "--gpus", "1xcpu", "--no-advice")
    assert slow in out
    code, out, _ = capt("plan", "capt_large", *SMALL, "--gpus", "8xh100", "--no-advice", "--json")
    values = json.loads(out)
    assert code == 0
    assert values["fits"]
    parts = {name: size for name, size in values["memory"].items() if name not in ("total", "device")}
    assert sum(parts.values()) == values["memory"]["total"]
    for words, says in (
        (["capt_large", "batch.micro=1024", "--gpus", "8xh100"], "batch.micro=1024: a rank needs"),
        (["skipgram", "data.files=[none]"], "cannot be planned"),
    ):
        code, _, err = capt("plan", *words, "--no-advice")
        assert code == 2
        assert says in err


def test_a_launch_on_gpus_is_planned(tmp_path: Path) -> None:
    job = load_job("capt_large", [*SMALL, f"run.dir={tmp_path / 'run'}"])
    launch = Launch("capt.pretrain", (), job, Options())
    (path, text), *rest = predicted(launch, 8, [["NVIDIA H100 80GB HBM3", "81559 MiB", "550"]]).items()
    assert (path, rest) == (tmp_path / "run" / PLAN, [])
    assert json.loads(text)["ranks"] == 8
    assert predicted(launch, 8, []) == predicted(launch, 8, [["NVIDIA T4", "15360 MiB", "550"]]) == {}
    with pytest.raises(ConfigError, match="GiB too much"):
        predicted(launch, 8, [["NVIDIA H100 80GB HBM3", "1024 MiB", "550"]])
    for name in ("ptb/lag_vae", "ptb/sa_vae"):  # whose steps cannot be planned, which is no reason not to run them
        launch = Launch("capt.pretrain", (), load_job(name, ["data.path=none"]), Options())
        assert predicted(launch, 1, [["NVIDIA H100 80GB HBM3", "81559 MiB", "550"]]) == {}


def test_the_report_shows_predicted_and_measured(tmp_path: Path) -> None:
    run = tmp_path / "run"
    run.mkdir()
    (run / "config.yaml").write_text("task: {type: capt_language}\n")
    rows = [{"step": n, "samples": n, "tokens": n, "loss": 1.0, "seconds_per_step": 2.0} for n in (1, 2, 3)]
    (run / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    bracket = {"predicted": 1.0, "least": 0.5, "most": 3.0}
    (run / PLAN).write_text(json.dumps({"devices": "h100", "ranks": 8, "seconds_per_step": bracket}))
    report([run], tmp_path / "out")
    text = (tmp_path / "out" / "report.md").read_text()
    assert "Predicted and measured" in text
    assert "1 (0.5 to 3)" in text
    (run / PLAN).write_text("{")
    report([run], tmp_path / "out")
    assert "plan.json is not what capt plan writes" in (tmp_path / "out" / "report.md").read_text()
