"""Frozen dataclasses that are cheap to make.

A frozen dataclass writes each field through `object.__setattr__`, which takes 90 ns (one x86 core, Python
3.11), where a plain one takes 15. A request makes some dozen values with some hundred fields. So there it is
left to the type checker to forbid a write: it sees the frozen class, and it runs over everything.
"""

from dataclasses import MISSING, Field, field, fields, make_dataclass
from typing import Any, TypeVar

T = TypeVar("T")


def quick(cls: type[T]) -> type[T]:
    """Return a frozen dataclass that is made as fast as a plain one. The same class, otherwise as it was.

    Fields that a constructor takes no value for, and what is to happen after it, are not provided for.
    """
    assert not hasattr(cls, "__post_init__")
    plain = make_dataclass(cls.__name__, [_again(one) for one in fields(cls)])  # type: ignore[arg-type]
    cls.__init__ = plain.__init__  # type: ignore[method-assign,misc]
    for name in ("__setattr__", "__delattr__"):
        delattr(cls, name)
    return cls


def _again(one: "Field[Any]") -> tuple[str, Any] | tuple[str, Any, Any]:
    """Return a field as `make_dataclass` wants it."""
    assert one.init
    assert one.kw_only is False
    if one.default is not MISSING:
        return one.name, one.type, field(default=one.default)
    if one.default_factory is not MISSING:
        return one.name, one.type, field(default_factory=one.default_factory)
    return one.name, one.type
