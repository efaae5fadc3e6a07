"""`mdp gateway --workers`: real workers that answer, hang, die and drain behind one gateway."""

import http.client
import io
import json
import signal
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from functools import partial
from pathlib import Path

import psutil
import pytest
from PIL import Image
from prometheus_client.parser import text_string_to_metric_families

from mdp.formats.fleet_edit import FleetFile
from mdp.testing.bundles import DEVICES, colour_picture, write_bundle
from mdp.testing.processes import PATIENCE_S, LineProcess, until
from tests.support.fleet import PLENTY_MS, Fleet
from tests.support.web.gateway import Gateway, gateway, with_limits

MODEL = "/v2/models/colours"
CLASSIFY = f"{MODEL}/classify?deadline_ms={PLENTY_MS:g}"
#: Requests in turn, so that each of two workers answers some.
SOME = 6


def png(label: str = "red") -> bytes:
    file = io.BytesIO()
    Image.fromarray(colour_picture(label)).save(file, "PNG")
    return file.getvalue()


@pytest.fixture(scope="module")
def fleet(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Fleet]:
    folder = tmp_path_factory.mktemp("workers")
    with Fleet(folder, write_bundle(folder / "bundle")) as fleet:
        fleet.start_all(*DEVICES)
        fleet.write()
        yield fleet


class Served:
    """A gateway with two workers, and what it writes to stderr."""

    def __init__(self, gateway: Gateway, log: Path) -> None:
        self.gateway, self._log = gateway, log
        # Its workers are ready, and agents are found, once it answers.
        for _ in range(SOME):
            assert self.used() == list(DEVICES)

    @property
    def said(self) -> list[str]:
        """Lines on stderr."""
        return self._log.read_text().splitlines()

    def used(self) -> list[str]:
        """Devices in the answer to a picture."""
        reply = self.gateway.ask(CLASSIFY, png())
        assert reply.status == 200, reply.body
        used: list[str] = reply.json["used"]
        return used

    def value(self, sample: str, **labels: str) -> float:
        """A sample of /metrics."""
        text = self.gateway.ask("/metrics").body.decode()
        (found,) = [
            each.value
            for family in text_string_to_metric_families(text)
            for each in family.samples
            if each.name == sample and labels.items() <= each.labels.items()
        ]
        return found

    def has_answered(self, pictures: int) -> bool:
        """Tell whether it has answered more than so many."""
        return self.value("mdp_answer_seconds_count") > pictures

    def all_are_back(self, died: int) -> None:
        """Wait until so many have died, and both workers are there."""

        def are_back() -> bool:
            dead = self.value("mdp_gateway_workers_died_total")
            return (dead, self.value("mdp_gateway_workers")) == (died, 2)

        until(are_back, f"{died} have died, and two workers are there")


@pytest.fixture
def served(fleet: Fleet, tmp_path: Path) -> Iterator[Served]:
    log = tmp_path / "log"
    with gateway("--fleet", fleet.folder / "fleet.toml", "--workers", 2, log=log) as found:
        yield Served(found, log)


def test_one_page_and_one_set_of_metrics(served: Served) -> None:
    assert len(served.gateway.workers) == 2
    before = [device["latencies_ms"] for device in served.gateway.ask("/fleets").json[0]["devices"]]
    assert [len(each) for each in before] == [SOME] * len(DEVICES)
    assert served.value("mdp_requests_total", outcome="answered") == SOME
    assert served.value("mdp_answer_seconds_count") == SOME
    for part in ("queue", "compute", "network", "held"):
        assert served.value("mdp_member_seconds_count", device="beta", part=part) == SOME
    bad = served.gateway.ask(CLASSIFY, b"no picture")
    assert (bad.status, "expected a picture" in bad.json["error"]) == (400, True)
    assert served.value("mdp_requests_total", outcome="refused") == 1
    assert served.value("mdp_requests_under_way") == 0
    late = served.gateway.ask(f"{MODEL}/classify?deadline_ms=0.001", png())
    assert (late.status, "no answer within 0.001 ms" in late.json["error"]) == (503, True)
    assert served.value("mdp_requests_total", outcome="deadline") == 1


