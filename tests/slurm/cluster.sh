#!/usr/bin/env bash
# A Slurm cluster of several nodes on this machine, for tests. For root on Debian or Ubuntu, without systemd,
# database or network.
#
#   cluster.sh up                 munged, slurmctld and a slurmd per node; returns when all nodes are idle
#   cluster.sh down               end all of them, by their recorded pids only
#   cluster.sh lose-node node2    power cut: the node's processes are killed, and slurmctld is told
#   cluster.sh start-node node2   power it on again
#
# LAB is the directory of the cluster and PORT the port of slurmctld; node i listens at PORT+i. Clients need
# SLURM_CONF=$LAB/etc/slurm.conf. A node has a hostname, /etc/hosts, /dev/shm and process ids of its own
# (unshare), and the address 127.0.1.i. Killing the process that holds these is a power cut. /tmp and the
# network are those of the machine.
set -eu
: "${LAB:?}" "${PORT:?}"
: "${NODES:=4}" "${CPUS:=16}" "${MEM:=16000}" "${GPUS:=2}" # per node, and more CPUs than there are
export SLURM_CONF=$LAB/etc/slurm.conf

node_names() { seq -f 'node%.0f' 1 "$NODES"; }
# Succeed if process $1 is alive and has the name $2: a process id may belong to another process by now.
is() {
    [ "$(cat "/proc/$1/comm" 2>/dev/null)" = "$2" ] && ! grep -q '^State:.*Z' "/proc/$1/status"
}

configure() {
    mkdir -p "$LAB"/{etc,run,log,state,dev}
    chmod 755 "$LAB" "$LAB/run"
    (umask 077 && head -c 1024 /dev/urandom >"$LAB/etc/munge.key")
    { cat /etc/hosts; for i in $(seq "$NODES"); do echo "127.0.1.$i node$i"; done; } >"$LAB/etc/hosts"
    cat >"$LAB/etc/slurm.conf" <<CONF
ClusterName=lab
SlurmctldHost=$(hostname -s)(127.0.0.1)
SlurmctldPort=$PORT
SlurmUser=root
AuthType=auth/munge
# cred_expire is also how long a requeued job is held back; the default is 120 s
AuthInfo=socket=$LAB/run/munge.socket,cred_expire=5
StateSaveLocation=$LAB/state
SlurmdSpoolDir=$LAB/spool/%n
TmpFS=$LAB/tmp/%n
SlurmctldPidFile=$LAB/run/slurmctld.pid
SlurmdPidFile=$LAB/run/slurmd-%n.pid
SlurmctldLogFile=$LAB/log/slurmctld.log
SlurmdLogFile=$LAB/log/slurmd-%n.log
MailProg=/bin/true
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
SlurmdParameters=config_overrides
JobAcctGatherType=jobacct_gather/none
JobCompType=jobcomp/filetxt
JobCompLoc=$LAB/log/jobcomp.txt
SelectType=select/cons_tres
SelectTypeParameters=CR_Core_Memory
DefMemPerCPU=100
GresTypes=gpu
MpiDefault=none
ReturnToService=2
SchedulerParameters=batch_sched_delay=0,sched_interval=2,sched_min_interval=0,bf_interval=2,bf_resolution=1
KillWait=10
# longer than KillWait: slurmctld sends a kill again that was not answered, which ends the next start of a requeued job
MessageTimeout=15
SlurmdTimeout=10
MinJobAge=3600
PreemptType=preempt/partition_prio
PreemptMode=REQUEUE
PartitionName=main   Nodes=ALL Default=YES State=UP PriorityTier=1  PreemptMode=REQUEUE GraceTime=60
PartitionName=urgent Nodes=ALL             State=UP PriorityTier=10 PreemptMode=OFF
CONF
    echo AutoDetect=off >"$LAB/etc/gres.conf"
    for k in $(seq 0 $((GPUS - 1))); do # the File= of a GPU must be a character device
        [ -c "$LAB/dev/gpu$k" ] || mknod -m 666 "$LAB/dev/gpu$k" c 1 3
    done
    for i in $(seq "$NODES"); do
        echo "NodeName=node$i NodeHostname=node$i NodeAddr=127.0.1.$i Port=$((PORT + i))" \
            "CPUs=$CPUS RealMemory=$MEM Gres=gpu:$GPUS" >>"$LAB/etc/slurm.conf"
        echo "NodeName=node$i Name=gpu File=$LAB/dev/gpu[0-$((GPUS - 1))]" >>"$LAB/etc/gres.conf"
        mkdir -p "$LAB/spool/node$i" "$LAB/tmp/node$i"
    done
}

start_node() {
    # shellcheck disable=SC2016
    setsid unshare --uts --ipc --mount --pid --fork --kill-child --mount-proc bash -c '
        hostname "$1"
        mount --bind "$2/etc/hosts" /etc/hosts
        mount -t tmpfs -o mode=1777 shm /dev/shm
        slurmd -N "$1" || exit 1
        trap "" TERM INT HUP
        while :; do sleep 1000 & wait $!; done' init "$1" "$LAB" </dev/null >>"$LAB/log/init-$1.log" 2>&1 &
    echo $! >"$LAB/run/init-$1.pid"
}

kill_node() {
    local pid
    pid=$(cat "$LAB/run/init-$1.pid")
    rm "$LAB/run/init-$1.pid"
    if is "$pid" unshare; then kill -KILL "$pid"; fi
}

up() {
    local idle
    configure
    # --force: munged refuses a socket in a directory that others cannot enter, such as pytest's
    munged --force -S "$LAB/run/munge.socket" --key-file="$LAB/etc/munge.key" \
        --log-file="$LAB/log/munged.log" --pid-file="$LAB/run/munged.pid" \
        --seed-file="$LAB/run/munged.seed" 2>>"$LAB/log/munged.err"
    slurmctld
    for node in $(node_names); do start_node "$node"; done
    for _ in $(seq 300); do
        idle=$(timeout 5 sinfo -h -N -p main -t idle -o %N 2>/dev/null | wc -l)
        if [ "$idle" = "$NODES" ]; then return; fi
        sleep 0.2
    done
    echo "the nodes did not come up; see $LAB/log" >&2
    timeout 5 sinfo -N -o '%N %T %E' >&2
    exit 1
}

down() {
    local pid
    for node in $(node_names); do
        if [ -f "$LAB/run/init-$node.pid" ]; then kill_node "$node"; fi
    done
    for daemon in slurmctld munged; do
        pid=$(cat "$LAB/run/$daemon.pid" 2>/dev/null) || continue
        if is "$pid" "$daemon"; then kill "$pid"; fi
        for _ in $(seq 100); do
            is "$pid" "$daemon" || break
            sleep 0.1
        done
    done
}

case ${1:-} in
up) up ;;
down) down ;;
lose-node)
    kill_node "$2"
    scontrol update nodename="$2" state=down reason=lost
    ;;
start-node) start_node "$2" ;;
*) sed -n '2,13p' "$0" ;;
esac
