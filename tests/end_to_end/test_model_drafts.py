"""Drafts from models on tiny random weights: the same tokens as without, and the drafts that the models really make."""

from __future__ import annotations

import json
import random
from dataclasses import dataclass, field, replace
from itertools import cycle
from pathlib import Path
from typing import Any

import pytest
import torch
from dense_eagle import DenseEagle
from safetensors.torch import load_file, save_file
from tiny_families import save_tiny

from attention_backends.toolchain import find_compiler
from engine import LLM, EngineArgs, SamplingParams, StructuredOutputsParams
from engine.errors import ConfigError, EngineError
from engine.resolve import resolve_here
from engine.runner.draft_model import DraftModelProposer
from engine.runner.head_drafts import HeadProposer
from engine.runner.model_runner import ModelRunner
from engine.runner.paged_attention import PagedAttention

VOCABULARY, LAYERS, MAX_LEN = 512, 7, 160
SHOWN = (2, 3, 4)
HEAD: dict[str, Any] = {
    "hidden_size": 64,
    "intermediate_size": 80,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "num_hidden_layers": 1,
    "vocab_size": VOCABULARY,
    "rms_norm_eps": 1e-5,
    "rope_theta": 10000.0,
}
SETTINGS: dict[str, dict[str, Any]] = {
    "plain": {},
    "few blocks": {"kv_cache_memory": 700_000, "enable_prefix_caching": False},
    "swapping": {"kv_cache_memory": 700_000, "swap_space": 1 << 21, "preemption": "swap"},
}
"""Prompts are longer than a step (chunks), begin alike (cached prefixes), and are sampled several times (forks)."""


KINDS: tuple[dict[str, Any], ...] = (
    {},
    {"temperature": 1.0, "top_k": 20, "bad_words": ["a", "bc"]},
    {"temperature": 0.8, "presence_penalty": 0.5, "repetition_penalty": 1.2, "n": 2},
    {"logprobs": 2, "prompt_logprobs": 1},
    {"stop": ["e"]},
    {"use_beam_search": True, "best_of": 2, "seed": None},
    {"structured_outputs": StructuredOutputsParams(regex=r"(yes|no)\|[a-z]{3,9}\|(yes|no)"), "temperature": 0.5},
    {"min_tokens": 12, "ignore_eos": False, "logit_bias": {2: 20.0}},
)


@dataclass
class Drafted:
    """By one proposer."""

    tokens: list[list[list[int]]] = field(default_factory=list)
    proposals: list[tuple[list[int], list[int]]] = field(default_factory=list)
    """(what a row knew, drafts)"""
    drafted: int = 0
    accepted: int = 0
    preemptions: int = 0


@dataclass(frozen=True)
class Models:
    """Directories."""

    target: str
    other: str
    head: str
    dense_target: torch.nn.Module
    dense_head: DenseEagle


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Models:
    root = tmp_path_factory.mktemp("models")
    target = save_tiny("Llama", root / "target", num_hidden_layers=LAYERS)
    save_tiny("Llama", root / "other", num_hidden_layers=1, num_attention_heads=2, num_key_value_heads=1, head_dim=32)
    torch.manual_seed(3)
    head = DenseEagle(HEAD, torch.randperm(VOCABULARY)[:300].sort().values)
    with torch.no_grad():
        for parameter in head.parameters():
            if parameter.dim() > 1:
                parameter.normal_(0, 0.2)
            else:
                parameter.uniform_(0.5, 1.5)
    return Models(str(root / "target"), str(root / "other"), head.save(root / "head"), target, head)


def prompts() -> list[Any]:
    rng = random.Random(1)
    common = [rng.randrange(3, VOCABULARY) for _ in range(50)]
    starts = [common[: rng.choice((0, 20, 50))] for _ in range(16)]
    each = [[rng.randrange(3, VOCABULARY) for _ in range(rng.choice((1, 5, 16, 40, 90)))] for _ in starts]
    return [{"prompt_token_ids": start + own} for start, own in zip(starts, each)]


