"""Who waits, in fair order: virtual token counters (Sheng et al., "Fairness in Serving Large Language Models", OSDI
2024). A tenant's counter grows with what is computed for it, over its weight, and whoever waits and has the lowest one
starts next; a more urgent priority comes first. What the prefix cache had costs nothing."""

from __future__ import annotations

import heapq
from collections.abc import Sequence as Tokens

from engine.request import Tenant
from engine.scheduling.accounts import Account
from engine.scheduling.sequence import Sequence
from engine.scheduling.steps_in_flight import PlannedStep
from engine.scheduling.waiting_queue import WaitingQueue

PROMPT_COST = 1.0
"""of a token of a prompt that is computed"""
OUTPUT_COST = 2.0
"""of a token that is sampled"""
_FEW = 2
"""requests of a tenant that wait and are no flood"""
_KEPT = 64
"""tenants of whom nothing lives, before those are looked for of whom nothing need be known"""

_Place = tuple[int, tuple[float, bool], int]
"""priority, its account's order and arrival of a tenant's first sequence: as they were when its entry was made"""


class FairQueue(WaitingQueue):
    """A heap of tenants, each with a heap of its own. Counters only grow, so an entry that surfaces is put where it
    belongs by then: amortized O(log tenants)."""

    def __init__(self, credit: int = 0) -> None:
        """`credit`: as many tokens of prompts who comes back may be given before those that waited then, and goes on
        before them for so long: else its second request stands behind a flood while the first one's prompt counts. Who
        has more that waits than `_FEW` has none: a flood would hide what it is given from those that come later."""
        super().__init__()
        self._credit = PROMPT_COST * credit
        self._accounts: dict[str, Account] = {}
        self._queues: dict[Account, WaitingQueue] = {}
        self._order: list[tuple[_Place, int, Account]] = []
        self._entries: dict[Account, int] = {}
        """of those in order, the number of the entry that counts"""
        self._num_entries = 0
        self._latest = Account("", 1.0)
        """whose sequence started last"""

    # -- tenants -----------------------------------------------------------------------------------------------------

    def join(self, seq: Sequence, tenant: Tenant) -> None:
        """It is one of the tenant's, whose weight is this from now on."""
        account = self._accounts.get(tenant.name)
        if account is None:
            if len(self._accounts) >= 2 * _KEPT and len(self._accounts) % _KEPT == 0:
                self._forget()
            account = self._accounts[tenant.name] = Account(tenant.name, tenant.weight)
        account.weight = tenant.weight
        account.live += 1
        seq.account = account

    def leave(self, seq: Sequence) -> None:
        """It has ended."""
        assert seq.account is not None
        seq.account.live -= 1
        seq.account = None

    def _forget(self) -> None:
        """Whoever comes back would be raised as far at least."""
        floor = min((each.order[0] for each in self._queues), default=self._latest.order[0])
        for account in [each for each in self._accounts.values() if not each.live and each.served <= floor]:
            del self._accounts[account.name]

    def started(self, seq: Sequence, computed: int) -> None:
        """As many tokens of its prompt are to be computed."""
        assert seq.account is not None
        seq.account.served += PROMPT_COST * computed / seq.account.weight

    def sampled(self, step: PlannedStep, counts: Tokens[int]) -> None:
        """`counts`: what each of its rows that sample has brought; none: a token each."""
        owners = step.owners[step.rows.samples > 0].tolist()
        for seq, count in zip(owners, counts or [1] * len(owners), strict=True):
            if seq.account is not None:
                seq.account.served += OUTPUT_COST * count / seq.account.weight

    def tokens_of(self, tenant: Tenant) -> int:
        """Of prompts of the tenant that wait."""
        account = self._accounts.get(tenant.name)
        return 0 if account is None or account not in self._queues else self._queues[account].num_tokens

    def beside(self, seq: Sequence) -> tuple[int, int]:
        """Sequences of its tenant that wait and are as urgent, or more so, and tokens of their prompts."""
        queue = None if seq.account is None else self._queues.get(seq.account)
        return (0, 0) if queue is None else queue.as_urgent(seq)

    def waiting_of(self, tenant: Tenant) -> int:
        """Sequences of the tenant that do not run."""
        account = self._accounts.get(tenant.name)
        return 0 if account is None else account.live - account.rows

    def share_of(self, tenant: Tenant) -> float:
        """Of all, while those wait that do: 0 to 1."""
        others = sum(account.weight for account in self._queues if account.name != tenant.name)
        return tenant.weight / (tenant.weight + others)

    def share_with(self, tenant: Tenant) -> float:
        """Rows of the tenant, and one more, over its weight."""
        account = self._accounts.get(tenant.name)
        return (1 + (0 if account is None else account.rows)) / tenant.weight

    # -- the queue ---------------------------------------------------------------------------------------------------

    def push(self, seq: Sequence) -> None:
        account = seq.account
        assert account is not None
        queue = self._queues.get(account)
        if queue is None:
            # Nobody has saved up what he did not ask for.
            lowest = min((each.order[0] for each in self._queues), default=self._latest.order[0])
            if account.served < lowest or not account.credit:
                account.served = account.level = max(account.served, lowest)
            account.credit = self._credit / account.weight
            queue = self._queues[account] = WaitingQueue()
        queue.push(seq)
        if len(queue) > _FEW:
            account.credit = 0.0
        self._waiting += 1
        self._count(seq, 1)
        if queue.first() is seq:
            self._enter(account, seq)

    def _enter(self, account: Account, first: Sequence) -> None:
        self._num_entries += 1
        self._entries[account] = self._num_entries
        heapq.heappush(self._order, (_place(account, first), self._num_entries, account))
        if len(self._order) > 2 * len(self._entries) + 16:
            self._order[:] = [entry for entry in self._order if self._entries.get(entry[2]) == entry[1]]
            heapq.heapify(self._order)

    def first(self) -> Sequence | None:
        order = self._order
        while order:
            place, number, account = order[0]
            if self._entries.get(account) == number:
                first = self._queues[account].first()
                if first is not None and place == _place(account, first):
                    return first
                heapq.heappop(order)
                if first is None:
                    del self._entries[account], self._queues[account]
                else:
                    self._enter(account, first)
            else:
                heapq.heappop(order)
        return None

    def ahead(self, count: int) -> list[Sequence]:
        """All are the tenant's whose turn it is."""
        first = self.first()
        return [] if first is None or first.account is None else self._queues[first.account].ahead(count)

    def pop(self) -> None:
        first = self.first()
        assert first is not None
        self.take(first)

    def take(self, seq: Sequence) -> None:
        account = seq.account
        assert account is not None
        self._queues[account].take(seq)
        self._count(seq, -1)
        self._waiting -= 1
        self._latest = account
        self._leave_if_empty(account)

    def discard(self, seq: Sequence) -> None:
        assert seq.account is not None
        self._waiting -= 1
        self._count(seq, -1)
        self._queues[seq.account].discard(seq)
        self._leave_if_empty(seq.account)

    def _leave_if_empty(self, account: Account) -> None:
        if not len(self._queues[account]):
            del self._entries[account], self._queues[account]


def _place(account: Account, first: Sequence) -> _Place:
    return first.key[0], account.order, first.key[1]
