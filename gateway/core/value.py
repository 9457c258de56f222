"""Values: objects that never change once they are made, and of which a request makes dozens.

To a type checker they are frozen dataclasses. At run time nothing enforces that: a frozen dataclass sets each
field through `object.__setattr__`, and making one of six fields takes 0.75 us instead of 0.18 (CPython 3.11).
Everything that is made once, at the start or by a change of policy, is a frozen dataclass proper.
"""

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from dataclasses import dataclass as valueclass
else:
    from dataclasses import dataclass

    def valueclass(*, frozen, slots):
        """Make a dataclass of a class: hashed and compared by its fields, and frozen to type checkers."""
        return dataclass(slots=slots, unsafe_hash=frozen)


__all__ = ["valueclass"]
