"""Options of an operator beside the plan, and what then is loaded."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from devices.agent import options as serving
from devices.agent.options import ServeOptions
from mdp.errors import AgentError, ConfigError
from mdp.formats.bundle import Bundle, model_path
from mdp.runtimes.base import Execution
from mdp.testing.bundles import colour_model, write_bundle
from tests.support.bundles import change_assignment, relist


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A bundle whose first device has four threads and computes three at once."""
    folder = write_bundle(tmp_path / "bundle")
    change_assignment(folder, threads=4, batch=3)
    return folder


@pytest.mark.parametrize(
    ("threads", "cores", "given"),
    [(None, None, 4), (2, None, 2), (None, 2, 2), (None, 8, 4), (6, 2, 6)],
)
def test_threads_are_no_more_than_the_cores_unless_they_are_asked_for(
    folder: Path,
    monkeypatch: pytest.MonkeyPatch,
    threads: int | None,
    cores: int | None,
    given: int,
) -> None:
    opened: dict[str, Any] = {}

    def open_runtime(model: object, execution: Execution, **options: Any) -> None:
        opened.update(options, threads=execution.threads)

    monkeypatch.setattr(serving, "open_runtime", open_runtime)
    options = ServeOptions(
        bundle=folder, device="alpha", threads=threads, cores=cores, allow_fallback=True
    )
    options.loadable().load()
    assert opened == {"num_classes": 3, "threads": given, "allow_fallback": True}


@pytest.mark.parametrize("planned", [True, False])
@pytest.mark.parametrize("asked", [None, True, False])
def test_threads_wait_as_the_plan_says_unless_the_operator_says_otherwise(
    folder: Path, monkeypatch: pytest.MonkeyPatch, planned: bool, asked: bool | None
) -> None:
    change_assignment(folder, spin=planned)
    opened: list[Execution] = []
    monkeypatch.setattr(serving, "open_runtime", lambda _, served, **options: opened.append(served))
    candidate = ServeOptions(bundle=folder, device="alpha", spin=asked).loadable()
    candidate.load()
    assert opened[0].spin == (planned if asked is None else asked)
    assert candidate.assignment.spin == planned


@pytest.mark.parametrize(("asked", "given"), [(None, 3), (1, 1), (8, 8)])
def test_the_batch_of_plan_or_option(folder: Path, asked: int | None, given: int) -> None:
    assert ServeOptions(bundle=folder, device="alpha", batch=asked).loadable().batch == given


def test_a_link_is_followed_once(folder: Path, tmp_path: Path) -> None:
    link = tmp_path / "link"
    link.symlink_to(folder)
    candidate = ServeOptions(bundle=link, device="alpha").loadable()
    link.unlink()
    assert candidate.bundle.path == folder.resolve()
    assert candidate.load().provider == "CPUExecutionProvider"


def test_what_is_not_here_is_refused_with_the_option_that_accepts_another(folder: Path) -> None:
    change_assignment(folder, provider="CUDAExecutionProvider")
    expected = (
        "^the plan asks for CUDAExecutionProvider, this device has .*CPUExecutionProvider; "
        "--allow-fallback accepts another one, which every status names$"
    )
    with pytest.raises(AgentError, match=expected):
        ServeOptions(bundle=folder, device="alpha").loadable().load()


def test_crops_too_large_for_the_socket_are_refused(folder: Path) -> None:
    options = ServeOptions(bundle=folder, device="alpha")
    assert options.loadable(196_608).bundle.digest == Bundle.open(folder).digest
    with pytest.raises(AgentError, match=r"^its crops of 196,608 bytes are larger than the 1,000 "):
        options.loadable(1_000)


def test_a_device_without_a_part_is_named(folder: Path) -> None:
    with pytest.raises(ConfigError, match="no assignment for device 'delta'"):
        ServeOptions(bundle=folder, device="delta").loadable()


def test_every_rung_is_loaded_and_one_of_other_classes_is_refused(tmp_path: Path) -> None:
    folder = write_bundle(tmp_path / "bundle", rungs=3)
    source = ServeOptions(device="beta", bundle=folder).loadable()
    pixels = np.full((1, 12, 12, 3), 200, np.uint8)
    top, *lower = [load().run(pixels) for load in (source.load, *source.load_lower)]
    assert len(lower) == 2
    np.testing.assert_allclose(4 * lower[1].bag, top.bag, rtol=1e-5)
    path = folder / model_path(1, 2)
    path.write_bytes(colour_model(12, 1.0, 1.0, num_classes=4))
    relist(folder, model_path(1, 2))
    source = ServeOptions(device="beta", bundle=folder).loadable()
    source.load_lower[0]()
    with pytest.raises(AgentError, match=r"rung-2\.onnx: expected an output .* with 3 classes"):
        source.load_lower[1]()


def test_a_mask_that_cannot_be_reached_is_not_taken_for_none(tmp_path: Path) -> None:
    """It may be there, and hide what no client may see."""
    (tmp_path / "picture.png").write_bytes(b"")

    def options(mask: Path) -> ServeOptions:
        source = f"folder:{tmp_path}"
        return ServeOptions(device="alpha", source=source, mask=mask, allow_mask=True)

    options(tmp_path / "mask.toml").check_camera()
    with pytest.raises(ConfigError, match=r"mask\.toml"):
        options(tmp_path / "picture.png" / "mask.toml").check_camera()
