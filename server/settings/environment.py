"""The names of environment variables."""

ENVIRONMENT_PREFIX = "ROOTSTOCK_"
CLIENT_KEY_VARIABLE = (
    f"{ENVIRONMENT_PREFIX}CLIENT_API_KEY"  # not the daemon's: of commands that ask it
)
