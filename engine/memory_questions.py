"""What is asked about memory before a model is loaded, of a process that ends then."""

from dataclasses import dataclass
from typing import Annotated, Literal, TypeAlias

from pydantic import Discriminator, TypeAdapter

from engine.api import ModelError
from engine.child_process import start_child
from engine.types.settings import EngineConfig


@dataclass(frozen=True, slots=True)
class Free:
    """How much MLX finds free."""

    kind: Literal["free"] = "free"


@dataclass(frozen=True, slots=True)
class Needed:
    """What a model takes, whose files are here, with so much for its KV cache and states unless the
    settings say how much. `memory_bytes` of the config is the most that there will be.
    """

    config: EngineConfig
    storage_bytes: int
    kind: Literal["needed"] = "needed"


Question: TypeAlias = Free | Needed


@dataclass(frozen=True, slots=True)
class Answer:
    n_bytes: int = 0
    error: str = ""


QUESTION: TypeAdapter[Question] = TypeAdapter(Annotated[Free | Needed, Discriminator("kind")])
ANSWER = TypeAdapter(Answer)


def ask(question: Question) -> int:
    """Bytes of memory. Raises ModelError."""
    connection, process = start_child(
        "engine.mlx_backend.asked", QUESTION.dump_json(question).decode()
    )
    with connection, connection.makefile("rb") as answered:
        said = answered.read()
    process.wait()
    if not said:
        raise ModelError("MLX does not start")
    answer = ANSWER.validate_json(said)
    if answer.error:
        raise ModelError(answer.error)
    return answer.n_bytes
