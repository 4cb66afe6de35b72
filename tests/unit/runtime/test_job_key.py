import os
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor

import pytest

from rl.runtime.job_key import is_proof, key_from, nonce, proof, share_file
from rl.runtime.ranks import discover


def test_all_ranks_read_the_key_of_the_first(tmp_path):
    with ThreadPoolExecutor(16) as threads:
        keys = set(threads.map(lambda _: share_file(tmp_path / "run", "7.0.0"), range(32)))
    (key,) = keys
    assert len(key.secret) == 32 and list((tmp_path / "run").iterdir()) == [key.path]
    assert key.path.stat().st_mode & 0o777 == 0o600
    assert share_file(tmp_path / "run", "7.0.1").secret != key.secret
    key.forget()
    assert share_file(tmp_path / "run", "7.0.0").secret != key.secret


def test_a_key_that_others_could_know_is_refused(tmp_path):
    key = share_file(tmp_path, "a")
    key.path.chmod(0o640)
    with pytest.raises(ValueError, match="mode=0640; it must be this user's with mode 0600"):
        share_file(tmp_path, "a")
    key.path.unlink()
    target = tmp_path / "target"
    target.write_bytes(bytes(32))
    key.path.symlink_to(target)
    with pytest.raises(ValueError, match="cannot be used"):
        share_file(tmp_path, "a")
    with pytest.raises(ValueError, match="LOCKSTEP_JOB_KEY has 5 characters; at least 32"):
        key_from({"LOCKSTEP_JOB_KEY": "short"})


@pytest.mark.skipif(os.geteuid() != 0, reason="changes the owner of a file")
def test_a_key_of_another_user_is_refused(tmp_path):
    os.chown(share_file(tmp_path, "a").path, 65534, 65534)
    with pytest.raises(ValueError, match="owner=65534"):
        share_file(tmp_path, "a")


def test_worker_processes_do_not_inherit_the_key(monkeypatch):
    monkeypatch.setenv("LOCKSTEP_JOB_KEY", "x" * 32)
    ranks = discover()
    seen = subprocess.run([sys.executable, "-c", "import os; print(dict(os.environ))"], capture_output=True)
    assert b"LOCKSTEP_JOB_KEY" not in seen.stdout and ranks.key is not None
    assert ranks.key.secret.hex() not in repr(ranks) and repr(ranks.key.secret) not in repr(ranks)


def test_a_proof_holds_for_one_label_and_connection():
    secret, one, other = nonce(), nonce(), nonce()
    mine = proof(secret, "go", one, other)
    assert is_proof(mine, secret, "go", one, other)
    for label, *parts in (("stop", one, other), ("go", other, one), ("go", one)):
        assert not is_proof(mine, secret, label, *parts)
    assert not is_proof(mine, nonce(), "go", one, other) and not is_proof(b"", secret, "go", one, other)
