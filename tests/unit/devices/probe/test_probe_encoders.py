"""The encoders that come along: what they span, and that they become whole models."""

import shutil
import tarfile
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import onnx
import pytest
from onnx import numpy_helper

from devices.probe.encoders import (
    GRAPHS,
    INDEX,
    Encoder,
    LeftOutTensor,
    complete,
    draw,
    extract,
    folder,
    read_index,
)
from mdp.errors import AgentError

ENCODERS = read_index().encoders
DRAWN = np.random.default_rng(0).random(1000, dtype=np.float32)


def of(precision: str, *tiers: str) -> list[Encoder]:
    return [
        encoder
        for encoder in ENCODERS
        if encoder.submodel is not None
        and encoder.submodel.precision == precision
        and (not tiers or encoder.tier in tiers)
    ]


def test_all_encoders_together_are_small() -> None:
    assert sum(path.stat().st_size for path in folder().iterdir()) < 600_000
    assert {path.name for path in folder().iterdir()} == {INDEX, GRAPHS}


@pytest.mark.parametrize("precision", ["fp32", "int8", "int8-static", "fp16"])
def test_the_first_tiers_span_what_all_span(precision: str) -> None:
    specs = [e.submodel for e in of(precision, "quick", "core") if e.submodel is not None]
    tokens = [(s.image_size // s.patch_size) ** 2 + 1 for s in specs]
    assert (min(tokens), max(tokens)) == (5, 197)
    assert {s.embed_dim for s in specs} >= {32, 48, 64, 96, 128, 192, 256, 384, 768}
    assert (min(s.depth for s in specs), max(s.depth for s in specs)) == (1, 12)
    assert {s.embed_dim // s.num_heads for s in specs} >= {16, 32, 64}
    assert {s.mlp_ratio for s in specs} == {2.0, 3.0, 4.0}


def test_networks_span_families_and_the_first_tier_has_some() -> None:
    networks = [encoder for encoder in ENCODERS if encoder.network is not None]
    assert {e.network.precision for e in networks if e.network} == {"fp32", "int8-static"}
    assert 2 * len({e.network.name for e in networks if e.network}) > 20
    assert 6 <= sum(encoder.tier == "quick" for encoder in networks) <= 10


def test_no_encoder_is_there_twice() -> None:
    assert len({encoder.file for encoder in ENCODERS}) == len(ENCODERS)
    assert len({msgspec.json.encode(encoder.spec) for encoder in ENCODERS}) == len(ENCODERS)


@pytest.fixture(scope="module")
def graphs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("graphs")
    extract(path)
    return path


def test_unpacking_without_tar_filters(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    # As 3.11.2 is, Debian 12's: `extractall` takes no `filter` there.
    unpack = tarfile.TarFile.extractall
    filters: dict[str, Any] = {"filter": "data"} if hasattr(tarfile, "data_filter") else {}
    monkeypatch.delattr(tarfile, "data_filter", raising=False)
    monkeypatch.setattr(
        tarfile.TarFile, "extractall", lambda archive, into: unpack(archive, into, **filters)
    )
    extract(tmp_path)
    assert all((tmp_path / encoder.file).is_file() for encoder in ENCODERS)


@pytest.mark.parametrize("precision", ["fp32", "int8", "int8-static", "fp16"])
def test_a_completed_graph_is_a_whole_model(graphs: Path, tmp_path: Path, precision: str) -> None:
    encoder = of(precision)[1]
    out = tmp_path / "model.onnx"
    complete(graphs / encoder.file, out)
    assert out.stat().st_size == pytest.approx(encoder.model_bytes, rel=0.2)
    model = onnx.load(out)
    onnx.checker.check_model(model, full_check=True)
    values = {t.name: numpy_helper.to_array(t) for t in model.graph.initializer}
    tensors = msgspec.msgpack.decode(
        (graphs / encoder.file).with_suffix(".tensors").read_bytes(), type=list[LeftOutTensor]
    )
    assert len(tensors) > 10
    for tensor in tensors:
        found = values[tensor.name].astype(np.float64)
        assert list(found.shape) == tensor.dims
        slack = 1e-3 * max(abs(tensor.low), abs(tensor.high))
        assert tensor.low - slack <= found.min() <= found.max() <= tensor.high + slack
    # No two weights are the same, or a runtime might keep one for both.
    large = [values[t.name].tobytes() for t in tensors if len(t.dims) == 2]
    assert len(set(large)) == len(large)


def test_whole_numbers_are_drawn_whole_and_scales_stay_positive() -> None:
    weights = draw(LeftOutTensor(name="w", data_type=3, dims=[30, 30], low=-63, high=64), DRAWN, 0)
    assert weights.dtype == np.int8
    assert (int(weights.min()), int(weights.max())) == (-63, 64)
    scales = draw(LeftOutTensor(name="s", data_type=1, dims=[500], low=0.001, high=0.002), DRAWN, 3)
    assert scales.dtype == np.float32
    assert scales.min() >= 0.001
    zeros = draw(LeftOutTensor(name="z", data_type=3, dims=[70], low=0, high=0), DRAWN, 1)
    assert not zeros.any()


def test_nothing_is_drawn_that_processors_are_slow_with() -> None:
    values = draw(
        LeftOutTensor(name="w", data_type=1, dims=[100, 100], low=-0.05, high=0.05), DRAWN, 5
    )
    tiny = np.abs(values.astype(np.float64))
    assert not ((tiny > 0) & (tiny < np.finfo(np.float32).tiny)).any()


def test_a_damaged_archive_is_refused(tmp_path: Path) -> None:
    shutil.copytree(folder(), tmp_path, dirs_exist_ok=True)
    content = bytearray((tmp_path / GRAPHS).read_bytes())
    content[1000] ^= 1
    (tmp_path / GRAPHS).write_bytes(content)
    with pytest.raises(AgentError, match=r"graphs\.tar\.xz: is not the file that index\.json desc"):
        read_index(tmp_path)


def test_a_missing_index_is_refused(tmp_path: Path) -> None:
    with pytest.raises(AgentError, match=r"index\.json: the encoders of mdp-agent: "):
        read_index(tmp_path)
