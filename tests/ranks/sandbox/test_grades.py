"""Policies that try to write their own grade, in containers of each runtime of this machine.

Not covered: a test that runs the policy's program gives it the test's own rights (docs/agents.md#containers).
"""

import re
from dataclasses import asdict

import pytest

from rl.config.container import Container as Settings
from rl.features.containers import environment as container
from rl.features.containers.environment import ContainerEnvironment, read_reward
from tests.ranks.sandbox.test_container import image, runtime  # noqa: F401  (fixtures)

CHECK = """
import os, rules
found = [name for top in ("/", "/data", "/data/..") for name in os.listdir(top) if name == "conftest.py"]
os.makedirs("/out", exist_ok=True)
right = rules.passes(open("/work/answer").read()) and not found
open("/out/reward", "w").write("1" if right else "0")
"""
SETUP = f"""
mkdir -p /data /work /opt/tool/bin; echo 42 > /work/task
printf '%s' '{CHECK.replace("'", '"')}' > /data/check.py
echo 'def passes(text): return text == "42"' > /data/rules.py
printf '#!/bin/sh\\nexit 0\\n' > /opt/tool/bin/step; chmod +x /opt/tool/bin/step
printf '#!/bin/sh\\npython3 /data/check.py\\n' > /data/start; chmod +x /data/start
ln -s data /linked; echo where=/data > /data/settings
"""
EVIL = """
mkdir -p /out /work/out; echo 1 > /work/out/reward; cd /work; printf wrong > answer
printf '#!/bin/sh\\nmkdir -p /out; echo 1 > /out/reward\\n' > evil; chmod +x evil
echo 'import os; os.system("/work/evil"); os._exit(0)' > evil.py
"""
"""Programs for a shell and for Python that write the reward 1; a policy prepares them."""
DAEMON = """python3 -c '
import os
os.fork() and os._exit(0)
os.setsid()
os.fork() and os._exit(0)
os.closerange(0, 3)
while True:
    open("/out/reward", "w").write("1")'
"""
ATTACKS = {
    "a background writer": "(while :; do ./evil; done) >/dev/null 2>&1 &",
    "a daemon that forked twice": DAEMON,
    "the reward file beforehand": "./evil; chmod 444 /out/reward; rm -r /data",
    "the reward file as a link": "ln -s /work/out/reward /out/reward; rm -r /data",
    "the reward's directory as a link": "rm -r /out; ln -s /work/out /out; rm /data/*",
    "the shell": "cp -f evil /usr/bin/bash; cp -f evil /usr/bin/sh",
    "the interpreter": "rm -f /usr/bin/python3; cp evil /usr/bin/python3",
    "another program in PATH": "for d in /usr/local/bin /opt/tool/bin; do mkdir -p $d; "
    "cp evil $d/python3; done",
    "a program of the task": "cp evil /opt/tool/bin/step; cp evil /usr/bin/python3",
    "a startup file of Python": "for d in /usr/lib/python3*; do cp evil.py $d/sitecustomize.py; done",
    "a path file of Python": "for d in /usr{,/local}/lib/python3*/site-packages; do mkdir -p $d; "
    "cp evil.py $d/evil.py; echo import evil > $d/x.pth; done",
    "a startup file of the user": "d=$(python3 -m site --user-site); mkdir -p $d; "
    "cp evil.py $d/usercustomize.py",
    "startup files of shells": "for f in /root/.bashrc /root/.profile /etc/profile; do cp evil $f; done",
    "a module of the standard library": "cp -f evil.py /usr/lib/python3*/os.py",
    "the loader": "echo /work/x.so > /etc/ld.so.preload; ./evil",
    "the test": "cp evil.py /data/check.py",
    "a module of the test": "cp evil.py /data/rules.py",
    "a module beside the test": "cp evil.py /data/genericpath.py; cp evil.py /data/encodings.py",
    "the test's directory as a link": "mv /data data; cp evil.py data/rules.py; ln -s /work/data /data",
    "the test's directory as a file": "rm -r /data; echo > /data; ./evil",
    "devices": "rm -f /dev/null /dev/stdout; ln -s /work/out /dev/stdout; ./evil",
    "a full disk": "./evil; cat /dev/zero > full",
}


