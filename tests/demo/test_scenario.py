"""What the demo sends, as far as it depends on how the machine does."""

from gateway.demo.caller import Caller
from gateway.demo.prompts import Ask
from gateway.demo.scenario import Stage
from gateway.demo.story import Exchange, Story


class Sent(Caller):
    """A caller that notes what it is to send."""

    def __init__(self) -> None:
        self.lengths: list[tuple[int, int]] = []

    async def send(self, ask: Ask) -> Exchange:
        self.lengths.append((ask.body["max_tokens"], ask.body["extra_body"]["min_tokens"]))
        return Exchange(ask, 0.0)


async def test_the_answers_of_a_burst_that_must_go_on_are_the_longer_the_more_there_are() -> None:
    # However slowly they are sent, they are under way together at last.
    caller = Sent()
    stage = Stage(caller, Story(speed=1.0, url=""), lambda: 0.0, {}, patience_s=1.0, bow_s=0.0)

    await stage.send_burst(2, 0.0, max_tokens=50, min_tokens=40)
    assert caller.lengths == [(50, 40)] * 2

    await stage.send_burst(2, 0.0, max_tokens=50, min_tokens=40, until=lambda: False)
    assert caller.lengths[2:] == [(50, 40)] * 2 + [(100, 80)] * 2 + [(150, 120)] * 2
