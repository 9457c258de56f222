"""Values kept per immutable object."""

from gateway.core.kept import KEPT_MAX, kept
from gateway.core.values import Weights


def test_a_value_is_computed_once_per_object() -> None:
    computed: list[Weights] = []

    @kept
    def speed(weights: Weights) -> float:
        computed.append(weights)
        return weights.speed

    one, other = Weights(speed=0.5), Weights(speed=0.5)

    assert [speed(one), speed(one), speed(other), speed(one)] == [0.5] * 4
    assert [id(weights) for weights in computed] == [id(one), id(other)]


def test_it_is_bounded_and_never_mistakes_a_new_object_for_a_dropped_one() -> None:
    held: list[int] = []

    @kept
    def length(values: tuple[int, ...]) -> int:
        held.append(len(values))
        return len(values)

    first = (1, 2)
    assert length(first) == 2
    for size in range(2 * KEPT_MAX):  # dropped at once, so that their addresses are used again
        assert length(tuple(range(size))) == size
    assert length(first) == 2
    assert len(held) == 2 * KEPT_MAX + 2
