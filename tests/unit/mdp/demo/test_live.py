"""The items that come by in the live demo."""

from itertools import islice
from pathlib import Path

from mdp.demo.live import items_of
from mdp.demo.scenes import Scenes


def scene(name: str) -> dict[str, Path]:
    return {"top": Path(name)}


def test_every_ninth_item_is_of_no_class_and_all_come_round() -> None:
    known = [(str(number), scene(f"k{number}")) for number in range(16)]
    scenes = Scenes({"alpha": "top"}, known, [scene("u0"), scene("u1"), scene("u2")])
    some = list(islice(items_of(scenes), 54))
    assert [one.number for one in some] == list(range(1, 55))
    assert [n for n, one in enumerate(some, 1) if one.label is None] == [9, 18, 27, 36, 45, 54]
    strange = [one.scene["top"].name for one in some if one.label is None]
    assert strange == ["u0", "u1", "u2"] * 2
    assert [one.label for one in some if one.label is not None] == [label for label, _ in known] * 3


def test_without_items_of_no_class_none_comes_by() -> None:
    scenes = Scenes({"alpha": "top"}, [(str(n), scene(f"k{n}")) for n in range(9)], [])
    assert all(one.label is not None for one in islice(items_of(scenes), 40))
