"""From pictures to a store, compared with transformers run by hand on the same pictures."""

from __future__ import annotations

import json
import logging
import tarfile
from pathlib import Path

import numpy as np
import pytest
import torch
import transformers
from PIL import Image
from transformers.models.auto.image_processing_auto import get_image_processor_class_from_name

from capt.pretrain.base.errors import CheckpointError, ConfigError, DataError
from capt.pretrain.base.quiet import quiet_transformers
from capt.pretrain.regions.extract.parts import ExtractOptions
from capt.pretrain.regions.extract.run import extract_regions
from capt.pretrain.regions.picture import feature_differences
from capt.pretrain.regions.store import Regions, RegionStore
from tests.families.pictures.regions.extract.support import as_bytes, picture
from tests.support import Capt

SIZES = [(60, 40), (40, 60), (60, 40), (96, 32), (33, 47)]
CLASSES = {
    "dinov3": "DINOv3ViTModel",
    "dinov3_convnext": "DINOv3ConvNextModel",
    "resnet": "ResNetModel",
    "convnext": "ConvNextModel",
    "vit": "ViTModel",
    "clip": "CLIPModel",
}
CLASSES |= {"dinov2": "Dinov2WithRegistersModel", "siglip": "SiglipVisionModel"}
CLASSES |= {"detr": "DetrForObjectDetection", "conditional_detr": "ConditionalDetrForObjectDetection"}


