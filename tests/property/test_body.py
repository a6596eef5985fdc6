"""Counting the nodes of a JSON text without parsing it."""

import json
from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from server.json_size import json_size

TEXTS = st.text(st.sampled_from('\\"[]{}:,a\u00e9\n')) | st.text()
VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | TEXTS,
    lambda inner: st.lists(inner) | st.dictionaries(TEXTS, inner),
)


def nodes(value: Any) -> int:
    if isinstance(value, list):
        return 1 + sum(map(nodes, value))
    if isinstance(value, dict):
        return 1 + len(value) + sum(map(nodes, value.values()))
    return 0


@given(VALUES, st.booleans())
def test_it_is_the_number_that_parsing_finds(value: Any, ascii_alone: bool) -> None:
    text = json.dumps(value, ensure_ascii=ascii_alone)
    assert json_size(text.encode("utf-8", "surrogatepass")).nodes == nodes(value)
