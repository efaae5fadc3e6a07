"""Tools of the gate: subjects that fit, small files, live links; and counted words."""

import subprocess
from pathlib import Path

import pytest

from tools import large_files, links, subjects, words


def git(folder: Path, *words: str) -> None:
    identity = ["-c", "user.name=test", "-c", "user.email=test@example.org"]
    subprocess.run(["git", *identity, *words], cwd=folder, check=True, capture_output=True)


@pytest.fixture
def repository(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Its main has one commit with a long subject, and its branch nothing yet."""
    folder = tmp_path / "repository"
    folder.mkdir()
    git(folder, "init", "--quiet", "--initial-branch", "main")
    git(folder, "commit", "--quiet", "--allow-empty", "--message", "a" * 80)
    git(folder, "switch", "--quiet", "--create", "branch")
    monkeypatch.setattr(subjects, "ROOT", folder)
    return folder


def test_a_branchs_own_commits(repository: Path, capsys: pytest.CaptureFixture[str]) -> None:
    git(repository, "commit", "--quiet", "--allow-empty", "--message", "b" * 72)
    assert subjects.main([]) == 0
    git(repository, "commit", "--quiet", "--allow-empty", "--message", "c" * 73)
    assert subjects.main([]) == 1
    said = capsys.readouterr().out
    assert said == f"subject of a commit: expected at most 72 characters, got 73: {'c' * 73}\n"


def test_main_answers_for_its_latest_commits(repository: Path) -> None:
    git(repository, "switch", "--quiet", "main")
    assert subjects.main([]) == 1
    for number in range(subjects.LATEST):
        git(repository, "commit", "--quiet", "--allow-empty", "--message", str(number))
    assert subjects.main([]) == 0


def test_a_shallow_clone_is_not_checked(
    repository: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    git(tmp_path, "clone", "--quiet", "--depth", "1", f"file://{repository}", "shallow")
    for folder in (tmp_path / "shallow", tmp_path):
        monkeypatch.setattr(subjects, "ROOT", folder)
        assert subjects.main([]) == 0
        assert "not checked" in capsys.readouterr().out


def test_a_message_is_read_as_git_keeps_it(tmp_path: Path) -> None:
    message = tmp_path / "message"
    message.write_text(f"# {'x' * 90}\n\n{'d' * 72}\n\n{'y' * 90}\n")
    assert subjects.main([str(message)]) == 0
    message.write_text("e" * 73)
    assert subjects.main([str(message)]) == 1


def test_a_large_file_is_named(tmp_path: Path) -> None:
    (tmp_path / "examples/bundles/cifar10").mkdir(parents=True)
    names = ["large.bin", "small.bin", "examples/bundles/cifar10/large.bin"]
    for name in names:
        size = large_files.MOST_BYTES + ("large" in name)
        (tmp_path / name).write_bytes(bytes(size))
    found = large_files.too_large(tmp_path, [*names, "gone.bin"])
    assert found == [f"{large_files.MOST_BYTES + 1} bytes: large.bin"]


def test_dead_links_anchors_and_mentions_are_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    page, gone = "docs" + "/page.md", "docs" + "/gone.md"
    (tmp_path / "docs").mkdir()
    headings = "# A `code` heading\n\n```\n# none\n```\n\n## Twice\n\n## Twice\n"
    (tmp_path / page).write_text(headings)
    good = f"[a]({page}#a-code-heading) [b]({page}#twice-1) [c](https://x.org/d.md) `[d](no)`"
    (tmp_path / "README.md").write_text(f"{good}\n```\n[e](no)\n```\n")
    (tmp_path / "module.py").write_text(f'"""See {page}."""\n')
    monkeypatch.setattr(links, "list_tracked", lambda: ["README.md", "module.py", page])
    assert links.main(tmp_path) == 0
    (tmp_path / "README.md").write_text(f"[a](gone.md) [b]({page}#none) [c](#none)\n")
    (tmp_path / "module.py").write_text(f'"""See {gone}."""\n')
    assert links.main(tmp_path) == 1
    assert capsys.readouterr().out.splitlines() == [
        "README.md: link to gone.md: expected a file",
        f"README.md: link to {page}#none: expected a heading of this name",
        "README.md: link to #none: expected a heading of this name",
        f"module.py: mention of {gone}: expected a file",
    ]


def test_words_that_name_no_subject_are_counted() -> None:
    count = words.Count()
    one = ('"""What is it."""', "class Box:", "    def told(self): ...", "    def read(self): ...")
    two = ('"""A box."""', "class Box: ...", "def feed(): ...", "def _served(): ...")
    count.add("one.py", "".join(f"{line}\n" for line in one))
    count.add("two.py", "".join(f"{line}\n" for line in two))
    assert (count.lines, count.docstrings, count.functions) == (8, 2, 4)
    assert count.questions == ["one.py:1 What is it."]
    assert count.participles == ["one.py:3 told", "two.py:4 _served"]
    assert count.twice == {"Box": ["one.py:2", "two.py:2"]}
