"""Replays a decision log under another policy."""
