"""States between two stages: what comes is what was sent, of the step that was meant, or an error."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch

from engine.errors import EngineError
from engine.parallel.stage_link import StageLinks, StateLink


@pytest.fixture
def links() -> Iterator[StageLinks]:
    links = StageLinks(3)
    yield links
    links.abort()
    links.close()


def ends(links: StageLinks, slots: int = 2, rows: int = 64, columns: int = 8) -> tuple[StateLink, StateLink]:
    """Of the link between stages 1 and 2."""
    after, before = links.after(1), links.before(2)
    assert after is not None and before is not None
    return tuple(StateLink(end, slots, rows, columns, torch.bfloat16) for end in (after, before))  # type: ignore[return-value]


def states(rows: int, step: int) -> torch.Tensor:
    return torch.randn(rows, 8, generator=torch.Generator().manual_seed(step)).bfloat16()


def test_a_stage_has_neighbours_but_at_the_ends(links: StageLinks) -> None:
    assert links.before(0) is None and links.after(2) is None
    assert links.before(1) is not None and links.after(0) is not None


def test_states_come_as_they_were_sent_however_far_the_sender_is_ahead(links: StageLinks) -> None:
    sender, receiver = ends(links)
    sizes = [(step * 37) % 65 for step in range(300)]
    with ThreadPoolExecutor(1) as pool:
        sent = pool.submit(lambda: [sender.send(step, states(rows, step)) for step, rows in enumerate(sizes)])
        for step, rows in enumerate(sizes):
            assert torch.equal(receiver.receive(step, rows), states(rows, step))
        sent.result()


def test_what_is_kept_of_a_step_is_not_overwritten_by_the_next_one(links: StageLinks) -> None:
    sender, receiver = ends(links, slots=1)
    sender.send(0, states(4, 0))
    first = receiver.receive(0, 4)
    sender.send(1, states(4, 1))
    assert torch.equal(first, states(4, 0))


@pytest.mark.parametrize("meant", [(8, 4), (7, 5)])
def test_stages_that_compute_different_steps_are_an_error(links: StageLinks, meant: tuple[int, int]) -> None:
    sender, receiver = ends(links)
    sender.send(7, states(4, 0))
    with pytest.raises(EngineError, match=f"waits for {meant[1]} states of step {meant[0]} .* sent 4 of step 7"):
        receiver.receive(*meant)


def test_who_waits_is_woken_by_who_watches(links: StageLinks) -> None:
    sender, receiver = ends(links, slots=1)
    sender.send(0, states(1, 0))
    with ThreadPoolExecutor(2) as pool:
        waiting = [pool.submit(sender.send, 1, states(1, 1))]
        receiver.receive(0, 1)
        waiting[0].result()
        waiting = [pool.submit(sender.send, 2, states(1, 2))]
        other = links.before(1)
        assert other is not None
        waiting.append(pool.submit(StateLink(other, 1, 1, 8, torch.bfloat16).receive, 0, 1))
        threading.Timer(0.1, links.abort).start()
        for each in waiting:
            with pytest.raises(EngineError, match="before or behind this one has gone"):
                each.result()
    with pytest.raises(EngineError, match="has gone"):
        receiver.receive(1, 1)  # which came before
