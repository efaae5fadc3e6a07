"""tools/architecture.py: arrows between parts, layers, circles; and that this checkout has none."""

from tools.architecture import arrows, circles, faults, folders, layers, sources

#: Two packages and a module, one above the other; a test is no part of theirs.
FILES = {
    "house/__init__.py": "from house.attic.roof import tiles\n",
    "house/attic/__init__.py": "",
    "house/attic/roof.py": "from house.attic import beam\n\ndef t():\n    import house.cellar\n",
    "house/attic/beam.py": "from house.hall import door\n",
    "house/hall/door.py": "import house.cellar\nimport os\n",
    "house/cellar.py": "",
    "tests/test_house.py": "from house.attic.roof import tiles\n",
}


def test_arrows_lead_from_part_to_part_however_they_are_imported() -> None:
    assert arrows(FILES, "house") == {
        "attic": {"hall", "cellar"},
        "hall": {"cellar"},
        "cellar": set(),
    }
    assert arrows(FILES, "house.attic") == {"roof": {"beam"}, "beam": set()}


def test_layers_are_counted_from_below() -> None:
    of = arrows(FILES, "house")
    assert layers(of) == [["attic"], ["hall"], ["cellar"]]
    assert circles(of) == []


def test_a_circle_is_named_and_shares_a_layer() -> None:
    of = {"a": {"b"}, "b": {"c"}, "c": {"b"}, "d": set()}
    assert circles(of) == [["b", "c"]]
    assert layers(of) == [["a"], ["b", "c", "d"]]


def test_an_empty_package_file_is_not_counted() -> None:
    assert folders(FILES) == {"house": 2, "house/attic": 2, "house/hall": 1, "tests": 1}


def test_this_checkout_has_no_circle() -> None:
    assert faults(sources(None)) == []


def test_a_circle_between_sub_packages_is_a_fault() -> None:
    files = {
        "mdp/hall/door.py": "import mdp.attic.roof\n",
        "mdp/attic/roof.py": "import mdp.hall.door\n",
    }
    assert faults(files) == ["mdp: attic and hall import each other"]
