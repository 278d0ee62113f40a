"""Who is blamed for the deaths of cores, by hand; whole lives are played in tests/simulation."""

from __future__ import annotations

from collections.abc import Callable

from core_fakes import request

from engine.replicas.convicts import Convicts
from engine.replicas.restarts import WINDOW_S
from engine.replicas.suspects import Suspects


def _only(*names: str) -> Callable[[str], bool]:
    return lambda name: name in names


def _all(name: str) -> bool:
    return True


def _left(name: str) -> list[str]:
    return [name]


def test_who_says_nothing_before_its_end_is_not_blamed_for_one_that_gets_on_and_then_kills() -> None:
    """A search beside a request that kills at its hundredth token."""
    suspects = Suspects()
    for got_on in (_only("killer"), _only()):
        assert suspects.of_death(["killer", "search"], _all, got_on, got_on)[1] == []
    assert suspects.next(_left) == "search"
    assert suspects.is_trying(_left, _only())
    assert not suspects.is_trying(_left, _only("search")), "it is over, or well on: acquitted"
    assert suspects.of_death(["killer", "search"], _all, _only("search"), _only("search")) == (["search"], [])
    assert suspects.next(_left) == "killer"
    both = _only("search")
    assert suspects.of_death(["killer", "search"], _all, both, both) == (["search"], ["killer"])
    assert not suspects._deaths and suspects._on_trial is None


def test_who_gets_on_by_what_was_lost_is_no_less_suspect() -> None:
    """Found by the simulation (seed 8901): what kills at its n-th token gets on to it, by what the core before had not
    told. It was acquitted for that, and who was tried beside it convicted."""
    suspects = Suspects()
    for _ in range(2):
        suspects.of_death(["killer", "loads"], _all, _only(), _only())
    assert suspects.next(_left) == "killer"
    assert suspects.is_trying(_left, _only()), "it may kill at the token that it killed at before"
    assert suspects.of_death(["killer"], _all, _only("killer"), _only()) == ([], []), "not this time"
    assert suspects.next(_left) == "loads"
    got_on = _only("other")
    assert suspects.of_death(["loads", "other"], _all, got_on, _only()) == (["other"], []), "who of the two?"
    assert suspects.next(_left) == "killer"
    assert suspects.of_death(["killer"], _all, _only(), _only()) == ([], ["killer"])
    assert suspects.next(_left) == "loads" and not suspects.is_trying(_left, _only("loads"))
    assert not suspects._deaths


def test_two_that_are_silent_are_tried_one_after_the_other() -> None:
    suspects = Suspects()
    for _ in range(2):
        suspects.of_death(["a", "b"], _all, _only(), _only())
    assert suspects.next(_left) == "a" and suspects.is_trying(_left, _only())
    assert not suspects.is_trying(lambda name: [], _only()), "it is over"
    assert suspects.next(_left) == "b"
    assert suspects.of_death(["b"], _all, _only(), _only()) == ([], ["b"])
    assert suspects.next(_left) is None


def test_who_only_waited_when_cores_died_is_no_suspect_and_nobody_s_excuse() -> None:
    """Found by a reviewer: behind one killer five hundred that a queue held were tried one after the other."""
    suspects, queue = Suspects(), [f"q{number}" for number in range(500)]
    there = _only("killer", "beside")
    for death in range(2):
        go_on, killers = suspects.of_death([*queue, "killer", "beside"], there, _only("beside"), _only())
        assert go_on == ([*queue, "killer", "beside"] if not death else [*queue, "beside"]) and not killers
    assert suspects.next(_left) == "killer"
    assert suspects.of_death([*queue, "killer"], there, _only(), _only()) == (queue, ["killer"])
    assert suspects.next(_left) is None


def test_whose_court_dies_before_its_trial_has_begun_is_tried_again() -> None:
    suspects = Suspects()
    for _ in range(2):
        suspects.of_death(["killer"], _all, _only(), _only())
    assert suspects.next(_left) == "killer"
    assert suspects.of_death(["killer"], _only(), _only(), _only()) == ([], [])
    assert suspects.next(_left) == "killer"


def test_convicts_are_known_as_long_as_deaths_count_and_not_for_ever() -> None:
    convicts = Convicts()
    killer, other = request("a", prompt_len=5), request("b", prompt_len=6)
    convicts.add(killer, "it kills", 100.0)
    assert convicts.why(request("later", prompt_len=5), 100.0 + WINDOW_S) == "it kills"
    assert convicts.why(other, 101.0) is None
    assert convicts.why(killer, 101.0 + WINDOW_S) is None and not convicts._known
    for number in range(1000):
        convicts.add(request("c", prompt_len=number + 1), "it kills", 1000.0)
    assert len(convicts._known) <= 256 and convicts.why(request("d", prompt_len=1000), 1000.0)
