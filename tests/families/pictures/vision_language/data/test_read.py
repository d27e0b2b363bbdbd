"""Every form of file gives the examples it holds, and what is wrong with one is named."""

from __future__ import annotations

import copy
import csv
import gzip
import json
import random
from pathlib import Path
from typing import Any

import pytest

from capt.pretrain.base import files as base_files
from capt.pretrain.base.errors import DataError
from capt.pretrain.regions.picture import picture_name
from capt.pretrain.vision_language.data import files
from capt.pretrain.vision_language.data.examples import Example, coco_name, coco_subtype
from capt.pretrain.vision_language.data.gqa import read_gqa_questions
from capt.pretrain.vision_language.data.read import read_documents, read_examples, task_of
from tests.families.pictures.vision_language.data import forms

CAT, OTHER = "COCO_val2014_000000000042", "COCO_val2014_000000000007"


def _one(tmp_path: Path, value: Any, name: str = "a.json", *, lines: bool = False) -> list[Example]:
    return read_examples([forms.write(tmp_path / name, value, lines=lines)])


@pytest.mark.parametrize("name", ["a.json", "a.json.gz"])
def test_lxmert_pretraining(tmp_path: Path, name: str) -> None:
    assert _one(tmp_path, forms.PRETRAINING, name) == [
        Example(f"{CAT}#mscoco0", (CAT,), "A cat.", kind="mscoco"),
        Example(f"{CAT}#mscoco1", (CAT,), "A cat sits.", kind="mscoco"),
        Example(f"{CAT}#vqa0", (CAT,), "What is it?", {"cat": 1.0, "dog": 0.3}, kind="vqa"),
        Example("2375429#vg0", ("2375429",), "a tree", kind="vg"),
    ]


def test_lxmert_fine_tuning(tmp_path: Path) -> None:
    assert _one(tmp_path, forms.LXMERT_VQA) == [
        Example(42000, (CAT,), "What is it?", {"cat": 1.0, "dog": 0.9}, kind="other"),
        Example(7001, (OTHER,), "Is it red?"),
    ]
    assert _one(tmp_path, forms.LXMERT_GQA) == [Example("201", ("n16",), "Is it red?", {"no": 1.0})]
    pictures = ("dev-850-0-img0", "dev-850-0-img1")
    assert _one(tmp_path, forms.LXMERT_NLVR2) == [Example("dev-850-0-0", pictures, "Two cats.", truth=False)]


def test_vqa_joins_questions_and_annotations_in_any_order(tmp_path: Path) -> None:
    questions = forms.write(tmp_path / "q.json", forms.QUESTIONS)
    annotations = forms.write(tmp_path / "a.json.gz", forms.ANNOTATIONS)
    expected = [
        Example(42000, (CAT,), "What is it?", {"The Cat": 0.9, "cat": 1.0, "dog": 0.9}, kind="other", answer="cat"),
        Example(7001, (OTHER,), "Is it red?", {"yes": 1.0, "no": 0.6, "maybe": 0.3}, kind="yes/no", answer="yes"),
    ]
    assert read_examples([questions, annotations]) == read_examples([annotations, questions]) == expected
    bare = [Example(row.id, row.pictures, row.text) for row in expected]
    assert read_examples([questions]) == bare, "a test set has no answers"


def test_gqa(tmp_path: Path) -> None:
    assert _one(tmp_path, forms.GQA) == [
        Example("201", ("n16",), "Is it red?", {"no": 1.0}, kind="verify"),
        Example("202", ("n16",), "Is it red?", {"yes": 1.0}, kind="verify", counts=False),
    ]
    first, second = read_gqa_questions(tmp_path / "a.json")
    assert (first.balanced, first.entailed, second.balanced, second.answer) == (True, ("202", "201"), False, "yes")
    (own,) = read_gqa_questions(forms.write(tmp_path / "l.json", forms.LXMERT_GQA))
    assert (own.id, own.answer, own.balanced, own.entailed) == ("201", "no", True, ())


