"""The batch files with a fake Slurm on the PATH: what srun gets, and what the tests' cluster lacks."""

import json
import os
import re
import shlex
import shutil
import subprocess
import time

import pytest

from rl.config.schema import load_config
from rl.run_directory.status import Status
from tests.spawn import ROOT

BATCH = sorted((ROOT / "slurm").glob("*.sbatch"))
SHELL = [
    path
    for part in ("slurm", "tools", "tests", ".ci")
    for path in (ROOT / part).rglob("*")
    if path.suffix in (".sh", ".sbatch", ".pbs", ".lsf", ".flux")
]

SRUN = """#!/bin/bash
printf '%s\\0' "$@" >"$FAKE/srun.$(ls "$FAKE" | grep -c srun)"
env >"$FAKE/env"
if [ -n "$LOCKSTEP_GIVEN" ]; then cp -p "$LOCKSTEP_GIVEN" "$FAKE/given"; fi
if [ "$SRUN_EXIT" != 0 ]; then echo "srun: error: n2: task 3: Exited with exit code $SRUN_EXIT" >&2; fi
(ulimit -c; ulimit -n; ulimit -H -n) >"$FAKE/limits"
if [ -n "$AT_STEP" ]; then
    facts='{"checkpoint_step": %s, "state": "stopped", "reason": "%s", "run": "%s"}'
    printf "$facts" "$AT_STEP" "$REASON" "$RUN" >"$LOCKSTEP_STATUS"
fi
exit "$SRUN_EXIT"
"""
SCONTROL = '#!/bin/bash\necho "$@" >>"$FAKE/scontrol"\n'
SQUEUE = '#!/bin/bash\nif [ "${!#}" = %V ]; then echo "$SUBMITTED"; else echo "$FAKE_END"; fi\n'


WEIRD = 'it\'s $HOME #1 "x" `a`, 100% [b]; c=d\u00e9 -e ~f'


@pytest.fixture
def site(tmp_path, request):
    """Return a directory with the fake programs, and with a checkout that has batch files but no site.sh."""
    tmp_path /= getattr(request, "param", "site")
    for name, text in {"srun": SRUN, "scontrol": SCONTROL, "squeue": SQUEUE}.items():
        path = tmp_path / "bin" / name
        path.parent.mkdir(exist_ok=True, parents=True)
        path.write_text(text)
        path.chmod(0o755)
    shutil.copytree(ROOT / "slurm", tmp_path / "root" / "slurm", ignore=shutil.ignore_patterns("site.sh"))
    (tmp_path / "fake").mkdir()
    (tmp_path / "work").mkdir()
    return tmp_path


class Job:
    """Runs a batch file in bash with what slurmd sets: an allocation of 2 nodes of 8 GPUs and 64 CPUs."""

    def __init__(self, site, file, *arguments, exit_code: int = 0, at_step: str = "", **env: str | None):
        self.fake, self.work = site / "fake", site / "work"
        for old in self.fake.iterdir():
            old.unlink()
        outside = {
            k: v for k, v in os.environ.items() if not k.startswith(("SLURM", "LOCKSTEP", "SBATCH", "MASTER"))
        }
        slurm = dict(
            SLURM_JOB_ID="4711",
            SLURM_JOB_NAME=file,
            SLURM_JOB_NUM_NODES="2",
            SLURM_JOB_NODELIST="n[1-2]",
            SLURM_CPUS_ON_NODE="64",
            SLURM_GPUS_ON_NODE="8",
            SLURM_SUBMIT_DIR=str(site / "root"),
            SLURM_NTASKS="1",
        )
        fake = dict(FAKE=str(self.fake), SRUN_EXIT=str(exit_code), AT_STEP=at_step, TZ="UTC")
        merged = outside | slurm | fake | dict(FAKE_END="2030-01-01T00:00:00") | env
        merged = {k: v for k, v in merged.items() if v is not None}
        merged["PATH"] = f"{site}/bin:{merged['PATH']}"
        command = ["bash", site / "root" / "slurm" / f"{file}.sbatch", *arguments]
        log, requeued = self.work / "job.out", self.fake / "scontrol"
        with open(log, "a") as out:
            done = subprocess.run(command, env=merged, cwd=self.work, stdout=out, stderr=out, timeout=60)
        self.code, self.log = done.returncode, log.read_text()
        self.calls = [path.read_text().split("\0")[:-1] for path in sorted(self.fake.glob("srun.*"))]
        self.requeued = requeued.read_text().split() if requeued.exists() else []

    @property
    def options(self) -> list[str]:
        """Options of the last srun, before its command."""
        command = next(i for i, word in enumerate(self.calls[-1]) if not word.startswith("--"))
        return self.calls[-1][:command]

    @property
    def command(self) -> list[str]:
        return self.calls[-1][len(self.options) :]

    @property
    def env(self) -> dict[str, str]:
        lines = (self.fake / "env").read_text().splitlines()
        return dict(line.split("=", 1) for line in lines if "=" in line)


