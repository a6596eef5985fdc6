from collections.abc import Iterator

import pytest

from tests.unit.grammar.scripted import Scene


@pytest.fixture
def scene() -> Iterator[Scene]:
    made = Scene()
    yield made
    made.close()
