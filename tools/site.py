"""Build docs/ as a site, with the reference that the code itself holds.

python -m tools.site        (make docs)
python -m tools.site --zensical PROGRAM      (make docs ZENSICAL=yes; docs/adr/0025)

The site's folders are those of the repository, so that every link of a page leads where it leads on
GitHub; files that pages link to are copied beside them. `<!-- generated: ... -->` in a page is
replaced by the commands' help, the settings of a build, or a package's docstrings. Fails on a dead
link, and on a page that loads anything of another host.
"""

import argparse
import json
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
from msgspec import inspect

from tools.links import CODE, LINK

ROOT = Path(__file__).resolve().parent.parent
SITE = ROOT / "runs/site"
#: Headings of the navigation, and the folders below them.
SECTIONS = {
    "Tutorials": "tutorials", "How-to": "how-to", "Reference": "reference",
    "Explanation": "explanation", "Results": "results", "Decisions": "adr",
}  # fmt: skip
START = [
    "README.md",
    "docs/overview.md",
    "docs/README.md",
    "CHANGELOG.md",
    "CONTRIBUTING.md",
    "SECURITY.md",
]
LEFT_OUT = "docs/lab-log.md"
#: Each command and the module of its typer application.
COMMANDS = {
    "mdp": "mdp.cli.main", "mdp-agent": "devices.cli.main", "mdp-partition": "partitioner.cli.main",
}  # fmt: skip
GENERATED = re.compile(r"^<!-- generated: (\w+) ?([\w.]*) -->$", re.MULTILINE)
#: The gateway's page, whose colours and fonts the site has.
PAGE = ROOT / "mdp/gateway/page/page.css"
#: Material's names for them. Lines of code of 100 characters are whole: in one line where the
#: window has room, else in two.
STYLE = """
[data-md-color-scheme] {
  --md-default-bg-color: var(--ground); --md-default-fg-color: var(--text);
  --md-default-fg-color--light: var(--soft); --md-default-fg-color--lighter: var(--line);
  --md-default-fg-color--lightest: var(--line); --md-typeset-table-color: var(--line);
  --md-primary-fg-color: var(--ground); --md-primary-bg-color: var(--text);
  --md-primary-bg-color--light: var(--soft); --md-typeset-color: var(--text);
  --md-typeset-a-color: var(--accent); --md-accent-fg-color: var(--accent);
  --md-accent-fg-color--transparent: var(--tint); --md-accent-bg-color: var(--on-accent);
  --md-code-bg-color: var(--card); --md-code-fg-color: var(--text);
  --md-footer-bg-color: var(--ground); --md-footer-bg-color--dark: var(--ground);
  --md-footer-fg-color: var(--soft); --md-footer-fg-color--light: var(--soft);
  --md-footer-fg-color--lighter: var(--soft);
}
body { --md-text-font-family: FONTS; font-variant-numeric: tabular-nums; }
.md-grid { max-width: 74rem; }
.md-typeset pre > code {
  white-space: pre-wrap; border: 1px solid var(--line); border-radius: 14px;
}
.md-typeset :not(pre) > code {
  padding: 0 .25em; border: 1px solid var(--line); border-radius: 6px;
}
.md-typeset h1, .md-typeset h2, .md-typeset h3 {
  color: var(--text); font-weight: 650; letter-spacing: -.02em;
}
.md-typeset table:not([class]) {
  background: var(--card); border-radius: 14px; box-shadow: var(--shade);
}
.md-tabs { border-bottom: 1px solid var(--line); }
.md-tabs__item--active .md-tabs__link { color: var(--accent); }
.md-search__form, .md-search__form:hover {
  background: var(--card); border: 1px solid var(--line); border-radius: 8px;
}
[data-md-toggle=search]:checked ~ .md-header .md-search__form { background: var(--card); }
"""
ITEM = re.compile(r"(?:[-*]|\d+\.) +")
#: What a browser loads by itself, of another host.
LOADED = re.compile(
    r"<(?:script|img|iframe|source)\b[^>]*\bsrc=[\"']?(?:https?:)?//[^>]*>"
    r"|<link\b(?![^>]*rel=[\"']?canonical)[^>]*\bhref=[\"']?(?:https?:)?//[^>]*>"
)


