"""Task directories in the formats of Harbor and Terminal-Bench, scored in a training run."""

import json
import shutil
from dataclasses import asdict

import pytest
import yaml

from rl.config.agents import Agents
from rl.config.container import Container as Settings
from rl.features.agents.environment import load_environment
from rl.features.containers.harbor import Task, read_task, unmet
from tests.container_image import build_image
from tests.records import records
from tests.spawn import run_ranks
from tests.toy import TRAIN
from tools.make_tasks import main as make_tasks

DOCKERFILE = """# a task
FROM tiny:1
WORKDIR /work
ENV TARGET=/work/out PLAIN=yes
COPY data/ /data/
RUN cp /data/start.txt \\
    start.txt
CMD ["sh"]
"""
HARBOR = "rl.features.containers.harbor:Task"
DESCRIPTION = """
version = "1.0"
[agent]
timeout_sec = 900.0
[verifier]
timeout_sec = 60.0
[environment]
cpus = 2
memory_mb = 2048
storage = "1G"
"""
TESTS = {
    "reward-text": "if [ -f /work/start.txt ]; then echo 0.5 > /logs/verifier/reward.txt; fi",
    "reward-json": 'test "$PLAIN" = yes && echo \'{"reward": 0.25, "n": 2}\' > /logs/verifier/reward.json',
    "answer": 'test "$(cat $TARGET)" = done && echo 1 > /logs/verifier/reward.txt',
    "python": "python3 /tests/check.py",
}


@pytest.fixture(scope="module")
def tasks(tmp_path_factory):
    """Four tasks of Harbor and one of Terminal-Bench, with what solves two of them."""
    top = tmp_path_factory.mktemp("tasks")
    for name, test in TESTS.items():
        task = top / name
        for directory in ("environment/data", "tests"):
            (task / directory).mkdir(parents=True)
        (task / "instruction.md").write_text(f"Write done to /work/out ({name}).\n")
        (task / "task.toml").write_text(DESCRIPTION)
        (task / "environment/Dockerfile").write_text(DOCKERFILE)
        (task / "environment/data/start.txt").write_text("start")
        (task / "tests/test.sh").write_text(f"#!/bin/bash\n{test}\n")
    (top / "python/tests/check.py").write_text(
        "found = open('/work/start.txt').read() == 'start'\n"
        "open('/logs/verifier/reward.txt', 'w').write('0.75' if found else '0')"
    )
    bench = top / "terminal"
    (bench / "tests").mkdir(parents=True)
    (bench / "task.yaml").write_text("instruction: |\n  Do nothing.\n  Twice.\nparser_name: pytest\n")
    (bench / "Dockerfile").write_text("FROM tiny:1\nWORKDIR /work\n")
    (bench / "run-tests.sh").write_text('test -d /work && test -f "$TEST_DIR/test_outputs.py"\n')
    (bench / "tests/test_outputs.py").write_text("")
    return top


@pytest.fixture(scope="module")
def image(tmp_path_factory):
    if not (shutil.which("bwrap") or shutil.which("ch-run")):
        pytest.skip("no runtime is installed")
    return build_image(tmp_path_factory.mktemp("image") / "root")


def test_tasks_are_scored_as_their_files_say(tasks, image):
    scores = {}
    for path in sorted(tasks.iterdir()):
        task = Task(container=asdict(Settings(image="")), images={"tiny:1": str(image)})
        (message,) = task.reset({"extra_info": {"task": str(path)}})
        assert message["content"] == read_task(path).instruction
        if path.name == "answer":
            task.bash("echo done > out")
        scores[path.name] = task.score()["score"]
        task.close()
    assert scores == {"reward-text": 0.5, "reward-json": 0.25, "answer": 1.0, "python": 0.75, "terminal": 1.0}


