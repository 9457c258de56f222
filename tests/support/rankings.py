"""Rankings of candidates that a test makes up."""

from gateway.core.decision import Candidate, Ranking


def ranking_of(*candidates: Candidate) -> Ranking:
    """Return a ranking of these candidates, in this order."""
    first = next((one for one in candidates if one.excluded is None), None)
    passed_over = tuple((one.backend, one.excluded) for one in candidates if one.excluded is not None)
    return Ranking(first, passed_over, lambda: candidates)