def generated(monkeypatch: pytest.MonkeyPatch, models: Models, temperature: float, **settings: Any) -> Drafted:
    found = Drafted()
    for proposer in (DraftModelProposer, HeadProposer):
        watch(monkeypatch, proposer, found)
    given: dict[str, Any] = {"kv_cache_memory": 8 << 20, "max_num_batched_tokens": 48, "max_num_seqs": 6, **settings}
    args = EngineArgs(
        model=models.target, device="cpu", dtype="float32", compile="none", max_model_len=MAX_LEN, **given
    )
    params = [
        SamplingParams(temperature=temperature, max_tokens=18, seed=index, ignore_eos=True, n=1 + 2 * (index % 4 == 3))
        for index in range(16)
    ]
    with LLM.from_args(args) as llm:
        outputs = llm.generate(prompts(), params, use_tqdm=False)
        stats = llm.stats()
        found.drafted, found.accepted = stats.drafted_tokens, stats.accepted_tokens
        found.preemptions = stats.preemptions
    found.tokens = [[list(o.token_ids) for o in output.outputs] for output in outputs]
    monkeypatch.undo()
    return found


def watch(monkeypatch: pytest.MonkeyPatch, proposer: Any, found: Drafted) -> None:
    """Everybody drafts in every step, whatever that costs, and who drafts what is kept."""
    monkeypatch.setattr("engine.scheduling.speculation.StepCosts.relative", lambda self: (1.0, 0.0))
    propose = proposer.propose

    def watched(self: Any, rows: list[int], most: list[int]) -> list[int]:
        counts: list[int] = propose(self, rows, most)
        for row, count in zip(rows, counts):
            known = int(self._table.lengths[row])
            tokens = self._table.tokens[row, : known + count].tolist()
            if count:
                found.proposals.append((tokens[:known], tokens[known:]))
        return counts

    monkeypatch.setattr(proposer, "propose", watched)


def config(method: str, model: str, count: int = 4) -> dict[str, object]:
    return {"method": method, "model": model, "num_speculative_tokens": count}


@pytest.fixture(scope="module")
def plain(models: Models) -> dict[float, list[list[list[int]]]]:
    with pytest.MonkeyPatch.context() as patch:
        off = {"num_speculative_tokens": 0}
        return {t: generated(patch, models, t, speculative_config=off).tokens for t in (0.0, 1.0)}


@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize("setting", SETTINGS)
@pytest.mark.parametrize("draft", ["itself", "another", "head"])
@pytest.mark.pairwise()
def test_the_same_tokens_with_and_without_drafts(
    monkeypatch: pytest.MonkeyPatch, models: Models, plain: Any, draft: str, setting: str, temperature: float
) -> None:
    """And where the draft model is the target itself, every draft is right: it has read all that the target has."""
    path = {"itself": models.target, "another": models.other, "head": models.head}[draft]
    drafts = config("eagle3" if draft == "head" else "draft_model", path)
    found = generated(monkeypatch, models, temperature, speculative_config=drafts, **SETTINGS[setting])
    assert found.tokens == plain[temperature]
    assert found.drafted > 100
    assert bool(found.preemptions) == (setting != "plain")
    if draft == "itself":
        assert found.accepted == found.drafted


def test_layers_with_windows_before_and_behind(monkeypatch: pytest.MonkeyPatch, models: Models, tmp_path: Path) -> None:
    """A target whose windows make block tables of two kinds drafts for itself: its layers with windows lie a second
    time in the group that keeps all tokens."""
    save_tiny("Gemma2", tmp_path, sliding_window=16, num_hidden_layers=4)
    hybrid = replace(models, target=str(tmp_path))
    off = generated(monkeypatch, hybrid, 0.0, speculative_config={"num_speculative_tokens": 0})
    found = generated(monkeypatch, hybrid, 0.0, speculative_config=config("draft_model", hybrid.target))
    assert found.tokens == off.tokens
    assert found.accepted == found.drafted > 100


def answers_of(llm: LLM) -> list[Any]:
    params = [
        SamplingParams(**{"temperature": 0.0, "max_tokens": 18, "seed": index, "ignore_eos": True, **kind})
        for index, kind in zip(range(16), cycle(KINDS))
    ]
    outputs = llm.generate(prompts(), params, use_tqdm=False)
    return [
        (
            [(o.token_ids, o.text, o.finish_reason, tops(o.logprobs)) for o in output.outputs],
            tops(output.prompt_logprobs),
        )
        for output in outputs
    ]


