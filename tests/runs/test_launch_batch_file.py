"""Rendered batch files: what sbatch reads in them, and that bash takes them."""

import re
import subprocess

import pytest

from launch.batch_file import ROOT, Resources, render, render_sweep, seconds
from rl.config.options import ConfigError


def options(text):
    return dict(re.findall(r"^#SBATCH --([\w-]+)(?:=(.*))?$", text, re.MULTILINE))


def rendered(resources, tmp_path, **changes):
    facts = dict(name="run", logs=tmp_path, config="c.yaml", overrides=["a.b=1"], command="x") | changes
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
    file = tmp_path / "file.sbatch"
    file.write_text(text.replace(str(ROOT), str(root)))
    return subprocess.check_output(["bash", "-eu", str(file)], env=environment, text=True)


def test_overrides_reach_the_program_as_they_are(tmp_path):
    overrides = ["reward.kwargs={a: 'b c', d: \"$HOME\"}", 'rollout.stop=["\\n"]', "x=*"]
    found = shell_run(rendered(Resources(), tmp_path, overrides=overrides), tmp_path)
    assert found == "<c.yaml>" + "".join(f"<{override}>" for override in overrides)
    long = [f"key{number}=value{number}" for number in range(40)]
    text = rendered(Resources(), tmp_path, overrides=long)
    assert max(map(len, text.splitlines())) < 200  # one to a line
    (tmp_path / "second").mkdir()
    assert shell_run(text, tmp_path / "second").count("<") == 41


def test_a_task_of_a_sweep_reads_its_own_overrides(tmp_path):
    points = tmp_path / "points"
    points.mkdir()
    (points / "3").write_text("a=1 2\nb=[\"x\", 'y']\n")
    facts = dict(name="s", logs=tmp_path, config="c.yaml", points=points, command="x", array="1-3%2")
    text = render_sweep(Resources(), **facts)
    assert options(text)["array"] == "1-3%2" and options(text)["output"].endswith("%x-%A_%a.out")
    assert shell_run(text, tmp_path, SLURM_ARRAY_TASK_ID="3") == "<c.yaml><a=1 2><b=[\"x\", 'y']>"


def test_slurms_times_are_understood():
    times = "90 90:30 12:00:00 1-0 1-12:30 2-00:00:01".split()
    assert list(map(seconds, times)) == [5400, 5430, 43200, 86400, 131400, 172801]


@pytest.mark.parametrize(
    "wrong, words",
    [
        (dict(nodes=0), "nodes=0"),
        (dict(gpus_per_node=0), "CPU node"),
        (dict(gpus_per_node=8, ranks_per_node=2), "rank per GPU"),
        (dict(time="tomorrow"), "tomorrow"),
        (dict(time="00:05:00"), "before the start"),
        (dict(sbatch=["constraint=h100"]), "is not an option of sbatch"),
    ],
)
def test_resources_that_cannot_be_are_refused(wrong, words):
    with pytest.raises(ConfigError, match=words):
        Resources(**wrong).check()
