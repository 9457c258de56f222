"""What each key of the configuration means: the docstring under its field.

Read from the source when somebody asks. Pydantic would do so for every section of every process
(`use_attribute_docstrings`), which was a tenth of the time that a gateway takes to import.
"""

import ast
import inspect
import textwrap
from collections.abc import Mapping
from functools import cache
from itertools import pairwise

from pydantic import BaseModel


@cache
def descriptions(section: type[BaseModel]) -> Mapping[str, str]:
    """Return a section's descriptions, by key as it is written in the file."""
    written: dict[str, str] = {}
    for kind in reversed(section.__mro__):
        if issubclass(kind, BaseModel) and kind.__module__.startswith(__package__):
            written |= _docstrings(kind)
    found = {name: field.description or written.get(name) for name, field in section.model_fields.items()}
    return {section.model_fields[name].alias or name: text for name, text in found.items() if text}


def _docstrings(kind: type) -> dict[str, str]:
    """Return the text under each annotated name of a class; none where its source is missing."""
    try:
        source = textwrap.dedent(inspect.getsource(kind))
    except (OSError, TypeError):
        return {}
    body = ast.parse(source).body[0].body  # type: ignore[attr-defined]  # a class has one
    return {
        field.target.id: inspect.cleandoc(text.value.value)
        for field, text in pairwise(body)
        if isinstance(field, ast.AnnAssign)
        and isinstance(field.target, ast.Name)
        and isinstance(text, ast.Expr)
        and isinstance(text.value, ast.Constant)
        and isinstance(text.value.value, str)
    }