def test_every_shell_file_passes_shellcheck():
    if shutil.which("shellcheck") is None:
        pytest.skip("shellcheck is not installed")
    assert len(SHELL) > 10
    done = subprocess.run(["shellcheck", "-x", *SHELL], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout


@pytest.mark.parametrize("path", BATCH, ids=lambda path: path.stem)
def test_a_batch_file_asks_for_what_its_run_needs(path):
    text = path.read_text()
    header = re.findall(r"^#SBATCH (\S+)", text, re.MULTILINE)
    assert f"--job-name={path.stem}" in header and "--open-mode=append" in header
    assert ("--requeue" in header) != (path.stem == "chain")
    # To the ranks, hence without B:
    assert any(re.fullmatch(r"--signal=USR2@\d+", option) for option in header)
    assert any(option.startswith("--time=") for option in header)
    of_sites = re.compile("--(account|partition|qos|constraint|reservation)")
    assert not any(map(of_sites.match, header)), "a site's constant"
    for config in re.findall(r"configs/(\S+?\.yaml)\b", text):
        if config != "my.yaml":
            load_config(str(ROOT / "configs" / config))


def test_a_rank_per_gpu_each_of_which_sees_all(site):
    job = Job(site, "ppo_deepseek671b", "run.max_steps=3", "training.ep=16")
    assert job.code == 0
    options = """--nodes=2 --ntasks=16 --ntasks-per-node=8 --gpus-per-node=8 --gpu-bind=none --cpus-per-task=8
        --kill-on-bad-exit=1 --open-mode=append --mpi=none --export=ALL"""
    logs = f"--output={site}/work/ppo_deepseek671b-4711.ranks/rank-%t.log"
    assert {*options.split(), logs} <= set(job.options)
    root, overrides = site / "root", "run.max_steps=3 training.ep=16"
    command = f"python {root}/train_rl.py --config {root}/configs/ppo_deepseek671b.yaml {overrides}"
    assert job.command == command.split()


@pytest.mark.parametrize("file, first", [("train", []), ("sweep", ["points.txt"])])
def test_words_that_set_no_key_are_further_config_files(site, file, first):
    (site / "work" / "points.txt").write_text("run.name=a\n")
    more = ["base.yaml", "mine.yaml", "run.seed=2", "--config", "last.yaml"]
    job = Job(site, file, *first, *more, SLURM_ARRAY_TASK_ID="0")
    own = ["--config", "base.yaml", *["run.name=a"] * len(first), "--config", "mine.yaml", *more[2:]]
    assert job.command[2:] == own, job.log


def test_an_agent_per_node_starts_the_ranks_of_an_elastic_run(site):
    (site / "root" / "slurm" / "site.sh").write_text("export MASTER_ADDR=n1-ib0\n")
    job = Job(site, "elastic", "my.yaml", "run.elastic.min_nodes=1", SLURM_JOB_PARTITION="gpu")
    options = "--no-kill --kill-on-bad-exit=0 --nodes=2 --ntasks=2 --gpus-per-node=8 --gpu-bind=none"
    assert job.code == 0 and set(options.split()) <= set(job.options)
    logs, words = f"--logs {site}/work/elastic-4711.ranks", "--config my.yaml run.elastic.min_nodes=1"
    command = f"agent python -m launch.elastic --ranks 8 {logs} {words}"
    assert job.command[3:] == command.split()
    assert job.env["SRUN_CPUS_PER_TASK"] == "64" and job.env["MASTER_ADDR"] == "n1-ib0"
    join = job.env["LOCKSTEP_JOIN"].split()
    own = "--no-requeue --job-name=elastic-join --gpus-per-node=8 --ntasks-per-node=8 --partition=gpu"
    assert set(own.split()) <= set(join) and join[-2:] == words.split()[1:]
    given = job.fake / "given"  # the environment of the job that brings nodes
    names = {line.partition("=")[0] for line in given.read_text().split("\0")}
    assert {"PATH", "LOCKSTEP_ROOT"} <= names and not {"MASTER_ADDR", "LOCKSTEP_CACHE"} & names
    assert given.stat().st_mode & 0o77 == 0 and not os.path.exists(job.env["LOCKSTEP_GIVEN"])


@pytest.mark.parametrize("nodes, gpus", [(64, 8), (128, 4), (1, 1)])
def test_the_world_is_that_of_the_allocation(site, nodes, gpus):
    job = Job(site, "train", "my.yaml", SLURM_JOB_NUM_NODES=str(nodes), SLURM_GPUS_ON_NODE=str(gpus))
    assert f"--ntasks={nodes * gpus}" in job.options and f"--gpus-per-node={gpus}" in job.options
    assert f"--cpus-per-task={64 // gpus}" in job.options


def test_on_cpu_nodes_each_requested_task_is_a_rank(site):
    tasks = dict(SLURM_NTASKS_PER_NODE="2", SLURM_CPUS_PER_TASK="3")
    job = Job(site, "train", "my.yaml", SLURM_GPUS_ON_NODE=None, **tasks)
    assert "--ntasks=4" in job.options and "--cpus-per-task=3" in job.options
    assert not [option for option in job.options if "gpu" in option]
    assert job.env["SRUN_CPUS_PER_TASK"] == "3"


def test_ranks_are_offline_and_compile_to_a_disk_of_the_node(site):
    env = Job(site, "train", "my.yaml", SLURM_TMPDIR="/scratch/local").env
    assert env["HF_HUB_OFFLINE"] == env["TRANSFORMERS_OFFLINE"] == env["HF_DATASETS_OFFLINE"] == "1"
    for name in ("TRITON_CACHE_DIR", "TORCHINDUCTOR_CACHE_DIR", "VLLM_CACHE_ROOT"):
        assert env[name].startswith(f"{env['LOCKSTEP_CACHE']}/")
    assert env["LOCKSTEP_CACHE"].startswith("/scratch/local/lockstep-cache-")  # which each rank checks
    env = Job(site, "train", "my.yaml", LOCKSTEP_CACHE="/project/cache").env
    assert env["VLLM_CACHE_ROOT"] == "/project/cache/vllm"  # stays for the next job
    cores, files, most = (site / "fake" / "limits").read_text().split()
    assert cores == "0" and files == most  # no core files, many open files
    assert (site / "work" / "train-4711.ranks" / "rank-0.log").resolve() == site / "work" / "job.out"


def test_ranks_know_the_jobs_end_and_its_signals_lead(site):
    env = Job(site, "ppo_deepseek671b").env
    assert env["LOCKSTEP_JOB_END"] == "1893456000" and env["LOCKSTEP_SIGNAL_LEAD"] == "1800"
    env = Job(site, "ppo_deepseek671b", SLURM_JOB_END_TIME="5", LOCKSTEP_SIGNAL_LEAD="60").env
    assert env["LOCKSTEP_JOB_END"] == "5" and env["LOCKSTEP_SIGNAL_LEAD"] == "60"
    assert Job(site, "train", "my.yaml", FAKE_END="N/A").env["LOCKSTEP_JOB_END"] == ""


def test_site_sh_is_read_first(site):
    text = "export NCCL_IB_HCA=mlx5_7 CONTAINER=apptainer:/images/a.sif PYTHON=python3\n"
    (site / "root" / "slurm" / "site.sh").write_text(text)
    job = Job(site, "train", "my.yaml")
    assert job.env["NCCL_IB_HCA"] == "mlx5_7" and "/images/a.sif" in job.command and "python3" in job.command


def test_pyxis_gets_the_image_as_an_option_of_srun(site):
    job = Job(site, "train", "my.yaml", CONTAINER="pyxis:/images/a.sqsh", CONTAINER_MOUNTS="/data:/data")
    options = ("image=/images/a.sqsh", "mounts=/data:/data", f"workdir={site}/work")
    assert {f"--container-{option}" for option in options} <= set(job.options)
    assert job.command[0] == "python"


@pytest.mark.parametrize("gpus", ["4", None])
def test_apptainer_stands_before_the_command(site, gpus):
    job = Job(site, "train", "my.yaml", CONTAINER="apptainer:/images/lockstep.sif", SLURM_GPUS_ON_NODE=gpus)
    work, root = site / "work", site / "root"
    nv = ["--nv"] if gpus else []
    bind = f"{work}:{work},{root}:{root}"
    head = ["apptainer", "exec", "--bind", bind, "--pwd", str(work), *nv, "/images/lockstep.sif", "python"]
    assert job.command[: len(head)] == head


def test_another_container_is_refused(site):
    job = Job(site, "train", "my.yaml", CONTAINER="docker:x")
    assert job.code == 2 and not job.calls and "must be none, pyxis:IMAGE or apptainer:IMAGE" in job.log


def test_the_quickstart_prepares_what_is_missing_on_one_task(site):
    job = Job(site, "quickstart", "run.max_steps=6")
    made, warmed, trained = job.calls
    assert "--ntasks=1" in made and made[-3:] == [f"{site}/root/tools/make_toy.py", "--out", "runs/toy"]
    assert warmed[-1].endswith("quickstart_sft.yaml")
    assert trained[-2:] == [f"{site}/root/configs/quickstart.yaml", "run.max_steps=6"]
    for there in ("runs/toy/model", "runs/quickstart-sft/hf"):
        (site / "work" / there).mkdir(parents=True)
    assert len(Job(site, "quickstart").calls) == 1


# Requeue ----------------------------------------------------------------------------------------------------


def test_a_stopped_run_is_requeued_and_a_finished_one_is_not(site):
    for code, requeued in ((75, ["requeue", "4711"]), (0, [])):
        job = Job(site, "train", "my.yaml", exit_code=code, at_step="4")
        assert (job.code, job.requeued) == (code, requeued)


def test_only_the_task_of_an_array_is_requeued_and_names_its_run(site):
    (site / "work" / "points.txt").write_text("lr=1\nrun.name=b lr=2 x=3\n")
    points = ("points.txt", "my.yaml", "run.seed=5")
    job = Job(site, "sweep", *points, SLURM_ARRAY_JOB_ID="4700", SLURM_ARRAY_TASK_ID="0")
    assert job.code == 2 and not job.calls and "line 1 of points.txt names no run" in job.log
    array = dict(SLURM_ARRAY_JOB_ID="4700", SLURM_ARRAY_TASK_ID="1")
    job = Job(site, "sweep", *points, exit_code=75, at_step="1", **array)
    assert job.requeued == ["requeue", "4700_1"]
    assert job.command[-5:] == ["my.yaml", "run.name=b", "lr=2", "x=3", "run.seed=5"]
    assert (site / "work" / "sweep-4700_1.ranks").is_dir()


@pytest.mark.parametrize("file, env", [("train", {"NO_REQUEUE": "1"}), ("chain", {})])
def test_no_requeue_forbids_it(site, file, env):
    job = Job(site, file, "my.yaml", exit_code=75, at_step="4", **env)
    assert (job.code, job.requeued) == (75, []) and "not requeued (NO_REQUEUE=1)" in job.log


def test_a_crash_is_requeued_if_requested_but_no_wrong_input(site):
    for code, retried in ((1, ["requeue", "4711"]), (137, ["requeue", "4711"]), (2, [])):
        job = Job(site, "train", "my.yaml", exit_code=code, MAX_ATTEMPTS="9")
        assert (job.code, job.requeued) == (code, []) and f"failed with exit code {code}" in job.log
        job = Job(site, "train", "my.yaml", exit_code=code, MAX_ATTEMPTS="9", RETRY_CRASHED="1")
        assert job.requeued == retried


@pytest.mark.parametrize("site", [WEIRD], indirect=True)
def test_every_character_of_paths_and_values_reaches_the_ranks(site):
    values = [f"reward.kwargs.x={chr(code)} {chr(code)}a" for code in range(32, 127)] + [f"run.name={WEIRD}"]
    job = Job(site, "train", "my conf.yaml", *values)
    assert job.code == 0 and job.command[-len(values) - 1 :] == ["my conf.yaml", *values], job.log
    logs = str(site / "work" / "train-4711.ranks").replace("%", "%%")  # as srun writes a % in a name
    assert f"--output={logs}/rank-%t.log" in job.options and job.env["LOCKSTEP_STATUS"].startswith(str(site))
    job = Job(site, "elastic", "my conf.yaml", *values, LC_ALL="C")
    assert shlex.split(job.env["LOCKSTEP_JOIN"])[-len(values) - 1 :] == ["my conf.yaml", *values]
    (site / "work" / "points.txt").write_text(shlex.join([f"run.name={WEIRD}", *values]) + "\nrun.name='a\n")
    array = dict(SLURM_ARRAY_JOB_ID="4700")
    job = Job(site, "sweep", "points.txt", "my.yaml", SLURM_ARRAY_TASK_ID="0", **array)
    assert job.command[-len(values) - 1 :] == [f"run.name={WEIRD}", *values]
    job = Job(site, "sweep", "points.txt", "my.yaml", SLURM_ARRAY_TASK_ID="1", **array)
    assert job.code == 2 and not job.calls and "a quote without an end: run.name='a" in job.log


def test_the_ranks_of_ntasks_alone_all_start(site):
    cpu = dict(SLURM_GPUS_ON_NODE=None, SLURM_CPUS_ON_NODE="64", MAX_ATTEMPTS="9")
    job = Job(site, "train", "my.yaml", SLURM_NTASKS="16", **cpu)
    assert {"--ntasks=16", "--ntasks-per-node=8", "--cpus-per-task=8"} <= set(job.options)
    job = Job(site, "train", "my.yaml", SLURM_NTASKS="3", **cpu)
    assert (
        job.code == 2 and not job.calls and "--ntasks=3 on 2 nodes is not the same number on each" in job.log
    )
    for default in ("1", "2", None):  # one task in all, or one per node, is what Slurm sets by itself
        job = Job(site, "train", "my.yaml", SLURM_NTASKS=default, MAX_ATTEMPTS="9")
        assert "--ntasks=16" in job.options


def test_a_run_that_outlives_a_rank_has_its_own_end(site):
    job = Job(site, "roles", "my.yaml", exit_code=137, at_step="4", OUTLIVE_RANKS="1")
    assert (job.code, job.requeued) == (75, ["requeue", "4711"])
    assert "--kill-on-bad-exit=0" in job.calls[0]


def test_it_gives_up_after_starts_without_a_newer_checkpoint(site):
    def start(at_step):
        return Job(site, "train", "my.yaml", exit_code=75, at_step=at_step, MAX_ATTEMPTS="3")

    steps = ("0", "1", "1", "2", "3", "4", "4", "4")
    assert all([start(step).requeued for step in steps])  # progress renews its attempts
    job = start("4")
    assert (job.code, job.requeued) == (1, [])
    assert "gives up: 3 starts brought no checkpoint after step 4" in job.log


def test_a_start_from_an_older_checkpoint_counts_as_an_attempt(site):
    def start(at_step, run="aa"):
        return Job(site, "train", "my.yaml", exit_code=75, at_step=at_step, RUN=run, MAX_ATTEMPTS="3")

    assert all([start(step).requeued for step in ("10", "8", "10")])  # 10 is damaged, and written again
    assert start("8").code == 1 and "3 starts brought no checkpoint after step 10" in start("8").log
    # The second run of one job has steps of its own.
    (site / "work" / "train-4711.ranks" / "attempts").unlink()
    assert all([start(step, run).requeued for step, run in (("230", "aa"), ("1", "bb"), ("2", "bb"))])


def test_links_of_a_chain_count_their_starts_together(site):
    def link(number, config="my.yaml", submitted="2020-01-01T00:00:00"):
        return Job(site, "chain", config, exit_code=1, SLURM_JOB_ID=str(number), SUBMITTED=submitted)

    assert all([link(number).calls for number in (1, 2, 3)])
    assert not link(4).calls and "gives up: 3 starts" in link(4).log
    assert link(5, "other.yaml").calls and link(6, submitted="2100-01-01T00:00:00").calls


def test_a_run_that_a_person_stopped_is_not_requeued(site):
    outlives = dict(exit_code=137, OUTLIVE_RANKS="1", at_step="4")
    job = Job(site, "roles", "my.yaml", **outlives, REASON="the file 'stop'")
    assert (job.code, job.requeued) == (0, [])
    # The state of an earlier start does not count for a start that reports nothing.
    job = Job(site, "roles", "my.yaml", **outlives | {"at_step": ""})
    assert (job.code, job.requeued) == (137, [])


def test_starts_that_a_lost_node_ends_count(site):
    for _ in range(2):
        (site / "work" / "train-4711.ranks").mkdir(exist_ok=True)
        Job(site, "train", "my.yaml", exit_code=0, MAX_ATTEMPTS="2")  # as if its node was lost
    job = Job(site, "train", "my.yaml", MAX_ATTEMPTS="2")
    assert job.code == 1 and not job.calls and "gives up" in job.log


def test_logs_of_the_first_silent_ranks_are_shown(site):
    logs = site / "work" / "train-4711.ranks"
    logs.mkdir()
    now = time.time()
    texts = {
        5: (-60, "an error of the attempt before\n"),
        3: (60, "RuntimeError: culprit\n"),
        1: (61, "peer error\n"),
        2: (62, "all is well\n"),
    }
    for rank, (age, text) in texts.items():
        (logs / f"rank-{rank}.log").write_text(text)
        os.utime(logs / f"rank-{rank}.log", (now + age, now + age))
    log = Job(site, "train", "my.yaml", exit_code=1).log
    shown = ("srun: error: n2: task 3: Exited", "rank-3.log", "culprit", "rank-1.log", "peer error")
    places = [log.index(text) for text in shown]
    assert places == sorted(places)
    assert "all is well" not in log and "the attempt before" not in log


def test_the_batch_file_reads_what_the_program_writes(site, monkeypatch):
    logs = site / "work" / "train-4711.ranks"
    logs.mkdir()
    monkeypatch.setenv("LOCKSTEP_STATUS", str(logs / "status.json"))
    (site / "run").mkdir()
    Status(str(site / "run"), max_steps=9, leads=True).write(step=8, checkpoint_step=7)
    assert json.loads((site / "run" / "status.json").read_text())["checkpoint_step"] == 7
    assert "attempt 1 after step 7" in Job(site, "train", "my.yaml").log