def tops(logprobs: Any) -> list[list[tuple[int, float]]]:
    """Rounded: other rows in a batch may change the last bits of float32."""
    return [[(token, round(entry.logprob, 3)) for token, entry in (at or {}).items()] for at in logprobs or []]


@pytest.mark.parametrize("draft", ["another", "head"])
def test_whatever_a_request_asks_for(monkeypatch: pytest.MonkeyPatch, models: Models, draft: str) -> None:
    path, method = (models.head, "eagle3") if draft == "head" else (models.other, "draft_model")
    watch(monkeypatch, HeadProposer if draft == "head" else DraftModelProposer, Drafted())
    found = []
    for drafts in ({"num_speculative_tokens": 0}, config(method, path)):
        settings: dict[str, Any] = {"dtype": "float32", "compile": "none", "max_num_batched_tokens": 48}
        with LLM(models.target, device="cpu", max_model_len=MAX_LEN, speculative_config=drafts, **settings) as llm:
            found.append(answers_of(llm))
            drafted = llm.stats().drafted_tokens
    assert drafted > 50
    assert found[0] == found[1]


@pytest.mark.parametrize("setting", SETTINGS)
def test_an_eagle_head_guesses_what_the_paper_has_it_guess(
    monkeypatch: pytest.MonkeyPatch, models: Models, setting: str
) -> None:
    """From transformers' hidden states of the whole sequence; greedy samples of a prompt are all alike, and so are the
    tokens behind cached prefixes here, so that nothing is less than exact."""
    settings = SETTINGS[setting]
    found = generated(monkeypatch, models, 0.0, speculative_config=config("eagle3", models.head), **settings)
    embedding = models.dense_target.get_input_embeddings().weight.detach()  # type: ignore[operator]
    assert len(found.proposals) > 50
    for tokens, drafts in found.proposals[::5]:
        with torch.no_grad():
            states = models.dense_target(torch.tensor([tokens]), output_hidden_states=True).hidden_states
        shown = torch.cat([states[layer][0] for layer in SHOWN], dim=-1)
        assert drafts == models.dense_head.drafts(tokens, shown[:-1], embedding, len(drafts))


def test_a_draft_model_drafts_its_own_greedy_tokens(monkeypatch: pytest.MonkeyPatch, models: Models) -> None:
    found = generated(monkeypatch, models, 0.0, speculative_config=config("draft_model", models.other))
    from transformers import AutoModelForCausalLM

    other = AutoModelForCausalLM.from_pretrained(models.other).float().eval()
    assert len(found.proposals) > 50
    for tokens, drafts in found.proposals[::5]:
        with torch.no_grad():
            logits = other(torch.tensor([tokens + drafts])).logits[0]
        assert logits[len(tokens) - 1 : -1].argmax(-1).tolist() == drafts


@pytest.mark.skipif(find_compiler() is None, reason="no C++ compiler")
@pytest.mark.timeout(300)
@pytest.mark.parametrize("draft", ["another", "head"])
def test_a_compiled_target_computes_the_same_on_its_tape(
    monkeypatch: pytest.MonkeyPatch, models: Models, draft: str
) -> None:
    """That it shows what its layers are given takes none of them from the tape: attention is called for the draft's
    layers alone."""
    attend, layers = PagedAttention.attend, set()

    def watched(self: PagedAttention, *arguments: Any) -> None:
        layers.add(arguments[-1])
        attend(self, *arguments)

    monkeypatch.setattr(PagedAttention, "attend", watched)
    path, method = (models.head, "eagle3") if draft == "head" else (models.other, "draft_model")
    found = []
    for drafts in ({"num_speculative_tokens": 0}, config(method, path)):
        settings: dict[str, Any] = {"max_model_len": MAX_LEN, "max_num_batched_tokens": 48, "kv_cache_memory": 8 << 20}
        settings |= {
            "speculative_config": drafts,
            "batch_invariant": True,
        }  # tiles of AMX add by how many rows there are
        with LLM(models.target, device="cpu", dtype="bfloat16", **settings) as llm:
            llm.wait_compiled()
            llm.generate({"prompt_token_ids": [7]}, SamplingParams(max_tokens=2), use_tqdm=False)  # steps are swapped
            layers.clear()
            params = SamplingParams(temperature=0, max_tokens=18, ignore_eos=True)
            outputs = llm.generate(prompts(), params, use_tqdm=False)
            found.append([output.outputs[0].token_ids for output in outputs])
    assert found[0] == found[1]
    assert layers and min(layers) >= LAYERS


