"""Drafts from a model's own head for multi-token prediction, on tiny random weights: the same tokens as without, and
the drafts that such a head makes, written down in plain torch around one layer of the library's."""

from __future__ import annotations

import json
import shutil
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from msgspec.structs import replace
from safetensors.torch import load_file, save_file
from test_model_drafts import Drafted, answers_of, generated, prompts, watch
from tiny_families import STATE_FAMILIES, TINY_FAMILIES, save_tiny

from attention_backends.toolchain import find_compiler
from engine import LLM, EngineArgs, SamplingParams
from engine.errors import ConfigError, EngineError, UnsupportedModelError
from engine.models.description import describe
from engine.models.mtp_spec import mtp_spec
from engine.plan import plan_of
from engine.resolve import resolve_here
from engine.runner.head_drafts import HeadProposer
from engine.runner.model_runner import ModelRunner

_EXPERTS: dict[str, Any] = {
    "num_experts": 6,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 32,
    "shared_expert_intermediate_size": 48,
}
FAMILIES = {
    "DeepseekV3": {**TINY_FAMILIES["DeepseekV3"], "kv_lora_rank": 24},  # rows that need no padding
    "Qwen3_5": STATE_FAMILIES["Qwen3_5"],
    "Qwen3_5Moe": {**STATE_FAMILIES["Qwen3_5"], **_EXPERTS},
    "Qwen3Next": {**STATE_FAMILIES["Qwen3_5"], **_EXPERTS},
}
EXHAUSTIVE = ("Qwen3_5Moe", "Qwen3Next")
DEEPSEEK = ("eh_proj", "enorm", "hnorm", "shared_head.norm")
QWEN = ("fc", "pre_fc_norm_embedding", "pre_fc_norm_hidden", "norm")
LITTLE = {"DeepseekV3": 130_000}
"""bytes of a KV cache that holds fewer sequences than there are rows"""
MTP: dict[str, Any] = {"method": "mtp", "num_speculative_tokens": 3}
OFF: dict[str, Any] = {"num_speculative_tokens": 0}


class Head:
    """Its weights, by their names in the checkpoint, and what it guesses."""

    def __init__(self, family: str, target: Any, path: Path) -> None:
        self.family, layers = family, {**FAMILIES[family]}
        self.count = target.config.num_hidden_layers
        if "layer_types" in layers:
            layers["layer_types"] = [*layers["layer_types"], "full_attention"]
        donor: Any = save_tiny(family, path, **{**layers, "num_hidden_layers": self.count + 1})
        self.target, self.layer, self.turns = target, donor.model.layers[-1], donor.model.rotary_emb
        self.plus = 0.0 if family == "DeepseekV3" else 1.0
        hidden, own = target.config.hidden_size, f"model.layers.{self.count}."
        before = own if family == "DeepseekV3" else "mtp."
        within = own if family == "DeepseekV3" else "mtp.layers.0."
        self.names = [f"{before}{name}.weight" for name in (QWEN if self.plus else DEEPSEEK)]
        self.fc, *self.norms = torch.randn(hidden, 2 * hidden) * 0.2, *(torch.rand(3, hidden) + 0.5 - self.plus)
        saved = load_file(path / "model.safetensors")
        self.tensors = {within + name.removeprefix(own): each for name, each in saved.items() if name.startswith(own)}
        self.tensors |= dict(zip(self.names, (self.fc, *self.norms), strict=True))

    def _norm(self, x: torch.Tensor, index: int) -> torch.Tensor:
        scaled = x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + self.target.config.rms_norm_eps)
        return scaled * (self.norms[index] + self.plus)

    @torch.no_grad()
    def drafts(self, tokens: list[int], count: int) -> list[int]:
        """Greedy ones behind `tokens`."""
        hidden = self.target.model(torch.tensor([tokens[:-1]])).last_hidden_state[0]
        known = list(tokens)
        while True:
            embedded = self.target.model.embed_tokens(torch.tensor(known[1:]))
            joined = torch.cat((self._norm(embedded, 0), self._norm(hidden, 1)), dim=-1) @ self.fc.T
            n = len(joined)
            at = torch.arange(n)[None]
            turned = self.turns(joined[None], at.expand(3, 1, n) if "Qwen3_5" in self.family else at)
            mask = torch.full((n, n), -torch.inf).triu(1)[None, None]
            made = self.layer(joined[None], position_embeddings=turned, attention_mask=mask)[0]
            made = self._norm(made, 2)
            known.append(int(self.target.lm_head(made[-1]).argmax()))
            if len(known) == len(tokens) + count:
                return known[len(tokens) :]
            hidden = torch.cat((hidden, made[-1:]))


@dataclass(frozen=True)
class Subject:
    family: str
    target: str
    head: Head
    plain: dict[float, list[list[list[int]]]]

    def settings(self, which: str) -> dict[str, Any]:
        little = LITTLE.get(self.family, 270_000)
        return {
            "plain": {},
            "few blocks": {"kv_cache_memory": little, "enable_prefix_caching": False},
            "swapping": {"kv_cache_memory": little, "swap_space": 1 << 23, "preemption": "swap"},
        }[which]


