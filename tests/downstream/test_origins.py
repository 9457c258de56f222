"""What pages may read: every header that says something of an answer."""

import re
from pathlib import Path

import gateway
from gateway.downstream.chat_jobs import PLACE_HEADER
from gateway.downstream.origins import EXPOSED

SOURCES = [
    path
    for name in ("core", "downstream", "pipeline")
    for path in (Path(gateway.__file__).parent / name).rglob("*.py")
]
NOT_FOR_PAGES = {PLACE_HEADER, "x-accel-buffering", "x-content-type-options"}


def test_every_header_of_the_gateways_own_is_shown_to_pages() -> None:
    sent = {name for path in SOURCES for name in re.findall(r'b"(x-[a-z-]+)"', path.read_text())}

    assert sent - NOT_FOR_PAGES == {name for name in EXPOSED if name[:2] == "x-"}
