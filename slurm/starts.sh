# shellcheck shell=bash
# shellcheck disable=SC2154
# Starts of a job since its newest checkpoint, and the errors of its ranks, for job.sh and nodes.sh, which set job_id,
# rank_logs, starts (the directory of the count) and LOCKSTEP_STATUS.

say() { echo "job $job_id: $*"; }

# Set overrides to the words of a text. Quotes and backslashes protect as in a shell; nothing else has a meaning.
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

# Print the text that matches $2 in the value of key $1, as the program last reported it.
reported() { if [ -f "$LOCKSTEP_STATUS" ]; then sed -n "s/.*\"$1\": \"\?\($2\).*/\1/p" "$LOCKSTEP_STATUS"; fi; }

# Print the step of the newest checkpoint.
checkpoint_step() {
    local step
    step=$(reported checkpoint_step '[0-9]*')
    echo "${step:-0}"
}

# Print the state that this start of the run reported: running, finished, stopped or failed. Stopped by a person is finished.
run_state() {
    if [ "$(reported reason '[^"]*')" = "the file 'stop'" ]; then echo finished; else reported state '[a-z]*'; fi
}

# Return whether the newest checkpoint is newer than those of all earlier starts of the run.
is_newer() { [ "$(reported run '[0-9a-f]*')" != "${last_run:-$(reported run '[0-9a-f]*')}" ] || [ "$(checkpoint_step)" -gt "$newest" ]; }

# End the job if start number $1 without a newer checkpoint exceeds MAX_ATTEMPTS.
allow_start() {
    if [ "$1" -gt "${MAX_ATTEMPTS:-3}" ]; then
        say "gives up: ${MAX_ATTEMPTS:-3} starts brought no checkpoint after step $newest" >&2
        exit 1
    fi
}

# Set attempts: the number of starts since the newest checkpoint; and newest and last_run: its step and the run. A start is counted
# when it begins, so that one ended by a lost node counts too. An older checkpoint, after a damaged one, is no progress.
count_start() {
    attempts=0 newest=-1 last_run=
    if [ -f "$starts/attempts" ]; then read -r attempts newest last_run <"$starts/attempts"; fi
    if is_newer; then attempts=0 newest=$(checkpoint_step); fi
    attempts=$((attempts + 1)) last_run=$(reported run '[0-9a-f]*')
    echo "$attempts $newest $last_run" >"$starts/attempts"
    # What an earlier start reported is not the end of this one.
    if [ -f "$LOCKSTEP_STATUS" ]; then sed -i 's/"state": "[a-z]*"/"state": ""/; s/"reason": "/&before: /' "$LOCKSTEP_STATUS"; fi
}

# Print the last lines of the logs with an error of this attempt, those that ended first. Rank 0's are above.
show_errors() {
    local file
    find "$rank_logs" -name '[rn]*-[!0]*.log' -newer "$starts/attempts" -exec grep -lZ -i -E 'error|exception' {} + |
        xargs -r0 ls -tr | head -n 3 | while read -r file; do
        echo "==> $file"
        tail -n 8 "$file"
    done
}
