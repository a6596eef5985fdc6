"""The packages that images need, which are installed without those that they name in turn."""

from importlib import metadata

PACKAGES = {"mlx-vlm": "0.7.10", "Pillow": "13.0.0"}
"""By name: the versions that the tests have passed with."""

INSTALL = "pip install --no-deps " + " ".join(f"{name}=={PACKAGES[name]}" for name in PACKAGES)
"""The command that installs them. With what mlx-vlm names in turn it would bring 23 packages more,
which are not used.
"""


def describe_packages() -> str:
    """The installed versions; where a package is missing, the command that installs it."""
    try:
        return ", ".join(f"{name} {metadata.version(name)}" for name in PACKAGES)
    except metadata.PackageNotFoundError as error:
        return f"refused, since {error.name} is not installed: {INSTALL}"
