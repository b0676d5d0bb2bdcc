"""How numbers and names read."""

import math

import pytest

from anyformer.compare.text import count, duration, listing, number, plain, shorten, signed, size


@pytest.mark.parametrize(
    "value, text",
    [
        (2.17345, "2.173"),
        (0.0, "0.000"),
        (-0.12345, "\u22120.1235"),
        (123456.7, "123457"),
        (0.00001234, "1.234e\u221205"),
        (2.5e7, "2.500e+07"),
        (None, "\u2013"),
        (math.nan, "NaN"),
        (math.inf, "\u221e"),
        (-math.inf, "\u2212\u221e"),
    ],
)
def test_numbers(value: float | None, text: str) -> None:
    assert number(value) == text


def test_units() -> None:
    assert [count(value) for value in (7, 999, 116_224, 1_234_567, 2.5e9, None)] == [
        "7",
        "999",
        "116k",
        "1.23M",
        "2.5B",
        "\u2013",
    ]
    assert [size(value) for value in (12, 2048, 3 << 20, 1.3 * (1 << 30))] == ["12 B", "2 KiB", "3 MiB", "1.3 GiB"]
    assert [duration(value) for value in (300, 12.5, 0.0031, 4e-6, 0.0)] == [
        "5.0 min",
        "12.5 s",
        "3.10 ms",
        "4.00 µs",
        "0.00 µs",
    ]
    assert [signed(value) for value in (0.5, -0.5, 0.0)] == ["+0.500", "\u22120.500", "0.00"]


def test_names() -> None:
    assert plain("a\x1b[31mb\x00c\u202ed\n e") == "a [31mb c d e"
    assert shorten("bigbird(block=64) + rope", 40) == "bigbird(block=64) + rope"
    short = shorten("bigbird(block=64, random=3) + rope", 15)
    assert len(short) == 15
    assert short.startswith("bigbird")
    assert short.endswith("+ rope")
    assert listing(["a", "b"]) == "a, b"
    assert listing(list("abcdefgh")) == "a, b, c, d, e, f and 2 more"
