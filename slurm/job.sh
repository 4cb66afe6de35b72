# shellcheck shell=bash
# Functions for the batch files of this directory, which source this file. The settings of your site are in site.sh.
#
#   train CONFIG [CONFIG ...] [key=value ...]    runs train_rl.py by one srun, with a rank per GPU; of several files, later ones win;
#                                   requeues the job if the run can continue
#   once COMMAND ...                runs a command as one task on one node, for preparations
#
# Read from the environment (set them in site.sh, or export them before sbatch):
#   LOCKSTEP_ROOT     the checkout; default: the directory in which sbatch was called
#   LOCKSTEP_LOGS     directory of the ranks' logs; default: the directory in which the job starts
#   CONTAINER         none, pyxis:IMAGE or apptainer:IMAGE
#   CONTAINER_MOUNTS  mounts of the container, of either kind: SRC:DST[,SRC:DST ...]
#   PYTHON            the interpreter of the ranks; default: python (from the modules and the venv that site.sh loads)
#   SRUN_MPI          srun's --mpi; default none, because ranks find each other without MPI
#   NO_REQUEUE=1      never requeue; resubmit by hand, or use chain.sbatch
#   RETRY_CRASHED=1   requeue also after a crash, not only after an orderly stop
#   OUTLIVE_RANKS=1   for roles.min_replicas: when a rank ends with an error, srun does not kill the other ranks (with
#                     sbatch --no-kill: nor when a node fails)
#   LOCKSTEP_STAGE    what is copied to each node before the ranks start (stage.sh)
#   MAX_ATTEMPTS      number of consecutive starts without a newer checkpoint, after which the job gives up; default 3

set -eu
: "${LOCKSTEP_ROOT:=${SLURM_SUBMIT_DIR:?this is a batch file: submit it with sbatch}}"
# shellcheck source=/dev/null
if [ -f "$LOCKSTEP_ROOT/slurm/site.sh" ]; then source "$LOCKSTEP_ROOT/slurm/site.sh"; fi

if [ -n "${SLURM_ARRAY_JOB_ID:-}" ]; then
    job_id=${SLURM_ARRAY_JOB_ID}_${SLURM_ARRAY_TASK_ID} # SLURM_JOB_ID would requeue another task
else
    job_id=$SLURM_JOB_ID
