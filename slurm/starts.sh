# shellcheck shell=bash
# shellcheck disable=SC2154
# Starts of a job since its newest checkpoint, and the errors of its ranks, for job.sh and nodes.sh, which set job_id, rank_logs and LOCKSTEP_STATUS.

say() { echo "job $job_id: $*"; }

# Print the step of the newest checkpoint, as the program last reported it.
checkpoint_step() {
    local step=
    if [ -f "$LOCKSTEP_STATUS" ]; then step=$(sed -n 's/.*"checkpoint_step": \([0-9]*\).*/\1/p' "$LOCKSTEP_STATUS"); fi
    echo "${step:-0}"
}

# Print the state of the run, as the program last reported it: running, finished, stopped or failed.
run_state() { if [ -f "$LOCKSTEP_STATUS" ]; then sed -n 's/.*"state": "\([a-z]*\)".*/\1/p' "$LOCKSTEP_STATUS"; fi; }

# End the job if start number $1 without a newer checkpoint exceeds MAX_ATTEMPTS.
allow_start() {
    if [ "$1" -gt "${MAX_ATTEMPTS:-3}" ]; then
        say "gives up: ${MAX_ATTEMPTS:-3} starts brought no checkpoint after step $started_at" >&2
        exit 1
    fi
}

# Set attempts and started_at: the number of starts since the newest checkpoint, and its step. It is counted at the start, so that
# a start ended by a lost node counts too.
count_start() {
    local last=none
    attempts=0 started_at=$(checkpoint_step)
    if [ -f "$rank_logs/attempts" ]; then read -r attempts last <"$rank_logs/attempts"; fi
    if [ "$started_at" != "$last" ]; then attempts=0; fi
    attempts=$((attempts + 1))
    echo "$attempts $started_at" >"$rank_logs/attempts"
}

# Print the last lines of the logs with an error of this attempt, those that ended first. Rank 0's are above.
show_errors() {
    local file
    find "$rank_logs" -name '[rn]*-[!0]*.log' -newer "$rank_logs/attempts" -exec grep -lZ -i -E 'error|exception' {} + |
        xargs -r0 ls -tr | head -n 3 | while read -r file; do
        echo "==> $file"
        tail -n 8 "$file"
    done
}
