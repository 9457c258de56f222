"""The downstream side. The only package that imports Litestar."""
