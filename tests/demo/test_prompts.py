import json
import struct
import zlib
from pathlib import Path

import pytest

from gateway.core.class_counts import class_count_tokens
from gateway.demo import prompts
from gateway.demo.prompts import Ask


def tokens_of(ask: Ask) -> int:
    return class_count_tokens(ask.body["messages"][-1]["content"])


@pytest.mark.parametrize(
    ("ask", "tokens"),
    [
        pytest.param(prompts.source(24_000, "argparse.py"), 24_000, id="one-file-nearly"),
        pytest.param(prompts.source(2_000, "argparse.py"), 2_000, id="a-part-of-a-file"),
        pytest.param(prompts.source(60_000, "no-such-file.py"), 60_000, id="the-first-file-is-missing"),
        pytest.param(prompts.manual(190_000), 190_000, id="manual"),
        pytest.param(prompts.reasoning_about(20_000, "typing.py"), 20_000, id="reasoning"),
        pytest.param(prompts.too_long(300_000), 300_000, id="too-long"),
    ],
)
def test_documents_have_about_the_length_asked_for(ask: Ask, tokens: int) -> None:
    assert tokens_of(ask) == pytest.approx(tokens, rel=0.03)
    assert ask.title


def test_a_library_without_sources_is_made_up_for_by_repetition(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    (tmp_path / "only.py").write_text("print('hello, and thank you')\n" * 40)
    monkeypatch.setattr(prompts, "_places", lambda: [(tmp_path, "*.py")])
    assert tokens_of(prompts.source(20_000, "argparse.py")) >= 20_000


def test_the_picture_is_a_valid_png() -> None:
    data = prompts.png(16)
    assert data.startswith(b"\x89PNG\r\n\x1a\n")
    at, kinds, pixels = 8, [], b""
    while at < len(data):
        size, kind = struct.unpack(">I4s", data[at : at + 8])
        body = data[at + 8 : at + 8 + size]
        assert struct.unpack(">I", data[at + 8 + size : at + 12 + size])[0] == zlib.crc32(kind + body)
        kinds.append(kind)
        pixels += body if kind == b"IDAT" else b""
        at += 12 + size
    assert kinds == [b"IHDR", b"IDAT", b"IEND"]
    assert len(zlib.decompress(pixels)) == 16 * (1 + 16 * 3)


def test_no_two_chats_are_the_same() -> None:
    texts = {json.dumps(prompts.chat(number).body) for number in range(320)}
    assert len(texts) == 320


def test_a_turn_repeats_the_conversation() -> None:
    first = prompts.turn([]).body["messages"]
    second = prompts.turn([first[1], {"role": "assistant", "content": "Size."}]).body["messages"]
    assert second[:2] == first
    assert [message["role"] for message in second] == ["system", "user", "assistant", "user"]
