"""Runs the agent of one node of an elastic run: it starts the ranks of its node, and restarts them when the
nodes of the run change.

    srun --no-kill --ntasks-per-node=1 python -m launch.elastic --ranks 8 --config FILE [key=value ...]

slurm/elastic.sbatch runs this command. A rank does not survive the death of another rank, but an agent
survives the death of another agent.

The agents agree on generations through files in the run directory (`launch.elastic_files`). A generation has
a number, a list of member nodes, and a layout. The first living member leads: when a member dies, or another
node can join, the leader proposes the next generation. An agent that finds a newer generation kills its
ranks. If its node is a member of the new generation, the agent starts ranks again, and they continue from the
newest checkpoint. The exit codes are the exit codes of train_rl.py.
"""

import argparse
import hashlib
import json
import os
import signal
import sys
import time
from pathlib import Path

from launch.elastic_files import Board, ElasticGeneration, Lease, exit_code
from launch.elastic_jobs import Jobs
from launch.elastic_ranks import NodeRanks
from launch.layouts import layouts_of
from launch.slurm import GIVEN
from rl.config.checks import check
from rl.config.command_line import add_config, make_parser
from rl.config.options import ConfigError
from rl.config.schema import Config, load_config
from rl.faults.lock import FILE_NAME as LOCK
from rl.run_directory.status import FILE_NAME as STATUS
from rl.run_directory.status import read_object
from rl.runtime.ranks import expand_hostlist

BEAT_S = 1.0
"""Seconds between two renewals of a lease."""
GRACE_S = 30.0
"""Seconds that the other ranks and nodes have to end after the first one has ended. They use this time to
report the cause."""
SETTLE_S = 5.0
"""Seconds for which the list of ready nodes must stay the same before the run stops to take new nodes."""
SILENT_S = 600.0
"""Seconds without a successful turn (for example on a full disk) after which the agent gives up."""
PARTS = ("notice", "agree", "start", "load", "step")
"""Parts of a recovery, in order. Each part ends with an event: the leader sees the death; all members know
the next generation; their ranks have met; the checkpoint is loaded; the first step is done."""


def main(argv: list[str]) -> int:
    parser = make_parser(__doc__, prog="python -m launch.elastic")
    add, env = parser.add_argument, os.environ
    add_config(parser, Config)
    add("--ranks", metavar="N", type=int, required=True, help="ranks of this node")
    add(
        "--nodes",
        metavar="N",
        type=int,
        default=int(env.get("SLURM_JOB_NUM_NODES", "1")),
        help="nodes to await",
    )
    add("--node", default=env.get("SLURMD_NODENAME") or os.uname().nodename, help="name of this node")
    add("--logs", metavar="DIR", type=Path, help="directory of the ranks' logs (RUN/elastic)")
    options = parser.parse_run(argv)
    if options.ranks < 1 or options.nodes < 1 or "/" in options.node:
        parser.error(
            f"--ranks={options.ranks}, --nodes={options.nodes} and --node={options.node} must be two numbers "
            "of at least 1 and a host name"
        )
    signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGUSR2, signal.SIGTERM})  # `_turn` polls for them
    try:
        return Agent(options).run()
    except ValueError as error:
        print(f"error: {error}", file=sys.stderr, flush=True)
        return 2
    except EOFError as error:
        print(f"error: {error}; the agent starts again", file=sys.stderr, flush=True)
        return 137
    except (OSError, RuntimeError) as error:  # run.dir cannot be written, or a rank cannot import the program
        print(f"error: {error}", file=sys.stderr, flush=True)
        return 1


