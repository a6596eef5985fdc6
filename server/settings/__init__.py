"""The settings of the daemon: a flag wins over a variable ROOTSTOCK_*, and that over YAML.

A module for each subject has its settings and what must hold among them; settings.py makes one flat
Settings of them all and is the only reader of flags, environment and YAML. Imports access and
parsing, for the values that a setting may have.
"""

from server.settings.environment import CLIENT_KEY_VARIABLE, ENVIRONMENT_PREFIX
from server.settings.errors import SettingsError
from server.settings.settings import Settings, load_settings

__all__ = [
    "CLIENT_KEY_VARIABLE",
    "ENVIRONMENT_PREFIX",
    "Settings",
    "SettingsError",
    "load_settings",
]
