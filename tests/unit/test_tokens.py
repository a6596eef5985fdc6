"""Packed tokens."""

from array import array
from itertools import takewhile

from hypothesis import given
from hypothesis import strategies as st

from kvstore.tokens import TOKEN_BYTES, Tokens, common_tokens

token_ids = st.lists(st.integers(0, 2**64 - 1), max_size=40)
text_ids = st.lists(st.integers(0, 2**32 - 1), max_size=60)
few_ids = st.lists(st.integers(0, 1), max_size=40)


@st.composite
def parts_of(draw: st.DrawFn, n_tokens: int) -> list[tuple[int, list[int]]]:
    """Runs of ids that stand in a text of `n_tokens` tokens, in order and apart."""
    parts, at = list[tuple[int, list[int]]](), 0
    while n_tokens - at > 0 and draw(st.booleans()):
        first = draw(st.integers(at, n_tokens - 1))
        n_ids = draw(st.integers(1, n_tokens - first))
        parts.append(
            (first, draw(st.lists(st.integers(2**62, 2**63), min_size=n_ids, max_size=n_ids)))
        )
        at = first + n_ids
    return parts


@given(st.data(), text_ids, token_ids, st.integers(0, 110), st.integers(0, 110))
def test_runs_are_those_of_a_list(
    data: st.DataObject, text: list[int], own: list[int], start: int, stop: int
) -> None:
    parts, ids = data.draw(parts_of(len(text))), text + own
    for first, named in parts:
        ids[first : first + len(named)] = named
    packed = [(first, Tokens(named).packed(0, len(named))) for first, named in parts]
    tokens = Tokens(own, array("I", text).tobytes(), packed)
    for each in tokens, tokens.copy():
        assert len(each) == len(ids)
        assert [each[i] for i in range(len(ids))] == ids
        assert each.ids(start, stop) == ids[start:stop]
        assert each.packed(start, stop) == Tokens(ids[start:stop]).packed(0, len(ids))
        assert len(each.packed(0, len(ids))) == len(ids) * TOKEN_BYTES


def test_lists_that_share_a_text_grow_apart() -> None:
    text = array("I", (1, 2)).tobytes()
    tokens, other = Tokens(text=text), Tokens(text=text)
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
