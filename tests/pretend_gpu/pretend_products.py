"""Experts, and matrices that stay packed, on a pretend GPU: cases of pretend_cases.py."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from gguf import GGMLQuantizationType
from pretend_gpu import pretend_gpu
from pretend_workloads import (
    GREEDY,
    HALF_TIE_NATS,
    PROMPTS,
    Oracles,
    check_closed,
    check_graphs,
    generate,
    loaded,
    same_but_for_ties,
    tokens,
)

from engine import SamplingParams
from engine.errors import ConfigError
from engine.models.decoder import Decoder
from engine.models.description import describe
from engine.weights.device_packing import DevicePacker
from engine.weights.fallback_loader import load_fallback
from engine.weights.fallback_packing import LibraryExperts
from engine.weights.loader import load_weights


def experts(folder: Path, oracles: Oracles) -> None:
    """A mixture of experts, few tokens and many, by the kernels that a GPU has for them."""
    folder = folder / "experts"
    oracle = Oracles(folder).greedy("float32")
    with pretend_gpu(inductor=False) as machine:
        options = {"dtype": "float16", "max_num_seqs": 2, "max_num_batched_tokens": 16, "graphs": "piecewise"}
        with loaded(folder, device="cuda", attention_backend="flashinfer", compile="pieces", **options) as llm:
            outputs = generate(llm, PROMPTS[1:3], GREEDY)
            check_graphs(machine, llm, "piecewise")
        check_closed(machine)
    assert same_but_for_ties(outputs, oracle[1:3], HALF_TIE_NATS) <= 1


def chunks(folder: Path, oracles: Oracles) -> None:
    """Llama 4: attention in chunks by the CUDA kernels, experts that are given rows times a factor."""
    folder = folder / "chunks"
    oracle = Oracles(folder).greedy("float32")
    with pretend_gpu(inductor=False) as machine:
        options = {"dtype": "float16", "max_num_seqs": 2, "max_num_batched_tokens": 32, "graphs": "both"}
        with loaded(folder, device="cuda", compile="pieces", **options) as llm:
            assert llm.ready.attention_backend == "cuda"
            outputs = generate(llm, PROMPTS[1:4], GREEDY)
            check_graphs(machine, llm, "both")
        check_closed(machine)
    assert same_but_for_ties(outputs, oracle[1:4], HALF_TIE_NATS) <= 1


def latents(folder: Path, oracles: Oracles, graphs: str = "both", compile: str = "pieces", **changes: Any) -> None:
    """DeepSeek V3: one row a token for all heads, by the Triton kernels; nothing waits for the device."""
    folder = folder / "latents"
    oracle = Oracles(folder).greedy("float32")
    with pretend_gpu(inductor=False) as machine:
        options = {"dtype": "float16", "max_num_batched_tokens": 32, "debug_sync": True, **changes}
        with loaded(folder, device="cuda", graphs=graphs, compile=compile, **options) as llm:
            assert llm.ready.attention_backend == "cuda"
            outputs = generate(llm, PROMPTS, GREEDY)
            check_graphs(machine, llm, graphs)
        check_closed(machine)
        assert machine.waits == []
    assert same_but_for_ties(outputs, oracle, HALF_TIE_NATS) <= 1


def latents_by_the_oracle(folder: Path, oracles: Oracles) -> None:
    """By the same arithmetic as on the CPU, so token for token."""
    folder = folder / "latents"
    oracle = Oracles(folder).greedy("float32")
    with pretend_gpu(inductor=False) as machine:
        options = {"dtype": "float32", "attention_backend": "reference", "graphs": "piecewise", "compile": "pieces"}
        with loaded(folder, device="cuda", **options) as llm:
            assert tokens(generate(llm, PROMPTS, GREEDY)) == tokens(oracle)
        check_closed(machine)


def invariant(folder: Path, oracles: Oracles, **changes: Any) -> None:
    """Answers to the bit, log-probabilities too, alone by graphs, and together with their own ends, whose keys are
    computed as a prompt then."""
    params = SamplingParams(temperature=0.0, max_tokens=6, ignore_eos=True, logprobs=20)

    def serve(batches: list[list[list[int]]], **settings: Any) -> list[list[Any]]:
        options = {"max_num_batched_tokens": 72, "graphs": "both", "batch_invariant": True, **settings}
        with pretend_gpu(inductor=False) as machine:
            with loaded(folder, device="cuda", attention_backend="cuda", compile="pieces", **options) as llm:
                outputs = [output for batch in batches for output in generate(llm, batch, params)]
                check_graphs(machine, llm, options["graphs"])
            check_closed(machine)
        answers = [output.outputs[0] for output in outputs]
        return [
            list(zip(one.token_ids, [sorted(each.items()) for each in one.logprobs], strict=True)) for one in answers
        ]

    prompts = [PROMPTS[2], PROMPTS[4]]
    alone = serve([[prompt] for prompt in prompts])
    cut = [prompt + [token for token, _ in answer[:3]] for prompt, answer in zip(prompts, alone, strict=True)]
    found = serve([prompts + cut], **changes)
    assert found[:2] == alone
    for again, answer in zip(found[2:], alone, strict=True):
        assert again[:3] == answer[3:]


def invariant_experts(folder: Path, oracles: Oracles) -> None:
    invariant(folder / "experts", oracles, graphs="none", max_num_batched_tokens=16)


def not_invariant(folder: Path, oracles: Oracles) -> None:
    """What cannot keep the promise is refused by name."""
    for name, settings, message in (
        ("", {"compile": "none"}, "compile='pieces'"),
        ("", {"compile": "pieces", "dtype": "float32"}, "dtype='bfloat16'"),
        ("", {"compile": "pieces", "attention_backend": "flashinfer"}, "do not depend on the batch"),
        ("states", {"compile": "pieces"}, "states are computed in chunks"),
        ("latents", {"compile": "pieces"}, "attention to latents"),
    ):
        with pretend_gpu(inductor=False):
            try:
                with loaded(folder / name, device="cuda", batch_invariant=True, **settings):
                    pass
            except ConfigError as error:
                assert message in str(error), error
            else:
                raise AssertionError(f"{name} {settings} is not refused")


def causal_attention(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, out: torch.Tensor, layer_index: int) -> None:
    """Of one prompt."""
    heads = (each.transpose(0, 1)[None].float() for each in (q, k, v))
    attended = torch.nn.functional.scaled_dot_product_attention(*heads, is_causal=True, enable_gqa=True)
    out.copy_(attended[0].transpose(0, 1))


def library_experts(folder: Path, oracles: Oracles) -> None:
    """Experts of a library's model by the same kernels, which compute what its own code does."""
    description = describe(str(folder / "experts"), "transformers")
    settings = {"dtype": torch.float16, "max_position": 256, "dummy": False, "seed": 0}
    with pretend_gpu(inductor=False), torch.inference_mode():
        gpu = torch.device("cuda", 0)
        model = load_fallback(description, device=gpu, **settings)
        found = [module for module in model.modules() if isinstance(module, LibraryExperts)]
        assert len(found) == 2 and all(part.is_cuda for each in found for part in each.buffers())


