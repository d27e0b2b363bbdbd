"""``capt convert`` from a real checkpoint to every form and back, and everything a user can get wrong."""

from __future__ import annotations

import json
import os
import re
import shutil
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from capt.pretrain.base.errors import UserError
from capt.pretrain.config.load import load_job
from capt.pretrain.convert import quantized
from capt.pretrain.convert.dispatch import convert
from capt.pretrain.convert.encoder import export_encoder
from capt.pretrain.convert.quantized import VectorSpread, least_rank
from capt.pretrain.engine.evaluations import Section
from capt.pretrain.language.export import chosen_pooling
from capt.pretrain.language.load import load_model
from capt.pretrain.models.hf_model import read_hf, start_from
from tests.unit.convert.models import CARD, config, model, tokenizer


@pytest.fixture(scope="module")
def hf(tmp_path_factory):
    out = tmp_path_factory.mktemp("hf") / "model"
    cfg = config()
    export_encoder("hf", model(cfg).state_dict(), cfg, tokenizer(), out, CARD, check=False)
    return out


@pytest.fixture(scope="module")
def run(hf, tmp_path_factory):
    """A run with one checkpoint, as ``--from hf`` makes it."""
    return convert(hf, tmp_path_factory.mktemp("runs") / "first run", from_="hf")


def refused(match, *args, **options):
    with pytest.raises(UserError, match=match) as caught:
        convert(*args, **options)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("to", "inside"),
    [("hf", "capt_head.safetensors"), ("sentence-transformers", "modules.json"), ("onnx", "model.onnx")],
)
def test_every_form(run, tmp_path, to, inside):
    out = tmp_path / "a" / "ex port"
    (run / "metrics.jsonl").write_text('{"step": 0, "split": "validation", "loss/mlm": 1.5}\n')
    assert convert(run, out, to=to) == out
    assert (out / inside).is_file()
    card = (out / "README.md").read_text()
    for expected in ("# first run", "| layers | 3 |", "| validation/loss/mlm | 1.5 |", "no training step"):
        assert expected in card
    assert [p.name for p in out.parent.iterdir()] == ["ex port"]


def test_a_graph_in_int8_is_measured(run, tmp_path, caplog):
    import onnxruntime

    with caplog.at_level("INFO"):
        convert(run, tmp_path / "int8", to="onnx", quantize="int8")
    (line,) = [each for each in caplog.messages if each.startswith("int8: ")]
    mean, least = (float(each) for each in re.findall(r"\d\.\d{4}", line)[:2])
    given = {"input_ids": np.full((2, 5), 7), "attention_mask": np.ones((2, 5), dtype=np.int64)}
    rows = [
        onnxruntime.InferenceSession(tmp_path / "int8" / name).run(["sentence_embedding"], given)[0]
        for name in ("model.onnx", "model_int8.onnx")
    ]
    assert 0.9 < least <= mean < 1
    assert 0 < np.abs(rows[0] - rows[1]).max() < 0.2
    refused("--quantize 'int4' is unknown; valid: int8", run, tmp_path / "b", to="onnx", quantize="int4")
    refused("--quantize int8 has no meaning with --to hf", run, tmp_path / "b", to="hf", quantize="int8")


def test_what_is_made_of_logits_in_int8_is_compared(monkeypatch):
    logits = [np.array([[1, 2], [3, -1], [0.5, 0.4]]), np.array([[1, 2.5], [2.5, 3], [0.5, 0.4]])]
    monkeypatch.setattr(quantized, "_both", lambda *_: (logits, "9 MB"))
    for kind, said in (("class", "the class is the same for 67%"), ("labels", "a label is the same for 83%"),
                       ("order", "the order of two is the same for 67%")):  # fmt: skip
        line = quantized.compare_logits(Path("x"), {}, kind)
        assert line.startswith("int8: logits differ by 0.8333 in the mean and 4.0000 at most"), kind
        assert line.endswith(f"{said}; 9 MB"), kind


def test_vectors_in_few_directions_have_a_small_effective_rank():
    rows = np.random.default_rng(0).standard_normal((40, 2)) @ np.random.default_rng(1).standard_normal((2, 16))
    assert VectorSpread.of(rows).rank < least_rank(16)
    assert VectorSpread.of(np.random.default_rng(0).standard_normal((40, 16))).rank > least_rank(16)


