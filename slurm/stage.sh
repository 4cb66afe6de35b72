# shellcheck shell=bash
# shellcheck disable=SC2154
# Copies what every rank reads to the disk or memory of each node, one file per directory. job.sh sources this file if site.sh has
#
#   export LOCKSTEP_STAGE="environment=$VIRTUAL_ENV model.path=/shared/models/qwen 'data.train=/shared/my data/train.parquet'"
#
# environment is a virtual environment, from which the ranks then start; its bytecode is compiled first. The other words are keys
# of the config that name one file or directory; the staged path replaces their value. Read from the environment, too:
#   LOCKSTEP_STAGE_ARCHIVES   shared directory for the archives; default ~/.cache/lockstep/stage
#   LOCKSTEP_NODE_DISK        directory of each node; default /tmp; /dev/shm is the node's memory
#
# An archive is named after a hash of its directory's names, sizes and times, so it is built once. A node that has a copy keeps it.
# Archives and copies that no job has used for two weeks are removed, and after a day what a killed job left. What cannot be
# copied, for example to a full disk, the ranks read where it is. Symbolic links are followed, for example those of a snapshot of
# Hugging Face's to its files outside, but kept in an environment.

archives=${LOCKSTEP_STAGE_ARCHIVES:-$HOME/.cache/lockstep/stage}
node_copies=${LOCKSTEP_NODE_DISK:-/tmp}/lockstep-stage-$(id -u)
on_nodes=(srun --nodes="$SLURM_JOB_NUM_NODES" --ntasks="$SLURM_JOB_NUM_NODES" --ntasks-per-node=1 --cpus-per-task=1 --mpi=none)
# What runs on each node, with the arguments: directory of the copies, name of the copy, its number of files, name of this job's
# archive. A copy is whole if nothing has removed a part of it, such as a cleaner of /tmp. Another job may unpack the same copy.
# shellcheck disable=SC2016 # expanded on each node
prepare='mkdir -p -m 700 "$1" && [ -O "$1" ] && [ ! -L "$1" ] || { echo "$1 belongs to another user" >&2; exit 1; }
    find "$1" -mindepth 1 -maxdepth 1 -not -name lock "(" -mtime +14 -o -name "job-*" -mtime +0 ")" -exec rm -rf {} +'
# shellcheck disable=SC2016
whole='[ -O "$1" ] && [ ! -L "$1" ] && [ "$(find "$1/$2" 2>/dev/null | wc -l)" -ge "$3" ] && touch "$1/$2"'
# shellcheck disable=SC2016
unpack='set -eu; umask 077; trap '\''rm -rf "$1/$4" "$1/$4.new"'\'' EXIT
    exec 9>"$1/lock"; flock 9
    if '$whole'; then exit 0; fi
    rm -rf "$1/$4.new"; mkdir "$1/$4.new"; tar -C "$1/$4.new" -xf "$1/$4"
    rm -rf "${1:?}/$2"; mv -T "$1/$4.new" "$1/$2"'

# Set mark and count to the hash and the number of files of file or directory $1. Fails if links form a loop, or it is not readable.
look_at() {
    local listing dangling
    if [ -n "${links[*]}" ] && dangling=$(find -L "$1" -type l -print -quit) && [ -n "$dangling" ]; then
        say "$dangling is a link to nothing, which no copy can have; remove it" >&2
        return 1
    fi
    listing=$(set -o pipefail && find "${links[@]}" "$1" -printf '%P %s %T@ %l\n' | LC_ALL=C sort) || return
    mark=$({ basename "$1" && echo "$listing"; } | sha256sum | cut -c 1-16) count=$(wc -l <<<"$listing")
}

# Build the archive of $1, which look_at has seen, if there is none.
build_archive() {
    local seen=$mark partial
    archive=$archives/$mark.tar
    if [ -f "$archive" ]; then touch "$archive" && return; fi
    partial=$(mktemp "$archives/.partial.XXXXXX") || return
    tar ${links:+--dereference} -C "$(dirname "$1")" -cf "$partial" "$(basename "$1")" && sync "$partial" && look_at "$1" &&
        [ "$mark" = "$seen" ] && mv "$partial" "$archive" && return
    rm -f "$partial"
    return 1
}

# Copy $1, which look_at has seen, to every node; set copy to its path there.
copy_to_nodes() {
    local here=("$node_copies" "$mark" "$((count + 1))" "job-$SLURM_JOB_ID.tar")
    copy=$node_copies/$mark/$(basename "$1")
    if "${on_nodes[@]}" --kill-on-bad-exit=0 bash -c "$whole" whole "${here[@]}" 2>/dev/null; then return; fi
    build_archive "$1" && "${on_nodes[@]}" bash -c "$prepare" prepare "${here[@]}" &&
        sbcast --force "$archive" "$node_copies/${here[3]}" && "${on_nodes[@]}" bash -c "$unpack" unpack "${here[@]}" && return
    "${on_nodes[@]}" rm -f "$node_copies/${here[3]}"
    return 1
}

# Copy word $1 of LOCKSTEP_STAGE.
stage() {
    local source=${1#*=} mark count archive copy links=(-L) # find and tar then follow links
    if [[ $1 != *=* || ! -e $source ]]; then
        say "LOCKSTEP_STAGE has '$1', but must have words KEY=PATH with files or directories that exist" >&2
        exit 2
    fi
    if [[ $1 == environment=* && ${CONTAINER:-none} != none ]]; then
        say "LOCKSTEP_STAGE has an environment, but a container brings its own; leave it out" >&2
        exit 2
    fi
    if [[ $1 == environment=* ]]; then links=(); fi
    if [[ -n ${links[*]} && -L ${source%/} ]]; then # its name says the form: train.parquet, and not the blob's hash
        source=$(realpath "$(dirname "${source%/}")")/$(basename "$source")
    else
        source=$(realpath "$source")
    fi
    if look_at "$source" && [[ $1 == environment=* && ! -f $archives/$mark.tar ]]; then
        "$source/bin/python" -m compileall -q "$source/lib" >/dev/null 2>&1 || true # a file of a package may be no valid Python
    fi
    if ! look_at "$source" || ! copy_to_nodes "$source"; then
        say "not staged, because of the error above or a change meanwhile: the ranks read $source" >&2
        return
    fi
    say "staged on each node: $copy"
    case $1 in
    environment=*) export PYTHON=$copy/bin/python PATH=$copy/bin:$PATH VIRTUAL_ENV=$copy ;;
    *) staged+=("${1%%=*}=$copy") ;;
    esac
}

if [ -n "${SLURM_HET_SIZE:-}" ]; then
    say "LOCKSTEP_STAGE is not for heterogeneous jobs; unset it" >&2
    exit 2
fi
mkdir -p "$archives"
chmod go-rwx "$archives"
find "$archives" -maxdepth 1 \( -name '????????????????.tar' -mtime +14 -o -name '.partial.*' -mtime +0 \) -delete || true
stage_all() {
    local overrides word
    split "$LOCKSTEP_STAGE"
    for word in "${overrides[@]}"; do stage "$word"; done
}
stage_all