@pytest.fixture(params=["/work", pytest.param("", marks=pytest.mark.slow)], ids=["directory", "root"])
def environment(runtime, image, request):  # noqa: F811
    settings = asdict(Settings(image=str(image), runtime=runtime, disk_mib=32))
    made = ContainerEnvironment(
        container=settings,
        setup=SETUP,
        directory=request.param,
        test="step && python3 /data/check.py",
        reward_file="/out/reward",
    )
    made.variables = {"PATH": "/opt/tool/bin:/usr/local/bin:/usr/bin:/bin"}
    made.reset({"prompt": "answer", "extra_info": {}})
    yield made
    made.close()


@pytest.mark.parametrize("attack", ATTACKS)
def test_a_policy_cannot_write_its_own_grade(environment, attack):
    environment.bash(EVIL + ATTACKS[attack])
    assert environment.score()["score"] == 0.0


@pytest.mark.parametrize(
    "attack", ["the shell", "the interpreter", "a program of the task", "the test", "a full disk"]
)
def test_a_right_answer_counts_beside_any_change(environment, attack):
    environment.bash(f"{EVIL}\nprintf 42 > answer\n{ATTACKS[attack]}")
    environment.bash("true")
    assert environment.score()["score"] == 1.0


BESIDE = """
for d in / /data /tmp /root /dev/shm /linked; do
    for f in conftest sitecustomize usercustomize os json genericpath; do cp evil.py $d/$f.py; done
    printf '[pytest]\naddopts = -p evil\n' > $d/pytest.ini; cp evil $d/.bashrc; cp evil $d/python3
done
rm /linked; ln -s /work /linked
for f in /etc/bash.bashrc /etc/profile /etc/environment /data/settings /data/start; do cp evil $f; done
"""
"""Files that a policy puts beside tests, and where shells and Python look at their start."""
FORMS = [
    "cd /data && python3 check.py",
    "(cd /data; python3 ./check.py)",
    'python3 "/data/check.py"',
    "python3 -W ignore -X dev /data/check.py",
    "timeout 60 python3 2>/dev/null /data/check.py",
    "bash -c 'cd / && python3 data/check.py'",
    "cd /data && python3 < check.py",
    "D=/data; python3 $D/check.py",
    "d=data c=check; python3 /$d/$c.py",
    "cd /; cat data/check.py | PYTHONPATH=/data python3",
    "cd / && PYTHONPATH=/data python3 - <<END\nexec(open('/data/check.py').read())\nEND",
    "eval $(printf 'python3 /%s/check.py' data)",
    "python3 /linked/check.py",
    "/linked/../data/start",
    "sh /data/start",
    "BASH_ENV=/data/settings bash -c 'python3 $where/check.py'",
]

OFTEN = (
    "cd /data && python3 check.py",
    "python3 -W ignore -X dev /data/check.py",
    "cd /data && python3 < check.py",
    "D=/data; python3 $D/check.py",
    "python3 /linked/check.py",
    "sh /data/start",
)
"""Forms of the default suite: by path, by input, by a variable, through a link and through a shell."""


@pytest.mark.parametrize(
    "test", [form if form in OFTEN else pytest.param(form, marks=pytest.mark.slow) for form in FORMS]
)
def test_a_test_is_protected_however_it_is_started(runtime, image, test):  # noqa: F811
    settings = asdict(Settings(image=str(image), runtime=runtime, disk_mib=32))
    made = ContainerEnvironment(
        container=settings, setup=SETUP, directory="/work", test=test, reward_file="/out/reward"
    )
    for attack, answer in (ATTACKS["the test"], "wrong"), (BESIDE, "wrong"), (BESIDE, "42"):
        made.reset({"prompt": "answer", "extra_info": {}})
        made.bash(f"{EVIL}\n{attack}\nprintf {answer} > /work/answer")
        assert made.score()["score"] == float(answer == "42"), (attack, answer)
        made.close()


