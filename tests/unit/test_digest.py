"""Digests name blocks outside the process, so their format must never change by accident."""

from collections.abc import Iterable
from dataclasses import replace

import pytest
from blake3 import blake3

from kvstore.tokens import PackedDigests, block_digests, root_digest
from kvstore.types import Namespace

NS = Namespace(model="qwen3", adapter="", kv_format="float32", cache_salt="ü")


def packed(ids: Iterable[int]) -> bytes:
    return b"".join(token_id.to_bytes(8, "little") for token_id in ids)


def test_the_root_is_the_hash_of_the_length_prefixed_fields() -> None:
    written_out = (
        b"rootstock.kv.v2"
        b"\x05\x00\x00\x00\x00\x00\x00\x00qwen3"
        b"\x00\x00\x00\x00\x00\x00\x00\x00"
        b"\x07\x00\x00\x00\x00\x00\x00\x00float32"
        b"\x02\x00\x00\x00\x00\x00\x00\x00\xc3\xbc"
    )
    assert root_digest(NS) == blake3(written_out).digest()


def test_each_digest_is_the_hash_of_the_one_before_and_the_tokens() -> None:
    first = blake3(root_digest(NS) + packed((1, 2))).digest()
    second = blake3(first + packed((70_000, 2**32 - 1))).digest()
    assert list(block_digests(NS, packed((1, 2, 70_000, 2**32 - 1)), 2)) == [first, second]


def test_a_known_chain() -> None:
    digests = block_digests(Namespace(model="m"), packed(range(8)), 4)
    assert [digest.hex() for digest in digests] == KNOWN_CHAIN


def test_a_tail_has_no_digest_and_changes_none() -> None:
    with_tail, without = (block_digests(NS, packed(range(n)), 4) for n in (7, 4))
    assert list(with_tail) == list(without)
    assert not block_digests(NS, packed(range(3)), 4)


def test_a_chain_is_read_as_any_sequence() -> None:
    chain = list(block_digests(NS, packed(range(12)), 2))
    digests = PackedDigests(chain)
    assert len(digests) == 6
    assert [digests[i] for i in range(-6, 6)] == chain + chain
    assert (digests[1:3], digests[:-1], digests[4:9]) == tuple(
        tuple(chain[part]) for part in (slice(1, 3), slice(-1), slice(4, 9))
    )
    with pytest.raises(IndexError):
        digests[6]


def test_a_block_is_named_by_all_that_precedes_it() -> None:
    one, other = (block_digests(NS, packed((first, 2, 3, 4)), 2) for first in (1, 9))
    assert one[0] != other[0]
    assert one[1] != other[1]


@pytest.mark.parametrize("field", ["model", "adapter", "kv_format", "cache_salt"])
def test_every_field_of_the_namespace_separates(field: str) -> None:
    assert root_digest(replace(NS, **{field: "x"})) != root_digest(NS)


def test_fields_cannot_be_shifted_into_one_another() -> None:
    assert root_digest(Namespace("ab", "c")) != root_digest(Namespace("a", "bc"))


KNOWN_CHAIN = [
    "e853ed4f6c59ca9ef2a3c227df147879c9c65fb6f46076bfadf0e352d41fb98d",
    "2723394bd97266e90d0467d905f5cb24f15204614f421a15e972d580e98cdae2",
]