def test_nlvr(tmp_path: Path) -> None:
    first, second = _one(tmp_path, forms.NLVR2, lines=True)
    assert first == Example("dev-850-0-0", ("dev-850-0-img0", "dev-850-0-img1"), "Two cats.", truth=False)
    assert second.pictures == ("dev-850-1-img0", "dev-850-1-img1")
    assert second.truth is True
    (alone,) = _one(tmp_path, forms.NLVR2[:1], lines=True)  # a file of one line is both an object and a line
    assert alone == first


def test_captions(tmp_path: Path) -> None:
    assert _one(tmp_path, forms.COCO) == [Example(5, (CAT,), "A cat.")]
    assert _one(tmp_path, forms.COCO_RESULTS) == [Example(0, ("42",), "A cat.")]
    assert _one(tmp_path, forms.COCO_RESULTS, "captions_val2014_x.json") == [Example(0, (CAT,), "A cat.")]
    first, second = _one(tmp_path, forms.FLICKR, "Flickr8k.token.txt")
    assert (first.id, first.pictures, first.text) == ("12_ab.jpg#0", ("12_ab",), "A cat .")
    assert (second.answers, second.truth) == (None, None)


def test_several_files_follow_one_another(tmp_path: Path) -> None:
    paths = [forms.write(tmp_path / "b.json", forms.PRETRAINING), forms.write(tmp_path / "c.json", forms.COCO_RESULTS)]
    assert len(read_examples(paths)) == 5


def test_task_of_each_form(tmp_path: Path) -> None:
    expected = {
        "vqa": [forms.QUESTIONS, forms.ANNOTATIONS, forms.LXMERT_VQA],
        "gqa": [forms.GQA, forms.LXMERT_GQA],
        "nlvr2": [forms.LXMERT_NLVR2],
        None: [forms.PRETRAINING, forms.COCO, forms.COCO_RESULTS, forms.FLICKR],
    }
    for task, values in expected.items():
        for value in values:
            (document,) = read_documents([forms.write(tmp_path / "a.json", value)])
            assert task_of(document) == task
    (document,) = read_documents([forms.write(tmp_path / "a.json", forms.NLVR2, lines=True)])
    assert task_of(document) == "nlvr2"


def test_names_of_pictures() -> None:
    assert coco_subtype("v2_OpenEnded_mscoco_test-dev2015_questions.json") == "test2015"
    assert coco_subtype("captions_val2017.json") is None
    assert coco_subtype("nothing", "mscoco_train2014_x") == "train2014"
    assert coco_subtype("xtrain2014") is None
    assert coco_name(458752, "train2014") == "COCO_train2014_000000458752"
    assert (coco_name(458752, None), coco_name("scene-3", "train2014")) == ("458752", "scene-3")
    assert (picture_name("a/b.JPG"), picture_name("12_ab.jpg.1")) == ("a/b", "12_ab.jpg.1")


def _without(row: dict[str, Any], key: str) -> dict[str, Any]:
    return {k: v for k, v in row.items() if k != key}


