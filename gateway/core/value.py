"""Values: objects that never change once they are made, and of which a request makes dozens.

To a type checker they are frozen dataclasses. At run time they are msgspec structs, which are made in C: one
of six fields in 0.07 us, where a frozen dataclass takes 0.75 us and a plain one 0.16 (CPython 3.11). They are
as frozen, compare and hash alike, and for `replace`, `fields` and `asdict` they are dataclasses.

Everything that is made once, at the start or by a change of policy, is a frozen dataclass proper.
"""

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from dataclasses import dataclass as valueclass
else:
    from dataclasses import Field, make_dataclass

    import msgspec

    def valueclass(*, frozen, slots):
        """Make a value class of a class written as a dataclass. All its fields are compared."""

        def make(written):
            made = written
            if not isinstance(written, type(msgspec.Struct)):  # else its base has made it one
                made = _made(written, frozen=frozen)
            described = make_dataclass(
                "_", made.__struct_fields__, init=False, repr=False, eq=False, match_args=False
            )
            made.__dataclass_fields__ = described.__dataclass_fields__
            return made

        return make

    def _made(written, *, frozen):
        fields = dict(written.__annotations__)
        members = {name: value for name, value in vars(written).items() if name not in fields}
        for unwanted in ("__annotations__", "__dict__", "__weakref__"):
            members.pop(unwanted, None)
        listed = [
            (name, kind, _default(vars(written)[name])) if name in vars(written) else (name, kind)
            for name, kind in fields.items()
        ]
        return msgspec.defstruct(
            written.__name__, listed, namespace=members, module=written.__module__, frozen=frozen
        )

    def _default(value):
        return msgspec.field(default_factory=value.default_factory) if isinstance(value, Field) else value


__all__ = ["valueclass"]
