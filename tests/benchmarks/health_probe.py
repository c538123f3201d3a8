"""A process of its own that asks a server for its health every 30 ms, and reports the longest wait for an answer.

Answers every line that it is sent with the milliseconds of the longest wait since the line before.
"""

import json
import select
import sys
import time
from urllib.parse import urlsplit

import httpx

PERIOD_SECONDS = 0.03


def main() -> None:
    url = sys.argv[1]
    assert urlsplit(url).hostname == "127.0.0.1"
    longest, due = 0.0, time.monotonic()
    with httpx.Client(timeout=120) as client:
        while True:
            left = max(0.0, due - time.monotonic())
            if select.select([sys.stdin], [], [], left)[0]:
                if not sys.stdin.readline():
                    return
                print(json.dumps(1000 * longest), flush=True)
                longest = 0.0
            if time.monotonic() < due:
                continue
            assert client.get(f"{url}/api/v1/healthz").status_code == 200
            longest = max(longest, time.monotonic() - due)
            due = max(due + PERIOD_SECONDS, time.monotonic())


if __name__ == "__main__":
    main()
