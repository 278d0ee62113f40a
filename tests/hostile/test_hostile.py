"""Nothing that hostile clients do at once harms those who behave; `run.py` is the same as a program, with figures."""

from __future__ import annotations

import pytest
from run import SMALL, Report, Scale, run


@pytest.fixture(scope="module")
def report(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Report:
    scale = Scale() if request.config.getoption("exhaustive") else SMALL
    return run(scale, tmp_path_factory.mktemp("h"))


def test_every_hostile_request_is_answered_as_it_must_be(report: Report) -> None:
    assert report.wrong == []


def test_those_who_behave_get_whole_answers_that_are_always_the_same(report: Report) -> None:
    assert report.client_errors == []
    for client in report.clients:
        assert client["answers"] > 0 and client["texts"] == 1


def test_the_front_end_keeps_its_size_and_ends_in_order(report: Report) -> None:
    assert report.grown_mib < 200
    assert report.exit_code == 0
