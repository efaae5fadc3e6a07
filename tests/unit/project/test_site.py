"""tools/site.py: pages as mkdocs reads them, and the parts that the code itself holds."""

import re
from pathlib import Path

import pytest

from tools import site


def test_lists_are_indented_as_mkdocs_wants_them() -> None:
    page = (
        "A list:\n- one\n  two\n\n1. Do:\n\n   ```\n   - x\n   ```\n   and then\n2. next\n\nEnd.\n"
    )
    assert site.for_mkdocs(page) == (
        "A list:\n\n- one\n    two\n\n1. Do:\n\n    ```\n    - x\n    ```\n"
        "    and then\n\n2. next\n\nEnd.\n"
    )
    nested = "- a\n  - b\n    c\n- d\n"
    assert site.for_mkdocs(nested) == "- a\n    - b\n        c\n- d\n"
    block = "```\n- a\n  - b\n1. c\n```\n"
    assert site.for_mkdocs(block) == block


def test_every_key_of_a_build_has_its_meaning() -> None:
    rows = [line for line in site.settings().splitlines() if line.startswith("| `")]
    cells = {row.split("|")[1].strip(): [cell.strip() for cell in row.split("|")] for row in rows}
    assert [row for row in rows if not row.split("|")[4].strip()] == []
    assert len(rows) > 40
    assert cells["`label_smoothing`"][2] == "from 0 below 1"
    assert cells["`start`"][2:4] == ["`auto`, `scratch`, `teacher`", "`auto`"]
    assert cells["`seed`"][2] == "from 0 below 4,294,967,296"
    assert cells["`profiles`"][2:4] == ["list: text", "required"]


def test_python_parts_name_what_a_package_exports() -> None:
    page = site.fill_in("before\n\n<!-- generated: python mdp -->\n")
    assert "::: mdp.Client\n" in page
    assert "__version__" not in page


def test_both_builders_read_the_same_file() -> None:
    file = Path("site/mkdocs.yml")
    material, successor = site.builder(None, file), site.builder("bin/zensical", file)
    assert material[1:4] == ["-m", "mkdocs", "build"]
    assert successor[:2] == ["bin/zensical", "build"]
    assert {"--strict", "--config-file", str(file)} <= set(material) & set(successor)


def test_colours_and_fonts_are_those_of_the_gateway_s_page() -> None:
    page = site.PAGE.read_text(encoding="utf-8")
    made = site.style(page)
    light, dark = re.findall(r"--accent: (#\w+);", page)
    assert re.findall(r"scheme=(\w+)\] \{[^}]*--accent: (#\w+);", made) == [
        ("default", light), ("slate", dark),
    ]  # fmt: skip
    assert "--md-text-font-family: system-ui, " in made
    # Every colour that is used is one of the page's.
    used = set(re.findall(r"var\((--\w[\w-]*)\)", site.STYLE))
    assert used <= set(re.findall(r"(--[\w-]+): ", made))
    with pytest.raises(ValueError, match="expected :root twice"):
        site.style(":root { --accent: red; }")


def test_summaries_of_commands_are_whole() -> None:
    page = "## `mdp`\n\nAll.\n\n* `look`: See...\n* `--json`: Lines.\n\n### `mdp look`\n\nSee it."
    assert site.whole(page) == page.replace("See...", "See it.")


def test_every_page_is_in_the_navigation() -> None:
    named = [page for section in site.navigation() for pages in section.values() for page in pages]
    there = {
        path.relative_to(site.ROOT).as_posix()
        for path in site.pages()
        if path.suffix == ".md" and path.is_relative_to(site.ROOT / "docs")
    }
    assert len(named) == len(set(named))
    assert there - set(named) == {site.LEFT_OUT}


def test_what_is_loaded_of_other_hosts_is_found(tmp_path: Path) -> None:
    (tmp_path / "a.html").write_text(
        '<a href="https://example.org"></a><script src="here.js"></script>'
        '<link rel="canonical" href="https://example.org/a">'
    )
    assert site.loads(tmp_path) == []
    (tmp_path / "b.html").write_text(
        '<img src="//example.org/a.png"><link rel="stylesheet" href=https://example.org/b.css>'
    )
    assert len(site.loads(tmp_path)) == 2
