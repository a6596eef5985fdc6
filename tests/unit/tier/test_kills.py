"""A few of the kills that tests/tier_kills.py makes many of."""

import pytest

from tests import tier_kills

pytestmark = pytest.mark.process


def test_a_killed_writer_loses_nothing_that_it_had_flushed() -> None:
    tier_kills.run(n_kills=4, seed=7)
