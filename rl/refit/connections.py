"""GPU memory of NCCL's point-to-point connections in a refit, allocated outside torch's allocator.

The connections last from the first refit to the end of the run. From the sources of NCCL 2.29.7, which torch
2.13 requires:

- Within a node each connection has its own buffers: per channel 9.2 MiB at the receiver and one page at the
  sender (src/transport/p2p.cc, p2pRecvSetup), rounded up to pages of 2 MiB. NVIDIA/nccl#1685 measured
  10 MiB, 2 MiB and 32 channels per pair on 8 H100, 3.3 GB on a GPU.
- Between nodes all connections of a GPU share one buffer per direction (src/transport/net.cc,
  sharedNetBuffersInit). More connections cost queue pairs and set-up time, but no GPU memory. In a
  rail-optimised network NCCL routes messages to a node through the GPU on the receiver's rail (PXN), over
  one connection per node.
- The number of channels per pair falls with the number of ranks (src/graph/paths.cc,
  ncclTopoComputeP2pChannels).
"""

import numpy as np

MIB = 1 << 20
RECEIVER, SENDER = 10 * MIB, 2 * MIB
"""Bytes of one channel of a connection within a node. Receiver: buffers of the protocols Simple (4 MiB),
LL128 (4.7 MiB) and LL (0.5 MiB). Sender: a page of flags."""
MAX_CHANNELS = 32
"""Maximum number of channels for the point-to-point messages of one GPU (NCCL_MAX_P2P_NCHANNELS)."""
SHARED = 2 * MAX_CHANNELS * 16 * (128 << 10)
"""Bytes of the buffers that all connections to other nodes share: 16 steps of 128 KiB per channel and
direction."""
GB_S_PER_CHANNEL = 14
"""Network bandwidth that NCCL expects of one channel, GB/s (NCCL_P2P_PER_CHANNEL_NET_BW)."""
PEERS_PER_ROUND = 8
"""Number of peers that NCCL serves in one round (NCCL_MAX_DEV_WORK_P2P_PER_BATCH)."""


def channels_per_peer(world_size: int, ranks_per_node: int, nic_gb_s: float) -> int:
    """Return the number of channels between two GPUs that NVLink connects."""
    if world_size <= ranks_per_node:
        return MAX_CHANNELS
    channels = 1 << (max(2, int(-(-nic_gb_s // GB_S_PER_CHANNEL))) - 1).bit_length()
    while channels > 1 and channels * -(-world_size // PEERS_PER_ROUND) > MAX_CHANNELS:
        channels //= 2
    return channels


def connection_bytes(partners: np.ndarray, ranks_per_node: int, nic_gb_s: float) -> np.ndarray:
    """Return the bytes of NCCL's buffers on each rank, int64 [world_size].

    partners: `RefitTraffic.partners`.
    """
    near_in, far_in, near_out, far_out = partners
    channels = channels_per_peer(len(near_in), ranks_per_node, nic_gb_s)
    return channels * (RECEIVER * near_in + SENDER * near_out) + SHARED * (far_in + far_out > 0)
