"""`engine-serve --api-server-count 2` as real processes: what each says is what one would, whichever of them dies."""

from __future__ import annotations

import asyncio
import hashlib
import json
import re
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import httpx
import psutil
import pytest
from safetensors.torch import load_file, save_file
from serving import free_port, metric
from tiny_families import save_tiny

from entrypoints.serve import main

pytestmark = pytest.mark.timeout(300)

SMALL = ["--compile=none", "--max-model-len=512", "--kv-cache-memory=8MiB", "--threads=1", "--dtype=float32"]
STREAMS = 24
"""each on a connection of its own: that all come to the same process is once in eight million times"""


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("front-ends")
    save_tiny("Llama", path)
    return path


class Server:
    def __init__(self, process: subprocess.Popen[str], base: str) -> None:
        self.process, self.base = process, base

    def children(self, module: str) -> list[psutil.Process]:
        """Processes that run it."""
        found = []
        for child in psutil.Process(self.process.pid).children(recursive=True):
            with suppress(psutil.NoSuchProcess):
                if any(f"from {module} import" in part for part in child.cmdline()):
                    found.append(child)
        return found

    @property
    def front_ends(self) -> list[psutil.Process]:
        return self.children("entrypoints.server.front_end")

    @property
    def core(self) -> psutil.Process:
        [core] = self.children("engine.core.process")
        return core


def start(model: Path, *options: str, stderr: int | None = None) -> Server:
    port = free_port()
    command = [sys.executable, "-m", "entrypoints.serve", str(model), "--port", str(port), "--api-server-count", "2"]
    process = subprocess.Popen([*command, *SMALL, *options], cwd=Path(__file__).parents[2], text=True, stderr=stderr)
    return Server(process, f"http://127.0.0.1:{port}")


@contextmanager
def served(model: Path, *options: str, meanwhile: Callable[[Server], None] = lambda server: None) -> Iterator[Server]:
    """`meanwhile`: done while it starts."""
    server = start(model, *options)
    process = server.process
    try:
        meanwhile(server)
        until(lambda: answers(server) or process.poll() is not None, 120)
        assert process.poll() is None
        until(lambda: sum(len(each.net_connections()) > 0 for each in server.front_ends) == 2)
        yield server
    finally:
        process.kill()
        process.wait()


def until(condition: Callable[[], object], seconds: float = 120) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.02)


def answers(server: Server) -> bool:
    with suppress(httpx.TransportError):
        return httpx.get(f"{server.base}/ready", timeout=5).status_code == 200
    return False


async def follow(base: str, index: int, told: dict[int, str], headers: dict[str, str]) -> str:
    """What a stream ends with; `told`: what has come of each."""
    body: dict[str, Any] = {
        "prompt": [3 + (7 * i * i + index) % 240 for i in range(12 + index)],
        "max_tokens": 120,
        "temperature": 0.9 if index % 2 else 0.0,
        "seed": index,
        "n": 1 + index % 3,
        "stream": True,
        "ignore_eos": True,
        "logprobs": 0,
    }
    async with (
        httpx.AsyncClient(timeout=120) as client,
        client.stream("POST", f"{base}/v1/completions", json=body, headers=headers) as reply,
    ):
        assert reply.status_code == 200, await reply.aread()
        found: dict[int, list[str]] = {}
        async for line in reply.aiter_lines():
            if line == "data: [DONE]":
                return json.dumps(found)
            if line.startswith("data: "):
                event = json.loads(line.removeprefix("data: "))
                assert "error" not in event, event
                for choice in event["choices"]:
                    found.setdefault(choice["index"], []).extend((choice.get("logprobs") or {}).get("tokens") or ())
                told[index] = told.get(index, "") + line
    raise httpx.RemoteProtocolError("the stream ended without its end")


async def ask(base: str, meanwhile: Callable[[], None] | None = None) -> list[str | BaseException]:
    """The ends of all streams, sorted by index; `meanwhile`: done when half of them have begun."""
    told: dict[int, str] = {}
    headers = {"x-request-id": "the-same-for-all"}
    tasks = [asyncio.create_task(follow(base, index, told, headers)) for index in range(STREAMS)]
    if meanwhile is not None:
        while len(told) < STREAMS // 2:
            await asyncio.sleep(0.002)
        await asyncio.to_thread(meanwhile)
    return await asyncio.gather(*tasks, return_exceptions=True)


