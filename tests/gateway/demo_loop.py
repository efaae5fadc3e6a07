"""The loop at the top of the README, docs/pictures/demo.webp, of `mdp demo`'s own page.

python -m tests.gateway.demo_loop      (Debian's chromium and chromium-driver)

Twelve seconds: items come by, something else lies there, a camera is covered, a board unplugged.
Beside it demo-light, demo-dark and demo-phone, of one moment each.
"""

import io
import sys
import time
from pathlib import Path
from tempfile import TemporaryDirectory

from PIL import Image

from mdp.testing.processes import LineProcess
from tests.support.fleet import ROOT
from tests.support.web.browser import Browser, browser

PICTURES = ROOT / "docs" / "pictures"
#: Seconds of the loop, and between two of its frames.
LOOP_S, FRAME_S = 12.0, 0.4
#: Width and height of the page in the loop.
SIZE = 1120, 800
#: Second -> the button that is pressed then; Space is what who has no mouse presses.
PRESSED = {
    1.6: "#else",
    5.6: "article:nth-of-type(1) .cover",
    8.0: "article:nth-of-type(3) .plug",
    11.2: "article:nth-of-type(1) .cover",
    11.6: "article:nth-of-type(3) .plug",
}
SPACE = "\ue00d"


def main() -> None:
    """Write all of them."""
    program = str(Path(sys.executable).parent / "mdp")
    # A browser beside four agents: calls need more time than on four boards.
    command = [program, "demo", "--no-browser", "--deadline-ms", "2000"]
    with (
        TemporaryDirectory() as name,
        LineProcess("demo", command, own_session=True) as demo,
        browser(Path(name) / "chromium") as page,
    ):
        url = demo.line_with("Ctrl-C ends everything").partition(" ")[0]
        page.emulate(width=SIZE[0], height=SIZE[1])
        page.open(url)
        page.wait_for("#score", r"together\s+\d+/[5-9]")
        page.run("document.activeElement.blur()")
        frames = _loop(page)
        frames[0].save(
            PICTURES / "demo.webp", save_all=True, append_images=frames[1:], loop=0,
            duration=round(1000 * FRAME_S), quality=60, method=6,
        )  # fmt: skip
        page.press("article:nth-of-type(3) .plug", SPACE)
        page.wait_for("#missing", "unreachable")
        for shown, emulated in (
            ("demo-light", {}),
            ("demo-dark", {"dark": True}),
            ("demo-phone", {"width": 390, "height": 844, "scale": 1.5}),
        ):
            page.emulate(**emulated)
            page.wait_for("#label", r"\w")
            _shot(page).save(PICTURES / f"{shown}.webp", quality=78, method=6)
    for path in sorted(PICTURES.glob("demo*.webp")):
        print(f"{path}: {path.stat().st_size} bytes")


def _loop(page: Browser) -> list[Image.Image]:
    frames, pressed = [], dict(PRESSED)
    begun_s = time.monotonic()
    for number in range(round(LOOP_S / FRAME_S)):
        now_s = number * FRAME_S
        for at_s in [at_s for at_s in pressed if at_s <= now_s]:
            page.press(pressed.pop(at_s), SPACE)
        frames.append(_shot(page))
        time.sleep(max(0.0, begun_s + now_s + FRAME_S - time.monotonic()))
    # The list of what happened may make the page longer.
    height = min(frame.height for frame in frames)
    return [frame.crop((0, 0, frame.width, height)) for frame in frames]


def _shot(page: Browser) -> Image.Image:
    with Image.open(io.BytesIO(page.picture())) as shot:
        return shot.convert("RGB")


if __name__ == "__main__":
    main()
