"""The caller's side: Litestar's only home."""
