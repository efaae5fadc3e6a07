"""The page's pictures in docs/pictures: light, dark, on a phone, with one device gone, without any,
and cameras before an item of no class, one of them suspected.

python -m tests.gateway.screenshots      (Debian's chromium and chromium-driver)

With examples/bundles/imagenette and a photograph of scikit-learn, and with cameras before colours.
"""

import io
from pathlib import Path
from tempfile import TemporaryDirectory

from PIL import Image
from sklearn.datasets import load_sample_image

from mdp.testing.bundles import write_bundle
from tests.support.bundles import with_novelty
from tests.support.faults.stage import Stage, with_cameras
from tests.support.fleet import PLENTY_MS, ROOT, Fleet
from tests.support.web.browser import Browser, browser
from tests.support.web.gateway import gateway

PICTURES = ROOT / "docs" / "pictures"
ASKED = 24
CAMERAS = ("laptop-cpu", "n100", "raspberry-pi-5")
SPACE = "\ue00d"


def main() -> None:
    """Write all of them."""
    PICTURES.mkdir(exist_ok=True)
    with TemporaryDirectory() as name:
        folder = Path(name)
        photograph = folder / "china.jpg"
        Image.fromarray(load_sample_image("china.jpg")).save(photograph, quality=92)
        with Fleet(folder, ROOT / "examples" / "bundles" / "imagenette") as fleet:
            file = fleet.start_all().write()
            with gateway("--fleet", file) as served, browser(folder / "chromium") as page:
                content = photograph.read_bytes()
                for _ in range(ASKED):
                    served.ask("/v2/models/imagenette/classify", content)
                page.emulate()
                page.open(served.url)
                page.wait_for("#count", "3 of 3")
                page.type("#file", str(photograph))
                page.wait_for("#mode", "stacked")
                _save(page, "page-light")
                page.emulate(dark=True)
                _save(page, "page-dark")
                page.emulate(width=390, height=844, scale=1.5)
                _save(page, "page-phone")
                page.emulate()
                fleet.agents["n100"].kill()
                page.wait_for("#how", "partial")
                page.wait_for("#faults", "n100")
                _save(page, "page-degraded")
                for name in ("laptop-cpu", "raspberry-pi-5"):
                    fleet.agents[name].kill()
                page.wait_for("#label", "No device can answer")
                page.wait_for("#faults", "raspberry-pi-5")
                _save(page, "page-gone")
                (folder / "cameras").mkdir()
                cameras(folder / "cameras", page)


def cameras(folder: Path, page: Browser) -> None:
    """An item of no class, which has two colours at once, and a camera that disagrees."""
    stage = Stage(folder, CAMERAS)
    stage.show_all("red+green")
    bundle = write_bundle(folder / "bundle", devices=CAMERAS, bag_scale=12.0)
    # Between the energies of one colour and of two.
    with_novelty(with_cameras(bundle), threshold=-3.3)
    with Fleet(folder, bundle) as fleet:
        for camera in CAMERAS:
            fleet.start(camera, *stage.source(camera), wait_for=None)
        for camera in CAMERAS:
            fleet.agents[camera].wait_for("READY")
        with gateway("--fleet", fleet.write()) as served, fleet.client() as client:
            page.emulate()
            page.open(served.url)
            page.wait_for("#count", "3 of 3")
            # As its looks would have found, had it looked long enough.
            client._connection.dispatcher._builder.disagreeing = frozenset((CAMERAS[1],))
            client.look(deadline_ms=PLENTY_MS)
            page.wait_for("#live", "a camera suspected")
            page.press("#cameras", SPACE)
            page.wait_for("#label", "^unknown$")
            page.wait_for("#note", "accuracy unknown with a suspected camera")
            _save(page, "page-unknown")


def _save(page: Browser, name: str) -> None:
    with Image.open(io.BytesIO(page.picture())) as shot:
        path = PICTURES / f"{name}.webp"
        shot.convert("RGB").save(path, quality=78, method=6)
    print(f"{path}: {path.stat().st_size} bytes")


if __name__ == "__main__":
    main()
