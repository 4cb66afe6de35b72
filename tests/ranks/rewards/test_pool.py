import contextlib
import logging
import os
import re
import signal
import subprocess
import sys
import textwrap
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from rl.config.reward import Reward
from rl.config.reward_sources import make_plan
from rl.rewards.pool import pool as pool_module
from rl.rewards.pool import worker_process
from rl.rewards.pool.pool import ScoringPool, default_workers, scoring_pool
from rl.run_directory.progress import LINE_INTERVAL_S
from tests.ranks.rewards.hostile_rewards import VARIABLES
from tests.spawn import ROOT
from tests.tables import rows
from tests.timing import assert_linear

REWARDS = Path(__file__).parent / "hostile_rewards.py"


def make_pool(path, name, **options):
    options = {"failure_score": -1.0, "workers": 1, "timeout_s": 20.0, "memory_mib": 2048, **options}
    return ScoringPool(make_plan(f"{path}:{name}", {}, {}), **options)


def samples_of(responses, **extra_info):
    sample = {"prompt": "a", "ground_truth": "2", "data_source": "toy"}
    return [sample | {"response": str(r), "extra_info": dict(extra_info)} for r in responses]


def numbers_of(scores):
    return [score.values["score"] for score in scores]


def failed_of(scores):
    return [i for i, score in enumerate(scores) if score.values["failed"]]


def is_alive(pid):
    """Neither gone nor a zombie that waits to be collected."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] not in "ZX"
    except (FileNotFoundError, ProcessLookupError):
        return False


def wait_until_gone(pids, seconds=30.0):
    deadline = time.monotonic() + seconds
    while any(map(is_alive, pids)) and time.monotonic() < deadline:
        time.sleep(0.02)
    return [pid for pid in pids if is_alive(pid)]


def my_children():
    """pids of this process's children, zombies included."""
    pids = []
    for stat in Path("/proc").glob("[0-9]*/stat"):
        with contextlib.suppress(FileNotFoundError, ProcessLookupError):
            if int(stat.read_text().rpartition(")")[2].split()[1]) == os.getpid():
                pids.append(int(stat.parent.name))
    return set(pids)


@pytest.fixture(autouse=True)
def no_log_before_and_no_process_after(monkeypatch):
    monkeypatch.setattr(pool_module, "_logged", set())
    before = my_children()
    yield
    assert my_children() <= before


def test_scores_details_and_predictions_come_back_in_order(caplog):
    with make_pool(REWARDS, "plain", workers=3) as pool, caplog.at_level(logging.DEBUG):
        for num_samples in (0, 1, 300):
            scores = pool.score(samples_of(range(num_samples)))
            expected = [{"score": float(i), "acc": 1.0, "failed": 0.0} for i in range(num_samples)]
            assert [s.values for s in scores] == expected
            assert [s.prediction for s in scores] == [f"<{i}>" for i in range(num_samples)]
            assert [s.feedback for s in scores] == [f"{i}!" for i in range(num_samples)]
    assert caplog.records == []


def test_no_worker_before_the_first_call_or_after_close():
    before = my_children()
    pool = make_pool(REWARDS, "whereabouts", workers=2)
    assert my_children() == before
    values = [score.values for score in pool.score(samples_of(range(50)))]
    pids = {v[key] for v in values for key in ("pid", "parent")}
    assert len(my_children() - before) == 2
    assert {v["threads"] for v in values} == {1.0} and {v["stdin"] for v in values} == {0.0}
    assert os.getpgid(0) not in {v["group"] for v in values}
    pool.shutdown()
    assert my_children() == before and not any(map(is_alive, map(int, pids)))
    assert numbers_of(pool.score(samples_of([4]))) == [4.0]  # new workers start
    pool.shutdown()
    pool.shutdown()


def test_one_sample_starts_one_worker():
    before = my_children()
    with make_pool(REWARDS, "plain", workers=8) as pool:
        pool.score(samples_of([1]))
        assert len(my_children() - before) == 1


