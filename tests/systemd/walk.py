"""From a bare Debian to an agent that answers after a reboot: `make systemd`.

As docs/how-to/run-agents.md has it, from wheels that are on the board already: it has no network.
"""

import json
import time
from collections.abc import Iterator
from dataclasses import replace

import pytest

from tests.support.figures import Figures
from tests.support.patience import PATIENT_S
from tests.systemd.boards import NOW, WHEELS, Board, boot_board, engines_of
from tools.engine import ROOT
from tools.prepare import MissingError
from tools.systemd import IMAGE, prepare

# Not of fixtures: a Debian is made as quickly as network and machine allow.
pytestmark = pytest.mark.timeout(3 * PATIENT_S, func_only=True)
BUNDLE = ROOT / "examples" / "bundles" / "cifar10"
#: What a person types on the board, in this order.
STEPS = (
    "python3 -m venv /opt/mdp",
    f"/opt/mdp/bin/pip install --quiet --no-index --find-links {WHEELS} "
    f'"$(echo {NOW}/*.whl)[agent,sign]"',
    "mkdir -p /etc/mdp/clients && cp -r /given/bundle /srv/bundle && chmod -R a+rX /srv/bundle",
    "mdp keys new --out /etc/mdp --name n100 && mdp keys new --out /root --name client",
    "cp /root/client.public /etc/mdp/clients/",
    "mdp-agent install --bundle /srv/bundle --device n100 --bind tcp://0.0.0.0:7500 "
    "--key /etc/mdp/n100.secret --clients /etc/mdp/clients/",
)  # fmt: skip
#: On the board itself, where the client's key is, too.
FLEET = (
    "mdp fleet new --bundle /srv/bundle --keys /etc/mdp --key /root/client.secret "
    "--out /root/fleet.toml --device n100=tcp://127.0.0.1:7500"
)  # fmt: skip


@pytest.fixture
def bare() -> Iterator[Board]:
    """A board with Debian and nothing of this package."""
    try:
        prepared = replace(prepare(), image=f"{IMAGE}:base")
        with boot_board(prepared, [f"{BUNDLE}:/given/bundle"]) as board:
            yield board
    except MissingError as error:
        pytest.skip(str(error))


def test_a_bare_board_answers_after_a_reboot(bare: Board) -> None:
    assert bare.try_script("command -v mdp-agent").returncode == 1
    begun_s = time.monotonic()
    for step in STEPS:
        bare.run(step)
    installed_s = time.monotonic() - begun_s
    assert bare.run("mdp-agent health") == "READY n100"
    bare.restart()
    bare.until("mdp-agent health")
    rebooted_s = time.monotonic() - begun_s
    bare.run(FLEET)
    picture = "from PIL import Image; Image.new('RGB', (64, 64), 'gray').save('/root/gray.png')"
    bare.run(f'/opt/mdp/bin/python -c "{picture}"')
    asked = "mdp classify --fleet /root/fleet.toml --deadline-ms 20000 --json /root/gray.png"
    assert json.loads(bare.run(asked))["used"] == ["n100"]
    with Figures("walk", engines_of(bare)) as figures:
        figures.put(commands=len(STEPS), installed_s=installed_s, rebooted_s=rebooted_s)
