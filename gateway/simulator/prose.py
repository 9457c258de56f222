"""What a simulated model says: plain English about quiet things, the same for the same seed.

The text has to be pleasant to watch, cheap to make, and of any length; it has no other meaning.
Sentences are cut into tokens once; an answer strings together whole paragraphs.
"""

import random
from collections.abc import Sequence
from functools import cache

from gateway.simulator import pieces

_OPENINGS = (
    "Here is a short answer, and then some background.",
    "Good question. Let me start with the part that matters most.",
    "There are two ways to look at this, and both are useful.",
    "In brief: it depends on what you want to keep, and what you can let go.",
    "Let me walk through it from the beginning.",
    "The usual explanation leaves something out, so let us take it slowly.",
    "I will keep this practical.",
    "Think of it as a place rather than a rule.",
)

_PARAGRAPHS = (
    (
        "A river is a record of every slope it has met.",
        "Upstream it is quick and narrow, and it carries stones that a child could not lift.",
        "Further down it slows, spreads, and lays its load aside in bends.",
        "By the time it reaches the sea, it has forgotten how to hurry.",
        "Maps draw it as a line, but it is closer to a habit.",
    ),
    (
        "Bread needs four things: flour, water, salt and patience.",
        "The first three cost little, and the fourth cannot be bought.",
        "Mix them in the evening, cover the bowl, and leave it where the kitchen is cool.",
        "In the morning the dough will have doubled, and it will smell faintly of apples.",
        "Fold it twice, let it rest again, and bake it hotter than you think you should.",
    ),
    (
        "A lighthouse keeper learns to read the weather in small signs.",
        "Gulls that sit on the rocks instead of flying mean wind by nightfall.",
        "A clear horizon at dusk, with every island drawn in ink, means rain tomorrow.",
        "The lamp itself tells nothing; it only turns.",
        "That is what makes it useful to everyone else.",
    ),
    (
        "Old libraries smell the way they do because paper slowly turns to something like vanilla.",
        "The shelves were built by people who expected them to outlive the books.",
        "Often they were right.",
        "A reader who sits there for an afternoon hears pages, a radiator, and one clock.",
        "It is hard to be in a rush in such a room.",
    ),
    (
        "Starlings fly in great clouds at the end of winter days, and nobody leads them.",
        "Each bird watches six or seven neighbours and does roughly what they do.",
        "From that small rule comes a shape that turns like a single thing.",
        "When a hawk arrives, a dark wave runs through the flock faster than any bird can fly.",
        "Then they settle in the reeds, all at once, and the sky is empty again.",
    ),
    (
        "A good map leaves most things out.",
        "It keeps the roads if you are driving, the slopes if you walk, and the wells if you are thirsty.",
        "The skill lies in knowing who will unfold it.",
        "Every map is an answer, so it helps to write the question in the corner.",
    ),
    (
        "Clocks kept poor time until someone noticed how steadily a lamp swings.",
        "A long pendulum moves slowly, a short one quickly, and the weight hardly matters.",
        "From this came clocks that lost a few seconds a day, where earlier ones had lost minutes.",
        "Sailors asked for better still, because a minute at sea is a long way.",
        "It took another hundred years and one stubborn carpenter.",
    ),
    (
        "In a small orchard, the pruning is done in late winter, on a dry day.",
        "You take out what is dead, then what crosses, then what grows straight up.",
        "The old advice is that a bird should be able to fly through the tree without touching it.",
        "Step back often, and stop before you think you are finished.",
        "The tree will answer in May.",
    ),
    (
        "Bridges are honest buildings: you can see what holds them up.",
        "An arch pushes outward, so it needs heavy shoulders.",
        "A cable pulls, so it needs deep roots.",
        "A beam only bends, and the longer it is, the more it complains.",
        "Most bridges are a compromise between these three, and the river decides the terms.",
    ),
    (
        "Snow is quiet because it traps the air between its flakes.",
        "Fresh snow swallows sound as thoroughly as a heavy curtain.",
        "After a thaw and a frost it turns hard, and then it carries every footstep.",
        "People who live with it have many words, mostly for what it will do next.",
    ),
    (
        "A tide table is one of the oldest forecasts we still trust.",
        "The moon pulls, the sun helps or hinders, and the shape of the coast does the rest.",
        "In some bays the water climbs higher than a house, twice a day, without a sound.",
        "Fishermen keep the table beside the door, next to the barometer and the keys.",
    ),
    (
        "Learning a language goes slowly for months and then suddenly does not.",
        "At first you translate every word and arrive late to each sentence.",
        "Later the easy phrases come by themselves and leave room for the hard ones.",
        "One day you notice that you have dreamed in it, badly, but without a dictionary.",
        "From there on it is mostly a matter of company.",
    ),
    (
        "The night train leaves at ten past nine and reaches the coast before breakfast.",
        "Take the upper berth if you like to see the stations pass as stripes of light.",
        "Somewhere after midnight it waits in the fields for no reason that anyone will explain.",
        "In the morning there is tea, and the first gull, and then the sea.",
    ),
    (
        "A violin is mostly air, held in place by thin wood.",
        "The bow makes the string stick and slip some hundreds of times a second.",
        "The bridge carries this to the top, a small post to the back, and the room does the rest.",
        "Two instruments from the same workshop rarely agree, which is why players are so hard to please.",
    ),
)

_THOUGHTS = (
    ("First, what is being asked here?", "The question has a plain reading and a deeper one."),
    ("The plain reading can be answered in a sentence.", "I should give that sentence early."),
    ("Let me check the assumption behind it.", "It holds in most cases, but not at the edges."),
    ("Suppose the opposite were true.", "Then the second part would contradict the first, so that is out."),
    (
        "There are three cases to tell apart.",
        "The first two lead to the same answer.",
        "Only the third differs.",
    ),
    (
        "Let me try a small example.",
        "With two it works, with three it works, and with none it still makes sense.",
    ),
    ("I could give more detail here.", "But the reader has not asked for it, and it would bury the point."),
    ("Wait, there is one more thing to consider.", "The order matters when the steps depend on each other."),
    ("An analogy might help.", "Something with water, perhaps; it flows, and it finds the lowest place."),
    ("So the outline is clear.", "Begin with the answer, then the reason, then the exception."),
    ("How sure am I?", "Sure enough to say it, not sure enough to leave out the caveat."),
)


@cache
def _tokens(sentence: str, lead: str) -> tuple[str, ...]:
    return tuple(pieces.pieces(lead + sentence))


def answer(dice: random.Random, tokens: int, *, least: int = 0) -> list[str]:
    """Return the tokens of an answer: about `tokens`, at least `least`, and up to the end of a sentence."""
    return _strung(list(_tokens(dice.choice(_OPENINGS), "")), dice, _PARAGRAPHS, "\n\n", tokens, least)


def thought(dice: random.Random, tokens: int, *, least: int = 1) -> list[str]:
    """Return the tokens of a thought, likewise."""
    return _strung([], dice, _THOUGHTS, "\n", tokens, least)


def _strung(
    said: list[str],
    dice: random.Random,
    groups: Sequence[Sequence[str]],
    lead: str,
    tokens: int,
    least: int,
) -> list[str]:
    """Return the tokens said, and those of sentences after them, up to the end nearest to `tokens`."""
    while True:
        for group in dice.sample(groups, len(groups)):
            for index, sentence in enumerate(group):
                more = _tokens(sentence, " " if index else lead)
                if len(said) >= least and len(said) + len(more) / 2 > tokens:
                    return said
                said += more