def test_limits_of_a_task_hold_up_to_those_of_the_run(tasks, image, tmp_path):
    path = tmp_path / "task"
    shutil.copytree(tasks / "answer", path)
    stated = DESCRIPTION.replace("60.0", "0.5").replace("2048", "64").replace("1G", "8M")
    stated = stated.replace("cpus = 2", "cpus = 1")
    (path / "task.toml").write_text(stated)
    (path / "tests/test.sh").write_text("sleep 60\n")
    task = Task(container=asdict(Settings(image="")), images={"tiny:1": str(image)})
    task.reset({"extra_info": {"task": str(path)}})
    assert "memory" in task.bash("python3 -c 'x = bytearray(100 << 20)'").lower()
    assert task.bash("python3 -c 'import os; print(len(os.sched_getaffinity(0)))'") == "1"
    assert "No space left" in task.bash("head -c 20000000 /dev/zero >full")
    assert task.score()["score"] == 0.0  # no failure: a failed trajectory is sampled again
    task.bash("rm full")
    values = task.score()
    task.close()
    assert values["test_timeout"] == 1.0 and values["test_s"] < 20 and values["limits_below_task"] == 0.0
    short = Task(container=asdict(Settings(image="", memory_mib=32)), images={"tiny:1": str(image)})
    short.reset({"extra_info": {"task": str(tasks / "answer")}})
    assert short.score()["limits_below_task"] == 1.0
    short.close()


def test_what_is_not_applied_is_said_with_the_settings_that_tasks_need(tasks):
    sentences = unmet([read_task(path) for path in sorted(tasks.iterdir())])
    assert sentences == [
        "agent.timeout_sec of 4 tasks is not applied.",
        "The largest memory_mib of a task is 2048: agents.container.memory_mib must be at least that.",
        "The largest disk_mib of a task is 1024: agents.container.disk_mib must be at least that.",
        "The largest test_s of a task is 60: agents.timeout_s must be above that.",
    ]


@pytest.mark.parametrize("name", ["rl.features.containers.environment:ContainerEnvironment", HARBOR])
def test_a_policy_has_three_tools_and_none_that_starts_a_container(name, image):
    config = Agents(environment=name, container=Settings(image=str(image)))
    assert load_environment(config.plan.default).methods.keys() == {"bash", "read", "write"}


@pytest.mark.parametrize(
    "line", ["FROM a AS b\nFROM c", "FROM a\nCOPY --from=b /x /x", "FROM a\nONBUILD RUN x"]
)
def test_a_dockerfile_that_needs_a_build_is_refused(line, tasks, tmp_path):
    shutil.copytree(tasks / "answer", tmp_path / "task")
    (tmp_path / "task/environment/Dockerfile").write_text(f"{line}\n")
    with pytest.raises(ValueError, match="build the image before the run"):
        read_task(tmp_path / "task")


@pytest.mark.slow
def test_a_training_run_scores_five_tasks(tasks, image, toy, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    options = json.dumps({"tasks": str(tasks)})
    make_tasks(["harbor", "--num-test", "0", "--options", options, "--out", "rows"])
    config = {
        "algorithm": "grpo",
        "run": {"name": "tasks", "max_steps": 2},
        "model": {"path": f"{toy}/model", "dtype": "float32"},
        "data": {"train": ["rows/train.jsonl"], "prompts_per_step": 5, "max_prompt_tokens": 896},
        "rollout": {"samples_per_prompt": 4, "max_response_tokens": 64, "cpu_kv_cache_mib": 32},
        "agents": {
            "environment": HARBOR,
            "kwargs": {"images": {"tiny:1": str(image)}},
            "max_turns": 2,
            "workers": 1,
        },
    }
    (tmp_path / "tasks.yaml").write_text(yaml.safe_dump(config))
    run_ranks(2, TRAIN, "--config", "tasks.yaml", timeout=500)
    steps = records(tmp_path / "runs" / "tasks")
    assert [step["training/global_step"] for step in steps] == [1, 2]
    # A random policy solves no task: untouched containers have the scores 0.5, 0.25, 0, 0.75 and 1.
    assert [step["critic/score/mean"] for step in steps] == pytest.approx([0.5, 0.5], abs=1e-6)
    assert all(step.get("agents/failures/error", 0) == 0 for step in steps)
