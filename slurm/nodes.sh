# shellcheck shell=bash
# shellcheck disable=SC2154
# Functions for train.pbs, train.lsf and train.flux. This file starts the ranks on each node of a job, and follows the rules of
# job.sh about the end and the restart of a run.
#
#   train CONFIG [CONFIG ...] [key=value ...]    runs train_rl.py with a rank per GPU; of several files, later ones
#                                   win; runs the job again if the run can continue
#
# The batch file sets these variables before it sources this file:
#   job_id       id of this job
#   job_name     the same in every job of the run; names the directory of the logs
#   hosts        array of the nodes' names, each once
#   job_end      Unix time at which the scheduler ends the job, or empty; the run stops and saves before this time
# and defines these names afterwards:
#   on_nodes COMMAND ...    runs a command once on every node and waits for all; sets NODE_RANK to the node's number, from 0
#   again                   makes the scheduler run the job again
#   repeats_with, ends_with for a scheduler that decides by the exit code: the code with which it runs the job again, and
#                           the code with which it does not
# RANKS is the number of ranks per node; its default is the number of GPUs of the first node. CONTAINER (apptainer only),
# PYTHON, LOCKSTEP_ROOT, LOCKSTEP_LOGS, LOCKSTEP_CACHE, NO_REQUEUE, RETRY_CRASHED and MAX_ATTEMPTS mean the same as in job.sh,
# and site.sh is read in the same way.

set -eu
# shellcheck source=/dev/null
if [ -f "$LOCKSTEP_ROOT/slurm/site.sh" ]; then source "$LOCKSTEP_ROOT/slurm/site.sh"; fi
rank_logs=${LOCKSTEP_LOGS:-$PWD}/$job_name.ranks # one file per rank; a job that runs again appends
mkdir -p "$rank_logs"
chmod o-rwx "$rank_logs"

starts=$rank_logs
# shellcheck source=slurm/starts.sh
source "$LOCKSTEP_ROOT/slurm/starts.sh"

export HF_HUB_OFFLINE=1 TRANSFORMERS_OFFLINE=1 HF_DATASETS_OFFLINE=1 # compute nodes have no internet access
export PYTHONUNBUFFERED=1
cache=${LOCKSTEP_CACHE:-${TMPDIR:-/tmp}/lockstep-cache-$(id -u)}
export LOCKSTEP_CACHE=$cache TRITON_CACHE_DIR=$cache/triton TORCHINDUCTOR_CACHE_DIR=$cache/inductor VLLM_CACHE_ROOT=$cache/vllm
export LOCKSTEP_STATUS=$rank_logs/status.json LOCKSTEP_JOB_END=$job_end
ulimit -c 0                    # a core file per rank would fill the disk
ulimit -S -n "$(ulimit -H -n)" # rank 0 holds a connection to every other rank

# The ranks find each other in the same way as the ranks of a Slurm step (rl/runtime/rendezvous.py). Only holders of the job's
# key can predict the port.
LOCKSTEP_STEP="$job_id $(date +%s.%N)"
export LOCKSTEP_STEP MASTER_ADDR=${MASTER_ADDR:-${hosts[0]}}
export PYTHONPATH=$LOCKSTEP_ROOT${PYTHONPATH:+:$PYTHONPATH}

inside=() # prefix of a node's command
case ${CONTAINER:-none} in
none) ;;
apptainer:*)
    inside=(apptainer exec --bind "${CONTAINER_MOUNTS:-$PWD:$PWD,$LOCKSTEP_ROOT:$LOCKSTEP_ROOT}" --pwd "$PWD")
    if command -v nvidia-smi >/dev/null; then inside+=(--nv); fi
    inside+=("${CONTAINER#apptainer:}")
    ;;
*)
    say "CONTAINER is '$CONTAINER', but must be none or apptainer:IMAGE" >&2
    exit 2
    ;;
esac

# Run the job again after exit code $1 if allowed, and exit with that code.
requeue() {
    if [ "${NO_REQUEUE:-0}" = 1 ]; then
        say "not submitted again (NO_REQUEUE=1); the same command continues after step $(checkpoint_step)"
        exit "${ends_with:-$1}"
    fi
    if ! is_newer; then allow_start $((attempts + 1)); fi
    say "runs again, to go on after step $(checkpoint_step)"
    again || say "the job could not be submitted; submit it to continue" >&2
    exit "${repeats_with:-$1}"
}

train() {
    local code=0
    read_arguments "$@"
    count_start
    say "${#hosts[@]} nodes (${hosts[*]}), attempt $attempts after step $(checkpoint_step)"
    allow_start "$attempts"
    # Schedulers differ in which variables a process on another node inherits, so each node reads the variables from a file.
    (umask 077 && export -p >"$rank_logs/environment")
    local gpus
    gpus=$(nvidia-smi --list-gpus 2>/dev/null | wc -l) || true
    cat >"$rank_logs/node.sh" <<NODE
node=\$NODE_RANK
source $(printf %q "$rank_logs/environment")
export NODE_RANK=\$node
cd $(printf %q "$PWD")
gpus=\$(nvidia-smi --list-gpus 2>/dev/null | wc -l) || true
if [ -z "\${RANKS:-}" ] && [ "\$gpus" != $gpus ]; then
    echo "error: gpus=\$gpus on node \$node, but $gpus on the first node; set RANKS, the number of ranks of each node" >&2
    exit 2
fi
if [ "\$node" != 0 ]; then exec >>$(printf %q "$rank_logs/node-")\$node.log 2>&1; fi
exec $(printf '%q ' "${inside[@]}" "${PYTHON:-python}" -m launch.node ${#hosts[@]} "${RANKS:-$((gpus > 0 ? gpus : 1))}" "$rank_logs" \
        "$LOCKSTEP_ROOT/train_rl.py" "${arguments_of_run[@]}")
NODE
    on_nodes bash "$rank_logs/node.sh" || code=$? # a file, because a remote shell would parse the arguments again
    # The state decides, because schedulers may replace the exit code of a command on another node.
    if [ "$code" -ne 0 ] && [ "$(run_state)" = stopped ]; then requeue 75; fi
    if [ "$code" -eq 0 ]; then return 0; fi
    show_errors >&2
    say "the run failed; the logs of the ranks are in $rank_logs" >&2
    # Code 2 means that the input is invalid: the next start would fail in the same way.
    if [ "$code" -ne 2 ] && [ "${RETRY_CRASHED:-0}" = 1 ]; then requeue "$code"; fi
    exit "$code"
}
