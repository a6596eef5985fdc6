"""How often what happened: a simulation in which nothing happens shows nothing."""

from collections import Counter
from enum import StrEnum


class Happening(StrEnum):
    LOAD_BEGUN = "loads begun"
    LOAD_WHOLE = "loads that brought all"
    LOAD_CUT = "loads cut short"
    LOAD_TIMED_OUT = "loads given up in time"
    LOAD_CLEARED = "loads cleared away"
    LOAD_FAILED = "loads whose step failed"
    LOAD_OUTLIVED = "loads that the engine's end cut off"
    WAITED = "sequences that waited for a load"
    DUPLICATE_WAITED = "duplicates that waited with them"
    ABORTED_WAITING = "aborts of who waited for a load"
    EVICTED_LOADING = "evictions during a load"
    READER_ASIDE = "readers that stood aside"
    RECORD_WRITTEN = "records written"
    PARTS_ADDED = "records that got more parts"
    OFFER_REFUSED = "offers refused"
    WRITE_LOST = "records lost before they were written"
    PATH_LONG = "entries seen behind the longest path"
    ENTRY_FORGOTTEN = "records forgotten"
    ENTRY_DAMAGED = "records found damaged"
    ENTRY_MISFIT = "records that did not fit"
    CLEARED_MEMORY = "clears of memory"
    CLEARED_DISK = "clears of the disk"
    CLEARED_BOTH = "clears of both"
    ANSWER_LATE = "answers of grammars that came late"
    ANSWER_FAILED = "grammars that could not be answered"
    SAT_OUT = "rows that sat a step out"
    POOLED = "prompts that were pooled"
    POOLED_SHARED = "of which something was cached"
    RESTARTED = "restarts"
    KILLED = "kills"
    WAITS_FOR_SLOTS = "turns in which a sequence waited for a slot"
    WAITS_FOR_MEMORY = "turns in which one waited for blocks"
    WAITS_FOR_TWIN = "turns in which one waited for its twin"
    WAITS_FOR_DISK = "turns in which one waited for the disk"
    WAITS_FOR_TURN = "turns in which one waited for its turn"
    MIXED = "turns in which sequences of several adapters ran"
    CLIENT_SLOT = "sequences preempted for another client's slot"
    CLIENT_BLOCKS = "sequences preempted for another client's blocks"


Census = Counter[Happening]