def packed(folder: Path, oracles: Oracles) -> None:
    """Matrices that stay as a GGUF file has them, experts' too: what the CPU says of the same values in float32. And
    weights quantised when they are loaded, which differ, but not by much."""
    import transformers
    from gguf_models import write_gguf

    model = transformers.Qwen3MoeForCausalLM.from_pretrained(folder / "experts")
    path = folder / "experts.gguf"
    write_gguf(model, path, GGMLQuantizationType.Q4_0)
    tokens, positions = torch.tensor(PROMPTS[2]), torch.arange(16)
    for source, quantization, largest in ((path, "gguf", 0.01), (folder / "experts", "int8", 0.05)):
        description = describe(str(source))
        assert description.spec is not None
        oracle = Decoder(description.spec, dtype=torch.float32)
        load_weights(oracle, description)
        oracle.set_attention(causal_attention)
        with torch.no_grad():
            expected = oracle.compute_logits(oracle(tokens, positions))
        with pretend_gpu(inductor=False), torch.inference_mode():
            gpu = torch.device("cuda", 0)
            ours = Decoder(description.spec, dtype=torch.float16)
            load_weights(ours, description, packer=DevicePacker(quantization, torch.float16, gpu))
            dense = {name for name, part in ours.named_parameters() if part.dim() > 1}
            assert all(name.startswith("embed_tokens") or ".router." in name for name in dense), dense
            ours.set_attention(causal_attention)
            found = ours.compute_logits(ours(tokens.to(gpu), positions.to(gpu))).cpu()
        off = float((found - expected).abs().max() / expected.abs().max())
        assert off <= largest, (quantization, off)
    with pretend_gpu(inductor=False) as machine:
        options = {"dtype": "float16", "quantization": "int8", "max_num_batched_tokens": 16, "graphs": "none"}
        with loaded(folder, device="cuda", attention_backend="flashinfer", **options) as llm:
            assert [len(each.outputs[0].token_ids) for each in generate(llm, PROMPTS[:1], GREEDY)] == [6]
            assert llm.config.model.quantization == "int8"
        check_closed(machine)