@pytest.fixture(scope="module")
def pictures(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("pictures")
    for number, (width, height) in enumerate(SIZES):
        (folder / f"p{number}.png").write_bytes(as_bytes(picture(width, height, number)))
    return folder


def _extract(places: Path, out: Path, **options: object) -> RegionStore:
    extract_regions([places], out, ExtractOptions(**{"dtype": "fp32", "device": "cpu", **options}))  # type: ignore[arg-type]
    return RegionStore.open(out)


def _all(store: RegionStore) -> Regions:
    return store.regions(np.arange(len(store)))


def _by_hand(folder: Path, kind: str, image: Image.Image, **options: object) -> tuple[object, torch.Tensor]:
    """The output of transformers' own class on its own processor's pixels, one picture at a time."""
    keys = json.loads((folder / "preprocessor_config.json").read_text())
    name = keys.pop("image_processor_type").replace("FeatureExtractor", "ImageProcessor").removesuffix("Fast")
    name = name.replace("DINOv3ViT", "ViT")  # DINOv3's own has no Pillow form
    processor = get_image_processor_class_from_name(f"{name}Pil")(**keys)
    pixels = processor(images=[image], return_tensors="pt", **options)["pixel_values"]
    with quiet_transformers(), torch.no_grad():
        model = getattr(transformers, CLASSES[kind]).from_pretrained(folder).eval()
        if kind == "clip":
            model = model.vision_model
        return model(pixel_values=pixels), pixels


@pytest.mark.parametrize("kind", ["resnet", "convnext"])
def test_grid(models: Path, pictures: Path, tmp_path: Path, kind: str) -> None:
    """With the folder's own crop; the cells are the means of the map's places."""
    cells = 2 if kind == "resnet" else 5
    regions = _all(_extract(pictures, tmp_path / "s", backend="grid", model=models / kind, grid=cells, fit="crop"))
    for number, size in enumerate(SIZES):
        output, _ = _by_hand(models / kind, kind, picture(*size, number))
        expected = torch.nn.functional.adaptive_avg_pool2d(output.last_hidden_state, cells)[0].flatten(1).T  # type: ignore[attr-defined]
        np.testing.assert_allclose(regions.features[number], expected, atol=1e-5)


@pytest.mark.parametrize(("kind", "others"), [("vit", 1), ("clip", 1), ("dinov2", 4), ("siglip", 0), ("dinov3", 3)])
def test_vit(models: Path, pictures: Path, tmp_path: Path, kind: str, others: int) -> None:
    """The whole picture, stretched to the input; every patch, and no token that belongs to none."""
    store = _extract(pictures, tmp_path / "s", backend="vit", model=models / kind, batch=3)
    regions = _all(store)
    assert regions.features.shape == (5, 16, 32)
    whole = {"size": {"height": 32, "width": 32}, "do_center_crop": False}
    for number, size in enumerate(SIZES):
        output, _ = _by_hand(models / kind, kind, picture(*size, number), **whole)
        np.testing.assert_allclose(regions.features[number], output.last_hidden_state[0, others:], atol=1e-5)  # type: ignore[attr-defined]
    edges = np.arange(4) / 4
    np.testing.assert_allclose(regions.boxes[0, :, 0], np.tile(edges, 4))
    np.testing.assert_allclose(regions.boxes[0, :, 3], np.repeat(edges, 4) + 0.25)
    assert store.manifest.features_of["preprocessing"]["fit"] == "whole"


def test_the_cells_of_dinov3s_convolutions(models: Path, pictures: Path, tmp_path: Path) -> None:
    """Its output is a sequence that begins with the mean of the map."""
    model = models / "dinov3_convnext"
    regions = _all(_extract(pictures, tmp_path / "s", backend="grid", model=model, grid=2))
    for number, size in enumerate(SIZES):
        output, _ = _by_hand(model, "dinov3_convnext", picture(*size, number))
        np.testing.assert_allclose(regions.features[number], output.last_hidden_state[0, 1:], atol=1e-5)  # type: ignore[attr-defined]


def test_siglip2_sees_pictures_in_their_proportions(models: Path, pictures: Path, tmp_path: Path) -> None:
    """The patches of transformers' own model on its own processor's output, without its padding."""
    folder = models / "siglip2"
    store = _extract(pictures, tmp_path / "s", backend="vit", model=folder, batch=3)
    keys = json.loads((folder / "preprocessor_config.json").read_text())
    keys.pop("image_processor_type")
    processor = get_image_processor_class_from_name("Siglip2ImageProcessorPil")(**keys)
    with quiet_transformers():
        model = transformers.Siglip2VisionModel.from_pretrained(folder).eval()
    counts = set()
    for number, size in enumerate(SIZES):
        given = processor(images=[picture(*size, number)], return_tensors="pt")
        rows, columns = given["spatial_shapes"][0].tolist()
        counts.add((rows, columns))
        with torch.no_grad():
            expected = model(**given).last_hidden_state[0, : rows * columns]
        read = store.picture(f"p{number}")
        np.testing.assert_allclose(read.features, expected, atol=1e-5)
        np.testing.assert_allclose(
            read.boxes[-1], [size[0] * (1 - 1 / columns), size[1] * (1 - 1 / rows), *size], rtol=1e-5
        )
    assert len(counts) > 1
    with pytest.raises(CheckpointError, match="--fit whole"):
        _extract(pictures, tmp_path / "t", backend="vit", model=folder, fit="crop")


@pytest.mark.parametrize("kind", ["detr", "conditional_detr"])
def test_detr(models: Path, pictures: Path, tmp_path: Path, kind: str) -> None:
    """Every query by transformers' own reading of the output; their order is that of their confidence."""
    options = {"backend": "detr", "model": models / kind, "threshold": 0.0, "most": 7}
    regions = _all(_extract(pictures, tmp_path / "s", **options))
    for number, (width, height) in enumerate(SIZES):
        output, _ = _by_hand(models / kind, kind, picture(width, height, number))
        if kind == "detr":
            scores, classes = output.logits[0].softmax(-1)[:, :-1].max(-1)  # type: ignore[attr-defined]
        else:
            scores, classes = output.logits[0].sigmoid().max(-1)  # type: ignore[attr-defined]
        best = scores.argsort(descending=True)[:7]
        np.testing.assert_allclose(regions.features[number], output.last_hidden_state[0, best], atol=1e-5)  # type: ignore[attr-defined]
        assert regions.object_scores is not None
        assert regions.object_ids is not None
        np.testing.assert_allclose(regions.object_scores[number], scores[best], atol=1e-6)
        assert regions.object_ids[number].tolist() == classes[best].tolist()
        x, y, w, h = output.pred_boxes[0, best].unbind(-1)  # type: ignore[attr-defined]
        boxes = torch.stack([x - w / 2, y - h / 2, x + w / 2, y + h / 2], -1).clamp(0, 1)
        np.testing.assert_allclose(regions.boxes[number], boxes, atol=1e-5)


def test_a_threshold_leaves_at_least_one_region(models: Path, pictures: Path, tmp_path: Path) -> None:
    options = {"backend": "detr", "model": models / "detr"}
    every = _all(_extract(pictures, tmp_path / "all", threshold=0.0, most=12, **options))
    assert every.object_scores is not None
    middle = float(np.median(every.object_scores))
    some = _extract(pictures, tmp_path / "some", threshold=middle, most=12, **options)
    assert some.counts(np.arange(5)).tolist() == np.maximum((every.object_scores >= middle).sum(1), 1).tolist()
    one = _extract(pictures, tmp_path / "one", threshold=0.999, **options)
    assert one.counts(np.arange(5)).tolist() == [1] * 5


@pytest.mark.parametrize(("backend", "kind"), [("grid", "resnet"), ("vit", "dinov2"), ("detr", "detr")])
def test_the_batch_changes_nothing(models: Path, pictures: Path, tmp_path: Path, backend: str, kind: str) -> None:
    """Pictures of other sizes beside it would pad a picture, and a detector would see the padding."""
    options = {"backend": backend, "model": models / kind, "grid": 2 if backend == "grid" else None}
    options |= {"threshold": 0.0} if backend == "detr" else {}
    one, four = (_extract(pictures, tmp_path / str(n), batch=n, **options) for n in (1, 4))
    assert one.manifest.features_of == four.manifest.features_of
    assert one.manifest.sources == four.manifest.sources
    for a, b in zip(_all(one), _all(four), strict=True):
        if a is not None:
            np.testing.assert_allclose(a, b, atol=2e-5)


def test_one_bright_cell_is_where_its_box_is(models: Path, tmp_path: Path) -> None:
    """A patch embedding sees its patch alone: only the bright cell's input differs from a dark picture's."""
    width, height, column, row = 80, 40, 3, 1
    dark = Image.new("RGB", (width, height))
    bright = dark.copy()
    bright.paste("white", (column * 20, row * 10, column * 20 + 20, row * 10 + 10))
    (tmp_path / "pictures").mkdir()
    for name, image in (("bright", bright), ("dark", dark)):
        (tmp_path / f"pictures/{name}.png").write_bytes(as_bytes(image))
    folder = tmp_path / "model"
    torch.manual_seed(0)
    keys = json.loads((models / "convnext/preprocessor_config.json").read_text()) | {"resample": 0}
    config = transformers.ConvNextConfig(hidden_sizes=[8], depths=[0], num_stages=1, patch_size=96)
    with quiet_transformers():
        transformers.ConvNextModel(config).save_pretrained(folder)
    (folder / "preprocessor_config.json").write_text(json.dumps(keys))
    regions = _all(_extract(tmp_path / "pictures", tmp_path / "s", backend="grid", model=folder, grid=4))
    (changed,) = np.flatnonzero(np.abs(regions.features[0] - regions.features[1]).max(1) > 1e-3)
    assert (regions.boxes[0, changed] * [width, height, width, height]).tolist() == [60, 10, 80, 20]


def test_damaged_pictures_are_named_or_counted(
    models: Path, pictures: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    folder = tmp_path / "pictures"
    folder.mkdir()
    for name, content in (("a", as_bytes(picture())), ("b", b""), ("c", as_bytes(picture())[:200]), ("d", b"text")):
        (folder / f"{name}.png").write_bytes(content)
    options = {"backend": "vit", "model": models / "vit", "device": "cpu"}
    with pytest.raises(DataError, match=r"b\.png: an empty file; --skip-damaged leaves such pictures out"):
        extract_regions([folder], tmp_path / "s", ExtractOptions(**options))  # type: ignore[arg-type]
    assert not (tmp_path / "s").exists()
    with caplog.at_level(logging.WARNING):
        manifest, damage = extract_regions([folder], tmp_path / "s", ExtractOptions(**options, skip_damaged=True))  # type: ignore[arg-type]
    assert manifest.pictures == manifest.sources[0].pictures == 1
    assert [Path(where).name for where in damage.skipped] == ["b.png", "c.png", "d.png"]
    assert manifest.sources[0].left_out == damage.skipped
    assert caplog.text.count("left out: ") == 3
    (folder / "a.png").unlink()
    with pytest.raises(DataError, match="no pictures"):
        extract_regions([folder], tmp_path / "t", ExtractOptions(**options, skip_damaged=True))  # type: ignore[arg-type]


def test_what_was_left_out_is_listed_with_its_own_place(models: Path, tmp_path: Path) -> None:
    for place, good in (("pictures", "a"), ("pictures/inner", "c"), ("pictures2", "e")):
        folder = tmp_path / place
        folder.mkdir(parents=True)
        (folder / f"{good}.png").write_bytes(as_bytes(picture()))
        (folder / f"bad-{good}.png").write_bytes(b"text")
    places = [tmp_path / "pictures", tmp_path / "pictures2"]
    options = ExtractOptions(backend="vit", model=models / "vit", device="cpu", skip_damaged=True)
    manifest, _ = extract_regions(places, tmp_path / "store", options)
    assert {
        Path(source.name).name: sorted(Path(where).name for where in source.left_out) for source in manifest.sources
    } == {
        "pictures": ["bad-a.png", "bad-c.png"],
        "pictures2": ["bad-e.png"],
    }


def test_what_makes_other_features_is_in_the_manifest(models: Path, pictures: Path, tmp_path: Path) -> None:
    given = {"backend": "vit", "model": models / "clip"}
    of = [
        _extract(pictures, tmp_path / str(n), **{**given, **more}).manifest.features_of
        for n, more in enumerate(({}, {"batch": 2}, {"grid": 2}, {"fit": "crop"}, {"model": models / "siglip"}))
    ]
    assert feature_differences(of[0], of[1]) == ""
    assert feature_differences(of[0], of[2]) == "options.grid is None and 2"
    assert feature_differences(of[0], of[3]) == (
        "options.fit is 'whole' and 'crop'; preprocessing.fit is 'whole' and 'crop'"
    )
    text = feature_differences(of[0], of[4])
    assert text.startswith("class is 'CLIPVisionModel' and 'SiglipVisionModel'; config_sha256 is ")
    assert text.endswith(" more")


@pytest.mark.parametrize(
    ("options", "error"),
    [
        ({"backend": "yolo"}, "--backend is grid or vit or detr, got 'yolo'"),
        ({"backend": "detr", "grid": 3}, "belong to the backends grid and vit"),
        ({"batch": 0}, "--batch is a number from 1"),
        ({"threshold": 1.5}, "--threshold is a confidence"),
        ({"most_pixels": 10**12}, "--most-pixels is a number from 1 to 178,956,970"),
        ({"device": "cuda:77"}, "--device cuda:77"),
        ({"device": "tea"}, "--device tea"),
    ],
)
def test_options_that_make_no_sense(models: Path, pictures: Path, tmp_path: Path, options: dict, error: str) -> None:  # type: ignore[type-arg]
    with pytest.raises(ConfigError, match=error):
        _extract(pictures, tmp_path / "s", **{"backend": "vit", "model": models / "vit", **options})


@pytest.mark.realdata
@pytest.mark.parametrize(("backend", "kind"), [("grid", "convnext"), ("vit", "clip"), ("detr", "detr")])
def test_real_pictures_by_the_command_line(
    models: Path, data_folder: Path, tmp_path: Path, capt: Capt, backend: str, kind: str
) -> None:
    """The 400 x 100 RGBA pictures of NLVR v1, out of their archive."""
    archive = tmp_path / "images.tar"
    with tarfile.open(data_folder / "vl/nlvr1/images.tar") as tar, tarfile.open(archive, "w") as small:
        members = [member for member in tar if member.isfile()][:40]  # all 1,974 would take long
        for member in members:
            small.addfile(member, tar.extractfile(member))
    words = ("regions", "extract", archive, "--backend", backend, "--model", models / kind, "--json")
    code, out, _ = capt(*words, "--out", tmp_path / "s", "--batch", "64", "--device", "cpu")
    assert code == 0
    told = json.loads(out)
    assert told["pictures"] == len(members) == 40
    store = RegionStore.open(tmp_path / "s")
    assert store.rows([Path(members[-1].name).stem]).tolist() == [len(members) - 1]
    regions = _all(store)
    assert np.isfinite(regions.features).all()
    assert (regions.object_ids is None) == (backend != "detr")
    pair = regions.features[:2].astype(np.float32)
    assert np.abs(pair[0] - pair[1]).max() > 1e-3  # other pictures, other features


def test_the_command_says_what_is_wrong(models: Path, tmp_path: Path, capt: Capt) -> None:
    words = ("regions", "extract", tmp_path, "--model", models / "vit", "--out", tmp_path / "s")
    code, _, err = capt(*words)
    assert code == 2
    assert "no pictures" in err
    (tmp_path / "p.png").write_bytes(as_bytes(picture()))
    assert "--backend vit reads it" in capt(*words)[2]
    with pytest.raises(CheckpointError):
        _extract(tmp_path, tmp_path / "s", backend="grid", model=models / "vit")