def for_mkdocs(page: str) -> str:
    """GitHub's Markdown as mkdocs reads it.

    What belongs to an item of a list is four columns in; a blank line precedes a list, and an item
    that follows one of several paragraphs.
    """
    lines: list[str] = []
    #: Columns in which the text of each open item begins.
    items: list[int] = []
    fenced = spread = False
    for line in page.splitlines():
        text = line.lstrip()
        column = len(line) - len(text)
        if not text:
            lines.append("")
            spread = True
            continue
        item = None if fenced else ITEM.match(text)
        close = bool(items) and not spread
        while items and column < items[-1] and not fenced:
            items.pop()
        depth, rest = len(items), column - (items[-1] if items else 0)
        if item:
            if not close and lines and lines[-1]:
                lines.append("")
            spread = False
            items.append(column + item.end())
            rest = 0
        lines.append(" " * (4 * depth + max(0, rest)) + text)
        fenced ^= text.startswith("```")
    return "\n".join(lines) + "\n"


def commands() -> str:
    """Every option of every command, in typer's words."""
    parts = []
    for name, module in COMMANDS.items():
        command = [sys.executable, "-m", "typer", module, "utils", "docs", "--name", name]
        done = subprocess.run(command, cwd=ROOT, check=True, capture_output=True, text=True)
        parts.append(whole(re.sub(r"^#", "##", done.stdout, flags=re.MULTILINE)))
    return "\n".join(parts)


def whole(page: str) -> str:
    """`page` of typer with the summaries of commands whole, which typer cuts."""
    summaries = dict(re.findall(r"^#+ `(.+)`\n\n(.+)$", page, re.MULTILINE))
    lines, command = [], ""
    for line in page.splitlines():
        if heading := re.match(r"#+ `(.+)`", line):
            command = heading[1]
        elif item := re.match(r"\* `([\w-]+)`: ", line):
            line = item[0] + summaries.get(f"{command} {item[1]}", line[item.end() :])
        lines.append(line)
    return "\n".join(lines)


def _values(kind: inspect.Type) -> str:
    """The values that a setting may have."""
    match kind:
        case inspect.Metadata(type=inner):
            return _values(inner)
        case inspect.UnionType(types=types):
            some = [each for each in types if not isinstance(each, inspect.NoneType)]
            return " or ".join(map(_values, some))
        case inspect.LiteralType(values=values):
            return ", ".join(f"`{value}`" for value in values)
        case inspect.IntType() | inspect.FloatType():
            ends = (("from", kind.ge), ("above", kind.gt), ("to", kind.le), ("below", kind.lt))
            return " ".join(f"{word} {end:,}" for word, end in ends if end is not None) or "number"
        case inspect.BoolType():
            return "`true`, `false`"
        case inspect.ListType(item_type=item):
            return f"list: {_values(item)}"
        case inspect.DictType():
            return "table"
    return "text"


def _description(kind: inspect.Type) -> str:
    schema = (kind.extra_json_schema or {}) if isinstance(kind, inspect.Metadata) else {}
    return str(schema.get("description", ""))


def settings() -> str:
    """Every key of a build's settings file: values, default and meaning, a table each."""
    from partitioner.config import BuildConfig

    parts = []
    whole = inspect.type_info(BuildConfig)
    assert isinstance(whole, inspect.StructType)
    for table in whole.fields:
        assert isinstance(table.type, inspect.StructType)
        parts.append(f"### `[{table.encode_name}]`\n")
        parts.append("| key | values | default | meaning |\n|---|---|---|---|")
        for key in table.type.fields:
            default = "required" if key.required else _format_default(key.default)
            parts.append(
                f"| `{key.encode_name}` | {_values(key.type)} | {default} "
                f"| {_description(key.type)} |"
            )
        parts.append("")
    return "\n".join(parts)


def _format_default(default: Any) -> str:
    if default is msgspec.NODEFAULT or default is None or default == "":
        return ""
    return f"`{str(default).lower() if isinstance(default, bool) else default}`"


def python(package: str) -> str:
    """Directives that mkdocstrings replaces by the docstrings of all that `package` exports."""
    names = __import__(package, fromlist=["__all__"]).__all__
    return "\n\n".join(f"::: {package}.{name}" for name in names if not name.startswith("_"))


def fill_in(page: str) -> str:
    """`page` with its generated parts."""
    parts = {"commands": lambda _: commands(), "settings": lambda _: settings(), "python": python}
    return GENERATED.sub(lambda found: parts[found[1]](found[2]), page)


def links_of(page: Path) -> Iterator[Path]:
    """Files of the repository that `page` links to."""
    for target in LINK.findall(CODE.sub("", page.read_text(encoding="utf-8"))):
        path = (page.parent / target.partition("#")[0]).resolve()
        if not re.match(r"[a-z]+:|#", target) and path.is_file():
            yield path


