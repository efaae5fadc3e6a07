"""The chart's training job, as its template has it, without a cluster."""

import re
from collections.abc import Sequence
from pathlib import Path

_TEMPLATE = Path(__file__).parents[2] / "deploy" / "chart" / "templates" / "training.yaml"
#: Name and port at which the first pod of the job is met.
MEETING = ("photos-0.photos", 29500)


def pod_arguments(rank: int, words: Sequence[str], meeting: tuple[str, int] = MEETING) -> list[str]:
    """Arguments of torchrun in a pod of a job named photos for two machines.

    `words` are mdp-partition, or the path of it, and its arguments; `meeting` is another host and
    port than the job's own.
    """
    host, port = meeting
    text = _TEMPLATE.read_text()
    listed = text.split("          args:\n")[1].split("{{- range .arguments }}")[0]
    for what, value in (
        ("{{ .machines }}", "2"),
        ("{{ .processes }}", "1"),
        ("$(JOB_COMPLETION_INDEX)", str(rank)),
        ("{{ .name }}-0.{{ .name }}", host),
        ("master-port=29500", f"master-port={port}"),
    ):
        assert listed.count(what) == 1, what
        listed = listed.replace(what, value)
    found = re.findall(r"^ +- (.+)$", listed, re.M)
    assert found.pop() == "mdp-partition"
    return [*found, *words]
