"""`python -m trainhouse.server` is `trainhouse`. It says so where the server's packages are not installed.

`plan` needs none of them, and says within a second what is impossible; so does `serve` of a layout.
"""

import sys

from .early import refused
from .plan import main as plan


def main() -> int:
    if sys.argv[1:2] == ["plan"]:
        return plan(sys.argv[2:])
    if sys.argv[1:2] == ["serve"] and (status := refused(sys.argv[2:])):
        return status
    try:
        from .cli import main as run
    except ModuleNotFoundError as error:
        if (error.name or "").startswith("trainhouse"):
            raise
        hint = "only the client is installed; in a checkout: pip install -c deploy/constraints.txt '.[server]'"
        print(f"trainhouse: error: no package {error.name}: {hint}", file=sys.stderr)
        return 1
    return run()


if __name__ == "__main__":
    raise SystemExit(main())
