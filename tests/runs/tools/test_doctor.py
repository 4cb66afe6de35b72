"""tools/doctor.py names faults of a node; real ranks play the nodes for what lies between them."""

import json
import os
import subprocess
import sys
from itertools import combinations
from pathlib import Path

import pytest

from tests.spawn import ROOT, run_ranks
from tests.tables import rows
from tools import doctor
from tools.link_checks import judge_pairs, pair_rounds, read_nccl_log
from tools.node_checks import (
    Finding,
    bad,
    check_disks,
    check_gpus,
    check_readable,
    check_versions,
    judge_disk,
    ok,
    read_gpus,
)
from tools.site_checks import (
    check_driver,
    check_file_clock,
    check_glibc,
    check_interfaces,
    check_libraries,
    check_modules,
    check_places,
    check_site,
    needed_glibc,
)

FINE = "NVIDIA H100 80GB HBM3, 4, 81559, 0, 1980, 1980, Not Active, Not Active"
NODES = """
    import os, socket, sys, time

    rank, faulty = int(os.environ["RANK"]), sys.argv[2] == "faulty"
    socket.gethostname = lambda: f"node{rank}"
    socket.gethostbyname = lambda name: "127.0.0.1" if faulty and rank == 1 else f"10.0.0.{rank}"
    if faulty and rank == 1:
        real = time.time
        time.time = lambda: real() - 5
    if faulty and rank == 2:
        os.chdir("/")
    from tools.doctor import main

    quick = ["--mib", "1", "--min-free-gib", "0", "--slow-share", "0.01"]
    print(main(["--json", "--config", sys.argv[1], *quick]))
"""
"""Every rank a node of its own; with faults a clock that is late, a name that resolves to the node itself,
and files that are not there. The machine that plays all nodes may be busy: hardly anything counts as slow."""


def levels(findings):
    return [finding.level for finding in findings]


class TestGpus:
    def test_idle_gpus_in_order(self):
        assert read_gpus(f"{FINE}\n{FINE}\n", expected=2) == [ok("gpus", "2 x NVIDIA H100 80GB HBM3")]

    @pytest.mark.parametrize(
        "old, new, check",
        rows("""
            , 4, 81559 => , 40123, 81559 => gpu memory ;; 81559, 0, => 81559, 3, => ecc ;;
            Not Active, Not Active => Active, Not Active => clocks ;;
            Not Active, Not Active => Not Active, Active => clocks
            """),
    )
    def test_a_fault_of_one_is_named(self, old, new, check):
        (finding,) = read_gpus(f"{FINE}\n{FINE.replace(old, new)}\n", expected=2)
        assert (finding.level, finding.check) == ("bad", check) and "GPU 1" in finding.text

    def test_missing_gpus_and_cards_without_ecc(self, monkeypatch, tmp_path):
        assert read_gpus(FINE, expected=8)[0] == bad("gpus", "1 GPUs seen, 8 expected")
        assert levels(read_gpus(FINE.replace("81559, 0,", "81559, [N/A],"), expected=1)) == ["ok"]
        monkeypatch.setenv("PATH", str(tmp_path))
        assert levels(check_gpus(expected=4)) == ["bad"] and levels(check_gpus(expected=0)) == ["ok"]

    def test_a_driver_that_fails_is_a_finding(self, tmp_path, monkeypatch):
        script = "#!/bin/bash\necho 'Unable to determine the device handle for GPU0000:3B:00.0'\nexit 255\n"
        (tmp_path / "nvidia-smi").write_text(script)
        (tmp_path / "nvidia-smi").chmod(0o755)
        monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
        (finding,) = check_gpus(expected=None)
        assert finding.level == "bad" and "device handle" in finding.text

    def test_gpus_of_others_are_not_checked(self, tmp_path, monkeypatch):
        (tmp_path / "nvidia-smi").write_text('#!/bin/bash\necho "$*" >&2\nexit 1\n')
        (tmp_path / "nvidia-smi").chmod(0o755)
        monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
        for only, asked in (("0,2", True), ("", False), ("GPU-1f", False)):
            (finding,) = check_gpus(None, only=only)
            assert finding.text.endswith(f"--id={only}") == asked and ("--id" in finding.text) == asked