class Agent:
    """The agent of this node."""

    def __init__(self, options: argparse.Namespace):
        job, now = os.environ.get("SLURM_JOB_ID", ""), time.time_ns()
        node, address = options.node, options.node + os.environ.get("LOCKSTEP_NODE_SUFFIX", "")
        self.options = options
        self.patience = _number("LOCKSTEP_JOIN_TIMEOUT", 60)
        """Seconds that a start waits for the other nodes."""
        self.max_attempts = _number("MAX_ATTEMPTS", 3)
        self.config = self._config([])
        digest = hashlib.sha256(f"{options.ranks} {self.config!r}".encode()).hexdigest()
        self.lease = Lease(f"{node}-{os.getpid()}-{now}", node, address, options.ranks, job, digest, now)
        elastic = self.config.run.elastic
        if not elastic.is_on:
            raise ConfigError(
                "run.elastic.min_nodes=0, but an elastic run needs a minimum; set it to 1 or more, or use "
                "slurm/train.sbatch."
            )
        self.layouts = layouts_of(self.config, options.ranks, self._config)
        self.logs = options.logs or Path(self.config.run.dir, "elastic")
        self.board = Board(self.config.run.dir, elastic.lost_s)
        self.jobs = Jobs(self.board.directory, job, self._say)
        self.at = self.board.newest(None)
        self.first = self.at.number if self.at else 0
        """Number of the newest generation when this agent began."""
        self.ranks = NodeRanks(self._arguments([]), options.ranks)
        self.started = self.since = time.monotonic()
        """started: when this agent began. since: when it last found a new generation or asked its ranks to
        stop."""
        self.rank_ended: float | None = None
        """When the first rank of this node ended with an error; None if no rank has."""
        self.node_ended: float | None = None
        """When this agent, as the leader, first saw that the ranks of a node had ended."""
        self.candidates: list[str] = []
        self.changed = 0.0
        """When the candidates last changed."""
        self.recovery: dict[str, float] = {}
        """On the leader: event -> its time, from the death of a node to the first step of the recovered
        run."""

    def _arguments(self, overrides: list[str]) -> list[str]:
        files = [f"--config={file}" for file in self.options.config]
        return [*files, *self.options.overrides, *overrides]

    def _config(self, overrides: list[str]) -> Config:
        config = load_config(self.options.config, [*self.options.overrides, *overrides])
        check(config)
        return config

    def run(self) -> int:
        """Take a turn each second until the run ends; return the exit code.

        An OSError (for example from a full disk) is logged, and the agent tries again.
        """
        self._say(f"layouts by nodes: {self.layouts}")
        last = well = time.monotonic()
        error = ""
        while True:
            begun = time.monotonic()
            # This node was paused, or its disk is slow: the pause must not make the other nodes look dead.
            if begun - last > 3 * BEAT_S:
                self.board.excuse(begun - last - 3 * BEAT_S)
            last = begun
            try:
                if (code := self._turn()) is not None:
                    return code
                well, error = time.monotonic(), ""
            except OSError as found:
                if error != (error := str(found)):
                    self._say(error)
                if time.monotonic() - well > SILENT_S:
                    raise
            time.sleep(max(0.05, BEAT_S - (time.monotonic() - begun)))

    def _turn(self) -> int | None:
        """Follow the newest generation, renew the lease, and lead if this agent is the leader.

        Returns the exit code at the end of the run, else None.
        """
        asked = signal.sigpending() & {signal.SIGUSR2, signal.SIGTERM}
        self.lease.leaving = self.lease.leaving or bool(asked)
        self.ranks.poll()
        self.lease.ready = self.ranks.is_ready
        newest = self.board.newest(self.at)
        if newest is not None and newest is not self.at:
            self.at = newest
            self.ranks.kill()
            self.since = time.monotonic()
            if newest.code is not None and newest.number > self.first:
                return self._end(newest.code, newest.reason)
            self._start(newest)
        self._watch()
        self.board.renew(self.lease)
        alive = self.board.alive()
        members = [] if self.at is None else self.at.members
        others = [member for member in members if member.key in {lease.key for lease in alive}]
        if others and self.lease.key not in [member.key for member in members]:
            if others[0].config != self.lease.config:
                raise ConfigError(
                    f"run.dir={self.config.run.dir} is that of a live run with another config or number of "
                    f"ranks per node (job {others[0].job}, --ranks {others[0].ranks}); use its command, or "
                    "another run.dir."
                )
            if self.lease.leaving:
                return self._end(75, "this node leaves, and others continue")
        if self._leads(alive):
            self._lead(alive)
        return None

    # Ranks ----------------------------------------------------------------------------------------------

    def _start(self, at: ElasticGeneration) -> None:
        """Start this node's ranks of the generation, if it is a member."""
        self.lease.generation, self.lease.code = at.number, None
        place = next((n for n, member in enumerate(at.members) if member.key == self.lease.key), None)
        if place is None:
            return
        first = sum(member.ranks for member in at.members[:place])
        try:
            self.logs.mkdir(parents=True, exist_ok=True)
            for local in range(self.lease.ranks):
                log = self.logs / f"rank-{first + local}.log"
                with log.open("a") as file:
                    file.write(f"generation {at.number} on {self.lease.node}\n")
                environ = _environment(at, place, first + local, local)
                self.ranks.start(environ, self._arguments(at.overrides), log)
        except OSError as error:
            self._say(f"the ranks do not start: {error}")
            self.ranks.kill()
            self.lease.code = 1

    def _watch(self) -> None:
        """Write the exit code into the lease when all ranks of this node have ended.

        If a rank fails and others still run after GRACE_S, the others are killed.
        """
        codes = list(self.ranks.codes.values())
        faults = [code for code in codes if code not in (None, 0, 75)]
        self.rank_ended = (self.rank_ended or time.monotonic()) if faults else None
        late = self.rank_ended is not None and time.monotonic() - self.rank_ended > GRACE_S
        if not codes or (None in codes and not late):
            return
        self.ranks.kill()
        self.lease.code = exit_code([code for code in codes if code is not None])

    # Leading --------------------------------------------------------------------------------------------

    def _leads(self, alive: list[Lease]) -> bool:
        """Return whether this agent is the first living member, or the first agent if no member lives."""
        members = [] if self.at is None else [member.key for member in self.at.members]
        living = [lease.key for lease in alive]
        if not (order := [key for key in members if key in living]):
            if members and time.monotonic() - self.started < self.config.run.elastic.lost_s:
                return False  # a new agent does not know yet whether the members live
            order = living
        return bool(order) and order[0] == self.lease.key

    def _lead(self, alive: list[Lease]) -> None:
        """Propose the next generation, or end the run, if the state of the nodes requires it."""
        at, now = self.at, time.monotonic()
        stay = [lease for lease in alive if not lease.leaving and lease.config == self.lease.config]
        candidates = [lease for lease in stay if lease.ready]
        come = len(stay) > len(candidates)
        if (keys := [lease.key for lease in candidates]) != self.candidates:
            self.candidates, self.changed = keys, now
        now_of = {lease.key: lease for lease in alive}
        if at is None or not any(member.key in now_of for member in at.members):
            return self._form(at or ElasticGeneration(0), candidates, come)
        lost = [member for member in at.members if member.key not in now_of]
        codes = [
            now_of[member.key].code if now_of[member.key].generation == at.number else None
            for member in at.members
            if member.key in now_of
        ]
        ended = [code for code in codes if code is not None]
        if ended and self.node_ended is None:
            self.node_ended = now
        late = self.node_ended is not None and now - self.node_ended > GRACE_S
        if lost or len(ended) == len(codes) or (late and any(code not in (0, 75) for code in ended)):
            self._decide(at, candidates, come, lost, ended)
        elif not ended:
            self.node_ended = None
            self._note_recovery(at, now_of)
            settled = now - max(self.changed, self.since) > SETTLE_S and self._has_stepped(at)
            self.jobs.tell(alive, max(0, at.target - len(alive)) if settled else 0)
            if settled and self._nodes(len(candidates)) > len(at.members):
                self._say(f"{len(candidates)} nodes are ready, {len(at.members)} run: stopping to take them")
                self.ranks.ask_to_stop()
                self.since = now

    def _form(self, last: ElasticGeneration, candidates: list[Lease], come: bool) -> None:
        """Propose the first generation after a start of the run, or after the death of all members."""
        waited, number = time.monotonic() - self.since, last.number + 1
        if not candidates and not come:
            self._finish(number, 75, "all nodes leave")
        elif len(candidates) < self.options.nodes and (come or waited < self.patience):
            return
        elif self._nodes(len(candidates)):
            target = 0 if last.code is not None else last.target
            self._propose(number, candidates, target=max(target, len(candidates)), reason="start")
        elif waited >= self.patience:
            nodes = f"{len(candidates)} nodes came, but the smallest layout needs {min(self.layouts)}"
            self._finish(number, 75, nodes)

    def _decide(
        self, at: ElasticGeneration, candidates: list[Lease], come: bool, lost: list[Lease], codes: list[int]
    ) -> None:
        """End the run, or propose the next generation, after the ranks have ended or a node died."""
        code = exit_code(codes)
        status = self._json(STATUS)
        stopped = bool(codes) and status.get("state") == "stopped"  # by the file 'stop' if no code is 75
        if code == 2 or (code == 0 and (not lost or stopped or status.get("state") == "finished")):
            return self._finish(at.number + 1, code, "the input is invalid" if code else "done")
        is_stop = not lost and code == 75
        if is_stop and status.get("reason") not in ("SIGUSR2", "SIGTERM"):
            return self._finish(at.number + 1, 75, str(status.get("reason")))
        failed = not lost and code not in (0, 75)
        step = int(self._json(STATUS).get("checkpoint_step", 0))
        attempts = 1 if step > at.step else at.attempts + failed
        if attempts > self.max_attempts:
            return self._finish(
                at.number + 1, code, f"{at.attempts} failures without a checkpoint after {step}"
            )
        silent = max((self.board.silent_s(member.key) for member in lost), default=0.0)
        if not self._nodes(len(candidates)):
            if not come and (is_stop or time.monotonic() - self.changed > GRACE_S):
                nodes = f"{len(candidates)} nodes are left, fewer than the smallest layout needs"
                self._finish(at.number + 1, 75, nodes)
            return
        why = ", ".join(f"{member.node} was lost" for member in lost) or (
            "nodes change" if is_stop else f"ranks ended with code {code}"
        )
        ago = silent if lost else time.monotonic() - (self.node_ended or time.monotonic())
        now = time.monotonic()
        self.recovery = {"death": self.recovery.get("death", now - ago), "notice": now}
        self._propose(
            at.number + 1, candidates, target=at.target, reason=why, step=step, attempts=attempts, was=at
        )

    def _nodes(self, number: int) -> int:
        """Return how many nodes the widest layout uses that `number` nodes can run; 0 if no layout fits."""
        return max((nodes for nodes in self.layouts if nodes <= number), default=0)

    def _propose(
        self,
        number: int,
        candidates: list[Lease],
        *,
        target: int,
        reason: str,
        step: int = 0,
        attempts: int = 1,
        was: ElasticGeneration | None = None,
    ) -> None:
        stay = [] if was is None else [member.node for member in was.members]
        order = sorted(candidates, key=lambda lease: (lease.node not in stay, lease.node))
        members = order[: self._nodes(len(order))]
        overrides = self.layouts[len(members)]
        wide = max(target, min(len(candidates), max(self.layouts)))
        new = ElasticGeneration(number, members, overrides, wide, None, reason, step, attempts)
        self.board.propose(new, self.lease.key)
        self.node_ended = None
        self._say(f"generation {number} ({reason}): {', '.join(new.nodes)} {' '.join(overrides)}")

    def _finish(self, number: int, code: int, reason: str) -> None:
        self.board.propose(ElasticGeneration(number, code=code, reason=reason), self.lease.key)

    # The run --------------------------------------------------------------------------------------------

    def _json(self, name: str) -> dict:
        return read_object(Path(self.config.run.dir, name))  # {} before a rank has written the file

    def _has_stepped(self, at: ElasticGeneration) -> bool:
        """Return whether this generation has completed a training step."""
        status = self._json(STATUS)
        return status.get("restarts") == at.number and status["step"] > at.step

    def _note_recovery(self, at: ElasticGeneration, alive: dict[str, Lease]) -> None:
        """Log how many seconds each part of a recovery (PARTS) took, once the first step is done."""
        if not (times := self.recovery):
            return
        status, now = self._json(STATUS), time.monotonic()
        if all(alive[member.key].generation == at.number for member in at.members):
            times.setdefault("agree", now)
        if self._json(LOCK).get("generation") == at.number:
            times.setdefault("start", now)
        if status.get("restarts") == at.number:
            times.setdefault("load", now)
            first = times.setdefault("from", status["step"])
            if status["step"] > first:
                points = [times[name] for name in ("death", *PARTS[:-1])] + [now]
                line = {f"{part}_s": round(b - a, 1) for part, a, b in zip(PARTS, points, points[1:])}
                line["total_s"] = round(now - points[0], 1)
                self.board.note("recoveries.jsonl", {"generation": at.number, "reason": at.reason} | line)
                self._say(f"generation {at.number} took its first step {line}")
                self.recovery = {}

    def _end(self, code: int, reason: str) -> int:
        """Return the exit code of this node. The last agent of a Slurm job also ends the job (`Jobs.end`)."""
        self._say(f"the end with code {code}: {reason}")
        try:
            if (copy := os.environ.get("LOCKSTEP_STATUS")) and (status := self._json(STATUS)):
                Path(copy).write_text(json.dumps(status) + "\n")  # the leader may belong to another job
            if self.options.logs:  # for the batch script, because srun may exit with another code
                (self.logs / "outcome").write_text(f"{code}\n")
            same = [lease for lease in self.board.alive() if lease.job == self.lease.job]
        except OSError as error:
            self._say(str(error))
            return code
        if self.lease.job and same and same[-1].key == self.lease.key:
            nodes = expand_hostlist(os.environ.get("SLURM_JOB_NODELIST", ""))
            self.jobs.end(code, [lease.node for lease in same], nodes)
        return code

    def _say(self, text: str) -> None:
        print(f"{time.strftime('%H:%M:%S')} agent of {self.lease.node}: {text}", flush=True)


