"""The configuration: one YAML file in, validated settings and a policy out.

`load` for serving, `check` for people, `schema` for editors. Everything below `app.py` sees the policy,
never this package. The sections and keys are in document.py; docs/configuration.md explains them.
"""

from gateway.settings.addresses import Address
from gateway.settings.diff import LIVE, changes
from gateway.settings.document import Document
from gateway.settings.loading import CheckReport, beside, check, load, version_of
from gateway.settings.problems import Problem
from gateway.settings.resolved import Settings
from gateway.settings.schema import schema
from gateway.settings.sections.service import ShutdownSection
from gateway.settings.tls import BackendTls

__all__ = [
    "load",
    "check",
    "beside",
    "version_of",
    "changes",
    "LIVE",
    "schema",
    "Settings",
    "CheckReport",
    "Problem",
    "Address",
    "BackendTls",
    "Document",
    "ShutdownSection",
]
