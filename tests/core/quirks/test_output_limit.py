"""Which chats carry their output limit under its old name, too."""

from typing import Any

import pytest
from support.engine_events import plan_for

from gateway.core.request import Endpoint


@pytest.mark.parametrize(
    ("members", "changes"),
    [
        pytest.param({"max_completion_tokens": 7}, {("max_tokens",): 7}, id="the-new-name"),
        pytest.param({"max_completion_tokens": 7, "max_tokens": None}, {("max_tokens",): 7}, id="null"),
        pytest.param({"max_completion_tokens": 7, "max_tokens": 9}, {}, id="both"),
        pytest.param({"max_tokens": 9}, {}, id="the-old-name"),
        pytest.param({}, {}, id="no-limit"),
        pytest.param({"max_completion_tokens": 7, "endpoint": Endpoint.COMPLETIONS}, {}, id="no-chat"),
    ],
)
def test_the_limit_goes_under_both_names(
    members: dict[str, Any], changes: dict[tuple[str, ...], object]
) -> None:
    plan = plan_for("max_completion_tokens_ignored", **members)

    assert plan.changes == changes
    assert plan.remedies == []
