"""The backends' side: httpx's only home."""
