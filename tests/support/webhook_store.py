"""The store of webhooks, where something ends that no job and no batch has to be made for."""

from importlib import resources
from typing import Any

from gateway.store.jobs import owner_of
from gateway.store.webhooks import RedisWebhooks

_ANNOUNCE = resources.files("gateway.store").joinpath("webhooks.lua").read_text(encoding="utf-8")
_ANNOUNCE += "announce(KEYS[1], unpack(ARGV))"


class Announcing(RedisWebhooks):
    """`RedisWebhooks` that can be told that something has ended, as the scripts tell it that end jobs."""

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self._announce = self._connections.redis.register_script(_ANNOUNCE)

    async def announce(self, kind: str, subject: str, key: str | None) -> None:
        args = [kind, subject, owner_of(key)]
        await self._connections.bounded(lambda: self._announce(keys=[self._tag], args=args))
