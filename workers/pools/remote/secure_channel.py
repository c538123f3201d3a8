"""Sealed: a connection between two that share a secret, on a network where others may write, too.

Each proves that it knows the secret, without telling it. What is said then carries seals, made with keys of this
connection alone, by direction and number: what somebody else has written, changed, left out or said again is noticed
before it is looked at. Nobody is kept from reading along.
"""

import asyncio
import contextlib
import hmac
import os
import secrets
import socket
import stat
import struct
from collections.abc import Sequence
from hashlib import blake2b
from pathlib import Path

import numpy as np

from ...protocol.messages import Piece

_GREETING = b"trainhouse workers 1\n"
_NONCE_BYTES = _SEAL_BYTES = 32
_HEAD = struct.Struct("<Q")  # bytes of what follows, without its seal
_SECONDS = 10.0
"""In which two strangers have to know each other."""
_SILENCE = {"TCP_KEEPIDLE": 10, "TCP_KEEPINTVL": 5, "TCP_KEEPCNT": 3, "TCP_USER_TIMEOUT": 25_000}
"""After about 25 s without a sign of life the other machine is gone. The last one is in milliseconds."""
_LEAST_SECRET = 32


class NotSealed(ConnectionError):
    """The other one does not know the secret, or is none of ours; or the connection was tampered with."""


class NothingSaid(ConnectionError):
    """The other one has closed the connection without a word, as who only looks whether somebody listens."""


def read_secret(file: Path) -> bytes:
    """Raises ValueError; says nothing of what is in the file."""
    try:
        with file.open("rb") as opened:
            status, secret = os.fstat(opened.fileno()), opened.read().strip()
    except OSError as error:
        raise ValueError(f"the secret of the workers cannot be read from {file}: {error.strerror}") from None
    if status.st_mode & _not_for_others(status.st_uid):
        raise ValueError(
            f"the secret of the workers in {file} is not its owner's alone (mode {stat.S_IMODE(status.st_mode):04o}): "
            f"`chmod 600 {file}`, and make another one if somebody may have read it"
        )
    if len(secret) < _LEAST_SECRET:
        raise ValueError(
            f"the secret of the workers in {file} has {len(secret)} bytes, and {_LEAST_SECRET} are the least: make one "
            f"with `(umask 077; openssl rand -hex 32 > {file})`, and give the same file to servers and workers"
        )
    return blake2b(secret).digest()


def _not_for_others(owner: int) -> int:
    """Bits of its mode. A group may read what root has made for a service of another user: so systemd and Kubernetes
    hand secrets over, and so does PostgreSQL take its keys."""
    is_handed_over = owner == 0 and os.geteuid() != 0
    return stat.S_IRWXO | (stat.S_IWGRP | stat.S_IXGRP if is_handed_over else stat.S_IRWXG)


class Sealed:
    """One end of it. Messages arrive in the order in which they were sent. Every method raises OSError or EOFError."""

    def __init__(self, connection: socket.socket, sending: bytes, receiving: bytes) -> None:
        """sending, receiving: the keys of the two directions."""
        self._socket = connection
        self._sending, self._receiving = _Seals(sending), _Seals(receiving)

    @staticmethod
    async def by_caller(connection: socket.socket, secret: bytes) -> "Sealed":
        """Of who has connected."""
        return await _introduced(connection, secret, b"caller", b"called")

    @staticmethod
    async def by_called(connection: socket.socket, secret: bytes) -> "Sealed":
        return await _introduced(connection, secret, b"called", b"caller")

    async def send(self, pieces: Sequence[Piece]) -> None:
        """One at a time. Who is cancelled meanwhile has spoilt the connection."""
        size = sum(memoryview(piece).nbytes for piece in pieces)
        head = _HEAD.pack(size)
        waiting = [head + self._sending.next([head]), *pieces, self._sending.next(pieces)]
        for piece in _joined(waiting):
            await asyncio.get_running_loop().sock_sendall(self._socket, piece)

    async def receive(self) -> memoryview:
        """The next message, which its receiver may write to."""
        head = await self._read(_HEAD.size)
        self._receiving.check([head], await self._read(_SEAL_BYTES))
        message = await self._read(_HEAD.unpack(head)[0])
        self._receiving.check([message], await self._read(_SEAL_BYTES))
        return message

    def hang_up(self) -> None:
        """Who waits for a message, here or there, hears of it."""
        with contextlib.suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        """When nobody waits here any more."""
        self.hang_up()
        self._socket.close()

    async def _read(self, num_bytes: int) -> memoryview:
        return await _read(self._socket, num_bytes)


