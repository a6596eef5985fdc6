from collections.abc import Iterator

import pytest

from tests.unit.grammar.told import Told


@pytest.fixture
def told() -> Iterator[Told]:
    made = Told()
    yield made
    made.answers.close()
    made.starts.close()
