"""Figures as people read them: short, aligned, never wider than their column."""

from rich.cells import cell_len, set_cell_size


def seconds(value: float | None) -> str:
    """Return a duration, e.g. `0.09s`, `8.3s`, `139s`; "" where there is none."""
    if value is None:
        return ""
    if value < 0.995:
        return f"{value:.2f}s"
    return f"{value:.1f}s" if value < 99.95 else f"{value:,.0f}s"


def rate(value: float | None) -> str:
    """Return tokens per second, e.g. `6.8/s`, `171/s`; "" where there are none."""
    if value is None:
        return ""
    return f"{value:.1f}/s" if value < 9.95 else f"{value:,.0f}/s"


def tokens(value: float | None) -> str:
    """Return a number of tokens in full, e.g. `200,312`; "" where there is none."""
    return "" if value is None else f"{value:,.0f}"


def thousands(value: float) -> str:
    """Return a large number in short, e.g. `834`, `31.3K`, `1.2M`."""
    if value < 9_950:
        return f"{value:,.0f}"
    return f"{value / 1e3:.1f}K" if value < 999_950 else f"{value / 1e6:.1f}M"


def share(value: float | None) -> str:
    """Return a share of 1 in percent: `0%`, `<1%`, `42%`; "" where there is none."""
    if value is None:
        return ""
    return "<1%" if 0 < value < 0.005 else f"{value:.0%}"


def clock(value: float) -> str:
    """Return elapsed time, e.g. `0:07`."""
    return f"{int(value) // 60}:{int(value) % 60:02}"


def plural(count: int, noun: str) -> str:
    """Return e.g. `1 request`, `3 requests`."""
    return f"{count:,} {noun}{'' if count == 1 else 's'}"


def cut(text: str, width: int) -> str:
    """Return the text in at most `width` columns of a terminal, with an ellipsis where something is missing.

    Whatever could move the cursor becomes a blank.
    """
    if not text.isprintable():
        text = "".join(character if character.isprintable() else " " for character in text)
    if cell_len(text) <= width:
        return text
    return set_cell_size(text, width - 1).rstrip() + "…" if width > 0 else ""
