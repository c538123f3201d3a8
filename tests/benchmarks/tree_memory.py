"""A process of its own that watches how much memory a server and the processes that it decodes in have, all together.

Answers every line that it is sent with the most bytes since the line before.
"""

import json
import select
import sys

import psutil

SECONDS = 0.01


def main() -> None:
    server, most = psutil.Process(int(sys.argv[1])), 0
    while True:
        if select.select([sys.stdin], [], [], SECONDS)[0]:
            if not sys.stdin.readline():
                return
            print(json.dumps(most), flush=True)
            most = 0
        most = max(most, server.memory_info().rss + sum(map(_decoder_bytes, server.children())))


def _decoder_bytes(process: psutil.Process) -> int:
    """0 of a worker, and of one that has just ended."""
    try:
        return (
            process.memory_info().rss if any("server.http.decoding import" in word for word in process.cmdline()) else 0
        )
    except psutil.Error:
        return 0


if __name__ == "__main__":
    main()
