"""How long a server asks to be left alone: the header Retry-After (RFC 9110, section 10.2.3)."""

from email.utils import mktime_tz, parsedate_tz


def retry_after_s(value: str | None, now: float) -> float | None:
    """Return the seconds that the header gives, as a number or a date; None if there are none.

    `now`: epoch seconds.
    """
    if value is None:
        return None
    if value.isascii() and value.isdigit():
        return float(value[:12])
    date = parsedate_tz(value)
    try:
        return None if date is None else max(0.0, mktime_tz(date) - now)
    except (ValueError, OverflowError):
        return None