class _Seals:
    """Of one direction."""

    def __init__(self, key: bytes) -> None:
        self._key = key
        self._number = 0

    def next(self, pieces: Sequence[Piece]) -> bytes:
        seal = blake2b(self._number.to_bytes(8, "little"), key=self._key, digest_size=_SEAL_BYTES)
        self._number += 1
        for piece in pieces:
            seal.update(piece)
        return seal.digest()

    def check(self, pieces: Sequence[Piece], seal: memoryview) -> None:
        if not hmac.compare_digest(self.next(pieces), seal):
            raise NotSealed("what arrived does not carry the seal of this connection")


def keep_alive(connection: socket.socket) -> None:
    """And say at once what there is to say."""
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for name, value in _SILENCE.items():
        if (option := getattr(socket, name, None)) is not None:
            connection.setsockopt(socket.IPPROTO_TCP, option, value)


async def _introduced(connection: socket.socket, secret: bytes, own: bytes, other: bytes) -> Sealed:
    try:
        async with asyncio.timeout(_SECONDS):
            return await _introduce(connection, secret, own, other)
    except TimeoutError:
        raise ConnectionError("the other side did not introduce itself in time") from None


async def _introduce(connection: socket.socket, secret: bytes, own: bytes, other: bytes) -> Sealed:
    """Who has called proves itself first."""
    loop, own_nonce = asyncio.get_running_loop(), secrets.token_bytes(_NONCE_BYTES)
    first_byte = await _heard(connection, _GREETING + own_nonce)
    greeting = first_byte + bytes(await _read(connection, len(_GREETING) + _NONCE_BYTES - 1))
    if not greeting.startswith(_GREETING):
        raise NotSealed("the other side is no trainhouse, or one of another version")
    nonces = {own: own_nonce, other: greeting[len(_GREETING) :]}
    both = nonces[b"caller"] + nonces[b"called"]
    own_proof, other_proof = (_derived(secret, b"I am " + name, both) for name in (own, other))
    if own == b"called":
        await _check_proof(connection, other_proof)
    await loop.sock_sendall(connection, own_proof)
    if own == b"caller":
        await _check_proof(connection, other_proof)
    return Sealed(connection, _derived(secret, own, both), _derived(secret, other, both))


async def _heard(connection: socket.socket, greeting: bytes) -> bytes:
    """The first byte that is said to who greets."""
    try:
        await asyncio.get_running_loop().sock_sendall(connection, greeting)
        return bytes(await _read(connection, 1))
    except (EOFError, ConnectionResetError, BrokenPipeError):
        raise NothingSaid("the other side closed the connection without a word") from None


async def _check_proof(connection: socket.socket, wanted: bytes) -> None:
    try:
        proof = await _read(connection, len(wanted))
    except EOFError:  # so who was called takes a wrong proof
        raise NotSealed("the secrets of the two sides differ") from None
    if not hmac.compare_digest(wanted, proof):
        raise NotSealed("the secrets of the two sides differ")


def _derived(secret: bytes, purpose: bytes, nonces: bytes) -> bytes:
    return blake2b(purpose + b"\n" + nonces, key=secret, digest_size=_SEAL_BYTES).digest()


async def _read(connection: socket.socket, num_bytes: int) -> memoryview:
    whole = missing = np.empty(num_bytes, np.uint8).data
    while missing:
        num_read = await asyncio.get_running_loop().sock_recv_into(connection, missing)
        if not num_read:
            raise EOFError("the other side closed the connection")
        missing = missing[num_read:]
    return whole


def _joined(pieces: Sequence[Piece], most_bytes: int = 1 << 16) -> list[Piece]:
    """Small neighbours as one."""
    joined: list[bytearray | Piece] = []
    for piece in pieces:
        size = memoryview(piece).nbytes
        if joined and isinstance(joined[-1], bytearray) and len(joined[-1]) + size <= most_bytes:
            joined[-1] += piece
        else:
            joined.append(bytearray(piece) if size <= most_bytes else piece)
    return [memoryview(each) for each in joined]
