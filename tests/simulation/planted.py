"""Bugs that somebody could write, one line each: the simulation has to find them. `python planted.py NUMBER SEEDS`
plants one in a process of its own and prints the first seed that shows it, or "none"."""

from __future__ import annotations

import importlib.machinery
import importlib.util
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from types import CodeType, ModuleType
from typing import NamedTuple

ROOT = Path(__file__).parents[2]


class Bug(NamedTuple):
    module: str
    right: str
    wrong: str


PLANTED = [
    # the scheduler
    Bug("engine.scheduling.running_rows", "self.computed[row] -= samples - brought", "self.computed[row] -= 0"),
    Bug("engine.scheduling.running_rows", "self._released.append(row)", "pass"),
    Bug("engine.scheduling.running_rows", "            del self.stop_tokens[token]\n", "            pass\n"),
    Bug("engine.scheduling.running_rows", "seq.in_flight = self.in_flight(seq)", "seq.in_flight = 0"),
    Bug("engine.scheduling.running_rows", "self.known[rows] + 1", "self.known[rows] + 2"),
    Bug("engine.scheduling.outcomes", "special |= np.isin(numbers, result.faults)", "pass"),
    Bug("engine.scheduling.outcomes", "rows.entries[numbers] != step.entries", "rows.entries[numbers] < 0"),
    Bug("engine.scheduling.outcomes", "plain[done] = False", "pass"),
    Bug("engine.scheduling.outcomes", ">= seq.max_total else None", "> seq.max_total else None"),
    Bug("engine.scheduling.holdings", "self.rows.drop_drafts(seq)", "self.rows.settle_blocks(seq)"),
    Bug("engine.scheduling.holdings", "        self.waiting.pop()\n        leader", "        leader"),
    Bug("engine.scheduling.holdings", "WAITING:\n            self.waiting.discard(seq)", "WAITING:\n            pass"),
    Bug("engine.scheduling.holdings", "        self._adapted.leave(seq)\n", ""),
    Bug("engine.scheduling.holdings", "            self.rows.give_back(seq.group)", "            pass"),
    Bug("engine.scheduling.holdings", "self.fair.leave(seq)", "pass"),
    Bug(
        "engine.scheduling.admission",
        "if need > room:\n            self._blocked",
        "if need > room + 3:\n            self._blocked",
    ),
    Bug("engine.scheduling.siblings", "return len(others)", "return 0"),
    Bug("engine.scheduling.siblings", "// block_size * block_size", "// 1 * 1"),
    Bug("engine.scheduling.siblings", "limits.append(seq.next_prompt_logprob - 1)", "pass"),
    Bug("engine.scheduling.beam_group", "beam.rewrite_from = computed", "beam.rewrite_from = computed + 1"),
    Bug("engine.scheduling.fair_queue", "served += OUTPUT_COST * count", "served += 0.0 * count"),
    # the KV cache
    Bug("engine.kv_cache.block_pool", "            if counts[block] > 1 and", "            if counts[block] > 0 and"),
    Bug(
        "engine.kv_cache.block_pool",
        "            self._evict(block)\n            self._part(block, is_free=True)",
        "            pass",
    ),
    Bug(
        "engine.kv_cache.block_pool",
        "                counts[block] += 1",
        "                counts[block] += block % 5 > 0",
    ),
    Bug("engine.kv_cache.kv_cache", "copied = self._shared_ends(blocks)", "pass"),
    Bug("engine.kv_cache.kv_cache", "counts[table[-1]] > 1", "counts[table[-1]] > 2"),
    Bug("engine.kv_cache.kv_cache", "        if need > pool.num_free:\n            return None", "        pass"),
    Bug(
        "engine.kv_cache.kv_cache",
        "            for block in reversed(table[count:]):\n                self.pool.release(block)",
        "            pass",
    ),
    Bug("engine.kv_cache.kv_cache", "acquire_all(blocks[start:count])", "acquire_all(blocks[start:full])"),
    Bug("engine.kv_cache.swapping", "there.acquire(block)", "pass"),
    Bug("engine.kv_cache.swapping", "        kv.pool.release(there)", "        pass"),
    Bug("engine.kv_cache.hash_chain", "if adapter is not None:", "if False:"),
    # the wire, the loop and the journal
    Bug("engine.core.loop", "deltas += self._scheduler.end_failed()\n        self._send_masks()", "self._send_masks()"),
    Bug(
        "engine.core.loop",
        "return self._scheduler.abort(message.request_ids)",
        "return self._scheduler.abort(message.request_ids[:1])",
    ),
    Bug("engine.replicas.deliveries", "sequence.tokens.append(delta.token_ids[index])", "pass"),
    Bug("engine.replicas.deliveries", "request.left.discard(name)", "pass"),
    Bug("engine.replicas.deliveries", "if is_new else [Resumed", "if is_new or len(had) > 1 else [Resumed"),
    Bug(
        "engine.replicas.deliveries",
        "sequence.tokens.extend(delta.token_ids)",
        "sequence.tokens.extend(delta.token_ids[:1])",
    ),
    Bug("engine.replicas.fleet", "self._deliveries.move(name, place.replica)", "pass"),
    Bug(
        "engine.replicas.fleet",
        "                self._suspects.forget(ended.name)\n            if ended is not None and replica_number",
        "                pass\n            if ended is not None and replica_number",
    ),
    Bug("engine.front_ends.hub", "                    del self._owners[delta.request_id]", "                    pass"),
    Bug("engine.front_ends.hub", "        self._abort(number, names)", "        pass"),
    Bug("engine.front_ends.hub", "parts[number].token_ids.append(token)", "parts[number].token_ids.append(token + 1)"),
    Bug(
        "engine.front_ends.hub",
        "            for name in message.request_ids:\n                del self._owners[name]\n            kind",
        "            kind",
    ),
    Bug(
        "engine.front_ends.client",
        "            self._give_up(error := CoreDiedError(self._state.died))\n",
        "            error = CoreDiedError('')\n            return\n",
    ),
    Bug("engine.frontend.admission", "itertools.count(front_end << 48)", "itertools.count()"),
    Bug("engine.frontend.output_processor", "            del self._owners[sample.core_id]\n", "            pass\n"),
]


class _Loader(importlib.machinery.SourceFileLoader):
    bug: Bug

    def get_code(self, fullname: str) -> CodeType:
        text = Path(self.path).read_text()
        return compile(text.replace(self.bug.right, self.bug.wrong, 1), self.path, "exec")


class _Finder:
    def __init__(self, bug: Bug) -> None:
        self._bug = bug

    def find_spec(
        self, name: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        if name != self._bug.module:
            return None
        spec = importlib.machinery.PathFinder.find_spec(name, path)
        assert spec is not None and spec.origin is not None
        spec.loader = _Loader(name, spec.origin)
        spec.loader.bug = self._bug
        return spec


def main() -> None:
    number, seeds = int(sys.argv[1]), int(sys.argv[2])
    sys.meta_path.insert(0, _Finder(PLANTED[number]))  # type: ignore[arg-type]
    sys.path += [str(ROOT), *(str(ROOT / "tests" / room) for room in ("scheduling", "frontend", "kv_cache"))]
    from tiny_front import save_model
    from world import BrokenError, Building, simulate

    with tempfile.TemporaryDirectory() as folder:
        building = Building(save_model(Path(folder) / "tiny", vocab_size=16384))
        for seed in range(seeds):
            try:
                simulate(seed, building)
            except BrokenError as error:
                print(seed, str(error).splitlines()[0])
                return
    print("none")


if __name__ == "__main__":
    main()
