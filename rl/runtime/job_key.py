"""The job's key, 32 bytes that only processes of the job know, and proofs that a process knows it.

The key comes from the environment variable LOCKSTEP_JOB_KEY, else from a file of mode 0600 in the run
directory. The first rank creates this file, and rank 0 removes it when all ranks have met. Under mpirun rank
0 broadcasts the key. The key appears in no command line, log or report, and worker processes do not inherit
it.

A proof is an HMAC-SHA256 over a label and one random number of each side, so that no proof serves twice.
"""

import contextlib
import errno
import hashlib
import hmac
import os
import secrets
import tempfile
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from rl.sandbox.private_directory import make_private, read_private

KEY_VARIABLE = "LOCKSTEP_JOB_KEY"
MIN_CHARACTERS = 32
"""Shortest LOCKSTEP_JOB_KEY."""
NUM_BYTES = 32
"""Size of a key, a random number and a proof, in bytes."""
VISIBLE_S = 10.0
"""Maximum time until a network file system shows a file that another node has created, in seconds."""


@dataclass(frozen=True)
class JobKey:
    secret: bytes = field(repr=False)
    path: Path | None = None
    """The file with the key, if there is one."""

    def forget(self) -> None:
        """Remove the file. Rank 0 calls this when all ranks have the key."""
        if self.path is not None:
            with contextlib.suppress(OSError):  # it is of no use to a later start
                self.path.unlink()


def key_from(environ: Mapping[str, str]) -> JobKey | None:
    """Return the key of LOCKSTEP_JOB_KEY, None if it is not set. Raises ValueError if it is too short."""
    text = environ.get(KEY_VARIABLE, "")
    if not text:
        return None
    if len(text) < MIN_CHARACTERS:
        raise ValueError(
            f"{KEY_VARIABLE} has {len(text)} characters; at least {MIN_CHARACTERS} random ones are required; "
            "create it with `openssl rand -hex 32`, or unset it."
        )
    return JobKey(hashlib.sha256(text.encode()).digest())


def share_file(directory: Path, attempt: str) -> JobKey:
    """Return the key of this attempt from its file, which is created unless another rank was first.

    Raises ValueError if there can be no such file, or if others can read it.
    """
    path = directory / f".job_key.{hashlib.sha256(attempt.encode()).hexdigest()[:16]}"
    try:
        make_private(directory)
        _create(path)
        return JobKey(_read(path), path)
    except OSError as error:
        raise ValueError(
            f"{path}, the file for the job's key, cannot be used: {error.strerror}; make the directory "
            f"writable or set {KEY_VARIABLE} on all ranks."
        ) from error


def _create(path: Path) -> None:
    """Create the file, whole and with mode 0600, unless it exists; links are atomic on NFS too."""
    descriptor, name = tempfile.mkstemp(prefix=f"{path.name}.", dir=path.parent)
    try:
        with os.fdopen(descriptor, "wb") as file:
            file.write(secrets.token_bytes(NUM_BYTES))
            file.flush()
            os.fsync(file.fileno())
        with contextlib.suppress(FileExistsError):
            os.link(name, path)
    finally:
        os.unlink(name)


def _read(path: Path) -> bytes:
    deadline = time.monotonic() + VISIBLE_S
    while True:
        try:
            secret = read_private(path, limit=NUM_BYTES + 1, remedy=f"set {KEY_VARIABLE} on all ranks")
            break
        except OSError as error:
            if error.errno not in (errno.ENOENT, errno.ESTALE) or time.monotonic() > deadline:
                raise
            time.sleep(0.1)
    if len(secret) != NUM_BYTES:
        raise ValueError(f"{path} has {len(secret)} bytes; a key has {NUM_BYTES}; remove the file.")
    return secret


# Proofs -------------------------------------------------------------------------------------------------


def nonce() -> bytes:
    """Return a random number for one connection."""
    return secrets.token_bytes(NUM_BYTES)


def proof(secret: bytes, label: str, *parts: bytes | bytearray) -> bytes:
    """Return the proof that its maker knows the key. All parts but the last have a fixed length."""
    return hmac.digest(secret, b"".join((label.encode(), b"\0", *parts)), "sha256")


def is_proof(found: bytes, secret: bytes, label: str, *parts: bytes) -> bool:
    return hmac.compare_digest(found, proof(secret, label, *parts))


class Seal:
    """The proofs of the messages in one direction of a connection; they also fix the messages' order."""

    def __init__(self, secret: bytes, label: str, *nonces: bytes):
        self._key, self._number = proof(secret, label, *nonces), 0

    def next(self, message: bytes | bytearray) -> bytes:
        """Return the proof of the next message."""
        self._number += 1
        return proof(self._key, "message", self._number.to_bytes(8, "big"), message)
