"""Statements about three boxes: their truth against a second reading of their meaning, and against people's."""

from __future__ import annotations

import json
import re
from collections import Counter
from pathlib import Path
from random import Random
from typing import Any

import pytest

from pretrain.vision_language.data.read import read_examples
from pretrain.vision_language.microworld.nlvr1 import scattered, towers
from pretrain.vision_language.microworld.nlvr1.meaning import Amount, Meaning
from pretrain.vision_language.microworld.nlvr1.scenes import Item, draw_scattered, draw_towers, record
from pretrain.vision_language.microworld.nlvr1.stems import Stem, draw_stem, write_rows
from pretrain.vision_language.microworld.nlvr1.wording import Words, draw_amount, hurried

_COLOURS = {"Black": "black", "#0099ff": "blue", "Yellow": "yellow"}

Row = list[list[dict[str, Any]]]


def enough(amount: Amount, count: int) -> bool:
    how, number = amount
    return (how, count < number) == ("at most", True) or count == number or (how == "at least" and count > number)


def upwards(box: list[dict[str, Any]]) -> list[dict[str, Any]]:
    return sorted(box, key=lambda item: -item["y_loc"])


def colour(item: dict[str, Any]) -> str:
    return _COLOURS[item["color"]]


def edges(item: dict[str, Any]) -> set[str]:
    x, y, size = item["x_loc"], item["y_loc"], item["size"]
    found = {"left": x == 0, "top": y == 0, "right": x + size == 100, "bottom": y + size == 100}
    return {edge for edge, touched in found.items() if touched}


def chosen(items: Any, box: list[dict[str, Any]]) -> list[dict[str, Any]]:
    box = upwards(box)
    if items.level is not None:
        place = len(box) - 1 if items.level == -1 else items.level
        box = [item for number, item in enumerate(box) if number == place]
    if items.colours:
        box = [item for item in box if colour(item) in items.colours]
    if items.shape:
        box = [item for item in box if item["type"] == items.shape]
    if items.size:
        box = [item for item in box if item["size"] == items.size]
    if items.touching == "edge":
        box = [item for item in box if edges(item)]
    elif items.touching == "corner":
        box = [item for item in box if edges(item) & {"left", "right"} and edges(item) & {"top", "bottom"}]
    elif items.touching:
        box = [item for item in box if items.touching in edges(item)]
    if items.apart:
        box = [item for item in box if not edges(item)]
    return box


def box_is(test: Any, box: list[dict[str, Any]]) -> bool:
    colours = [colour(item) for item in upwards(box)]
    text = "".join({"black": "k", "blue": "b", "yellow": "y"}[c] for c in colours)
    letter = {"black": "k", "blue": "b", "yellow": "y"}
    match type(test).__name__:
        case "Holds":
            return enough(test.amount, len(chosen(test.items, box)))
        case "Palette":
            return sorted(set(colours)) == sorted(test.colours)
        case "Colourful":
            return len(set(colours)) == test.number
        case "Over":
            pair = letter[test.lower] + letter[test.upper]
            return text.endswith(pair) if test.top else pair in text
        case "Stacked":
            runs = re.findall(f"{letter[test.colour]}+", text)
            return max(map(len, runs), default=0) == test.number
        case "Between":
            mine = letter[test.colour]
            return any(f"{other}{mine}{other}" in text for other in set("kby") - {mine})
    raise AssertionError(test)


def said_truly(meaning: Any, row: Row) -> bool:
    match type(meaning).__name__:
        case "HowManyBoxes":
            return enough(meaning.amount, len([box for box in row if all(box_is(t, box) for t in meaning.tests)]))
        case "HowManyItems":
            return enough(meaning.amount, sum(len(chosen(meaning.items, box)) for box in row))
        case "Every":
            counts = [(len(chosen(meaning.items, b)), _both(meaning.items, meaning.are, b)) for b in row]
            return sum(a for a, _ in counts) > 0 and all(a == b for a, b in counts)
        case "Together":
            counts_in = sorted(len(chosen(meaning.items, box)) for box in row)
            return counts_in[:2] == [0, 0] and counts_in[2] >= 2
        case "Alike":
            towers_up = [upwards(box) for box in row]
            values = [{"height": len(t), "base": colour(t[0]), "top": colour(t[-1])}[meaning.what] for t in towers_up]
            return enough(meaning.amount, Counter(values).most_common(1)[0][1])
        case "The":
            found = [box for box in row if all(box_is(t, box) for t in meaning.which)]
            return bool(found) and all(box_is(t, box) for box in found for t in meaning.tests)
        case "WallColours":
            return len({colour(item) for box in row for item in box if edges(item)}) == meaning.number
        case "AllOf":
            return all(said_truly(part, row) for part in meaning.parts)
    raise AssertionError(meaning)


def _both(items: Any, are: Any, box: list[dict[str, Any]]) -> int:
    return len([item for item in chosen(items, box) if any(item is other for other in chosen(are, box))])


@pytest.fixture(scope="module")
def stems() -> list[Stem]:
    return [draw_stem(11, number) for number in range(60)]


def test_truths_are_those_of_the_meaning(stems: list[Stem]) -> None:
    kinds = Counter[str]()
    for stem in stems:
        assert [truth for _, truth in stem.scenes] == [True, True, False, False]
        for boxes, truth in stem.scenes:
            assert said_truly(stem.meaning, record(boxes)) is truth, (stem.sentence, stem.meaning, record(boxes))
        kinds[type(stem.meaning).__name__] += 1
    assert len(kinds) >= 5


