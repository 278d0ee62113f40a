"""The real core process under a fake device: what crosses the sockets, how it ends, and what is left behind."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
import threading
import time
from collections import defaultdict
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import psutil
import pytest
import zmq
from core_fakes import TOKEN, request, tiny_config

from engine.core.client import ProcessClient
from engine.core.wire import AbortRequests, ResetPrefixCache, SequenceDelta, TokenDeltas, each_delta
from engine.errors import ConfigError, CoreDiedError, QueueFullError

pytestmark = pytest.mark.timeout(120)


@contextmanager
def core(
    executor: str = "FakeExecutor",
    *,
    async_scheduling: bool = True,
    max_num_seqs: int = 8,
    max_waiting: int = 4,
    frames: int = 65536,
    **kwargs: float,
) -> Iterator[ProcessClient]:
    """A started client; afterwards nothing of it may be left: process, group, threads, sockets' directory."""
    threads = set(threading.enumerate())
    config = tiny_config(
        async_scheduling=async_scheduling, max_waiting=max_waiting, max_num_seqs=max_num_seqs, frames=frames
    )
    client = ProcessClient(config, executor=f"core_fakes:{executor}", **kwargs)
    try:
        client.start()
        yield client
    finally:
        client.close()
        client.close()
        assert not psutil.pid_exists(client.pid)
        assert not os.path.exists(client.socket_directory)
        assert set(threading.enumerate()) <= threads


def finish(client: ProcessClient, ids: set[str]) -> dict[str, SequenceDelta]:
    ended: dict[str, SequenceDelta] = {}
    while ids - ended.keys():
        ended |= {d.request_id: d for d in each_delta(client.recv().deltas) if d.finish_reason is not None}
    return ended


def receive_for_ever(client: ProcessClient) -> None:
    while True:
        client.recv()


def last_line(error: BaseException) -> str:
    return str(error).splitlines()[-1]


@pytest.mark.parametrize("async_scheduling", [False, True])
def test_tokens_of_many_requests_cross_the_border_as_one_message(async_scheduling):
    with core(async_scheduling=async_scheduling, max_num_seqs=32, max_waiting=32) as client:
        names = [f"r{i}" for i in range(32)]
        for name in names:
            client.send(request(name, max_tokens=20))
        tokens, ended, together = defaultdict(list), {}, 0
        while len(ended) < len(names):
            for delta in client.recv().deltas:
                together += isinstance(delta, TokenDeltas)
                for each in each_delta([delta]):
                    tokens[each.request_id] += each.token_ids
                    if each.finish_reason is not None:
                        ended[each.request_id] = each.finish_reason
        assert ended == dict.fromkeys(names, "length")
        assert tokens == {name: [TOKEN] * 20 for name in names} and together > 10


@pytest.mark.parametrize("async_scheduling", [False, True])
def test_requests_cross_the_border_and_come_back_complete(async_scheduling):
    with core(async_scheduling=async_scheduling) as client:
        tokens: dict[str, list[int]] = defaultdict(list)
        ended: dict[str, str] = {}
        for i in range(4):
            client.send(request(f"r{i}", max_tokens=3 + i))
        while len(ended) < 4:
            for delta in each_delta(client.recv().deltas):
                tokens[delta.request_id] += delta.token_ids
                if delta.finish_reason is not None:
                    ended[delta.request_id] = delta.finish_reason
        assert ended == dict.fromkeys((f"r{i}" for i in range(4)), "length")
        assert {k: len(v) for k, v in tokens.items()} == {f"r{i}": 3 + i for i in range(4)}
        assert {t for v in tokens.values() for t in v} == {TOKEN}


def test_queue_full_invalid_and_abort_are_deltas_not_errors():
    with core("Slow", max_num_seqs=1) as client:
        client.send(request("running", max_tokens=100))
        time.sleep(0.2)  # the first step takes 0.7 s, so all of these wait for the next drain together
        for i in range(6):
            client.send(request(f"w{i}", max_tokens=1))
        client.send(request("invalid", prompt_len=9999))
        client.send(AbortRequests(request_ids=["running", "w0"]))
        client.send(ResetPrefixCache())
        ended = finish(client, {"running", "invalid", *(f"w{i}" for i in range(6))})
        assert ended["running"].finish_reason == ended["w0"].finish_reason == "abort"
        assert [ended[f"w{i}"].error_kind for i in (4, 5)] == ["queue_full"] * 2
        assert ended["invalid"].error_kind == "invalid"
        assert [ended[f"w{i}"].finish_reason for i in (1, 2, 3)] == ["length"] * 3


def test_an_event_loop_receives_and_a_cancelled_wait_loses_nothing():
    async def scenario(client: ProcessClient) -> int:
        waiting = asyncio.create_task(client.recv_async())
        await asyncio.sleep(0.05)
        waiting.cancel()
        with pytest.raises(asyncio.CancelledError):
            await waiting
        client.send(request("a", max_tokens=30))
        count = 0
        while True:
            try:
                outputs = await asyncio.wait_for(client.recv_async(), 0.003)
            except TimeoutError:
                continue
            for delta in each_delta(outputs.deltas):
                count += len(delta.token_ids)
                if delta.finish_reason is not None:
                    return count

    with core() as client:
        assert asyncio.run(scenario(client)) == 30