WRONG: dict[str, tuple[Any, str]] = {
    "nothing": ("", "the file is empty"),
    "an empty list": ([], "holds no row"),
    "an unknown row": ([{"a": 1}], r"its first row has \['a'\]; known are LXMERT's JSON"),
    "an unknown object": ({"a": 1}, r"its object has \['a'\]"),
    "other text": ("hello\nworld", "begins with 'hello'"),
    "no JSON": ('[{"img_id"', "not valid JSON"),
    "NaN": ('[{"img_id": "x", "sent": "y", "question_id": 1, "label": {"a": NaN}}]', "NaN is not JSON"),
    "a lone surrogate": (
        '[{"img_id": "x", "sent": "\\ud800", "question_id": 1}]',
        "row 1: sent: Input should be a valid string",
    ),
    "a key that occurs twice": (
        '[{"img_id": "x", "sent": "y", "question_id": 1, "question_id": 2}]',
        "the key 'question_id' occurs twice in one object",
    ),
    "a GQA question that occurs twice": (
        '{"7": {"imageId": "1", "question": "a"}, "7": {"imageId": "2", "question": "b"}}',
        "the key '7' occurs twice in one object",
    ),
    "a GQA answer that is not text": (
        '{"7": {"imageId": "1", "question": "a", "answer": "\\ud800"}}',
        "question '7': answer: Input should be a valid string",
    ),
    "a key less": (
        [*forms.LXMERT_VQA, _without(forms.LXMERT_VQA[1], "sent")],
        "row 3: sent: Field required; a row needs question_id, img_id, sent",
    ),
    "a blank sentence": ([{**forms.LXMERT_VQA[0], "sent": " \n"}], "row 1: sent: "),
    "a score above 1": ([{**forms.LXMERT_VQA[0], "label": {"a": 1.5}}], "row 1: label.a: .* less than or equal to 1"),
    "a doubled question": (forms.LXMERT_VQA * 2, "row 3: question_id 42000 occurs twice"),
    "fewer labels": (
        [{**forms.PRETRAINING[0], "labelf": {"vqa": []}}],
        "row 1: 1 sentences but 0 labels of 'vqa'",
    ),
    "labels of nothing": ([{**forms.PRETRAINING[0], "labelf": {"gqa": []}}], "row 1: labelf has 'gqa'"),
    "no answers": (forms.ANNOTATIONS, "holds annotations; name the file of their questions"),
    "no questions": ({"questions": []}, "questions: Input should be a list that is not empty"),
    "a question of text": (
        {"questions": [{"image_id": 1, "question": "a", "question_id": "5"}]},
        r"questions\[0\]: question_id: Input should be a valid integer",
    ),
    "a GQA key less": ({"201": _without(forms.gqa_question("no"), "question")}, "question '201': question: Field"),
    "no balance": ({"201": {**forms.gqa_question("no"), "isBalanced": "yes"}}, "question '201': isBalanced: Input"),
    "no token": (forms.FLICKR + "no number\tA cat.\n", "line 3: 'no number.* is not PICTURE.jpg#k TAB caption"),
    "a picture twice": (
        {**forms.COCO, "images": [*forms.COCO["images"], {"id": 42, "file_name": "other.jpg"}]},
        r"images\[1\]: id 42 occurs twice",
    ),
    "two pictures of one name": (
        {**forms.COCO, "images": [{"id": 42, "file_name": "a/1.jpg"}, {"id": 43, "file_name": "a/1.png"}]},
        r"images\[1\]: 'a/1.png' and 'a/1.jpg' above are both called 'a/1', .* a name of its own",
    ),
    "two pictures of one name in rows": (
        [{"image": name, "caption": "a"} for name in ("x.jpg", "./x.jpg", "x.png")],
        "row 3: 'x.png' and 'x.jpg' above are both called 'x'",
    ),
    "no picture's file": ({**forms.COCO, "images": [{"id": 1}]}, r"images\[0\]: file_name: Field required"),
}


@pytest.mark.parametrize("case", WRONG)
def test_what_is_wrong_is_named(tmp_path: Path, case: str) -> None:
    value, message = WRONG[case]
    path = forms.write(tmp_path / "a.json", value)
    with pytest.raises(DataError, match=message) as caught:
        read_examples([path])
    assert str(path) in str(caught.value)


@pytest.mark.parametrize(
    ("rows", "change", "message"),
    [
        (forms.NLVR2, {"identifier": "dev-850-0"}, "line 2: identifier: String should match pattern"),
        (forms.NLVR2, {"identifier": "dev-850,0-0-0"}, "line 2: identifier"),
        (forms.NLVR2, {"identifier": "dev-850-0-0"}, "line 2: identifier 'dev-850-0-0' occurs twice"),
        (forms.NLVR2, {"label": "true"}, "line 2: label: Input should be 'True' or 'False'"),
    ],
)
def test_what_is_wrong_in_a_line_is_named(
    tmp_path: Path, rows: list[dict[str, Any]], change: dict[str, Any], message: str
) -> None:
    path = forms.write(tmp_path / "a.json", [rows[0], {**rows[1], **change}], lines=True)
    with pytest.raises(DataError, match=message):
        read_examples([path])


