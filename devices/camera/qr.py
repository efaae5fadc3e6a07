"""QR codes of short texts, for a terminal (ISO/IEC 18004: byte mode, level L, versions 1 to 5)."""

from collections.abc import Iterator, Sequence
from itertools import pairwise

#: By version from 1: code words of data, and of error correction, in one block (table 9).
_DATA, _CORRECTION = (19, 34, 55, 80, 108), (7, 10, 15, 20, 26)
#: Mode and count take one and a half code words.
MOST_BYTES = _DATA[-1] - 2
#: Light modules around the code, of four that the standard asks for; phones need fewer.
_QUIET = 2
_FIELD, _FORMAT_POLYNOMIAL, _FORMAT_MASK = 0x11D, 0x537, 0x5412
_LEVEL_L = 1

Matrix = list[list[bool]]


def qr_code(text: str) -> Matrix:
    """Rows of modules, True where dark; raises ValueError for more than `MOST_BYTES` bytes."""
    data = text.encode()
    if len(data) > MOST_BYTES:
        raise ValueError(f"expected at most {MOST_BYTES} bytes for a QR code, got {len(data)}")
    version = next(v for v, words in enumerate(_DATA, 1) if len(data) <= words - 2)
    words = _words(data, _DATA[version - 1])
    words += _remainder(words, _CORRECTION[version - 1])
    bits = [bool(word >> bit & 1) for word in words for bit in range(7, -1, -1)]
    drawn = [_apply_mask(version, bits, mask) for mask in range(8)]
    return min(drawn, key=_penalty)


def to_text(code: Matrix) -> str:
    """The code for a terminal, two rows of modules a line, dark on white whatever its colours."""
    side = len(code) + 2 * _QUIET

    def dark(row: int, column: int) -> bool:
        row, column = row - _QUIET, column - _QUIET
        return 0 <= row < len(code) and 0 <= column < len(code) and code[row][column]

    blocks = {(False, False): " ", (True, False): "▀", (False, True): "▄", (True, True): "█"}
    return "".join(
        "\033[30;107m"
        + "".join(blocks[dark(row, column), dark(row + 1, column)] for column in range(side))
        + "\033[0m\n"
        for row in range(0, side, 2)
    )


def _words(data: bytes, count: int) -> list[int]:
    """Mode, length, data, end and padding."""
    bits = f"0100{len(data):08b}" + "".join(f"{byte:08b}" for byte in data)
    bits += "0" * min(4, 8 * count - len(bits))
    bits += "0" * (-len(bits) % 8)
    words = [int(bits[at : at + 8], 2) for at in range(0, len(bits), 8)]
    padding = (0xEC, 0x11)
    return words + [padding[place % 2] for place in range(count - len(words))]


def _product(x: int, y: int) -> int:
    """In GF(256)."""
    found = 0
    for bit in range(7, -1, -1):
        found = (found << 1) ^ ((found >> 7) * _FIELD)
        found ^= (y >> bit & 1) * x
    return found


def _remainder(words: Sequence[int], count: int) -> list[int]:
    """Reed-Solomon code words."""
    divisor, root = [0] * (count - 1) + [1], 1
    for _ in range(count):
        shifted = [*divisor[1:], 0]
        divisor = [_product(d, root) ^ s for d, s in zip(divisor, shifted, strict=True)]
        root = _product(root, 2)
    found = [0] * count
    for word in words:
        factor = word ^ found.pop(0)
        found.append(0)
        found = [f ^ _product(d, factor) for f, d in zip(found, divisor, strict=True)]
    return found


def _apply_mask(version: int, bits: Sequence[bool], mask: int) -> Matrix:
    """The whole code under one of the eight masks."""
    side = 17 + 4 * version
    code: Matrix = [[False] * side for _ in range(side)]
    fixed: Matrix = [[False] * side for _ in range(side)]

    def put(x: int, y: int, dark: bool) -> None:
        code[y][x], fixed[y][x] = dark, True

    for place in range(side):
        put(6, place, place % 2 == 0)
        put(place, 6, place % 2 == 0)
    for x, y in ((3, 3), (side - 4, 3), (3, side - 4)):
        for dy in range(-4, 5):
            for dx in range(-4, 5):
                if 0 <= x + dx < side and 0 <= y + dy < side:
                    put(x + dx, y + dy, max(abs(dx), abs(dy)) not in (2, 4))
    if version > 1:
        for dy in range(-2, 3):
            for dx in range(-2, 3):
                put(side - 7 + dx, side - 7 + dy, max(abs(dx), abs(dy)) != 1)
    for x, y, dark in _format(side, mask):
        put(x, y, dark)
    left = iter(bits)
    for x, y in _path(side):
        if not fixed[y][x]:
            code[y][x] = next(left, False) ^ _mask(mask, x, y)
    return code


def _format(side: int, mask: int) -> Iterator[tuple[int, int, bool]]:
    """Column, row and colour of both copies of level and mask, and the module that is dark."""
    told = _LEVEL_L << 3 | mask
    rest = told
    for _ in range(10):
        rest = (rest << 1) ^ ((rest >> 9) * _FORMAT_POLYNOMIAL)
    bits = (told << 10 | rest) ^ _FORMAT_MASK
    first = [(8, y) for y in (*range(6), 7, 8)] + [(x, 8) for x in (7, *range(5, -1, -1))]
    second = [(side - 1 - n, 8) for n in range(8)] + [(8, side - 7 + n) for n in range(7)]
    for places in (first, second):
        for bit, (x, y) in enumerate(places):
            yield x, y, bool(bits >> bit & 1)
    yield 8, side - 8, True


def _path(side: int) -> Iterator[tuple[int, int]]:
    """Columns and rows in the order of the bits: pairs of columns from the right, up and down."""
    upward = True
    for right in (*range(side - 1, 6, -2), 5, 3, 1):
        rows = range(side - 1, -1, -1) if upward else range(side)
        yield from ((x, y) for y in rows for x in (right, right - 1))
        upward = not upward


def _mask(mask: int, x: int, y: int) -> bool:
    """Tell whether a mask inverts the module of column `x` and row `y` (table 10)."""
    values = (
        (x + y) % 2, y % 2, x % 3, (x + y) % 3, (x // 3 + y // 2) % 2, x * y % 2 + x * y % 3,
        (x * y % 2 + x * y % 3) % 2, ((x + y) % 2 + x * y % 3) % 2,
    )  # fmt: skip
    return values[mask] == 0


def _penalty(code: Matrix) -> int:
    """Long runs and squares of one colour, which are hard to read (the first two rules)."""
    total = 0
    for lines in (code, [list(column) for column in zip(*code, strict=True)]):
        for line in lines:
            run = 1
            for before, now in pairwise(line):
                run = run + 1 if before == now else 1
                total += 3 if run == 5 else run > 5
    pairs = pairwise(code)
    total += 3 * sum(
        a[x] == a[x + 1] == b[x] == b[x + 1] for a, b in pairs for x in range(len(code) - 1)
    )
    return total
