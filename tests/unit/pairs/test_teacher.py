"""A teacher's vectors in a job of pairs: found by the hash of the text, refused by name, and learnt."""

from __future__ import annotations

import json
import shlex
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from sentence_transformers import SentenceTransformer
from transformers import AutoTokenizer
from typer.testing import CliRunner

from capt.launcher.cli import app
from capt.pretrain.base.errors import CheckpointError, ConfigError, DataError, UserError
from capt.pretrain.base.overlap import text_hash
from capt.pretrain.config.load import job_from_mapping, load_job
from capt.pretrain.config.retrieval import METRICS, RetrievalSection
from capt.pretrain.contrast.teacher import cosine_distance_loss, listwise_loss, squared_distance_loss
from capt.pretrain.pairs.config import PairJob
from capt.pretrain.pairs.export import TO_TEACHER, command
from capt.pretrain.pairs.task import PairTask
from capt.pretrain.pairs.views import PairViews
from capt.pretrain.retrieval.data import read_collections
from capt.pretrain.retrieval.encode import embed
from capt.pretrain.retrieval.encoders import load_text_encoder
from capt.pretrain.retrieval.evaluate import evaluate
from capt.pretrain.retrieval.options import EncodeOptions, EncoderOptions, RetrievalSettings
from capt.pretrain.retrieval.store import VectorIdentity, VectorStore
from capt.pretrain.retrieval.validation import RetrievalValidation
from tests.finetune import write_encoder
from tests.pairs import every_text, pairs_mapping, taught_by, write_pairs, write_vectors
from tests.runs import rows_of
from tests.support import run_ranks, train_job
from tests.unit.retrieval.toy import write_beir

WIDTH = 12
"""Dimensions of the teacher, which are not those of the encoder."""


def _texts(folder: Path, count: int = 60) -> Path:
    path = folder / "texts.jsonl"
    lines = write_pairs(folder / "pairs.jsonl", count).read_text().splitlines()
    path.write_text("".join(json.dumps({"text": json.loads(line)["query"]}) + "\n" for line in lines))
    return path


def _mapping(folder: Path, data: dict[str, Any] | None = None, **changes: Any) -> dict[str, Any]:
    """A job on texts alone whose teacher's vectors are random."""
    texts = _texts(folder)
    write_vectors(folder / "store", every_text(texts), WIDTH)
    mapping = pairs_mapping(folder, **taught_by(folder / "store", {"cosine": 1.0}), **changes)
    mapping["data"] |= {"files": [str(texts)], "loss": "none", **(data or {})}
    return mapping


def _task(mapping: dict[str, Any]) -> PairTask:
    job = job_from_mapping(json.loads(json.dumps(mapping)), "test")
    assert isinstance(job, PairJob)
    return PairTask(job, Path(job.run.dir))


def _vector(store: Path, text: str) -> np.ndarray:
    (folder,) = (path.parent for path in store.glob("*/identity.json"))
    identity = VectorIdentity(**json.loads((folder / "identity.json").read_text()))
    return VectorStore(store, identity).vectors([text_hash(text)])[0]


def test_a_text_alone_is_encoded_once_beside_its_vector(tmp_path: Path) -> None:
    task = _task(_mapping(tmp_path))
    texts = {tuple(task.text_ids([text], "document")[0]): text for text in every_text(tmp_path / "texts.jsonl")}
    batch = task.step_assembler(8, 2, 1, 0)(0, 0)
    for part in batch:
        assert part.is_alone
        assert len(part.lengths) == len(part.ids) == len(part.teacher_vectors)
        for ids, vector in zip(part.tokens.split(part.lengths.tolist()), part.teacher_vectors, strict=True):
            np.testing.assert_array_equal(vector.numpy(), _vector(tmp_path / "store", texts[tuple(ids.tolist())]))
    assert batch[0].step_tokens == sum(int(part.lengths.sum()) for part in batch)
    # A line of text with spaces around it is encoded without them.
    lines = tmp_path / "lines.txt"
    lines.write_text("".join(f"  {text} \n" for text in texts.values()))
    mapping = _mapping(tmp_path)
    assert len(_task({**mapping, "data": {**mapping["data"], "files": [str(lines)]}}).sources[0]) > 40
    held_out = task.pools.alone
    assert held_out is not None
    assert held_out.vectors is not None
    for ids, vector in zip(held_out.queries, held_out.vectors[0], strict=True):
        np.testing.assert_array_equal(vector, _vector(tmp_path / "store", texts[tuple(ids.tolist())]))


