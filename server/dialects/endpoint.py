"""Routes whose OpenAPI description follows from their types."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from http import HTTPStatus
from typing import Any, TypeVar

from fastapi import APIRouter
from pydantic import BaseModel
from starlette.responses import Response

from server.dialects.error_shapes import ErrorResponse
from server.dialects.job import COMMENTS, Job, json_response, respond, wire_json
from server.generation.requests import ServedModel
from server.http.stream import EVENT_STREAM, NDJSON
from server.json_model import AnswerType, RequestModel
from server.record import RequestRecord, output_of
from server.service import Context, Prepare

SCHEMAS = "#/components/schemas/{model}"
RETRY_AFTER = {"Retry-After": {"description": "seconds", "schema": {"type": "integer"}}}
BUSY_STATUSES = {429, 503}

BODY_ERRORS = (400, 408, 413, 415)
MODEL_ERRORS = (403, 404)
"""Errors of routes that a model is named to: the key may not use it, or there is none."""
GENERATION_ERRORS = (*MODEL_ERRORS, 410, 429)

Document = dict[str, Any]
Handler = TypeVar("Handler", bound=Callable[..., Any])
BodyT = TypeVar("BodyT", bound=RequestModel)


@dataclass(frozen=True, slots=True)
class Stream:
    """A response that is sent piece by piece."""

    media_type: str
    models: Sequence[AnswerType]  # of which its pieces are the JSON
    item: Document  # the schema of one piece


class Endpoints(APIRouter):
    """Routes, and the models that FastAPI does not see in them: of bodies and of streams."""

    def __init__(self, prefix: str = "", *, include_in_schema: bool = True) -> None:
        super().__init__(prefix=prefix, include_in_schema=include_in_schema)
        self.bodies: list[type[RequestModel]] = []
        self.streamed: list[AnswerType] = []

    def endpoint(
        self,
        method: str,
        *paths: str,
        body: type[RequestModel] | None = None,
        answer: AnswerType | None = None,
        stream: Stream | None = None,
        errors: Sequence[int] | None = (),
        **options: Any,
    ) -> Callable[[Handler], Handler]:
        """Decorator: the function answers `method` on each of the paths, and HEAD where it answers
        GET with something that ends.

        `body` is the request's JSON, which the function reads. `answer` is the JSON of a function
        that returns a Response; otherwise the model that it returns. `stream` is the response's
        other shape, or its only one. `errors` are the statuses beyond those of every body and of a
        stopped engine; None: the route has not even these. `options` are FastAPI's.
        """

        def add(handler: Handler) -> Handler:
            if answer is not None:
                options["response_model"] = answer
            responses: dict[int | str, Document] = {}
            if stream is not None:
                self.streamed += stream.models
                responses[200] = {"content": {stream.media_type: {"itemSchema": stream.item}}}
            if errors is not None:
                statuses = {*errors, *(BODY_ERRORS if body else ()), 503}
                responses |= {status: error_answer(status) for status in sorted(statuses)}
            if body is not None:
                self.bodies.append(body)
                options["openapi_extra"] = _body_content(body)
            for path in paths:
                self.add_api_route(path, handler, methods=[method], responses=responses, **options)
                if method == "GET" and stream is None:
                    self.add_api_route(
                        path, handler, methods=["HEAD"], **options | {"include_in_schema": False}
                    )
            return handler

        return add

    def generation(
        self,
        *paths: str,
        body: type[BodyT],
        answer: AnswerType,
        stream: Stream | None = None,
        check: Callable[[BodyT], object] = id,
    ) -> Callable[[Prepare[BodyT, Job]], Prepare[BodyT, Job]]:
        """Decorator: the function makes the job of each POST to one of the paths, in a worker, once
        the model is held. `check` raises ApiError for bodies for which no model is to be loaded.
        """

        def add(prepare: Prepare[BodyT, Job]) -> Prepare[BodyT, Job]:
            async def handle(context: Context) -> Response:
                arrived = await context.arrived(body, check)
                keep_alive = COMMENTS if arrived.head.stream and stream else None
                return await respond(arrived, context, prepare, keep_alive)

            self._add(handle, prepare, paths, body, answer, GENERATION_ERRORS, stream)
            return prepare

        return add

    def direct(
        self, *paths: str, body: type[BodyT], answer: AnswerType
    ) -> Callable[[Prepare[BodyT, BaseModel]], Prepare[BodyT, BaseModel]]:
        """Decorator: the function makes the answer to each POST to one of the paths, in a worker,
        once the model is held. The engine computes nothing for it.
        """

        def add(make: Prepare[BodyT, BaseModel]) -> Prepare[BodyT, BaseModel]:
            async def handle(context: Context) -> Response:
                def rendered(body: BodyT, model: ServedModel, record: RequestRecord) -> bytes:
                    return wire_json(make(body, model, record))

                async with context.prepared(body, rendered) as (_, json):
                    output_of(context.record).add(len(json))
                    return json_response(json)

            self._add(handle, make, paths, body, answer, MODEL_ERRORS, None)
            return make

        return add

    def _add(
        self,
        handle: Callable[..., Any],
        described: Callable[..., object],
        paths: Sequence[str],
        body: type[RequestModel],
        answer: AnswerType,
        errors: Sequence[int],
        stream: Stream | None,
    ) -> None:
        """Add a route that has the name and the description of a function."""
        handle.__name__, handle.__doc__ = described.__name__, described.__doc__
        add = self.endpoint("POST", *paths, body=body, answer=answer, stream=stream, errors=errors)
        add(handle)


def chunks(model: AnswerType) -> Stream:
    """OpenAI's stream: chunks or an error, and [DONE] after the last."""
    schema = {"anyOf": [_json_text(model, ErrorResponse), {"const": "[DONE]"}]}
    return Stream(EVENT_STREAM, [model, ErrorResponse], _event(data=schema))


def named_events(models: Sequence[AnswerType]) -> Stream:
    """A stream of events, each with the name of its kind."""
    return Stream(EVENT_STREAM, models, _event(event={"type": "string"}, data=_json_text(*models)))


def unnamed_events(model: AnswerType) -> Stream:
    """A stream of events of one kind."""
    return Stream(EVENT_STREAM, [model], _event(data=_json_text(model)))


def json_lines(*models: AnswerType) -> Stream:
    """A stream of JSON objects, one a line."""
    return Stream(NDJSON, models, {"anyOf": [_reference(model) for model in models]})


def _event(**properties: Document) -> Document:
    return {"type": "object", "required": list(properties), "properties": properties}


def _json_text(*models: AnswerType) -> Document:
    return {
        "type": "string",
        "contentMediaType": "application/json",
        "contentSchema": {"anyOf": [_reference(model) for model in models]},
    }


def _body_content(model: type[RequestModel]) -> Document:
    media = {"schema": _reference(model), "example": model.EXAMPLE}
    return {"requestBody": {"required": True, "content": {"application/json": media}}}


def error_answer(status: int) -> Document:
    """The description of an error of that status, in OpenAI's shape."""
    response: Document = {
        "description": HTTPStatus(status).phrase,
        "content": json_content(ErrorResponse),
    }
    return response | {"headers": RETRY_AFTER} if status in BUSY_STATUSES else response


def json_content(model: AnswerType) -> Document:
    """The description of a response's JSON."""
    return {"application/json": {"schema": _reference(model)}}


def _reference(model: AnswerType) -> Document:
    return {"$ref": SCHEMAS.format(model=model.__name__)}
