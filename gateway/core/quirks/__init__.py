"""What engines are known to do wrong, and what the gateway does about it. Pure.

One module per quirk: it names the engine's issue and the versions it is known of, and puts what it needs into
the `Plan` of an attempt. Which ones are asked is up to the backend's profile and configuration; the answer
of a backend without any is relayed byte for byte. docs/quirks.md says what each does and costs.
"""

from gateway.core.quirks.assembly import AssemblingReader
from gateway.core.quirks.mending import MendingReader, mend_whole
from gateway.core.quirks.plan import Plan
from gateway.core.quirks.registry import WORKAROUNDS, plan

__all__ = ["WORKAROUNDS", "AssemblingReader", "MendingReader", "Plan", "mend_whole", "plan"]