def test_workers_inherit_only_variables_that_are_named(monkeypatch):
    for name in VARIABLES:
        monkeypatch.setenv(name, "value")
    with make_pool(REWARDS, "shows_variables", variables=["MINE"]) as pool:
        values = pool.score(samples_of([1]))[0].values
    assert [values[name] for name in VARIABLES] == [1, 1, 0, 0]  # the job's places, and not its key


def test_samples_larger_than_any_buffer():
    with make_pool(REWARDS, "length", workers=2) as pool:
        lengths = [3_000_000 + i for i in range(8)]
        assert numbers_of(pool.score(samples_of("x" * length for length in lengths))) == lengths


def test_each_data_source_has_its_functions():
    components = [{"function": f"{REWARDS}:plain", "weight": 2}, {"function": f"{REWARDS}:length"}]
    plan = make_plan("rl.rewards.exact:score", {}, {"toy": components})
    samples = samples_of([7]) + [{**samples_of([2])[0], "data_source": "other"}]
    with ScoringPool(plan, failure_score=0.0, workers=1, timeout_s=20, memory_mib=0) as pool:
        mixed, default = pool.score(samples)
    details = {"hostile_rewards/score": 7.0, "hostile_rewards/acc": 1.0, "hostile_rewards_2/score": 1.0}
    assert mixed.values == {"score": 15.0, "acc": 1.0, **details, "failed": 0.0}
    assert (mixed.prediction, mixed.feedback, default.feedback) == ("<7>", "7!", None)
    assert default.values == {"score": 1.0, "acc": 1.0, "failed": 0.0}


def test_paths_and_modules_resolve_as_in_the_parent(tmp_path, monkeypatch):
    (tmp_path / "own.py").write_text("def score(**extra):\n    return 0.5\n")
    (tmp_path / "random.py").write_text("1 / 0\n")  # must not shadow the standard library's
    monkeypatch.chdir(tmp_path)
    by_path = make_pool("own.py", "score")
    monkeypatch.chdir("/")
    monkeypatch.syspath_prepend(tmp_path)
    sys.path.remove(str(tmp_path))
    sys.path.append(str(tmp_path))
    with by_path, make_pool("own", "score") as by_module:
        for pool in (by_path, by_module):
            assert numbers_of(pool.score(samples_of([1]))) == [0.5]


def test_a_function_may_keep_a_process_from_call_to_call():
    with make_pool(REWARDS, "keeps_a_server") as pool:
        scores = [score for _ in range(3) for score in pool.score(samples_of(range(5)))]
        assert not failed_of(scores)
        (server,) = {int(score.values["server"]) for score in scores}
        assert is_alive(server)
    assert not is_alive(server)


def test_the_work_beside_the_workers_grows_linearly():
    """Measure this process, which hands out 10,000 samples and takes their scores."""
    reasoning = "First 12 * 3 = 36 dollars, then 36 + 4 = 40 dollars. " * 6
    samples = samples_of(f"{reasoning}#### {i}" for i in range(10_000))
    samples = [sample | {"ground_truth": str(i)} for i, sample in enumerate(samples)]
    with make_pool("rl.rewards.gsm8k", "score", workers=2) as pool:
        pool.check()
        assert numbers_of(pool.score(samples)) == [1.0] * len(samples)
        assert_linear(pool.score, lambda size: samples[:size], len(samples))


AT_ONCE = """raises;interrupts;recurses;allocates;exits;exits at once;crashes;kills itself;kills its group
kills its parent;kills its parent's group;stops its parent;closes all;writes garbage;writes without end;forges
forges an error;returns nan;returns text;returns too much""".replace("\n", ";").split(";")
LATE = ["sleeps", "spins", "stops itself"]


@pytest.mark.parametrize("failures, timeout_s", [(AT_ONCE, 30.0), (LATE, 1.0)])
@pytest.mark.parametrize("workers", [1, 2])
def test_a_call_that_goes_wrong_costs_its_sample_only(failures, timeout_s, workers):
    responses = [r for i, failure in enumerate(failures) for r in (3 * i, failure, 3 * i + 1, 3 * i + 2)]
    with make_pool(REWARDS, "fails_as_named", workers=workers, timeout_s=timeout_s, memory_mib=400) as pool:
        scores = pool.score(samples_of(responses))
        assert [responses[i] for i in failed_of(scores)] == failures
        assert numbers_of(scores) == [-1.0 if isinstance(r, str) else float(r) for r in responses]
        assert numbers_of(pool.score(samples_of([1, 2]))) == [1.0, 2.0]


