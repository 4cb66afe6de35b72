"""The machine of a dry run, and the fractions of its peak speeds that a run reaches."""

from dataclasses import dataclass, fields

from rl.config.options import field_docs
from rl.runtime.peaks import BF16_TFLOPS

GIB = 1 << 30


@dataclass(frozen=True)
class Hardware:
    """A machine; the defaults are the peak figures of an H100 SXM.

    The shares are rules of thumb, not measurements. Replace them by those of your runs (`perf/throughput`,
    `timing_s/*`).
    """

    gpu_memory_gib: float = 80.0
    """memory of a GPU in GiB"""
    ranks_per_node: int = 8
    """ranks (GPUs) of a node"""
    tflops: float = BF16_TFLOPS["H100"]
    """peak of dense bfloat16 matrix products, TFLOP/s"""
    hbm_gb_s: float = 3350.0
    """bandwidth of a GPU's memory, GB/s"""
    nvlink_gb_s: float = 450.0
    """a rank's bandwidth within a node, each way, GB/s"""
    nic_gb_s: float = 50.0
    """a rank's bandwidth between nodes, each way, GB/s"""
    pcie_gb_s: float = 50.0
    """a rank's bandwidth to host memory, GB/s"""
    train_share: float = 0.35
    """share of tflops that training and prefill reach"""
    hbm_share: float = 0.6
    """share of hbm_gb_s that decoding reaches"""
    link_share: float = 0.7
    """share of the link speeds that messages reach"""
    reserve_gib: float = 4.0
    """GiB of a GPU for CUDA context, NCCL, libraries' workspaces, CUDA graphs and fragmentation"""
    expert_imbalance: float = 1.5
    """tokens of the busiest rank's experts over the mean, for activations and time"""

    @property
    def memory(self) -> float:
        """Memory of a GPU, in bytes."""
        return self.gpu_memory_gib * GIB

    @property
    def reserve(self) -> float:
        """Reserved memory of a GPU, in bytes."""
        return self.reserve_gib * GIB

    def link_seconds(self, near_bytes: float, far_bytes: float) -> float:
        """Return the seconds of a rank's messages if those within its node and to other nodes overlap."""
        return max(near_bytes / self.nvlink_gb_s, far_bytes / self.nic_gb_s) / (1e9 * self.link_share)


def add_options(parser) -> None:
    """Add an option for each figure, e.g. --gpu-memory-gib."""
    group = parser.add_argument_group("the machine")
    for figure in fields(Hardware):
        option, kind = "--" + figure.name.replace("_", "-"), type(figure.default)
        help_text = f"{field_docs(Hardware)[figure.name]} ({figure.default:g})"
        group.add_argument(option, metavar="X", type=kind, default=figure.default, help=help_text)


def from_options(arguments) -> Hardware:
    """Return the machine from the parsed options. Raises ValueError if a figure is not positive."""
    values = {figure.name: getattr(arguments, figure.name) for figure in fields(Hardware)}
    for name, value in values.items():
        if not value > 0:
            raise ValueError(f"--{name.replace('_', '-')} is {value:g}, but must be greater than 0.")
    return Hardware(**values)
