"""Cost of messages: both directions count, and JPEG is chosen where it pays."""

import numpy as np
import pytest

from mdp.formats.profile import NetworkLink
from mdp.pictures.crop import encode_jpeg
from partitioner.estimates import network


def test_network_time_counts_both_directions() -> None:
    link = NetworkLink(bandwidth_bps=1e6, round_trip_s=0.002)
    sent = 3 * 24 * 24 + network.FRAMING_BYTES
    received = 2 * 10 * 4 + network.FRAMING_BYTES
    expected_ms = 2 + (sent + received) * 8 / 1e3
    assert network.network_ms(link, 24, 10, "raw") == pytest.approx(expected_ms)


def test_jpeg_is_chosen_where_the_link_is_slow() -> None:
    slow, fast = (
        NetworkLink(bandwidth_bps=20e6, round_trip_s=0.003),
        NetworkLink(bandwidth_bps=940e6, round_trip_s=0),
    )
    assert network.choose_encoding(slow, 224, 1000) == "jpeg"
    assert network.choose_encoding(slow, 24, 10) == "raw"
    assert network.choose_encoding(fast, 224, 1000) == "raw"
    raw, jpeg = (network.network_ms(slow, 224, 1000, encoding) for encoding in ("raw", "jpeg"))
    assert raw - jpeg >= network.JPEG_MIN_SAVING_MS


def test_estimated_jpeg_bytes_are_those_of_a_soft_picture_within_a_factor_of_two() -> None:
    x = np.linspace(0, 20, 112)
    wave = 127 + 60 * np.sin(x[:, None] * 3) * np.cos(x[None, :] * 5)
    noise = np.random.default_rng(0).normal(0, 6, (112, 112, 3))
    view = np.clip(wave[..., None] + noise, 0, 255).astype(np.uint8)
    estimated = network.request_bytes(112, "jpeg") - network.FRAMING_BYTES
    assert 0.5 < len(encode_jpeg(view)) / estimated < 2
