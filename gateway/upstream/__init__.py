"""The upstream side. The only package that imports httpx."""
