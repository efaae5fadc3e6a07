"""A headless Chromium, driven by the W3C WebDriver protocol of its chromedriver."""

import base64
import json
import os
import re
import shutil
import urllib.error
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from mdp.testing.processes import PATIENCE_S, LineProcess, until

#: How an element is named in the protocol.
_ELEMENT = "element-6066-11e4-a52e-4f735466cecf"
#: Texts whose contrast with their ground is below WCAG's level AA (1.4.3).
LOW_CONTRAST = """
const rgb = (colour) => colour.match(/[\\d.]+/g).map(Number);
const light = (colour) => rgb(colour).slice(0, 3)
  .map((part) => (part /= 255) <= 0.04045 ? part / 12.92 : ((part + 0.055) / 1.055) ** 2.4)
  .reduce((sum, part, place) => sum + part * [0.2126, 0.7152, 0.0722][place], 0);
const ground = (node) => {
  for (; node; node = node.parentElement) {
    const colour = getComputedStyle(node).backgroundColor;
    if (!(rgb(colour)[3] < 1)) return colour;
  }
};
return [...document.querySelectorAll("body *")].filter((node) => {
  const own = [...node.childNodes].some((each) => each.nodeType === 3 && each.data.trim());
  if (!own || !node.checkVisibility()) return false;
  const { color, fill, fontSize, fontWeight } = getComputedStyle(node);
  const pair = [light(node.matches("svg *") ? fill : color), light(ground(node))].sort();
  const large = parseFloat(fontSize) >= (fontWeight >= 700 ? 18.66 : 24);
  return (Math.max(...pair) + 0.05) / (Math.min(...pair) + 0.05) < (large ? 3 : 4.5);
}).map((node) => `${node.tagName} ${node.className} ${node.textContent}`);
"""
_FLAGS = (
    "--headless=new",
    "--disable-gpu",
    "--disable-dev-shm-usage",
    "--hide-scrollbars",
    "--no-first-run",
    "--use-fake-ui-for-media-stream",
)


def why_no_browser() -> str:
    """Name of what is not installed, or nothing."""
    lacking = [name for name in ("chromium", "chromedriver") if shutil.which(name) is None]
    return f"{' and '.join(lacking)}: not installed (chromium, chromium-driver)" if lacking else ""


class Browser:
    """One window."""

    def __init__(self, driver: str, session: str) -> None:
        self._url = f"{driver}/session/{session}"

    def _do(self, what: str, content: object = None, method: str = "POST") -> Any:
        return _call(f"{self._url}/{what}", {} if content is None else content, method)

    def open(self, url: str) -> None:
        """Load a page."""
        self._do("url", {"url": url})

    def run(self, script: str) -> Any:
        """Value that `script`, the body of a function, returns."""
        return self._do("execute/sync", {"script": script, "args": []})

    def text(self, selector: str) -> str:
        """The text of the first such element; empty without one."""
        found = f"document.querySelector({json.dumps(selector)})"
        return str(self.run(f"return {found}?.innerText ?? ''"))

    def wait_for(self, selector: str, wanted: str) -> None:
        """Wait until that element's text contains a match of the pattern `wanted`."""
        until(
            lambda: re.search(wanted, self.text(selector)) is not None,
            f"{selector} shows {wanted!r}",
        )

    def type(self, selector: str, text: str) -> None:
        """Type into an element; for a file input, the path of the file."""
        self._do(f"element/{self._element(selector)}/value", {"text": text})

    def press(self, selector: str, key: str) -> None:
        """Press a key with an element in focus, as who has no mouse does."""
        self.run(f"document.querySelector({json.dumps(selector)}).focus()")
        keys = [{"type": "keyDown", "value": key}, {"type": "keyUp", "value": key}]
        self._do("actions", {"actions": [{"type": "key", "id": "keyboard", "actions": keys}]})

    def _element(self, selector: str) -> str:
        found = self._do("element", {"using": "css selector", "value": selector})
        return str(found[_ELEMENT])

    def emulate(
        self, *, width: int = 1280, height: int = 900, dark: bool = False, scale: float = 1.0
    ) -> None:
        """Have a screen of this size, and its owner prefer dark colours or not."""
        screen = {"width": width, "height": height, "deviceScaleFactor": scale}
        self._devtools("Emulation.setDeviceMetricsOverride", {**screen, "mobile": width < 600})
        scheme = {"name": "prefers-color-scheme", "value": "dark" if dark else "light"}
        still = {"name": "prefers-reduced-motion", "value": "reduce"}
        self._devtools("Emulation.setEmulatedMedia", {"features": [scheme, still]})

    def _devtools(self, command: str, parameters: object) -> Any:
        return self._do("goog/cdp/execute", {"cmd": command, "params": parameters})

    def tree(self) -> list[dict[str, Any]]:
        """Tree that a screen reader gets: every node's `role` and `name`."""
        nodes = self._devtools("Accessibility.getFullAXTree", {})["nodes"]
        return [
            {key: node.get(key, {}).get("value") for key in ("role", "name")}
            for node in nodes
            if not node["ignored"]
        ]

    def log(self) -> list[str]:
        """Complaints of the page since the last time."""
        return [entry["message"] for entry in self._do("se/log", {"type": "browser"})]

    def picture(self) -> bytes:
        """The whole page as PNG."""
        shot = self._devtools(
            "Page.captureScreenshot", {"format": "png", "captureBeyondViewport": True}
        )
        return base64.b64decode(shot["data"])

    def before_load(self, script: str) -> str:
        """Run `script` in every page before its own; returns what `not_before_load` takes."""
        made = self._devtools("Page.addScriptToEvaluateOnNewDocument", {"source": script})
        return str(made["identifier"])

    def not_before_load(self, identifier: str) -> None:
        """No longer run a script in new pages."""
        known = {"identifier": identifier}
        self._devtools("Page.removeScriptToEvaluateOnNewDocument", known)

    def close(self) -> None:
        """Close the window."""
        _call(self._url, None, "DELETE")


def _call(url: str, content: object, method: str) -> Any:
    data = None if content is None else json.dumps(content).encode()
    request = urllib.request.Request(url, data, {"Content-Type": "application/json"}, method=method)
    try:
        with urllib.request.urlopen(request, timeout=PATIENCE_S) as response:
            return json.load(response)["value"]
    except urllib.error.HTTPError as error:
        # What the driver says of it.
        told = json.loads(error.read())["value"]
        raise AssertionError(f"{url}: {told['error']}: {told['message'][:400]}") from error


@contextmanager
def browser(folder: Path, *options: str) -> Iterator[Browser]:
    """A window of a Chromium with these options, that keeps what it has to in `folder`."""
    with LineProcess("chromedriver", ["chromedriver", "--port=0"], own_session=True) as process:
        port = process.line_with("successfully on port").rstrip(".").rpartition(" ")[2]
        driver = f"http://127.0.0.1:{port}"
        flags = [*_FLAGS, *options, f"--user-data-dir={folder}"]
        # Chromium's sandbox refuses root, as which containers run.
        flags += ["--no-sandbox"] if os.geteuid() == 0 else []
        wanted = {
            "browserName": "chrome",
            "goog:chromeOptions": {"binary": shutil.which("chromium"), "args": flags},
            "goog:loggingPrefs": {"browser": "WARNING"},
        }
        made = _call(f"{driver}/session", {"capabilities": {"alwaysMatch": wanted}}, "POST")
        window = Browser(driver, made["sessionId"])
        try:
            yield window
        finally:
            window.close()