class TestNode:
    def test_disks_that_are_full_or_take_no_write(self, tmp_path):
        assert levels(check_disks([tmp_path / "not" / "there" / "yet"], min_free_gib=0.0)) == ["ok"]
        (finding,) = check_disks([tmp_path], min_free_gib=1e9)
        assert finding.level == "bad" and "less than 1e+09 GiB" in finding.text
        (finding,) = check_disks([Path("/proc/sys")], min_free_gib=0.0)
        assert finding.level == "bad" and "cannot be written to" in finding.text
        for inodes, free, level in ((0, 0, "ok"), (1000000, 500, "bad"), (1000000, 900000, "ok")):
            disk = os.statvfs_result((4096, 4096, 1 << 30, 1 << 30, 1 << 30, inodes, free, free, 0, 255))
            assert judge_disk(Path("/x"), disk, min_free_gib=10.0).level == level

    def test_every_file_of_a_model_is_opened(self, tmp_path):
        (tmp_path / "model").mkdir()
        (tmp_path / "model" / "a").write_text("x")
        (tmp_path / "model" / "gone").symlink_to(tmp_path / "nowhere")
        (tmp_path / "train").write_text("x")
        paths = {"model.path": [str(tmp_path / "model")], "data.train": [str(tmp_path / "train")]}
        assert levels(check_readable(paths)) == ["ok"]  # a link to nowhere is no file, and none that is read
        (finding,) = check_readable(paths | {"data.val": [str(tmp_path / "val")]})
        assert finding.level == "bad" and "data.val" in finding.text and "No such file" in finding.text

    def test_another_version_than_the_tested_one(self, monkeypatch):
        import importlib.metadata

        real, other = importlib.metadata.version, {"megatron-core": "9.9"}
        monkeypatch.setattr(importlib.metadata, "version", lambda name: other.get(name) or real(name))
        (finding,) = check_versions()
        assert finding.level == "warn" and "megatron-core 9.9 (tested: 0.16.1)" in finding.text

    def test_a_part_of_the_compiled_set(self, monkeypatch):
        import importlib.metadata

        real, other = importlib.metadata.version, {"transformer-engine": "2.11.0", "torch": "2.13.0+cpu"}
        monkeypatch.setattr(importlib.metadata, "version", lambda name: other.get(name) or real(name))
        finding = {finding.check: finding for finding in check_versions()}["compiled set"]
        assert finding.level == "warn" and finding.text == "transformer-engine without flash-attn"


