"""`LLM`: outputs in the order of the prompts, refusal before anything runs, nothing left behind."""

from __future__ import annotations

import _thread
import json
import signal
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from failing_requests import Panic, raise_for_one
from scripted_core import EchoCore

from engine import LLM, EngineArgs, SamplingParams
from engine.config import EngineConfig
from engine.core.wire import StepOutputs
from engine.errors import CoreDiedError, EngineError, InvalidRequestError, QueueFullError

TEXTS = ["the quick brown fox", "hello", "jumps over the lazy dog"]


def make(path: Path, core: Any = EchoCore, **settings: Any) -> LLM:
    return LLM.from_args(EngineArgs(model=str(path), device="cpu", **settings), client_factory=core)


@pytest.fixture
def llm(tiny_model: Path) -> Iterator[LLM]:
    with make(tiny_model) as llm:
        yield llm


def core_of(llm: LLM) -> EchoCore:
    core = llm._session.client
    assert isinstance(core, EchoCore)
    return core


def test_outputs_come_in_the_order_of_the_prompts(llm: LLM) -> None:
    tokenizer = llm._tokenizer
    params = [SamplingParams(max_tokens=len(tokenizer.encode(t))) for t in TEXTS]
    outputs = llm.generate(TEXTS, params, use_tqdm=False)
    assert [o.prompt for o in outputs] == TEXTS
    assert [o.outputs[0].text for o in outputs] == TEXTS
    assert all(o.finished and o.outputs[0].finish_reason == "length" for o in outputs)


def test_every_prompt_shape_gives_the_same_tokens(llm: LLM) -> None:
    ids = llm._tokenizer.encode("hello")
    params = SamplingParams(max_tokens=2)
    shapes: list[Any] = ["hello", {"prompt": "hello"}, {"prompt_token_ids": ids}]
    one_by_one = [llm.generate(shape, params, use_tqdm=False)[0].outputs[0].token_ids for shape in shapes]
    assert one_by_one == [o.outputs[0].token_ids for o in llm.generate(shapes, params, use_tqdm=False)]
    assert one_by_one[0] == one_by_one[1] == one_by_one[2]


def test_one_invalid_prompt_is_refused_before_anything_runs(llm: LLM) -> None:
    with pytest.raises(InvalidRequestError, match="prompt 1") as caught:
        llm.generate(["hello", {"prompt_token_ids": [10_000]}, "world"], use_tqdm=False)
    assert caught.value.field == "prompt"
    assert core_of(llm).added == []
    with pytest.raises(InvalidRequestError):
        llm.generate(TEXTS, [SamplingParams()], use_tqdm=False)


def test_a_request_that_fails_in_the_core_fails_alone(tiny_model: Path) -> None:
    poison = 7
    with make(tiny_model, lambda config: EchoCore(config, poison=poison)) as llm:
        outputs = llm.generate(
            ["hello", {"prompt_token_ids": [poison, 8]}], SamplingParams(max_tokens=3), use_tqdm=False
        )
    assert [o.outputs[0].finish_reason for o in outputs] == ["length", "error"]
    assert outputs[1].outputs[0].stop_reason == "NaN logits"


@pytest.mark.parametrize(
    ("prompts", "params", "field"),
    [
        (None, None, "prompt"),
        (5, None, "prompt"),
        ("a", {"temperature": 0}, "sampling_params"),
        ("a", 5, "sampling_params"),
        (["a", "b"], [None, None], "sampling_params"),
        ("a", "b", "sampling_params"),
    ],
)
def test_what_are_no_prompts_or_parameters_is_refused_by_name(llm: LLM, prompts: Any, params: Any, field: str) -> None:
    with pytest.raises(InvalidRequestError) as caught:
        llm.generate(prompts, params, use_tqdm=False)
    assert caught.value.field == field


@pytest.mark.parametrize("model_type", ["qwen3", "bert", "roberta", "xlm-roberta", "gemma3_text"])
def test_without_a_tokenizer_prompts_are_ids(
    tiny_model: Path, tmp_path: Path, model_type: str, caplog: pytest.LogCaptureFixture
) -> None:
    """transformers makes an empty one, of the config alone."""
    (tmp_path / "config.json").write_text(json.dumps({"model_type": model_type}))
    with make(tiny_model, tokenizer=str(tmp_path)) as llm:
        [told] = [record.message for record in caplog.records if "tokenizer.json" in record.message]
        assert "--tokenizer" in told and str(tmp_path) in told
        for call in (llm.generate, llm.embed):
            with pytest.raises(InvalidRequestError, match=r"no tokenizer.json.*--tokenizer.*token ids"):
                call("hello", use_tqdm=False)
        [output] = llm.generate([[5, 6]], SamplingParams(max_tokens=3), use_tqdm=False)
        assert len(output.outputs[0].token_ids) == 3


