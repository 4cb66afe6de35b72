"""The machine that a dry run is for, and how much of its peak speeds a run reaches."""

from dataclasses import dataclass, field, fields

GIB = 1 << 30


@dataclass(frozen=True)
class Hardware:
    """Peak figures are those of an H100 SXM unless they are given. Shares of the peaks are rules of thumb, not measurements
    of this program: take them from `perf/throughput` and `timing_s/*` of a run of yours as soon as there is one."""

    gpu_memory_gib: float = field(default=80.0, metadata={"help": "memory of a GPU in GiB"})
    ranks_per_node: int = field(default=8, metadata={"help": "ranks (GPUs) of a node"})
    tflops: float = field(default=989.0, metadata={"help": "peak of dense bfloat16 matrix products, TFLOP/s"})
    hbm_gb_s: float = field(default=3350.0, metadata={"help": "bandwidth of a GPU's memory, GB/s"})
    nvlink_gb_s: float = field(
        default=450.0, metadata={"help": "a rank's bandwidth within a node, each way, GB/s"}
    )
    nic_gb_s: float = field(
        default=50.0, metadata={"help": "a rank's bandwidth between nodes, each way, GB/s"}
    )
    pcie_gb_s: float = field(default=50.0, metadata={"help": "a rank's bandwidth to host memory, GB/s"})
    train_share: float = field(
        default=0.35, metadata={"help": "share of tflops that training and prefill reach"}
    )
    hbm_share: float = field(default=0.6, metadata={"help": "share of hbm_gb_s that decoding reaches"})
    link_share: float = field(default=0.7, metadata={"help": "share of the link speeds that messages reach"})
    reserve_gib: float = field(
        default=4.0,
        metadata={
            "help": "GiB of a GPU that no table counts: CUDA context, NCCL, libraries' workspaces, CUDA graphs, fragments"
        },
    )
    expert_imbalance: float = field(
        default=1.5,
        metadata={"help": "tokens of the busiest rank's experts over the mean; for activations and time"},
    )

    @property
    def memory(self) -> float:
        """Of a GPU, in bytes."""
        return self.gpu_memory_gib * GIB

    @property
    def reserve(self) -> float:
        """In bytes."""
        return self.reserve_gib * GIB


def add_options(parser) -> None:
    """An option for each figure, e.g. --gpu-memory-gib."""
    group = parser.add_argument_group("the machine")
    for figure in fields(Hardware):
        option, kind = "--" + figure.name.replace("_", "-"), type(figure.default)
        help_text = f"{figure.metadata['help']} ({figure.default:g})"
        group.add_argument(option, metavar="X", type=kind, default=figure.default, help=help_text)


def from_options(arguments) -> Hardware:
    """Raises ValueError for a figure that is not positive."""
    values = {figure.name: getattr(arguments, figure.name) for figure in fields(Hardware)}
    for name, value in values.items():
        if not value > 0:
            raise ValueError(f"--{name.replace('_', '-')} is {value:g}, but must be greater than 0.")
    return Hardware(**values)