def _number(name: str, default: float) -> float:
    """Return an environment variable as a number.

    The agent reads its variables when it starts, so that a bad value raises ValueError then, not at a
    recovery.
    """
    try:
        return float(text := os.environ.get(name) or str(default))
    except ValueError:
        raise ValueError(f"{name}={text!r} must be a number; set one, or unset it.") from None


def _environment(at: ElasticGeneration, place: int, rank: int, local: int) -> dict[str, str]:
    """Return the environment of a rank: the variables that a Slurm step on the member nodes would set.

    place: index of this node among the members. rank: global rank. local: index of the rank on its node.
    """
    own = ("MASTER_PORT", "RANK", "WORLD_SIZE", "SLURM_CPUS_PER_TASK", "SLURM_HET_SIZE", GIVEN)
    return {name: value for name, value in os.environ.items() if name not in own} | {
        "LOCKSTEP_GENERATION": str(at.number),
        "SLURM_JOB_ID": at.members[0].job or "0",
        "SLURM_STEP_ID": f"elastic-{at.number}",
        "SLURM_RESTART_COUNT": str(at.number),
        "SLURM_PROCID": str(rank),
        "SLURM_LOCALID": str(local),
        "SLURM_NODEID": str(place),
        "SLURM_STEP_NUM_TASKS": str(sum(member.ranks for member in at.members)),
        "SLURM_STEP_NODELIST": ",".join(at.nodes),
        "SLURM_STEP_TASKS_PER_NODE": ",".join(str(member.ranks) for member in at.members),
        "MASTER_ADDR": at.members[0].address,
    }


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
