"""Random ListOps trees as flat NumPy arrays, level by level: growth, layout as tokens, value from the leaves up."""

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

DIGIT, OPERATOR, CLOSE = (
    1,
    11,
    15,
)  # ids: 0 pads, DIGIT + d is the digit d, OPERATOR + o the o-th operator, CLOSE a bracket
OPERATORS = ("MIN", "MAX", "MED", "SM")


@dataclass(frozen=True)
class Level:
    """The nodes of one depth, grouped by parent from left to right.

    Args:
        arity: Int[nodes], children of each node, 0 for a digit.
        operator: Int[operators], which operator each node with children is.
    """

    arity: np.ndarray
    operator: np.ndarray


def grow(
    random: Callable, *, below: int, depth: int, arguments: int, probability: float
) -> tuple[list[Level], int] | None:
    """A tree of fewer than `below` tokens and the number of its tokens, or None as soon as it has grown too long.

    A node above the lowest depth is an operator with `probability`, else a digit; an operator takes 2 to `arguments`
    children. The root is an operator: a lone digit is no list. An operator counts two tokens, itself and its bracket.

    Args:
        random: draws uniform numbers of [0, 1) in a given shape.
        below: first length that is too long, in tokens.
        depth: levels of the tree; the last holds digits only.
        arguments: most children of an operator.
        probability: odds of an operator.
    """
    levels, nodes, tokens = [], 1, 0
    for place in range(depth):
        kind, width, which = random((3, nodes))
        operators = (kind < probability) & (place + 1 < depth) if place else np.ones(1, dtype=bool)
        arity = np.where(operators, 2 + (width * (arguments - 1)).astype(np.int64), 0)
        tokens += nodes + int(operators.sum())
        levels.append(Level(arity, (which[operators] * len(OPERATORS)).astype(np.int64)))
        nodes = int(arity.sum())
        if tokens + nodes >= below:
            return None
        if nodes == 0:
            break
    return levels, tokens


def lay_out(levels: list[Level], tokens: int) -> tuple[np.ndarray, np.ndarray]:
    """The tree written from left to right, digits left blank (0).

    Returns:
        Int[tokens] with operators and brackets, and Int[digits], the place of each digit in order of levels.
    """
    written, blanks = np.zeros(tokens, dtype=np.int64), []
    start = np.zeros(1, dtype=np.int64)
    for level, size, below in zip(levels, sizes := _sizes(levels), [*sizes[1:], sizes[0][:0]], strict=True):
        inner = level.arity > 0
        written[start[inner]] = OPERATOR + level.operator
        written[start[inner] + size[inner] - 1] = CLOSE
        blanks.append(start[~inner])
        arity = level.arity[inner]
        before = np.cumsum(below) - below  # tokens of all nodes to the left at that depth
        first = np.cumsum(arity) - arity
        start = before + np.repeat(start[inner] + 1 - before[first], arity)
    return written, np.concatenate(blanks)


def value(levels: list[Level], digits: np.ndarray) -> int:
    """What the tree evaluates to, from the lowest level up.

    Args:
        levels: the tree.
        digits: Int[digits] in order of levels.
    """
    stop, below = len(digits), digits[:0]
    for level in reversed(levels):
        inner = level.arity > 0
        values = np.empty(len(inner), dtype=np.int64)
        leaves = len(inner) - len(level.operator)
        values[~inner] = digits[stop - leaves : stop]
        values[inner] = _apply(level.operator, level.arity[inner], below)
        stop, below = stop - leaves, values
    return int(below[0])


def _apply(operator: np.ndarray, arity: np.ndarray, children: np.ndarray) -> np.ndarray:
    if len(operator) == 0:
        return operator
    first = np.cumsum(arity) - arity
    ranked = (
        np.sort(np.repeat(np.arange(len(arity)) * 10, arity) + children) % 10
    )  # sorted inside each list: values are 0-9
    median = (ranked[first + (arity - 1) // 2] + ranked[first + arity // 2]) // 2
    total = np.add.reduceat(children, first) % 10
    return np.choose(operator, [ranked[first], ranked[first + arity - 1], median, total])


def _sizes(levels: list[Level]) -> list[np.ndarray]:
    sizes: list[np.ndarray] = []
    for level in reversed(levels):
        size, inner = np.ones(len(level.arity), dtype=np.int64), level.arity > 0
        if sizes and inner.any():
            arity = level.arity[inner]
            size[inner] = 2 + np.add.reduceat(sizes[-1], np.cumsum(arity) - arity)
        sizes.append(size)
    return sizes[::-1]
