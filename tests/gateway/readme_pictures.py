"""README as a repository's front page shows it, in docs/pictures: light, dark, on a phone.

python -m tests.gateway.readme_pictures      (Debian's chromium and chromium-driver)

The Markdown is rendered by CommonMark's rules with tables, in a column as wide as GitHub's and with
its sizes of letters. Ends with what is wrong where a text has too little contrast, or a block is
wider than the column on a desktop; phones scroll it.
"""

import io
from pathlib import Path
from tempfile import TemporaryDirectory

from markdown_it import MarkdownIt
from PIL import Image

from tests.support.fleet import ROOT
from tests.support.web.browser import LOW_CONTRAST, Browser, browser

PICTURES = ROOT / "docs" / "pictures"
#: Colours of text, links, ground, code's ground and lines.
LIGHT = ("#1f2328", "#0969da", "#ffffff", "#f6f8fa", "#d1d9e0")
DARK = ("#f0f6fc", "#4493f8", "#0d1117", "#151b23", "#3d444d")
NAMES = ("text", "link", "ground", "code", "line")
PHONE = 390
#: Width and height of the window, and whether its owner prefers dark colours.
SHOWN = {
    "readme-light": (894, 900, False),
    "readme-dark": (894, 900, True),
    "readme-phone": (PHONE, 844, False),
}
STYLE = """
body { margin: 0; background: var(--ground); color: var(--text); }
main { max-width: 830px; margin: auto; padding: 32px; }
main { font: 16px/1.5 "Noto Sans", "DejaVu Sans", sans-serif; }
h1, h2 { border-bottom: 1px solid var(--line); padding-bottom: .3em; line-height: 1.25; }
h1 { font-size: 2em; margin: 0 0 16px; }
h2 { font-size: 1.5em; margin: 24px 0 16px; }
p, ul, ol, pre, table { margin: 0 0 16px; }
ul, ol { padding-left: 2em; }
li + li { margin-top: 4px; }
a { color: var(--link); }
img { max-width: 100%; }
code { font: 85%/1.45 "Noto Sans Mono", "DejaVu Sans Mono", monospace; }
code { background: var(--code); padding: .2em .4em; border-radius: 6px; }
pre { background: var(--code); padding: 16px; overflow: auto; border-radius: 6px; }
pre code { padding: 0; background: none; }
table { display: block; width: max-content; max-width: 100%; }
table { overflow: auto; border-collapse: collapse; }
th, td { border: 1px solid var(--line); padding: 6px 13px; }
tr { background: var(--ground); }
@media (max-width: 600px) { main { padding: 16px; } }
"""
#: Blocks that have to be scrolled sideways.
WIDE = """
return [...document.querySelectorAll("pre, table")]
  .filter((node) => node.scrollWidth > node.clientWidth)
  .map((node) => `${node.scrollWidth} pixels for ${node.clientWidth}: ${node.innerText}`);
"""


def main() -> None:
    """Write all of them."""
    with TemporaryDirectory() as name, browser(Path(name) / "chromium") as page:
        shown = Path(name) / "readme.html"
        shown.write_text(as_page((ROOT / "README.md").read_text(encoding="utf-8")))
        for picture, (width, height, dark) in SHOWN.items():
            page.emulate(width=width, height=height, dark=dark)
            page.open(shown.as_uri())
            page.wait_for("h1", "MDP")
            if (wide := page.run(WIDE)) and width > PHONE:
                raise SystemExit(f"{picture}: wider than its column: {wide[0]}")
            if faint := page.run(LOW_CONTRAST):
                raise SystemExit(f"{picture}: too little contrast: {faint[0]}")
            _save(page, picture)


def as_page(markdown: str) -> str:
    """A whole page of HTML, whose links are those of the repository."""
    body = MarkdownIt("commonmark").enable(["table", "strikethrough"]).render(markdown)
    light, dark = (
        "".join(f"--{name}: {colour};" for name, colour in zip(NAMES, colours, strict=True))
        for colours in (LIGHT, DARK)
    )
    style = f":root {{{light}}} @media (prefers-color-scheme: dark) {{:root {{{dark}}}}} {STYLE}"
    return (
        f'<!doctype html><html lang="en"><head><meta charset="utf-8"><base href="{ROOT.as_uri()}/">'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        '<meta name="color-scheme" content="light dark"><title>README</title>'
        f"<style>{style}</style></head><body><main>{body}</main></body></html>"
    )


def _save(page: Browser, name: str) -> None:
    with Image.open(io.BytesIO(page.picture())) as shot:
        path = PICTURES / f"{name}.webp"
        shot.convert("RGB").save(path, quality=55, method=6)
    print(f"{path}: {path.stat().st_size} bytes")


if __name__ == "__main__":
    main()
