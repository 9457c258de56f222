from gateway.demo import prompts
from gateway.demo.plain import REASON_PATIENCE_S, PlainLines
from gateway.demo.story import Exchange, Stage, Story


def test_each_request_and_each_event_is_told_once(busy_story: Story) -> None:
    teller = PlainLines(busy_story)
    told = list(teller.news(8.25))
    assert sum("200 document" in line for line in told) == 1
    assert sum("light-0: up → booting" in line for line in told) == 1
    assert list(teller.news(8.5)) == []


def test_a_line_says_what_where_and_why(busy_story: Story) -> None:
    told = "\n".join(PlainLines(busy_story).news(8.25, final=True))
    assert (
        "0:03  200 document, 191,544 tokens, streamed, first token 1.0s, 10/s  long_document -> push  ("
    ) in told
    assert "0:03  400 too long, 295,512 tokens, streamed  long_document -> nowhere  (as intended:" in told
    assert "502 chat, streamed  no class -> nowhere  (FAILED: 502: no no" in told


def test_a_line_waits_for_its_reason_but_not_for_ever() -> None:
    story = Story(speed=10.0)
    story.exchanges.append(
        Exchange(prompts.chat(0), 1.0, first_at=1.1, ended_at=1.5, stage=Stage.ANSWERED, status=200)
    )
    teller = PlainLines(story)
    assert list(teller.news(2.0)) == []
    assert len(list(teller.news(1.6 + REASON_PATIENCE_S))) == 1


def test_a_new_caption_is_told() -> None:
    story = Story(speed=10.0, caption="Now this.")
    teller = PlainLines(story)
    assert list(teller.news(0.0)) == ["0:00  --  Now this."]
    story.caption = "And now that."
    assert list(teller.news(61.0)) == ["1:01  --  And now that."]