class TestSite:
    def test_this_machine_is_in_order(self, tmp_path):
        assert "bad" not in levels(check_site([tmp_path], ranks_on_node=1, max_skew_s=1.0))

    def test_an_older_glibc_than_the_wheels_were_built_for(self):
        version, package = needed_glibc()
        assert (2, 17) < version < (3, 0) and package
        finding = check_glibc(((2, 99), "vllm"))
        assert finding.level == "bad" and "vllm needs 2.99" in finding.text and "image" in finding.remedy

    @pytest.mark.parametrize(
        "torch, driver, level", [("", None, "ok"), ("13.0", 13010, "ok"), ("13.0", 12080, "bad")]
    )
    def test_a_driver_that_is_too_old_for_torch(self, torch, driver, level):
        finding = check_driver(torch, driver)
        assert finding.level == level and ("R580" in finding.remedy) == (level == "bad")

    def test_interfaces_that_this_node_lacks(self):
        def of(**env):
            return levels(check_interfaces(env))

        assert of() == of(NCCL_SOCKET_IFNAME="lo", GLOO_SOCKET_IFNAME="lo") == ["ok"]
        assert of(NCCL_SOCKET_IFNAME="l") == of(NCCL_SOCKET_IFNAME="^docker0") == ["ok"]  # prefixes, all but
        assert of(NCCL_SOCKET_IFNAME="=l") == of(GLOO_SOCKET_IFNAME="l") == ["bad"]
        (finding,) = check_interfaces({"NCCL_IB_HCA": "mlx5_99:1"})
        assert finding.level == "bad" and "NCCL_IB_HCA=mlx5_99:1" in finding.text

    def test_what_modules_leave_in_the_environment(self, tmp_path, monkeypatch):
        packages, module = tmp_path / "site-packages", tmp_path / "module"
        for path in (packages / "nvidia/nccl/lib/libnccl.so.2", module / "libnccl.so.2"):
            path.parent.mkdir(parents=True)
            path.touch()
        monkeypatch.setattr("tools.site_checks._packages", lambda: packages)
        (finding,) = check_libraries({"LD_LIBRARY_PATH": f"/nowhere:{module}"})
        assert finding.level == "warn" and f"{module}, whose libnccl.so.2" in finding.text
        assert levels(check_libraries({"LD_LIBRARY_PATH": str(tmp_path)})) == ["ok"]
        (tmp_path / "numpy").mkdir()
        (tmp_path / "numpy" / "__init__.py").touch()
        monkeypatch.syspath_prepend(tmp_path)
        monkeypatch.delitem(sys.modules, "numpy", raising=False)
        (finding,) = check_modules()
        assert finding.level == "warn" and f"numpy from {tmp_path}" in finding.text

    def test_a_home_or_tmpdir_that_cannot_be_used(self, tmp_path, monkeypatch):
        monkeypatch.setenv("HOME", "/proc/sys")
        monkeypatch.setattr("tempfile.gettempdir", lambda: str(tmp_path / ("x" * 80)))
        disk = os.statvfs_result((4096, 4096, 1 << 30, 1 << 30, 1 << 30, 0, 0, 0, os.ST_NOEXEC, 255))
        monkeypatch.setattr(os, "statvfs", lambda path: disk)
        found = {finding.check: finding for finding in check_places({"LOCKSTEP_CACHE": str(tmp_path)})}
        assert found["home"].level == "warn" and "XDG_CACHE_HOME" in found["home"].remedy
        assert found["tmpdir"].level == found["noexec"].level == "bad"

    def test_a_file_system_whose_clock_differs(self, tmp_path, monkeypatch):
        import time

        real = time.time
        assert levels(check_file_clock(tmp_path / "run", max_skew_s=1.0)) == ["ok"]
        monkeypatch.setattr(time, "time", lambda: real() + 5)
        (finding,) = check_file_clock(tmp_path / "run", max_skew_s=1.0)
        assert finding.level == "bad" and "-5.0" in finding.text and "chrony" in finding.remedy


class TestPairs:
    def test_the_rounds_hold_every_pair_once_and_no_node_twice(self):
        for number in (2, 3, 4, 7, 8):
            rounds = pair_rounds(number, 100)
            assert sorted(pair for pairs in rounds for pair in pairs) == [*combinations(range(number), 2)]
            assert all(len({node for pair in pairs for node in pair}) == 2 * len(pairs) for pairs in rounds)
        rounds = pair_rounds(64, 3)
        assert len(rounds) == 3 and all(len(pairs) == 32 for pairs in rounds)

    def test_only_the_node_with_the_slow_link_is_bad(self):
        def judged(speeds, min_gb_s=0):
            found = judge_pairs(speeds, slow_share=0.5, min_gb_s=min_gb_s)
            return {host: finding.level for host, (finding,) in found.items()}

        speeds = {(x, y): 3.0 if "c" in (x, y) else 40.0 for x, y in combinations("abcd", 2)}
        assert judged(speeds) == {"a": "warn", "b": "warn", "c": "bad", "d": "warn"}
        assert set(judged(speeds, min_gb_s=50).values()) == {"bad"}
        assert judged({("a", "b"): 1.0}) == {"a": "ok", "b": "ok"}


