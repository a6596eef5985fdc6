"""What the engine knows of live requests, beside what the server knows."""

from collections import defaultdict
from collections.abc import Iterable, Sequence

from engine.values.stats import RequestInfo
from server.activity.tracker import TrackedRequest
from server.schemas.admin import LiveRequest, LiveStatus


def live_requests(
    tracked: Iterable[TrackedRequest], infos: Iterable[RequestInfo], now: float
) -> list[LiveRequest]:
    """A row for each request; `now` is of the tracker's clock."""
    by_request = defaultdict[str, list[RequestInfo]](list)
    for info in infos:
        by_request[info.request_id].append(info)
    return [_row(one, [by_request[r.id] for r in one.requests], now) for one in tracked]


def _row(
    tracked: TrackedRequest, known: Sequence[Sequence[RequestInfo]], now: float
) -> LiveRequest:
    infos = [info for sequences in known for info in sequences]
    status = _status(tracked, infos)
    waiting = min((i for i in infos if i.waits_for), key=lambda info: info.index, default=None)
    return LiveRequest.model_validate(
        {
            **tracked.asked(),
            "accepted_draft_tokens": tracked.accepted_draft_tokens
            + sum(info.accepted_draft_tokens for info in infos),
            "status": status,
            "waits_for": waiting.waits_for if waiting and status == "waiting" else None,
            "age_seconds": now - tracked.began_seconds,
            "computed_tokens": sum(map(_computed_tokens, known)),
            "blocks": sum(info.blocks for info in infos),
        }
    )


def _status(tracked: TrackedRequest, infos: Sequence[RequestInfo]) -> LiveStatus:
    if not tracked.unfinished:
        return "sending"
    if not infos:
        return "preparing"
    return "waiting" if all(info.waits_for for info in infos) else "running"


def _computed_tokens(sequences: Sequence[RequestInfo]) -> int:
    """Of the prompt that sequences of one request have in common."""
    return max((min(info.computed_tokens, info.prompt_tokens) for info in sequences), default=0)
