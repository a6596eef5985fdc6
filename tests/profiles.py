"""How much random tests try, by the environment's HYPOTHESIS_PROFILE.

`fast`, which `make test` sets, tries a fifth of the examples; `ci`, the default and what `make
test-all` sets, all of them; `nightly` ten times as many.
"""

import os
from typing import Final

import pytest
from hypothesis import settings

SHARES: Final = {"fast": 0.2, "ci": 1.0, "nightly": 10.0}
DEFAULT_EXAMPLES = 100

PROFILE: Final = os.environ.get("HYPOTHESIS_PROFILE", "ci")
if PROFILE not in SHARES:
    raise pytest.UsageError(f"HYPOTHESIS_PROFILE: {PROFILE!r} is none of {', '.join(SHARES)}")


LEAST_EXAMPLES = 20


def examples(n: int) -> int:
    """The profile's share of n examples, but no fewer than 20 unless n is smaller."""
    return max(round(SHARES[PROFILE] * n), min(n, LEAST_EXAMPLES))


def load_profile() -> None:
    """Make the profile that of every test. A busy machine is no failure, and a failure prints what
    reproduces it.
    """
    # Under CI hypothesis repeats the same examples by default. A nightly run tries new ones.
    parent = settings(derandomize=False, database=None) if PROFILE == "nightly" else None
    settings.register_profile(
        PROFILE, parent, max_examples=examples(DEFAULT_EXAMPLES), deadline=None, print_blob=True
    )
    settings.load_profile(PROFILE)
