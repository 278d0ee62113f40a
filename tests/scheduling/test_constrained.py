"""Requests with a grammar: they wait for it alone, and what fails of it fails alone."""

from __future__ import annotations

import pytest
from scheduler_loop import Loop
from toy_grammars import allowed
from toy_model import generate

from engine.core.wire import BeamParams
from engine.errors import InvalidRequestError


def test_who_waits_for_a_grammar_holds_up_nobody_and_is_counted_as_waiting() -> None:
    loop = Loop(depth=1)
    loop.add("slow", [1, 2, 3], 6, grammar="a:0:8", followers=["slow.1"], alike=False)
    loop.add("quick", [1, 2, 3], 4)
    assert loop.scheduler.stats().waiting == 3 and loop.scheduler.stats().waiting == 3
    for _ in range(6):
        loop.turn()
    assert loop.reason("quick") == "length" and not loop.tokens["slow"]
    loop.run()
    for sample, name in enumerate(["slow", "slow.1"]):
        assert loop.tokens[name] == generate([1, 2, 3], 9, set(), 0, sample, "a:0:8")[0]
    loop.assert_nothing_leaked()


def test_a_core_with_nothing_but_grammars_under_way_has_no_work() -> None:
    loop = Loop()
    loop.add("a", [1], 3, grammar="a:0:5")
    assert not loop.scheduler.has_work and loop.scheduler.plan() is None
    loop.run()
    assert loop.reason("a") == "length"


def test_who_waits_for_a_row_has_begun_nothing_though_its_grammar_is_there() -> None:
    """What compiles may kill the core, and so may an adapter that is loaded: one of those for whom it is."""
    loop = Loop(rows=1, adapters=(1, 2))
    loop.add("row", [1, 2], 20)
    loop.turn()
    for name in ("a", "b", "c"):
        loop.add(name, [1, 2], 4, grammar="a:0:8")
    for name, number in (("d", 1), ("e", 1), ("f", 2)):
        loop.add(name, [1, 2], 4, adapter_number=number)
    for _ in range(8):
        loop.turn()
    assert loop.begun == ["row", "a", "d"]
    loop.run()
    assert sorted(loop.begun) == sorted([*"aabcddeeff", "row"]), "and whoever starts; e when its adapter comes back"


def test_each_in_its_place_once_their_grammars_are_there() -> None:
    """By arrival: the one that came first starts first, though its grammar came last."""
    loop = Loop(rows=1)
    loop.add("first", [1], 3, grammar="a:0:4")
    loop.add("second", [2], 9)
    loop.add("third", [3], 3)
    loop.run()
    order = sorted(loop.deltas, key=lambda name: list(loop.ends).index(name) if loop.ends[name] else 9)
    assert set(order) == {"first", "second", "third"}
    assert loop.plans[-1].rows.each() and loop.reason("third") == "length"
    started = [loop.requests[name].request_id for name in loop.tokens if loop.tokens[name]]
    assert started == ["second", "first", "third"]


@pytest.mark.parametrize("beams", [None, BeamParams(width=2)])
def test_what_is_aborted_while_its_grammar_compiles_leaves_nothing(beams: BeamParams | None) -> None:
    loop = Loop()
    loop.add("a", [1, 2], 4, grammar="a:0:3", beams=beams, followers=["b"])
    loop.abort(["a"])
    loop.run()
    assert loop.reason("a") == "abort"
    assert loop.reason("b") == ("length" if beams is None else "abort")
    loop.assert_nothing_leaked()


def test_what_does_not_compile_is_refused_and_leaves_nothing() -> None:
    loop = Loop()
    with pytest.raises(InvalidRequestError, match="broken"):
        loop.add("a", [1], 3, grammar="broken", followers=["b"])
    assert not loop.scheduler._live and not loop.scheduler.has_work


def test_what_fails_to_compile_later_ends_with_its_reason() -> None:
    loop = Loop()
    loop.add("a", [1], 3, grammar="a:0:2", followers=["b"])
    loop.grammars.start = _refuse  # type: ignore[method-assign]
    loop.run()
    for name in "ab":
        [end] = loop.ends[name]
        assert (end.finish_reason, end.error, end.error_kind) == ("error", "it is broken", "invalid")
    loop.assert_nothing_leaked()


def _refuse(grammar: str) -> None:
    raise InvalidRequestError("it is broken", "structured_outputs")


@pytest.mark.parametrize("depth", [0, 1, 2])
def test_a_grammar_that_cannot_go_on_ends_its_request_alone(depth: int) -> None:
    loop = Loop(depth=depth)
    loop.add("breaks", [1, 2], 9, grammar="breaks:3:0")
    loop.add("other", [1, 2], 9, grammar="b:0:0")
    loop.run()
    [end] = loop.ends["breaks"]
    assert end.finish_reason == "error" and "it broke" in str(end.error)
    assert loop.tokens["breaks"] == generate([1, 2], 11, set(), 0, 0, "breaks:3:0")[0][: len(loop.tokens["breaks"])]
    assert loop.tokens["other"] == generate([1, 2], 11, set(), 0, 0, "b:0:0")[0]
    loop.assert_nothing_leaked()


@pytest.mark.parametrize("preemption", ["recompute", "swap"])
def test_who_was_preempted_goes_on_where_the_grammar_was(preemption: str) -> None:
    loop = Loop(depth=1, num_blocks=9, block_size=4, num_host_blocks=20, preemption=preemption)  # type: ignore[arg-type]
    for name in range(4):
        loop.add(str(name), [name, 1, 2], 20, grammar="c:0:0")
    loop.run()
    assert loop.scheduler.stats().preemptions > 0, "the test must force preemption"
    for name in range(4):
        tokens = loop.tokens[str(name)]
        assert tokens == generate([name, 1, 2], 23, set(), 0, 0, "c:0:0")[0]
        assert all(token in allowed("c:0:0", count) for count, token in enumerate(tokens))
    loop.assert_nothing_leaked()
