"""Authenticates a connection between two sides that share a secret, on a network where others may write too.

Each side proves that it has the secret without revealing it. Every message then carries a MAC, keyed per connection and
direction and numbered, so forged, changed, dropped or replayed messages are detected before they are decoded.
Authenticated, not encrypted.
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

from ...protocol.messages import Buffer

_GREETING = b"trainhouse workers 1\n"
_NONCE_BYTES = _SEAL_BYTES = 32
_HEAD = struct.Struct("<Q")  # bytes of what follows, without its seal
_SECONDS = 10.0
"""Time limit of the handshake."""
_SILENCE = {"TCP_KEEPIDLE": 10, "TCP_KEEPINTVL": 5, "TCP_KEEPCNT": 3, "TCP_USER_TIMEOUT": 25_000}
"""Socket options that declare the other machine gone after about 25 s of silence. The last one is in milliseconds."""
_MIN_SECRET_BYTES = 32


class AuthenticationFailed(ConnectionError):
    """The other side does not have the secret or is not trainhouse, or the connection was tampered with."""


class ClosedSilently(ConnectionError):
    """The other side closed the connection without sending anything, as a port probe does."""


def read_secret(file: Path) -> bytes:
    """Reads the secret.

    Raises:
        ValueError: the file is unreadable, accessible to other users, or too short. The message reveals nothing of its
            contents.
    """
    try:
        with file.open("rb") as opened:
            status, secret = os.fstat(opened.fileno()), opened.read().strip()
    except OSError as error:
        raise ValueError(f"the secret of the workers cannot be read from {file}: {error.strerror}") from None
    if status.st_mode & _forbidden_mode_bits(status.st_uid):
        raise ValueError(
            f"the secret of the workers in {file} is accessible to others (mode {stat.S_IMODE(status.st_mode):04o}): "
            f"`chmod 600 {file}`, and create a new secret if someone may have read it"
        )
    if len(secret) < _MIN_SECRET_BYTES:
        raise ValueError(
            f"the secret of the workers in {file} has {len(secret)} bytes, but needs at least {_MIN_SECRET_BYTES}: "
            "create "
            f"one with `(umask 077; openssl rand -hex 32 > {file})`, and give the same file to servers and workers"
        )
    return blake2b(secret).digest()


def _forbidden_mode_bits(owner: int) -> int:
    """Returns the mode bits that must be off.

    A group may read a file that root made for a service of another user: systemd and Kubernetes hand secrets over that
    way, and PostgreSQL accepts its keys so.
    """
    is_handed_over = owner == 0 and os.geteuid() != 0
    return stat.S_IRWXO | (stat.S_IWGRP | stat.S_IXGRP if is_handed_over else stat.S_IRWXG)


class SecureConnection:
    """One end of an authenticated connection. Messages arrive in the order sent. Every method may raise OSError or
    EOFError.
    """

    def __init__(self, connection: socket.socket, sending: bytes, receiving: bytes) -> None:
        """Wraps a socket after the handshake; `sending` and `receiving` are the keys of the two directions."""
        self._socket = connection
        self._sending, self._receiving = _MessageCodes(sending), _MessageCodes(receiving)

    @staticmethod
    async def connect_as_client(connection: socket.socket, secret: bytes) -> "SecureConnection":
        """Performs the handshake for the side that has connected."""
        return await _handshake_in_time(connection, secret, b"caller", b"called")

    @staticmethod
    async def accept_as_server(connection: socket.socket, secret: bytes) -> "SecureConnection":
        return await _handshake_in_time(connection, secret, b"called", b"caller")

    async def send(self, pieces: Sequence[Buffer]) -> None:
        """Sends a message; only one call at a time. Cancelling it leaves the connection unusable."""
        size = sum(memoryview(piece).nbytes for piece in pieces)
        head = _HEAD.pack(size)
        waiting = [head + self._sending.next([head]), *pieces, self._sending.next(pieces)]
        for piece in _merge_small(waiting):
            await asyncio.get_running_loop().sock_sendall(self._socket, piece)

    async def receive(self) -> memoryview:
        """Returns the next message, in writable memory."""
        head = await self._read(_HEAD.size)
        self._receiving.check([head], await self._read(_SEAL_BYTES))
        message = await self._read(_HEAD.unpack(head)[0])
        self._receiving.check([message], await self._read(_SEAL_BYTES))
        return message

    def hang_up(self) -> None:
        """Shuts the connection down; pending receives on both sides fail."""
        with contextlib.suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        """Closes the socket, when no task receives any more."""
        self.hang_up()
        self._socket.close()

    async def _read(self, num_bytes: int) -> memoryview:
        return await _read(self._socket, num_bytes)


class _MessageCodes:
    def __init__(self, key: bytes) -> None:
        self._key = key
        self._number = 0

    def next(self, pieces: Sequence[Buffer]) -> bytes:
        seal = blake2b(self._number.to_bytes(8, "little"), key=self._key, digest_size=_SEAL_BYTES)
        self._number += 1
        for piece in pieces:
            seal.update(piece)
        return seal.digest()

    def check(self, pieces: Sequence[Buffer], seal: memoryview) -> None:
        if not hmac.compare_digest(self.next(pieces), seal):
            raise AuthenticationFailed("a message has the wrong authentication code: the connection was tampered with")


def keep_alive(connection: socket.socket) -> None:
    """Sets keep-alive options, and sends small messages without delay."""
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for name, value in _SILENCE.items():
        if (option := getattr(socket, name, None)) is not None:
            connection.setsockopt(socket.IPPROTO_TCP, option, value)


async def _handshake_in_time(connection: socket.socket, secret: bytes, own: bytes, other: bytes) -> SecureConnection:
    try:
        async with asyncio.timeout(_SECONDS):
            return await _handshake(connection, secret, own, other)
    except TimeoutError:
        raise ConnectionError("the other side did not authenticate in time") from None


async def _handshake(connection: socket.socket, secret: bytes, own: bytes, other: bytes) -> SecureConnection:
    """Performs the handshake; the side that has connected proves itself first."""
    loop, own_nonce = asyncio.get_running_loop(), secrets.token_bytes(_NONCE_BYTES)
    first_byte = await _greet(connection, _GREETING + own_nonce)
    greeting = first_byte + bytes(await _read(connection, len(_GREETING) + _NONCE_BYTES - 1))
    if not greeting.startswith(_GREETING):
        raise AuthenticationFailed("the other side is not trainhouse, or is another version of it")
    nonces = {own: own_nonce, other: greeting[len(_GREETING) :]}
    both = nonces[b"caller"] + nonces[b"called"]
    own_proof, other_proof = (_derive_key(secret, b"I am " + name, both) for name in (own, other))
    if own == b"called":
        await _check_proof(connection, other_proof)
    await loop.sock_sendall(connection, own_proof)
    if own == b"caller":
        await _check_proof(connection, other_proof)
    return SecureConnection(connection, _derive_key(secret, own, both), _derive_key(secret, other, both))


async def _greet(connection: socket.socket, greeting: bytes) -> bytes:
    try:
        await asyncio.get_running_loop().sock_sendall(connection, greeting)
        return bytes(await _read(connection, 1))
    except (EOFError, ConnectionResetError, BrokenPipeError):
        raise ClosedSilently("the other side closed the connection without sending anything") from None


async def _check_proof(connection: socket.socket, wanted: bytes) -> None:
    try:
        proof = await _read(connection, len(wanted))
    except EOFError:  # the called side reacts so to a wrong proof
        raise AuthenticationFailed("the secrets of the two sides differ") from None
    if not hmac.compare_digest(wanted, proof):
        raise AuthenticationFailed("the secrets of the two sides differ")


def _derive_key(secret: bytes, purpose: bytes, nonces: bytes) -> bytes:
    return blake2b(purpose + b"\n" + nonces, key=secret, digest_size=_SEAL_BYTES).digest()


async def _read(connection: socket.socket, num_bytes: int) -> memoryview:
    whole = missing = np.empty(num_bytes, np.uint8).data
    while missing:
        num_read = await asyncio.get_running_loop().sock_recv_into(connection, missing)
        if not num_read:
            raise EOFError("the other side closed the connection")
        missing = missing[num_read:]
    return whole


def _merge_small(pieces: Sequence[Buffer], most_bytes: int = 1 << 16) -> list[Buffer]:
    joined: list[bytearray | Buffer] = []
    for piece in pieces:
        size = memoryview(piece).nbytes
        if joined and isinstance(joined[-1], bytearray) and len(joined[-1]) + size <= most_bytes:
            joined[-1] += piece
        else:
            joined.append(bytearray(piece) if size <= most_bytes else piece)
    return [memoryview(each) for each in joined]
