"""No two accesses of a step pipeline are unordered; leaving out any one wait makes some that are."""

from __future__ import annotations

import random
from pathlib import Path

import pytest
from fake_graphs import CaptureSafeReference, FakeCapturer
from hypothesis import given, settings
from hypothesis import strategies as st
from plan_driver import PlanDriver, tiny_runner
from race_checker import INPUTS, MAIN, RESULTS, RaceError, RecordingStreams, watching
from test_runner_equals_dense import dense_greedy, sequences

from engine.runner import model_runner
from engine.runner.results import PendingResult, ResultCopier, SampledStep
from engine.runner.streams import Event
from engine.step import RowParams

DRAWN = RowParams(seed=3, temperature=1.2, top_p=0.9, logprobs=2, repetition_penalty=1.1)
ASKING = RowParams(seed=3, temperature=0.0, prompt_logprobs=1)
INPUTS_READY, STEP_DONE = 0, 1


def pipeline(streams: RecordingStreams, cache_dir: Path, seed: int, graphs: bool) -> None:
    """A runner with a step in flight while the next is planned, over random plans."""
    rng = random.Random(seed)
    with watching(streams) as timeline:
        runner = tiny_runner(
            cache_dir,
            graphs="full_decode" if graphs else "none",
            backend=CaptureSafeReference(),
            capturer=FakeCapturer() if graphs else None,
            streams=streams,
        )
        runner.warm_up()
        driver = PlanDriver(runner, rng, 0.1, lag=True)
        driver.before_step = lambda: rng.random() < 0.3 and runner.idle_work()
        greedy = sequences(rng, 3)
        driver.run([*greedy, *sequences(rng, 1, DRAWN), *sequences(rng, 1, ASKING)])
        timeline.check_freed()
        assert timeline.accesses > 1000
    assert [s.generated for s in greedy] == [dense_greedy(s.prompt, s.num_tokens) for s in greedy]


@pytest.fixture(scope="module")
def cache(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """One for all: building the native libraries takes far longer than what is tested here."""
    return tmp_path_factory.mktemp("cache")


@settings(max_examples=settings.default.max_examples // 33)
@given(seed=st.integers(0, 10**6), graphs=st.booleans())
def test_conflicting_accesses_of_a_pipeline_are_ordered(cache: Path, seed: int, graphs: bool) -> None:
    pipeline(RecordingStreams(), cache, seed, graphs)


@pytest.mark.parametrize(
    ("missing", "conflict"),
    [
        ((INPUTS_READY, MAIN), "by main is not ordered behind inputs"),
        ((STEP_DONE, INPUTS), "by inputs is not ordered behind main"),
        ((STEP_DONE, RESULTS), "by results is not ordered behind main"),
    ],
)
@pytest.mark.parametrize("graphs", [False, True])
def test_a_wait_that_is_left_out_is_a_race(cache: Path, missing: tuple[int, str], conflict: str, graphs: bool) -> None:
    with pytest.raises(RaceError, match=conflict):
        pipeline(RecordingStreams(missing_wait=missing), cache, 1, graphs)


def test_a_host_that_never_waits_is_a_race(cache: Path) -> None:
    with pytest.raises(RaceError, match="by host is not ordered behind"):
        pipeline(RecordingStreams(host_never_waits=True), cache, 1, graphs=False)


def test_a_landing_copy_outside_the_input_stream_is_a_race(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """On the main stream the copy would overtake the kernels that still read the landing buffer."""
    queue = model_runner.ModelRunner._queue_inputs

    def early(runner: model_runner.ModelRunner, plan: object) -> object:
        runner._writes.send()
        return queue(runner, plan)  # type: ignore[arg-type]

    monkeypatch.setattr(model_runner.ModelRunner, "_queue_inputs", early)
    with pytest.raises(RaceError, match="apply_staged_writes by inputs is not ordered behind main"):
        pipeline(RecordingStreams(), tmp_path, 1, graphs=False)


def test_results_that_are_not_held_are_given_away_too_early(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    start = ResultCopier.start

    def forgetful(copier: ResultCopier, step: SampledStep, sampled: Event) -> PendingResult:
        pending = start(copier, step, sampled)
        assert pending._finish is not None
        pending._finish.__defaults__ = (None,)  # type: ignore[attr-defined]  # it holds the sources there
        return pending

    monkeypatch.setattr(ResultCopier, "start", forgetful)
    with pytest.raises(RaceError, match="of stream main is freed while results may use it"):
        pipeline(RecordingStreams(), tmp_path, 1, graphs=False)


def test_a_capture_that_the_next_step_does_not_wait_for_is_a_race(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def unrecorded(runner: model_runner.ModelRunner) -> bool:
        return runner._graphs is not None and runner._graphs.capture_next()

    monkeypatch.setattr(model_runner, "FIRST_CAPTURES_S", 0.0)
    monkeypatch.setattr(model_runner.ModelRunner, "idle_work", unrecorded)
    with pytest.raises(RaceError, match="prepare_inputs by inputs is not ordered behind main"):
        pipeline(RecordingStreams(), tmp_path, 1, graphs=True)