def test_streams_are_those_of_one_whoever_is_killed_and_end_before_the_server_does(model: Path, tmp_path: Path) -> None:
    (settings := tmp_path / "settings.yaml").write_text("core-restarts: 5\nenable-sleep-mode: true")
    with served(model, f"--config={settings}") as server:
        settings.unlink()  # whoever follows makes of it what was made of it
        base = server.base
        wanted = asyncio.run(ask(base))
        assert not any(isinstance(each, BaseException) for each in wanted), wanted
        assert sum(len(tokens) for each in wanted for tokens in json.loads(str(each)).values()) == STREAMS * 2 * 120
        # Each is counted once, whichever process is asked.
        for _ in range(6):
            assert metric(base, "pageloom_e2e_request_latency_seconds_count") == STREAMS
            assert metric(base, "pageloom_generation_tokens_total") == STREAMS * 2 * 120
        assert metric(base, "pageloom_step_seconds_count") == metric(base, "pageloom_engine_steps_total")

        assert asyncio.run(ask(base, lambda: server.core.send_signal(signal.SIGKILL))) == wanted

        counted = metric(base, "pageloom_e2e_request_latency_seconds_count")
        [first, second] = before = server.front_ends
        found = asyncio.run(ask(base, lambda: first.send_signal(signal.SIGKILL)))
        lost = [each for each in found if isinstance(each, BaseException)]
        assert 0 < len(lost) < STREAMS and all(isinstance(each, httpx.TransportError) for each in lost), lost
        assert all(
            isinstance(ours, BaseException) or ours == theirs for ours, theirs in zip(found, wanted, strict=True)
        )
        assert asyncio.run(ask(base)) == wanted  # whoever comes to one that is not there yet waits for it
        assert second in server.front_ends and first not in server.front_ends and len(before) == 2
        asleep = {httpx.get(f"{base}/is_sleeping").status_code for _ in range(STREAMS)}
        assert asleep == {200}, "all have this route"
        until(lambda: metric(base, "pageloom_num_requests_running") == 0)
        assert metric(base, "pageloom_kv_cache_usage_ratio") == 0
        finished = STREAMS - len(lost) + STREAMS
        assert counted + finished <= metric(base, "pageloom_e2e_request_latency_seconds_count") <= counted + 2 * STREAMS

        assert asyncio.run(ask(base, server.process.terminate)) == wanted
        assert server.process.wait(60) == 0
        with pytest.raises(httpx.ConnectError):
            httpx.get(f"{base}/live")


