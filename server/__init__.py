"""The HTTP daemon and the command line of Rootstock."""

__version__ = "0.1.0"
