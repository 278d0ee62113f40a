"""`engine-bench`: its HTTP client against a stub that records, its offline commands on a tiny random model."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest
from scripted_server import save_model

from entrypoints.bench.cli import main
from entrypoints.bench.workloads import workload


class Stub:
    """An OpenAI-compatible server of one model: streams as many tokens as are asked for, 5 ms apart."""

    def __init__(self, *, usage: bool = True, fail_from: int = 10**9) -> None:
        self.bodies: list[dict[str, Any]] = []
        self.times: list[float] = []
        self.keys: set[str | None] = set()
        self.running = self.peak = 0
        self.lock = threading.Lock()
        self.usage, self.fail_from = usage, fail_from

    @contextmanager
    def serving(self) -> Iterator[str]:
        stub = self

        class Handler(BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                self.reply(200, b'{"data": [{"id": "stub-model"}]}')

            def do_POST(self) -> None:
                body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
                with stub.lock:
                    stub.bodies.append(body)
                    stub.times.append(time.monotonic())
                    stub.keys.add(self.headers.get("Authorization"))
                    stub.running += 1
                    stub.peak = max(stub.peak, stub.running)
                    failing = len(stub.bodies) > stub.fail_from
                if failing:
                    self.reply(503, b'{"error": "full"}')
                else:
                    self.stream(body["max_tokens"])
                with stub.lock:
                    stub.running -= 1

            def stream(self, tokens: int) -> None:
                self.send_response(200)
                self.send_header("Connection", "close")
                self.end_headers()
                for i in range(tokens):
                    self.event({"choices": [{"text": f"t{i}", "finish_reason": "length" if i + 1 == tokens else None}]})
                    time.sleep(0.02)
                if stub.usage:
                    self.event({"choices": [], "usage": {"completion_tokens": tokens}})
                self.wfile.write(b"data: [DONE]\n\n")

            def event(self, body: dict[str, Any]) -> None:
                self.wfile.write(b"data: " + json.dumps(body).encode() + b"\n\n")

            def reply(self, status: int, body: bytes) -> None:
                self.send_response(status)
                self.send_header("Content-Length", str(len(body)))
                self.end_headers()
                self.wfile.write(body)

            def log_message(self, format: str, *arguments: Any) -> None:
                pass

        server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        threading.Thread(target=server.serve_forever, args=(0.01,), daemon=True).start()
        try:
            yield f"http://127.0.0.1:{server.server_address[1]}"
        finally:
            server.shutdown()
            server.server_close()


def results_of(capsys: pytest.CaptureFixture[str]) -> list[dict[str, Any]]:
    """The last line of the output, which must be one JSON object."""
    last = json.loads(capsys.readouterr().out.splitlines()[-1])
    return list(last["results"])


@pytest.mark.parametrize("usage", [True, False])
def test_serve_sends_what_was_asked_and_counts_what_came(capsys: pytest.CaptureFixture[str], usage: bool) -> None:
    stub = Stub(usage=usage)
    with stub.serving() as url:
        arguments = ["serve", "--base-url", url, "--num-prompts", "6", "--input-len", "9", "--output-len", "4"]
        more = ["--api-key", "k", "--extra-body", '{"top_k": 3}', "--vocab-size", "200", "--reps", "2"]
        assert main([*arguments, *more, "--no-progress"]) == 0
    (result,) = results_of(capsys)
    assert (result["requests"], result["failed"], result["output_tokens"]) == (6, 0, 24)
    assert (result["input_tokens"], result["repeats"], result["mode"]) == (54, 2, "http")
    # A client that was held up reads two tokens at once: the gap is 20 ms less what it was late.
    assert result["tpot_mean_ms"] > 10 and result["itl_p50_ms"] > 10
    assert result["e2el_mean_ms"] > result["ttft_mean_ms"] > 0
    assert stub.keys == {"Bearer k"} and len(stub.bodies) == 4 + 2 * 6
    for body in stub.bodies:
        assert body["model"] == "stub-model" and body["stream"] and body["ignore_eos"] and body["top_k"] == 3
        assert len(body["prompt"]) == 9 and max(body["prompt"]) < 200
    prompts = [tuple(b["prompt"]) for b in stub.bodies]
    assert len(set(prompts)) == len(prompts)  # no repeat finds the cache that another filled


def test_serve_keeps_to_the_concurrency_and_the_arrivals(capsys: pytest.CaptureFixture[str]) -> None:
    stub = Stub()
    with stub.serving() as url:
        base = ["serve", "--base-url", url, "--model", "m", "--no-progress", "--output-len", "4", "--input-len", "3"]
        assert main([*base, "--num-prompts", "10", "--max-concurrency", "2"]) == 0
        assert stub.peak <= 4  # the warm-up's four are also two at a time
        stub.peak = 0
        del stub.times[:]
        assert main([*base, "--num-prompts", "11", "--request-rate", "50"]) == 0
    measured = sorted(stub.times)[4:]
    assert measured[-1] - measured[0] > 0.05  # ten gaps of 20 ms on average
    assert stub.bodies[0]["model"] == "m"


def test_serve_runs_a_named_workload(capsys: pytest.CaptureFixture[str]) -> None:
    stub = Stub()
    with stub.serving() as url:
        assert main(["serve", "--base-url", url, "--workload", "W5"]) == 0
    captured = capsys.readouterr()
    assert json.loads(captured.out.splitlines()[-1])["results"][0]["workload"] == "W5"
    assert "Serving, W5" in captured.out and "Requests: 100%" in captured.err
    assert stub.bodies[-1]["prompt"] == workload("W5").pop().prompt_token_ids


def test_serve_reports_failures_and_stops_where_all_fail(capsys: pytest.CaptureFixture[str]) -> None:
    base = ["--num-prompts", "5", "--output-len", "2", "--no-progress"]
    with Stub(fail_from=4 + 3).serving() as url:
        assert main(["serve", "--base-url", url, *base]) == 0
        (result,) = results_of(capsys)
        assert (result["requests"], result["failed"]) == (3, 2)
    with Stub(fail_from=0).serving() as url:
        assert main(["serve", "--base-url", url, *base]) == 1
        assert "every request failed" in (error := capsys.readouterr().err) and "503" in error
    assert main(["serve", "--base-url", url, *base]) == 1
    assert "is the server up" in capsys.readouterr().err


@pytest.fixture(scope="module")
def offline_model(tmp_path_factory: pytest.TempPathFactory) -> str:
    path: Path = save_model(tmp_path_factory.mktemp("offline") / "tiny", bos=False)
    return str(path)


def offline(model: str) -> list[str]:
    settings = ["--compile", "none", "--load-format", "dummy", "--dtype", "float32", "--device", "cpu"]
    return [model, *settings, "--kv-cache-memory", "16MiB", "--threads", "1"]


def test_latency_and_throughput_run_in_process(offline_model: str, capsys: pytest.CaptureFixture[str]) -> None:
    shape = ["--input-len", "12", "--output-len", "5", "--reps", "2"]
    common = [*offline(offline_model), *shape]
    assert main(["latency", *common, "--batch-size", "3", "--num-iters-warmup", "1", "--no-progress"]) == 0
    (latency,) = results_of(capsys)
    assert latency["repeats"] == 2 and 0 < latency["p10_latency_s"] <= latency["p99_latency_s"]
    assert main(["throughput", *common, "--num-prompts", "7", "--range-ratio", "0.5"]) == 0
    captured = capsys.readouterr()
    (throughput,) = json.loads(captured.out.splitlines()[-1])["results"]
    assert (throughput["requests"], throughput["failed"], throughput["short"]) == (7, 0, 0)
    assert throughput["ttft_mean_ms"] > 0 and "Processed prompts: 100%" in captured.err


def test_throughput_beside_itself_with_structured_outputs(
    offline_model: str, capsys: pytest.CaptureFixture[str]
) -> None:
    common = [*offline(offline_model), "--input-len", "12", "--output-len", "5", "--num-prompts", "3"]
    assert main(["throughput", *common, "--no-progress", "--structured-outputs", '{"regex": "[a-z]{9}"}']) == 0
    free, constrained = results_of(capsys)
    assert (free["mode"], constrained["mode"]) == ("offline", "structured")
    assert constrained["over_free"] > 0 and constrained["output_tokens"] == free["output_tokens"] == 15
    for wrong in ("{", '{"regex": "a", "choice": ["b"]}', '{"rejex": "a"}'):
        with pytest.raises(SystemExit):
            main(["throughput", *common, "--structured-outputs", wrong])
    assert "exactly one of" in capsys.readouterr().err


def test_throughput_refuses_a_workload_of_arrivals_before_it_loads_anything(
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert main(["throughput", "no-such-model", "--workload", "W2,W6"]) == 1
    assert "W6" in (error := capsys.readouterr().err) and "serve" in error


@pytest.mark.parametrize(
    ("command", "problem"),
    [
        (["serve", "--extra-body", "x"], "cannot read 'x' as a JSON object; write it as '{\"FIELD\": VALUE}'"),
        (["profile", "--sampling", "[1]"], "cannot read '[1]' as a JSON object"),
        (["profile", "--batch", "1,,2"], "'' is not a number from 1 on"),
        (["latency", "--batch-size", "1.5"], "'1.5' is not a number from 1 on"),
        (["throughput", "--range-ratio", "-1"], "'-1' is not a number from 0 to 1"),
        (["throughput", "--range-ratio", "nan"], "'nan' is not a number from 0 to 1"),
        (["serve", "--request-rate", "0"], "'0' is not a positive number"),
        (["serve", "--request-rate", "nan"], "'nan' is not a positive number"),
        (["serve", "--max-concurrency", "0"], "'0' is not a number from 1 on"),
        (["serve", "--base-url", "127.0.0.1:8000"], "does not begin with http:// or https://"),
    ],
)
def test_a_refusal_says_what_is_asked(command: list[str], problem: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(command)
    assert problem in capsys.readouterr().err