def drafted(monkeypatch: pytest.MonkeyPatch, target: str, temperature: float, **settings: Any) -> Drafted:
    return generated(monkeypatch, SimpleNamespace(target=target), temperature, **settings)  # type: ignore[arg-type]


@pytest.fixture(
    scope="module",
    params=[pytest.param(each, marks=pytest.mark.exhaustive) if each in EXHAUSTIVE else each for each in FAMILIES],
)
def subject(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Subject:
    root, family = tmp_path_factory.mktemp(request.param), request.param
    target = save_tiny(family, root / "target", **FAMILIES[family])
    head = Head(family, target, root / "donor")
    add(root / "target", head.tensors)
    with pytest.MonkeyPatch.context() as patch:
        plain = {t: drafted(patch, str(root / "target"), t, speculative_config=OFF).tokens for t in (0.0, 1.0)}
    return Subject(family, str(root / "target"), head, plain)


def add(directory: Path, tensors: dict[str, torch.Tensor]) -> None:
    file = directory / "model.safetensors"
    both = {**load_file(file), **tensors}
    save_file({name: tensor.contiguous() for name, tensor in both.items()}, file, metadata={"format": "pt"})


SETTINGS = ("plain", "few blocks", "swapping")


@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize("setting", SETTINGS)
def test_the_same_tokens_with_and_without_drafts(
    monkeypatch: pytest.MonkeyPatch, subject: Subject, setting: str, temperature: float
) -> None:
    """Over prompts in chunks, cached prefixes, preemption and several samples."""
    settings = subject.settings(setting)
    found = drafted(monkeypatch, subject.target, temperature, speculative_config=MTP, **settings)
    assert found.tokens == subject.plain[temperature]
    assert found.drafted > 100
    assert bool(found.preemptions) == (setting != "plain")


@pytest.mark.parametrize(
    "setting",
    [pytest.param(each, marks=pytest.mark.exhaustive) if each == "few blocks" else each for each in SETTINGS],
)
def test_a_head_guesses_what_plain_torch_makes_of_the_librarys_hidden_states(
    monkeypatch: pytest.MonkeyPatch, subject: Subject, setting: str
) -> None:
    found = drafted(monkeypatch, subject.target, 0.0, speculative_config=MTP, **subject.settings(setting))
    assert len(found.proposals) > 50
    assert max(len(drafts) for _, drafts in found.proposals) == 3
    for tokens, drafts in found.proposals[::5]:
        assert drafts == subject.head.drafts(tokens, len(drafts))


def numbers(answer: Any) -> list[float]:
    """Tokens and their log-probabilities; recurrences carry what roundings differ by."""
    samples, of_prompt = answer
    return [
        each for at in [*(at for sample in samples for at in sample[3]), *of_prompt] for pair in at for each in pair
    ]


def test_whatever_a_request_asks_for(monkeypatch: pytest.MonkeyPatch, subject: Subject) -> None:
    watch(monkeypatch, HeadProposer, Drafted())
    found = []
    for drafts in (OFF, MTP):
        settings: dict[str, Any] = {"dtype": "float32", "compile": "none", "max_num_batched_tokens": 48}
        with LLM(subject.target, device="cpu", max_model_len=160, speculative_config=drafts, **settings) as llm:
            found.append(answers_of(llm))
            count = llm.stats().drafted_tokens
    assert count > 50
    for one, other in zip(*found, strict=True):
        assert [each[:3] for each in one[0]] == [each[:3] for each in other[0]]
        assert numbers(one) == pytest.approx(numbers(other), abs=2e-3)


@pytest.mark.parametrize("method", ["mtp", "deepseek_mtp", "qwen3_5_mtp", "qwen3_next_mtp"])
def test_a_head_that_knows_the_model_is_always_right(
    monkeypatch: pytest.MonkeyPatch, subject: Subject, tmp_path: Path, method: str
) -> None:
    """A model whose layers add nothing makes the next token of the last one alone, and so does a head that takes
    nothing but the next token's embedding."""
    target = save_tiny(subject.family, tmp_path, **FAMILIES[subject.family])
    silent = ("o_proj.weight", "out_proj.weight", "down_proj.weight")
    own, last = load_file(tmp_path / "model.safetensors"), subject.head
    tensors = {**last.tensors, **own}
    tensors = {name: each * (not name.endswith(silent)) for name, each in tensors.items()}
    fc, next_norm, _, final_norm = last.names
    size = target.config.hidden_size  # type: ignore[union-attr]
    tensors[fc] = torch.cat((torch.eye(size), torch.zeros(size, size)), dim=1)
    tensors[next_norm] = torch.full((size,), 1.0 - last.plus)
    tensors[final_norm] = own["model.norm.weight"].clone()
    add(tmp_path, tensors)
    config = {**MTP, "method": method}
    found = drafted(monkeypatch, str(tmp_path), 0.0, speculative_config=config)
    assert found.accepted == found.drafted > 100


def test_what_a_head_takes_is_in_the_ledger(subject: Subject) -> None:
    sizes = []
    for drafts in (OFF, MTP):
        args = EngineArgs(model=subject.target, device="cpu", dtype="float32", speculative_config=drafts)
        sizes.append(ModelRunner.load(resolve_here(args)[1]).report)
    without, head = sizes
    assert head.weight_bytes - without.weight_bytes == sum(each.nbytes for each in subject.head.tensors.values())
    attending = 1 if subject.head.plus else subject.head.count
    assert head.block_bytes == without.block_bytes * (attending + 1) // attending


def test_a_checkpoint_of_the_bare_model_or_of_one_that_sees(
    monkeypatch: pytest.MonkeyPatch, subject: Subject, tmp_path: Path
) -> None:
    """Whose names begin otherwise."""
    shutil.copytree(subject.target, tmp_path, dirs_exist_ok=True)
    prefix, file = "", tmp_path / "model.safetensors"
    if "Qwen3_5" in subject.family:
        config = json.loads((tmp_path / "config.json").read_text())
        prefix, kind = "model.language_model.", config["model_type"].removesuffix("_text")
        seen = config["architectures"][0].replace("ForCausalLM", "ForConditionalGeneration")
        whole = {"architectures": [seen], "model_type": kind, "text_config": config}
        (tmp_path / "config.json").write_text(json.dumps(whole))
    tensors = {
        prefix + name.removeprefix("model.") if name.startswith("model.") else name: each
        for name, each in load_file(file).items()
    }
    save_file(tensors, file, metadata={"format": "pt"})
    found = drafted(monkeypatch, str(tmp_path), 0.0, speculative_config=MTP)
    assert found.tokens == subject.plain[0.0] and found.drafted > 100


@pytest.mark.parametrize("quantization", ["none", "int8"])
def test_the_plan_is_what_the_engine_takes(subject: Subject, quantization: str) -> None:
    small: dict[str, Any] = {"max_model_len": 160, "max_num_seqs": 4, "kv_cache_memory": 1 << 21, "compile": "none"}
    args = EngineArgs(model=subject.target, device="cpu", quantization=quantization, speculative_config=MTP, **small)
    plan = plan_of(args)
    with LLM.from_args(args) as llm:
        ledger = llm.ready.ledger
    told, real = (
        [line for line in table.splitlines() if line.startswith(("weights", "activations", "KV"))]
        for table in (plan.table, ledger)
    )
    assert told and told == real


@pytest.mark.skipif(find_compiler() is None, reason="no C++ compiler")
@pytest.mark.timeout(300)
@pytest.mark.parametrize(
    "subject",
    [pytest.param(each, marks=() if each == "Qwen3_5" else pytest.mark.exhaustive) for each in FAMILIES],
    indirect=True,
)
def test_a_compiled_target_and_a_packed_head(monkeypatch: pytest.MonkeyPatch, subject: Subject) -> None:
    watch(monkeypatch, HeadProposer, Drafted())
    found = []
    for drafts in (OFF, MTP):
        settings: dict[str, Any] = {"max_model_len": 160, "max_num_batched_tokens": 48, "kv_cache_memory": 8 << 20}
        with LLM(subject.target, device="cpu", dtype="bfloat16", speculative_config=drafts, **settings) as llm:
            llm.wait_compiled()
            llm.generate({"prompt_token_ids": [7]}, SamplingParams(max_tokens=2), use_tqdm=False)  # steps are swapped
            params = SamplingParams(temperature=0, max_tokens=18, ignore_eos=True)
            outputs = llm.generate(prompts(), params, use_tqdm=False)
            found.append([output.outputs[0].token_ids for output in outputs])
            drafted_tokens = llm.stats().drafted_tokens
    assert drafted_tokens > 100
    assert found[0] == found[1]


def test_what_has_no_head_is_refused_by_name(subject: Subject, tmp_path: Path) -> None:
    family = subject.family
    save_tiny(family, tmp_path / "none", **FAMILIES[family])
    save_tiny("Llama", tmp_path / "llama")
    key = "mtp_num_hidden_layers" if "Qwen3_5" in family else "num_nextn_predict_layers"
    for count in (0, 2):
        save_tiny(family, tmp_path / str(count), **FAMILIES[family], **{key: count})
    for target, says, settings in (
        ("none", "holds no layer that predicts further tokens", {}),
        ("llama", "no heads of llama are known", {}),
        ("0", f"{key} is 0", {}),
        ("2", f"{key} is 2: a head of one layer", {}),
        ("none", "models that one rank has whole", {"tensor_parallel_size": 2}),
        ("none", "not of models in stages", {"pipeline_parallel_size": 2}),
    ):
        with pytest.raises(EngineError, match=f"speculative_config.*{says}"):
            LLM(str(tmp_path / target), device="cpu", max_model_len=160, speculative_config=MTP, **settings)
    with pytest.raises(ConfigError, match="takes no model"):
        LLM(subject.target, device="cpu", speculative_config={**MTP, "model": subject.target})
    with pytest.raises(UnsupportedModelError, match="heads in GGUF files are not read"):
        mtp_spec(replace(describe(subject.target), source="gguf"))
