from io import StringIO

import pytest
from rich.cells import cell_len
from rich.console import Console

from gateway.demo.story import BoxGauge, Gauge, Story
from gateway.demo.view import View, lines

SIZES = [(80, 24), (100, 30), (160, 50), (40, 12), (20, 5), (200, 60), (79, 100), (120, 9)]


@pytest.mark.parametrize(("width", "height"), SIZES, ids=[f"{w}x{h}" for w, h in SIZES])
def test_every_line_has_exactly_the_terminals_width_and_the_screen_its_height(
    any_story: Story, width: int, height: int
) -> None:
    shown = lines(any_story, 8.25, width, height)
    assert [cell_len(line.plain) for line in shown] == [width] * height
    assert not any(character in line.plain for line in shown for character in "\n\r\t\x1b\x07")


@pytest.mark.parametrize(
    ("width", "height"),
    [*SIZES[:3], *((narrow, 40) for narrow in (1, 2, 8, 13, 19, 20, 21))],
    ids=lambda size: str(size),
)
def test_what_rich_prints_is_what_was_laid_out(busy_story: Story, width: int, height: int) -> None:
    console = Console(file=StringIO(), width=width, height=height, record=True, force_terminal=True)
    console.print(View(busy_story, 8.25), end="")
    assert console.export_text(styles=False).split("\n") == [
        line.plain for line in lines(busy_story, 8.25, width, height)
    ]


def test_no_color_leaves_no_colour(busy_story: Story) -> None:
    console = Console(
        file=(file := StringIO()), width=80, height=24, force_terminal=True, _environ={"NO_COLOR": "1"}
    )
    console.print(View(busy_story, 8.25), end="")
    assert "\x1b[3" not in file.getvalue().replace("\x1b[3m", "")  # 3m alone is italic


def test_the_newcomer_sees_at_80_columns_what_goes_where_and_why(busy_story: Story) -> None:
    text = "\n".join(line.plain for line in lines(busy_story, 8.25, 80, 24))
    for said in (
        "simulated GPUs at 10x",
        "http://127.0.0.1:43911/v1",
        "200 document 191,544   long_document push        1.0s   10/s",
        "400 too long 295,512   long_document nowhere",
        "too long for push",
        "document ~190,000",
        "40 chats, 0 done",
        "46 sent",
        "1 failed",
    ):
        assert said in text


def test_what_runs_stays_in_sight_however_much_has_ended(busy_story: Story) -> None:
    for number in range(100):
        busy_story.note(10.0 + number, f"note {number}")
    text = "\n".join(line.plain for line in lines(busy_story, 120.0, 80, 24))
    assert "document ~190,000" in text
    assert "note 99" in text
    assert "note 50" not in text


@pytest.mark.parametrize(
    ("share", "bar"),
    [
        pytest.param(0.0, "·" * 8, id="empty"),
        pytest.param(0.0001, "▏" + "·" * 7, id="a-little-is-not-nothing"),
        pytest.param(0.5, "████" + "·" * 4, id="half"),
        pytest.param(0.52, "████▏···", id="half-and-a-bit"),
        pytest.param(1.0, "█" * 8, id="full"),
        pytest.param(1.7, "█" * 8, id="above-the-knee"),
    ],
)
def test_the_bar_shows_the_share_of_the_knee(share: float, bar: str) -> None:
    story = Story(speed=10.0)
    story.fleet = {"push": Gauge("push", "up", knee_used=share)}
    row = lines(story, 0.0, 63, 24)[3].plain
    assert row[20:28] == bar, row


def test_an_engine_that_is_gone_has_no_gauges(busy_story: Story) -> None:
    row = next(line.plain for line in lines(busy_story, 8.25, 80, 24) if line.plain.startswith(" tpu"))
    assert row.split() == ["tpu", "booting", row.split()[2], "0", "0%"]


@pytest.mark.parametrize(
    ("box", "doing"),
    [
        pytest.param(BoxGauge(), "starting", id="before-the-start"),
        pytest.param(BoxGauge("resident", "spark"), "resident  runs spark", id="in"),
        pytest.param(
            BoxGauge("resident", "qwen", "spark", held=True),
            "resident  runs qwen; spark is next, after its batch",
            id="held",
        ),
        pytest.param(
            BoxGauge("draining", "spark", "qwen"),
            "draining  spark finishes its requests, then qwen starts",
            id="drains",
        ),
        pytest.param(
            BoxGauge("stopping", "spark", "qwen"), "stopping  spark stops, then qwen starts", id="stops"
        ),
        pytest.param(BoxGauge("booting", "qwen", for_s=2.0), "booting   qwen boots: 25 s to go", id="boots"),
        pytest.param(BoxGauge("booting", "qwen", for_s=9.0), "booting   qwen boots: 0 s to go", id="is-late"),
        pytest.param(
            BoxGauge("checking", "qwen"), "checking  qwen answers a test question first", id="asked"
        ),
        pytest.param(BoxGauge("failed", reason="two of two"), "failed    two of two", id="failed"),
    ],
)
def test_the_box_shows_what_it_does(box: BoxGauge, doing: str) -> None:
    story = Story(speed=10.0, box=box)
    row = next(line.plain for line in lines(story, 0.0, 80, 24) if line.plain.startswith(" box "))
    assert row.rstrip() == f" box      {doing}"


def test_what_waits_for_the_box_and_the_jobs_that_ended_are_counted(busy_story: Story) -> None:
    row = next(line.plain for line in lines(busy_story, 8.25, 80, 24) if line.plain.startswith(" box "))
    assert row.rstrip().endswith("waiting: 3 qwen  1/2 jobs")
    row = next(line.plain for line in lines(busy_story, 8.25, 60, 24) if line.plain.startswith(" box "))
    assert row.rstrip().endswith("qwen boots: 35 s to go         1/2 jobs")