REASONS = rows("""
    sleeps => took longer than the limit of 1 s, and its process was killed ;;
    exits at once => ended its process: exit status 3 ;; crashes => ended its process: SIGSEGV ;;
    allocates => MemoryError ;; writes garbage => sent an invalid message: b'garbage' ;;
    returns nan => the score must be a finite number of float32, it is float nan
    """)


@pytest.mark.parametrize("failure, reason", REASONS)
def test_the_reason_of_a_failure_is_logged(failure, reason, caplog):
    timeout_s = 1.0 if failure == "sleeps" else 30.0
    with make_pool(REWARDS, "fails_as_named", timeout_s=timeout_s, memory_mib=400) as pool:
        pool.score(samples_of([failure]))
    assert reason in caplog.text


@pytest.mark.parametrize("name", ["prints", "forks", "forks_an_exit", "leaves_an_alarm", "ignores_signals"])
def test_harmless_side_effects_cost_no_sample(name):
    with make_pool(REWARDS, name) as pool:
        for _ in range(2):
            scores = pool.score(samples_of(range(12)))
            assert not failed_of(scores)
            assert numbers_of(scores) == [float(i) for i in range(12)]


def test_each_call_starts_in_the_same_directory(tmp_path):
    with make_pool(REWARDS, "changes_directory") as pool:
        assert not failed_of(pool.score(samples_of(range(12), cwd=os.getcwd(), scratch=str(tmp_path))))


@pytest.mark.parametrize("end, clean", [("return", True), ("sleep", True), ("kill", False)])
def test_a_daemon_that_a_call_started_is_killed(tmp_path, end, clean):
    """Double fork and a session of its own; also when the call then hangs or kills the supervisor."""
    pid_file = tmp_path / "pid"
    samples = samples_of(range(8))
    samples[3]["extra_info"] = {"pid_file": str(pid_file), "end": end, "clean": clean}
    with make_pool(REWARDS, "leaves_a_daemon", timeout_s=20.0 if end != "sleep" else 1.5) as pool:
        scores = pool.score(samples)
        assert failed_of(scores) == ([] if end == "return" else [3])
        assert not wait_until_gone([int(pid) for pid in pid_file.read_text().split()])


def test_a_process_that_forks_continuously_is_gone_afterwards(tmp_path):
    heartbeat = tmp_path / "heartbeat"
    with make_pool(REWARDS, "forks_continuously", timeout_s=1.0) as pool:
        assert failed_of(pool.score(samples_of([0, "bad", 2], heartbeat=str(heartbeat)))) == [1]
    heartbeat.unlink()
    time.sleep(0.3)
    assert not heartbeat.exists()


@pytest.mark.parametrize("name", ["hangs", "dies", "exits_in_a_task"])
def test_an_async_call_that_goes_wrong_costs_its_sample_only(name):
    with make_pool(REWARDS, name, workers=2, timeout_s=1.0 if name == "hangs" else 30.0) as pool:
        scores = pool.score(samples_of([*range(5), "bad", *range(6, 12)]))
    assert failed_of(scores) == [5]
    assert numbers_of(scores) == [*range(5), -1.0, *range(6, 12)]


def test_async_calls_of_a_chunk_run_concurrently():
    with make_pool(REWARDS, "awaits") as pool:
        # None returns before all have begun: one after the other they would run into the time limit.
        scores = pool.score(samples_of(range(60), together=60))
        assert numbers_of(scores) == [float(i) for i in range(60)]


def test_a_blocking_async_call_costs_its_sample_only(monkeypatch):
    monkeypatch.setattr(worker_process, "ASYNC_GRACE_S", 0.2)
    with make_pool(REWARDS, "blocks", timeout_s=0.8) as pool:
        scores = pool.score(samples_of([0, 1, "bad", 3]))
    assert failed_of(scores) == [2] and numbers_of(scores) == [0.0, 1.0, -1.0, 3.0]