def pages() -> list[Path]:
    """Every page and picture of the site, and all files that pages link to."""
    found = [ROOT / name for name in START]
    found += [path for path in sorted((ROOT / "docs").rglob("*")) if path.is_file()]
    for path in found:
        if path.suffix == ".md":
            found += [other for other in links_of(path) if other not in found]
    return found


def navigation() -> list[dict[str, list[str]]]:
    """Sections with their pages, in the order in which docs/README.md names them."""
    overview = ROOT / "docs/README.md"
    order = [path.relative_to(ROOT).as_posix() for path in links_of(overview)]

    def of(folder: str) -> list[str]:
        names = [f"docs/{folder}/{p.name}" for p in sorted((ROOT / "docs" / folder).glob("*.md"))]
        return sorted(names, key=lambda name: order.index(name) if name in order else len(order))

    return [{"Start": START}, *({title: of(folder)} for title, folder in SECTIONS.items())]


def style(page: str) -> str:
    """The site's style sheet, of the style sheet `page` of the gateway's page.

    Its custom properties are those of Material's light scheme, and those that it gives a dark
    display of the dark one. Raises ValueError where they are not found.
    """
    blocks = re.findall(r":root \{(.*?)\}", page, re.DOTALL)
    if len(blocks) != 2:
        raise ValueError(f"{PAGE}: expected :root twice, light and dark, found {len(blocks)}")
    parts = []
    for scheme, block in zip(("default", "slate"), blocks, strict=True):
        properties = " ".join(f"{one};" for one in re.findall(r"--[\w-]+: [^;]+", block))
        parts.append(f"[data-md-color-scheme={scheme}] {{ {properties} }}\n")
    fonts = re.search(r"font: \S+ ([^;]+);", blocks[0])
    if fonts is None:
        raise ValueError(f"{PAGE}: expected fonts in :root")
    return "".join(parts) + STYLE.replace("FONTS", fonts[1])


def write_pages(target: Path) -> None:
    """The pages as mkdocs reads them, in folder `target`."""
    shutil.rmtree(target, ignore_errors=True)
    for path in pages():
        copy = target / path.relative_to(ROOT)
        copy.parent.mkdir(parents=True, exist_ok=True)
        if path.suffix == ".md":
            copy.write_text(fill_in(for_mkdocs(path.read_text(encoding="utf-8"))))
        else:
            shutil.copy(path, copy)


def loads(folder: Path) -> list[str]:
    """Addresses of other hosts that pages in `folder` load from."""
    return [
        f"{page.relative_to(folder)}: loads {found}"
        for page in sorted(folder.rglob("*.html"))
        for found in LOADED.findall(page.read_text(encoding="utf-8"))
    ]


def builder(zensical: str | None, config: Path) -> list[str]:
    """The command that builds the site: mkdocs with Material, or Zensical, from the same file."""
    if zensical is None:
        return [
            *(sys.executable, "-m", "mkdocs", "build", "--quiet", "--strict"),
            *("--config-file", str(config)),
        ]
    return [zensical, "build", "--strict", "--config-file", str(config)]


def main(words: list[str]) -> int:
    """0 if the site is whole: in runs/site/html."""
    parser = argparse.ArgumentParser(prog="python -m tools.site")
    parser.add_argument("--zensical", metavar="PROGRAM", help="instead of mkdocs and Material")
    options = parser.parse_args(words)
    # Zensical writes over what is there.
    shutil.rmtree(SITE / "html", ignore_errors=True)
    write_pages(SITE / "pages")
    (SITE / "pages/site.css").write_text(style(PAGE.read_text(encoding="utf-8")))
    shutil.copy(PAGE.with_name("icon.svg"), SITE / "pages/icon.svg")
    # Zensical takes paths that are relative to the file.
    shutil.copy(ROOT / "tools/site.yml", SITE / "site.yml")
    config = {
        "INHERIT": "site.yml",
        "docs_dir": "pages",
        "site_dir": "html",
        "nav": navigation(),
        "extra_css": ["site.css"],
    }
    (SITE / "mkdocs.yml").write_text(json.dumps(config))
    command = builder(options.zensical, SITE / "mkdocs.yml")
    environment = {**os.environ, "NO_MKDOCS_2_WARNING": "1", "PYTHONPATH": str(ROOT)}
    done = subprocess.run(command, cwd=ROOT, env=environment, check=False)
    if done.returncode:
        return 1
    for fault in (faults := loads(SITE / "html")):
        print(fault)
    print(f"{SITE / 'html'}: {len(list((SITE / 'html').rglob('*.html')))} pages")
    return 1 if faults else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