@pytest.mark.parametrize(
    ("figures", "best", "said"),
    [
        ({}, "mean", "capt evaluate RUN --sts FOLDER has not compared"),
        ({"STS-B test": (0.1, 0.3, 0.5)}, "head", "Spearman 0.5 on STS-B test (mean 0.3, cls 0.1)"),
        ({"STS-B test": (0.1, 0.3, 0.5), "STS-B dev": (0.4, 0.3, 0.2)}, "cls", "Spearman 0.4 on STS-B dev (mean 0.3,"),
        ({"STS12 test": (0.1, 0.5), "STS13 test": (0.7, 0.2)}, "cls", "Spearman 0.4 on STS12 test, STS13 test (mean"),
        ({"STS12 test": (0.1, 0.5), "STS13 test": (0.9,)}, "mean", "Spearman 0.5 on STS12 test (cls 0.1)"),
        ({"STS12 test": (0.9,)}, "mean", "capt evaluate RUN --sts FOLDER has not compared"),
        ({"STS12 test": (None, None)}, "mean", "capt evaluate RUN --sts FOLDER has not compared"),
    ],
)  # fmt: skip
def test_the_pooling_is_that_of_the_best_figures(figures, best, said):
    chosen, reason = chosen_pooling([Section(**section) for section in _sections(figures)])
    assert chosen == best
    assert reason.startswith(said)


def _sections(figures):
    return [
        {
            "name": name,
            "protocol": "p",
            "poolers": {p: {"spearman": v} for p, v in zip(("cls", "mean", "head"), rho, strict=False)},
        }
        for name, rho in figures.items()
    ]


def test_the_export_pools_as_the_run_was_measured_best(run, tmp_path, caplog):
    copy = shutil.copytree(run, tmp_path / "run", symlinks=True)
    sections = _sections({"STS-B dev": (0.1, 0.3, 0.5)})
    (copy / "evaluation-step-00000000.json").write_text(json.dumps({"sections": sections}))
    caplog.set_level("INFO")
    convert(copy, tmp_path / "out", to="sentence-transformers")
    assert (tmp_path / "out" / "2_Dense").is_dir(), "the head"
    assert "--pooling head: Spearman 0.5 on STS-B dev" in caplog.text
    assert "Spearman 0.5 on STS-B dev" in (tmp_path / "out" / "README.md").read_text()
    convert(copy, tmp_path / "asked", to="sentence-transformers", pooling="mean")
    assert not (tmp_path / "asked" / "2_Dense").exists()


def test_an_export_is_replaced_on_request_only(run, tmp_path):
    out = tmp_path / "out"
    convert(run, out, to="hf")
    card = (out / "README.md").read_text()
    (out / "README.md").write_text("older")
    refused("not empty", run, out, to="hf")
    assert (out / "README.md").read_text() == "older"
    convert(run, out, to="hf", overwrite=True)
    assert (out / "README.md").read_text() == card


def test_pooling_reaches_the_export(run, tmp_path):
    convert(run, tmp_path / "out", to="sentence-transformers")  # mean, the recommended one
    assert json.loads((tmp_path / "out" / "1_Pooling" / "config.json").read_text())["pooling_mode_mean_tokens"] is True
    assert not (tmp_path / "out" / "2_Dense").exists()


def test_the_head_is_exported_on_request(run, tmp_path):
    convert(run, tmp_path / "out", to="sentence-transformers", pooling="head")
    assert (tmp_path / "out" / "3_Dense" / "model.safetensors").is_file()


@pytest.mark.parametrize("umask", [0o022, 0o027])
def test_every_file_has_the_permissions_of_the_umask(run, tmp_path, umask):
    before = os.umask(umask)
    try:
        convert(run, tmp_path / "out", to="sentence-transformers", pooling="head")
    finally:
        os.umask(before)
    files = [path for path in (tmp_path / "out").rglob("*") if path.is_file()]
    assert len(files) > 8
    assert {path.stat().st_mode & 0o777 for path in files} == {0o666 & ~umask}


