"""What holds for every test."""

from hypothesis import settings

# A busy machine is no failure. With CI set, hypothesis' own profile has no deadline; this is the same
# for everyone.
settings.register_profile("rootstock", deadline=None, print_blob=True)
settings.load_profile("rootstock")
