"""The decoder for what backends send."""

import msgspec

decode = msgspec.json.decode
"""Decodes JSON, as `json.loads` does, but in a fraction of the time, and no NaN. Raises ValueError."""
