"""Directories that others made, may write to, or may replace."""

import grp
import os
import pwd
import stat
import struct
from pathlib import Path

import pytest

from rl.runtime.compile_caches import CACHES, use_private_caches
from rl.sandbox.private_directory import make_private, read_private, why_untrusted
from rl.stopping.requests import refuse_if_stopped_by_hand

OTHER = 64321


def chown(path, uid, gid=-1):
    if os.geteuid() != 0:
        pytest.skip("only root can make another user's directory")
    os.chown(path, uid, gid)


@pytest.fixture
def above(tmp_path):
    (tmp_path / "above").mkdir()
    return tmp_path / "above"


@pytest.mark.parametrize("depth", ["run", "group/run", "group/user/run"])
def test_a_run_directory_that_others_could_replace_is_refused(depth, above):
    directory = above / depth
    directory.mkdir(parents=True)
    above.chmod(0o777)
    with pytest.raises(ValueError, match=f"{above} can be written by other users.*chmod o-w"):
        make_private(directory)
    (above.parent / "link").symlink_to(above)
    assert str(above) in why_untrusted(above.parent / "link" / depth, trusts_group=True)
    above.chmod(0o1777)
    make_private(directory)


def test_directories_of_a_project_and_of_its_owner_hold_runs_and_no_code(above):
    above.chmod(0o2770)
    chown(above, OTHER, OTHER)
    directory = above / "me" / "run"
    make_private(directory)
    directory.chmod(0o2770)
    make_private(directory)
    assert f"{above} belongs to user {OTHER}" in why_untrusted(directory)
    chown(above, 0)
    assert "can be written by other users" in why_untrusted(directory)
    above.chmod(0o3770)
    directory.chmod(0o700)
    assert why_untrusted(directory) == ""


def test_an_access_list_of_a_private_group_lets_others_write(above):
    """As a project's default list gives to all that is made below it."""
    try:
        own = pwd.getpwuid(os.geteuid())
        has_private_group = grp.getgrgid(own.pw_gid).gr_name == own.pw_name
    except KeyError:  # a number without a name
        has_private_group = False
    if not has_private_group:
        pytest.skip("this user has no private group")
    above.chmod(0o775)
    os.chown(above, -1, own.pw_gid)
    assert why_untrusted(above) == ""
    nobody = 0xFFFFFFFF
    entries = (1, 7, nobody), (2, 7, OTHER), (4, 5, nobody), (16, 7, nobody), (32, 5, nobody)
    listed = struct.pack("<I", 2) + b"".join(struct.pack("<HHI", *entry) for entry in entries)
    try:
        os.setxattr(above, "system.posix_acl_access", listed)
    except OSError as error:
        pytest.skip(f"no access lists here: {error}")
    assert "can be written by other users" in why_untrusted(above)


def test_a_pipe_in_the_place_of_a_secret_is_refused(above):
    os.mkfifo(above / "key", 0o644)
    with pytest.raises(ValueError, match="mode=0644; it must be"):
        read_private(above / "key", limit=9, remedy="")


def test_directories_above_a_run_are_not_made_open_to_everybody(above):
    before = os.umask(0)
    make_private(above / "user" / "runs" / "a")
    os.umask(before)
    made = [above / "user" / "runs" / "a", above / "user" / "runs", above / "user"]
    assert [stat.S_IMODE(path.stat().st_mode) for path in made] == [0o770, 0o775, 0o775]


def test_a_stop_file_in_the_directory_of_somebody_else_is_not_believed(above):
    (above / "stop").touch()
    with pytest.raises(ValueError, match="which stopped this run"):
        refuse_if_stopped_by_hand(str(above))
    above.chmod(0o777)
    with pytest.raises(ValueError, match="can be written by other users"):
        refuse_if_stopped_by_hand(str(above))


@pytest.mark.parametrize("name", CACHES)
@pytest.mark.parametrize("is_there", [True, False])
def test_a_cache_that_others_could_replace_is_not_used(name, is_there, above, tmp_path, monkeypatch):
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    monkeypatch.setenv("HOME", str(tmp_path))
    (above / "cache").mkdir() if is_there else None
    above.chmod(0o777)
    environ = {name: str(above / "cache")}
    use_private_caches(environ)
    fresh = Path(environ[name]).parent
    assert fresh.parent == tmp_path and fresh.name.startswith("lockstep-cache-")
    above.chmod(0o755)
    environ = {name: str(above / "cache")}
    use_private_caches(environ)
    assert environ[name] == str(above / "cache")


def test_a_cache_in_an_open_home_is_not_used(above, tmp_path, monkeypatch):
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    monkeypatch.setenv("HOME", str(above))
    above.chmod(0o777)
    environ: dict[str, str] = {}
    use_private_caches(environ)
    inside = {name for name, (_, default) in CACHES.items() if default.startswith("{XDG_CACHE_HOME}")}
    assert environ.keys() == CACHES.keys() - inside
    assert not any(str(above) in place for place in environ.values())


def test_a_temporary_directory_whose_entries_others_may_replace_is_refused(above, monkeypatch):
    monkeypatch.setattr("tempfile.tempdir", str(above))
    above.chmod(0o777)
    with pytest.raises(ValueError, match=rf"TMPDIR={above}: .*chmod \+t"):
        use_private_caches({})
    above.chmod(0o1777)
    use_private_caches({})
