"""Which architectures mlx-lm has, read from its sources: to import them all is not safe."""

import ast
from importlib.util import find_spec
from pathlib import Path


def architectures() -> list[str]:
    """The modules of `mlx_lm.models` that define or re-export a `Model`, in order."""
    spec = find_spec("mlx_lm")
    assert spec is not None
    assert spec.submodule_search_locations is not None
    directory = Path(spec.submodule_search_locations[0]) / "models"
    return sorted(path.stem for path in directory.glob("*.py") if _has_model(path))


def _has_model(path: Path) -> bool:
    return any(_defines_model(node) for node in ast.parse(path.read_text(encoding="utf-8")).body)


def _defines_model(node: ast.stmt) -> bool:
    match node:
        case ast.ClassDef(name="Model"):
            return True
        case ast.ImportFrom(names=names):
            return any((name.asname or name.name) == "Model" for name in names)
        case _:
            return False
