"""Which failures count against a backend."""

from gateway.core.blame import KNOWN_MAX, REPEATED_S, Blame


def test_a_request_counts_once_per_backend_until_it_is_forgotten() -> None:
    blame = Blame()
    asked = [
        ("a", b"1", 0.0, True),
        ("a", b"1", 1.0, False),
        ("b", b"1", 1.0, True),
        ("a", b"2", 2.0, True),
        ("a", b"1", REPEATED_S - 0.1, False),
        ("a", b"1", REPEATED_S, True),
        ("a", b"2", REPEATED_S, False),
    ]
    assert [blame.count(backend, request, now) for backend, request, now, _ in asked] == [
        is_new for *_, is_new in asked
    ]


def test_what_is_remembered_has_a_bound() -> None:
    blame = Blame()
    for number in range(KNOWN_MAX + 1):
        assert blame.count("a", str(number).encode(), 0.0)
    assert blame.count("a", b"0", 0.0)
    assert not blame.count("a", b"2", 0.0)
