"""Entry point of `trainhouse` and `python -m trainhouse.server`."""

from .cli.commands import main

if __name__ == "__main__":
    raise SystemExit(main())
