"""A process of its own that watches how much memory the one that started it has taken: what no file is behind.

Tells for every line that it is sent the most bytes since the line before, and those of now. It looks a thousand times
a second, and from outside: a thread would wait where the other one's work does not let go of the interpreter.
"""

import json
import os
import select
import sys
from pathlib import Path

SECONDS = 0.001


def main() -> None:
    sizes, page = Path(f"/proc/{os.getppid()}/statm"), os.sysconf("SC_PAGE_SIZE")

    def taken() -> int:
        resident, of_files = map(int, sizes.read_text().split()[1:3])
        return page * (resident - of_files)

    most = taken()
    while True:
        if select.select([sys.stdin], [], [], SECONDS)[0]:
            if not sys.stdin.readline():
                return
            now = taken()
            print(json.dumps([max(most, now), now]), flush=True)
            most = now
        most = max(most, taken())


if __name__ == "__main__":
    main()
