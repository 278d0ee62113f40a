"""lm-evaluation-harness: its local-completions (log-likelihoods by echo, rolling ones, generation) and
local-chat-completions, on tasks that are made here."""

from __future__ import annotations

import json
import tempfile
from importlib.metadata import version
from pathlib import Path

import lm_eval
from checks import Checks
from lm_eval.tasks import TaskManager

checks = Checks()
WORDS = ("wall", "seven", "quickly", "soup")
ROWS = list(zip(("France", "Italy", "Spain", "Japan"), ("Paris", "Rome", "Madrid", "Tokyo"), WORDS))
COMMON = """
dataset_path: json
dataset_kwargs: {data_files: {test: %s}}
test_split: test
doc_to_text: "%s"
metadata: {version: 1}
"""
CHOICE = """task: capitals_choice
output_type: multiple_choice
doc_to_choice: "{{[right, wrong]}}"
doc_to_target: 0
metric_list: [{metric: acc}]
"""
GENERATE = """task: capitals_generate
output_type: generate_until
doc_to_target: "{{right}}"
generation_kwargs: {until: ["\\n"], max_gen_toks: 24, temperature: 0}
filter_list: [{name: first, filter: [{function: regex, regex_pattern: "%s"}, {function: take_first}]}]
metric_list: [{metric: exact_match}]
"""
ROLLING = """task: capitals_rolling
output_type: loglikelihood_rolling
doc_to_target: "The capital of {{country}} is {{right}}."
metric_list: [{metric: word_perplexity}]
"""


def tasks(folder: Path) -> TaskManager:
    data = folder / "rows.jsonl"
    data.write_text("".join(json.dumps({"country": c, "right": r, "wrong": w}) + "\n" for c, r, w in ROWS))
    cities = "(" + "|".join(right for _, right, _ in ROWS) + ")"
    begun, asked = "The capital of {{country}} is", "What is the capital of {{country}}? Answer in one sentence."
    by_chat = (GENERATE % cities).replace("capitals_generate", "capitals_chat")
    for text, prompt in ((CHOICE, begun), (GENERATE % cities, begun), (ROLLING, begun), (by_chat, asked)):
        (folder / f"{text.split()[1]}.yaml").write_text(text + COMMON % (data, prompt))
    return TaskManager(include_path=str(folder), include_defaults=False)


def evaluated(model: str, route: str, names: list[str], **options: object) -> dict:
    settings = {
        "model": checks.model,
        "base_url": f"{checks.base}/v1/{route}",
        "tokenizer": checks.tokenizer,
        "tokenizer_backend": "huggingface",
        "max_retries": 1,
        "num_concurrent": 1,
        **options,
    }
    with tempfile.TemporaryDirectory() as folder:
        found = lm_eval.simple_evaluate(
            model=model,
            model_args=",".join(f"{name}={value}" for name, value in settings.items()),
            tasks=names,
            task_manager=tasks(Path(folder)),
            apply_chat_template=route != "completions",
            bootstrap_iters=0,
        )
    return found["results"]


def log_likelihoods() -> None:
    """The capital is likelier than a word of another kind: so it is by the scores of the right tokens."""
    for tokenized in (True, False):
        found = evaluated("local-completions", "completions", ["capitals_choice"], tokenized_requests=tokenized)
        assert found["capitals_choice"]["acc,none"] == 1.0, found


def rolling_log_likelihoods() -> None:
    found = evaluated("local-completions", "completions", ["capitals_rolling"])
    assert 1 < found["capitals_rolling"]["word_perplexity,none"] < 1000, found


def generation() -> None:
    found = evaluated("local-completions", "completions", ["capitals_generate"])
    assert found["capitals_generate"]["exact_match,first"] >= 0.5, found


def generation_by_chat() -> None:
    found = evaluated("local-chat-completions", "chat/completions", ["capitals_chat"])
    assert found["capitals_chat"]["exact_match,first"] >= 0.5, found


checks.run(log_likelihoods, rolling_log_likelihoods, generation, generation_by_chat)
checks.tell(version("lm-eval"))
