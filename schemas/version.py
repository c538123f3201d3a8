"""The version of trainhouse, in a file that imports nothing so that packaging can read it."""

VERSION = "0.1.0"