def test_async_calls_that_never_await_share_no_limit():
    with make_pool(REWARDS, "works_without_awaiting", timeout_s=1.0) as pool:
        assert not failed_of(pool.score(samples_of(range(10))))  # 2 s in one chunk


def test_a_slow_import_does_not_count_as_a_call(tmp_path):
    source = "import time\ntime.sleep(1.5)\ndef score(response, **extra): return float(response)\n"
    (tmp_path / "slow.py").write_text(source)
    with make_pool(tmp_path / "slow.py", "score", timeout_s=0.7) as pool:
        assert numbers_of(pool.score(samples_of(range(10)))) == [float(i) for i in range(10)]


BROKEN = rows("""
    import time; time.sleep(1000) => was not ready after 1 s ;; 1 / 0 => ZeroDivisionError ;;
    raise SystemExit(2) => SystemExit: 2 ;; import os; os._exit(7) => exit status 7 ;;
    def other(**extra): return 0.0 => has no 'score', only other ;;
    def score(prompt): return 0.0 => for the keywords it ignores ;; data = bytearray(3 << 30) => MemoryError
    """)


@pytest.mark.parametrize("source, reason", BROKEN)
def test_an_import_failure_fails_samples_and_check(tmp_path, caplog, source, reason):
    (tmp_path / "broken.py").write_text(source)
    with make_pool(tmp_path / "broken.py", "score", startup_s=1.0 if "sleep" in source else 60.0) as pool:
        scores = pool.score(samples_of(range(100)))
        assert failed_of(scores) == list(range(100)) and set(numbers_of(scores)) == {-1.0}
        (record,) = caplog.records
        assert "failed on 100 of 100 samples" in record.getMessage() and reason in record.getMessage()
        with pytest.raises(ValueError, match=reason):
            pool.check()


def test_a_process_that_cannot_be_started_is_a_failure_too(monkeypatch):
    monkeypatch.setattr(sys, "executable", "/nowhere/python")
    with make_pool(REWARDS, "plain") as pool:
        assert len(failed_of(pool.score(samples_of(range(5))))) == 5
        with pytest.raises(ValueError, match="cannot be started.*/nowhere/python"):
            pool.check()


@pytest.mark.parametrize("key", ["pid", "parent"])
def test_a_worker_that_died_while_idle_costs_no_sample(key):
    with make_pool(REWARDS, "whereabouts", workers=2) as pool:
        pids = {int(score.values[key]) for score in pool.score(samples_of(range(200)))}
        for pid in pids:
            os.kill(pid, signal.SIGKILL)
        assert not wait_until_gone(pids)
        scores = pool.score(samples_of(range(200)))
    assert not failed_of(scores)
    assert pids.isdisjoint(int(score.values[key]) for score in scores)


def test_workers_outlive_the_thread_that_started_them():
    """PR_SET_PDEATHSIG counts threads: the signal comes when that thread ends."""
    with make_pool(REWARDS, "whereabouts") as pool, ThreadPoolExecutor(1) as thread:
        (first,) = thread.submit(pool.score, samples_of([1])).result()
        thread.shutdown(wait=True)
        (second,) = pool.score(samples_of([1]))
    assert first == second


def test_an_interrupted_call_leaves_a_pool_that_works():
    def interrupt(number, frame):
        raise KeyboardInterrupt

    previous = signal.signal(signal.SIGALRM, interrupt)
    try:
        with make_pool(REWARDS, "fails_as_named") as pool:
            signal.setitimer(signal.ITIMER_REAL, 1.0)
            with pytest.raises(KeyboardInterrupt):
                pool.score(samples_of(["sleeps", "sleeps"]))
            assert numbers_of(pool.score(samples_of(range(10)))) == [float(i) for i in range(10)]
    finally:
        signal.signal(signal.SIGALRM, previous)


