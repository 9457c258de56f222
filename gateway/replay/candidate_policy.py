"""The policy to try on a log."""

from collections.abc import Mapping
from dataclasses import field

from gateway.core.policy import Policy
from gateway.core.profile import EngineFlags
from gateway.core.value import valueclass
from gateway.settings import Settings


@valueclass(frozen=True, slots=True)
class CandidatePolicy:
    """A policy, with the launch flags of its engines and the boxes of its fleet."""

    policy: Policy
    engines: Mapping[str, EngineFlags]
    boxes: Mapping[str, tuple[str, ...]] = field(default_factory=dict)

    @classmethod
    def of(cls, settings: Settings) -> "CandidatePolicy":
        """Return the policy of a configuration."""
        return cls(settings.policy(), settings.engines(), settings.box_members())