def test_a_killed_core_is_noticed_before_the_next_heartbeat_and_named():
    with core(heartbeat_s=130) as client:
        killer = threading.Timer(0.2, os.kill, [client.pid, signal.SIGKILL])
        killer.start()
        with pytest.raises(CoreDiedError) as caught:
            client.recv()
        killer.join()
        assert last_line(caught.value).startswith("killed by signal 9 (SIGKILL)")
        with pytest.raises(CoreDiedError, match="SIGKILL"):
            client.send(request("late"))
        with pytest.raises(CoreDiedError, match="SIGKILL"):
            client.recv()


def test_an_event_loop_notices_a_killed_core_before_the_next_heartbeat():
    async def scenario(client: ProcessClient) -> None:
        asyncio.get_running_loop().call_later(0.1, os.kill, client.pid, signal.SIGKILL)
        with pytest.raises(CoreDiedError, match="killed by signal 9"):
            await client.recv_async()

    with core(heartbeat_s=130) as client:
        asyncio.run(scenario(client))


def test_tokens_sent_before_a_death_arrive_before_the_error():
    with core("KillingItself") as client:
        client.send(request("a", max_tokens=50))
        deltas: list[SequenceDelta] = []
        with pytest.raises(CoreDiedError) as caught:
            while True:
                deltas += each_delta(client.recv().deltas)
        assert [t for d in deltas for t in d.token_ids][:1] == [TOKEN]
        assert "last words on stdout" in str(caught.value)
        assert last_line(caught.value).startswith("killed by signal 9 (SIGKILL)")


def test_an_exception_in_a_step_arrives_with_its_traceback_and_its_cause_last():
    with core("Raising") as client:
        client.send(request("a", max_tokens=50))
        with pytest.raises(CoreDiedError) as caught:
            receive_for_ever(client)
        assert last_line(caught.value) == "RuntimeError: device lost in step 3"
        assert "KeyError: 'the first cause'" in str(caught.value) and "core_fakes.py" in str(caught.value)


def test_a_core_that_leaves_without_a_word_is_reported_with_its_status_and_last_output():
    with core("LeavingWithoutAWord") as client:
        client.send(request("a"))
        with pytest.raises(CoreDiedError) as caught:
            receive_for_ever(client)
        assert last_line(caught.value) == "exited with status 3: glibc: something bad"


@pytest.mark.parametrize(
    "executor, phase", [("Hanging", "waiting for the device"), ("HangingInPlan", "handing a step")]
)
def test_a_hung_core_is_ended_with_the_stacks_of_its_threads(executor, phase):
    with core(executor, heartbeat_s=0.1, hang_timeout_s=2) as client:
        client.send(request("a", max_tokens=50))
        with pytest.raises(CoreDiedError) as caught:
            receive_for_ever(client)
        assert last_line(caught.value).startswith("hung: no turn of the loop for") and phase in last_line(caught.value)
        assert "core_fakes.py" in str(caught.value) and "Thread" in str(caught.value)


def test_a_stopped_core_counts_as_hung():
    with core(heartbeat_s=0.1, hang_timeout_s=2) as client:
        os.kill(client.pid, signal.SIGSTOP)
        client.send(request("a"))
        with pytest.raises(CoreDiedError, match="no heartbeat"):
            receive_for_ever(client)


def test_long_steps_are_not_a_hang():
    with core("Slow", heartbeat_s=0.1, hang_timeout_s=2) as client:
        client.send(request("a", max_tokens=4))  # 2.8 s of work in steps of 0.7 s
        assert finish(client, {"a"})["a"].finish_reason == "length"


@pytest.mark.parametrize("executor", ["FakeExecutor", "CompilingBehind"])
def test_idle_for_longer_than_the_limit_is_not_a_hang(executor):
    """Nor where it has had something to tell meanwhile."""
    with core(executor, heartbeat_s=0.1, hang_timeout_s=2) as client:
        client.send(request("a"))
        finish(client, {"a"})
        timer = threading.Timer(4.5, client.send, [request("b")])
        timer.start()
        assert finish(client, {"b"})
        timer.join()


@pytest.mark.parametrize(
    "executor, error, text",
    [
        ("core_fakes:NotFitting", ConfigError, "the model needs 9 GiB, 8 are free: lower --max-model-len"),
        ("core_fakes:DyingWhileLoading", CoreDiedError, "killed by signal 11 (SIGSEGV)"),
        ("no_such_module:f", CoreDiedError, "ModuleNotFoundError: No module named 'no_such_module'"),
        ("nonsense", ConfigError, "module:callable"),
    ],
)
def test_a_failed_start_raises_its_cause(executor, error, text):
    client = ProcessClient(tiny_config(), executor=executor)
    with pytest.raises(error) as caught:
        client.start()
    assert text in last_line(caught.value)
    assert not psutil.pid_exists(client.pid) and not os.path.exists(client.socket_directory)


