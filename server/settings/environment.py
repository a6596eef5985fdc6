"""The names of environment variables."""

ENVIRONMENT_PREFIX = "ROOTSTOCK_"
CLIENT_KEY_VARIABLE = (
    f"{ENVIRONMENT_PREFIX}CLIENT_API_KEY"  # not the daemon's: of commands that ask it
)


def variable_of(name: str) -> str:
    """The environment variable that sets a setting of the daemon."""
    return f"{ENVIRONMENT_PREFIX}{name.upper()}"
