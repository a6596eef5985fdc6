"""A few of the kills that tests/disk_store_kills.py makes many of."""

import pytest

from tests import disk_store_kills

pytestmark = pytest.mark.process


def test_a_killed_writer_loses_nothing_that_it_had_flushed() -> None:
    disk_store_kills.run(n_kills=4, seed=7)
