"""The version of the official SDK that sends a request."""

import re

SdkVersion = tuple[int, int]
"""Major and minor."""

NEWEST_TESTED: SdkVersion = (0, 38)
FIRST_WITH_EXTERNAL: SdkVersion = (0, 28)
"""Earlier SDKs take a checkpoint of the type "external" for an error of the server."""

_VERSION = re.compile(r"(\d{1,4})\.(\d{1,4})(\.|$)")
_AGENT = re.compile(r"Tinker/Python (\S{1,40})")


def sdk_version(user_agent: str) -> SdkVersion | None:
    """Returns the SDK's version as its requests say it; None for other clients."""
    agent = _AGENT.search(user_agent[:256])
    return parse_version(agent[1]) if agent else None


def parse_version(text: str) -> SdkVersion | None:
    found = _VERSION.match(text)
    return (int(found[1]), int(found[2])) if found else None


def is_newer_than_tested(version: SdkVersion | None) -> bool:
    return version is not None and version > NEWEST_TESTED