def send_raw(client: ProcessClient, frame: bytes) -> None:
    with zmq.Context() as context, context.socket(zmq.PUSH) as socket:
        socket.connect(f"ipc://{client.socket_directory}/to-core")
        socket.send(frame)
        time.sleep(0.2)


def test_corrupt_frames_fail_what_they_name_and_nothing_else():
    with core() as client:
        client.send(request("good", max_tokens=200))
        send_raw(client, b"\xc1\x00garbage")
        send_raw(client, b"")
        send_raw(client, b"\x82\xa4type\xa3add\xaarequest_id\xa3bad")
        ended = finish(client, {"good", "bad"})
        assert ended["good"].finish_reason == "length"
        assert (ended["bad"].finish_reason, ended["bad"].error_kind) == ("error", "invalid")


def test_a_corrupt_frame_from_the_core_is_a_dead_core_because_outputs_are_lost():
    with core() as client, zmq.Context() as context, context.socket(zmq.PUSH) as socket:
        socket.connect(f"ipc://{client.socket_directory}/from-core")
        socket.send(b"\xc1")
        with pytest.raises(CoreDiedError, match="does not decode"):
            client.recv()


def test_sockets_live_in_a_directory_of_this_user_only():
    with core() as client:
        assert os.stat(client.socket_directory).st_mode & 0o777 == 0o700


def test_sigint_is_the_parents_business_and_sigterm_ends_the_core_cleanly():
    with core() as client:
        os.kill(client.pid, signal.SIGINT)
        client.send(request("a"))
        assert finish(client, {"a"})
        os.kill(client.pid, signal.SIGTERM)
        with pytest.raises(CoreDiedError) as caught:
            client.recv()
        assert last_line(caught.value) == "exited with status 0, unasked: SIGTERM ends a core in this way"


def test_the_core_is_a_session_of_its_own():
    """Linux shares the CPUs out by session first: half is the core's, whatever its parent's session does."""
    with core() as client:
        assert os.getsid(client.pid) == client.pid


def test_closing_a_busy_core_does_not_wait_for_its_work():
    with core("Slow") as client:
        client.send(request("a", max_tokens=4000))  # for 47 minutes
        client.recv()
        client.close()
        with pytest.raises(CoreDiedError, match="closed"):
            client.recv()


def test_a_full_queue_refuses_what_is_new_loses_no_end_and_stops_no_close():
    with core(frames=16, max_waiting=10_000) as client:
        client.send(request("first", max_tokens=100_000))
        client.recv()
        os.kill(client.pid, signal.SIGSTOP)
        with pytest.raises(QueueFullError, match="frames=16"):
            for i in range(100_000):  # the kernel's buffers hold some, too
                client.send(request(f"r{i}", prompt_len=1000))
        client.send(AbortRequests(request_ids=["first"]))
        os.kill(client.pid, signal.SIGCONT)
        while not any(d.request_id == "first" and d.finish_reason for d in each_delta(client.recv().deltas)):
            pass
        os.kill(client.pid, signal.SIGSTOP)
        with pytest.raises(QueueFullError):
            for i in range(100_000):
                client.send(request(f"s{i}", prompt_len=1000))


PARENT = """
import sys, time
sys.path.insert(0, {tests!r})
from core_fakes import loading_file, request, tiny_config
from engine.core.client import ProcessClient
import threading
client = ProcessClient(tiny_config(), executor="core_fakes:{executor}")
if {starts}:
    client.start()
    client.send(request("a", max_tokens=4000))
    print(client.pid, client.socket_directory, flush=True)
else:
    threading.Thread(target=client.start, daemon=True).start()
    while not hasattr(client, "_handle"):
        time.sleep(0.01)
    while not loading_file(client.pid).exists():
        time.sleep(0.01)
    loading_file(client.pid).unlink()
    print(client.pid, client.socket_directory, flush=True)
{ending}
"""


@pytest.mark.parametrize(
    "executor, ending",
    [
        ("FakeExecutor", "time.sleep(3600)"),
        ("HangingInPlan", "time.sleep(3600)"),
        ("LoadingForEver", "time.sleep(3600)"),
        ("FakeExecutor", "sys.exit()"),
    ],
)
def test_a_core_never_outlives_its_parent(executor, ending):
    starts = executor != "LoadingForEver"
    script = PARENT.format(tests=str(Path(__file__).parent), executor=executor, ending=ending, starts=starts)
    parent = subprocess.Popen([sys.executable, "-c", script], stdout=subprocess.PIPE, text=True)
    assert parent.stdout is not None
    pid, directory = parent.stdout.readline().split()
    if "sleep" in ending:
        time.sleep(0.2)
        parent.kill()
    parent.wait(20)
    parent.stdout.close()
    deadline = time.monotonic() + 30
    while psutil.pid_exists(int(pid)) and psutil.Process(int(pid)).status() != psutil.STATUS_ZOMBIE:
        assert time.monotonic() < deadline, "the core outlived its parent"
        time.sleep(0.02)
    assert not os.path.exists(directory)
