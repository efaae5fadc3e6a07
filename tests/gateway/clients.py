"""The gateway before real agents, asked by clients that are not ours.

python -m tests.gateway.clients PYTHON      (make gateway-clients)

PYTHON has tritonclient and kserve. curl, Node and Prometheus' promtool are asked too where they
are installed. Prints a line for each, and fails with the first that fails.
"""

import json
import shutil
import subprocess
import sys
from collections.abc import Sequence
from importlib.metadata import version
from pathlib import Path
from tempfile import TemporaryDirectory
from urllib.request import urlopen

from PIL import Image
from prometheus_client.parser import text_string_to_metric_families

from mdp.testing.bundles import DEVICES, colour_picture, write_bundle
from mdp.testing.processes import PATIENCE_S, until
from tests.support.fleet import Fleet
from tests.support.web.gateway import gateway

ASKED = Path(__file__).with_name("asked.py")
#: What fetch does in Node and in a browser.
FETCH = """
const [url, file] = process.argv.slice(1);
const form = new FormData();
form.append("picture", new Blob([require("fs").readFileSync(file)]), "red.png");
fetch(url, { method: "POST", body: form }).then(async (reply) => console.log(await reply.text()));
"""
#: A RESTful sensor of Home Assistant: its state and attributes are keys of the JSON it gets.
STATE, ATTRIBUTES = "label", ("probability", "expected_accuracy", "degraded", "missing", "used")


def main(python: str) -> None:
    """Start everything, and have each client ask."""
    with TemporaryDirectory() as name:
        folder = Path(name)
        seen = folder / "seen"
        seen.mkdir()
        picture = seen / "red.png"
        Image.fromarray(colour_picture("red")).save(picture)
        with Fleet(folder, write_bundle(folder / "bundle")) as fleet:
            for device in DEVICES:
                fleet.start(device, "--source", f"folder:{seen}", wait_for=None)
            for device in DEVICES:
                fleet.agents[device].wait_for("READY")
            file = fleet.write()
            with gateway("--fleet", file) as served:
                until(lambda: served.ask("/v2/health/ready").status == 200, "it is ready")
                for client in ("triton", "kserve"):
                    print(_run([python, str(ASKED), client, served.host]).strip())
                url = f"{served.url}/v2/models/colours/classify"
                form = f"picture=@{picture}"
                answer = _run(["curl", "--silent", "--fail", "--form", form, url])
                assert json.loads(answer)["label"] == "red", answer
                print(_run(["curl", "--version"]).partition(" (")[0] + ": upload")
                if shutil.which("node"):
                    answer = _run(["node", "-e", FETCH, url, str(picture)])
                    assert json.loads(answer)["label"] == "red", answer
                    print(f"Node {_run(['node', '--version']).strip()}, fetch: upload")
                with urlopen(f"{served.url}/v2/models/colours/look", timeout=PATIENCE_S) as reply:
                    assert reply.headers.get_content_type() == "application/json"
                    sensor = json.load(reply)
                assert sensor[STATE] == "red", sensor
                assert {*ATTRIBUTES} <= sensor.keys(), sensor
                print("a RESTful sensor as Home Assistant's: state and attributes of a look")
                metrics = served.ask("/metrics").body.decode()
                families = [each.name for each in text_string_to_metric_families(metrics)]
                print(f"prometheus_client {version('prometheus_client')}: {len(families)} families")
                if shutil.which("promtool"):
                    assert _run(["promtool", "check", "metrics"], metrics) == ""
                    told = _run(["promtool", "--version"]).split()[2]
                    print(f"promtool {told}: check metrics finds nothing")


def _run(command: Sequence[str], given: str = "") -> str:
    done = subprocess.run(
        command, input=given, stdout=subprocess.PIPE, text=True, check=True, timeout=PATIENCE_S
    )
    return done.stdout


if __name__ == "__main__":
    main(sys.argv[1])