def test_nothing_outlives_whoever_has_the_cores(model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """No process, and no file of what clients have said."""
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    with served(model) as server:
        running = [server.core, *server.front_ends]
        assert len(running) == 3
        server.process.kill()
        until(lambda: not any(each.is_running() and each.status() != psutil.STATUS_ZOMBIE for each in running))
        until(lambda: not list(tmp_path.glob("pageloom-*")))


def test_a_core_that_dies_for_good_ends_those_that_start_too(model: Path) -> None:
    with served(model, "--core-restarts", "0") as server:
        before = {each.pid for each in server.front_ends}
        server.front_ends[0].kill()
        until(lambda: {each.pid for each in server.front_ends} - before)
        server.core.kill()
        assert server.process.wait(60) == 1


def test_one_that_dies_while_it_starts_is_named_and_how(model: Path) -> None:
    server = start(model, stderr=subprocess.PIPE)
    until(lambda: server.front_ends)
    server.front_ends[0].kill()
    told = server.process.communicate(timeout=60)[1]
    assert server.process.returncode == 1 and "--kv-cache-memory" not in told
    assert re.search(
        r"API server \d, a front-end process, died while it started, .*: killed by signal 9 \(SIGKILL\)", told
    )


def test_a_signal_that_ends_it_while_one_starts_is_in_order(model: Path) -> None:
    with served(model) as server:
        before = {each.pid for each in server.front_ends}
        server.front_ends[0].kill()
        until(lambda: {each.pid for each in server.front_ends} - before)
        server.process.terminate()
        assert server.process.wait(60) == 0


def test_what_one_process_stores_another_one_finds_and_all_read_the_keys_again(model: Path, tmp_path: Path) -> None:
    def write(*keys: str) -> None:
        digests = {key: hashlib.sha256(key.encode()).hexdigest() for key in keys}
        tables = [f'[[keys]]\nname = "{key}"\nsha256 = "{digests[key]}"\nscopes = ["infer", "admin"]\n' for key in keys]
        (tmp_path / "keys.toml").write_text("".join(tables))

    def get(path: str, key: str) -> int:
        return httpx.get(f"{server.base}{path}", headers={"x-api-key": key}, timeout=60).status_code

    def post(path: str, body: dict[str, Any]) -> httpx.Response:
        return httpx.post(f"{server.base}{path}", json=body, headers={"x-api-key": "one"}, timeout=60)

    write("one")
    template = "{% for m in messages %}{{ m['content'] }}{% endfor %}"
    with served(model, "--chat-template", template, "--keys", str(tmp_path / "keys.toml")) as server:
        stored = post("/v1/responses", {"input": "abc", "max_output_tokens": 4}).json()["id"]
        assert {get(f"/v1/responses/{stored}", "one") for _ in range(STREAMS)} == {200}
        assert {get("/v1/models", "two") for _ in range(STREAMS)} == {401}
        write("one", "two")
        server.process.send_signal(signal.SIGHUP)
        until(lambda: {get("/v1/models", "two") for _ in range(STREAMS)} == {200})
        refused = post("/v1/responses", {"input": "abc", "background": True})
        assert refused.status_code == 400 and "--api-server-count" in refused.json()["error"]["message"]
        # Files that are damaged meanwhile keep the next one away, but none that serves.
        (tmp_path / "keys.toml").write_text("[[keys")
        before = server.front_ends
        before[0].kill()
        until(lambda: len(server.front_ends) == 2 and server.front_ends != before)
        until(lambda: before[1] in server.front_ends and len(server.front_ends) == 1)
        write("one", "two")
        until(lambda: {get("/v1/models", "two") for _ in range(STREAMS)} == {200} and len(server.front_ends) == 2)
        assert before[1] in server.front_ends
        for path, body in (
            ("/v1/load_lora_adapter", {"lora_name": "a", "lora_path": "/none"}),
            ("/v1/unload_lora_adapter", {"lora_name": "a"}),
            ("/v1/prefixes", {"name": "a", "prompt": "b"}),
        ):
            refused = post(path, body)
            assert refused.status_code == 400 and "--api-server-count" in refused.json()["error"]["message"]


def test_a_key_has_its_quotas_once_and_not_once_for_each_process(model: Path, tmp_path: Path) -> None:
    """Also those of requests that a process had which was killed."""
    digest = hashlib.sha256(b"one").hexdigest()
    (tmp_path / "keys.toml").write_text(
        f'[[keys]]\nname = "one"\nsha256 = "{digest}"\nconcurrency = 6\nrequests_per_minute = 40\n'
    )
    headers = {"x-api-key": "one"}

    async def status(max_tokens: int) -> int:
        """0: there was no answer."""
        body = {"prompt": [5, 6], "max_tokens": max_tokens, "ignore_eos": True}
        async with httpx.AsyncClient(timeout=120, headers=headers) as client:
            with suppress(httpx.TransportError):
                return (await client.post(f"{server.base}/v1/completions", json=body)).status_code
        return 0

    async def statuses(count: int) -> Counter[int]:
        return Counter(await asyncio.gather(*(status(2) for _ in range(count))))

    async def killed() -> Counter[int]:
        """All of them, when only those are left that are answered."""
        asked = [asyncio.create_task(status(480)) for _ in range(20)]
        while sum(each.done() for each in asked) < 14:
            await asyncio.sleep(0.01)
        for each in server.front_ends:
            each.kill()
        return Counter(await asyncio.gather(*asked))

    with served(model, "--keys", str(tmp_path / "keys.toml")) as server:
        assert asyncio.run(killed()) == {429: 14, 0: 6}
        until(lambda: len(server.front_ends) == 2 and answers(server))
        assert asyncio.run(statuses(5)) == {200: 5}
        while (found := asyncio.run(statuses(6)))[429] == 0:
            assert found == {200: 6}
        assert sum(found.values()) == 6


def test_whoever_administers_need_not_know_which_process_answers(model: Path, tmp_path: Path) -> None:
    """It sleeps and wakes up, has other weights and fewer replicas for all of them."""
    other = tmp_path / "other"
    shutil.copytree(model, other)
    turned = {name: each.roll(1, 0).contiguous() for name, each in load_file(other / "model.safetensors").items()}
    save_file(turned, other / "model.safetensors", metadata={"format": "pt"})

    def post(path: str, body: dict[str, Any] | None = None) -> httpx.Response:
        return httpx.post(f"{server.base}{path}", json=body, timeout=120)

    def fingerprint() -> str:
        body = {"prompt": [5, 6], "max_tokens": 1}
        return str(post("/v1/completions", body).json()["system_fingerprint"])

    def asleep() -> set[bool]:
        return {httpx.get(f"{server.base}/is_sleeping", timeout=60).json()["is_sleeping"] for _ in range(STREAMS)}

    def nap() -> None:
        assert post("/sleep").status_code == 200
        until(lambda: asleep() == {True})
        assert not server.children("engine.core.process")
        assert post("/scale_elastic_ep", {"new_data_parallel_size": 1}).status_code == 400
        assert post("/wake_up").status_code == 200

    with served(model, "--enable-sleep-mode", "--data-parallel-size", "2", "--core-restarts", "5") as server:
        wanted = asyncio.run(ask(server.base))
        assert asyncio.run(ask(server.base, nap)) == wanted
        until(lambda: asleep() == {False})
        [before] = {fingerprint() for _ in range(STREAMS)}
        missing = post("/update_weights_from_disk", {"model_path": "/none"})
        assert missing.status_code == 400 and "/none" in missing.json()["error"]["message"]
        assert post("/update_weights_from_disk", {"model_path": str(other)}).status_code == 200
        [after] = {fingerprint() for _ in range(STREAMS)}
        assert after != before and asyncio.run(ask(server.base)) != wanted
        server.front_ends[0].kill()
        until(lambda: len(server.front_ends) == 2)
        assert {fingerprint() for _ in range(STREAMS)} == {after}  # whoever comes later learns it, too
        assert len(server.children("engine.core.process")) == 2
        assert post("/scale_elastic_ep", {"new_data_parallel_size": 1}).status_code == 200
        until(lambda: metric(server.base, "pageloom_replicas") == 1)
        refused = post("/scale_elastic_ep", {"new_data_parallel_size": 100})
        assert refused.status_code == 400 and "[1, 64]" in refused.json()["error"]["message"]


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (["--profile-dir", "profiles"], "--profile-dir is for one process"),
        (["--pinned-prefixes", "prefixes.jsonl"], "--pinned-prefixes is for one process"),
    ],
)
def test_what_needs_one_process_is_refused_before_anything_is_loaded(
    options: list[str], said: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("prefixes.jsonl").write_text("")
    assert main(["none", "--port", "0", "--api-server-count", "2", *options]) == 1
    assert said in capsys.readouterr().err


@pytest.mark.parametrize("count", ["0", "65", "-1", "two", ""])
def test_a_count_that_is_none_is_named(count: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["none", f"--api-server-count={count}"])
    assert "is not a number of processes: 1 to 64" in capsys.readouterr().err


def test_a_port_is_taken_before_anybody_listens(capsys: pytest.CaptureFixture[str]) -> None:
    """Else two servers that load at the same time would answer in turns."""
    port = free_port()
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as name:
        name.bind(f"\0pageloom-port-{port}")
        assert main(["none", "--port", str(port), "--api-server-count", "2"]) == 1
    assert "another server with --api-server-count has it" in capsys.readouterr().err


def test_files_may_be_read_again_while_it_starts(model: Path, tmp_path: Path) -> None:
    digest = hashlib.sha256(b"one").hexdigest()
    (tmp_path / "keys.toml").write_text(f'[[keys]]\nname = "one"\nsha256 = "{digest}"\n')

    def hang_up(server: Server) -> None:
        until(lambda: len(server.front_ends) == 2)
        server.process.send_signal(signal.SIGHUP)

    with served(model, "--keys", str(tmp_path / "keys.toml"), meanwhile=hang_up) as server:
        assert len(server.front_ends) == 2
        server.process.terminate()
        assert server.process.wait(60) == 0


def test_a_port_that_others_share_is_taken(model: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Else two servers would answer in turns."""
    with served(model) as server:
        port = server.base.rpartition(":")[2]
        assert main([str(model), "--port", port, "--api-server-count", "2", *SMALL]) == 1
        assert f"cannot listen on 127.0.0.1:{port}" in capsys.readouterr().err