def counted(meaning: Any, row: Row) -> int | None:
    match type(meaning).__name__:
        case "HowManyBoxes":
            return len([box for box in row if all(box_is(t, box) for t in meaning.tests)])
        case "HowManyItems":
            return len([item for box in row for item in chosen(meaning.items, box)])
        case "Alike":
            ends = {"height": len, "base": lambda b: colour(upwards(b)[0]), "top": lambda b: colour(upwards(b)[-1])}
            return Counter(map(ends[meaning.what], row)).most_common(1)[0][1]
        case "WallColours":
            return len(Counter(colour(item) for box in row for item in box if edges(item)))
    return None


def test_counts_are_those_of_the_meaning(stems: list[Stem], tmp_path: Path) -> None:
    list(write_rows(tmp_path / "rows.json", range(60), seed=11))
    rows = [json.loads(line) for line in (tmp_path / "rows.json").read_text().splitlines()]
    expected = [counted(stem.meaning, record(boxes)) for stem in stems for boxes, _ in stem.scenes]
    assert [row.get("count") for row in rows] == expected
    assert None in expected
    assert len(set(expected)) > 4
    for example, number in zip(read_examples([tmp_path / "rows.json"]), expected, strict=True):
        truth = {str(example.truth).lower(): 1.0}
        assert example.answers == (truth if number is None else truth | {str(number): 1.0})


def test_both_evaluations_agree_on_any_scene() -> None:
    rng, truths = Random(5), Counter[bool]()
    for number in range(900):
        module, draw = ((towers, draw_towers), (scattered, draw_scattered))[number % 2]
        _, template = module.TEMPLATES[number // 2 % len(module.TEMPLATES)]
        text, meaning = template(Words(rng))
        boxes = draw(rng)
        truths[meaning.holds(boxes)] += 1
        assert meaning.holds(boxes) is said_truly(meaning, record(boxes)), (text, meaning, record(boxes))
    assert min(truths.values()) > 80


def test_scenes_are_of_the_real_kind(stems: list[Stem]) -> None:
    styles = Counter[str]()
    for stem in stems:
        for boxes, _ in stem.scenes:
            assert len(boxes) == 3
            items = [item for box in boxes for item in box]
            is_tower = all((item.x, item.size, item.shape) == (40, 20, "square") for item in items)
            styles["towers" if is_tower else "scattered"] += 1
            for box in boxes:
                assert 1 <= len(box) <= (4 if is_tower else 7)
                assert not is_tower or [item.y for item in box] == [80, 59, 38, 17][: len(box)]
                for item in box:
                    assert min(item.distances().values()) >= 0
                    assert all(_apart(item, other) for other in box if other is not item)
    assert 0.5 < styles["towers"] / styles.total() < 0.85


def _apart(one: Item, other: Item) -> bool:
    across = one.x + one.size <= other.x or other.x + other.size <= one.x
    return across or one.y + one.size <= other.y or other.y + other.size <= one.y


def test_some_false_scenes_differ_little_from_true_ones(stems: list[Stem]) -> None:
    near = 0
    for stem in stems:
        holdings = [Counter((i.size, i.shape, i.colour) for box in boxes for i in box) for boxes, _ in stem.scenes]
        near += any(((true - false) + (false - true)).total() <= 2 for true in holdings[:2] for false in holdings[2:])
    assert 0.3 < near / len(stems) < 1  # of a stem's two pairs, three in ten are of this kind


def test_rows_are_read_and_do_not_depend_on_their_file(tmp_path: Path) -> None:
    list(write_rows(tmp_path / "a.json", range(6), seed=2))
    list(write_rows(tmp_path / "b.json", range(3, 6), seed=2))
    lines = (tmp_path / "a.json").read_text().splitlines()
    assert (tmp_path / "b.json").read_text().splitlines() == lines[12:]
    examples = read_examples([tmp_path / "a.json"])
    assert [example.id for example in examples][:5] == ["0-0", "0-1", "0-2", "0-3", "1-0"]
    assert sum(bool(example.truth) for example in examples) == len(examples) / 2


def test_amounts_and_hurried_writing() -> None:
    rng = Random(0)
    for _ in range(300):
        amount = draw_amount(rng, 3)
        assert amount.number <= 3
        assert (amount.how, amount.number) != ("at least", 0)
        text = hurried("At least one box has a black item", rng)
        assert 30 < len(text) < 36
        assert "black" in text or "item" in text


@pytest.mark.realdata
def test_people_mean_what_the_templates_mean(data_folder: Path) -> None:
    """Templates make two thirds of the sentences of the development set; their truths are those that people gave."""

    def plain(text: str) -> str:
        text = re.sub(r"\s+", " ", text.lower().strip().rstrip(".")).replace("atleast", "at least")
        return re.sub(r"^(ll |t least|tleast)", lambda m: {"ll ": "all "}.get(m[0], "at least"), text)

    rng, meanings = Random(0), dict[tuple[bool, str], Meaning]()
    for is_tower, module in ((True, towers), (False, scattered)):
        for _, template in rng.choices(module.TEMPLATES, [weight for weight, _ in module.TEMPLATES], k=12_000):
            text, meaning = template(Words(rng))
            meanings[is_tower, plain(text)] = meaning
    rows = [json.loads(line) for line in (data_folder / "vl/nlvr1/dev.json").read_text().splitlines()]
    agreed = found = 0
    for row in rows:
        scene = row["structured_rep"]
        is_tower = all(item["size"] == 20 and item["type"] == "square" for box in scene for item in box)
        meaning = meanings.get((is_tower, plain(row["sentence"])))
        if meaning is not None:
            found += 1
            agreed += said_truly(meaning, scene) == (row["label"] == "true")
    assert found > 0.4 * len(rows)
    assert agreed > 0.985 * found
