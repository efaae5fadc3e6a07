"""How sub-models are run on a GPU, on an onnxruntime that is none."""

import threading
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from devices.cuda import CUDA, PLAIN, RECORDING, load_libraries, open_session
from mdp.crop import Pixels

CPU = "CPUExecutionProvider"
HEADS = ("boost", "bag")
SIDE, CLASSES = 4, 3


class FakeValue:
    """Memory on the GPU."""

    def __init__(self, shape: list[int], kind: Any) -> None:
        self.content = np.zeros(shape, dtype=kind)

    @staticmethod
    def ortvalue_from_shape_and_type(shape: list[int], kind: Any, where: str, number: int) -> Any:
        assert (where, number) == ("cuda", 0)
        return FakeValue(shape, kind)

    def update_inplace(self, pixels: Pixels) -> None:
        assert pixels.flags.c_contiguous
        assert self.content.shape == pixels.shape
        self.content[:] = pixels

    def numpy(self) -> Any:
        return self.content.copy()


class FakeBinding:
    def __init__(self) -> None:
        self.values: dict[str, FakeValue] = {}

    def bind_ortvalue_input(self, name: str, value: FakeValue) -> None:
        self.values[name] = value

    bind_ortvalue_output = bind_ortvalue_input


class FakeOptions:
    def __init__(self) -> None:
        self.entries: dict[str, str] = {}

    def add_run_config_entry(self, name: str, value: str) -> None:
        self.entries[name] = value


class Described:
    def __init__(self, name: str, shape: list[Any]) -> None:
        self.name, self.shape = name, shape


class FakeSession:
    """Its boost head is the sum of a picture's pixels, its bag head twice that."""

    def __init__(self, ort: "FakeOrt", providers: list[Any]) -> None:
        self.ort, self.providers = ort, providers
        #: By thread, which graphs have been recorded.
        self.graphs: list[tuple[int, str]] = []

    def get_providers(self) -> list[str]:
        return [self.ort.starts, CPU]

    def get_inputs(self) -> list[Described]:
        return [Described("images", ["N", SIDE, SIDE, 3])]

    def get_outputs(self) -> list[Described]:
        return [Described(head, ["N", CLASSES]) for head in HEADS]

    def io_binding(self) -> FakeBinding:
        return FakeBinding()

    def run_with_iobinding(self, binding: FakeBinding, options: FakeOptions) -> None:
        key = (threading.get_ident(), options.entries["gpu_graph_id"])
        if key not in self.graphs:
            self.ort.while_recording()
            self.graphs.append(key)
        sums = binding.values["images"].content.astype(np.float32).sum(axis=(1, 2, 3))
        for factor, head in enumerate(HEADS, start=1):
            binding.values[head].content[:] = factor * sums[:, None]


class FakeOrt:
    """The module."""

    OrtValue = FakeValue
    RunOptions = FakeOptions

    def __init__(self, *, starts: str = CUDA, refuses: tuple[dict[str, str], ...] = ()) -> None:
        self.starts, self.refuses = starts, refuses
        self.opened: list[Any] = []
        self.while_recording: Callable[[], None] = lambda: None

    def get_available_providers(self) -> list[str]:
        return [CUDA, CPU]

    def preload_dlls(self) -> None:
        print("Failed to load libcublas")

    # Named as onnxruntime's.
    def InferenceSession(  # noqa: N802
        self, model: str, options: Any, *, providers: list[Any], enable_fallback: int
    ) -> FakeSession:
        assert enable_fallback == 0
        ((provider, wishes),) = providers
        assert provider == CUDA
        self.opened.append(wishes)
        if wishes in self.refuses:
            raise RuntimeError("cannot use the graph capture feature")
        return FakeSession(self, providers)


def pictures(count: int, value: int = 1) -> Pixels:
    return np.full((count, SIDE, SIDE, 3), value, dtype=np.uint8)


def opened(ort: FakeOrt) -> Any:
    return open_session(ort, "model.onnx", None, HEADS, "images")


def test_runs_are_recorded_once_for_every_number_of_pictures() -> None:
    ort = FakeOrt()
    session, runs = opened(ort)
    assert ort.opened == [dict(RECORDING)]
    for count in (1, 3, 1, 3, 2):
        boost, bag = runs.run(pictures(count, value=count))
        np.testing.assert_array_equal(boost, np.full((count, CLASSES), count * SIDE * SIDE * 3))
        np.testing.assert_array_equal(bag, 2 * boost)
    assert [number for _, number in session.graphs] == ["1", "3", "2"]


def test_logits_are_not_overwritten_by_the_next_run() -> None:
    _, runs = opened(FakeOrt())
    first, _ = runs.run(pictures(1))
    kept = first.copy()
    runs.run(pictures(1, value=9))
    np.testing.assert_array_equal(first, kept)


def test_a_crop_that_is_a_view_is_fine() -> None:
    _, runs = opened(FakeOrt())
    turned = pictures(2)[:, :, ::-1]
    assert not turned.flags.c_contiguous
    boost, _ = runs.run(turned)
    assert boost.shape == (2, CLASSES)


def test_every_thread_records_for_itself_and_nobody_runs_meanwhile() -> None:
    ort = FakeOrt()
    session, runs = opened(ort)
    seen: list[str] = []
    one, other = (threading.Thread(target=lambda: runs.run(pictures(1))) for _ in range(2))

    def while_recording() -> None:
        seen.append("begin")
        if len(seen) == 1:
            other.start()
            # It has to wait, so it is not done after any time.
            other.join(0.05)
        seen.append("end")

    ort.while_recording = while_recording
    one.start()
    one.join()
    other.join()
    assert seen == ["begin", "end", "begin", "end"]
    assert len({thread for thread, _ in session.graphs}) == 3


def test_what_cannot_be_recorded_is_run_plainly() -> None:
    ort = FakeOrt(refuses=(dict(RECORDING),))
    session, runs = opened(ort)
    assert runs is None
    assert session.get_providers()[0] == CUDA
    assert ort.opened == [dict(RECORDING), dict(PLAIN)]


def test_what_cannot_be_opened_at_all_is_an_error() -> None:
    with pytest.raises(RuntimeError, match="graph capture"):
        opened(FakeOrt(refuses=(dict(RECORDING), dict(PLAIN))))


def test_a_session_on_the_processor_is_not_recorded() -> None:
    session, runs = opened(FakeOrt(starts=CPU))
    assert runs is None
    assert session.get_providers()[0] == CPU


def test_what_is_missing_is_said_where_it_does_not_disturb(
    capsys: pytest.CaptureFixture[str],
) -> None:
    load_libraries(FakeOrt())
    said = capsys.readouterr()
    assert (said.out, said.err) == ("", "Failed to load libcublas\n")