def test_a_text_alone_has_the_prompt_and_the_length_of_a_document(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """The student reads it as the teacher did, and as the export will; of texts that are cut it is the number."""
    prompts = {"query": "q: ", "document": "the river: "}
    with caplog.at_level("INFO"):
        task = _task(_mapping(tmp_path, data={"prompts": prompts, "query_length": 8, "sequence_length": 10}))
    (said,) = (line for line in caplog.messages if " tokens a " in line)
    assert said.endswith(": 54 texts, 16.0 tokens a text; 53 texts cut to 16 tokens (data.sequence_length)")
    documents = {tuple(ids) for ids in task.text_ids(every_text(tmp_path / "texts.jsonl"), "document")}
    (batch,) = task.step_assembler(8, 1, 1, 0)(0, 0)
    assert task.pools.alone is not None
    for ids in [*batch.tokens.split(batch.lengths.tolist()), *task.pools.alone.queries]:
        assert tuple(ids.tolist()) in documents


def test_a_query_has_vectors_of_its_own_beside_documents_and_negatives(tmp_path: Path) -> None:
    pairs = write_pairs(tmp_path / "pairs.jsonl", positives=2, negatives=3)
    texts = every_text(pairs)
    write_vectors(tmp_path / "documents", texts, WIDTH, prompt="d: ")
    write_vectors(tmp_path / "queries", texts, WIDTH, prompt="q: ", seed=1)
    section = {"listwise": 1.0, "query_vectors": str(tmp_path / "queries")}
    mapping = pairs_mapping(tmp_path, **taught_by(tmp_path / "documents", section), data={"negatives": 2})
    task = _task(mapping)
    assert task.job.distillation.teacher is not None
    assert (task.job.distillation.teacher["prompt"], task.job.distillation.teacher["query_prompt"]) == ("d: ", "q: ")
    queries = {tuple(task.text_ids([text], "query")[0]): text for text in texts}
    (batch,) = task.step_assembler(8, 1, 1, 0)(0, 0)
    assert len(batch.lengths) == 16 + len(batch.owners) == len(batch.teacher_vectors) > 20
    for number, (ids, vector) in enumerate(
        zip(batch.tokens.split(batch.lengths.tolist()), batch.teacher_vectors, strict=True)
    ):
        store = tmp_path / ("queries" if number < 8 else "documents")
        np.testing.assert_array_equal(vector.numpy(), _vector(store, queries[tuple(ids.tolist())]))


def test_the_losses_of_a_step_are_those_of_all_texts_beside_that_of_pairs(tmp_path: Path) -> None:
    from capt.pretrain.contrast.info_nce import info_nce
    from capt.pretrain.pairs.config import PairContrast
    from capt.pretrain.pairs.distillation_config import PairDistillation
    from capt.pretrain.pairs.loss import PairTerm

    torch.manual_seed(0)
    rows, taught, teacher = (torch.randn(10, width).double() for width in (6, 4, 4))
    unit = torch.nn.functional.normalize(rows, dim=1)
    views = PairViews(unit[:5], unit[5:], torch.arange(5), 0.2, texts=unit, taught=taught, teacher_vectors=teacher)
    section = PairDistillation(vectors="x", cosine=2.0, mse=3.0, listwise=0.5, listwise_temperature=0.1)
    term = PairTerm(PairContrast(), 6, 5, section)
    losses = {
        "loss/pairs": info_nce(unit[:5], unit[5:], temperature=0.2),
        "loss/teacher_cosine": cosine_distance_loss(taught, teacher),
        "loss/teacher_mse": squared_distance_loss(taught, teacher),
        "loss/teacher_listwise": listwise_loss(unit, teacher, temperature=0.1),
    }
    expected = sum(weight * loss for weight, loss in zip((1.0, 2.0, 3.0, 0.5), losses.values(), strict=True))
    assert float(term.loss(views, step=0)) == pytest.approx(float(expected), rel=1e-12)
    found = term.take_losses()
    assert {name: float(loss) for name, loss in found.items()} == pytest.approx(
        {k: float(v) for k, v in losses.items()}
    )


def test_a_teachers_scores_train_rows_without_a_loss_of_their_own_too() -> None:
    from capt.pretrain.contrast.distillation import distillation_loss
    from capt.pretrain.pairs.config import PairContrast
    from capt.pretrain.pairs.distillation_config import PairDistillation
    from capt.pretrain.pairs.loss import PairTerm
    from capt.pretrain.pairs.views import Part

    torch.manual_seed(0)
    rows = torch.nn.functional.normalize(torch.randn(9, 6).double(), dim=1)
    scores: dict[str, Any] = {"positive_scores": torch.randn(3), "negative_scores": torch.randn(3)}
    views = PairViews(
        rows[:3], rows[3:6], torch.arange(3), 0.2, negatives=rows[6:], owners=torch.arange(3),
        negative_ids=torch.arange(3, 6), parts=(Part("none", 1.0, (0,), taught=1.0),),
        teacher=scores["positive_scores"], negative_teacher=scores["negative_scores"],
    )  # fmt: skip
    expected = distillation_loss(
        rows[:3], rows[3:6], rows[6:], negative_owners=torch.arange(3), temperature=0.2, **scores
    )
    term = PairTerm(PairContrast(), 6, 3, PairDistillation(weight=2.0))
    assert float(term.loss(views, step=0)) == pytest.approx(2 * float(expected), rel=1e-12)
    assert set(term.take_losses()) == {"loss/distillation"}


def _is_line(error: UserError) -> str:
    assert "\n" not in str(error)
    return str(error)


def test_what_cannot_be_learnt_is_refused_in_a_line(tmp_path: Path) -> None:
    mapping = _mapping(tmp_path)
    store, texts = tmp_path / "store", every_text(tmp_path / "texts.jsonl")

    def refused(kind: type[UserError], **section: Any) -> str:
        with pytest.raises(kind) as caught:
            _task({**mapping, "distillation": {**mapping["distillation"], **section}})
        return _is_line(caught.value)

    assert "no vectors there; capt encode TEXTS --model TEACHER --out" in refused(
        DataError, vectors=str(tmp_path / "no")
    )
    write_vectors(store, texts, WIDTH, prompt="other")
    said = refused(ConfigError)
    assert "has 2 kinds of vectors; name one of them" in said
    assert "prompt 'other'" in said
    kinds = sorted(path.parent for path in store.glob("*/identity.json"))
    _task({**mapping, "distillation": {**mapping["distillation"], "vectors": str(kinds[0])}})
    shutil.copytree(kinds[0], tmp_path / "renamed")
    assert "give the folder that name, not renamed" in refused(DataError, vectors=str(tmp_path / "renamed"))
    write_vectors(tmp_path / "another", texts, WIDTH, model="another")
    assert "belongs to another model" in refused(
        ConfigError, vectors=str(kinds[0]), query_vectors=str(tmp_path / "another")
    )
    # A text without a vector, and a vector that says nothing.
    write_vectors(tmp_path / "half", texts[:40], WIDTH)
    said = refused(DataError, vectors=str(tmp_path / "half"))
    assert "source pairs: 20 of 60 texts have no vector in" in said
    assert f"--out {tmp_path / 'half'}" in said
    zero = write_vectors(tmp_path / "zeros", texts[1:], WIDTH)
    zero.add([text_hash(texts[0])], np.zeros((1, WIDTH), np.float32))
    zero.close()
    assert "the vector of a text is all zeros" in refused(DataError, vectors=str(tmp_path / "zeros"))
    write_vectors(tmp_path / "damaged", texts, WIDTH)
    (rows,) = (tmp_path / "damaged").glob("*/*.rows")
    content = bytearray(rows.read_bytes())
    content[-WIDTH * 4] ^= 1
    rows.write_bytes(content)
    assert "source pairs: 1 of 60 texts have no vector in" in refused(DataError, vectors=str(tmp_path / "damaged"))
    for section, fault in (
        ({"cosine": 0.0}, "is read for a loss"),
        ({"vectors": None}, "applies to a teacher's vectors: set distillation.vectors"),
        ({"vectors": None, "cosine": 0.0, "query_vectors": str(store)}, "query_vectors is beside a teacher's vectors"),
    ):
        with pytest.raises(ConfigError, match=fault):
            _task({**mapping, "distillation": {**mapping["distillation"], **section}})


def test_the_command_of_a_refusal_makes_the_store_whole(tmp_path: Path) -> None:
    """A store of a real encoder that was stopped half way, then grows beside the job."""
    mapping = _mapping(tmp_path)
    teacher = write_encoder(tmp_path / "teacher", "BertModel", num_hidden_layers=1)
    texts, half = tmp_path / "texts.jsonl", tmp_path / "half.txt"
    half.write_text("\n".join(every_text(texts)[:30]) + "\n")
    runner = CliRunner()
    given = ["encode", str(half), "--model", str(teacher), "--out", str(tmp_path / "real"), "--length", "20"]
    done = runner.invoke(app, given, catch_exceptions=False)
    assert done.exit_code == 0
    offered = shlex.split(done.stdout.partition("next: ")[2])
    assert offered[:3] == ["capt", "pretrain", "capt_distil"]
    job = load_job("capt_distil", offered[3:])
    assert isinstance(job, PairJob)
    assert (job.data.files, job.distillation.vectors) == ([str(half)], *(tmp_path / "real").iterdir())
    mapping["distillation"]["vectors"] = str(tmp_path / "real")
    with pytest.raises(DataError) as caught:
        _task(mapping)
    said = _is_line(caught.value)
    assert "source pairs: 30 of 60 texts have no vector in" in said
    words = shlex.split(said.partition("add them: ")[2])
    assert words[:2] == ["capt", "encode"]
    assert "--length" in words
    assert runner.invoke(app, words[1:], catch_exceptions=False).exit_code == 0
    task = _task(mapping)
    facts = task.job.distillation.teacher
    assert facts is not None
    assert (facts["name"], facts["length"], facts["pooling"]) == ("teacher", 20, "mean")
    (kind,) = (tmp_path / "real").glob("*/identity.json")
    encoded = sum(path.stat().st_size for path in kind.parent.glob("*.ids")) // 20
    assert encoded == len(set(every_text(texts))), "nothing was encoded twice"


def _figures_of_teacher(mapping: dict[str, Any], beir: Path) -> Any:
    (part,) = read_collections(beir, None)
    return RetrievalValidation(RetrievalSection(folders=[beir]))._tokenized(_task(mapping), part).teacher


def test_the_teacher_searches_the_folders_of_validation_too(tmp_path: Path) -> None:
    """Its figures are those of ``capt evaluate`` for any ranks, from the vectors that the store has of both sides."""
    mapping = _mapping(tmp_path)
    teacher, beir = write_encoder(tmp_path / "teacher", "BertModel"), write_beir(tmp_path / "beir", 40, 8)
    options, loaded = EncodeOptions(str(tmp_path / "real")), load_text_encoder(teacher, EncoderOptions())
    embed(loaded, every_text(tmp_path / "texts.jsonl"), "document", options)
    section = evaluate(teacher, [beir], options, EncoderOptions(), RetrievalSettings())["sections"][0]
    mapping["distillation"]["vectors"] = str(tmp_path / "real")
    for found in run_ranks(_figures_of_teacher, 2, mapping, beir):
        for name in METRICS:
            assert found[name] == pytest.approx(section["poolers"]["full"][name], abs=1e-9)
        assert found["ndcg@10"] > 0


def test_tables_and_arrays_are_stores(tmp_path: Path) -> None:
    mapping = _mapping(tmp_path)
    texts = every_text(tmp_path / "texts.jsonl")
    rows = np.stack([_vector(tmp_path / "store", text) for text in texts])

    def written(name: str, content: list[dict[str, Any]]) -> str:
        path = tmp_path / name
        if name.endswith("parquet"):
            import pyarrow
            import pyarrow.parquet

            pyarrow.parquet.write_table(pyarrow.Table.from_pylist(content), path)
        else:
            path.write_text("".join(json.dumps(row) + "\n" for row in content))
        return str(path)

    named = [{"text": text, "label": row.tolist()} for text, row in zip(texts, rows, strict=True)]
    np.save(tmp_path / "rows.npy", rows)
    np.save(tmp_path / "ids.npy", np.arange(len(texts)))
    corpus = written("corpus.jsonl", [{"_id": str(i), "text": text} for i, text in enumerate(texts)])
    given: list[dict[str, Any]] = [
        {"vectors": written("table.jsonl", named)},
        # A text that comes again with its vector, but for a rounding; another column of texts is not read.
        {"vectors": written("again.jsonl", [{"query": "x", **row} for row in [
            *named, {"text": texts[3], "label": (rows[3] * 1.001).tolist()}]])},
        {"vectors": written("table.parquet", [{"sentence": r["text"], "of": r["label"]} for r in named]),
         "vector_column": "of"},
        {"vectors": str(tmp_path / "rows.npy"), "ids": str(tmp_path / "texts.jsonl")},
        {"vectors": str(tmp_path / "rows.npy"), "ids": str(tmp_path / "ids.npy"), "corpus": corpus},
        # Two files say nothing of their models, so that they may be one teacher's.
        {"vectors": str(tmp_path / "table.jsonl"), "query_vectors": written("queries.jsonl", named[::-1])},
    ]  # fmt: skip
    np.save(tmp_path / "objects.npy", np.array(list(map(str, range(len(texts)))), dtype=object))
    whole = [named[0], {"text": "x", "label": [-128, 127] * (WIDTH // 2)}]
    expected = _task(mapping).step_assembler(8, 1, 1, 0)(0, 0)[0]
    for section in given:
        task = _task({**mapping, "distillation": {**mapping["distillation"], **section}})
        found = task.step_assembler(8, 1, 1, 0)(0, 0)[0]
        torch.testing.assert_close(found.teacher_vectors, expected.teacher_vectors, rtol=0, atol=0)
    # A folder as the corpus: its texts decide which vector is whose.
    (tmp_path / "beir").mkdir()
    folder = {"vectors": str(tmp_path / "rows.npy"), "ids": str(tmp_path / "ids.npy"), "corpus": str(tmp_path / "beir")}
    for order in (1, -1):
        written("beir/corpus.jsonl", [{"_id": str(i), "text": text} for i, text in enumerate(texts[::order])])
        task = _task({**mapping, "distillation": {**mapping["distillation"], **folder}})
        found = task.step_assembler(8, 1, 1, 0)(0, 0)[0]
        same = torch.equal(found.teacher_vectors, expected.teacher_vectors)
        assert same == (order == 1)
    faults: list[tuple[dict[str, Any], str]] = [
        ({"vectors": written("nan.jsonl", [named[0], {"text": "x", "label": [float("nan")] * WIDTH}])}, "line 2"),
        ({"vectors": written("zeros.jsonl", [named[0], {"text": "x", "label": [0] * WIDTH}])}, "line 2: .*all zeros"),
        ({"vectors": written("ragged.jsonl", [named[0], {"text": "x", "label": [1.0]}])}, "line 2: a vector of 1 num"),
        ({"vectors": written("whole.jsonl", whole)}, "line 2: 'label' holds whole numbers, as vectors in int8"),
        ({"vectors": str(tmp_path / "rows.npy"), "ids": str(tmp_path / "objects.npy"), "corpus": corpus},
         "objects.npy: no array of numbers or texts"),
        ({"vectors": written("text.jsonl", [{"text": "x"}])}, "no column of vectors among 'text'"),
        ({"vectors": written("both.jsonl", [{"query": texts[0], "document": texts[1], "embedding": rows[0].tolist()}])},
         "both.jsonl: 'query' and 'document' are texts, and a vector is of one: call that one text"),
        ({"vectors": written("half.jsonl", named[:40])},
         r"20 of 60 texts have no vector in .*/half\.jsonl; give it a row with the vector of each text of .*\.jsonl"),
        ({"vectors": str(tmp_path / "rows.npy")}, "an array has no texts: set distillation.ids"),
        ({"vectors": written("two.jsonl", [*named, {"text": texts[3], "label": rows[4].tolist()}])},
         "line 61: another vector of the text .* than in an earlier row"),
        ({"vectors": str(tmp_path / "table.jsonl"), "ids": str(tmp_path / "texts.jsonl")}, "ids names the rows of a"),
        ({"vectors": str(tmp_path / "table.jsonl"), "corpus": corpus}, "corpus has the texts of distillation.ids"),
        ({"vectors": str(tmp_path / "rows.npy"), "ids": corpus.replace("corpus", "zeros")}, "has 2 rows, and .* 60"),
    ]  # fmt: skip
    for section, fault in faults:
        with pytest.raises(UserError, match=fault) as caught:
            _task({**mapping, "distillation": {**mapping["distillation"], **section}})
        _is_line(caught.value)


def _require_graphs(run: Path, exported: Path, texts: list[str], folder: Path) -> None:
    """ONNX has the vectors of sentence-transformers, and in int8 nearly."""
    onnxruntime = pytest.importorskip("onnxruntime", reason="the extra onnx is not installed")
    command(run, folder, to="onnx", quantize="int8")
    inputs = dict(AutoTokenizer.from_pretrained(folder)(texts, padding=True, truncation=True, return_tensors="np"))
    expected = SentenceTransformer(str(exported), device="cpu").encode(texts)
    apart = []
    for name in ("model.onnx", "model_int8.onnx"):
        (rows,) = onnxruntime.InferenceSession(folder / name).run(["sentence_embedding"], inputs)
        apart.append(np.abs(rows - expected).max())
    assert apart[0] < 1e-5 < apart[1] < 0.2
    with pytest.raises(ConfigError, match="--quantize int8 has no meaning with --to sentence-transformers"):
        command(run, folder, to="sentence-transformers", quantize="int8")


@pytest.mark.parametrize("projection", ["drop", "beside", "export"])
def test_a_student_of_another_width_learns_and_is_exported(tmp_path: Path, projection: str) -> None:
    section = {"cosine": 1.0, "projection": projection}
    mapping = _mapping(tmp_path, schedule={"max_steps": 30}, validate={"every": 30}, optimizer={"lr": 1e-2})
    mapping["distillation"] |= section
    assert run_ranks(train_job, 2, mapping) == [0, 0]
    rows = rows_of(mapping["run"]["dir"])
    validated = [row for row in rows if row.get("split") == "validation"]
    assert {"teacher/cosine", "teacher/cosine_p5"} <= validated[0].keys()
    assert "loss/pairs" not in validated[0]
    losses = [row["loss/teacher_cosine"] for row in rows if "split" not in row]
    assert losses[-1] < 0.8 * losses[0]
    run = Path(mapping["run"]["dir"])
    out = command(run, tmp_path / "out", to="sentence-transformers")
    modules = [each["type"].rpartition(".")[2] for each in json.loads((out / "modules.json").read_text())]
    assert modules == ["Transformer", "Pooling", *(["Dense"] if projection == "export" else []), "Normalize"]
    assert (out / TO_TEACHER).is_file() == (projection == "beside")
    if projection == "beside":
        assert load_file(out / TO_TEACHER)["weight"].shape[0] == WIDTH
    card = (out / "README.md").read_text()
    assert "teacher&#39;s dimensions | 12" in card or "teacher's dimensions | 12" in card
    assert "has learnt a larger one" in card
    if projection == "export":
        _require_graphs(run, out, every_text(tmp_path / "texts.jsonl")[:5], tmp_path / "graphs")
    if projection == "drop":
        # The vectors of another model do not continue the run.
        write_vectors(tmp_path / "another", every_text(tmp_path / "texts.jsonl"), WIDTH, model="another")
        mapping["distillation"]["vectors"] = str(tmp_path / "another")
        mapping["schedule"]["max_steps"] = 40
        (said,) = run_ranks(train_job, 1, mapping, True)
        assert "trained on other teacher's vectors than this job reads" in said
        assert isinstance(said, str)
        assert said.startswith(CheckpointError.__name__)


def test_a_random_start_is_said_and_decided_by_the_seed(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    mapping = _mapping(tmp_path)
    starts = []
    for model, seed in (({}, 1), ({"random": True}, 1), ({"random": True}, 1), ({"random": True}, 2)):
        given = {**mapping, "model": {**mapping["model"], **model}, "run": {**mapping["run"], "seed": seed}}
        starts.append(torch.cat([each.flatten() for each in _task(given).build_module().parameters()]).detach())
    loaded, *drawn = starts
    assert not torch.equal(loaded, drawn[0])
    assert torch.equal(drawn[0], drawn[1])
    assert not torch.equal(drawn[0], drawn[2])
    assert "0.77 to the teacher and 0.09 nDCG@10" in caplog.text
