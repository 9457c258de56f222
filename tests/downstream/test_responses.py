"""What a kept response hands on to the one that goes on from it."""

from typing import Any

import msgspec

from gateway.downstream.responses import StoredConversation


def test_a_conversation_goes_on_with_all_but_calls_that_broke_off() -> None:
    def call(status: str) -> dict[str, Any]:
        return {"type": "function_call", "id": status, "status": status}

    message = {"type": "message", "id": "cut", "status": "incomplete"}
    output = [call("completed"), message, call("incomplete")]
    kept = StoredConversation(
        msgspec.Raw(msgspec.json.encode({"output": output})), context=[{"id": "a"}], input=[{"id": "b"}]
    )

    assert [item["id"] for item in kept.items()] == ["a", "b", "completed", "cut"]
