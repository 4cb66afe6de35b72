# shellcheck shell=bash
# Settings of your site. Copy this file to slurm/site.sh (git ignores that name) and keep what you need. Each batch file sources
# site.sh on the first node of the job, before it starts anything.
#
# Slurm reads account, partition and QOS before it runs this file. So give them on the command line,
#     sbatch --account=ACCOUNT --partition=PARTITION slurm/FILE.sbatch
# or once in your ~/.bashrc, as defaults of the same options:
#     export SBATCH_ACCOUNT=ACCOUNT SBATCH_PARTITION=PARTITION SBATCH_QOS=QOS
# If your Slurm has GPUs only as a generic resource:
#     sbatch --gpus-per-node=0 --gres=gpu:8 slurm/FILE.sbatch
# Nodes of 4 GPUs (GH200, aarch64) only need --gpus-per-node=4.

# Software: modules and a virtual environment ...
#module load cuda/13.0
#source "$HOME/lockstep/.venv/bin/activate"

# ... or a container; all nodes must be able to read the image.
#export CONTAINER=pyxis:/shared/images/lockstep.sqsh        # srun --container-image; enroot import dockerd://lockstep
#export CONTAINER=apptainer:/shared/images/lockstep.sif     # apptainer exec --nv
#export CONTAINER_MOUNTS=/shared:/shared,$HOME:$HOME

# What every rank reads, copied to each node before the ranks start (stage.sh): environment, and files that config keys name.
#export LOCKSTEP_STAGE="environment=$VIRTUAL_ENV model.path=/shared/models/qwen"

# Network. NCCL finds InfiniBand by itself. Name the adapters only if NCCL selects the wrong adapters.
#export NCCL_IB_HCA=mlx5_0,mlx5_1,mlx5_2,mlx5_3
# The interface for the first connections (NCCL) and for CPU collectives (gloo). You must set it if a node's own name resolves
# to 127.0.1.1 (as on Debian and Ubuntu), or to an address that other nodes cannot reach.
#export NCCL_SOCKET_IFNAME=ib0 GLOO_SOCKET_IFNAME=ib0
# Slingshot (HPE Cray EX) and EFA (AWS) go through libfabric and the aws-ofi-nccl plugin.
#export NCCL_NET="AWS Libfabric" FI_PROVIDER=cxi FI_CXI_DISABLE_HOST_REGISTER=1 FI_MR_CACHE_MONITOR=userfaultfd
#export NCCL_NET="AWS Libfabric" FI_PROVIDER=efa FI_EFA_USE_DEVICE_RDMA=1
# Plain Ethernet: use one interface for everything, and do not search for InfiniBand.
#export NCCL_SOCKET_IFNAME=eth0 GLOO_SOCKET_IFNAME=eth0 NCCL_IB_DISABLE=1
#export NCCL_DEBUG=WARN

# The rendezvous of the ranks. Set MASTER_ADDR if other nodes cannot reach the first node by its name; use an address that all
# nodes reach. LOCKSTEP_JOIN_TIMEOUT: seconds to wait for all ranks.
#MASTER_ADDR=$(hostname)-ib0 && export MASTER_ADDR
#export LOCKSTEP_JOIN_TIMEOUT=120

# Directory in which compiled code is kept for later jobs. By default it is on the node's disk (docs/gpu.md).
#export LOCKSTEP_CACHE=$HOME/lockstep-cache

# Policy of your site; job.sh explains these variables.
#export NO_REQUEUE=1
#export MAX_ATTEMPTS=5
