"""A brute-force model of the KV manager: plain lists and dicts, and what every slot of the device and of the host tier
holds.

What the manager decides happens on the device when a *plan* is told, and in its order: transfers to the host, transfers
from it, copies, then the writes of the step. A plan is drafted in two phases. While it is decided, what was appended is
*tentative*: sequences may be preempted, and their share is taken back. Then it is placed, and others are admitted
(prefix hits, swapped sequences); nothing is admitted in a plan that preempted.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace

from hypothesis import strategies as st

from engine.kv_cache.block_pool import BlockPool
from engine.kv_cache.kv_cache import KVCache
from engine.kv_cache.prefix import host_block, is_on_host
from engine.kv_cache.sequence_blocks import NO_GROWTH, Growth, SequenceBlocks
from engine.layer_groups import Chunk, Window

WINDOWS = st.none() | st.integers(1, 5) | st.builds(Chunk, st.integers(1, 6))

GONE = -1_000_000
"""no block of either tier"""

Name = tuple[int, str | None, tuple[int, ...]]
"""what a block is found by: layer group, salt, every token up to its end"""

Content = tuple[int, tuple[int, ...]]
"""of a slot: layer group, every token up to its position"""

Slots = list[list[Content | None]]


@dataclass(eq=False)
class Seq:
    blocks: SequenceBlocks
    salt: str | None
    tokens: list[int] = field(default_factory=list)
    """those that have KV, or will when the plan is told"""
    known: list[int] = field(default_factory=list)
    """those that follow, as far as they are decided"""
    tables: list[list[int]] = field(default_factory=list)
    """GONE where a window went past; of the tier that the sequence is in"""
    registered: int = 0
    """blocks that were offered to the index; each is offered once"""
    tentative: list[int] = field(default_factory=list)
    """tokens that were appended and may still be taken back"""
    growth: Growth = NO_GROWTH
    offered: bool = False
    """whether its full blocks are registered once it is placed"""
    in_plan: bool = False
    """the plan writes to its last block: it is not appended to before the plan is told"""
    on_host: bool = False


def held(table: list[int], start: int) -> list[int]:
    return [GONE] * min(start, len(table)) + table[start:]


def state(pool: BlockPool) -> tuple[object, ...]:
    keys = [pool.key_of(block) for block in range(pool.num_blocks)]
    return pool.ref_counts.copy(), list(pool.free_blocks()), keys, pool.num_free, pool.num_cached


def newest(seqs: list[Seq], pick: int) -> Seq:
    return seqs[-1 - pick % len(seqs)]


class CacheModel:
    """The free list as a list in hand-out order, the index as a dict by name, slot contents by block. Of the host tier
    only what must hold in any order of eviction."""

    def __init__(self, kv: KVCache) -> None:
        self.kv = kv
        self.windows, self.size = kv.windows, kv.block_size
        self.caching, self.total = kv.pool.enable_prefix_caching, kv.pool.num_blocks
        self.seqs: list[Seq] = []
        self.free = list(range(self.total))
        self.index: dict[Name, int] = {}
        self.name_of: dict[bytes, Name] = {}
        """for every key that a block of the device was ever found by"""
        self.evicted: list[Name] = []
        """from the device, in order"""
        self.device: Slots = [[None] * self.size for _ in range(self.total)]
        self.host: Slots = [[None] * self.size for _ in range(kv.host.pool.num_blocks if kv.host else 0)]
        self.placed = self.preempted = False
        self.tentative: list[Seq] = []
        """in the order in which they were appended to"""
        self.loads: list[tuple[int, int]] = []
        """(host block, device block)"""
        self._copies: list[tuple[int, int]] = []
        self._writes: list[tuple[int, int, Content]] = []

    # -- the device's pool -------------------------------------------------------------------------------------------

    def holders(self, block: int) -> int:
        return sum(table.count(block) for seq in self.seqs if not seq.on_host for table in seq.tables)

    def cached(self, block: int) -> bool:
        return block in self.index.values()

    def take(self) -> int:
        block = self.free.pop(0)
        for name in [name for name, held in self.index.items() if held == block]:
            del self.index[name]
            self.evicted.append(name)
        return block

    def acquire(self, block: int) -> None:
        if block in self.free:
            self.free.remove(block)

    def give_back(self, block: int) -> None:
        if block != GONE and self.holders(block) == 0:
            self.free.insert(len(self.free) if self.cached(block) else 0, block)

    def needed(self, num_tokens: int, group: int) -> range:
        """Table entries that the query at position `num_tokens` sees, as far as there are any before it is appended."""
        return range(self.seen(num_tokens, group)[0] // self.size, -(-num_tokens // self.size))

    def seen(self, num_tokens: int, group: int) -> list[int]:
        """Positions that the query at position `num_tokens` sees, itself included."""
        window: Window = self.windows[group]
        if isinstance(window, Chunk):
            return [p for p in range(num_tokens + 1) if p // window.tokens == num_tokens // window.tokens]
        return [p for p in range(num_tokens + 1) if window is None or p > num_tokens - window]

    def slide(self, seq: Seq) -> None:
        """Give back what no query sees any more."""
        for group, table in enumerate(seq.tables):
            needed = self.needed(len(seq.tokens), group)
            for index in range(len(table)):
                if self.windows[group] is not None and index not in needed:
                    block, table[index] = table[index], GONE
                    self.give_back(block)

    def name(self, seq: Seq, group: int, index: int) -> Name:
        return group, seq.salt, tuple(seq.tokens[: (index + 1) * self.size])

    def find_as(self, name: Name, block: int) -> None:
        """The block was registered."""
        if self.index.setdefault(name, block) == block:
            key = self.kv.pool.key_of(block)
            assert key is not None, "a block that was registered is not found"
            assert self.name_of.setdefault(key, name) == name, "one key for two contents"

    def register(self, seq: Seq) -> None:
        self.kv.register(seq.blocks, seq.tokens + seq.known)
        if not self.caching or seq.on_host:
            return
        for index in range(seq.registered, len(seq.tokens) // self.size):
            for group, table in enumerate(seq.tables):
                if table[index] != GONE and not self.cached(table[index]):
                    self.find_as(self.name(seq, group, index), table[index])
        seq.registered = len(seq.tokens) // self.size

    def host_index(self) -> dict[Name, int]:
        """What is found in the host tier."""
        pool = self.kv.host.pool if self.kv.host is not None else None
        keys = {} if pool is None else {block: pool.key_of(block) for block in range(pool.num_blocks)}
        return {self.name_of[key]: block for block, key in keys.items() if key is not None}

    def longest_prefix(self, seq: Seq, limit: int) -> tuple[int, list[list[int]]]:
        """How many blocks of `seq.tokens` are found, and of each layer group those that are needed; `is_on_host` tells
        which of them only the host has."""
        there = {name: ~block for name, block in self.host_index().items()} | self.index
        for count in range(max(limit, 0) // self.size if self.caching else 0, -1, -1):
            needed = [self.needed(count * self.size, group) for group in range(len(self.windows))]
            names = [[self.name(seq, group, index) for index in part] for group, part in enumerate(needed)]
            if all(name in there for part in names for name in part):
                break
        return count, [[there[name] for name in part] for part in names]

    # -- sequences that come and go ----------------------------------------------------------------------------------

    def adopt(self, seq: Seq) -> int:
        """What only the host has goes to new blocks, when all others are held. Returns how many."""
        self.seqs.append(seq)
        loads = len(self.loads)
        for table in seq.tables:
            for block in table:
                self.acquire(block)
        for group, table in enumerate(seq.tables):
            for index, block in enumerate(table):
                if block != GONE and is_on_host(block):
                    table[index] = self.load(host_block(block), self.name(seq, group, index))
        return len(self.loads) - loads

    def load(self, block: int, name: Name | None) -> int:
        """The host's block goes to a new one of the device."""
        there = self.take()
        self.loads.append((block, there))
        if name is not None:
            self.find_as(name, there)
        return there

    def drop(self, seq: Seq) -> None:
        self.seqs.remove(seq)
        for index in reversed(range(len(seq.tables[0]))):
            for table in seq.tables:
                if not seq.on_host:
                    self.give_back(table[index])

    def trim(self, seq: Seq, num_tokens: int) -> int:
        """Returns how many blocks were given back."""
        count, dropped = -(-num_tokens // self.size), 0
        seq.tokens = seq.tokens[:num_tokens]
        for table in seq.tables:
            while len(table) > count:
                block, dropped = table.pop(), dropped + 1
                if not seq.on_host:
                    self.give_back(block)
        return dropped

    def take_over(self, seq: Seq, source: Seq, alike: bool) -> list[tuple[int, int]]:
        """The sequence has the other one's tokens. Blocks up to one that both have hold the same tokens, so they are
        kept; and its last block is, for a copy, where both are filled to the same place, and nobody else has it.
        `alike`: windows are past the same blocks. Returns the copies."""
        full = len(source.tokens) // self.size
        pairs = list(zip(seq.tables, source.tables, strict=True))
        keeps = alike and len(source.tokens) % self.size != 0 and len(seq.tokens) == len(source.tokens)
        keeps = keeps and all(len(own) == full + 1 and self.holders(own[full]) == 1 for own, _ in pairs)
        common = full if alike else 0
        for own, new in pairs:
            ends = range(min(common, len(own)), 0, -1)
            common = next((end for end in ends if own[end - 1] == new[end - 1] != GONE), 0)
        assert source.tokens[: common * self.size] == seq.tokens[: common * self.size]
        for group, (own, new) in enumerate(pairs):
            seq.tables[group] = own[:common] + (new[common:full] + own[full:] if keeps else new[common:])
            for index in reversed(range(common, full if keeps else len(own))):
                self.give_back(own[index])
        seq.tokens, seq.registered, seq.known = source.tokens.copy(), source.registered, []
        return [(new[full], own[full]) for own, new in pairs] if keeps else []

    def missing_on_host(self, blocks: set[int]) -> int:
        """Free blocks of the host that it takes to hold the device's `blocks`."""
        assert self.kv.host is not None
        there, free = self.host_index(), set(self.kv.host.pool.free_blocks())
        copies = {block: there[name] for name, block in self.index.items() if name in there}
        return sum(block not in copies or copies[block] in free for block in blocks)

    def leave_device(self, seq: Seq) -> None:
        """It was swapped out, to blocks of the host that were chosen by the manager."""
        self.take_back(seq)
        seq.growth = NO_GROWTH  # its copies were made on the way
        seq.registered = min(seq.registered, len(seq.tokens) // self.size)
        for number, table in enumerate(seq.tables):
            seq.tables[number] = []
            for block in reversed(table):
                self.give_back(block)
        seq.on_host = True
        seq.tables = [held(*pair) for pair in zip(seq.blocks.tables, seq.blocks.starts, strict=True)]

    def found_on_device(self, group: list[Seq]) -> dict[int, int | None]:
        """For each block of swapped sequences the device's block that holds the same, if one does."""
        blocks = dict.fromkeys(block for seq in group for table in seq.tables for block in table if block != GONE)
        names = {block: name for name, block in self.host_index().items()}
        return {block: self.index.get(names[block]) if block in names else None for block in blocks}

    def enter_device(self, group: list[Seq], found: dict[int, int | None]) -> None:
        """They were swapped in."""
        names = {block: name for name, block in self.host_index().items()}
        for block in found.values():
            self.acquire(GONE if block is None else block)
        at = {block: self.load(block, names.get(block)) if there is None else there for block, there in found.items()}
        for seq in group:
            seq.on_host = False
            seq.tables = [[at.get(block, GONE) for block in table] for table in seq.tables]

    def reset(self) -> int:
        """Nothing will be found that no sequence uses. Returns how many blocks that are, of both tiers."""
        host = self.kv.host
        there = sum(host is not None and host.pool.ref_counts[block] == 0 for block in self.host_index().values())
        unused = [name for name, block in self.index.items() if block in self.free]
        for name in unused:
            del self.index[name]
        return len(unused) + there

    def forget(self, seq: Seq, count: int) -> set[Name]:
        """Its first `count` blocks are not found again. Returns their names."""
        whole = replace(seq, tokens=seq.tokens + seq.known)
        names = [self.name(whole, group, index) for index in range(count) for group in range(len(self.windows))]
        for name in names:
            block = self.index.pop(name, GONE)
            if block in self.free:
                self.free.remove(block)
                self.free.insert(0, block)
        return set(names)

    # -- plans -------------------------------------------------------------------------------------------------------

    def between_plans(self) -> None:
        if self.tentative or self.placed:
            self.tell()

    def decide(self) -> None:
        """The plan is one in which sequences may still be preempted."""
        if self.placed:
            self.tell()

    def admit(self) -> None:
        """The plan is one in which sequences may start."""
        if self.preempted and (self.tentative or self.placed):
            self.tell()
        self.preempted = False  # a plan without rows is not told; the next one is drafted
        self.place()

    def place(self) -> None:
        """What was appended is in the plan for good."""
        self.placed = True
        for seq in self.tentative:
            self._copies += seq.growth.copies
            for token in seq.tentative:
                self._write(seq, token)
            seq.known = seq.known[len(seq.tentative) :]
            seq.tentative, seq.growth, seq.in_plan = [], NO_GROWTH, True
            if seq.offered:
                self.register(seq)
        self.tentative = []

    def _write(self, seq: Seq, token: int) -> None:
        index, offset = divmod(len(seq.tokens), self.size)
        seq.tokens.append(token)
        for group, table in enumerate(seq.tables):
            assert self.holders(table[index]) == 1, "a write to a shared block"
            assert not self.cached(table[index]), "a write to a block that can be found"
            self._writes.append((table[index], offset, (group, tuple(seq.tokens))))

    def take_back(self, seq: Seq) -> None:
        """The sequence is preempted: what was appended for this plan is not computed."""
        self.preempted = True
        if seq.tentative:
            self.tentative.remove(seq)
            seq.tentative, seq.growth = [], NO_GROWTH

    def tell(self) -> None:
        self.place()
        out, into = self.kv.take_transfers()
        assert into == self.loads
        for source, destination in out:
            self.host[destination] = self.device[source].copy()
        for source, destination in into:
            self.device[destination] = self.host[source].copy()
        for source, destination in self._copies:
            self.device[destination] = self.device[source].copy()
        for block, offset, content in self._writes:
            self.device[block][offset] = content
        self.loads, self._copies, self._writes = [], [], []
        self.placed = self.preempted = False
        for seq in self.seqs:
            seq.in_plan = False
        self._check_contents()

    def _check_contents(self) -> None:
        for seq in self.seqs:
            slots = self.host if seq.on_host else self.device
            texts = [tuple(seq.tokens[: position + 1]) for position in range(len(seq.tokens))]
            for group, table in enumerate(seq.tables):
                for position in self.seen(len(texts), group)[:-1]:
                    index, offset = divmod(position, self.size)
                    assert slots[table[index]][offset] == (group, texts[position]), "a sequence has lost its KV"
        for index, slots in ((self.index, self.device), (self.host_index(), self.host)):
            for (group, _, tokens), block in index.items():
                starts = range(len(tokens) - self.size + 1, len(tokens) + 1)
                assert slots[block] == [(group, tokens[:end]) for end in starts], "a block holds not what it is named"
