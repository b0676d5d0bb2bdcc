"""Pictures: a drawing on the terminal and a PNG."""

import struct

import pytest

from anyformer.errors import SpecError
from anyformer.pattern._algebra import PerHead
from anyformer.pattern.draw import draw
from anyformer.pattern.leaves import Block, Causal, Full, Global, Local


def test_a_drawing_shows_each_pair_of_a_small_pattern():
    assert Local(1, 0).text(4, 8) == "█\n██\n ██\n  ██"
    assert (Causal() & ~Block(1)).text(3, 8) == "\n█\n██"
    assert Local(1).text(0) == ""


def test_a_drawing_of_many_tokens_is_as_wide_as_asked():
    lines = (Local(8) | Global([0])).text(256, 64).split("\n")
    assert len(lines) == 32
    assert max(map(len, lines)) == 64
    assert set("".join(lines)) == set(" ░▒▓█")
    assert Full().text(256, 64) == "\n".join(["█" * 64] * 32)
    dots = Global([100]).text(256, 64).split("\n")  # one token in 256 is still seen
    assert all(line[25] in "░▒▓" for line in dots)


def test_a_drawing_of_one_head():
    pattern = PerHead((Full(), 1), (Local(0), 1))
    assert pattern.text(2, 4) == "██\n██"
    assert pattern.text(2, 4, head=1) == "█\n █"
    assert Full().text(2, 4, causal=True) == "█\n██"


def test_a_png(tmp_path):
    path = draw(Local(3) | Global([0]), tmp_path / "one.png", n=16)
    two = draw(PerHead((Local(3), 1), (Full(), 1)), tmp_path / "two.png", n=16, heads=2, causal=True)
    sizes = []
    for each in (path, two):
        head = each.read_bytes()[:24]
        assert head[:8] == b"\x89PNG\r\n\x1a\n"
        sizes.append(struct.unpack(">II", head[16:24]))
    assert sizes[1][0] == 2 * sizes[0][0]


def test_a_picture_that_cannot_be_drawn(tmp_path):
    with pytest.raises(SpecError, match=r"draw: expected n as a whole number of at least 1, got 0"):
        draw(Local(3), tmp_path / "none.png", n=0)
    with pytest.raises(SpecError, match=r"is for 2 query heads, the layer has 1"):
        draw(PerHead((Local(3), 1), (Full(), 1)), tmp_path / "none.png")
    assert not list(tmp_path.iterdir())