def test_a_batch_of_pixels(served: Served) -> None:
    labels = ["red", "green", "blue"]
    pixels = b"".join(colour_picture(label).tobytes() for label in labels)
    images = {
        "name": "images", "datatype": "UINT8", "shape": [3, 40, 60, 3],
        "parameters": {"binary_data_size": len(pixels)},
    }  # fmt: skip
    head = json.dumps({"inputs": [images], "parameters": {"deadline_ms": PLENTY_MS}}).encode()
    headers = {"Inference-Header-Content-Length": str(len(head))}
    reply = served.gateway.ask(f"{MODEL}/infer", head + pixels, headers=headers)
    assert reply.status == 200, reply.body
    assert reply.json["outputs"][1]["data"][::3] == labels
    assert served.value("mdp_answer_seconds_count") == SOME + len(labels)


def test_a_switch_reaches_all_workers_and_those_after_them(served: Served) -> None:
    beta = f"{MODEL}/devices/beta"
    assert served.gateway.ask(beta, b'{"in_use": false}', method="PUT").status == 200
    assert [served.used() for _ in range(SOME)] == [["alpha", "gamma"]] * SOME
    for worker in served.gateway.workers:
        worker.kill()
    served.all_are_back(died=2)
    assert [served.used() for _ in range(SOME)] == [["alpha", "gamma"]] * SOME
    assert served.gateway.ask(beta, b'{"in_use": true}', method="PUT").status == 200
    assert [served.used() for _ in range(SOME)] == [list(DEVICES)] * SOME


def test_a_changed_fleet_reaches_all_workers(fleet: Fleet, served: Served) -> None:
    file = fleet.folder / "fleet.toml"
    whole = file.read_text()
    try:
        file.write_text(FleetFile.read(file).without("gamma").text)
        several = 2 * SOME

        def without_gamma() -> bool:
            return [served.used() for _ in range(several)] == [["alpha", "beta"]] * several

        until(without_gamma, "all workers have read the file again")
        names = [device["name"] for device in served.gateway.ask("/fleets").json[0]["devices"]]
        assert names == ["alpha", "beta"]
    finally:
        file.write_text(whole)


def test_a_worker_that_is_killed_costs_its_requests_and_no_connection(served: Served) -> None:
    known = served.gateway.workers
    events = http.client.HTTPConnection(served.gateway.host, timeout=PATIENCE_S)
    events.request("GET", "/events")
    stream = events.getresponse()
    assert stream.readline() == b"event: fleets\n"
    asking = http.client.HTTPConnection(served.gateway.host, timeout=PATIENCE_S)
    asking.request("GET", "/v2/health/live")
    assert asking.getresponse().read() == b'{"live":true}\n'
    kept = asking.sock
    for worker in known:
        worker.suspend()
    asking.request("POST", CLASSIFY, png())
    until(lambda: served.value("mdp_requests_under_way") == 1, "a worker has the request")
    for worker in known:
        worker.kill()
    refused = asking.getresponse()
    assert (refused.status, refused.headers["retry-after"]) == (503, "1")
    assert b"the worker with this request has ended" in refused.read()
    served.all_are_back(died=2)
    asking.request("POST", CLASSIFY, png())
    assert asking.getresponse().status == 200
    assert asking.sock is kept
    ended = "mdp: a worker of the gateway has ended (signal 9): another starts"
    assert [line.startswith(ended) for line in served.said] == [True] * 2
    assert served.value("mdp_requests_total", outcome="answered") == SOME + 1
    assert {worker.pid for worker in served.gateway.workers}.isdisjoint(w.pid for w in known)
    # The page's stream goes on: these answers are in it.
    assert json.loads(stream.readline().removeprefix(b"data: "))[0]["name"] == "colours"
    for connection in (events, asking):
        connection.close()