class TestTransport:
    ON_IB = "node1:7:9 [0] NCCL INFO Channel 00/0 : 1[0] -> 0[0] [receive] via NET/IB/0/GDRDMA\n"
    ON_TCP = (
        "NCCL INFO NET/IB : No device found.\nNCCL INFO Channel 00/0 : 1[0] -> 0[0] [send] via NET/Socket/0\n"
    )

    def test_the_transport_is_read_from_the_log_of_nccl(self):
        for log, rdma, level, words in (
            (self.ON_IB, ["mlx5_0"], "ok", ["NET/IB"]),
            (self.ON_TCP, ["mlx5_0"], "bad", ["NCCL uses TCP", "mlx5_0"]),
            (self.ON_TCP, [], "ok", []),
            ("NCCL INFO Using network Socket\n", ["mlx5_0"], "bad", []),
            ("NCCL INFO Using network AWS Libfabric\n", [], "ok", []),
        ):
            (finding,) = read_nccl_log(log, rdma=rdma)
            assert finding.level == level and all(word in finding.text for word in words), finding


class TestReport:
    SHARED = bad("paths", "model.path: x cannot be read", "copy it")

    def test_only_nodes_that_are_worse_than_others_are_excluded(self):
        by_node = {"a": [self.SHARED], "b": [self.SHARED, bad("clock", "+5 s")]}
        assert doctor.excluded(by_node) == ["b"] and doctor.bad_nodes(by_node) == ["a", "b"]
        text = doctor.as_text(by_node, verbose=False)
        assert text.count("model.path") == 1 and text.endswith("--exclude=b")
        assert "bad   all 2 nodes: paths: model.path: x cannot be read\n      remedy: copy it\n" in text

    def test_passed_checks_are_reported_on_request(self):
        by_node = {"a": [ok("gpus", "8"), Finding("warn", "versions", "other")]}
        assert "gpus" not in doctor.as_text(by_node, verbose=False)
        assert "gpus" in doctor.as_text(by_node, verbose=True)
        assert "--exclude" not in doctor.as_text(by_node, verbose=True)


@pytest.fixture
def config(tmp_path, monkeypatch):
    """A config with files below the directory where the ranks start."""
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "config.json").write_text("{}")
    (tmp_path / "train.jsonl").write_text("{}")
    (tmp_path / "config.yaml").write_text(
        f"run: {{dir: {tmp_path}/run}}\nmodel: {{path: model}}\n"
        "data: {train: [train.jsonl]}\nreward: {function: a:b}\n"
    )
    monkeypatch.chdir(tmp_path)
    return tmp_path / "config.yaml"


def examined(config, case):
    out = run_ranks(3, NODES, config, case, timeout=120)
    *report, code = out[0].strip().splitlines()
    assert [o.strip().splitlines()[-1] for o in out] == [code] * 3  # every rank leaves with the same code
    return int(code), json.loads(report[-1])


def test_nodes_in_order(config):
    code, report = examined(config, "fine")
    assert code == 0 and report["ok"], report
    assert report["exclude"] == [] and set(report["nodes"]) == {"node0", "node1", "node2"}
    checks = {finding["check"] for finding in report["nodes"]["node1"]}
    assert {"clock", "bandwidth", "transport", "paths", "disk", "versions", "/dev/shm", "glibc"} <= checks


def test_faults_of_single_nodes_are_named(config):
    code, report = examined(config, "faulty")
    assert code == 2 and report["exclude"] == ["node1", "node2"]
    found = {
        node: {f["check"]: f["text"] for f in some if f["level"] == "bad"}
        for node, some in report["nodes"].items()
    }
    assert found["node0"] == {}
    assert found["node1"].keys() == {"clock", "file clock", "transport"}
    assert -6 < float(found["node1"]["clock"].split()[0]) < -4  # 5 s were injected
    assert found["node2"].keys() == {"paths"} and "train.jsonl" in found["node2"]["paths"]


def test_by_hand_on_one_node(config):
    command = [sys.executable, "-m", "lockstep", "doctor", "--config", config, "--min-free-gib", "0"]

    env = os.environ | {"PYTHONPATH": str(ROOT)}

    def doctor(*options):
        return subprocess.run([*command, *options], capture_output=True, text=True, env=env, timeout=60)

    done = doctor()
    assert done.returncode == 0 and "1 node, 0 with a failed check" in done.stdout
    done = doctor("--gpus", "64")
    assert done.returncode == 2 and "--exclude=" in done.stdout
    done = doctor("run.nmae=x")
    assert done.returncode == 2 and done.stderr.startswith("error: ") and "run.name" in done.stderr
