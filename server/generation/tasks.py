"""Whether a model is for what it is asked for."""

from engine.values.model import Task
from server.errors import ApiError, InvalidField
from server.generation.models import ServedModel

_WHERE = {
    Task.GENERATE: "It answers /v1/chat/completions and the other routes of answers.",
    Task.EMBED: "It embeds: ask /v1/embeddings, or /v1/rerank by similarity.",
    Task.RERANK: "It reranks: ask /v1/rerank or /v1/score.",
}
_WHAT = {
    Task.GENERATE: "writes no answers",
    Task.EMBED: "has no embeddings",
    Task.RERANK: "does not rerank",
}
_HOW = {
    Task.EMBED: " Its checkpoint says nothing of embeddings; the setting pooling (--pooling last, "
    "or mean) has it embed all the same.",
    Task.RERANK: " The setting reranker (--reranker yes-no) serves a checkpoint such as "
    "Qwen3-Reranker as one.",
}
"""What else a model that generates could be."""


def check_task(model: ServedModel, *tasks: Task) -> None:
    """Raise ApiError (400) unless the model is for one of the tasks."""
    served = model.engine.card.tasks
    if not set(tasks) & set(served):
        raise _refusal(model.name, tasks[0], served)


def _refusal(name: str, asked: Task, served: tuple[Task, ...]) -> ApiError:
    where = " ".join(_WHERE[task] for task in served)
    how = _HOW.get(asked, "") if Task.GENERATE in served else ""
    return InvalidField(
        "model", f"'{name}' {_WHAT[asked]}. {where}{how}", code="task_not_supported"
    )
