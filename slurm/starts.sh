# shellcheck shell=bash
# shellcheck disable=SC2154
# Functions that count the starts of a job since its newest checkpoint and print the errors of its ranks. job.sh and nodes.sh
# source this file, and set job_id, rank_logs, starts (the directory of the count) and LOCKSTEP_STATUS before.

say() { echo "job $job_id: $*"; }

# Run a command that submits a job with the environment that this job was given: what site.sh, stage.sh, job.sh and nodes.sh set
# belongs to this job and its nodes, such as MASTER_ADDR.
as_given() {
    local given
    mapfile -d '' -t given </proc/$$/environ
    # shellcheck disable=SC2016 # env would take a path with = for a variable
    env -i "${given[@]}" bash -c 'exec "$@"' as_given "$(type -P "$1")" "${@:2}"
}

# Set the array overrides to the words of text $1. Quotes and backslashes work as in a shell; no other character is special.
# shellcheck disable=SC2034 # read by the batch files
split() {
    local lines
    overrides=()
    if [ -z "${1// /}" ]; then return; fi
    if ! lines=$(xargs printf '%s\n' <<<"$1"); then
        say "the overrides have a quote without an end: $1" >&2
        exit 2
    fi
    mapfile -t overrides <<<"$lines"
}

# Set the array arguments_of_run to the arguments of train_rl.py. A word without '=' is the file of a --config.
# shellcheck disable=SC2034 # read by job.sh and nodes.sh
read_arguments() {
    local word
    arguments_of_run=(--config "$1")
    shift
    for word; do
        if [[ $word != *=* && $word != -* && ${arguments_of_run[-1]} != --config ]]; then arguments_of_run+=(--config); fi
        arguments_of_run+=("$word")
    done
}

# Print the part of the value of key $1 that matches $2, from the copy of status.json that the program last wrote.
reported() { if [ -f "$LOCKSTEP_STATUS" ]; then sed -n "s/.*\"$1\": \"\?\($2\).*/\1/p" "$LOCKSTEP_STATUS"; fi; }

# Print the step of the newest checkpoint.
checkpoint_step() {
    local step
    step=$(reported checkpoint_step '[0-9]*')
    echo "${step:-0}"
}

# Print the state that this start of the run reported: running, finished, stopped or failed. A run that a person stopped by the
# file 'stop' counts as finished.
run_state() {
    if [ "$(reported reason '[^"]*')" = "the file 'stop'" ]; then echo finished; else reported state '[a-z]*'; fi
}

# Return whether the newest checkpoint is newer than the newest checkpoint of all earlier starts, or belongs to another run.
is_newer() { [ "$(reported run '[0-9a-f]*')" != "${last_run:-$(reported run '[0-9a-f]*')}" ] || [ "$(checkpoint_step)" -gt "$newest" ]; }

# End the job if start number $1 without a newer checkpoint exceeds MAX_ATTEMPTS.
allow_start() {
    if [ "$1" -gt "${MAX_ATTEMPTS:-3}" ]; then
        say "gives up: ${MAX_ATTEMPTS:-3} starts brought no checkpoint after step $newest" >&2
        exit 1
    fi
}

# Set attempts (the number of starts since the newest checkpoint), newest (the step of that checkpoint) and last_run (its run).
# A start is counted when it begins, so that a start that ends with a lost node counts, too. If the newest checkpoint is damaged
# and the run continues from an older checkpoint, this is no progress.
count_start() {
    attempts=0 newest=-1 last_run=
    if [ -f "$starts/attempts" ]; then read -r attempts newest last_run <"$starts/attempts"; fi
    if is_newer; then attempts=0 newest=$(checkpoint_step); fi
    attempts=$((attempts + 1)) last_run=$(reported run '[0-9a-f]*')
    echo "$attempts $newest $last_run" >"$starts/attempts"
    # Clear the state that an earlier start reported, because it does not describe this start.
    if [ -f "$LOCKSTEP_STATUS" ]; then sed -i 's/"state": "[a-z]*"/"state": ""/; s/"reason": "/&before: /' "$LOCKSTEP_STATUS"; fi
}

# Print the last lines of up to three logs that have an error of this attempt, the earliest first. Rank 0 is left out, because it
# writes to the job's own log.
show_errors() {
    local file
    find "$rank_logs" -name '[rn]*-[!0]*.log' -newer "$starts/attempts" -exec grep -lZ -i -E 'error|exception' {} + |
        xargs -r0 ls -tr | head -n 3 | while read -r file; do
        echo "==> $file"
        tail -n 8 "$file"
    done
}
