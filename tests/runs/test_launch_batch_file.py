"""Rendered batch files: what the scheduler reads in them, and that bash takes them."""

import re
import shutil
import subprocess
from pathlib import Path

import pytest

from launch.batch_file import ROOT, Resources, render, render_sweep
from launch.schedulers import SCHEDULERS
from rl.config.options import ConfigError

FILES = ["/a.yaml", "/b.yaml"]


def options(text):
    return dict(re.findall(r"^#SBATCH --([\w-]+)(?:=(.*))?$", text, re.MULTILINE))


def rendered(resources, tmp_path, **changes):
    facts = dict(name="run", logs=tmp_path, configs=FILES, overrides=["a.b=1"], command="x") | changes
    return render(resources, **facts)


def test_a_gpu_job_asks_for_whole_nodes_and_the_signal(tmp_path):
    resources = Resources(nodes=4, time="02:00:00", account="acc", sbatch=["--constraint=h100"])
    asked = options(rendered(resources, tmp_path))
    expected = {"nodes": "4", "gpus-per-node": "8", "exclusive": "", "mem": "0", "signal": "USR2@600"}
    expected |= {"open-mode": "append", "account": "acc", "constraint": "h100"}
    expected["output"] = f"{tmp_path}/%x-%j.out"
    assert expected.items() <= asked.items() and "requeue" in asked and "partition" not in asked
    assert options(rendered(Resources(), tmp_path, name="two words"))["job-name"] == "'two words'"


def test_slurm_job_sh_finds_the_signals_lead_in_the_file(tmp_path):
    text = rendered(Resources(signal_lead_s=77), tmp_path)
    command = re.search(r"^lead=\$\((.*)\)", (ROOT / "slurm" / "job.sh").read_text(), re.MULTILINE)[1]
    (tmp_path / "job").write_text(text)
    found = subprocess.check_output(["bash", "-c", command, tmp_path / "job"], text=True)  # the file is $0
    assert found.strip() == "77"


def test_a_cpu_job_asks_for_tasks(tmp_path):
    asked = options(rendered(Resources(gpus_per_node=0, ranks_per_node=2, requeue=False), tmp_path))
    assert asked["ntasks-per-node"] == "2" and not {"gpus-per-node", "exclusive", "mem"} & asked.keys()
    assert "no-requeue" in asked


def shell_run(text, tmp_path, **environment):
    """Return the arguments of `train`, which a job.sh of the test prints."""
    root = tmp_path / "root"
    (root / "slurm").mkdir(parents=True)
    (root / "slurm" / "job.sh").write_text('say() { :; }\ntrain() { printf "<%s>" "$@"; }\n')
    for kind in OTHERS:
        (root / "slurm" / f"train.{kind}").write_text('printf "<%s>" "$@"; echo ${JOB_NAME:-}\n')
    file = tmp_path / "file.sbatch"
    file.write_text(text.replace(str(ROOT), str(root)))
    return subprocess.check_output(["bash", "-eu", str(file)], env=environment, text=True)


def test_overrides_reach_the_program_as_they_are(tmp_path):
    overrides = ["reward.kwargs={a: 'b c', d: \"$HOME\"}", 'rollout.stop=["\\n"]', "x=*"]
    found = shell_run(rendered(Resources(), tmp_path, overrides=overrides), tmp_path)
    assert found == "</a.yaml></b.yaml>" + "".join(f"<{override}>" for override in overrides)
    long = [f"key{number}=value{number}" for number in range(40)]
    text = rendered(Resources(), tmp_path, overrides=long)
    assert max(map(len, text.splitlines())) < 200  # one to a line
    (tmp_path / "second").mkdir()
    assert shell_run(text, tmp_path / "second").count("<") == 42


def test_a_task_of_a_sweep_reads_its_own_overrides(tmp_path):
    points = tmp_path / "points"
    points.mkdir()
    (points / "3").write_text("a=1 2\nb=[\"x\", 'y']\n")
    facts = dict(name="s", logs=tmp_path, configs=FILES, points=points, command="x", array="1-3%2")
    text = render_sweep(Resources(), **facts)
    assert options(text)["array"] == "1-3%2" and options(text)["output"].endswith("%x-%A_%a.out")
    assert shell_run(text, tmp_path, SLURM_ARRAY_TASK_ID="3") == "</a.yaml></b.yaml><a=1 2><b=[\"x\", 'y']>"


OTHERS = {
    "pbs": """
        #PBS -N my-run ;; #PBS -l select=4:ncpus=64:mpiprocs=1:ngpus=8 ;; #PBS -l place=scatter:excl
        #PBS -l walltime=02:00:30 ;; #PBS -r y ;; #PBS -A acc ;; #PBS -q gpu ;; #PBS -l x=1
        """,
    "lsf": """
        #BSUB -J my-run ;; #BSUB -n 4 ;; #BSUB -R span[ptile=1]
        #BSUB -gpu num=8:mode=shared:j_exclusive=yes
        #BSUB -W 02:00 ;; #BSUB -r ;; #BSUB -Q 75 ;; #BSUB -P acc ;; #BSUB -q gpu ;; #BSUB -l x=1
        """,
    "flux": """
        #flux: --job-name=my-run ;; #flux: --nodes=4 ;; #flux: --exclusive ;; #flux: --time-limit=7230s
        #flux: --bank=acc ;; #flux: --queue=gpu ;; #flux: -l x=1
        """,
}