def test_questions_and_annotations_that_do_not_fit_are_counted(tmp_path: Path) -> None:
    questions = forms.write(tmp_path / "q.json", forms.QUESTIONS)
    other = copy.deepcopy(forms.ANNOTATIONS)
    other["annotations"][0]["question_id"] = 5
    with pytest.raises(
        DataError, match=r"1 question without annotation \(7001\) and 1 annotation without question \(5"
    ):
        read_examples([questions, forms.write(tmp_path / "a.json", other)])
    other["annotations"][0] = {**forms.ANNOTATIONS["annotations"][0], "image_id": 8}
    with pytest.raises(DataError, match=r"questions\[1\]: image_id 7, but 8 in its annotation"):
        read_examples([questions, forms.write(tmp_path / "a.json", other)])
    other["annotations"] = forms.ANNOTATIONS["annotations"] * 2
    with pytest.raises(DataError, match=r"annotations\[2\]: question_id 7001 occurs twice"):
        read_examples([questions, forms.write(tmp_path / "a.json", other)])


def test_another_number_of_annotators_is_scored_by_the_same_rule(tmp_path: Path) -> None:
    questions = {**forms.QUESTIONS, "questions": forms.QUESTIONS["questions"][:1]}
    annotations = {"annotations": [forms.annotation(42000, 42, ["cat"] * 2 + ["dog"] * 3, "dog")]}
    paths = [forms.write(tmp_path / "q.json", questions), forms.write(tmp_path / "a.json", annotations)]
    (example,) = read_examples(paths)
    # the mean over five: each cat sees one other cat, each dog two; who said dog sees two cats, who said cat three dogs
    assert example.answers == pytest.approx({"cat": (2 / 3 + 3 * 2 / 3) / 5, "dog": (3 * 2 / 3 + 2) / 5})


def test_no_file_and_missing_files_name_the_key(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"data.validation: no file; name one of"):
        read_examples([], what="data.validation")
    with pytest.raises(DataError, match=r"data.train: no file .*nowhere"):
        read_examples([tmp_path / "nowhere"])


def test_sizes_are_bounded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    bomb = tmp_path / "a.json.gz"
    bomb.write_bytes(gzip.compress(b" " * (1 << 20)))
    monkeypatch.setattr(base_files, "_ALWAYS", 1 << 12)
    with pytest.raises(DataError, match="unpack the file and name the result"):
        read_examples([bomb])
    monkeypatch.setattr(files, "LARGEST", 10)
    with pytest.raises(DataError, match="over 10 bytes"):
        files.read_document(forms.write(tmp_path / "a.json", forms.COCO), files.LARGEST)
    whole = gzip.compress(json.dumps(forms.COCO).encode())
    (tmp_path / "torn.json.gz").write_bytes(whole[:-20])
    with pytest.raises(DataError, match="not a whole gzip file"):
        read_examples([tmp_path / "torn.json.gz"])
    (tmp_path / "packed.json").write_bytes(whole)
    with pytest.raises(DataError, match=r"if it is packed, name it .gz"):
        read_examples([tmp_path / "packed.json"])


CAPTIONS = [("p1", "A cat, black."), ("p2", 'He says "no".'), ("p 3", "Two\ttabs")]


@pytest.mark.parametrize("form", ["jsonl", "json", "csv", "tsv", "jsonl.gz"])
def test_own_captions_are_rows_of_image_and_caption(tmp_path: Path, form: str) -> None:
    rows = [{"id": i, "image": f"photos/{image}.jpg", "caption": text} for i, (image, text) in enumerate(CAPTIONS)]
    path = tmp_path / f"captions.{form}"
    if form == "json":
        forms.write(path, rows)
    elif form.startswith("jsonl"):
        forms.write(path, rows, lines=True)
    else:
        with path.open("w", newline="") as file:
            writer = csv.DictWriter(file, ["id", "image", "caption"], delimiter="," if form == "csv" else "\t")
            writer.writeheader()
            writer.writerows(rows)
    expected = [((f"photos/{image}",), text) for image, text in CAPTIONS]
    assert [(row.pictures, row.text) for row in read_examples([path])] == expected


