"""Both ends of a connection prove the same key, and nothing but the key passes."""

import random
import socket
import struct
from collections.abc import Callable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from time import monotonic, sleep
from typing import TypeAlias

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from engine.process import handshake
from engine.process.handshake import (
    KEY_BYTES,
    MAX_KEY_BYTES,
    HandshakeError,
    Role,
    read_key,
    shake_hands,
)
from tests.profiles import examples

KEYS = st.binary(min_size=KEY_BYTES, max_size=100)
KEY = bytes(range(KEY_BYTES))
SAME = dict.fromkeys(Role, KEY)
OTHER = {Role.LISTENER: Role.JOINER, Role.JOINER: Role.LISTENER}
ROLES = pytest.mark.parametrize("role", Role)

ALL_BYTES = 75  # that each end sends
ROLE_BYTE = 10
PATIENCE = 60.0

Edit: TypeAlias = Callable[[int, int], bytes | None]
"""What is passed on in place of a byte, by its position and value; None: the connection ends."""


def unchanged(at: int, byte: int) -> bytes:
    return bytes([byte])


def outcome(future: "Future[None]") -> str:
    """Why a handshake has failed; "" if it has not."""
    error = future.exception(PATIENCE)
    assert error is None or isinstance(error, HandshakeError), repr(error)
    return str(error or "")


def facing(role: Role, attack: Callable[[socket.socket], object]) -> str:
    """The outcome of an end that has the key, against whatever `attack` does."""
    ours, theirs = socket.socketpair()
    with ThreadPoolExecutor(2) as threads, ours, theirs:
        future = threads.submit(shake_hands, ours, KEY, role)
        threads.submit(attack, theirs)
        future.add_done_callback(lambda _: ours.shutdown(socket.SHUT_RDWR))
        return outcome(future)


def relayed(keys: Mapping[Role, bytes], edits: Mapping[Role, Edit]) -> dict[Role, str]:
    """The outcomes of a handshake between two ends, with `edits` of what each sends."""
    ends, middles = zip(*(socket.socketpair() for _ in Role), strict=True)
    futures = dict[Role, "Future[None]"]()
    with ThreadPoolExecutor(4) as threads:
        for role, end, source, target in zip(Role, ends, middles, middles[::-1], strict=True):
            futures[role] = threads.submit(_shake_and_close, end, keys[role], role)
            threads.submit(pump, source, target, edits.get(role, unchanged))
        outcomes = {role: outcome(future) for role, future in futures.items()}
    for each in middles:
        each.close()
    return outcomes


def _shake_and_close(end: socket.socket, key: bytes, role: Role) -> None:
    with end:
        shake_hands(end, key, role)


def pump(source: socket.socket, target: socket.socket, edit: Edit) -> None:
    """Pass on bytes until either end closes."""
    at = 0
    with suppress(OSError):
        while byte := source.recv(1):
            if (edited := edit(at, byte[0])) is None:
                break
            target.sendall(edited)
            at += 1
        target.shutdown(socket.SHUT_WR)


def sent_by(role: Role) -> bytes:
    """All that an end sends in a handshake that succeeds."""
    sent = bytearray()

    def record(at: int, byte: int) -> bytes:
        sent.append(byte)
        return bytes([byte])

    assert not any(relayed(SAME, {role: record}).values())
    assert len(sent) == ALL_BYTES
    return bytes(sent)


@given(KEYS)
@settings(max_examples=examples(20))
def test_two_ends_with_one_key_agree_and_the_connection_is_free_then(key: bytes) -> None:
    ours, theirs = socket.socketpair()
    with ours, theirs, ThreadPoolExecutor(1) as thread:
        joined = thread.submit(shake_hands, theirs, key, Role.JOINER)
        shake_hands(ours, key, Role.LISTENER)
        joined.result(PATIENCE)
        ours.sendall(b"first")
        theirs.sendall(b"second")
        assert (theirs.recv(100), ours.recv(100)) == (b"first", b"second")
        assert (ours.gettimeout(), theirs.gettimeout()) == (None, None)


@given(KEYS, KEYS)
@settings(max_examples=examples(20))
def test_ends_with_different_keys_refuse_each_other(first: bytes, second: bytes) -> None:
    second = second + b"x" if first == second else second
    outcomes = relayed({Role.LISTENER: first, Role.JOINER: second}, {})
    assert outcomes[Role.LISTENER] == "it has another key"
    assert "has another key" in outcomes[Role.JOINER]


