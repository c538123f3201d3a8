"""Seeds: where a request leaves one open it is drawn, once."""

import secrets

_SEED_LIMIT = 1 << 31


def draw_seed() -> int:
    return secrets.randbelow(_SEED_LIMIT)
