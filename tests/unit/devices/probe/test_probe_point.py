"""Measuring one encoder: what is counted as what. A fake clock, a fake runtime."""

from typing import Any

import numpy as np
import pytest
from msgspec.structs import replace

from devices.probe.measure import MIN_RUNS, Instruments, execution_of, measure, sustain, warm_up_s
from tests.support.clock import Clock
from tests.support.probes import CPU, FakeRuntime, FakeSystem, a_run


def loading(clock: Clock, runtime: FakeRuntime, system: FakeSystem, seconds: float = 0.2) -> Any:
    """Opens `runtime` after some seconds, in which the process grows by 5 MB."""

    def load() -> FakeRuntime:
        clock.now_s += seconds
        system.resident = (system.resident or 0) + 5_000_000
        return runtime

    return load


def around(clock: Clock, system: FakeSystem) -> Instruments:
    return Instruments(system=system, clock=clock, own_cpu_s=lambda: 0.0)


def test_start_up_first_run_warm_up_and_steady_state_are_told_apart() -> None:
    clock = Clock()
    system = FakeSystem(clock)
    times_s = [0.5, 0.2, 0.02]
    runtime = FakeRuntime(clock, lambda n, now: times_s[n] if n < 3 else 0.01)
    found = measure(a_run(), loading(clock, runtime, system), 3.0, around(clock, system))
    assert found.start_up_ms == 200
    assert found.first_run_ms == 500
    assert found.warm_up_ms == 720
    assert found.latency_ms == found.p10_ms == found.p90_ms == 10
    assert found.memory_bytes == 5_000_000
    assert found.others_cores == 0


def test_the_spread_is_that_of_the_steady_state() -> None:
    clock = Clock()
    system = FakeSystem(clock)
    runtime = FakeRuntime(clock, lambda n, now: (0.010, 0.011, 0.012, 0.013, 0.014)[n % 5])
    found = measure(a_run(), loading(clock, runtime, system), 3.0, around(clock, system))
    assert found.latency_ms == pytest.approx(12, abs=0.01)
    assert found.p10_ms == pytest.approx(10, abs=0.5)
    assert found.p90_ms == pytest.approx(14, abs=0.5)


def test_a_slow_encoder_is_still_run_a_few_times() -> None:
    clock = Clock()
    system = FakeSystem(clock)
    runtime = FakeRuntime(clock, lambda n, now: 5.0)
    measure(a_run(), loading(clock, runtime, system), 0.1, around(clock, system))
    assert runtime.runs == MIN_RUNS + 2


def test_the_batch_is_run_together() -> None:
    clock = Clock()
    system = FakeSystem(clock)
    runtime = FakeRuntime(clock, lambda n, now: 0.1)
    measure(a_run(batch=4), loading(clock, runtime, system), 0.1, around(clock, system))
    assert runtime.seen[0].shape == (4, 32, 32, 3)
    assert runtime.seen[0].dtype == np.uint8


def test_what_others_compute_is_noticed_and_own_work_is_not() -> None:
    clock = Clock()
    system = FakeSystem(clock, others_cores=1.5)
    runtime = FakeRuntime(clock, lambda n, now: 0.01)
    surroundings = Instruments(system=system, clock=clock, own_cpu_s=lambda: clock() * 1.0)
    found = measure(a_run(), loading(clock, runtime, system), 1.0, surroundings)
    assert found.others_cores == 0.5


def test_what_the_system_does_not_show_is_left_open() -> None:
    clock = Clock()
    system = FakeSystem(clock, others_cores=None, resident=None)
    runtime = FakeRuntime(clock, lambda n, now: 0.01)
    found = measure(a_run(), lambda: runtime, 0.1, around(clock, system))
    assert found.memory_bytes is None
    assert found.others_cores is None


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_logits_that_are_not_finite_are_no_measurement(value: float) -> None:
    clock = Clock()
    system = FakeSystem(clock)
    runtime = FakeRuntime(clock, lambda n, now: 0.01)
    runtime.logits = np.full((1, 3), value, dtype=np.float32)
    with pytest.raises(ValueError, match=r"^the logits are not finite$"):
        measure(a_run(), lambda: runtime, 0.1, around(clock, system))


def test_warm_up_ends_with_the_first_run_that_is_as_fast() -> None:
    assert warm_up_s([3.0, 2.0, 1.05, 2.0], 1.0) == 5.0
    assert warm_up_s([1.0, 1.0], 1.0) == 0.0
    assert warm_up_s([4.0, 3.0], 1.0) == 7.0


def test_a_run_is_served_like_a_planned_sub_model() -> None:
    run = a_run(threads=3)
    execution = execution_of(run)
    assert execution.threads == 3
    assert execution.provider == CPU
    assert (execution.precision, execution.image_size) == ("fp32", run.spec.image_size)
    assert not execution.spin
    assert execution_of(replace(a_run(), spin=True)).spin


def test_a_device_that_throttles_is_slower_in_the_last_minute() -> None:
    clock = Clock()
    temperatures = iter([40.0, *(50.0 + n for n in range(1000))])
    system = FakeSystem(clock, temperatures_c=temperatures, watts=12.0)
    start_s = clock()
    runtime = FakeRuntime(clock, lambda n, now: 0.1 if now - start_s < 300 else 0.15)
    heard: list[float] = []
    load = sustain(a_run(), lambda: runtime, 600.0, around(clock, system), heard.append)
    assert load.first_ms == 100
    assert load.last_ms == 150
    assert load.seconds == pytest.approx(600, abs=1)
    assert load.power_w == 12
    assert load.temperature_c == 50.0 + len(heard) - 1
    assert heard == sorted(heard)
    assert 250 < len(heard) < 320


def test_the_processor_s_counters_do_not_tell_what_a_gpu_takes() -> None:
    clock = Clock()
    runtime = FakeRuntime(clock, lambda n, now: 0.1)
    on_gpu = a_run(provider="CUDAExecutionProvider")
    for meter_w in (None, 9.0):
        system = FakeSystem(clock, watts=12.0, meter_w=meter_w)
        assert sustain(on_gpu, lambda: runtime, 30.0, around(clock, system)).power_w == meter_w


def test_a_run_longer_than_the_sustained_load_is_compared_with_itself() -> None:
    clock = Clock()
    runtime = FakeRuntime(clock, lambda n, now: 10.0)
    load = sustain(a_run(), lambda: runtime, 1.0, around(clock, FakeSystem(clock)))
    assert load.first_ms == load.last_ms == 10_000
    assert load.temperature_c is None