def test_a_call_without_an_answer_is_logged_while_it_hangs(monkeypatch, caplog):
    assert pool_module.SAY_AFTER_S <= LINE_INTERVAL_S
    monkeypatch.setattr(pool_module, "SAY_AFTER_S", 0.2)
    with make_pool(REWARDS, "fails_as_named", timeout_s=1.5) as pool, caplog.at_level(logging.WARNING):
        pool.score(samples_of(["1", "spins"]))
    said, failure = caplog.records[0].getMessage(), caplog.records[-1].getMessage()
    assert "no answer after" in said and "reward.timeout_s=1.5 ends it" in said
    assert "failed on 1 of 2 samples" in failure


def test_the_reason_of_each_failure_is_one_sentence():
    with make_pool(REWARDS, "fails_as_named") as pool:
        pool.score(samples_of(["1", "raises"]))
        assert list(pool.failures) == [1]
        assert re.fullmatch(r"RuntimeError: broken \(hostile_rewards.py, line \d+\)", pool.failures[1])
        pool.score(samples_of(["1"]))
        assert pool.failures == {}


def test_workers_die_with_the_process_that_started_them(tmp_path):
    """Even while one of its forks lives on, which holds copies of its sockets."""
    program = f"""
        import os, time
        from rl.config.reward_sources import make_plan
        from rl.rewards.pool.pool import ScoringPool
        sample = dict(prompt="", ground_truth="", data_source="", extra_info={{}})
        plan = make_plan("{REWARDS}:whereabouts", {{}}, {{}})
        pool = ScoringPool(plan, failure_score=0.0, workers=1, timeout_s=1000, memory_mib=0)
        (score,) = pool.score([dict(sample, response="1")])
        fork = os.fork()
        if fork == 0:
            time.sleep(1000)
        print(int(score.values["pid"]), int(score.values["parent"]), fork, flush=True)
        pool.score([dict(sample, response="1")])
        time.sleep(1000)
    """
    process = subprocess.Popen(
        [sys.executable, "-c", textwrap.dedent(program)], cwd=ROOT, stdout=subprocess.PIPE, text=True
    )
    scorer, supervisor, fork = map(int, process.stdout.readline().split())
    try:
        assert is_alive(scorer) and is_alive(supervisor)
        process.kill()
        process.wait()
        assert not wait_until_gone([scorer, supervisor])
    finally:
        os.kill(fork, signal.SIGKILL)
        process.stdout.close()


def test_the_first_failure_is_logged_once_with_the_count(caplog):
    with make_pool(REWARDS, "fails_as_named") as pool, caplog.at_level(logging.WARNING):
        pool.score(samples_of([0, "raises", "raises", 3]))
        pool.score(samples_of(["raises"]))
    first, second = [record.getMessage() for record in caplog.records]
    assert "failed on 2 of 4 samples, which get the score -1" in first
    assert "RuntimeError: broken" in first and "in raises" in first  # the line of the user's function
    assert "failed on 1 of 1 samples" in second and second.endswith("the first failure was logged before")


def test_ranks_of_a_host_share_its_cores():
    cores = len(os.sched_getaffinity(0))
    assert default_workers(1) == cores and default_workers(10 * cores) == 1


def test_a_worker_imports_no_large_package():
    large = {"numpy", "torch", "transformers", "asyncio", "multiprocessing"}
    program = f"import sys, rl.rewards.pool.worker; print(*({large} & set(sys.modules)))"
    command = [sys.executable, "-c", program]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True)
    assert done.stdout.split() == []


def test_a_breakpoint_stops_in_the_ranks_own_process(tmp_path, monkeypatch):
    path, stopped = tmp_path / "stopping.py", []
    path.write_text(
        "async def score(response, **extra):\n    breakpoint()\n    return {'score': 1 / int(response)}\n"
    )
    monkeypatch.setattr(sys, "breakpointhook", lambda: stopped.append(os.getpid()))
    plan, reward = make_plan(f"{path}:score", {}, {}), Reward(in_process=True)
    with scoring_pool(plan, reward, local_world_size=1) as pool:
        assert numbers_of(pool.score(samples_of([2, 4]))) == [0.5, 0.25]
        assert stopped == [os.getpid()] * 2 and pool.all == []
        with pytest.raises(ZeroDivisionError):
            pool.score(samples_of([0]))
