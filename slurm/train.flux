#!/usr/bin/env bash
# A run of any config under Flux.
#
#   flux batch --job-name=my-run -N 2 -x slurm/train.flux configs/my.yaml [key=value ...]
#   flux batch -N 1 --env=RANKS=4 slurm/train.flux configs/gsm8k_toy.yaml                    four ranks on a CPU node
#
#flux: --job-name=train
#flux: --nodes=1
#flux: --exclusive
#flux: --time-limit=24h
#flux: --output={{name}}-{{id}}.out
# Bank and queue: --bank=BANK --queue=QUEUE.
cd "${LOCKSTEP_START:-$PWD}"
: "${LOCKSTEP_ROOT:=$PWD}"
job_id=$(flux getattr jobid)
job_name=${JOB_NAME:-$(flux --parent jobs --no-header --format='{name}' "$job_id")}
mapfile -t hosts < <(flux hostlist --expand --delimiter='\n' instance)
left=$(flux job timeleft) # seconds
job_end=${left:+$(($(date +%s) + ${left%.*}))}
source "$LOCKSTEP_ROOT/slurm/nodes.sh"

on_nodes() {
    # shellcheck disable=SC2016 # the node's own number
    flux run --nodes="${#hosts[@]}" --ntasks="${#hosts[@]}" --exclusive \
        bash -c 'NODE_RANK=$FLUX_TASK_RANK exec "$@"' node "$@"
}

again() { as_given flux --parent batch --job-name="$job_name" --nodes="${#hosts[@]}" "$0" "${arguments[@]}"; }

arguments=("$@")
train "$@"
