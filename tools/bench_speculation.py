"""Drafts on and off, one prompt at a time, the same tokens: `tools/grounded_prompts.json`, whose answers copy much of
the prompt, and a few chats that have nothing to copy.

usage: python tools/bench_speculation.py MODEL [--config JSON] [--max-tokens N] [--reps N] [--peer PYTHON GGUF DRAFTS]

Two engines in this process take turns. Prints seconds off / on (more is better) by kind of prompt, as geometric means
of the medians of the repeats; fails if any token differs. `--peer`: llama.cpp with its prompt lookup answers each
prompt, too (`tools/peers/lookup_llamacpp.py` in PYTHON's environment); its tokens may differ, so what is compared is
the time of a token.
"""

from __future__ import annotations

import argparse
import json
import math
import subprocess
import sys
import time
from collections import defaultdict
from pathlib import Path
from statistics import median

from engine import LLM, SamplingParams

CHATS = (
    "Write a short story about a lighthouse keeper.",
    "What should I pack for a week in the mountains?",
    "Explain why the sky is blue to a child.",
    "Give me three ideas for a birthday dinner.",
    "Write a poem about the first snow.",
    "How do I ask my neighbour to be quieter?",
)


def main() -> int:
    options = _options()
    prompts = json.loads(Path(__file__).with_name("grounded_prompts.json").read_text())
    prompts += [{"kind": "chat", "prompt": text} for text in CHATS]
    engines = [_engine(options, {}), _engine(options, options.config)]
    peer = Peer(*options.peer) if options.peer else None
    params = SamplingParams(temperature=0.0, max_tokens=options.max_tokens)
    ratios: dict[str, list[float]] = defaultdict(list)
    versus: dict[bool, list[float]] = defaultdict(list)
    """by whether it is a chat: the peer's seconds for a token over ours"""
    for each in prompts:
        seconds: list[list[float]] = [[], []]
        peers: list[float] = []
        texts: set[tuple[int, ...]] = set()
        accepted = 0
        for _ in range(options.reps):
            for index, llm in enumerate(engines):
                messages = [{"role": "user", "content": each["prompt"]}]
                began = time.perf_counter()
                output = llm.chat([messages], params, use_tqdm=False)[0]
                seconds[index].append(time.perf_counter() - began)
                texts.add(tuple(output.outputs[0].token_ids))
                accepted = max(accepted, output.num_accepted_tokens)
            if peer is not None:
                peers.append(peer.seconds_per_token(output.prompt_token_ids, options.max_tokens))
        if len(texts) > 1:
            print(f"other tokens with drafts: {each['prompt'][:60]!r}")
            return 1
        ratios[each["kind"]].append(median(seconds[0]) / median(seconds[1]))
        tokens = len(texts.pop())
        beside = ""
        if peers:
            versus[each["kind"] == "chat"].append(median(peers) / (median(seconds[1]) / tokens))
            beside = f", a token is {versus[each['kind'] == 'chat'][-1]:.2f} times as fast as the peer's"
        print(f"{each['kind']:10} {ratios[each['kind']][-1]:5.2f}  {tokens:4} tokens, {accepted:4} drafts{beside}")
    found = {kind: round(_geomean(those), 3) for kind, those in ratios.items()}
    grounded = [ratio for kind, those in ratios.items() if kind != "chat" for ratio in those]
    lookup = {f"{'chat' if chat else 'grounded'}_vs_peer": round(_geomean(those), 3) for chat, those in versus.items()}
    print(json.dumps({"grounded": round(_geomean(grounded), 3), **found, **lookup}))
    return 0


class Peer:
    """llama.cpp with prompt lookup, in a process of its own."""

    def __init__(self, python: str, gguf: str, drafts: str) -> None:
        script = Path(__file__).with_name("peers") / "lookup_llamacpp.py"
        self._process = subprocess.Popen(
            [python, str(script), gguf, drafts], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )

    def seconds_per_token(self, prompt_token_ids: list[int], max_tokens: int) -> float:
        assert self._process.stdin is not None and self._process.stdout is not None
        request = {"prompt_token_ids": prompt_token_ids, "max_tokens": max_tokens}
        print(json.dumps(request), file=self._process.stdin, flush=True)
        answer = json.loads(self._process.stdout.readline())
        return float(answer["seconds"]) / int(answer["tokens"])


def _engine(options: argparse.Namespace, config: dict[str, object]) -> LLM:
    llm = LLM(
        options.model,
        quantization=options.quantization,
        kv_cache_memory="512MiB",
        max_num_seqs=options.max_num_seqs,
        speculative_config=config,
        enable_prefix_caching=False,
    )
    while llm.stats().compiling:
        llm.generate(["a"], SamplingParams(max_tokens=1), use_tqdm=False)
        time.sleep(0.2)
    return llm


def _geomean(ratios: list[float]) -> float:
    return math.exp(sum(map(math.log, ratios)) / len(ratios))


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model")
    parser.add_argument("--config", type=json.loads, default={"method": "ngram"}, metavar="JSON")
    parser.add_argument("--max-tokens", type=int, default=160)
    parser.add_argument("--max-num-seqs", type=int, default=8)
    parser.add_argument("--quantization", default="none")
    parser.add_argument("--reps", type=int, default=3)
    parser.add_argument("--peer", nargs=3, metavar=("PYTHON", "GGUF", "DRAFTS"))
    return parser.parse_args()


if __name__ == "__main__":
    sys.exit(main())
