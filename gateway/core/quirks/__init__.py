"""Known engine bugs (quirks) and their workarounds. Pure.

Each quirk has a module, which names the engine's issue and the affected versions, and adds the workaround to
the `Plan` of an attempt. A backend's profile and configuration select its quirks. The answer of a backend
without quirks is relayed byte for byte. docs/quirks.md describes the effect and cost of each.
"""

from gateway.core.quirks.assembly import AssemblingReader
from gateway.core.quirks.mending import MendingReader, mend_whole
from gateway.core.quirks.plan import RemedyRequest
from gateway.core.quirks.registry import WORKAROUNDS, plan

__all__ = ["WORKAROUNDS", "AssemblingReader", "MendingReader", "RemedyRequest", "mend_whole", "plan"]
