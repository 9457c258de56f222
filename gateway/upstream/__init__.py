"""The upstream side. In the serving process, only this package imports httpx."""
