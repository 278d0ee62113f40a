"""Requests that wait for their adapter: counted, in order, and no longer than somebody needs its slot."""

from __future__ import annotations

import pytest
import scheduler_loop
from scheduler_loop import Loop
from toy_adapters import BROKEN

from engine.adapters.request import LoRARequest


def waiting(loop: Loop) -> int:
    return len(loop.scheduler._adapted)


def test_who_leaves_while_he_waits_holds_up_nobody() -> None:
    loop = Loop(rows=8, adapters=(1, 2))
    loop.add("runs", [1, 2], 40, adapter_number=1)
    for _ in range(6):
        loop.turn()
    loop.add("waits", [1, 2], 4, adapter_number=2, followers=["waits.1"])
    loop.add("behind", [1, 2], 4, adapter_number=1)
    assert waiting(loop) == 3
    for _ in range(6):
        loop.turn()
    assert not loop.tokens["behind"], "the slot is to become free"
    loop.abort(["waits"])
    assert waiting(loop) == 2
    loop.abort(["waits.1"])
    assert waiting(loop) == 0
    while not loop.tokens["behind"]:
        loop.turn()
    assert not loop.ends["runs"]
    loop.run()
    loop.assert_nothing_leaked()


def test_those_whose_adapter_is_broken_end_and_are_not_counted_any_more() -> None:
    loop = Loop(adapters=(1, 3))
    for name in ("a", "b", "c"):
        loop.add(name, [1, 2], 4, adapter_number=BROKEN)
    loop.add("d", [1, 2], 4, adapter_number=1)
    loop.abort(["b"])
    assert waiting(loop) == 3
    loop.run()
    assert [loop.reason(name) for name in "abcd"] == ["error", "abort", "error", "length"]
    assert waiting(loop) == 0
    loop.assert_nothing_leaked()


@pytest.mark.parametrize(("version", "kind"), [("", "invalid"), ("as it was loaded", "fault")])
def test_files_that_were_fine_and_are_broken_are_nobodys_mistake(
    version: str, kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(scheduler_loop, "adapter", lambda number: LoRARequest("x", number, "somewhere", version))
    loop = Loop(adapters=(1, 1))
    loop.add("a", [1, 2], 4, adapter_number=BROKEN)
    loop.run()
    assert loop.ends["a"][0].error_kind == kind


def test_nobody_waits_for_the_backlog_of_another_adapter() -> None:
    """Two rows and one slot: of forty that came before, those that run and two more end first; then they take turns."""
    loop = Loop(rows=2, adapters=(1, 1))
    for index in range(20):
        loop.add(f"a{index}", [1, 2, index], 4, adapter_number=1, followers=[f"a{index}.1"])
    for _ in range(4):
        loop.turn()
    for index in range(6):
        loop.add(f"b{index}", [1, 2, index], 4, adapter_number=2)
    loop.add("base", [1, 2], 4)
    loop.run()
    ends = [name[0] for name in loop.ends if name != "base"]
    assert len(ends) == 46 and ends.index("b") <= 6
    turns = [letter for letter, before in zip(ends, ["", *ends], strict=False) if letter != before]
    assert turns[:6] == list("ababab") and waiting(loop) == 0
    loop.assert_nothing_leaked()
