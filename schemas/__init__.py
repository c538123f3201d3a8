"""Defines the messages that are sent over HTTP and their formats, which no other code depends on."""
