from dataclasses import replace
from io import StringIO

import pytest
from rich.console import Console

from gateway.demo import summary
from gateway.demo.story import Stage, Story


def test_a_line_per_class_and_backend_in_gpu_time(busy_story: Story) -> None:
    lines = {(line.traffic_class, line.backend): line for line in summary.table_lines(busy_story)}
    document = lines["long_document", "push"]
    assert (document.requests, document.prompt_tokens, document.errors) == (1, 191_544, 0)
    assert document.first_s == pytest.approx(1.0)  # 0.1 s of the clock at 10x
    assert document.tokens_per_s == pytest.approx(10.0)
    assert lines["long_document", ""].errors == 0  # it was refused, as it should be
    assert lines["", ""].errors == 2  # one failed, one never came back


def test_a_sentence_per_class_says_what_was_decided(busy_story: Story) -> None:
    said = dict(summary.sentences(busy_story))
    assert said["long_document"] == (
        "2 requests: no other class matches. 1 served by pool push; 1 refused with context_length_exceeded."
    )


@pytest.mark.parametrize(
    ("reason", "detail"),
    [
        ("context_exceeded", "needs 22,098 tokens, holds 16,384"),
        ("modality", "takes no images"),
        ("modality", "takes 4 images, not 5"),
    ],
)
def test_it_says_which_backend_could_not_take_a_request(busy_story: Story, reason: str, detail: str) -> None:
    why = busy_story.exchanges[0].why
    assert why is not None
    busy_story.exchanges[0].why = replace(why, excluded=(("push", reason, detail),))

    said = dict(summary.sentences(busy_story))["short_chat"]
    assert f"1 could not go to push ({detail})" in said


@pytest.mark.parametrize("width", [72, 80, 120, 160])
def test_it_fits_the_terminal(busy_story: Story, width: int) -> None:
    console = Console(file=StringIO(), width=width, record=True)
    console.print(summary.render(busy_story))
    text = console.export_text()
    assert max(len(line) for line in text.splitlines()) <= width
    assert "191,544" in text


def test_problems_name_the_request(busy_story: Story) -> None:
    busy_story.problems.append("the gateway process ended unexpectedly")
    told = list(summary.problems(busy_story))
    assert told[0] == "the gateway process ended unexpectedly"
    assert told[1].startswith("chat (no request id) at no backend: 502: no no")


def test_a_story_is_good_only_when_every_request_is_over_and_none_failed(busy_story: Story) -> None:
    verdicts = [busy_story.is_good]
    for exchange in busy_story.exchanges:
        exchange.stage = Stage.ANSWERED
    verdicts.append(busy_story.is_good)
    busy_story.problems.append("something else")
    verdicts.append(busy_story.is_good)
    assert verdicts == [False, True, False]


def test_what_is_to_be_pasted_fits_into_a_small_terminal() -> None:
    texts = summary.snippets("http://127.0.0.1:65535", "http://127.0.0.1:65535", "/tmp/x/demo.yaml")

    assert max(len(line) for text in texts.values() for line in text.splitlines()) < 80


def test_it_says_how_often_the_box_changed_models_and_what_became_of_the_jobs(busy_story: Story) -> None:
    def told(width: int = 200) -> str:
        console = Console(file=StringIO(), width=width, record=True)
        console.print(summary.render(busy_story))
        return console.export_text()

    busy_story.box = replace(busy_story.box, boots=2)
    assert "2 jobs submitted, 1 ended. The box swapped models 2 times." in told()
    busy_story.left_out = "no valkey-server found"
    assert "for chats: jobs are left out here (no valkey-server found)." in told()
