"""A tiny model of random weights that says what a script says: a grammar leaves it nothing else. All around it is real:
tokens, blocks, what the cache finds."""

from __future__ import annotations

import json
import random
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import httpx
import torch
from msgspec.structs import replace
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

from engine import AsyncEngine, EngineArgs, SamplingParams
from engine.request import StructuredOutputsParams
from entrypoints.server.app import create_app

CONTEXT = 32_768
TEMPLATE = (
    "{% if tools %}<|tools|>{% for t in tools %}{{ t | tojson }}\n{% endfor %}</s>{% endif %}"
    "{% set ns = namespace(asked=0) %}"
    "{% for m in messages %}{% if m.role == 'user' %}{% set ns.asked = loop.index0 %}{% endif %}{% endfor %}"
    "{% for m in messages %}<|{{ m.role }}|>"
    "{% if m.reasoning_content and loop.index0 > ns.asked %}<think>\n{{ m.reasoning_content }}\n</think>\n\n{% endif %}"
    "{{ m.content or '' }}{% for c in m.tool_calls or [] %}{% if m.content or not loop.first %}\n{% endif %}"
    '<tool_call>\n{"name": "{{ c.function.name }}", "arguments": {{ c.function.arguments | tojson }}}\n</tool_call>'
    "{% endfor %}</s>{% endfor %}{% if add_generation_prompt %}<|assistant|>{% endif %}"
)
"""As Qwen3's, it drops thinking once the user has asked again."""
SAYING = (
    "file path line edit read search shell run test branch commit diff tool answer user agent rule never "
    "always only when before after change keep short plan check error output directory project module "
    "function name value return ask"
)


def prose(words: int, seed: int) -> str:
    """Sentences of no meaning, as long as real instructions are."""
    draw = random.Random(seed)
    found: list[str] = []
    while len(found) < words:
        sentence = draw.choices(SAYING.split(), k=draw.randint(6, 14))
        found += [sentence[0].capitalize(), *sentence[1:-1], f"{sentence[-1]}."]
    return " ".join(found[:words])


def call(name: str, **arguments: Any) -> str:
    """As the template writes it."""
    return f'<tool_call>\n{{"name": "{name}", "arguments": {json.dumps(arguments)}}}\n</tool_call>'


def answer(text: str, *calls: str, thought: str = "") -> str:
    said = "\n".join(part for part in (text, *calls) if part)
    return f"<think>\n{thought}\n</think>\n\n{said}" if thought else said


def save_model(path: Path, texts: Sequence[str]) -> Path:
    """`texts`: what its tokens are learnt from."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    special = [AddedToken(text, special=True) for text in ("<s>", "</s>")]
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    tokenizer.train_from_iterator(
        texts, trainers.BpeTrainer(vocab_size=1500, special_tokens=special, initial_alphabet=alphabet)
    )
    hf = PreTrainedTokenizerFast(tokenizer_object=tokenizer, bos_token="<s>", eos_token="</s>")
    hf.chat_template = TEMPLATE
    hf.save_pretrained(path)
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=len(hf),
        hidden_size=64,
        intermediate_size=96,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=CONTEXT,
        bos_token_id=hf.bos_token_id,
        eos_token_id=hf.eos_token_id,
    )
    LlamaForCausalLM(config).save_pretrained(path)
    return path


class ScriptedEngine(AsyncEngine):
    """`script`: what it says next, in order."""

    script: list[str]

    def generate(  # type: ignore[override]
        self, prompt: Any, sampling_params: SamplingParams | None = None, *args: Any, **options: Any
    ) -> AsyncIterator[Any]:
        said = StructuredOutputsParams(choice=[self.script.pop(0)])
        params = replace(sampling_params or SamplingParams(), structured_outputs=said)
        return super().generate(prompt, params, *args, **options)


@asynccontextmanager
async def serving(path: Path, script: Sequence[str]) -> AsyncIterator[httpx.AsyncClient]:
    """An HTTP client of a server whose model follows the script."""
    args = EngineArgs(
        model=str(path),
        served_model_name="agent",
        device="cpu",
        dtype="float32",
        compile="none",
        max_model_len=CONTEXT,
        kv_cache_memory="64MiB",
    )
    engine = ScriptedEngine(args, in_process=True)
    engine.script = list(script)
    await engine.start()
    try:
        transport = httpx.ASGITransport(create_app(engine, "agent"))
        async with httpx.AsyncClient(transport=transport, base_url="http://agent", timeout=120) as client:
            yield client
        assert not engine.script, "the session ended early"
    finally:
        await engine.shutdown()


def events(body: str) -> list[dict[str, Any]]:
    """Of a server-sent stream."""
    lines = (line.removeprefix("data: ") for line in body.splitlines() if line.startswith("data: {"))
    return [json.loads(line) for line in lines]