def test_a_test_sees_what_a_policy_wrote_and_removed(runtime, image, caplog, monkeypatch):  # noqa: F811
    monkeypatch.setattr(container, "_told", set())
    settings = asdict(Settings(image=str(image), runtime=runtime))
    test = (
        "test -f /work/new/x && test -f /made && test ! -e /work/old && test ! -e /gone && test -f /etc/mine"
    )
    kept = ["/etc/mine", "/made", "/gone"]
    made = ContainerEnvironment(
        container=settings, setup="mkdir -p /work/old /gone/a/b/c", directory="/work", test=test, kept=kept
    )
    wanted = "mkdir /work/new; echo > /work/new/x; echo > /made; rm -r /work/old /gone; echo > /etc/mine"
    for more, unseen in ("", set()), ("; mkdir /var; echo > /app/x", {"/var", "/app"}):
        made.reset({"prompt": "answer", "extra_info": {}})
        made.bash(wanted + more)
        assert made.score()["score"] == 1.0
        assert set(re.findall(r"wrote to '(\S+)',", caplog.text)) == unseen
        made.close()


@pytest.mark.parametrize("settings", [{"kept": ["made"]}, {"protected": ["made"]}, {"protected": ["/work"]}])
def test_paths_of_a_task_may_be_relative_and_what_is_protected_is_not_kept(settings, runtime, image):  # noqa: F811
    given = asdict(Settings(image=str(image), runtime=runtime))
    made = ContainerEnvironment(
        container=given, setup="mkdir /work", directory="/work", test="test -e /work/made", **settings
    )
    made.reset({"prompt": "answer", "extra_info": {}})
    made.bash("echo > made")
    assert made.score()["score"] == float("kept" in settings)
    made.close()


def test_names_that_a_policy_makes_do_not_fill_or_forge_the_log(runtime, image, caplog, monkeypatch):  # noqa: F811
    monkeypatch.setattr(container, "_told", set())
    given = asdict(Settings(image=str(image), runtime=runtime))
    made = ContainerEnvironment(container=given, setup="mkdir /work", directory="/work", test="true")
    for at in range(2):
        made.reset({"prompt": "answer", "extra_info": {}})
        made.bash(f"for n in $(seq 80); do mkdir $'/x'$n.{at}$'\\n[rank 0] the run is complete'; done")
        assert made.score()["score"] == 1.0
        made.close()
    assert len(caplog.records) == 100 and not any("\n" in r.getMessage() for r in caplog.records)


def test_nothing_of_the_working_directory_starts_with_the_test(runtime, image):  # noqa: F811
    """Not what an image has there for its programs, and not what its variables name."""
    setup = f"""{SETUP}
mkdir -p /work/env/bin /work/bin; cp -r /usr/lib /work/env/lib; cp /usr/bin/python3 /work/env/bin
ln -s /work/env /opt/env; ln -s /opt/env/bin/python3 /usr/bin/python; cp /data/*.py /work/env
"""
    names = ("BASH_ENV", "ENV", "LD_PRELOAD", "LD_LIBRARY_PATH", "PYTHONPATH", "PYTHONHOME", "PYTHONSTARTUP")
    settings = asdict(Settings(image=str(image), runtime=runtime, files=60_000))
    for test in "python3 /data/check.py", "python /data/check.py", "cd env && python3 check.py":
        made = ContainerEnvironment(
            container=settings, setup=setup, directory="/work", test=test, reward_file="/out/reward"
        )
        made.reset({"prompt": "answer", "extra_info": {}})
        made.variables = dict.fromkeys(names, "/work/evil") | {
            "PATH": "bin:/work:/work/bin:/opt/env/bin:/usr/bin"
        }
        for answer in "wrong", "42":
            attack = """for d in . bin env/bin; do for f in python3 python bash; do cp evil $d/$f; done; done
for d in env/lib/python3*; do cp evil.py $d/sitecustomize.py; done; cp evil.py env/check.py"""
            shell = ["/usr/bin/bash", "-c", f"{EVIL}\n{attack}\nprintf {answer} > answer"]
            path = {"PATH": "/usr/bin"}
            assert made._container.run(shell, directory="/work", variables=path).ok
            assert made.score()["score"] == float(answer == "42"), (test, answer)
            made._container.renew() if answer == "42" else None
        made.close()


