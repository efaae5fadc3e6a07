"""Metrics of the gateway about its devices."""

from pathlib import Path
from typing import cast

import pytest

from devices.agent.counters import Counters
from mdp.client.status import DeviceStatus
from mdp.formats.bundle import Bundle
from mdp.formats.fleet import Fleet, FleetEntry
from mdp.gateway.devices import Roll
from mdp.gateway.fleets import ServedFleet
from mdp.gateway.metrics import OTHER, Metrics, provider_label
from mdp.gateway.workers import Workers
from mdp.protocol.messages import OUTCOMES, RELOADS, answers_key
from mdp.requests.prediction import Prediction
from mdp.testing.bundles import DEVICES, write_bundle


class Told:
    """A fleet whose devices said what they were told to."""

    def __init__(self, folder: Path) -> None:
        self.bundle = Bundle.open(write_bundle(folder / "bundle"))
        entries = [
            FleetEntry(device=name, address=f"tcp://127.0.0.1:{9000 + k}", k=k)
            for k, name in enumerate(DEVICES)
        ]
        self.roll = Roll(Fleet(bundle="bundle", devices=entries), self.bundle, "stacked")
        self._metrics = Metrics({"colours": cast(ServedFleet, self)})

    @property
    def series(self) -> int:
        """Samples of a scrape."""
        lines = self._metrics.exposition("")[0].decode().splitlines()
        return sum(not line.startswith("#") for line in lines)

    def answer(self, known: bool | None) -> None:
        """Count an answer of the device alpha."""
        answer = Prediction(
            label="red", probability=0.9, top=(("red", 0.9),), mode="single", used=("alpha",),
            missing={}, expected_accuracy=0.5, latency_ms=1.0, deadline_ms=80.0, members=(),
            known=known,
        )  # fmt: skip
        self._metrics.count_answers("colours", [answer])

    def scrape(self, family: str, *statuses: DeviceStatus) -> dict[str, float]:
        """Labels -> value of the samples of `family`, after the devices have said `statuses`."""
        self.roll.on_statuses(statuses, 1.0)
        lines = self._metrics.exposition("")[0].decode().splitlines()
        found = [line for line in lines if line.startswith(f"{family}{{")]
        return {line.rpartition(" ")[0]: float(line.rpartition(" ")[2]) for line in found}


@pytest.fixture
def told(tmp_path: Path) -> Told:
    return Told(tmp_path)


def test_answers_about_unknown_items_are_counted(told: Told) -> None:
    assert told.scrape("mdp_unknown_answers_total") == {
        'mdp_unknown_answers_total{model="colours"}': 0.0
    }
    for known in (True, False, None, False):
        told.answer(known)
    assert [*told.scrape("mdp_unknown_answers_total").values()] == [2.0]


def test_a_suspected_camera_is_a_gauge_of_devices_with_a_camera(told: Told) -> None:
    alpha = DeviceStatus(device="alpha", address="", state="READY", source="camera:0: frame 1, ...")
    beta = DeviceStatus(
        device="beta", address="", state="READY", source="camera:0: frame 1", suspect="disagrees"
    )
    gamma = DeviceStatus(device="gamma", address="", state="READY")
    assert told.scrape("mdp_camera_suspect", alpha, beta, gamma) == {
        f'mdp_camera_suspect{{device="{device}",model="colours",why="{why}"}}': value
        for device, why, value in (
            ("alpha", "disagrees", 0.0),
            ("alpha", "frozen", 0.0),
            ("beta", "disagrees", 1.0),
            ("beta", "frozen", 0.0),
        )
    }


def alpha(provider: str, counts: dict[str, int]) -> DeviceStatus:
    return DeviceStatus(device="alpha", address="", state="READY", provider=provider, counts=counts)


def test_an_agent_s_words_make_no_new_series(told: Told) -> None:
    honest = dict.fromkeys((*OUTCOMES, *RELOADS, answers_key("ab" * 32)), 2)
    told.scrape("mdp_device_requests_total", alpha("CPUExecutionProvider", honest))
    told.scrape("mdp_device_requests_total", alpha("x", {"y": 1} | honest))
    before = told.series
    for scrape in range(5):
        counts = {f"outcome {scrape} {number}": number for number in range(100)} | honest
        found = told.scrape(
            "mdp_device_requests_total", alpha(f"Provider{scrape}ExecutionProvider", counts)
        )
        assert told.series == before
        ours = [name for name in found if 'device="alpha"' in name]
        assert len(ours) == len(OUTCOMES + RELOADS) + 1, "and no answers twice"
        other = next(found[name] for name in ours if 'outcome="other"' in name)
        assert other == sum(range(100))
        (info,) = [name for name in told.scrape("mdp_device") if 'device="alpha"' in name]
        assert 'provider="other"' in info


def test_providers_that_runtimes_have_are_known() -> None:
    import onnxruntime

    openvino = ["openvino:CPU", "openvino:GPU", "openvino:GPU.1", "openvino:NPU"]
    for provider in (*onnxruntime.get_all_providers(), *openvino, ""):
        assert provider_label(provider) == provider
    assert provider_label(None) == ""
    for provider in ("openvino:GPU.12", "openvino:TPU", "CPUExecutionProvider ", "cpu"):
        assert provider_label(provider) == OTHER


class Pool:
    """Workers of which one is away."""

    ready, died = 1, 3


def test_workers_are_gauges_where_there_are_any() -> None:
    def lines(metrics: Metrics) -> list[str]:
        text = metrics.exposition("")[0].decode()
        return [line for line in text.splitlines() if line.startswith("mdp_gateway")]

    assert lines(Metrics({}, cast(Workers, Pool()))) == [
        "mdp_gateway_workers 1.0",
        "mdp_gateway_workers_died_total 3.0",
    ]
    assert lines(Metrics({})) == []


def test_outcomes_are_those_that_agents_count() -> None:
    assert Counters().counts.keys() == {*OUTCOMES, *RELOADS}
