"""The job's store in its own process, and clients that do not know the job's key."""

import contextlib
import secrets
import socket
import subprocess
import sys
import threading
from textwrap import dedent

import pytest

from rl.runtime.job_key import NUM_BYTES, proof
from rl.runtime.job_store import JobStore, StoreError, StoreProcess, connect_to
from rl.runtime.store_server import TO_SERVER
from rl.runtime.strangers import most_strangers
from tests.spawn import ROOT

SECRET = secrets.token_bytes(32)


@pytest.fixture
def address():
    listener = socket.create_server(("127.0.0.1", 0))
    found = listener.getsockname()
    process = StoreProcess(listener, SECRET)
    yield found
    process.close()


@pytest.fixture
def store(address) -> JobStore:
    return connect_to(*address, SECRET)


def test_ranks_share_values_counters_and_queues(address, store):
    other = connect_to(*address, SECRET)
    store.set("value", b"\n\x00" * 300_000)
    assert other.get("value") == b"\n\x00" * 300_000 and other.get("none") is None
    assert [store.add("count", 2), other.add("count", 0), other.add("count", -5)] == [2, 2, -3]
    assert store.compare_set("first", "", "mine") == other.compare_set("first", "", "theirs") == b"mine"
    assert store.compare_set("absent", "x", "y") == b"" and not store.check(["absent"])
    assert store.compare_set("first", "mine", "") == b""
    for item in ("one", "", "two"):
        store.push("queue", item)
    assert other.check(["queue", "count"]) and not other.check(["queue", "none"])
    assert [other.pop("queue") for _ in range(4)] == [b"one", b"", b"two", None]
    assert not other.check(["queue"])
    store.delete("value")
    assert other.get("value") is None
    inner = store.clone("a").clone("b")
    inner.set("key", "1")
    assert inner.clone().get("key") == b"1" == other.get("a/b/key")


def test_a_wait_ends_when_its_last_key_is_set(address, store):
    assert not store.wait(["one", "two"], 0.05)
    other, found = connect_to(*address, SECRET), []
    thread = threading.Thread(target=lambda: found.append(other.wait(["one", "two"], 60)))
    thread.start()
    store.push("two", "")
    store.set("one", "")
    thread.join()
    assert found == [True] and store.wait(["one"], 0)


def test_clients_without_the_key_learn_nothing_and_stop_nobody(address, store):
    store.set("sample", "of the run")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("rl.runtime.job_store.CONNECT_S", 0.1)
        with pytest.raises(StoreError, match="all ranks need the same key"):
            connect_to(*address, bytes(32))
    request = b'["get", ["sample"], null]\n'
    message = len(request).to_bytes(4, "big") + request
    for answer_to in (
        lambda nonce: b"",
        lambda nonce: nonce + nonce,
        lambda nonce: bytes(32) + proof(bytes(32), TO_SERVER, nonce, bytes(32)),
        lambda nonce: bytes(32) + proof(SECRET, TO_SERVER, bytes(32), bytes(32)) + message,  # of another time
        lambda nonce: bytes(32) + proof(SECRET, TO_SERVER, nonce, bytes(32)) + message + bytes(32),
        lambda nonce: b"GET / HTTP/1.1\r\n\r\n" * 1000,
    ):
        with socket.create_connection(address) as client:
            nonce = client.recv(NUM_BYTES)
            with contextlib.suppress(ConnectionError):
                client.sendall(answer_to(nonce))
                client.shutdown(socket.SHUT_WR)
                assert client.recv(100) == b""
    silent = []
    with contextlib.ExitStack() as stack:
        for _ in range(most_strangers() + 50):  # more than the server keeps
            silent.append(stack.enter_context(socket.create_connection(address)))
        assert connect_to(*address, SECRET).get("sample") == store.get("sample") == b"of the run"
        assert silent[0].recv(NUM_BYTES) and silent[0].recv(1) == b""  # the oldest was closed


def test_a_message_that_was_changed_on_the_way_is_not_obeyed(address, store):
    connection = store._ask.__self__
    connection._sent._number += 1
    with pytest.raises(StoreError):
        store.set("value", "forged")
    assert connect_to(*address, SECRET).get("value") is None


def test_a_forked_process_does_not_keep_the_store_from_ending():
    program = """
        import os, signal, socket
        from rl.runtime.job_store import StoreProcess
        process = StoreProcess(socket.create_server(("127.0.0.1", 0)), bytes(32))
        child = os.fork()
        signal.alarm(30)
        if not child:
            signal.pause()
        try:
            process.close()
        finally:
            os.kill(child, signal.SIGKILL)
    """
    assert subprocess.run([sys.executable, "-c", dedent(program)], cwd=ROOT).returncode == 0


def test_the_process_ends_with_rank_0_and_clients_notice():
    program = """
        import os, socket, sys, time
        from rl.runtime.job_store import StoreProcess
        listener = socket.create_server(("127.0.0.1", 0))
        print(listener.getsockname()[1], flush=True)
        process = StoreProcess(listener, bytes(32))
        sys.stdin.read()
        os._exit(0)
    """
    pipes = dict(stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    rank_0 = subprocess.Popen([sys.executable, "-c", dedent(program)], cwd=ROOT, **pipes)
    store = connect_to("127.0.0.1", int(rank_0.stdout.readline()), bytes(32))
    store.set("key", "")
    rank_0.kill()
    with pytest.raises(StoreError, match="lost the connection"):
        store.wait(["never"], 60)
    rank_0.communicate()
