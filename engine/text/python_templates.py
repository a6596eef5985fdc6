"""Chat templates that mlx-lm has as Python modules, for models without a template in Jinja."""

from importlib.util import find_spec
from pathlib import Path


def python_template(name: str) -> Path:
    """The module's file, found without importing mlx-lm, which would load MLX. There may be no such
    file.
    """
    package = find_spec("mlx_lm")
    assert package is not None
    assert package.submodule_search_locations is not None
    return Path(package.submodule_search_locations[0], "chat_templates", f"{name}.py")
