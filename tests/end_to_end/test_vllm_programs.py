"""Programs in the manner of vLLM's documented examples, with `engine` imported in place of `vllm`, on tiny models."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from tiny_families import save_tiny

import engine
from engine import LLM, BeamSearchParams, RequestOutput, RequestOutputKind, SamplingParams

pytestmark = pytest.mark.timeout(300)
SETTINGS: dict[str, Any] = {
    "dtype": "float32",
    "device": "cpu",
    "max_model_len": 128,
    "max_num_batched_tokens": 64,
    "kv_cache_memory_bytes": 1 << 24,
    "enforce_eager": True,
    "tensor_parallel_size": 1,
}
PROMPTS = ["Hello, my name is", "The capital of France is", "The future is"]
TEMPLATE = (
    "{% for m in messages %}[{{ m.role }}]{{ m.content }}{% endfor %}"
    "{% if add_generation_prompt %}[assistant]{% endif %}"
)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("llama-vllm")
    save_tiny("Llama", path)
    (path / "chat_template.jinja").write_text(TEMPLATE)
    (path / "generation_config.json").write_text(json.dumps({"temperature": 0.5, "top_k": 3}))
    return path


@pytest.fixture(scope="module")
def llm(model: Path) -> Iterator[LLM]:
    with LLM(model=str(model), **SETTINGS) as llm:
        yield llm


@pytest.fixture(scope="module")
def oracle(model: Path) -> Any:
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32).eval()


def greedy(oracle: Any, ids: list[int], count: int) -> list[int]:
    out = oracle.generate(torch.tensor([ids]), max_new_tokens=count, do_sample=False, pad_token_id=0)
    tokens: list[int] = out[0, len(ids) :].tolist()
    return tokens


def test_basic(llm: LLM, oracle: Any) -> None:
    outputs = llm.generate(PROMPTS, SamplingParams(temperature=0, max_tokens=8))
    tokenizer = llm.get_tokenizer()
    for prompt, output in zip(PROMPTS, outputs, strict=True):
        assert output.prompt == prompt
        expected = greedy(oracle, tokenizer.encode(prompt), 8)
        assert output.outputs[0].token_ids == expected
        assert output.outputs[0].text == tokenizer.decode(expected, skip_special_tokens=True)
        assert output.lora_request is None and output.encoder_prompt is None and output.prompt_logprobs is None


def test_generate_with_options_of_a_command_line(model: Path) -> None:
    parser = engine.FlexibleArgumentParser()
    group = parser.add_argument_group("Engine arguments")
    engine.EngineArgs.add_cli_args(group)
    group.set_defaults(model=str(model))
    sampling = parser.add_argument_group("Sampling parameters")
    sampling.add_argument("--max-tokens", type=int)
    sampling.add_argument("--top-p", type=float)
    line = "--max_tokens 4 --device cpu --dtype float32 --max-model-len 64 --enforce-eager --kv-cache-memory 16MiB"
    args = vars(parser.parse_args(line.split()))
    max_tokens, top_p = args.pop("max_tokens"), args.pop("top_p")
    with LLM(**args) as llm:
        params = llm.get_default_sampling_params()
        assert (params.temperature, params.top_k) == (0.5, 3)
        if max_tokens is not None:
            params.max_tokens = max_tokens
        if top_p is not None:
            params.top_p = top_p
        outputs = llm.generate(PROMPTS, params)
        assert [len(output.outputs[0].token_ids) for output in outputs] == [
            4,
            4,
            4,
        ] and llm.config.compile.mode == "none"


def test_chat(llm: LLM, oracle: Any) -> None:
    conversation = [
        {"role": "system", "content": "You are a helpful assistant"},
        {"role": "user", "content": "Hello"},
        {"role": "assistant", "content": "How can I help?"},
        {"role": "user", "content": "Write."},
    ]
    params = SamplingParams(temperature=0, max_tokens=5)
    [one] = llm.chat(conversation, params, use_tqdm=False)
    tokenizer = llm.get_tokenizer()
    text = tokenizer.apply_chat_template(conversation, add_generation_prompt=True, tokenize=False)
    assert one.prompt == text
    assert one.outputs[0].token_ids == greedy(oracle, tokenizer.encode(text, add_special_tokens=False), 5)
    several = llm.chat([conversation for _ in range(4)], params, use_tqdm=True)
    assert [output.outputs[0].text for output in several] == [one.outputs[0].text] * 4
    given = llm.chat([conversation], params, use_tqdm=False, chat_template="{{ messages[0].content }}")
    assert given[0].prompt == conversation[0]["content"]


def test_beam_search(llm: LLM, oracle: Any) -> None:
    params = BeamSearchParams(beam_width=3, max_tokens=6)
    tokenizer = llm.get_tokenizer()
    ids = [tokenizer.encode(text) for text in PROMPTS]
    prompts: list[Any] = [{"prompt": PROMPTS[0]}, engine.TokensPrompt(prompt_token_ids=ids[1]), PROMPTS[2]]
    for prompt_ids, output in zip(ids, llm.beam_search(prompts, params), strict=True):
        found = oracle.generate(
            torch.tensor([prompt_ids]),
            num_beams=3,
            num_return_sequences=3,
            do_sample=False,
            max_new_tokens=6,
            early_stopping="never",
            pad_token_id=0,
            return_dict_in_generate=True,
            output_scores=True,
        )
        assert isinstance(output, engine.BeamSearchOutput)
        expected = [[token for token in row if token] for row in found.sequences.tolist()]
        assert [beam.tokens for beam in output.sequences] == expected
        for beam, row in zip(output.sequences, expected, strict=True):
            assert isinstance(beam, engine.BeamSearchSequence)
            assert beam.text == tokenizer.decode(row) and beam.text.startswith(tokenizer.decode(prompt_ids))
            scores = torch.log_softmax(oracle(torch.tensor([row])).logits[0].float(), dim=-1)
            places = range(len(prompt_ids), len(row))
            assert beam.cum_logprob == pytest.approx(sum(scores[at - 1, row[at]].item() for at in places), abs=1e-3)


def test_stepping(model: Path, oracle: Any) -> None:
    todo = [
        ("A robot may not", SamplingParams(temperature=0.0, logprobs=1, prompt_logprobs=1)),
        ("To be or not to be,", SamplingParams(temperature=0.8, top_k=5, presence_penalty=0.2)),
        ("What is", SamplingParams(n=2, best_of=5, temperature=0.8, top_p=0.95, frequency_penalty=0.1)),
    ]
    args = engine.EngineArgs(model=str(model), **SETTINGS)
    llm_engine = engine.LLMEngine.from_engine_args(args)
    outputs: dict[str, RequestOutput] = {}
    number = steps = 0
    while todo or llm_engine.has_unfinished_requests():
        if todo:
            prompt, params = todo.pop(0)
            llm_engine.add_request(str(number), prompt, params)
            number += 1
        for output in llm_engine.step():
            steps += 1
            if output.finished:
                outputs[output.request_id] = output
    ids = llm_engine.get_tokenizer().encode("A robot may not")
    assert outputs["0"].outputs[0].token_ids == greedy(oracle, ids, 16)
    assert len(outputs["0"].outputs[0].logprobs or []) == 16 and len(outputs["0"].prompt_logprobs or []) == len(ids)
    assert [len(outputs[name].outputs) for name in "012"] == [1, 1, 2] and steps > 20
    llm_engine.shutdown()


def test_streaming_with_a_core_of_its_own(model: Path, oracle: Any) -> None:
    async def main() -> str:
        args = engine.AsyncEngineArgs(model=str(model), **SETTINGS)
        llm = engine.AsyncLLM.from_engine_args(args)
        text = ""
        try:
            params = SamplingParams(max_tokens=12, temperature=0, output_kind=RequestOutputKind.DELTA)
            async for output in llm.generate(request_id="stream-1", prompt=PROMPTS[0], sampling_params=params):
                for completion in output.outputs:
                    text += completion.text
                if output.finished:
                    break
        finally:
            llm.shutdown()
        return text

    with LLM(model=str(model), **SETTINGS) as llm:
        [output] = llm.generate(PROMPTS[0], SamplingParams(max_tokens=12, temperature=0))
    assert asyncio.run(main()) == output.outputs[0].text


def test_structured_outputs(llm: LLM) -> None:
    choice = engine.StructuredOutputsParams(choice=["Positive", "Negative"])
    guided = engine.GuidedDecodingParams(choice=["Positive", "Negative"])
    for name, form in (("structured_outputs", choice), ("guided_decoding", guided)):
        params = SamplingParams(max_tokens=20, **{name: form})  # type: ignore[arg-type]
        outputs = llm.generate(prompts=PROMPTS[0], sampling_params=params)
        assert outputs[0].outputs[0].text in ("Positive", "Negative")
    llm.llm_engine.add_request(
        "regex", PROMPTS[1], SamplingParams(structured_outputs=engine.StructuredOutputsParams(regex="[0-9]{3}"))
    )
    while llm.llm_engine.has_unfinished_requests():
        [output] = llm.llm_engine.step()
    assert output.outputs[0].text.isdigit() and len(output.outputs[0].text) == 3


def test_a_prefix_that_was_computed_is_found_again(llm: LLM) -> None:
    long = "A table of names and ages. " * 3
    for question, cached in (("Who?", 0), ("When?", len(llm.get_tokenizer().encode(long)) // 16 * 16)):
        [output] = llm.generate(long + question, sampling_params=SamplingParams(temperature=0, max_tokens=4))
        assert output.num_cached_tokens == cached
