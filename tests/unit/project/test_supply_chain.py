"""Packages that the gate installs: pinned, hashed, and listed."""

import json
import re
import subprocess
import sys
import tomllib
from importlib import metadata
from pathlib import Path

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

ROOT = Path(__file__).parents[3]
#: Builds differ by machine (tools/lock.py), as do the libraries that they bring.
WITHOUT_HASHES = {"torch", "torchvision"}
OF_TORCH = ("nvidia-", "cuda-", "triton")
#: Installed by `make fuzz` and `make lock`.
NOT_OF_THE_GATE = {"atheris", "uv"}


def pins() -> dict[str, str]:
    lines = (ROOT / "constraints.txt").read_text().splitlines()
    return {canonicalize_name(line.partition("==")[0]): line.partition("==")[2] for line in lines}


def read_lock() -> dict[str, tuple[str, int]]:
    """Name -> version and number of hashes."""
    text = (ROOT / "constraints.lock").read_text()
    entries = re.findall(
        r"^([\w.-]+)==(\S+) \\\n((?:    --hash=sha256:[0-9a-f]{64}.*\n)+)", text, re.M
    )
    return {canonicalize_name(n): (v, hashes.count("--hash=")) for n, v, hashes in entries}


def test_every_version_that_the_gate_installs_has_hashes() -> None:
    wanted = {n: v for n, v in pins().items() if n not in WITHOUT_HASHES | NOT_OF_THE_GATE}
    assert {name: version for name, (version, _) in read_lock().items()} == wanted
    assert all(count for _, count in read_lock().values())


def test_nothing_is_installed_that_is_not_pinned() -> None:
    known = {*pins(), "pip", "mdp-edge"}
    here = {str(canonicalize_name(d.metadata["Name"])) for d in metadata.distributions()}
    assert {name for name in here - known if not name.startswith(OF_TORCH)} == set()


def test_build_requirements_are_pinned() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())
    for text in project["build-system"]["requires"]:
        requirement = Requirement(text)
        assert str(requirement.specifier) == f"=={pins()[canonicalize_name(requirement.name)]}"


def test_the_bill_of_materials_names_everything_once(tmp_path: Path) -> None:
    path = tmp_path / "sbom.json"
    subprocess.run(
        [sys.executable, str(ROOT / "tools" / "sbom.py"), str(path)], check=True, timeout=60
    )
    content = json.loads(path.read_text())
    assert (content["bomFormat"], content["specVersion"]) == ("CycloneDX", "1.6")
    parts = {part["bom-ref"]: part for part in content["components"]}
    assert len(parts) == len(content["components"])
    pillow = next(part for part in parts.values() if part["name"].lower() == "pillow")
    assert pillow["purl"] == f"pkg:pypi/pillow@{metadata.version('pillow')}"
    assert len(pillow["hashes"]) == read_lock()["pillow"][1]
    project = content["metadata"]["component"]["bom-ref"]
    needs = {entry["ref"]: entry["dependsOn"] for entry in content["dependencies"]}
    assert needs.keys() == {*parts, project}
    assert all(other in parts for others in needs.values() for other in others)
    assert pillow["purl"] in needs[project]


def test_the_bill_of_another_environment(tmp_path: Path) -> None:
    packages = tmp_path / "site-packages"
    for name, version, text in (
        ("mdp_edge", "0.1.0", "Requires-Dist: Pillow\nRequires-Dist: torch; extra == 'partition'"),
        ("pillow", "13.0.0", "License-Expression: MIT-CMU"),
        ("torch", "2.0", ""),
    ):
        made = packages / f"{name}-{version}.dist-info"
        made.mkdir(parents=True)
        project = name.replace("_", "-")
        (made / "METADATA").write_text(f"Name: {project}\nVersion: {version}\n{text}\n")
    path = tmp_path / "sbom.json"
    words = [sys.executable, str(ROOT / "tools" / "sbom.py"), str(path), "--extras", "agent"]
    subprocess.run([*words, "--packages", str(packages)], check=True, timeout=60)
    content = json.loads(path.read_text())
    assert {one["name"] for one in content["components"]} == {"pillow", "torch"}
    needs = {entry["ref"]: entry["dependsOn"] for entry in content["dependencies"]}
    assert needs["pkg:pypi/mdp-edge@0.1.0"] == ["pkg:pypi/pillow@13.0.0"]
    refused = subprocess.run(
        [*words, "--packages", str(tmp_path)], capture_output=True, text=True, timeout=60
    )
    assert (refused.returncode, refused.stderr) == (
        1,
        f"{tmp_path}: expected mdp-edge among the packages\n",
    )
