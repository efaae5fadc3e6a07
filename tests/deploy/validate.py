"""Kubernetes' and KServe's own schemas hold for the manifests in deploy/kubernetes.

PYTHON tests/deploy/validate.py FILE...      (make manifests)

PYTHON has kubernetes-validate, and kserve without what it requires. Prints a line for each
manifest, and fails with the first that is refused; then with a broken one that is not.
"""

import ast
import copy
import importlib.util
import re
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import kubernetes_validate
import yaml

#: The newest and the oldest supported release of Kubernetes.
VERSIONS = ("1.37", "1.30")
#: Keys of kinds that Kubernetes knows, misspelt or of another type, beside where they belong.
BREAKS = {
    "Deployment": ("spec.template.spec.containers.0.readinessProbe.httpGet.prot", 1),
    "DaemonSet": ("spec.template.spec.containers.0.image", 7),
    "Job": ("spec.completionsMode", "Indexed"),
    "Namespace": ("metadata.label", {}),
    "NetworkPolicy": ("spec.podSelector.matchLabel", {}),
    "PodDisruptionBudget": ("spec.minAvailableX", 1),
    "Service": ("spec.ports.0.port", "https"),
    "ServingRuntime": ("spec.containers.0.securityContext.runAsNonroot", True),
    "InferenceService": ("spec.predictor.model.protocol", "v2"),
}


class Refused(Exception):
    """A manifest that no cluster would take."""


def check(manifest: dict[str, Any], version: str) -> None:
    """Raise Refused for a manifest that the schemas do not allow."""
    if manifest["apiVersion"].startswith("serving.kserve.io/"):
        group = manifest["apiVersion"].partition("/")[2].capitalize()
        _check_kserve(manifest, f"{group}{manifest['kind']}", manifest["kind"], version)
        return
    try:
        kubernetes_validate.validate(manifest, version, strict=True)
    except (kubernetes_validate.ValidationError, kubernetes_validate.SchemaNotFoundError) as error:
        raise Refused(f"{manifest['kind']}: {error.message}") from error


def _check_kserve(value: object, kind: str, place: str, version: str) -> None:
    """Raise Refused unless `value` has only the keys of KServe's `kind`, each of its type."""
    if not isinstance(value, dict):
        raise Refused(f"{place}: expected a table, got {value!r}")
    types, names = _model(kind)
    pod: dict[str, Any] = {}
    for key, item in value.items():
        if key not in names:
            raise Refused(f"{place}: {key}: expected one of {', '.join(sorted(names))}")
        many = re.fullmatch(r"list\[(\w+)\]", types[names[key]])
        wanted = many[1] if many else types[names[key]]
        if many and not isinstance(item, list):
            raise Refused(f"{place}.{key}: expected a list, got {item!r}")
        if re.match(r"V\d", wanted) and not re.match(r"V\d+(alpha|beta)", wanted):
            if wanted != "V1ObjectMeta":
                pod[key] = item
            continue
        for one in item if many else [item]:
            if wanted.startswith("V"):
                _check_kserve(one, wanted, f"{place}.{key}", version)
            elif not isinstance(one, {"str": str, "bool": bool, "int": int}.get(wanted, object)):
                raise Refused(f"{place}.{key}: expected {wanted}, got {one!r}")
    if pod:
        # What KServe takes over from a pod's specification.
        spec = {"containers": [{"name": "any"}], **pod}
        check({"apiVersion": "v1", "kind": "Pod", "metadata": {"name": "x"}, "spec": spec}, version)


def _model(kind: str) -> tuple[dict[str, str], dict[str, str]]:
    """Python name -> type, and JSON's name -> Python's, of a model of KServe's client."""
    spec = importlib.util.find_spec("kserve")
    assert spec is not None
    assert spec.submodule_search_locations
    words = re.sub(r"(?<!^)(?=[A-Z])", "_", kind).lower()
    path = Path(spec.submodule_search_locations[0]) / "models" / f"{words}.py"
    found = {}
    # Importing it would need all that KServe's server requires.
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Assign) and isinstance(node.targets[0], ast.Name):
            found[node.targets[0].id] = node.value
    types = ast.literal_eval(found["openapi_types"])
    names = ast.literal_eval(found["attribute_map"])
    return types, {json: python for python, json in names.items()}


def break_manifest(manifest: dict[str, Any]) -> dict[str, Any]:
    """A copy with what `BREAKS` says."""
    path, value = BREAKS[manifest["kind"]]
    whole = copy.deepcopy(manifest)
    *parents, last = path.split(".")
    place: Any = whole
    for part in parents:
        place = place[int(part) if part.isdigit() else part]
    place[last] = value
    return whole


def manifests(files: list[str]) -> Iterator[dict[str, Any]]:
    """Every document of the files."""
    for file in files:
        yield from filter(None, yaml.safe_load_all(Path(file).read_text()))


def main(files: list[str]) -> None:
    """Check each manifest, and that each would be refused if it were wrong."""
    kinds = set()
    for manifest in manifests(files):
        named = f"{manifest['kind']} {manifest['metadata']['name']}"
        for version in VERSIONS:
            check(manifest, version)
            try:
                check(break_manifest(manifest), version)
            except Refused as error:
                refusal = str(error).splitlines()[0]
            else:
                sys.exit(f"{named}: {BREAKS[manifest['kind']][0]} is accepted by {version}")
        kinds.add(manifest["kind"])
        print(f"{named}: fine; {refusal[:100]}")
    if missing := BREAKS.keys() - kinds:
        sys.exit(f"no {', '.join(sorted(missing))}")


if __name__ == "__main__":
    main(sys.argv[1:])
