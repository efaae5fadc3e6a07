"""The page that a phone opens to be an agent's camera, in docs/pictures: light and dark.

python -m tests.gateway.phone_pictures      (Debian's chromium and chromium-driver)

Before it starts, while it sends, and when the board has gone. The browser's made-up camera shows a
picture of the bundle `parts`; port 8443 has to be free.
"""

import io
import secrets
from contextlib import closing
from pathlib import Path
from tempfile import TemporaryDirectory

from PIL import Image

from devices.camera.certificate import phone_files
from devices.camera.phone import PhoneCamera, door_of
from mdp.cameras import parse_source
from tests.support.fleet import ROOT
from tests.support.web.browser import LOW_CONTRAST, Browser, browser

PICTURES = ROOT / "docs" / "pictures"
PARTS = ROOT / "examples" / "bundles" / "parts" / "scenes"
HERE, PORT = "127.0.0.1", 8443
#: A phone's screen in CSS pixels, their scale, and pixels between two screens.
SIZE, SCALE, GAP = (390, 720), 1.5, 24
SPACE = "\ue00d"


def main() -> None:
    """Write both, each with three screens."""
    with TemporaryDirectory() as name:
        folder = Path(name)
        made_up = folder / "camera.mjpeg"
        with Image.open(sorted(PARTS.glob("hex_nut/*/*.jpg"))[0]) as item:
            # Upright, as most phones are held.
            part = item.convert("RGB").crop((item.width // 8, 0, item.width * 7 // 8, item.height))
            part.resize((720, 960)).save(made_up, "JPEG", quality=92)
        source = parse_source(f"phone:{PORT}")
        door = door_of(source, HERE, phone_files(HERE, folder=folder / "state"))
        flags = (
            "--use-fake-device-for-media-stream", "--ignore-certificate-errors",
            f"--use-file-for-fake-video-capture={made_up}",
        )  # fmt: skip
        with browser(folder / "chromium", *flags) as page:
            for picture, dark in (("phone-light", False), ("phone-dark", True)):
                page.emulate(width=SIZE[0], height=SIZE[1], scale=SCALE, dark=dark)
                with closing(PhoneCamera(source, door)) as camera:
                    _save(_screens(page, door.url, camera), picture, dark=dark)


def _screens(page: Browser, url: str, camera: PhoneCamera) -> list[Image.Image]:
    """The page before it starts, while it sends, and without the board."""
    # Another query makes another page of it: the fragment alone would not.
    page.open(url.replace("/#", f"/?{secrets.token_hex(4)}#"))
    page.wait_for("#where", HERE)
    screens = [_screen(page)]
    page.press("#start", SPACE)
    page.wait_for("#told", r"^([3-9]|\d\d+) pictures sent")
    screens.append(_screen(page))
    camera.close()
    page.wait_for("#told", "cannot be reached")
    screens.append(_screen(page))
    return screens


def _screen(page: Browser) -> Image.Image:
    if faint := page.run(LOW_CONTRAST):
        raise SystemExit(f"too little contrast: {faint[0]}")
    with Image.open(io.BytesIO(page.picture())) as shot:
        return shot.convert("RGB")


def _save(screens: list[Image.Image], name: str, *, dark: bool) -> None:
    width = sum(screen.width + GAP for screen in screens) - GAP
    side = Image.new(
        "RGB", (width, max(s.height for s in screens)), "#30363d" if dark else "#d1d9e0"
    )
    left = 0
    for screen in screens:
        side.paste(screen, (left, 0))
        left += screen.width + GAP
    path = PICTURES / f"{name}.webp"
    side.save(path, quality=78, method=6)
    print(f"{path}: {path.stat().st_size} bytes")


if __name__ == "__main__":
    main()