def assert_shellcheck_passes(text):
    if shutil.which("shellcheck"):
        command = ["shellcheck", "-x", "-"]
        found = subprocess.run(command, input=text, capture_output=True, text=True, cwd=ROOT)
        assert found.returncode == 0, found.stdout


@pytest.mark.parametrize("kind", OTHERS)
def test_a_file_of_another_scheduler_asks_for_the_same(kind, tmp_path):
    facts = dict(account="acc", partition="gpu", sbatch=["-l x=1"])
    overrides = ["reward.kwargs={a: 'b c'}", "x=*"]
    run = dict(name="my run", logs=tmp_path, configs=FILES, command="x", overrides=overrides)
    text = SCHEDULERS[kind].render(Resources(nodes=4, time="02:00:30", **facts), **run)
    asked = [line.strip() for line in re.split("\n|;;", OTHERS[kind].strip())]
    assert set(asked) <= set(text.splitlines()), text
    assert (
        shell_run(text, tmp_path) == "</a.yaml></b.yaml>" + "".join(f"<{each}>" for each in overrides) + "\n"
    )
    assert_shellcheck_passes(text)
    directory = {"pbs": "PBS_O_WORKDIR", "lsf": "LS_SUBCWD", "flux": "LOCKSTEP_START"}[kind]
    assert f"export {directory}={Path.cwd()} " in text
    assert re.search(
        rf'^cd "\${{?{directory}\b', (ROOT / "slurm" / f"train.{kind}").read_text(), re.MULTILINE
    )
    cpu = Resources(gpus_per_node=0, ranks_per_node=2, requeue=False)
    text = SCHEDULERS[kind].render(cpu, **run)
    assert "RANKS=2" in text and "NO_REQUEUE=1" in text and "gpu" not in text


@pytest.mark.parametrize(
    "kind, index", [("pbs", "PBS_ARRAY_INDEX"), ("lsf", "LSB_JOBINDEX"), ("flux", "POINT")]
)
def test_a_task_under_another_scheduler_reads_its_own_overrides(kind, index, tmp_path):
    points = tmp_path / "points"
    points.mkdir()
    (points / "3").write_text("a=1 2\nb=[\"x\", 'y']\n")
    run = dict(name="s", logs=tmp_path, configs=FILES, points=points, command="x", tasks=[1, 3], at_a_time=0)
    text = SCHEDULERS[kind].render_sweep(Resources(), **run)
    assert_shellcheck_passes(text)
    found = shell_run(text, tmp_path, **{index: "4" if kind == "lsf" else "3"})
    assert found == "</a.yaml></b.yaml><a=1 2><b=[\"x\", 'y']>s-3\n"


@pytest.mark.parametrize(
    "kind, commands",
    [
        ("pbs", "qsub -J 0-2%2 f; qsub -v POINT=5 f"),
        ("lsf", "bsub -J 's[1-3,6]%2' <f"),
        ("flux", "; ".join(f"flux batch --job-name=s-{task} --env=POINT={task} f" for task in (0, 1, 2, 5))),
    ],
)
def test_arrays_of_other_schedulers(kind, commands, tmp_path):
    tasks = dict(name="s", tasks=[0, 1, 2, 5], at_a_time=0 if kind == "flux" else 2)
    assert SCHEDULERS[kind].command("f", **tasks) == commands


@pytest.mark.parametrize("wrong, words", [({"qos": "high"}, "qos=high"), ({"mem": "8G"}, "mem=8G")])
def test_what_another_scheduler_lacks_is_refused(wrong, words, tmp_path):
    with pytest.raises(ConfigError, match=words):
        SCHEDULERS["flux"].render(
            Resources(**wrong), name="s", logs=tmp_path, configs=FILES, overrides=[], command="x"
        )


@pytest.mark.parametrize(
    "wrong, words",
    [
        (dict(nodes=0), "nodes=0"),
        (dict(gpus_per_node=0), "set e.g. ranks_per_node=2"),
        (dict(gpus_per_node=8, ranks_per_node=2), "rank per GPU"),
        (dict(time="tomorrow"), "tomorrow"),
        (dict(time="00:05:00"), "before it starts"),
        (dict(sbatch=["constraint=h100"]), "is not an option of sbatch"),
    ],
)
def test_resources_that_cannot_be_are_refused(wrong, words):
    with pytest.raises(ConfigError, match=words):
        Resources(**wrong).check()