def test_an_import_gets_the_settings_of_continued_pretraining(run):
    job = load_job(run / "config.yaml", ["data.files=my.txt"], resolved=True)
    assert job.data.source == "files"
    assert job.optimizer.lr == 5e-5
    assert 0 < job.schedule.warmup_steps < job.contrast.queue_start < job.schedule.max_steps
    assert job.contrast.queue == 4 * job.batch.global_  # both views of two steps
    assert job.data.sequence_length == 37


def test_a_bare_encoder_gets_a_new_language_model_head_and_says_so(hf, tmp_path, caplog):
    """RobertaModel.save_pretrained: no prefix, a pooler, no lm_head."""
    shutil.copytree(hf, tmp_path / "bare")
    tensors = load_file(hf / "model.safetensors")
    bare = {name.removeprefix("roberta."): x for name, x in tensors.items() if not name.startswith("lm_head")}
    bare |= {"pooler.dense.weight": torch.zeros(48, 48), "pooler.dense.bias": torch.zeros(48)}
    save_file(bare, tmp_path / "bare" / "model.safetensors")
    convert(tmp_path / "bare", tmp_path / "run", from_="hf")
    assert "no lm_head: the masked-language-model head starts from random weights" in caplog.text
    ours = load_model(tmp_path / "run").model
    whole = load_model(convert(hf, tmp_path / "whole", from_="hf")).model
    assert all(torch.equal(x, whole.encoder.state_dict()[name]) for name, x in ours.encoder.state_dict().items())
    assert not torch.equal(ours.mlm.dense.weight, whole.mlm.dense.weight)
    source = read_hf(tmp_path / "bare")
    start_from(ours, source, "bare", head="identity")
    assert "no lm_head: the masked-language-model head begins near the identity" in caplog.text
    assert torch.equal(ours.mlm.dense.weight, torch.eye(48))
    start_from(whole, read_hf(hf), "whole", head="identity")
    assert not torch.equal(whole.mlm.dense.weight, torch.eye(48)), "a head that is there is taken"


def test_a_damaged_checkpoint_is_named(run, tmp_path):
    shutil.copytree(run, tmp_path / "run", symlinks=True)
    (weights,) = (tmp_path / "run" / "checkpoints" / "step-00000000").glob("model-weights-*")
    content = bytearray(weights.read_bytes())
    content[-1] ^= 1
    weights.write_bytes(content)
    refused(weights.name, tmp_path / "run", tmp_path / "out", to="hf")
    assert not (tmp_path / "out").exists()


def test_a_checkpoint_of_deepspeeds_own_is_named_with_what_turns_it_into_weights(tmp_path):
    theirs = tmp_path / "theirs"
    (theirs / "global_step10").mkdir(parents=True)
    (theirs / "zero_to_fp32.py").write_text("")
    refused("zero_to_fp32.py write the weights with --safe_serialization", theirs, tmp_path / "out", to="hf")
    (theirs / "zero_to_fp32.py").unlink()
    refused("complete checkpoints in it$", theirs, tmp_path / "out", to="hf")


def test_arguments_that_make_no_sense(run, hf, tmp_path):
    out = tmp_path / "out"
    refused("--to .* or --from", run, out)
    refused("--to .* or --from", run, out, to="hf", from_="hf")
    refused("did you mean 'onnx'", run, out, to="onx")
    refused("can be written as hf, sentence-transformers, onnx", run, out, to="tensorflow")
    refused("valid: hf", run, out, from_="pickle")
    refused("--pooling 'max' is unknown", run, out, to="onnx", pooling="max")
    refused("--pooling mean has no meaning with --to hf", run, out, to="hf", pooling="mean")
    refused("--pooling head has no meaning with --to hf", run, out, to="hf", pooling="head")
    refused("is in it", run, run, to="hf", overwrite=True)
    refused("is in it", run, run.parent, to="hf", overwrite=True)
    refused("neither a checkpoint", tmp_path / "nowhere", out, to="hf")
    refused("a Hugging Face folder, and --to is for checkpoints of ours", hf, out, to="hf")
    refused("config.json", run, out, from_="hf")
    assert list(tmp_path.iterdir()) == []


def edit_config(**values):
    def edit(folder):
        path = folder / "config.json"
        path.write_text(json.dumps(json.loads(path.read_text()) | values))

    return edit


