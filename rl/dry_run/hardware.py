"""The machine of a dry run, and the fractions of its peak speeds that a run reaches."""

import argparse
from dataclasses import dataclass, fields
from typing import Any

from rl.config.command_line import field_docs
from rl.runtime.peaks import BF16_TFLOPS

GIB = 1 << 30

GPUS: dict[str, dict[str, float]] = {
    "h100": {},
    "h200": {"gpu_memory_gib": 140.0, "hbm_gb_s": 4800.0},
    "a100-80": {"tflops": BF16_TFLOPS["A100"], "hbm_gb_s": 2039.0, "nvlink_gb_s": 300.0, "nic_gb_s": 25.0},
    "a100-40": {"gpu_memory_gib": 40.0, "tflops": BF16_TFLOPS["A100"], "hbm_gb_s": 1555.0}
    | {"nvlink_gb_s": 300.0, "nic_gb_s": 25.0},
}
"""Name of a GPU -> figures of `Hardware` that differ from an H100's, from NVIDIA's data sheets."""


@dataclass(frozen=True)
class Hardware:
    """A machine. Peaks are an H100 SXM's (NVIDIA's data sheet); the rest has a source each.

    docs/launch.md compares the seconds that follow with published ones. Replace the figures by your runs'
    figures, for example `perf/throughput` and `timing_s/*`.
    """

    gpu_memory_gib: float = 80.0
    """memory of a GPU in GiB"""
    host_memory_gib: float = 0.0
    """memory in GiB of a node without GPUs, which its ranks share; 0: each rank has a GPU"""
    ranks_per_node: int = 8
    """ranks (GPUs) of a node"""
    tflops: float = BF16_TFLOPS["H100"]
    """peak of dense bfloat16 matrix products, TFLOP/s"""
    hbm_gb_s: float = 3350.0
    """bandwidth of a GPU's memory, GB/s"""
    nvlink_gb_s: float = 450.0
    """a rank's bandwidth within a node, each way, GB/s"""
    nic_gb_s: float = 50.0
    """a rank's bandwidth between nodes, each way, GB/s (DGX H100: one 400 Gbit/s port per GPU)"""
    pcie_gb_s: float = 50.0
    """a rank's bandwidth to host memory, GB/s (PCIe 5 x16 has 63)"""
    host_gb_s: float = 40.0
    """a rank's share of the bandwidth of host memory, GB/s (two sockets of 8 DDR5-4800 have 77 per GPU)"""
    train_share: float = 0.35
    """share of tflops that training and prefill reach (verl's docs/perf/dpsk.md: 0.31 to 0.40;
    a dense 1.5B model on one H100, docs/performance.md: 0.48)"""
    attention_share: float = 0.35
    """share of tflops that attention's scores and sums reach in training (FlashAttention-2 on an H100: 0.35,
    arXiv:2407.08608)"""
    hbm_share: float = 0.75
    """share of hbm_gb_s that decoding and the optimizer reach (STREAM reaches about 0.9)"""
    cache_share: float = 0.75
    """share of hbm_gb_s that attention over the KV cache reaches in decoding (assumed to be hbm_share)"""
    link_share: float = 0.7
    """share of the link speeds that messages reach (nccl-tests, messages of 100 MB: 0.7 to 0.9)"""
    near_us: float = 15.0
    """time of an all-reduce of a few tokens within a node, microseconds (vLLM's custom kernel)"""
    exchange_us: float = 25.0
    """time of a message between training ranks of a node, microseconds (NCCL #1453: 26 for 4 KiB on H100s)"""
    far_us: float = 80.0
    """time of an all-reduce of a few tokens between nodes, microseconds (nccl-tests, 16 ranks, 256 KiB: 50 to
    90)"""
    engine_step_ms: float = 4.0
    """host time of an engine step, ms; with `engine_sample_ms` 6 to 12 ms for 128 to 512 samples"""
    engine_sample_ms: float = 0.016
    """host time of an engine step per sample, ms: 0.016 to 0.03 suit published steps with vLLM's scheduler
    best; `tools/dev/bench.py host` measured 0.025 of CPU time"""
    eager_layer_ms: float = 0.6
    """time to launch a layer's kernels in an engine without CUDA graphs, ms (about 60 of 10 microseconds)"""
    layer_ms: float = 2.0
    """time to launch a layer's kernels in a training pass in one direction, ms: the minimum for few tokens"""
    update_ms: float = 30.0
    """time to launch an optimizer step and its checks, ms (about 3,000 kernels of 10 microseconds)"""
    backward_launches: float = 2.0
    """launches of a layer's backward pass / launches of its forward pass"""
    cores_per_rank: float = 1.0
    """CPU cores of a rank; below 1, ranks take turns on a core, and a rank that waits leaves it to others"""
    draft_acceptance: float = 0.8
    """share of draft tokens that are accepted if all earlier ones are (arXiv:2412.19437, section 5.4.3: 0.85
    to 0.90 for a head's first)"""
    tensor_ms: float = 0.85
    """time per weight in a refit that sends weights one by one, ms (NeMo-RL #3166: 16 to 19 s for 30B in 128
    experts); this program's refit sends planned batches"""
    reserve_gib: float = 4.0
    """GiB of a GPU for CUDA context, libraries' workspaces, CUDA graphs and fragmentation"""
    communicator_gib: float = 1.0
    """GiB of a GPU for each NCCL communicator, not measured yet (NCCL #964: 0.5 to 0.7; vLLM #51485: 1; verl
    #6266 and #6408: 7 dense, 9.5 with experts, for all of Megatron's on 8 H100)"""
    process_gib: float = 0.65
    """GiB of a rank on CPUs for torch, vLLM, Megatron and transformers, measured on Linux with glibc 2.36"""
    expert_imbalance: float = 1.5
    """tokens of the busiest rank's experts / mean of all ranks, for activations and time"""

    @property
    def is_cpu(self) -> bool:
        """Whether ranks compute on CPUs. Kernels are then not launched ahead, and nothing is offloaded."""
        return self.host_memory_gib > 0

    @property
    def has_speeds(self) -> bool:
        """Whether seconds can be estimated: the defaults are a GPU's speeds, not those of CPUs."""
        return not self.is_cpu or self.tflops != Hardware.tflops

    @property
    def speeds(self) -> str:
        """Source of the speeds, for the report: a kind of GPU (--gpu), or options."""
        peaks = ("tflops", "hbm_gb_s", "nvlink_gb_s", "nic_gb_s")
        own = [getattr(self, name) for name in peaks]
        for kind, figures in GPUS.items():
            if own == [figures.get(name, getattr(Hardware, name)) for name in peaks]:
                return f"the speeds of {kind} (--gpu)"
        return "the speeds of the options"

    @property
    def memory_gib(self) -> float:
        """Memory of a rank in GiB: a GPU's, or its share of a node's."""
        return self.host_memory_gib / self.ranks_per_node if self.is_cpu else self.gpu_memory_gib

    @property
    def memory(self) -> float:
        """Memory of a rank, in bytes."""
        return self.memory_gib * GIB

    @property
    def reserve(self) -> float:
        """Reserved memory of a rank, in bytes."""
        return (self.process_gib if self.is_cpu else self.reserve_gib) * GIB

    @property
    def turns(self) -> float:
        """Number of ranks that take turns on a core, at least 1."""
        return max(1.0, 1 / self.cores_per_rank)

    def tokens_per_step(self, drafts: int) -> float:
        """Return the mean number of tokens that an engine step yields with that many draft tokens."""
        return sum(self.draft_acceptance**number for number in range(drafts + 1))

    def link_seconds(self, near_bytes: float, far_bytes: float) -> float:
        """Return the seconds of a rank's messages; messages within the node and to other nodes overlap."""
        return max(near_bytes / self.nvlink_gb_s, far_bytes / self.nic_gb_s) / (1e9 * self.link_share)

    def all_reduce_seconds(self, message: float, ranks: int) -> float:
        """Return the seconds of an all-reduce over tensor parallel ranks, which all ports of a node share."""
        if ranks == 1:
            return 0.0
        if ranks <= self.ranks_per_node:
            return self.near_us / 1e6 + self.link_seconds(2 * message, 0)
        return self.far_us / 1e6 + self.link_seconds(2 * message, 2 * message / self.ranks_per_node)

    def exchange_seconds(self, message: float, ranks: int, stride: int = 1, count: float = 1.0) -> float:
        """Return the seconds of messages that a rank splits over a group of ranks with that stride.

        message: bytes of all `count` messages.
        """
        if ranks == 1:
            return 0.0
        near = max(1, self.ranks_per_node // stride)  # ranks of the group in a node
        far = max(0.0, 1 - near / ranks)
        latency = self.far_us if far else self.exchange_us
        return count * latency / 1e6 + self.link_seconds(message * (1 - far), message * far)


def add_options(parser: argparse.ArgumentParser) -> None:
    """Add --gpu, and an option for each figure, e.g. --gpu-memory-gib."""
    group = parser.add_argument_group("the machine")
    kinds = f"kind of GPU, whose figures are the defaults of those below: {', '.join(GPUS)} (h100)"
    group.add_argument("--gpu", metavar="KIND", type=kind_of, default="h100", help=kinds)
    for figure in fields(Hardware):
        option, kind = "--" + figure.name.replace("_", "-"), type(figure.default)
        help_text = f"{field_docs(Hardware)[figure.name]} ({figure.default:g})"
        group.add_argument(option, metavar="X", type=kind, default=None, help=help_text)


def kind_of(name: str) -> str:
    """Return the key of GPUS for a name in any case of letters. Raises argparse.ArgumentTypeError."""
    if name.isdigit():
        raise argparse.ArgumentTypeError(
            f"{name} is a number, but --gpu is a kind ({', '.join(GPUS)}); --gpus (plan) or --world-size "
            "(--dry-run) sets the number"
        )
    if name.lower() not in GPUS:
        raise argparse.ArgumentTypeError(
            f"{name} is none of {', '.join(GPUS)}; describe another GPU to lockstep train --dry-run with "
            "--gpu-memory-gib, --tflops, --hbm-gb-s, --nvlink-gb-s and --nic-gb-s"
        )
    return name.lower()


def from_options(arguments: argparse.Namespace) -> Hardware:
    """Return the machine from the parsed options. Raises ValueError if a figure is not positive."""
    usual: dict[str, Any] = {figure.name: figure.default for figure in fields(Hardware)}
    usual |= GPUS[arguments.gpu]
    given = {name: getattr(arguments, name) for name in usual}
    values = usual | {name: value for name, value in given.items() if value is not None}
    for name, value in values.items():
        if not value > 0 and not value == 0 == getattr(Hardware, name):
            raise ValueError(f"--{name.replace('_', '-')} is {value:g}, but must be greater than 0.")
    if values["host_memory_gib"]:
        values["ranks_per_node"] = min(values["ranks_per_node"], arguments.world_size)
    return Hardware(**values)