fi
rank_logs=${LOCKSTEP_LOGS:-$PWD}/${SLURM_JOB_NAME//\//-}-$job_id.ranks # one file per rank; a requeued job appends
if [[ $rank_logs == *\\* ]]; then
    echo "$rank_logs has a backslash, with which Slurm replaces no %t in the names of logs; set LOCKSTEP_LOGS" >&2
    exit 2
fi
mkdir -p "$rank_logs"
chmod o-rwx "$rank_logs"

# The jobs of a chain (chain.sbatch) have the same name and command, and count their starts together. A job that was submitted
# after the last start begins a new count.
starts=$rank_logs
if [ "${CHAIN:-0}" = 1 ]; then
    starts=${LOCKSTEP_LOGS:-$PWD}/$SLURM_JOB_NAME-$(printf '%s\0' "$@" | cksum | cut -d ' ' -f 1).links
    mkdir -p "$starts"
    submitted=$(date -d "$(squeue -h -j "$SLURM_JOB_ID" -o %V | head -n 1)" +%s 2>/dev/null) || submitted=0
    if [ -f "$starts/attempts" ] && [ "$submitted" -gt "$(stat -c %Y "$starts/attempts")" ]; then rm "$starts/attempts"; fi
fi

# shellcheck source=slurm/starts.sh
source "$LOCKSTEP_ROOT/slurm/starts.sh"

# Size ---------------------------------------------------------------------------------------------------------------------

# Set the size of the job, or of component $1 of a heterogeneous job: nodes, gpus (per node), tasks (ranks per node) and cpus
# (per rank).
measure() {
    local cores=$SLURM_CPUS_ON_NODE names=(JOB_NUM_NODES GPUS_PER_NODE NTASKS_PER_NODE CPUS_PER_TASK JOB_CPUS_PER_NODE NTASKS)
    local total=${SLURM_NTASKS:-1}
    nodes=$SLURM_JOB_NUM_NODES gpus=${SLURM_GPUS_ON_NODE:-0} tasks=${SLURM_NTASKS_PER_NODE:-} cpus=${SLURM_CPUS_PER_TASK:-}
    if [ -n "$1" ]; then
        names=("${names[@]/#/SLURM_}") names=("${names[@]/%/_HET_GROUP_$1}")
        nodes=${!names[0]} gpus=${!names[1]:-0} tasks=${!names[2]:-} cpus=${!names[3]:-} cores=${!names[4]%%[(,]*}
        gpus=${gpus##*:} # for example 8 from h100:8
        total=${!names[5]:-1}
    fi
    if [ -z "$tasks" ] && [ "$total" -gt "$nodes" ]; then # only --ntasks was given; if it was not, Slurm sets 1, or one per node
        if [ $((total % nodes)) != 0 ]; then
            say "--ntasks=$total on $nodes nodes is not the same number on each; give --ntasks-per-node" >&2
            exit 2
        fi
        tasks=$((total / nodes))
    fi
    : "${tasks:=$((gpus > 0 ? gpus : 1))}" # if no number was given, one rank per GPU
    : "${cpus:=$((cores / tasks))}"
    if [ "$cpus" -lt 1 ]; then cpus=1; fi
}

components=("") # in a heterogeneous job: 0, 1, ...
if [ -n "${SLURM_HET_SIZE:-}" ]; then mapfile -t components < <(seq 0 $((SLURM_HET_SIZE - 1))); fi
measure "${components[0]}"
export SRUN_CPUS_PER_TASK=$cpus # since Slurm 22.05 srun does not inherit it from sbatch

# Environment of the ranks -------------------------------------------------------------------------------------------------

export HF_HUB_OFFLINE=1 TRANSFORMERS_OFFLINE=1 HF_DATASETS_OFFLINE=1 # compute nodes have no internet access
export PYTHONUNBUFFERED=1
# By default, compile caches are on a disk of the node, because all ranks write thousands of small files at once. You can set
# LOCKSTEP_CACHE in site.sh to a directory that is kept after the job. The directory may be on a shared disk, and several jobs
# may use it at the same time. Each rank checks that only this user can write to it (rl/runtime/compile_caches.py), because
# the cached code is executed.
cache=${LOCKSTEP_CACHE:-${SLURM_TMPDIR:-/tmp}/lockstep-cache-$(id -u)}
export LOCKSTEP_CACHE=$cache TRITON_CACHE_DIR=$cache/triton TORCHINDUCTOR_CACHE_DIR=$cache/inductor VLLM_CACHE_ROOT=$cache/vllm
export LOCKSTEP_STATUS=$starts/status.json # a copy of the run's status.json, for the decisions below

# The end of the job, and the lead: the seconds before the end at which Slurm sends USR2. The program warns if a step and a save
# take longer than the lead. Slurm 23.02 and newer set SLURM_JOB_END_TIME. This file does not set it for an older Slurm, because
# a job that is submitted from this one would inherit it.
LOCKSTEP_JOB_END=${SLURM_JOB_END_TIME:-}
if [ -z "$LOCKSTEP_JOB_END" ]; then
    LOCKSTEP_JOB_END=$(date -d "$(squeue -h -j "$SLURM_JOB_ID" -o %e | head -n 1)" +%s 2>/dev/null) || LOCKSTEP_JOB_END=
fi
export LOCKSTEP_JOB_END
lead=$(sed -n 's/^#SBATCH --signal=USR2@\([0-9]*\).*/\1/p' "$0" | head -n 1) # the file has one such line per component
export LOCKSTEP_SIGNAL_LEAD=${LOCKSTEP_SIGNAL_LEAD:-$lead} # set it if you give your own sbatch --signal

# Limits; srun passes them to the ranks.
ulimit -c 0                                                 # a core file per rank would fill the disk
ulimit -S -n "$(ulimit -H -n)"                              # rank 0 holds a connection to every other rank
ulimit -l unlimited 2>/dev/null || say "memlock is limited to $(ulimit -l) KiB; RDMA needs it unlimited (ask your site)"

# There is one task per GPU, and each task sees all GPUs of its node (--gpu-bind=none), because binding breaks CUDA IPC and
# local ranks. Slurm then leaves CUDA_VISIBLE_DEVICES unset. So use whole nodes (--exclusive) if your site does not confine a
# job to its own devices.
# The ranks of a heterogeneous job are numbered by component; Slurm 22.05 adds the component's number to %t.
launch() {
    local call=() component
    for component in "${components[@]}"; do
        measure "$component"
        call+=(${call:+:} ${component:+"--het-group=$component"}
            --nodes="$nodes" --ntasks="$((nodes * tasks))" --ntasks-per-node="$tasks" --cpus-per-task="$cpus"
            --kill-on-bad-exit="$((1 - ${OUTLIVE_RANKS:-0}))" --mpi="${SRUN_MPI:-none}" --export=ALL
            --output="${rank_logs//%/%%}/rank-%t.log" --open-mode=append)
        if [ "$gpus" -gt 0 ]; then call+=(--gpus-per-node="$gpus" --gpu-bind=none); fi
        call+=("${in_container[@]}" "${inside[@]}" "$@")
    done
    srun "${call[@]}"
}
single=(srun --nodes=1 --ntasks=1 --cpus-per-task="$cpus" --mpi="${SRUN_MPI:-none}" --export=ALL)

staged=() # overrides with the paths of copies on the nodes
# shellcheck source=slurm/stage.sh
if [ -n "${LOCKSTEP_STAGE:-}" ]; then source "$LOCKSTEP_ROOT/slurm/stage.sh"; fi

in_container=() # options of srun for the container
inside=() # prefix of a rank's command
container=${CONTAINER:-none}
mounts=${CONTAINER_MOUNTS:-$PWD:$PWD,$LOCKSTEP_ROOT:$LOCKSTEP_ROOT}
if [ ${#staged[@]} != 0 ]; then mounts+=,$node_copies:$node_copies; fi
case $container in
none) ;;
pyxis:*)
    in_container=(--container-image="${container#pyxis:}" --container-workdir="$PWD" --no-container-mount-home
        --container-mounts="$mounts")
    single+=("${in_container[@]}")
    ;;
apptainer:*)
    inside=(apptainer exec --bind "$mounts" --pwd "$PWD")
    if [ "$gpus" -gt 0 ]; then inside+=(--nv); fi
    inside+=("${container#apptainer:}")
    ;;
*)
    say "CONTAINER is '$container', but must be none, pyxis:IMAGE or apptainer:IMAGE" >&2
    exit 2
    ;;
esac

# Starting, and continuing ---------------------------------------------------------------------------------------------------

once() { "${single[@]}" "${inside[@]}" "$@"; }

# Requeue the job after exit code $1 if allowed, and exit with that code.
requeue() {
    if [ "${NO_REQUEUE:-0}" = 1 ]; then
        say "not requeued (NO_REQUEUE=1); the same sbatch command continues after step $(checkpoint_step)"
        exit "$1"
    fi
    if ! is_newer; then allow_start $((attempts + 1)); fi
    say "requeue, to go on after step $(checkpoint_step)"
    scontrol requeue "$job_id" || say "scontrol requeue failed; submit the job again to continue" >&2
    exit "$1" # Slurm ends this script anyway
}

train() {
    local code=0
    read_arguments "$@"
    # Rank 0 writes into the job's own log.
    ln -sfn "$(readlink /proc/$$/fd/1)" "$rank_logs/rank-0.log"
    launch "${PYTHON:-python}" "$LOCKSTEP_ROOT/train_rl.py" "${arguments_of_run[@]}" "${staged[@]}" \
        2>"$rank_logs/srun.log" || code=$?
    cat "$rank_logs/srun.log" >&2 # below all tracebacks, srun's lines say which tasks ended on which nodes, and how
    # With OUTLIVE_RANKS, srun exits with the code of the rank that died, although the run continued without this rank.
    if [ "${OUTLIVE_RANKS:-0}" = 1 ] && [ "$code" -gt 75 ]; then
        case $(run_state) in
        finished) code=0 ;;
        stopped) code=75 ;;
        esac
    fi
    case $code in
    0) return 0 ;;
    75) requeue 75 ;; # stopped; the run can continue
    esac
    show_errors >&2
    say "the run failed with exit code $code; the logs of the ranks are in $rank_logs" >&2
    # Code 2 means that the input is invalid: the next start would fail in the same way.
    if [ "$code" -ne 2 ] && [ "${RETRY_CRASHED:-0}" = 1 ]; then requeue "$code"; fi
    exit "$code"
}

count_start
say "$nodes nodes ($SLURM_JOB_NODELIST) x $tasks ranks${SLURM_HET_SIZE:+ in the first of $SLURM_HET_SIZE components}, attempt $attempts after step $(checkpoint_step)"
allow_start "$attempts"