@ROLES
def test_a_recorded_handshake_is_of_no_use_for_another(role: Role) -> None:
    recorded = sent_by(OTHER[role])
    assert facing(role, lambda theirs: theirs.sendall(recorded)) == "it has another key"


@ROLES
@pytest.mark.parametrize("claimed", Role)
def test_what_an_end_has_sent_cannot_be_sent_back_to_it(
    role: Role, claimed: Role, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(handshake, "HANDSHAKE_SECONDS", 0.5)  # a listener proves nothing first

    def claim(at: int, byte: int) -> bytes:
        return bytes([claimed if at == ROLE_BYTE else byte])

    assert facing(role, lambda theirs: pump(theirs, theirs, claim))


@ROLES
@given(data=st.data())
@settings(max_examples=examples(100))
def test_what_is_cut_off_or_changed_anywhere_proves_nothing(
    role: Role, data: st.DataObject
) -> None:
    """Both ends have the key, and something between them changes what the other end sends."""
    changed = data.draw(st.integers(0, ALL_BYTES - 1), "byte")
    bit = data.draw(st.none() | st.integers(0, 7), "bit")

    def edit(at: int, byte: int) -> bytes | None:
        if at != changed:
            return bytes([byte])
        return None if bit is None else bytes([byte ^ 1 << bit])

    assert relayed(SAME, {OTHER[role]: edit})[role]


@ROLES
@given(garbage=st.binary(max_size=300))
@settings(max_examples=examples(100))
def test_garbage_of_any_length_is_refused(role: Role, garbage: bytes) -> None:
    def attack(theirs: socket.socket) -> None:
        theirs.sendall(garbage)
        theirs.shutdown(socket.SHUT_WR)

    assert facing(role, attack)


@ROLES
def test_another_version_is_named(role: Role) -> None:
    hello = bytearray(sent_by(OTHER[role]))
    struct.pack_into("<H", hello, len(b"rootrank"), 2)
    why = facing(role, lambda theirs: theirs.sendall(hello))
    assert why == "its handshake has version 2; this one's is 1"


@ROLES
def test_an_end_that_sends_a_byte_now_and_then_is_refused_in_time(
    role: Role, monkeypatch: pytest.MonkeyPatch
) -> None:
    """All it sends is right, and no pause is long."""
    monkeypatch.setattr(handshake, "HANDSHAKE_SECONDS", seconds := 0.2)
    clocks = {role: monotonic, OTHER[role]: lambda: 0.0}

    def drip(at: int, byte: int) -> bytes:
        sleep(2 * seconds / ALL_BYTES)
        return bytes([byte])

    def shake(end: socket.socket, key: bytes, own: Role) -> None:
        with end:
            shake_hands(end, key, own, clocks[own])

    monkeypatch.setitem(globals(), "_shake_and_close", shake)
    why = relayed(SAME, {OTHER[role]: drip})[role]
    assert why == "it has not proved the key within 0.2 s"


def test_the_key_of_a_file_is_without_white_space_around_it(tmp_path: Path) -> None:
    draw = random.Random(77)
    path = tmp_path / "key"
    path.touch(0o600)
    for n_bytes in (KEY_BYTES, 64, MAX_KEY_BYTES - 1):
        key = bytes(draw.choices(b"abcdef0123456789", k=n_bytes))
        path.write_bytes(key + b"\n")
        assert read_key(path) == key


@pytest.mark.parametrize("n_bytes", [0, KEY_BYTES - 1, MAX_KEY_BYTES + 1])
def test_a_key_that_is_too_short_or_too_long_is_refused(tmp_path: Path, n_bytes: int) -> None:
    path = tmp_path / "key"
    path.touch(0o600)
    path.write_bytes(b"k" * n_bytes)
    with pytest.raises(ValueError, match="must have from 32 to 4096 bytes"):
        read_key(path)


@pytest.mark.parametrize("mode", [0o640, 0o604, 0o620])
def test_a_key_that_others_may_read_is_refused(tmp_path: Path, mode: int) -> None:
    path = tmp_path / "key"
    path.write_bytes(KEY)
    path.chmod(mode)
    with pytest.raises(ValueError, match=f"chmod 600 {path}"):
        read_key(path)


def test_a_file_that_is_not_there_is_named(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"cannot read .*none: No such file"):
        read_key(tmp_path / "none")
