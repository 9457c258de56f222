"""Which backends have cached which conversation: a bounded LRU memory of prefix hashes."""

from collections import OrderedDict
from collections.abc import Mapping

from gateway.core.conversations import TOLD_MIN_TOKENS, Answered, Conversations
from gateway.core.request import Prefixes

HOLDERS_MAX = 64
"""Backends remembered per prefix. A choice: the replicas of a large pool, on all of which a shared system
prompt is soon cached; each costs a request with it 0.1 us. With 4, requests preferred the few that were
known: 20 simulated PUSH took 0.30 s instead of 0.26 s to the first token of questions about one document."""


class _Cache:
    """The prefix cache of a backend's process."""

    __slots__ = ("backend", "is_gone")

    def __init__(self, backend: str) -> None:
        self.backend = backend
        self.is_gone = False


class MemoryPrefixIndex:
    """`ports.PrefixIndex` in memory.

    The next turn of a conversation is everything before plus two messages. So it suffices to remember three
    prefixes per request: the whole of it, with which the next turn begins; the same without the last message,
    for agents that append a reminder to each request and drop it from the next, and for questions after the
    same examples; and the first message, which conversations share if it is a system prompt.

    An engine that does not go on anywhere (`EngineSample.resumes_anywhere`) has the latter two only once a
    second conversation has parted from the first there (`core.prefix_cache`). Until then it is remembered
    under the inverted key that it has read them.
    """

    def __init__(self, entries_max: int = 65_536) -> None:
        self._entries_max = entries_max
        self._holders: OrderedDict[int, tuple[_Cache, ...]] = OrderedDict()
        self._caches: dict[str, _Cache] = {}  # by backend
        self._answered = Answered()

    def held(self, prefixes: Prefixes) -> Mapping[str, float]:
        """See `ports.PrefixIndex.held`."""
        shares: dict[str, float] = {}
        for key, share in prefixes:  # ascending, so the longest prefix is written last
            for cache in self._holders.get(key, ()):
                if not cache.is_gone:
                    shares[cache.backend] = share
        return shares

    def remember(
        self,
        prefixes: Prefixes,
        backend_id: str,
        prompt_tokens: int = 0,
        now: float = 0.0,
        *,
        resumes_anywhere: bool = True,
    ) -> None:
        """See `ports.PrefixIndex.remember`."""
        if not prefixes:
            return
        if prompt_tokens >= TOLD_MIN_TOKENS:
            self._answered.note(prefixes[-1][0], backend_id, now)
        of, cache = self._holders, self._caches.get(backend_id)
        if cache is None:
            cache = self._caches[backend_id] = _Cache(backend_id)
        keys = [key for key, _ in (prefixes if len(prefixes) < 3 else (prefixes[0], *prefixes[-2:]))]
        if not resumes_anywhere:
            keys = self._kept(keys, prefixes, cache)
        for key in keys:
            holders = of.get(key)
            if holders is None:
                of[key] = (cache,)  # the newest entry
                continue
            if cache not in holders:
                others = [holder for holder in holders if not holder.is_gone]
                of[key] = (cache, *others)[:HOLDERS_MAX]
            of.move_to_end(key)
        while len(of) > self._entries_max:
            of.popitem(last=False)

    def forget(self, backend_id: str) -> None:
        """See `ports.PrefixIndex.forget`."""
        cache = self._caches.pop(backend_id, None)
        if cache is not None:
            cache.is_gone = True
            self._answered.forget(backend_id)

    def _kept(self, keys: list[int], prefixes: Prefixes, cache: _Cache) -> list[int]:
        """Return what a backend that does not go on anywhere has of a conversation, under which keys."""
        of, whole = self._holders, prefixes[-1][0]
        kept = [key if key == whole or cache in of.get(key, ()) else ~key for key in keys]
        for key, _ in reversed(prefixes):
            if cache in of.get(key, ()):  # it goes on from there, and has left nothing beyond
                break
            if cache in of.get(~key, ()):  # here it leaves one that was read before
                return [*(one for one in kept if one != ~key), key]
        return kept

    def conversations(self, now: float) -> Conversations:
        """See `ports.SharedPrefixes.conversations`."""
        return self._answered.told(now)

    def hear(self, backend_id: str, key: int) -> None:
        """See `ports.SharedPrefixes.hear`."""
        self.remember(((key, 1.0),), backend_id)  # and tell nobody
