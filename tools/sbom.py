"""Write what is installed as a software bill of materials, CycloneDX 1.6 in JSON.

    python tools/sbom.py FILE        (make sbom)
    python tools/sbom.py FILE --packages FOLDER --extras agent,sign        (deploy/Containerfile)

Names, versions, licences and requirements are those of the installed packages, or of those in a
folder, hashes those of constraints.lock. The same environment gives the same bytes.
"""

import argparse
import json
import re
import sys
import uuid
from importlib import metadata
from pathlib import Path
from typing import Any

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

ROOT = Path(__file__).resolve().parent.parent
PROJECT = "mdp-edge"
#: The extras that the gate installs.
EXTRAS = ("agent", "partition", "dev")
#: Brought by `python -m venv`; nothing requires it.
NOT_A_PART = frozenset({"pip"})


def read_hashes() -> dict[str, list[str]]:
    """Name -> SHA-256 of every file of the pinned version."""
    found: dict[str, list[str]] = {}
    name = ""
    for line in (ROOT / "constraints.lock").read_text().splitlines():
        if match := re.match(r"([A-Za-z0-9._-]+)==", line):
            name = canonicalize_name(match[1])
            found[name] = []
        if match := re.search(r"--hash=sha256:([0-9a-f]{64})", line):
            found[name].append(match[1])
    return found


def reference(distribution: metadata.Distribution) -> str:
    """The package's URL, by which others refer to it."""
    name = canonicalize_name(distribution.metadata["Name"])
    return f"pkg:pypi/{name}@{distribution.version.replace('+', '%2B')}"


def licences(distribution: metadata.Distribution) -> list[dict[str, Any]]:
    """As the package says: an SPDX expression, else the names of its classifiers."""
    if "License-Expression" in distribution.metadata:
        expression = distribution.metadata["License-Expression"]
        return [{"expression": expression}]
    classifiers = distribution.metadata.get_all("Classifier") or []
    names = [c.rpartition(" :: ")[2] for c in classifiers if c.startswith("License ::")]
    return [{"license": {"name": name}} for name in sorted(set(names))]


def component(distribution: metadata.Distribution, hashes: dict[str, list[str]]) -> dict[str, Any]:
    """One package."""
    found: dict[str, Any] = {
        "type": "library",
        "bom-ref": reference(distribution),
        "name": distribution.metadata["Name"],
        "version": distribution.version,
        "purl": reference(distribution),
    }
    if known := licences(distribution):
        found["licenses"] = known
    if files := hashes.get(canonicalize_name(distribution.metadata["Name"])):
        found["hashes"] = [{"alg": "SHA-256", "content": content} for content in files]
    return found


def requirements_of(distribution: metadata.Distribution, extras: tuple[str, ...]) -> set[str]:
    """Names of the packages that one requires here."""
    names = set()
    for text in distribution.requires or []:
        requirement = Requirement(text)
        marker = requirement.marker
        if marker is None or any(marker.evaluate({"extra": e}) for e in ("", *extras)):
            names.add(str(canonicalize_name(requirement.name)))
    return names


def bill(packages: list[str], extras: tuple[str, ...]) -> dict[str, Any]:
    """The whole document, of what is installed in the folders `packages`, with these extras."""
    here = {
        str(canonicalize_name(d.metadata["Name"])): d
        for d in metadata.distributions(path=packages)
        if canonicalize_name(d.metadata["Name"]) not in NOT_A_PART
    }
    if PROJECT not in here:
        raise SystemExit(f"{', '.join(packages)}: expected {PROJECT} among the packages")
    hashes = read_hashes()
    project = here[PROJECT]
    parts = [component(here[name], hashes) for name in sorted(here) if name != PROJECT]
    needs = [
        {
            "ref": reference(here[name]),
            "dependsOn": sorted(
                reference(here[other])
                for other in requirements_of(here[name], extras if name == PROJECT else ())
                if other in here
            ),
        }
        for name in sorted(here)
    ]
    content = {
        "bomFormat": "CycloneDX",
        "specVersion": "1.6",
        "version": 1,
        "metadata": {"component": {**component(project, {}), "type": "application"}},
        "components": parts,
        "dependencies": needs,
    }
    serial = uuid.uuid5(uuid.NAMESPACE_URL, json.dumps(content, sort_keys=True))
    return {**content, "serialNumber": f"urn:uuid:{serial}"}


def main() -> None:
    """Write the file that is named."""
    parser = argparse.ArgumentParser(description="Write a bill of materials, CycloneDX 1.6.")
    parser.add_argument("file", type=Path)
    parser.add_argument("--packages", help="a folder of installed packages instead of this one's")
    parser.add_argument("--extras", default=",".join(EXTRAS), help="that were installed")
    given = parser.parse_args()
    packages = sys.path if given.packages is None else [given.packages]
    content = bill(packages, tuple(given.extras.split(",")))
    given.file.write_text(json.dumps(content, indent=1) + "\n")
    print(f"{given.file}: {len(content['components'])} packages")


if __name__ == "__main__":
    main()
