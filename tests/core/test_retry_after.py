"""What the header Retry-After says."""

import pytest

from gateway.core.retry_after import retry_after_s


@pytest.mark.parametrize(
    ("value", "seconds"),
    [
        (None, None),
        ("120", 120.0),
        ("0", 0.0),
        ("9" * 400, 999_999_999_999.0),
        ("Sun, 06 Nov 1994 08:49:37 GMT", 60.0),
        ("Sun, 06 Nov 1994 08:00:00 GMT", 0.0),
        ("soon", None),
        ("-5", None),
        ("1.5", None),
        ("", None),
        ("Sun, 99 Nov 999999999 08:49:37 GMT", None),
        ("Sun, 06 Nov 99999999999999999999 08:49:37 GMT", None),
        ("²", None),
    ],
)
def test_retry_after_by_number_and_by_date(value: str | None, seconds: float | None) -> None:
    assert retry_after_s(value, 784_111_777 - 60) == seconds
