"""JSON for operators."""

from typing import Any

import msgspec
import pytest

from gateway.downstream import operator_json
from gateway.downstream.operator_json import indented


@pytest.mark.parametrize(
    "view", [[], (), [1], ({"a": [], "b": "x\ny"}, [{"c": [1, {}]}, "\n"], None), {"a": [1]}]
)
def test_a_list_is_encoded_in_pieces_as_it_would_be_as_a_whole(view: Any) -> None:
    assert indented(view) == msgspec.json.format(msgspec.json.encode(view), indent=2)


def test_no_piece_is_longer_than_an_item(monkeypatch: pytest.MonkeyPatch) -> None:
    sizes: list[int] = []
    own = operator_json.compact

    def noted(view: Any) -> bytes:
        sizes.append(len(own(view)))
        return own(view)

    monkeypatch.setattr(operator_json, "compact", noted)

    indented(["x" * 100] * 50)

    assert max(sizes) == 102
