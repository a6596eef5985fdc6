"""The settings of the daemon: a flag wins over a variable ROOTSTOCK_*, and that over YAML.

daemon.py has the settings of the daemon as a whole, models.py those of models, and of their engines
as EngineConfig declares them. settings.py makes one flat Settings of them all and is the only
reader of flags, environment and YAML. Imports access and parsing, for the values that a setting may
have.
"""

from server.settings.settings import Settings, SettingsError, load_settings
from server.settings.values import CLIENT_KEY_VARIABLE, ENVIRONMENT_PREFIX, variable_of

__all__ = [
    "CLIENT_KEY_VARIABLE",
    "ENVIRONMENT_PREFIX",
    "Settings",
    "SettingsError",
    "load_settings",
    "variable_of",
]
