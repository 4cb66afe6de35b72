# shellcheck shell=bash
# What only your site knows. Copy to slurm/site.sh (git ignores it) and keep what you need; each batch file sources it, on the
# first node of the job, before anything is started.
#
# Account, partition and QOS are read before this file is: give them on the command line,
#     sbatch --account=ACCOUNT --partition=PARTITION slurm/FILE.sbatch
# or once and for all in your ~/.bashrc, which sbatch reads as defaults of the same options:
#     export SBATCH_ACCOUNT=ACCOUNT SBATCH_PARTITION=PARTITION SBATCH_QOS=QOS
# GPUs that your Slurm knows as a generic resource only:
#     sbatch --gpus-per-node=0 --gres=gpu:8 slurm/FILE.sbatch
# Nodes of 4 GPUs (GH200, aarch64) need no more than --gpus-per-node=4.

# Software: modules and a virtual environment ...
#module load cuda/13.0
#source "$HOME/lockstep/.venv/bin/activate"

# ... or a container; the image is a file that all nodes read.
#export CONTAINER=pyxis:/shared/images/lockstep.sqsh        # srun --container-image; enroot import dockerd://lockstep
#export CONTAINER=apptainer:/shared/images/lockstep.sif     # apptainer exec --nv
#export CONTAINER_MOUNTS=/shared:/shared,$HOME:$HOME

# Network. InfiniBand: NCCL finds it; name the adapters only if it takes wrong ones.
#export NCCL_IB_HCA=mlx5_0,mlx5_1,mlx5_2,mlx5_3
# The interface of the first connections (NCCL) and of CPU collectives (gloo). Needed where a node's own name resolves to
# 127.0.1.1 (Debian, Ubuntu), or to an address that other nodes do not reach.
#export NCCL_SOCKET_IFNAME=ib0 GLOO_SOCKET_IFNAME=ib0
# Slingshot (HPE Cray EX) and EFA (AWS) go through libfabric and the aws-ofi-nccl plugin.
#export NCCL_NET="AWS Libfabric" FI_PROVIDER=cxi FI_CXI_DISABLE_HOST_REGISTER=1 FI_MR_CACHE_MONITOR=userfaultfd
#export NCCL_NET="AWS Libfabric" FI_PROVIDER=efa FI_EFA_USE_DEVICE_RDMA=1
# Plain Ethernet: the same interface for all, and no search for InfiniBand.
#export NCCL_SOCKET_IFNAME=eth0 GLOO_SOCKET_IFNAME=eth0 NCCL_IB_DISABLE=1
#export NCCL_DEBUG=WARN

# The meeting of the ranks: an address of the first node that all nodes reach, if its name is none; seconds to wait for all.
#MASTER_ADDR=$(hostname)-ib0 && export MASTER_ADDR
#export LOCKSTEP_JOIN_TIMEOUT=120

# Policy of the site: see job.sh.
#export NO_REQUEUE=1
#export MAX_ATTEMPTS=5