def changed(head: str, directory: Path, tensors: dict[str, Any], **settings: object) -> str:
    directory.mkdir()
    found = {**load_file(f"{head}/model.safetensors"), **tensors}
    save_file({name: tensor for name, tensor in found.items() if tensor is not None}, directory / "model.safetensors")
    (directory / "config.json").write_text(
        json.dumps({**json.loads(Path(head, "config.json").read_text()), **settings})
    )
    return str(directory)


@pytest.mark.parametrize(
    ("tensors", "settings", "says"),
    [
        ({}, {"vocab_size": 500}, "vocab_size 500 is not the target's, 512"),
        ({}, {"architectures": ["LlamaForCausalLM"]}, "is no EAGLE-3 head"),
        ({}, {"num_hidden_layers": 2}, "an EAGLE-3 head has one"),
        ({}, {"eagle_aux_hidden_state_layer_ids": [1, 2, 7]}, "must be 3 ascending layers of the 7"),
        ({}, {"target_hidden_size": 32}, "target_hidden_size 32 is not the target's 64"),
        ({"d2t": None}, {}, "d2t is missing: the head guesses 300 of 512"),
        ({"d2t": torch.full((300,), 400)}, {}, "d2t does not name ascending tokens below 512"),
        ({"d2t": torch.zeros(300)}, {}, "d2t is stored as F32, not as whole numbers"),
        ({"fc.weight": torch.zeros(64, 64)}, {}, r"fc.weight has shape \(64, 64\), expected \(64, 192\)"),
        ({"norm.weight": None}, {}, "norm.weight is missing"),
        ({"midlayer.extra": torch.zeros(2)}, {}, "midlayer.extra is not part of an EAGLE-3 head"),
    ],
)
def test_what_is_no_head_of_this_target_is_refused_by_name(
    models: Models, tmp_path: Path, tensors: dict[str, Any], settings: dict[str, object], says: str
) -> None:
    head = changed(models.head, tmp_path / "head", tensors, **settings)
    with pytest.raises(EngineError, match=says):
        LLM(models.target, device="cpu", max_model_len=MAX_LEN, speculative_config=config("eagle3", head))


def test_what_is_no_draft_model_of_this_target_is_refused_by_name(models: Models, tmp_path: Path) -> None:
    save_tiny("Llama", tmp_path / "small", vocab_size=400)
    save_tiny("Llama", tmp_path / "short", max_position_embeddings=100)
    save_tiny("Mistral", tmp_path / "windows", sliding_window=100)
    for target, given, says in (
        (models.target, config("draft_model", str(tmp_path / "small")), "must have the target's vocabulary"),
        (models.target, config("draft_model", str(tmp_path / "short")), "was made for 100 positions"),
        (models.target, config("draft_model", str(tmp_path / "none")), "neither a directory"),
        (models.target, {"method": "draft_model"}, "takes a model"),
        (models.target, {"method": "ngram", "model": models.other}, "takes no model"),
        (str(tmp_path / "windows"), config("draft_model", models.other), "every layer of the target has a window"),
    ):
        with pytest.raises(ConfigError, match=says):
            LLM(target, device="cpu", max_model_len=MAX_LEN, speculative_config=given)


def test_what_a_draft_takes_is_in_the_ledger(models: Models) -> None:
    sizes = []
    for drafts in ({}, config("draft_model", models.target), config("eagle3", models.head)):
        args = EngineArgs(model=models.target, device="cpu", dtype="float32", speculative_config=drafts)
        sizes.append(ModelRunner.load(resolve_here(args)[1]).report)
    without, twice, head = sizes
    assert twice.block_bytes == 2 * without.block_bytes
    assert twice.weight_bytes == 2 * without.weight_bytes
    assert head.block_bytes == without.block_bytes * (LAYERS + 1) // LAYERS
    stored = load_file(f"{models.head}/model.safetensors")
    floats = sum(tensor.nbytes for tensor in stored.values() if tensor.dtype == torch.float32)
    assert head.weight_bytes - without.weight_bytes == floats