def test_more_prompts_than_the_queue_holds_are_fed_as_room_appears(tiny_model: Path) -> None:
    with make(tiny_model, max_waiting=3) as llm:
        outputs = llm.generate(["hello"] * 20, SamplingParams(max_tokens=4, n=2), use_tqdm=False)
        assert len(outputs) == 20
        assert core_of(llm).most_at_once <= 3


def test_a_full_queue_to_the_core_is_waited_for(llm: LLM) -> None:
    core_of(llm).room = 2
    outputs = llm.generate(["hello"] * 9, SamplingParams(max_tokens=3), use_tqdm=False)
    assert [output.outputs[0].finish_reason for output in outputs] == ["length"] * 9
    assert len(core_of(llm).added) == 9 and core_of(llm).aborted == []
    core_of(llm).room = 0  # nobody is there who would empty it
    with pytest.raises(QueueFullError):
        llm.generate("hello", use_tqdm=False)
    core_of(llm).room = None
    assert llm.generate("hello", SamplingParams(max_tokens=3), use_tqdm=False)[0].finished


def test_sequences_that_are_not_returned_take_their_place_in_the_queue_too(tiny_model: Path) -> None:
    """Of best_of = 4 samples one is returned; all of them wait."""
    with make(tiny_model, max_waiting=8) as llm:
        params = SamplingParams(max_tokens=2, best_of=4, n=1)
        outputs = llm.generate(["hello"] * 7, params, use_tqdm=False)
        assert [len(output.outputs) for output in outputs] == [1] * 7
        assert core_of(llm).most_at_once == 8


@pytest.mark.parametrize("kind", [ValueError, Panic])
@pytest.mark.parametrize("where", ["engine.frontend.sample.Sample.extend", "engine.frontend.sample.Sample.output"])
def test_what_one_request_raises_is_its_own_output(
    llm: LLM, monkeypatch: pytest.MonkeyPatch, where: str, kind: type[BaseException]
) -> None:
    expected = llm.generate(TEXTS, SamplingParams(max_tokens=9), use_tqdm=False)
    raise_for_one(monkeypatch, where, kind)
    params = [SamplingParams(max_tokens=9, min_tokens=1 if i == 1 else 0) for i in range(3)]
    outputs = llm.generate(TEXTS, params, use_tqdm=False)
    assert [o.outputs[0].finish_reason for o in outputs] == ["length", "error", "length"]
    assert kind.__name__ in str(outputs[1].outputs[0].stop_reason)
    assert [outputs[i].outputs[0].text for i in (0, 2)] == [expected[i].outputs[0].text for i in (0, 2)]
    core_of(llm)._drain()
    assert not core_of(llm).running


def test_a_pin_that_does_not_complete_is_given_back(tiny_model: Path) -> None:
    with make(tiny_model, lambda config: EchoCore(config, poison=7)) as llm:
        with pytest.raises(InvalidRequestError, match="not pinned"):
            llm.pin_prefix("a", {"prompt_token_ids": [7, 8]})
        core_of(llm)._drain()
        assert not core_of(llm).pinned and llm.pinned_prefixes() == {}
        assert llm.pin_prefix("a", "hello") == llm.pinned_prefixes()["a"]


@pytest.mark.parametrize(
    ("prompt", "params", "field"),
    [
        ("half \ud83d", {}, "prompt"),
        ({"prompt": "x", "cache_salt": "\ud83d"}, {}, "cache_salt"),
        ("x", {"stop": "\ud83d"}, "stop"),
        ("x", {"stop": ["a", "\udc00"]}, "stop"),
        ("x", {"stop": [5]}, "stop"),
        ("x", {"bad_words": ["\ud83d"]}, "bad_words"),
        ("x" * 100_000, {}, "prompt"),
    ],
)
def test_texts_that_are_none_are_refused_by_field(llm: LLM, prompt: Any, params: dict[str, Any], field: str) -> None:
    with pytest.raises(InvalidRequestError) as caught:
        llm.generate(prompt, SamplingParams(**params), use_tqdm=False)
    assert caught.value.field == field
    assert core_of(llm).added == []


def test_a_stop_string_ends_the_core_request(llm: LLM) -> None:
    output = llm.generate("hello world", SamplingParams(max_tokens=200, stop="wor"), use_tqdm=False)[0].outputs[0]
    assert (output.text, output.finish_reason, output.stop_reason) == ("hello ", "stop", "wor")
    core = core_of(llm)
    core._drain()
    assert core.aborted and not core.running


