"""The chart by Helm itself: what it renders, and what it refuses.

PYTHON tests/deploy/chart.py --write      writes deploy/kubernetes/mdp.yaml anew
PYTHON tests/deploy/chart.py OUT          compares it, and writes every option's manifests to OUT
                                          (make manifests)
PYTHON tests/deploy/chart.py --values     prints what it renders with the values (YAML) that come in
                                          by standard input (make cluster)

PYTHON has helm-python-sdk, which is Helm 4 as a library.
"""

import sys
from pathlib import Path
from typing import Any

import yaml
from helm_python import Chart, lint
from helm_python.errors import HelmError

ROOT = Path(__file__).parents[2]
CHART = ROOT / "deploy" / "chart"
RENDERED = ROOT / "deploy" / "kubernetes" / "mdp.yaml"
HEAD = "# Rendered from deploy/chart as it is: python tests/deploy/chart.py --write\n"
#: Every option at once.
WHOLE: dict[str, Any] = {
    "imagePullSecrets": ["images"],
    "updateStrategy": "OnDelete",
    "bundle": {
        "reference": f"oci://r.example:5000/a/b@sha256:{'0' * 64}",
        "key": "release",
        "authority": "authority",
    },
    "devices": [
        {
            "name": "n100",
            "nodeSelector": {"kubernetes.io/arch": "amd64"},
            "affinity": {
                "nodeAffinity": {
                    "requiredDuringSchedulingIgnoredDuringExecution": {
                        "nodeSelectorTerms": [
                            {"matchExpressions": [{"key": "shelf", "operator": "Exists"}]}
                        ]
                    }
                }
            },
            "tolerations": [{"key": "shelf", "operator": "Exists", "effect": "NoSchedule"}],
            "options": ["--source=folder:/srv/pictures", "--threads=2"],
            "hostPaths": ["/srv/pictures"],
            "limits": {"memory": "2Gi", "nvidia.com/gpu": 1},
            "requests": {"cpu": "1"},
        }
    ],
    "gateway": {
        "replicas": 3,
        "minAvailable": 2,
        "affinity": {
            "nodeAffinity": {
                "preferredDuringSchedulingIgnoredDuringExecution": [
                    {
                        "weight": 10,
                        "preference": {
                            "matchExpressions": [{"key": "mdp/device", "operator": "DoesNotExist"}]
                        },
                    }
                ]
            }
        },
    },
    "training": {
        "name": "photos",
        "machines": 3,
        "processes": 2,
        "arguments": ["train", "--run=/work/run", "--plan=/work/plan.toml", "--data=/work/photos"],
        "nodeSelector": {"kubernetes.io/arch": "amd64"},
        "affinity": {
            "nodeAffinity": {
                "preferredDuringSchedulingIgnoredDuringExecution": [
                    {
                        "weight": 80,
                        "preference": {
                            "matchExpressions": [
                                {"key": "mdp/cores", "operator": "Gt", "values": ["7"]}
                            ]
                        },
                    }
                ]
            }
        },
        "limits": {"memory": "16Gi", "nvidia.com/gpu": 2},
    },
    "networkPolicy": {"registry": ["10.0.0.5/32"], "registryPort": 5000},
}
#: Values that are refused, and a part of the reason.
WRONG: list[tuple[dict[str, Any], str]] = [
    ({"devices": [{"name": "n100"}, {"name": "n100"}]}, "n100 is there twice"),
    ({"devices": []}, "devices"),
    ({"devices": [{"name": "N100"}]}, "devices"),
    ({"devices": [{"name": "n100", "option": []}]}, "option"),
    ({"device": [{"name": "n100"}]}, "device"),
    ({"bundle": {"reference": "cifar10:1"}}, "reference"),
    ({"updateStrategy": "Recreate"}, "updateStrategy"),
    ({"gateway": {"replicas": 1}}, "or no node can be drained"),
    ({"networkPolicy": {"registry": ["registry.example"]}}, "registry"),
    ({"training": {"name": "photos"}}, "training.arguments: expected those of mdp-partition"),
    ({"training": {"name": "photos", "machines": 0}}, "machines"),
    ({"training": {"name": "Photos"}}, "name"),
]


def rendered(values: dict[str, Any]) -> str:
    """The manifests as one text, in the order of the files; raises HelmError."""
    with Chart.load(CHART) as chart:
        made = chart.render(values, name="mdp", namespace="mdp")
    texts = [text.strip().removeprefix("---").strip() for _, text in sorted(made.items())]
    return HEAD + "".join(f"---\n{text}\n" for text in texts if text)


def main(argument: str) -> None:
    """Write or check; the exit code is 1 with a line where something is wrong."""
    if argument == "--values":
        try:
            print(rendered(yaml.safe_load(sys.stdin)), end="")
        except HelmError as error:
            sys.exit(" ".join(str(error).split()))
        return
    whole = rendered({})
    if argument == "--write":
        RENDERED.write_text(whole)
        return
    if RENDERED.read_text() != whole:
        sys.exit(f"{RENDERED}: not as the chart renders it: {HEAD.strip('# ')}")
    if errors := lint(CHART)["errors"]:
        sys.exit(f"{CHART}: {errors}")
    monitored = yaml.safe_load_all(rendered({"serviceMonitor": {"enabled": True}}))
    if "ServiceMonitor" not in [manifest["kind"] for manifest in monitored]:
        sys.exit("serviceMonitor.enabled: renders none")
    for values, expected in WRONG:
        try:
            rendered(values)
        except HelmError as error:
            reason = " ".join(str(error).split())
            if expected not in reason:
                sys.exit(f"{values}: expected {expected!r}, got {reason}")
            print(f"refused: {values}: ...{reason[-100:]}")
        else:
            sys.exit(f"{values}: is rendered")
    Path(argument).write_text(rendered(WHOLE))


if __name__ == "__main__":
    main(sys.argv[1])
