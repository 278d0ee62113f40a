"""What vLLM's users import: the same calls, the same shapes, and refusals by name."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from scripted_core import EchoCore

from engine import (
    LLM,
    AsyncEngineArgs,
    BeamSearchParams,
    EngineArgs,
    FlexibleArgumentParser,
    LoRARequest,
    SamplingParams,
    StructuredOutputsParams,
    TextPrompt,
    TokensPrompt,
)
from engine.errors import ConfigError, InvalidRequestError, RequestFailedError
from engine.vllm.sampling import INSTEAD, WITHOUT_EFFECT

pytestmark = pytest.mark.timeout(60)
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


# -- sampling parameters ---------------------------------------------------------------------------------------------


def test_vllms_parameters_that_ask_for_nothing_are_taken_and_others_refused_by_name() -> None:
    for name, neutral in WITHOUT_EFFECT.items():
        for value in neutral or (True, False, 5):
            assert SamplingParams(**{name: value}) == SamplingParams()
    assert INSTEAD.keys() == {name for name, neutral in WITHOUT_EFFECT.items() if neutral}
    for name in [*INSTEAD, "frobnicate"]:
        with pytest.raises(InvalidRequestError, match=name) as caught:
            SamplingParams(**{name: 7})
        assert caught.value.field == name


def test_guided_decoding_is_structured_outputs() -> None:
    form = StructuredOutputsParams(choice=["a", "b"])
    assert SamplingParams(guided_decoding=form) == SamplingParams(structured_outputs=form)  # type: ignore[call-arg]
    with pytest.raises(InvalidRequestError, match="one parameter"):
        SamplingParams(guided_decoding=form, structured_outputs=form)  # type: ignore[call-arg]


def test_from_optional_takes_none_for_a_default() -> None:
    names = ("n", "presence_penalty", "frequency_penalty", "repetition_penalty", "temperature", "top_p", "stop")
    assert SamplingParams.from_optional(**dict.fromkeys(names)) == SamplingParams()
    assert SamplingParams.from_optional(max_tokens=None).max_tokens is None
    assert SamplingParams.from_optional(logit_bias={"5": 300, "6": -1}).logit_bias == {5: 100.0, 6: -1}
    with pytest.raises(InvalidRequestError, match="logit_bias"):
        SamplingParams.from_optional(logit_bias={"five": 1})


def test_parameters_change_until_a_request_is_made_of_them(llm: LLM) -> None:
    params = SamplingParams(max_tokens=1, stop=["x"])
    other = params.clone()
    params.max_tokens, params.temperature = 3, 0.5
    assert other == SamplingParams(max_tokens=1, stop=["x"]) and other.stop is not params.stop
    assert len(llm.generate("hello", params, use_tqdm=False)[0].outputs[0].token_ids) == 3
    for name, value in (("temperature", -1.0), ("top_p", "x"), ("max_tokens", 0)):
        changed = SamplingParams()
        setattr(changed, name, value)
        with pytest.raises(InvalidRequestError) as caught:
            llm.generate("hello", changed, use_tqdm=False)
        assert caught.value.field == name
    assert llm.llm_engine.add_request("a", "hello", params) == "a"
    params.max_tokens = 5
    while llm.llm_engine.has_unfinished_requests():
        [output] = llm.llm_engine.step()
    assert len(output.outputs[0].token_ids) == 3


def test_of_a_truncated_prompt_the_end_is_kept(llm: LLM) -> None:
    ids = llm.get_tokenizer().encode(TEXTS[0])
    for kept, expected in ((3, ids[-3:]), (500, ids), (-1, ids)):
        [output] = llm.generate(TEXTS[0], SamplingParams(max_tokens=1, truncate_prompt_tokens=kept), use_tqdm=False)
        assert output.prompt_token_ids == expected
    longest = llm.model_config.max_model_len - 1
    text = TEXTS[0] * 100
    with pytest.raises(InvalidRequestError):
        llm.generate(text, use_tqdm=False)
    [output] = llm.generate(text, SamplingParams(truncate_prompt_tokens=-1), use_tqdm=False)
    assert output.prompt_token_ids == llm.get_tokenizer().encode(text)[-longest:]
    with pytest.raises(InvalidRequestError):
        llm.generate(text, SamplingParams(truncate_prompt_tokens=longest + 1), use_tqdm=False)
    [output] = llm.generate(text * 100, SamplingParams(truncate_prompt_tokens=4), use_tqdm=False)
    assert output.prompt_token_ids == ids[-4:]


# -- LLM -------------------------------------------------------------------------------------------------------------


def test_prompts_in_vllms_shapes(llm: LLM) -> None:
    ids = [llm.get_tokenizer().encode(text) for text in TEXTS]
    params = SamplingParams(max_tokens=2)

    def prompts_of(*shape: Any, **more: Any) -> list[list[int]]:
        return [output.prompt_token_ids for output in llm.generate(*shape, **more, use_tqdm=False)]

    assert prompts_of(ids, params) == ids
    assert prompts_of(ids[0], params) == ids[:1]
    assert prompts_of([ids[0], TEXTS[1], TokensPrompt(prompt_token_ids=ids[2])], params) == ids
    assert prompts_of([TextPrompt(prompt=TEXTS[0], multi_modal_data=None)], params) == ids[:1]  # type: ignore[typeddict-unknown-key]
    assert prompts_of(prompt_token_ids=ids, sampling_params=params) == ids
    assert prompts_of(prompt_token_ids=ids[1], sampling_params=params) == ids[1:2]
    [output] = llm.generate(prompts="shown", prompt_token_ids=ids[2], use_tqdm=False)
    assert (output.prompt, output.prompt_token_ids) == ("shown", ids[2])
    assert llm.generate([], use_tqdm=False) == []


@pytest.mark.parametrize(
    ("given", "field"),
    [
        ({"prompts": [[1, "x"]]}, "prompt"),
        ({"prompts": [[]]}, "prompt"),
        ({"prompts": [{"prompt": "x", "multi_modal_data": {"image": 1}}]}, "prompt"),
        ({"prompts": ["a", "b"], "prompt_token_ids": [1]}, "prompt_token_ids"),
        ({"prompt_token_ids": "abc"}, "prompt_token_ids"),
        ({"prompts": "x", "lora_request": object()}, "lora_request"),
        ({}, "prompt"),
    ],
)
def test_what_no_prompt_can_be_is_refused_by_name(llm: LLM, given: dict[str, Any], field: str) -> None:
    with pytest.raises(InvalidRequestError) as caught:
        llm.generate(**given, use_tqdm=False)
    assert caught.value.field == field and core_of(llm).added == []


def test_chat_with_vllms_parameters(llm: LLM) -> None:
    parts = [{"type": "text", "text": "hello"}, {"type": "text", "text": "world"}]
    for form, content in (("auto", "hello"), ("string", "hello"), ("string", parts)):
        conversation = [{"role": "user", "content": content}]
        params = SamplingParams(max_tokens=1)
        [output] = llm.chat(conversation, params, False, chat_template_content_format=form)
        text = content if isinstance(content, str) else "hello\nworld"
        assert output.prompt == f"<|user|>{text}</s><|assistant|>"
    for name, value in (
        ("chat_template_content_format", "openai"),
        ("lora_request", LoRARequest("one", 1, "somewhere")),
        ("mm_processor_kwargs", {"a": 1}),
    ):
        with pytest.raises(InvalidRequestError) as caught:
            llm.chat([{"role": "user", "content": "x"}], **{name: value})
        assert caught.value.field == name


def test_calls_that_mean_nothing_here_say_what_to_use(llm: LLM) -> None:
    for name in ("collective_rpc", "apply_model", "set_tokenizer"):
        with pytest.raises(InvalidRequestError, match=name):
            getattr(llm, name)("whatever", level=1)


def test_the_tokenizer_is_transformers(llm: LLM) -> None:
    from transformers import PreTrainedTokenizerBase

    tokenizer = llm.get_tokenizer()
    assert isinstance(tokenizer, PreTrainedTokenizerBase) and tokenizer is llm.llm_engine.get_tokenizer()
    assert tokenizer.encode(TEXTS[0]) == llm.generate(TEXTS[0], use_tqdm=False)[0].prompt_token_ids


def test_a_progress_bar_of_the_callers_own(llm: LLM) -> None:
    from tqdm import tqdm

    bars = []

    class Bar(tqdm):  # type: ignore[type-arg]
        def __init__(self, *args: Any, **kwargs: Any) -> None:
            super().__init__(*args, **kwargs)
            bars.append(self)

    llm.generate(TEXTS, SamplingParams(max_tokens=1), use_tqdm=Bar)
    assert [bar.n for bar in bars] == [3]


def test_metrics_are_those_of_the_registry(llm: LLM) -> None:
    from prometheus_client.parser import text_string_to_metric_families

    from engine.vllm.metrics import Counter, Gauge, Histogram, Vector

    llm.generate(TEXTS, SamplingParams(max_tokens=3), use_tqdm=False)
    stats = llm._session.metrics.stats
    stats.accepted_at[:] = [5, 2]
    shown = {
        (sample.name, frozenset(sample.labels.items())): sample.value
        for family in text_string_to_metric_families(llm._session.metrics.render().decode())
        for sample in family.samples
    }
    told: dict[tuple[str, frozenset[tuple[str, str]]], float] = {}
    for metric in llm.get_metrics():
        labels = frozenset(metric.labels.items())
        if isinstance(metric, Gauge):
            told[metric.name, labels] = metric.value
        elif isinstance(metric, Counter):
            told[f"{metric.name}_total", labels] = metric.value
        elif isinstance(metric, Vector):
            for place, value in enumerate(metric.values):
                told[f"{metric.name}_total", labels | {("position", str(place))}] = value
        elif isinstance(metric, Histogram):
            told[f"{metric.name}_count", labels] = metric.count
            told[f"{metric.name}_sum", labels] = metric.sum
            for bound, value in metric.buckets.items():
                told[f"{metric.name}_bucket", labels | {("le", bound)}] = value
    assert told == {key: value for key, value in shown.items() if not key[0].endswith("_created")}
    assert any(name == "pageloom_e2e_request_latency_seconds_count" and value == 3 for (name, _), value in told.items())


# -- arguments -------------------------------------------------------------------------------------------------------


def test_engine_arguments_under_vllms_names() -> None:
    args = AsyncEngineArgs(
        model="m", gpu_memory_utilization=0.5, enforce_eager=True, tensor_parallel_size=1, swap_space=2
    )
    assert isinstance(args, EngineArgs)
    assert (args.memory_fraction, args.compile, args.swap_space) == (0.5, "none", 2 << 30)
    with pytest.raises(TypeError, match="frobnicate"):
        EngineArgs(model="m", frobnicate=2)  # type: ignore[call-arg]


def test_engine_arguments_from_a_command_line() -> None:
    line = "--model m --max_model_len 64 --gpu-memory-utilization=0.5 --limit prompts=3 --trust-remote-code false"
    parser = EngineArgs.add_cli_args(FlexibleArgumentParser())
    parser.add_argument("--top-p", type=float)
    options = parser.parse_args([*line.split(), "--top_p", "0.5"])
    args = EngineArgs.from_cli_args(options)
    assert (args.model, args.max_model_len, args.memory_fraction, args.limits.prompts) == ("m", 64, 0.5, 3)
    assert options.top_p == 0.5 and EngineArgs.from_cli_args(parser.parse_args(["--model", "m"])) == EngineArgs(
        model="m"
    )
    group = EngineArgs.add_cli_args(FlexibleArgumentParser().add_argument_group("of the engine"))
    group.set_defaults(model="m")
    with pytest.raises(ConfigError, match="--model"):
        EngineArgs.from_cli_args(parser.parse_args([]))


def test_beam_search_is_refused_by_name() -> None:
    for given, field in (({"beam_width": 0}, "beam_width"), ({"temperature": 0.5}, "temperature")):
        with pytest.raises(InvalidRequestError) as caught:
            BeamSearchParams(**{"beam_width": 2, "max_tokens": 4, **given})  # type: ignore[arg-type]
        assert caught.value.field == field


def test_a_beam_search_that_fails_is_raised(tiny_model: Path) -> None:
    with (
        make(tiny_model, lambda config: EchoCore(config, poison=7)) as llm,
        pytest.raises(RequestFailedError, match="NaN"),
    ):
        llm.beam_search([[7, 8]], BeamSearchParams(beam_width=2, max_tokens=3))
