"""What holds for every test."""

from hypothesis import settings

# A busy machine is no failure. A failure prints what brings it back.
settings.register_profile("rootstock", deadline=None, print_blob=True)
settings.load_profile("rootstock")
