"""What the daemon is told at start: a flag wins over ROOTSTOCK_*, that over YAML.

A module for each subject has its settings and what must hold among them; settings.py makes one flat
Settings of them all and is the only reader of flags, environment and YAML.
"""

from server.settings.environment import CLIENT_KEY_VARIABLE, ENVIRONMENT_PREFIX
from server.settings.settings import Settings, SettingsError, load_settings

__all__ = [
    "CLIENT_KEY_VARIABLE",
    "ENVIRONMENT_PREFIX",
    "Settings",
    "SettingsError",
    "load_settings",
]
