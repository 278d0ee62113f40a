"""How fast are embeddings over HTTP, beside sentence-transformers in its own process on the same machine and texts?

Makes a random model of a known shape (fewer layers than the original have, which changes no ratio between two that
compute all of them), and asks `engine-serve` for the embeddings of a batch of texts through /v1/embeddings, in
alternation with `SentenceTransformer.encode` of the same batch in each of its dtypes (float32 among them). Tokens per
second are those of the texts: padding does not count. The ratio is that of the medians, to the dtype in which
sentence-transformers is fastest. `cpu_ratio` is the same of the CPU time that either takes, its server and front end
included: what other processes take from a busy machine does not show in it. sentence-transformers must be importable;
it is no dependency of this project.

    python tools/bench_embeddings.py [--shape qwen3,bert] [--layers 4] [--batch 64] [--lengths 16-256]
        [--rounds 7] [--threads 2] [--peer-dtypes float32,bfloat16]
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import random
import re
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import httpx
import numpy as np

WORDS = 30000
SHAPES: dict[str, tuple[str, str, dict[str, Any]]] = {
    "qwen3": (
        "Qwen3",
        "lasttoken",
        {
            "hidden_size": 1024,
            "intermediate_size": 3072,
            "num_attention_heads": 16,
            "num_key_value_heads": 8,
            "head_dim": 128,
            "max_position_embeddings": 4096,
            "rope_parameters": {"rope_type": "default", "rope_theta": 1000000.0},
        },
    ),
    "bert": ("Bert", "mean", {"max_position_embeddings": 512}),
}
"""Qwen3-Embedding-0.6B and BERT-base, but for layers and vocabulary"""


def save_model(shape: str, layers: int, path: Path) -> None:
    import torch
    import transformers
    from sentence_transformers import SentenceTransformer
    from sentence_transformers.models import Normalize, Pooling, Transformer
    from tokenizers import Tokenizer, models, pre_tokenizers

    family, mode, sizes = SHAPES[shape]
    torch.manual_seed(0)
    config = getattr(transformers, f"{family}Config")(vocab_size=WORDS + 2, num_hidden_layers=layers, **sizes)
    base = path / "base"
    getattr(transformers, f"{family}Model")(config).save_pretrained(base)
    tokenizer = Tokenizer(models.WordLevel({"<pad>": 0, "<unk>": 1, **{f"w{i}": i + 2 for i in range(WORDS)}}, "<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    fast = transformers.PreTrainedTokenizerFast(tokenizer_object=tokenizer, pad_token="<pad>", unk_token="<unk>")
    fast.save_pretrained(base)
    whole = Transformer(str(base))
    modules = [whole, Pooling(sizes.get("hidden_size", 768), pooling_mode=mode), Normalize()]
    SentenceTransformer(modules=modules, device="cpu").save(str(path / "model"))


def make_texts(batch: int, lengths: str, seed: int) -> list[str]:
    shortest, longest = (int(each) for each in lengths.split("-"))
    rng = random.Random(seed)
    return [" ".join(f"w{rng.randrange(WORDS)}" for _ in range(rng.randint(shortest, longest))) for _ in range(batch)]


class Server:
    """`engine-serve` on a free port; ready, and compiled."""

    def __init__(self, model: Path, options: list[str]) -> None:
        with socket.socket() as s:
            s.bind(("127.0.0.1", 0))
            port = s.getsockname()[1]
        command = [sys.executable, "-m", "entrypoints.serve", str(model), "--port", str(port), *options]
        self.process = subprocess.Popen(command, stdout=subprocess.DEVNULL)
        self.base = f"http://127.0.0.1:{port}"
        while True:
            if self.process.poll() is not None:
                raise SystemExit("the server did not start")
            try:
                if re.search(r"compiling(\{.*\})? 0", httpx.get(f"{self.base}/metrics", timeout=5).text):
                    break
            except httpx.TransportError:
                pass
            time.sleep(0.5)

    def cpu_s(self) -> float:
        """That it and its processes have taken."""
        parents, ticks = dict[int, int](), dict[int, int]()
        for file in Path("/proc").glob("[0-9]*/stat"):
            with contextlib.suppress(OSError):
                fields, process = file.read_text().rpartition(")")[2].split(), int(file.parent.name)
                parents[process], ticks[process] = int(fields[1]), int(fields[11]) + int(fields[12])
        own = {self.process.pid}
        while more := {child for child, parent in parents.items() if parent in own} - own:
            own |= more
        return sum(ticks[process] for process in own) / os.sysconf("SC_CLK_TCK")

    def embed(self, texts: list[str]) -> np.ndarray:
        reply = httpx.post(f"{self.base}/v1/embeddings", json={"input": texts}, timeout=600).raise_for_status().json()
        return np.array([each["embedding"] for each in reply["data"]], dtype=np.float32)


def peers(model: Path, threads: int, names: str) -> dict[str, Any]:
    import torch
    from sentence_transformers import SentenceTransformer

    torch.set_num_threads(threads)
    return {
        name: SentenceTransformer(str(model), device="cpu", model_kwargs={"dtype": getattr(torch, name)})
        for name in names.split(",")
    }


def timed(call: Callable[[], object], cpu_s: Callable[[], float]) -> tuple[float, float]:
    """Seconds, and seconds of CPUs."""
    began, cpu_began = time.perf_counter(), cpu_s()
    call()
    return time.perf_counter() - began, cpu_s() - cpu_began


def measure(shape: str, args: argparse.Namespace) -> dict[str, Any]:
    """Every round has texts of its own, which no cache knows."""
    texts = [make_texts(args.batch, args.lengths, seed) for seed in range(args.rounds + 1)]
    tokens = [sum(len(text.split()) for text in batch) for batch in texts]
    with tempfile.TemporaryDirectory() as folder:
        save_model(shape, args.layers, Path(folder))
        path = Path(folder) / "model"
        server = Server(path, ["--dtype", args.dtype, "--threads", str(args.threads), "--max-model-len", "512"])
        try:
            ours = server.embed(texts[0])
            others = peers(path, args.threads, args.peer_dtypes)
            theirs = others["float32"].encode(texts[0], batch_size=args.batch)
            seconds: dict[str, list[tuple[float, float]]] = {"ours": [], **{name: [] for name in others}}
            for batch in texts[1:]:
                seconds["ours"].append(timed(partial(server.embed, batch), server.cpu_s))
                for name, peer in others.items():
                    encode = partial(peer.encode, batch, batch_size=args.batch)
                    seconds[name].append(timed(encode, time.process_time))
        finally:
            server.process.terminate()
            server.process.wait()
    rates = {
        name: statistics.median(count / wall for count, (wall, _) in zip(tokens[1:], each, strict=True))
        for name, each in seconds.items()
    }
    of_cpus = {
        name: statistics.median(count / cpu for count, (_, cpu) in zip(tokens[1:], each, strict=True))
        for name, each in seconds.items()
    }
    best = max(others, key=lambda name: rates[name])
    return {
        "shape": shape,
        "layers": args.layers,
        "batch": args.batch,
        "lengths": args.lengths,
        "threads": args.threads,
        "tokens": tokens[1:],
        "tokens_per_s": {name: round(rate) for name, rate in rates.items()},
        "best_peer": best,
        "ratio": round(rates["ours"] / rates[best], 2),
        "tokens_per_cpu_s": {name: round(rate) for name, rate in of_cpus.items()},
        "cpu_ratio": round(of_cpus["ours"] / max(of_cpus[name] for name in others), 2),
        "least_cosine_to_float32": round(float((ours * theirs).sum(axis=1).min()), 6),
        "largest_difference_to_float32": float(np.abs(ours - theirs).max()),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", default="qwen3,bert", help=f"of {', '.join(SHAPES)}, separated by commas")
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--batch", type=int, default=64)
    parser.add_argument("--lengths", default="16-256", help="tokens of the shortest and the longest text")
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--dtype", default="bfloat16", help="ours")
    parser.add_argument("--peer-dtypes", default="float32,bfloat16", help="theirs; on a CPU without bf16 it is slow")
    parser.add_argument("--threads", type=int, default=os.cpu_count() or 1, help="of either")
    args = parser.parse_args()
    print(json.dumps([measure(shape, args) for shape in args.shape.split(",")], indent=1))


if __name__ == "__main__":
    main()
