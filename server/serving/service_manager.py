"""Messages to systemd about this process, for units of Type=notify: the protocol of sd_notify(3).

Without systemd (NOTIFY_SOCKET is not set) nothing is sent.
"""

import asyncio
import contextlib
import logging
import os
import socket
from collections.abc import Iterator

logger = logging.getLogger(__name__)


def notify(*assignments: str) -> None:
    """Sends assignments such as READY=1 in one message."""
    address = os.environ.get("NOTIFY_SOCKET", "")
    if not address:
        return
    if address.startswith("@"):  # the abstract namespace
        address = f"\0{address[1:]}"
    try:
        with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as sender:
            sender.setblocking(False)
            sender.sendto("\n".join(assignments).encode(), address)
    except OSError as error:
        logger.warning("systemd cannot be notified of %s: %s", assignments[0], error)


@contextlib.contextmanager
def watchdog() -> Iterator[None]:
    """Sends WATCHDOG=1 during the block, twice in each WatchdogSec of the unit, for as long as the event loop runs."""
    is_for_us = os.environ.get("WATCHDOG_PID", str(os.getpid())) == str(os.getpid())
    microseconds = os.environ.get("WATCHDOG_USEC")
    sending = asyncio.create_task(_keep_sending(int(microseconds) / 2e6)) if microseconds and is_for_us else None
    try:
        yield
    finally:
        if sending is not None:
            sending.cancel()


async def _keep_sending(seconds: float) -> None:
    while True:
        notify("WATCHDOG=1")
        await asyncio.sleep(seconds)
