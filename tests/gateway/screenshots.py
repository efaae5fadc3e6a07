"""The page's pictures in docs/pictures: light, dark, on a phone, with one device gone, without any.

python -m tests.gateway.screenshots      (Debian's chromium and chromium-driver)

With examples/bundles/imagenette and a photograph of scikit-learn.
"""

import io
from pathlib import Path
from tempfile import TemporaryDirectory

from PIL import Image
from sklearn.datasets import load_sample_image

from tests.support.fleet import ROOT, Fleet
from tests.support.web.browser import Browser, browser
from tests.support.web.gateway import gateway

PICTURES = ROOT / "docs" / "pictures"
ASKED = 24


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


def _save(page: Browser, name: str) -> None:
    with Image.open(io.BytesIO(page.picture())) as shot:
        path = PICTURES / f"{name}.webp"
        shot.convert("RGB").save(path, quality=78, method=6)
    print(f"{path}: {path.stat().st_size} bytes")


if __name__ == "__main__":
    main()
