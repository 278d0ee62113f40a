"""What sequences hold and wait for: rows, blocks, a place in the queue, a leader to be forked from. Every change of a
sequence's `Status` is here or in `RunningRows`."""

from __future__ import annotations

from collections.abc import Mapping

from engine.kv_cache.kv_cache import KVCache
from engine.kv_cache.leases import Leases
from engine.kv_cache.pins import Pins
from engine.kv_cache.sequence_blocks import NO_GROWTH, Growth
from engine.kv_cache.swapping import swap_in
from engine.scheduling.adapted import Adapted
from engine.scheduling.failures import Failures
from engine.scheduling.fair_queue import FairQueue
from engine.scheduling.preemption import PreemptionCosts, try_swap_out
from engine.scheduling.running_rows import RunningRows
from engine.scheduling.sequence import Sequence, Status
from engine.scheduling.siblings import line_up, own_blocks
from engine.scheduling.waiting_queue import WaitingQueue


class Holdings:
    def __init__(
        self,
        kv: KVCache,
        rows: RunningRows,
        costs: PreemptionCosts,
        leases: Leases,
        adapted: Adapted,
        fair: FairQueue | None = None,
    ) -> None:
        self.kv = kv
        self._adapted = adapted
        self.leases = leases
        self.costs = costs
        self.pins = Pins(kv)
        self.failures = Failures()
        self.rows = rows
        self.running = self.rows.sequences
        self.fair = fair
        """the queue, where the policy is fair"""
        self.waiting = WaitingQueue() if fair is None else fair
        self.following = 0
        """sequences that wait for another one to compute what they have in common"""
        self.live: dict[str, Sequence] = {}
        """by the ids that clients know; of a search, all ids lead to its first member"""
        # Admission leaves 1 % of the pool to those that run, or they would push out at once what was just admitted.
        self._watermark = kv.pool.num_blocks // 100
        self.preemptions = self.swapped = 0
        """sequences since the start; those of them that went to the host tier"""

    @property
    def room(self) -> int:
        """Blocks for who starts: not those that prompts half-way will still take, nor some for those that run."""
        room, rows = self.kv.pool.num_free, self.rows
        if not self.running:
            return room
        for seq in rows.owners[rows.ready & (rows.known - rows.computed > 1)].tolist():
            room -= self.kv.blocks_to_grow(seq.blocks, len(seq.tokens))
            room -= sum(own_blocks(follower, seq, self.kv) for follower in seq.followers)
        return room - self._watermark

    @property
    def growth(self) -> int:
        """Blocks that those that decode take with their next step."""
        rows = self.rows
        looks = rows.ready & (rows.known - rows.computed == 1) & (rows.computed >= rows.room)
        return sum(self.kv.blocks_to_grow(seq.blocks, len(seq.tokens) + 1) for seq in rows.owners[looks].tolist())

    def append(self, seq: Sequence, query_len: int, drafts: int = 0) -> Growth | None:
        """Room for as many tokens more of one that runs, and drafts behind them; None: there is none."""
        self.rows.settle_blocks(seq)
        return self.kv.append(seq.blocks, seq.blocks.num_tokens + query_len + drafts, drafts)

    def queue(self, leader: Sequence, others: list[Sequence]) -> None:
        leader.status = Status.WAITING
        self.following += line_up(leader, others)
        self.waiting.push(leader)

    def unqueue(self, samples: list[Sequence]) -> None:
        """A request that waits, and of which nothing was computed, waits for something else."""
        for seq in samples:
            if seq.status is Status.WAITING:
                seq.status = Status.PREPARING
                self.waiting.discard(seq)
            elif seq.leader is not None:
                self.following -= 1
            seq.status, seq.leader, seq.followers = Status.PREPARING, None, []

    def began(self, seq: Sequence) -> None:
        """A step takes it up for the first time."""
        self._adapted.began(seq)

    def preempt_latest(self, growths: Mapping[Sequence, tuple[int, Growth]]) -> list[Sequence]:
        """The sequence that came last, of the tenant that runs most for its weight. `growths`: what was appended for
        the step that is being planned."""
        return self.preempt(self.last, growths)

    @property
    def last(self) -> Sequence:
        """Of those that run, who is preempted first."""
        if self.fair is None:
            return self.running[-1]
        return max(self.running, key=lambda seq: (seq.key[0], _share(seq), seq.key[1]))

    def last_of_most(self, priority: int) -> Sequence | None:
        """The last one of the tenant that runs most for its weight, of those that are no more urgent."""
        some = (seq for seq in self.running if seq.key[0] >= priority)
        return max(some, key=lambda seq: (_share(seq), seq.key), default=None)

    def with_siblings(self, latest: Sequence) -> list[Sequence]:
        """Those that are preempted with it."""
        victims = [seq for seq in latest.siblings if seq.status is Status.RUNNING]
        return [latest] if len(victims) == len(self.running) and latest.group is None else victims

    def preempt(self, latest: Sequence, growths: Mapping[Sequence, tuple[int, Growth]]) -> list[Sequence]:
        """With its siblings, or alone where only they run: all of its blocks or none. Back to its place in the queue;
        what it generated becomes part of what it prefills, unless its blocks are swapped. `growths`: as above."""
        victims = self.with_siblings(latest)
        for seq in victims:
            self.rows.drop_drafts(seq)  # and what the step was to compute
            with self.failures.isolate(seq):
                self.kv.states.settle(seq.blocks)
                self.make_findable(seq)
                self.kv.give_back_passed(seq.blocks)
        swapped = False
        try:
            at_rest = latest.group is None or latest.group.at_rest(self.rows.in_flight)
            swapped = at_rest and try_swap_out(self.kv, self.costs, victims, growths)
        except Exception as error:  # of the victims, not of who needs their room
            for seq in victims:
                self.failures.note(seq, error)
        for seq in victims:
            seq.interrupted = True
            self.rows.leave(seq)
            if seq.hands_over:  # or what is kept of it could be what it has to wait for
                self.leases.drop(seq.request_id)
            seq.moved = NO_GROWTH  # its copies were made on the way to the host, or its blocks are given back
            if not swapped:
                with self.failures.isolate(seq):
                    self.kv.free(seq.blocks)
        if latest.group is not None:
            latest.group.drop_candidates()
            self.rows.give_back(latest.group)
        self.queue(victims[0], victims[1:])
        self.preemptions += len(victims)
        self.swapped += len(victims) if swapped else 0
        return victims

    def swap_in(self, members: list[Sequence]) -> None:
        """The first of the queue and its siblings run again, each on a row of its own; what is to be told of them comes
        with the next plan."""
        assert self.kv.host is not None
        swap_in(self.kv, self.kv.host, [member.blocks for member in members])
        self.waiting.pop()
        leader = members[0]
        for member in members:
            if member is not leader:
                leader.followers.remove(member)
                member.leader = None
                self.following -= 1
            self.rows.enter(member, member.blocks.num_tokens)
            if member is leader and leader.group is not None:
                self.rows.reserve(leader.group)

    def let_go_of_landed(self, seq: Sequence) -> None:
        """What came for it stays cached as anything else."""
        if seq.landed and self.kv.host is not None:
            for block in seq.landed:
                self.kv.host.pool.release(block)
            seq.landed = []

    def make_findable(self, seq: Sequence) -> None:
        """The full blocks of what it has computed."""
        try:
            self.kv.register(seq.blocks, seq.tokens)
        except Exception as error:
            self.failures.note(seq, error)

    def reconcile(self, seq: Sequence, samples: int, brought: int) -> None:
        """Of its drafts all but `brought` - 1 were wrong: what the others held is given back, and it may go on."""
        if seq.status is Status.RUNNING:
            self.rows.reconcile(seq, samples, brought)
            self.kv.trim(seq.blocks, int(self.rows.computed[seq.row]))
            self.rows.room[seq.row] = seq.blocks.quiet_until

    def forget(self, seq: Sequence) -> None:
        """What it computed cannot be found. What it found itself can: others, who did not fail, have computed that."""
        if seq.cached_tokens is not None:
            self.kv.forget(seq.blocks, seq.cached_tokens // self.kv.block_size)

    def unfollow(self, follower: Sequence) -> None:
        """It computes its prompt itself, or what of it is not in the prefix cache by then."""
        self.following -= 1
        follower.leader = None
        follower.deadline = None  # others of its request have begun: what they have brought is not taken back
        follower.status = Status.WAITING
        self.waiting.push(follower)

    def end_request(self, seq: Sequence) -> list[str]:
        """It failed: all of its request that still lives ends, and nothing of it can be found. Returns their ids."""
        group = seq.group
        members = group.members if group is not None else list(seq.siblings)
        request_ids = group.request_ids if group is not None else [each.request_id for each in members]
        for member in members[:1] if group is not None else members:
            self.end(member, findable=False)
        for member in members:
            self.forget(member)
            if member.pin is not None:
                self.pins.release(member.pin)
        return request_ids

    def end(self, seq: Sequence, findable: bool = True) -> None:
        """It is over; of a search, all of it. `findable`: what it computed may serve others."""
        if seq.group is not None:
            for member in seq.group.members:
                self._stop(member, findable)
            self.rows.give_back(seq.group)
            for request_id in seq.group.request_ids:
                del self.live[request_id]
            return
        self._stop(seq, findable)
        if seq.pin is not None:
            self.pins.settle(seq.pin)
        seq.siblings.remove(seq)
        followers, seq.followers = seq.followers, []
        for follower in followers:
            if follower.blocks.on_host:  # nobody need compute anything for it
                self.unfollow(follower)
        followers = [follower for follower in followers if not follower.blocks.on_host]
        if followers:  # the next one leads
            leader, *others = followers
            self.unfollow(leader)
            line_up(leader, others)
        del self.live[seq.request_id]

    def _stop(self, seq: Sequence, findable: bool) -> None:
        before, seq.status = seq.status, Status.FINISHED
        self.let_go_of_landed(seq)
        self._adapted.leave(seq)
        if seq.hands_over:
            self.leases.drop(seq.request_id)
        if before is Status.RUNNING:
            self.rows.leave(seq)
            if findable:
                self.kv.states.settle(seq.blocks)
                self.make_findable(seq)
        elif before is Status.WAITING:
            self.waiting.discard(seq)
        elif seq.leader is not None:
            self.following -= 1
            seq.leader.followers.remove(seq)
            seq.leader = None
        if self.fair is not None:
            self.fair.leave(seq)
        self.kv.free(seq.blocks)  # on the host, if anywhere


Urgency = tuple[int, tuple[float, bool]]


def urgency(seq: Sequence) -> Urgency:
    """Whose prompt is computed before others': the less, the sooner."""
    return seq.key[0], (0.0, False) if seq.account is None else seq.account.order


def _share(seq: Sequence) -> float:
    return 0.0 if seq.account is None else seq.account.share
