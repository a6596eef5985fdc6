"""The metric families of what not all models have: KV events, a draft model, images, ranks."""

from engine.values.stats import DraftModelStats, ImageStats, KVEventStats, RankStats
from server.metrics.metrics import Counter, Gauge, Row

KV_EVENTS: tuple[Row[KVEventStats], ...] = (
    Gauge(
        "rootstock_kv_event_subscribers",
        "Connections that subscribe to KV events.",
        lambda e: e.subscribers,
    ),
    Gauge(
        "rootstock_kv_event_blocks",
        "Blocks that subscribers know to be cached.",
        lambda e: e.blocks,
    ),
    Counter("rootstock_kv_event_batches", "Published batches of KV events.", lambda e: e.batches),
    Counter(
        "rootstock_kv_event_dropped_blocks",
        "Blocks of events that were dropped because too many waited; all are then published anew.",
        lambda e: e.dropped_blocks,
    ),
    Counter(
        "rootstock_kv_event_publications",
        "Times that all blocks were published again, for new subscribers.",
        lambda e: e.published_again,
    ),
    Counter(
        "rootstock_kv_event_replays",
        "Requests for batches that a subscriber has lost.",
        lambda e: e.replays,
    ),
)


DRAFT_MODEL: tuple[Row[DraftModelStats], ...] = (
    Counter(
        "rootstock_draft_model_tokens",
        "Tokens that the draft model has drafted, verified or not.",
        lambda d: d.drafted_tokens,
    ),
    Counter(
        "rootstock_draft_model_known_tokens{result}",
        "Tokens that sequences had before they were drafted for: computed by the draft model, or "
        "cached in its store.",
        lambda d: [("computed", d.known_tokens), ("cached", d.cached_tokens)],
    ),
    Gauge(
        "rootstock_draft_model_blocks{state}",
        "Blocks of the draft model's store: all, and those held by sequences.",
        lambda d: [("total", d.blocks_total), ("held", d.blocks_held)],
    ),
    Counter(
        "rootstock_draft_model_failures",
        "1 if the draft model has failed: nothing is drafted by it any more.",
        lambda d: d.failures,
    ),
)


IMAGES: tuple[Row[ImageStats], ...] = (
    Counter(
        "rootstock_encoded_images",
        "Images that the vision tower has computed: none whose KV was cached, and each once for "
        "all requests that wait for it.",
        lambda i: i.encoded,
    ),
    Counter(
        "rootstock_reused_images",
        "Times that a request needed an image which another had computed, or was computing.",
        lambda i: i.reused,
    ),
    Gauge(
        "rootstock_image_feature_bytes{state}",
        "Memory for what the vision tower has made of images: kept now, and the limit.",
        lambda i: [("kept", i.feature_bytes), ("limit", i.limit_bytes)],
    ),
)


RANKS: tuple[Row[RankStats], ...] = (
    Gauge("rootstock_ranks", "Processes that compute the model together.", lambda r: r.ranks),
    Counter(
        "rootstock_rank_sent_seconds",
        "Time that steps took to send their plans to the other ranks, summed.",
        lambda r: r.sent_seconds,
    ),
    Counter(
        "rootstock_rank_sent_bytes",
        "Bytes of plans sent to the other ranks. What layers exchange is not counted.",
        lambda r: r.sent_bytes,
    ),
)
