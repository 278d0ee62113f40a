"""Which of several replicas computes a request: the one that will have to do least until it has computed it.

Work is counted in tokens that have to be computed: those of prompts that no cache has, and those that sequences are
expected to generate still. A request's own part depends on the replica, since each has other prefixes; beside it stands
what was sent there before and has not ended. Only this process sends requests to its replicas, so it knows all of that
without asking; from their statistics comes how much of their KV cache is in use.

Ties go by rendezvous hashing (Thaler and Ravishankar, 1998) of the prompt's beginning: prompts that begin alike meet
again, also when no replica remembers them, and when a replica comes or goes only its own move.
"""

from __future__ import annotations

from hashlib import blake2b

import msgspec

from engine.core.wire import AddRequest, CoreStats, KVDigests
from engine.kv_cache.hash_chain import HashChain
from engine.replicas.prefix_index import PrefixIndex

FIRST_GUESS_TOKENS = 128
"""that a sequence generates, before any has ended"""
OWN_WEIGHT = 2
"""of what a request itself adds to a replica, against what is there: it delays this one, and all that come later"""
MEMORY = 64
"""sequences that have ended, of whose lengths the mean is a running one"""


class Place(msgspec.Struct, frozen=True):
    """A replica that may be chosen, and what speaks for it."""

    replica: int
    work: float
    """tokens until the request has been computed there, its own counted `OWN_WEIGHT` times"""
    cached_tokens: int
    """of the prompt, that it has or is to have"""
    chain: HashChain
    """of the prompt"""


class _Sent(msgspec.Struct):
    """A request that has been sent to a replica and has not ended."""

    replica: int
    digests: list[bytes]
    """of its prompt's whole blocks, until it has been computed"""
    prompt_tokens: int
    """to be computed there; 0 once they have been"""
    sequences: int
    """that have not ended"""
    each: float
    """tokens that each of them is expected to generate"""

    @property
    def work(self) -> float:
        return self.prompt_tokens + self.sequences * self.each


class _Load(msgspec.Struct):
    """Of a replica."""

    draining: bool = False
    requests: int = 0
    work: float = 0.0
    """of these requests"""
    free_tokens: int | None = None
    """of its KV cache, as it has told last"""


class Router:
    """Not thread-safe. Requests go by their `request_id`."""

    def __init__(self, block_size: int, looks_at_prefixes: bool = True) -> None:
        """Without looking there is no choice, as of one replica."""
        self._block_size, self._looks = block_size, looks_at_prefixes
        self.index = PrefixIndex()
        self._loads: dict[int, _Load] = {}
        self._sent: dict[str, _Sent] = {}
        self._mean_output = float(FIRST_GUESS_TOKENS)

    def add(self, replica: int) -> None:
        """It may be chosen. Numbers are small, and not used again."""
        self._loads[replica] = _Load()

    def drain(self, replica: int, draining: bool = True) -> None:
        """It is not chosen any more, or again."""
        self._loads[replica].draining = draining

    def remove(self, replica: int) -> list[str]:
        """It is gone, and is forgotten; the requests that it had are, too, and are returned in the order in which they
        were sent."""
        lost = [name for name, sent in self._sent.items() if sent.replica == replica]
        for name in lost:
            self.ended(name)
        del self._loads[replica]
        self.index.forget(replica)
        return lost

    def is_idle(self, replica: int) -> bool:
        """Every request that it had has ended."""
        return not self._loads[replica].requests

    def observe(self, replica: int, stats: CoreStats, told: KVDigests | None) -> None:
        if told is not None:
            self.index.observe(replica, told)
        if stats.kv_blocks_total:
            self._loads[replica].free_tokens = (stats.kv_blocks_total - stats.kv_blocks_used) * self._block_size

    def places(self, request: AddRequest) -> list[Place]:
        """The replicas that may be chosen, the best one first; none: all are draining."""
        tokens, size = request.prompt_token_ids, self._block_size
        chain = HashChain(size, request.cache_salt, request.adapter_key)
        open_to = [replica for replica, load in self._loads.items() if not load.draining]
        blocks = max(len(tokens) - 1, 0) // size if self._looks else 0  # a hit leaves a token to compute
        found = self.index.matched((chain.digest(index, tokens) for index in range(blocks)), open_to)
        generated = len(request.request_ids) * self._each(request)
        places = []
        for replica in open_to:
            load, cached = self._loads[replica], found[replica] * size
            work = load.work + OWN_WEIGHT * (len(tokens) - cached + generated)
            if load.free_tokens is not None:  # what has no room waits until as much has become free
                work += max(len(tokens) - cached + generated - load.free_tokens, 0.0)
            places.append(Place(replica, work, cached, chain))
        key = (
            chain.digest(0, tokens)
            if len(tokens) >= size
            else repr((request.cache_salt, request.adapter_key, tokens)).encode()
        )
        return sorted(places, key=lambda place: (place.work, blake2b(key + place.replica.to_bytes(4, "big")).digest()))

    def sent(self, request: AddRequest, place: Place, sequences: int | None = None) -> None:
        """It is under way there. `sequences`: how many of its own are wanted still; None: all."""
        blocks = len(request.prompt_token_ids) // self._block_size if self._looks else 0
        sent = _Sent(
            replica=place.replica,
            digests=place.chain.digests_of(blocks, request.prompt_token_ids)[:blocks],
            prompt_tokens=len(request.prompt_token_ids) - place.cached_tokens,
            sequences=len(request.request_ids) if sequences is None else sequences,
            each=self._each(request),
        )
        self.index.expect(place.replica, sent.digests)
        self._sent[request.request_id] = sent
        load = self._loads[place.replica]
        load.requests += 1
        load.work += sent.work

    def began(self, request_id: str) -> None:
        """Its prompt has been computed; said once or oftener."""
        sent = self._sent[request_id]
        self._loads[sent.replica].work -= sent.prompt_tokens
        self.index.expect_no_more(sent.replica, sent.digests)
        sent.prompt_tokens, sent.digests = 0, []

    def sequence_ended(self, request_id: str, generated: int) -> None:
        """One of its sequences, which brought so many tokens. With the last one the request has ended."""
        self._mean_output += (generated - self._mean_output) / MEMORY
        sent = self._sent[request_id]
        if sent.sequences == 1:
            self.ended(request_id)
        else:
            self._loads[sent.replica].work -= sent.each
            sent.sequences -= 1

    def ended(self, request_id: str) -> None:
        """All of it."""
        sent = self._sent.pop(request_id)
        load = self._loads[sent.replica]
        load.requests -= 1
        load.work = load.work - sent.work if load.requests else 0.0  # what rounding leaves goes with the last one
        self.index.expect_no_more(sent.replica, sent.digests)

    def _each(self, request: AddRequest) -> float:
        """Tokens that a sequence of it is expected to generate."""
        return min(float(request.max_tokens), self._mean_output)