def test_chat_renders_the_template_without_further_special_tokens(llm: LLM) -> None:
    conversations = [[{"role": "user", "content": t}] for t in ("hello", "world")]
    outputs = llm.chat(conversations, SamplingParams(max_tokens=1), use_tqdm=False)
    assert [o.prompt for o in outputs] == [f"<|user|>{t}</s><|assistant|>" for t in ("hello", "world")]
    assert llm._tokenizer.decode(outputs[0].prompt_token_ids, skip_special_tokens=False) == outputs[0].prompt
    assert llm.chat(conversations[0], use_tqdm=False)[0].prompt == outputs[0].prompt


def test_without_parameters_the_models_recommendation_is_used(llm: LLM) -> None:
    llm.generate("hello", use_tqdm=False)
    assert core_of(llm).added[0].params.temperature == 0.25
    assert core_of(llm).added[0].params.top_k == 7


class InterruptedCore(EchoCore):
    """Ctrl-C arrives in the middle of a step."""

    whole_steps = 0

    def recv(self) -> StepOutputs:
        if self.steps == 2:
            _thread.interrupt_main()
        outputs = super().recv()
        self.whole_steps += 1
        return outputs


@pytest.fixture
def interrupts() -> Iterator[None]:
    """Whatever started the tests: in a shell's background job Python leaves SIGINT ignored."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


@pytest.mark.timeout(30)
@pytest.mark.usefixtures("interrupts")
def test_an_interrupt_ends_what_is_in_flight_between_two_steps(tiny_model: Path) -> None:
    with make(tiny_model, InterruptedCore) as llm:
        with pytest.raises(KeyboardInterrupt):
            llm.generate(TEXTS, SamplingParams(max_tokens=100), use_tqdm=False)
        core = core_of(llm)
        assert isinstance(core, InterruptedCore)
        assert core.whole_steps == core.steps == 3
        core._drain()
        assert not core.running and len(core.aborted) == 3
        core.steps = 10
        assert llm.generate("hello", SamplingParams(max_tokens=1), use_tqdm=False)[0].finished


def test_a_dead_core_is_reported_and_generate_ends(tiny_model: Path) -> None:
    with (
        make(tiny_model, lambda config: EchoCore(config, die_after=2)) as llm,
        pytest.raises(CoreDiedError, match="fire"),
    ):
        llm.generate(TEXTS, SamplingParams(max_tokens=100), use_tqdm=False)


def test_after_shutdown_nothing_is_served(tiny_model: Path) -> None:
    llm = make(tiny_model)
    llm.shutdown()
    llm.shutdown()
    assert core_of(llm).closed
    with pytest.raises(CoreDiedError):
        llm.generate("hello")


def test_two_engines_live_in_one_process(tiny_model: Path) -> None:
    with make(tiny_model) as a, make(tiny_model) as b:
        results: dict[str, list[int]] = {}

        def work(name: str, llm: LLM) -> None:
            results[name] = llm.generate(TEXTS, SamplingParams(max_tokens=20), use_tqdm=False)[2].outputs[0].token_ids

        threads = [threading.Thread(target=work, args=pair) for pair in (("a", a), ("b", b))]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(30)
    assert results["a"] == results["b"]


class WaitingCore(EchoCore):
    """Its third step is over when it is let go."""

    def __init__(self, config: EngineConfig) -> None:
        super().__init__(config)
        self.waits, self.go = threading.Event(), threading.Event()

    def recv(self) -> StepOutputs:
        if self.steps == 2:
            self.waits.set()
            assert self.go.wait(30)
        return super().recv()


def test_a_second_thread_is_told_so_and_disturbs_nothing(tiny_model: Path) -> None:
    params, found = SamplingParams(max_tokens=20), list[list[int]]()
    with make(tiny_model, WaitingCore) as llm:
        core = core_of(llm)
        assert isinstance(core, WaitingCore)
        run = threading.Thread(
            target=lambda: found.append(llm.generate(TEXTS, params, use_tqdm=False)[2].outputs[0].token_ids)
        )
        run.start()
        assert core.waits.wait(30)
        with pytest.raises(EngineError, match="one thread at a time"):
            llm.generate(TEXTS, params, use_tqdm=False)
        core.go.set()
        run.join(30)
        assert found == [llm.generate(TEXTS, params, use_tqdm=False)[2].outputs[0].token_ids]


def test_sizes_may_be_written_with_units(tiny_model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[EngineConfig] = []

    def core(config: EngineConfig) -> EchoCore:
        seen.append(config)
        return EchoCore(config)

    monkeypatch.setattr("engine.replicas.choice.InProcessClient", core)
    LLM(str(tiny_model), device="cpu", kv_cache_memory="1.5MiB", max_model_len=64).shutdown()
    assert seen[0].cache.kv_cache_memory == 3 * 2**19
    assert seen[0].model.max_model_len == 64
