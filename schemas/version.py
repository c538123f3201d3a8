"""The version of trainhouse, in a file without imports so that the packaging tools can read it."""

VERSION = "0.1.0"
