"""Packed tokens."""

from itertools import takewhile

from hypothesis import given
from hypothesis import strategies as st

from kvstore.tokens import TOKEN_BYTES, Tokens, common_tokens

token_ids = st.lists(st.integers(0, 2**32 - 1), max_size=40)
few_ids = st.lists(st.integers(0, 1), max_size=40)


@given(token_ids, token_ids, st.integers(0, 90), st.integers(0, 90))
def test_runs_are_those_of_a_list(shared: list[int], own: list[int], start: int, stop: int) -> None:
    tokens = Tokens(own, Tokens(shared).packed(0, len(shared)))
    ids = shared + own
    assert len(tokens) == len(ids)
    assert [tokens[i] for i in range(len(ids))] == ids
    assert tokens.ids(start, stop) == ids[start:stop]
    assert tokens.packed(start, stop) == Tokens(ids[start:stop]).packed(0, len(ids))
    assert len(tokens.packed(0, len(ids))) == len(ids) * TOKEN_BYTES


def test_lists_that_share_a_beginning_grow_apart() -> None:
    shared = Tokens((1, 2)).packed(0, 2)
    tokens, other = Tokens(packed=shared), Tokens(packed=shared)
    other.append(3)
    other.extend(Tokens((4, 5)).packed(0, 2))
    assert (tokens.ids(0, 9), other.ids(0, 9)) == ([1, 2], [1, 2, 3, 4, 5])


@given(few_ids, few_ids, few_ids)
def test_common_tokens_counts_the_common_prefix(
    prefix: list[int], left: list[int], right: list[int]
) -> None:
    left, right = prefix + left, prefix + right
    expected = len(list(takewhile(lambda pair: pair[0] == pair[1], zip(left, right, strict=False))))
    packed_left, packed_right = (Tokens(ids).packed(0, len(ids)) for ids in (left, right))
    assert common_tokens(packed_left, packed_right) == expected


def test_tokens_that_share_bytes_are_not_equal() -> None:
    left, right = Tokens((5, 0x01_00_00_00)), Tokens((5, 0x02_00_00_00))
    assert common_tokens(left.packed(0, 2), right.packed(0, 2)) == 1
