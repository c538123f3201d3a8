"""Exit statuses of `trainhouse`, which scripts can rely on (docs/cli.md), and the error that carries one."""

import sys

FAILED = 1
WRONGLY_USED = 2
TRY_LATER = 3
REFUSED = 4
NOT_FOUND = 5
INTERRUPTED = 130


class CommandFailed(Exception):
    """The command ends with `status`; the message says why and what to do."""

    def __init__(self, message: str, status: int = FAILED) -> None:
        super().__init__(message)
        self.status = status


def missing_package(package: str, extras: str) -> CommandFailed:
    hint = f"pip install 'trainhouse[{extras}]', in a checkout deploy/install.sh {sys.prefix} {extras}"
    return CommandFailed(f"the package {package} is not installed: {hint}")
