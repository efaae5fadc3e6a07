"""What the gateway counts of an answer."""

import pytest

from mdp.gateway.metrics import Metrics
from mdp.requests.prediction import MemberTiming, Prediction


@pytest.mark.parametrize("frame", [None, 7])
def test_a_suspected_camera_is_a_gauge_of_looks(frame: int | None) -> None:
    members = tuple(
        MemberTiming(device=name, k=k, queue_ms=1.0, compute_ms=1.0, network_ms=1.0, frame=frame)
        for k, name in enumerate(("alpha", "beta"))
    )
    answer = Prediction(
        label="red", probability=0.9, top=(("red", 0.9),), mode="stacked", used=("alpha", "beta"),
        missing={}, expected_accuracy=None, latency_ms=1.0, deadline_ms=80.0, members=members,
        suspects={"beta": "frozen"},
    )  # fmt: skip
    metrics = Metrics({})
    metrics.answered("m", [answer])
    told = metrics.exposition("")[0].decode().splitlines()
    found = [line for line in told if line.startswith("mdp_camera_suspect{")]
    gauge = 'mdp_camera_suspect{{device="{}",model="m",why="{}"}} {}'
    wanted = [
        gauge.format("alpha", "disagrees", "0.0"),
        gauge.format("alpha", "frozen", "0.0"),
        gauge.format("beta", "disagrees", "0.0"),
        gauge.format("beta", "frozen", "1.0"),
    ]
    assert found == ([] if frame is None else wanted)