def test_a_picture_may_have_a_number_and_several_captions(tmp_path: Path) -> None:
    path = forms.write(tmp_path / "c.jsonl", [{"image": 7, "caption": ["A.", "B."]}, {"image": "x", "caption": "C."}],
                       lines=True)  # fmt: skip
    assert [(row.id, *row.pictures, row.text) for row in read_examples([path])] == [
        (0, "7", "A."), (1, "7", "B."), (2, "x", "C."),
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("name", "text", "message"),
    [
        ("c.csv", "image,caption\na.jpg,A\nb.jpg\n", "c.csv, line 3: 1 columns, and 2 in the first line"),
        ("c.csv", "image,caption\na.jpg,\n", "c.csv, line 2: caption"),
        ("c.csv", 'image,caption\na.jpg,"open\n', "c.csv, line 2: not a row of a table"),
        ("c.tsv", 'image\tcaption\na.jpg\tA\nb.jpg\t"B" says a sign\n', "c.tsv, line 3: .*each quote in it doubled"),
        ("c.tsv", 'image\tcaption\na.jpg\t"A\nb.jpg\tB"\nc.jpg\tC\n', "c.tsv, line 2: .*joins rows"),
        ("c.csv", "image,caption,image\na.jpg,A,b.jpg\n", "c.csv, line 1: the column image occurs twice"),
        ("c.csv", "picture,caption\na.jpg,A\n", "not a known form.*rows of image and caption"),
        ("c.jsonl", '{"image": "a", "caption": "A"}\n{"image": "b"}\n', "c.jsonl, line 2: caption"),
        ("c.jsonl", '{"image": "a", "caption": "A"}\n{"image": [], "caption": "A"}\n', "c.jsonl, line 2: image"),
    ],
)
def test_own_captions_that_lack_something_are_named(tmp_path: Path, name: str, text: str, message: str) -> None:
    with pytest.raises(DataError, match=message):
        read_examples([forms.write(tmp_path / name, text)])


def test_quotes_that_are_text_never_join_rows_of_a_table(tmp_path: Path) -> None:
    """Rows between tabs as other tools write them, with quotes wherever people type them: read whole, or refused."""
    rng, whole = random.Random(0), 0
    for _ in range(400):
        texts = ["".join(rng.choice(('"', "a", " b", "'")) for _ in range(rng.randint(1, 4))) for _ in range(4)]
        columns = rng.choice(("image\tcaption", "caption\timage"))
        rows = [f"{i}.jpg\tx{text}" if rng.random() < 0.5 else f"{i}.jpg\t{text}x" for i, text in enumerate(texts)]
        if columns.startswith("caption"):
            rows = ["\t".join(reversed(row.split("\t"))) for row in rows]
        path = forms.write(tmp_path / "c.tsv", "\n".join([columns, *rows]) + "\n")
        try:
            examples = read_examples([path])
        except DataError:
            continue
        assert [row.pictures for row in examples] == [(str(i),) for i in range(4)], rows
        whole += 1
    assert 40 < whole < 360


def test_the_fields_that_the_guide_shows_are_those_that_are_read(tmp_path: Path) -> None:
    guide = (Path(__file__).parents[5] / "docs/guide/vision_language.md").read_text()
    section = guide[guide.index("### Captions of your own") : guide.index("### Questions and statements of your own")]
    for name, kind, count in (("c.jsonl", "json", 3), ("c.csv", "text", 2)):
        block = section.split(f"```{kind}\n")[1].split("```")[0]
        read = read_examples([forms.write(tmp_path / name, block)])
        assert len(read) == count
        assert read[0].pictures == ("photos/beach",)
    section = guide[guide.index("### Questions and statements of your own") :]
    rows = [line.split("|") for line in section.splitlines() if line.startswith("|") and '{"' in line][:4]
    assert len(rows) == 4
    for number, (_, task, _, fields, _) in enumerate(rows):
        path = forms.write(tmp_path / f"{number}.json", [json.loads(fields.strip().strip("`"))])
        assert len(read_examples([path])) == 1
        assert task_of(read_documents([path])[0]) == (task.strip().strip("`") if "`" in task else None)
