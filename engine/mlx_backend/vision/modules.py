"""mlx-vlm's `vision` and `config` modules, without the rest of mlx-vlm.

Its packages import transformers' processors, servers and audio when they are initialized. Here each
of its packages is a bare module with a path, so that the towers need MLX, numpy and Pillow alone.
"""

import importlib
import sys
from importlib.machinery import PathFinder
from pathlib import Path
from types import ModuleType
from typing import NamedTuple

from engine.images.packages import INSTALL

PACKAGE = "mlx_vlm"


class NoVision(Exception):
    """Why a model takes no images, in a few words."""


class VisionModules(NamedTuple):
    """The modules of a family's vision tower."""

    config: ModuleType
    vision: ModuleType


def vision_modules(family: str) -> VisionModules:
    """The modules of a family, by its name in mlx-vlm. Raises NoVision."""
    for name in (PACKAGE, "PIL"):
        if name not in sys.modules and PathFinder.find_spec(name) is None:
            raise NoVision(f"the packages for images are not installed: {INSTALL}")
    package = f"{PACKAGE}.models.{family}"
    try:
        for name in (PACKAGE, f"{PACKAGE}.models", package):
            _make_bare(name)
        return VisionModules(
            importlib.import_module(f"{package}.config"),
            importlib.import_module(f"{package}.vision"),
        )
    except Exception as error:  # its modules may raise anything
        raise NoVision(f"mlx-vlm's vision tower of {family} cannot be imported: {error}") from error


def _make_bare(name: str) -> None:
    """Let a package be imported from without running its `__init__`."""
    if name in sys.modules:
        return
    parent, _, last = name.rpartition(".")
    if parent:
        paths = [str(Path(path) / last) for path in sys.modules[parent].__path__]
    else:
        spec = PathFinder.find_spec(name)
        assert spec is not None
        assert spec.submodule_search_locations is not None
        paths = list(spec.submodule_search_locations)
    module = ModuleType(name)
    module.__path__ = paths
    sys.modules[name] = module
