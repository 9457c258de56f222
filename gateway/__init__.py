"""Gemma Gateway: one OpenAI-compatible URL in front of a fleet of Gemma 4 servers."""

__version__ = "0.1.0"