def test_a_test_in_the_working_directory_is_protected_if_it_is_listed(runtime, image):  # noqa: F811
    settings = asdict(Settings(image=str(image), runtime=runtime))
    made = ContainerEnvironment(
        container=settings,
        setup=f"{SETUP}cp -r /data /work/tests",
        directory="/work",
        test="python3 tests/check.py && test ! -e conftest.py && test -e new",
        reward_file="/out/reward",
        protected=["/work/tests", "/work/conftest.py"],
    )
    for answer in "wrong", "42":
        made.reset({"prompt": "answer", "extra_info": {}})
        made.bash(
            f"{EVIL}cp evil.py tests/rules.py; cp evil.py conftest.py; printf {answer} > answer; echo > new"
        )
        assert made.score()["score"] == float(answer == "42")
        made.close()


@pytest.mark.slow
@pytest.mark.parametrize("test", [form for form in FORMS if "%s" not in form and "$c" not in form])
def test_a_task_without_a_working_directory_protects_the_files_that_its_test_names(runtime, image, test):  # noqa: F811
    settings = asdict(Settings(image=str(image), runtime=runtime, disk_mib=32))
    made = ContainerEnvironment(container=settings, setup=SETUP, test=test, reward_file="/out/reward")
    for attack, answer in (ATTACKS["the test"], "wrong"), (BESIDE, "wrong"), (BESIDE, "42"):
        made.reset({"prompt": "answer", "extra_info": {}})
        made.bash(f"{EVIL}\n{attack}\nprintf {answer} > /work/answer")
        assert made.score()["score"] == float(answer == "42"), (attack, answer)
        made.close()


def test_a_test_in_the_root_sees_directories_that_were_made_changed_and_removed(runtime, image):  # noqa: F811
    settings = asdict(Settings(image=str(image), runtime=runtime))
    test = "test -f /new/x && test -f /old/a/x && test ! -e /gone && test ! -e /file && test ! -e /var/x"
    made = ContainerEnvironment(container=settings, setup="mkdir -p /old/a /gone", test=test)
    for wanted, score in ("rm -r /gone;", 1.0), ("", 0.0):
        made.reset({"prompt": "answer", "extra_info": {}})
        made.bash(f"{wanted} mkdir -p /new /var; for f in /new/x /old/a/x /file /var/x; do echo > $f; done")
        assert made.score()["score"] == score
        made.close()


UNREADABLE = [
    "1e400",
    "NaN",
    '{"reward": Infinity}',
    "[" * 100_000,
    "9" * 400,
    "1" + "0" * 5000,
    "\0",
    "one",
    "[1]",
    '{"reward": "0", "tests_run": 1}',
    '{"reward": null, "passed": 1}',
]


@pytest.mark.parametrize("text", UNREADABLE)
def test_a_reward_file_without_a_number_is_zero(text):
    assert read_reward(text) == {"score": 0.0}


@pytest.mark.parametrize("text", ["1.5", "-1", "1e39", '{"a": 3}'])
def test_a_reward_outside_of_its_range_fails(runtime, image, text):  # noqa: F811
    settings = asdict(Settings(image=str(image), runtime=runtime))
    test = f"echo '{text}' > /reward"
    made = ContainerEnvironment(container=settings, directory="/work", test=test, reward_file="/reward")
    made.reset({"prompt": "answer", "extra_info": {}})
    assert made.score()["score"] == 0.0
    made.close()
