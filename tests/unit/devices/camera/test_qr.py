"""QR codes, read by a decoder that is not ours."""

from typing import Any

import numpy as np
import pytest

from devices.camera.qr import MOST_BYTES, qr_code, to_text

cv2 = pytest.importorskip("cv2")


def read(code: list[list[bool]]) -> Any:
    """Text that OpenCV reads in it."""
    pixels = np.where(np.array(code), 0, 255).astype(np.uint8)
    framed = np.pad(np.kron(pixels, np.ones((8, 8), np.uint8)), 32, constant_values=255)
    return cv2.QRCodeDetector().detectAndDecode(framed)[0]


@pytest.mark.parametrize(
    "text",
    [
        "mdp",
        "https://10.0.0.8:8443/#a",
        "https://192.168.178.123:8443/#Zq3-_0123456789abcdefg",
        "https://[2001:db8:85a3::8a2e:370:7334]:8443/#Zq3-_0123456789abcdefghijklm",
        "x" * MOST_BYTES,
    ],
)
def test_what_is_drawn_is_read(text: str) -> None:
    code = qr_code(text)
    assert (len(code) - 17) % 4 == 0
    assert all(len(row) == len(code) for row in code)
    assert read(code) == text


def test_a_text_that_is_too_long() -> None:
    with pytest.raises(ValueError, match=r"^expected at most 106 bytes for a QR code, got 107$"):
        qr_code("x" * 107)


def test_a_terminal_shows_two_rows_a_line() -> None:
    code = qr_code("mdp")
    lines = to_text(code).splitlines()
    assert len(lines) == (len(code) + 4 + 1) // 2
    marks = {" ": (0, 0), "▀": (1, 0), "▄": (0, 1), "█": (1, 1)}
    plain = [line.removeprefix("\033[30;107m").removesuffix("\033[0m") for line in lines]
    rows = [[bool(marks[mark][half]) for mark in line] for line in plain for half in (0, 1)]
    inner = [row[2:-2] for row in rows[2 : 2 + len(code)]]
    assert inner == code
