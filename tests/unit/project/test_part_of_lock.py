"""The smaller environment of `make demo` is a part of the whole one."""

import re

import pytest

from tests.support.fleet import ROOT
from tools.part_of_lock import part_of


def test_requirements_keep_their_hashes() -> None:
    lock = (ROOT / "constraints.lock").read_text()
    made = part_of(lock, ["numpy", "h11"])
    assert made.startswith("--only-binary :all:\nnumpy==")
    assert set(re.findall(r"^[a-z0-9]+(?===)", made, re.MULTILINE)) == {"numpy", "h11"}
    assert made.count("--hash=sha256:") > 10
    for line in made.splitlines():
        assert f"{line}\n" in lock


def test_a_package_that_is_not_there() -> None:
    with pytest.raises(ValueError, match=r"constraints\.lock: expected a line of nonesuch"):
        part_of("h11==1 \\\n    --hash=sha256:0\n", ["h11", "nonesuch"])
