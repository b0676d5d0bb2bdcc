"""Random patterns, and their texts read by a few lines that share nothing with the package's reader."""

import ast

from hypothesis import strategies as st

from anyformer.pattern._algebra import PerHead, PerLayer
from anyformer.pattern.base import Pattern
from anyformer.pattern.bigbird import bigbird
from anyformer.pattern.leaves import (
    LEAVES,
    Block,
    Causal,
    Columns,
    Dilated,
    Flagged,
    Full,
    Global,
    Local,
    Random,
    RandomBlocks,
    Strided,
)
from anyformer.pattern.sparse_transformer import sparse_transformer

HEADS = 3


def _upto(most: int, least: int = 0) -> st.SearchStrategy[int]:
    return st.integers(least, most)


leaves: st.SearchStrategy[Pattern] = st.one_of(
    st.sampled_from([Full(), Causal(), Flagged(), Flagged([5, 3])]),
    st.builds(Local, _upto(9), _upto(9)),
    st.builds(Strided, _upto(12, 1)),
    st.builds(Dilated, _upto(4), _upto(4), _upto(5, 1)),
    st.builds(Block, _upto(9, 1)),
    st.integers(1, 9).flatmap(lambda period: st.builds(Columns, st.just(period), _upto(period, 1))),
    st.builds(Global, st.lists(_upto(12), min_size=1, max_size=3)),
    st.builds(Random, _upto(5, 1), _upto(3), st.booleans()),
    st.builds(RandomBlocks, _upto(6, 1), _upto(4, 1), _upto(3), _upto(3)),
    st.builds(
        bigbird,
        _upto(6, 1),
        _upto(4),
        st.sampled_from([1, 3, 5]),
        _upto(4),
        st.sampled_from(["uniform", "google"]),
        _upto(4),
    ),
    st.builds(sparse_transformer, st.sampled_from(["fixed", "strided"]), _upto(9, 2), _upto(2, 1)),
)

both_ways: st.SearchStrategy[Pattern] = leaves | st.builds(
    Global, st.lists(st.integers(-4, 12), min_size=1, max_size=3)
)
"""Also those without a causal form."""


def joined(parts: st.SearchStrategy[Pattern]) -> st.SearchStrategy[Pattern]:
    """Expressions for HEADS heads."""
    return st.recursive(
        parts,
        lambda inner: st.one_of(
            st.builds(lambda a, b: a | b, inner, inner),
            st.builds(lambda a, b: a & b, inner, inner),
            st.builds(lambda a: ~a, inner),
            st.builds(PerLayer, inner, inner),
            st.builds(lambda a, b: PerHead((a, 1), (b, HEADS - 1)), inner, inner),
        ),
        max_leaves=4,
    )


def value_of(text: str) -> Pattern:
    """The pattern that a text stands for."""
    return _value(ast.parse(text, mode="eval").body)


def _value(node: ast.AST):
    match node:
        case ast.Constant(value=value):
            return value
        case ast.UnaryOp(op=ast.USub(), operand=operand):
            return -_value(operand)
        case ast.List(elts=items) | ast.Tuple(elts=items):
            return tuple(map(_value, items))
        case ast.UnaryOp(op=ast.Invert(), operand=operand):
            return ~_value(operand)
        case ast.BinOp(left=left, op=ast.BitOr(), right=right):
            return _value(left) | _value(right)
        case ast.BinOp(left=left, op=ast.BitAnd(), right=right):
            return _value(left) & _value(right)
        case ast.Call(func=ast.Name(id=name), args=args, keywords=keywords):
            target = bigbird if name == "bigbird" else LEAVES[name]
            return target(*map(_value, args), **{each.arg: _value(each.value) for each in keywords})
    raise AssertionError(ast.dump(node))
