"""Checks of an agent before it listens; limits are tried in another interpreter."""

import subprocess
import sys

import pytest

from devices.access.watch import DESCRIPTORS


@pytest.mark.parametrize(
    ("before", "after"), [((256, 512), 512), ((256, 8192), DESCRIPTORS), ((6000, 8192), 6000)]
)
def test_room_is_made_as_far_as_it_may(before: tuple[int, int], after: int) -> None:
    program = (
        "import resource\n"
        f"resource.setrlimit(resource.RLIMIT_NOFILE, {before})\n"
        "from devices.access.watch import raise_descriptor_limit\n"
        "raise_descriptor_limit()\n"
        "print(*resource.getrlimit(resource.RLIMIT_NOFILE))\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, timeout=60, check=True
    )
    assert done.stdout.split() == [str(after), str(before[1])]