def test_figures_add_up_while_workers_die(served: Served) -> None:
    """Answers that callers get are those that are counted, and nothing else happens to them."""
    callers, each = 4, 20

    def ask(caller: int) -> Counter[int]:
        with closing(http.client.HTTPConnection(served.gateway.host, timeout=PATIENCE_S)) as own:
            found: Counter[int] = Counter()
            for _ in range(each):
                own.request("POST", CLASSIFY, png())
                response = own.getresponse()
                response.read()
                found[response.status] += 1
            return found

    with ThreadPoolExecutor(callers) as pool:
        asking = [pool.submit(ask, caller) for caller in range(callers)]
        for died in (1, 2):
            some = died * 3 * SOME
            until(partial(served.has_answered, some), f"{some} answers")
            served.gateway.workers[0].kill()
            served.all_are_back(died)
        found = sum((one.result(PATIENCE_S) for one in asking), Counter[int]())
    assert found.total() == callers * each
    assert found.keys() <= {200, 503}
    assert served.value("mdp_requests_total", outcome="answered") == SOME + found[200]
    assert served.value("mdp_answer_seconds_count") == SOME + found[200]
    assert served.value("mdp_requests_total", outcome="unavailable") == found[503]
    assert served.value("mdp_requests_under_way") == 0


def test_a_worker_that_hangs_is_not_waited_for_and_ended(served: Served) -> None:
    hanging, _ = served.gateway.workers
    hanging.suspend()
    replies = [served.gateway.ask(f"{MODEL}/classify?deadline_ms=2000", png()) for _ in range(2)]
    # They take turns.
    assert sorted(reply.status for reply in replies) == [200, 503]
    (refused,) = [reply for reply in replies if reply.status == 503]
    assert refused.json["error"] == "the worker with this request does not answer"
    # The other one is asked as long as this one has a request.
    assert served.used() == list(DEVICES)
    served.all_are_back(died=1)
    assert not hanging.is_running()
    assert len(served.said) == 1
    assert "(it was ended, as it did not answer)" in served.said[0]


def test_what_is_under_way_is_answered_before_the_end(served: Served) -> None:
    workers = served.gateway.workers
    for worker in workers:
        worker.suspend()
    with ThreadPoolExecutor(1) as pool:
        reply = pool.submit(served.gateway.ask, CLASSIFY, png())
        until(lambda: served.value("mdp_requests_under_way") == 1, "a worker has the request")
        # As a service manager does it: each process is told.
        served.gateway.signal(signal.SIGTERM)
        for worker in workers:
            worker.terminate()
            worker.resume()
        assert reply.result(PATIENCE_S).status == 200
    assert served.gateway.wait() in (0, -signal.SIGTERM)
    assert not any(worker.is_running() for worker in workers)
    assert served.said == []


def test_ctrl_c_ends_all_of_them(served: Served) -> None:
    workers = served.gateway.workers
    served.gateway.signal(signal.SIGINT)
    assert served.gateway.wait() == 130
    assert not any(worker.is_running() for worker in workers)
    assert served.said == []


def test_no_worker_outlives_a_gateway_that_is_killed(served: Served) -> None:
    workers = served.gateway.workers
    served.gateway.signal(signal.SIGKILL)
    _, alive = psutil.wait_procs(workers, PATIENCE_S)
    assert not alive


@pytest.mark.parametrize(
    ("program", "said"),
    [
        ("#!/bin/sh\nexit 3\n", "a worker has not started: exit code 3"),
        ("", "a worker cannot be started: Exec format error"),
    ],
)
def test_workers_that_do_not_start(fleet: Fleet, tmp_path: Path, program: str, said: str) -> None:
    failing, log = tmp_path / "python", tmp_path / "log"
    failing.write_text(program)
    failing.chmod(0o755)
    changes = ("import mdp.gateway.workers as workers", f"workers.COMMAND = ({str(failing)!r},)")
    command = [*with_limits(*changes), "gateway", "--fleet", fleet.folder / "fleet.toml"]
    options = ["--bind", "127.0.0.1:0", "--workers", 2]
    with LineProcess("gateway", [*command, *options], log) as process:
        assert process.process.wait(PATIENCE_S) == 2
    assert log.read_text() == f"mdp: {said}\n"
