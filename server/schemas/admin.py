"""`/admin/requests` and `/admin/series`: who is being served, who was, and what came of it."""

from typing import Literal, TypeAlias

from pydantic import BaseModel, ConfigDict, Field

from engine.values.request import WaitReason
from server.schemas.pool import PooledModels

LiveStatus: TypeAlias = Literal["preparing", "waiting", "running", "sending"]


class _Told(BaseModel):
    """Made once, of values that need no second look."""

    model_config = ConfigDict(frozen=True)


class _Asked(_Told):
    """What is known of a request from its beginning. None of its text."""

    id: str = Field(description="As in `X-Request-Id`, and the end of the answer's own.")
    route: str
    model: str = Field(description="The name by which the model was asked for.")
    client: str = Field(description="An address, or the key's name where there are several keys.")
    key: str | None = Field(description="The name of its API key.")
    sequences: int = Field(description="Answers asked for: `n` of each prompt.")
    prompt_tokens: int = Field(description="Of all its prompts.")
    cached_tokens: int = Field(description="Of these, found in the cache.")
    output_tokens: int = Field(description="Written, by all its sequences.")
    accepted_draft_tokens: int = Field(description="Of these, those that a draft had right.")
    first_token_seconds: float | None = Field(
        description="From when the engine was asked to its first token."
    )
    tokens_per_second: float | None = Field(
        description="Tokens written after the first, by the seconds since. Null before there are."
    )


class LiveRequest(_Asked):
    """A request that is being answered. It runs while one of its sequences does."""

    status: LiveStatus = Field(
        description="`preparing`: its grammar is tried, or the engine has yet to take it in; "
        "`sending`: all is written, and the client has not taken it."
    )
    waits_for: WaitReason | None = Field(
        description="With `waiting`: why its first sequence that waits has not been admitted."
    )
    age_seconds: float = Field(description="Since the engine was asked.")
    computed_tokens: int = Field(description="Of its prompts, with KV: computed or adopted.")
    blocks: int = Field(description="In its sequences' tables; one in several counts in each.")


class LiveRequests(BaseModel):
    requests: list[LiveRequest]


class FinishedRequest(_Asked):
    """A request that the engine was asked to answer, and that is over."""

    number: int = Field(description="Since the start: 1 is the first that was over.")
    time: float = Field(description="When it was over, in seconds since the epoch.")
    seconds: float = Field(
        description="From when the engine was asked to its end, with the sending."
    )
    status: int = Field(
        description="The HTTP status of what came of it, also where a stream had begun: "
        "499 where the client left."
    )
    code: str | None = Field(description="The error's code; null without an error.")


class FinishedRequests(BaseModel):
    requests: list[FinishedRequest] = Field(description="The latest first.")


class SeriesPoint(_Told):
    """What happened in an interval, and how things stand at its end."""

    time: float = Field(description="Its end, in seconds since the epoch.")
    generated_tokens_per_second: float
    prompt_tokens_per_second: float = Field(description="Of the prompts admitted.")
    computed_tokens_per_second: float = Field(description="Of these, not found in the cache.")
    hit_share: float | None = Field(description="Of these, found. Null where there were none.")
    first_token_seconds: float | None = Field(
        description="The mean from arrival to first token. Null where there was no first token."
    )
    evicted_blocks_per_second: float
    running: int
    waiting: int


class Series(BaseModel):
    interval_seconds: float
    points: list[SeriesPoint] = Field(description="Of the last 15 minutes, the oldest first.")


class Activity(_Told):
    """What runs, and what has been added since the event before; in the first one, all."""

    requests: list[LiveRequest] = Field(description="The oldest, at most 100.")
    hidden_requests: int = Field(description="Live requests beyond those.")
    finished: list[FinishedRequest] = Field(description="The oldest first.")
    points: list[SeriesPoint] = Field(description="Of the series, the oldest first.")
    models: PooledModels = Field(description="As `/admin/models` has them.")