def edit_tensors(change):
    def edit(folder):
        tensors = load_file(folder / "model.safetensors")
        change(tensors)
        save_file(tensors, folder / "model.safetensors")

    return edit


def fifo(folder):
    (folder / "model.safetensors").unlink()
    os.mkfifo(folder / "model.safetensors")


def tokenizer_with_code(folder):
    path = folder / "tokenizer_config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"auto_map": {"AutoTokenizer": ["evil.T", None]}}))


def pickle_only(folder):
    (folder / "model.safetensors").rename(folder / "pytorch_model.bin")


WORD, QUERY = "roberta.embeddings.word_embeddings.weight", "roberta.encoder.layer.1.attention.self.query.weight"


@pytest.mark.timeout(20)
@pytest.mark.parametrize(
    ("edit", "match"),
    [
        (edit_config(auto_map={"AutoModel": "evil.Model"}), "auto_map"),
        (edit_config(_attn_implementation_internal="evil/kernel"), "_attn_implementation_internal"),
        (edit_config(model_type="gpt2"), "model_type"),
        (edit_config(hidden_size="48"), "hidden_size is '48'"),
        (edit_config(hidden_size=48 * 10**9), "hidden_size"),
        (edit_config(intermediate_size=10**12), "intermediate_size"),
        (edit_config(max_position_embeddings=10**12), "max_position_embeddings"),
        (edit_config(vocab_size=10**12), "vocab_size"),
        (edit_config(num_hidden_layers=10**12), "num_hidden_layers"),
        (edit_config(layer_norm_eps=None), "config.json"),
        (edit_config(vocab_size=320), "and the model 320 rows"),
        (tokenizer_with_code, "auto_map"),
        (fifo, "not a regular file"),
        (pickle_only, "pickle"),
        (edit_tensors(lambda t: t.update({WORD: torch.zeros(640)})), "vocab_size"),
        (edit_tensors(lambda t: t.pop(QUERY)), f"missing: {QUERY}"),
        (edit_tensors(lambda t: t.update(extra=torch.zeros(1))), "unexpected: extra"),
        (edit_tensors(lambda t: t.update({QUERY: torch.zeros(3, 3)})), "shape"),
        (edit_tensors(lambda t: t.update({"lm_head.decoder.weight": t[WORD] + 1})), "lm_head.decoder.weight"),
        (edit_tensors(lambda t: t.pop("lm_head.dense.bias")), "missing: lm_head.dense.bias"),
        (edit_tensors(lambda t: t.update({QUERY: torch.zeros(48, 48, dtype=torch.uint8)})), "not U8 roberta"),
    ],
)
def test_hostile_or_broken_folders(hf, tmp_path, edit, match):
    shutil.copytree(hf, tmp_path / "bad")
    edit(tmp_path / "bad")
    refused(match, tmp_path / "bad", tmp_path / "out", from_="hf")
    assert [p.name for p in tmp_path.iterdir()] == ["bad"]


def test_a_head_of_another_size_is_refused(hf, tmp_path):
    shutil.copytree(hf, tmp_path / "bad")
    head = load_file(hf / "capt_head.safetensors")
    save_file(head | {"inner.bias": torch.zeros(7)}, tmp_path / "bad" / "capt_head.safetensors")
    refused("inner.bias", tmp_path / "bad", tmp_path / "out", from_="hf")


def test_a_head_that_reads_something_unknown_is_refused(hf, tmp_path):
    shutil.copytree(hf, tmp_path / "bad")
    save_file(load_file(hf / "capt_head.safetensors"), tmp_path / "bad" / "capt_head.safetensors", {"pooling": "max"})
    refused("pooling is 'max'", tmp_path / "bad", tmp_path / "out", from_="hf")


def test_a_folder_without_our_head_gets_a_new_one_and_says_so(hf, tmp_path, caplog):
    shutil.copytree(hf, tmp_path / "plain")
    (tmp_path / "plain" / "capt_head.safetensors").unlink()
    convert(tmp_path / "plain", tmp_path / "run", from_="hf")
    assert "random weights" in caplog.text
    convert(tmp_path / "plain", tmp_path / "twin", from_="hf")
    first, second = load_model(tmp_path / "run").model, load_model(tmp_path / "twin").model
    assert torch.equal(first.aggregation.inner.weight, second.aggregation.inner.weight)
