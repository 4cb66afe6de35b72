# shellcheck shell=bash
# shellcheck disable=SC2154
# Copies what every rank reads to the disk or memory of each node, one file per directory. job.sh sources this file if site.sh has
#
#   export LOCKSTEP_STAGE="environment=$VIRTUAL_ENV model.path=/shared/models/qwen data.train=/shared/data/train.parquet"
#
# environment is a virtual environment, from which the ranks then start; its bytecode is compiled first. The other words are keys
# of the config that name one file or directory; the staged path replaces their value. Read from the environment, too:
#   LOCKSTEP_STAGE_ARCHIVES   shared directory for the archives; default ~/.cache/lockstep/stage
#   LOCKSTEP_NODE_DISK        directory of each node; default /tmp; /dev/shm is the node's memory
#
# An archive is named after a hash of its directory's names, sizes and times, so it is built once. A node that has a copy keeps it.

archives=${LOCKSTEP_STAGE_ARCHIVES:-$HOME/.cache/lockstep/stage}
node_copies=${LOCKSTEP_NODE_DISK:-/tmp}/lockstep-stage-$(id -u)
staged=() # overrides of the config
on_nodes=(srun --nodes="$SLURM_JOB_NUM_NODES" --ntasks="$SLURM_JOB_NUM_NODES" --ntasks-per-node=1 --cpus-per-task=1 --mpi=none)

# Print the hash of file or directory $1.
hash_of() { find "$1" -printf '%P %s %T@ %l\n' | LC_ALL=C sort | sha256sum | cut -c 1-16; }

# Print the archive of file or directory $1 with hash $2, which is built if it does not exist.
archive_of() {
    local archive=$archives/$2.tar partial
    if [ ! -f "$archive" ]; then
        partial=$(mktemp "$archives/.partial.XXXXXX")
        tar -C "$(dirname "$1")" -cf "$partial" "$(basename "$1")"
        mv "$partial" "$archive"
    fi
    echo "$archive"
}

# Copy file or directory $1 with hash $2 to every node, and set copy to its path there.
copy_to_nodes() {
    local archive
    copy=$node_copies/$2/$(basename "$1")
    if "${on_nodes[@]}" --kill-on-bad-exit=0 test -e "$copy" 2>/dev/null; then return; fi
    archive=$(archive_of "$1" "$2")
    "${on_nodes[@]}" mkdir -p -m 700 "$node_copies"
    sbcast --force "$archive" "$node_copies/$2.tar"
    # shellcheck disable=SC2016 # expanded on each node
    "${on_nodes[@]}" bash -c 'set -e; [ -O "$1" ]; rm -rf "$1/$2.new"; mkdir "$1/$2.new"; tar -C "$1/$2.new" -xf "$1/$2.tar"
        rm -rf "$1/$2" "$1/$2.tar"; mv -T "$1/$2.new" "$1/$2"' stage "$node_copies" "$2"
}

if [ -n "${SLURM_HET_SIZE:-}" ]; then
    say "LOCKSTEP_STAGE is not for heterogeneous jobs; unset it" >&2
    exit 2
fi
mkdir -p "$archives"
chmod go-rwx "$archives"
for word in $LOCKSTEP_STAGE; do
    source=$(realpath "${word#*=}")
    mark=$(hash_of "$source")
    if [ "${word%%=*}" = environment ]; then
        if [ "${CONTAINER:-none}" != none ]; then
            say "LOCKSTEP_STAGE has an environment, but a container brings its own; leave it out" >&2
            exit 2
        fi
        if [ ! -f "$archives/$mark.tar" ]; then
            "$source/bin/python" -m compileall -q "$source/lib" >/dev/null 2>&1 || true # a file of a package may be no valid Python
            mark=$(hash_of "$source")
        fi
    fi
    copy_to_nodes "$source" "$mark"
    case $word in
    environment=*) export PYTHON=$copy/bin/python PATH=$copy/bin:$PATH VIRTUAL_ENV=$copy ;;
    *) staged+=("${word%%=*}=$copy") ;;
    esac
done
say "staged on each node in $node_copies: $LOCKSTEP_STAGE"
