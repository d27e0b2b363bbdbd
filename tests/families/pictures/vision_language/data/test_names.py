"""A picture has one name: every reader of data finds it in every store, with folders or without, with any ending."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path, PurePosixPath
from typing import Any

import numpy as np
import pytest

from capt.pretrain.base.errors import DataError
from capt.pretrain.regions.extract.find import find_pictures
from capt.pretrain.regions.importing import import_regions
from capt.pretrain.regions.picture import ENDINGS, Damage
from capt.pretrain.regions.store import RegionStore
from capt.pretrain.regions.writer import write_store
from capt.pretrain.vision_language.data.read import read_examples
from tests.families.pictures.regions.pictures import encode, random_pictures
from tests.families.pictures.vision_language.data.forms import gqa_question

FILES = ["a/1.jpg", "a/2.PNG", "b/1.jpg", "b/deep/x.v2.tiff", "top.jpeg"]
"""Pictures below one folder, of which two differ in their folders alone."""


def _lines(rows: list[Any]) -> str:
    return "".join(f"{json.dumps(row)}\n" for row in rows)


READERS: dict[str, tuple[str, Callable[[list[str]], str]]] = {
    "rows": ("c.jsonl", lambda files: _lines([{"image": file, "caption": "text"} for file in files])),
    "a list": ("c.json", lambda files: json.dumps([{"image": file, "caption": "text"} for file in files])),
    "csv": ("c.csv", lambda files: "image,caption\n" + "".join(f"{file},text\n" for file in files)),
    "tsv": ("c.tsv", lambda files: "image\tcaption\n" + "".join(f"{file}\ttext\n" for file in files)),
    "COCO": ("c.json", lambda files: json.dumps({
        "images": [{"id": i, "file_name": file} for i, file in enumerate(files)],
        "annotations": [{"image_id": i, "caption": "text"} for i in range(len(files))]})),
    "COCO's results": ("c.json", lambda files: json.dumps([{"image_id": file, "caption": "text"} for file in files])),
    "Flickr8k": ("c.token", lambda files: "".join(f"{file}#0\ttext\n" for file in files)),
    "pretraining": ("c.json", lambda files: json.dumps([
        {"img_id": file, "sentf": {"vg": ["text"]}} for file in files])),
    "VQA": ("c.json", lambda files: json.dumps([
        {"img_id": file, "sent": "text", "question_id": i} for i, file in enumerate(files)])),
    "GQA": ("c.json", lambda files: json.dumps([
        {"img_id": file, "sent": "text", "question_id": f"q{i}"} for i, file in enumerate(files)])),
    "official GQA": ("c.json", lambda files: json.dumps({
        f"q{i}": {**gqa_question("no"), "imageId": file} for i, file in enumerate(files)})),
    "NLVR2": ("c.json", lambda files: json.dumps([
        {"identifier": f"s-{i}-0", "img0": file, "img1": file, "sent": "text"} for i, file in enumerate(files)])),
}  # fmt: skip


@pytest.fixture(scope="module")
def stores(tmp_path_factory: pytest.TempPathFactory) -> dict[str, tuple[RegionStore, list[str]]]:
    """Stores of the pictures by how they are called, and their names in the order of `FILES`."""
    folder = tmp_path_factory.mktemp("stores")
    for file in FILES:
        path = folder / "photos" / file
        path.parent.mkdir(parents=True, exist_ok=True)
        path.touch()
    pictures = list(random_pictures(len(FILES)))
    found = find_pictures([folder / "photos"], "path", Damage(skip=False))
    names = {str(each.path.relative_to(folder / "photos")): each.name for each in found}
    made = {"extracted by path": [names[file] for file in FILES], "imported": FILES}
    write_store(
        folder / "extracted",
        [picture._replace(id=name) for picture, name in zip(pictures, made["extracted by path"], strict=True)],
        feature_dtype="fp32",
        features_of={"backend": "test"},
    )
    lines = [encode(picture._replace(id=file)) for picture, file in zip(pictures, FILES, strict=True)]
    (folder / "rows.tsv").write_bytes(b"".join(lines))
    import_regions(folder / "imported", [folder / "rows.tsv"])
    opened = {"extracted by path": folder / "extracted", "imported": folder / "imported"}
    return {key: (RegionStore.open(path), made[key]) for key, path in opened.items()}


@pytest.mark.parametrize("reader", READERS)
def test_every_reader_finds_every_picture(
    reader: str, stores: dict[str, tuple[RegionStore, list[str]]], tmp_path: Path
) -> None:
    name, write = READERS[reader]
    written = {
        "as the file is called": FILES,
        "with more folders": [f"/data/photos/{file}" for file in FILES],
        "as in a folder": [f"./{file}" for file in FILES],
        "without the ending": [str(PurePosixPath(file).with_suffix("")) for file in FILES],
    }
    for how, files in written.items():
        (tmp_path / name).write_text(write(files))
        examples = read_examples([tmp_path / name])
        asked = [picture for example in examples for picture in example.pictures]
        for store, names in stores.values():
            rows = store.rows(asked)
            expected = np.repeat(store.rows(names), len(asked) // len(names))
            assert rows.tolist() == expected.tolist(), (how, asked)
            assert len(set(rows.tolist())) == len(FILES)


@pytest.mark.parametrize("ending", [*ENDINGS, ".JPG", ".Png"])
def test_every_ending_that_extraction_takes_is_one_in_data(ending: str, tmp_path: Path) -> None:
    (tmp_path / "photos").mkdir()
    (tmp_path / "photos" / f"one{ending}").touch()
    for names in ("stem", "path"):
        assert [each.name for each in find_pictures([tmp_path / "photos"], names, Damage(skip=False))] == ["one"]
    (tmp_path / "c.jsonl").write_text(_lines([{"image": f"one{ending}", "caption": "text"}]))
    assert read_examples([tmp_path / "c.jsonl"])[0].pictures == ("one",)


def test_folders_that_a_store_lacks_are_passed_over_unless_they_tell_pictures_apart(tmp_path: Path) -> None:
    pictures = [picture._replace(id=name) for picture, name in zip(random_pictures(2), ("1", "2"), strict=True)]
    write_store(tmp_path / "store", pictures, feature_dtype="fp32", features_of={"backend": "test"})
    store = RegionStore.open(tmp_path / "store")
    one, two = store.rows(["1", "2"]).tolist()
    assert store.rows(["a/1", "photos/a/1", "1", "b/2.jpg"]).tolist() == [one, one, one, two]
    with pytest.raises(DataError, match=r"'a/1' and 'b/1' are both its picture '1': make the store with --names path"):
        store.rows(["a/1", "b/1"])
    with pytest.raises(DataError, match="1 picture not in the region store"):
        store.rows(["a/3"])
