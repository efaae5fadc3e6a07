"""The gateway before real agents, asked by clients that are not ours.

python -m tests.gateway.clients PYTHON      (make gateway-clients)

PYTHON has tritonclient and kserve. curl and Prometheus' promtool are asked too where they are
installed. Prints a line for each, and fails with the first that fails.
"""

import json
import shutil
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from tempfile import TemporaryDirectory

from PIL import Image

from mdp.testing.bundles import colour_picture, write_bundle
from mdp.testing.processes import PATIENCE_S, until
from tests.support.fleet import Fleet
from tests.support.gateway import gateway

ASKED = Path(__file__).with_name("asked.py")


def main(python: str) -> None:
    """Start everything, and have each client ask."""
    with TemporaryDirectory() as name:
        folder = Path(name)
        picture = folder / "red.png"
        Image.fromarray(colour_picture("red")).save(picture)
        with Fleet(folder, write_bundle(folder / "bundle")) as fleet:
            file = fleet.start_all().write()
            with gateway("--fleet", file) as served:
                until(lambda: served.ask("/v2/health/ready").status == 200, "it is ready")
                for client in ("triton", "kserve"):
                    print(_run([python, str(ASKED), client, served.host]).strip())
                url = f"{served.url}/v2/models/colours/classify"
                form = f"picture=@{picture}"
                answer = _run(["curl", "--silent", "--fail", "--form", form, url])
                assert json.loads(answer)["label"] == "red", answer
                print(_run(["curl", "--version"]).partition(" (")[0] + ": upload")
                if shutil.which("promtool"):
                    metrics = served.ask("/metrics").body.decode()
                    assert _run(["promtool", "check", "metrics"], metrics) == ""
                    print("promtool check metrics: nothing found")


def _run(command: Sequence[str], given: str = "") -> str:
    done = subprocess.run(
        command, input=given, stdout=subprocess.PIPE, text=True, check=True, timeout=PATIENCE_S
    )
    return done.stdout


if __name__ == "__main__":
    main(sys.argv[1])
