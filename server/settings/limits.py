"""Limits on what clients can use, and time limits."""

from typing import Self

from pydantic import BaseModel, ByteSize, Field, model_validator
from pydantic_core import PydanticCustomError


class LimitsSettings(BaseModel):
    max_body_bytes: ByteSize = Field(
        ByteSize(8 * 1024**2), gt=0, description="The largest body of a request."
    )
    max_total_body_bytes: ByteSize = Field(
        ByteSize(256 * 1024**2),
        gt=0,
        description="All bodies together that are arriving or being parsed.",
    )
    max_unsent_bytes: ByteSize = Field(
        ByteSize(256 * 1024**2),
        gt=0,
        description="What may wait to be sent of one answer, in memory.",
    )
    max_total_unsent_bytes: ByteSize = Field(
        ByteSize(1024**3),
        gt=0,
        description="The same of all answers together; beyond it the largest is ended.",
    )
    max_stored_responses: int = Field(
        1000,
        ge=0,
        le=1_000_000,
        description="Answers of /v1/responses kept in memory for when they are asked for again. "
        "Beyond it the client with the most loses its oldest.",
    )
    max_stored_bytes: ByteSize = Field(
        ByteSize(256 * 1024**2),
        ge=0,
        description="All of them together, with what they answer: a conversation once, however "
        "many continue it.",
    )
    max_background_responses: int = Field(
        64,
        ge=0,
        le=100_000,
        description="Answers of /v1/responses that are made at once while nobody waits; of one "
        "client as many as places are free.",
    )
    max_connections: int = Field(
        2048,
        ge=2,
        le=65_536,
        description="Open connections; fewer where the limit of open files is lower.",
    )
    header_timeout_seconds: float = Field(
        30.0, gt=0, le=3600, description="Time for the head of a request to arrive."
    )
    body_timeout_seconds: float = Field(
        60.0, gt=0, le=3600, description="Time for the body of a request to arrive."
    )
    send_timeout_seconds: float = Field(
        45.0,
        gt=0,
        le=3600,
        description="Time in which a client must take a byte of what is sent to it.",
    )
    idle_timeout_seconds: int = Field(
        120, ge=1, le=3600, description="How long a connection stays open between two requests."
    )
    keepalive_seconds: float = Field(
        10.0,
        gt=0,
        le=3600,
        description="Silence in a stream after which a comment or an event keeps it open.",
    )
    request_timeout_seconds: float | None = Field(
        None,
        gt=0,
        le=86_400,
        description="Time from a request's arrival to the end of its answer, its wait in the queue "
        "included. Unset: no limit.",
    )
    drain_timeout_seconds: int = Field(
        30,
        ge=0,
        le=86_400,
        description="Time for running requests to finish after the first SIGINT or SIGTERM.",
    )

    @model_validator(mode="after")
    def _one_body_fits_into_all(self) -> Self:
        if self.max_total_body_bytes < self.max_body_bytes:
            raise PydanticCustomError(
                "max_total_body_bytes",
                "max_total_body_bytes: must be at least max_body_bytes ({max_body_bytes})",
                {"max_body_bytes": int(self.max_body_bytes)},
            )
        return self
