"""Settings of containers, for `agents.container` and for `reward.kwargs.container` of the code reward."""

from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields
from typing import Annotated, Any, Literal

from rl.config.ranges import AT_LEAST_ONE, NOT_NEGATIVE, POSITIVE, ranges_of


@dataclass
class Container:
    """Rootless containers (docs/agents.md#containers)."""

    image: str = ""
    """Image on disk: a root directory, a SIF or SquashFS file, or an archive of `docker save` or of `skopeo`.
    Rows may name others. Empty: none."""
    runtime: Literal["", "apptainer", "charliecloud", "bubblewrap"] = ""
    """Program that makes the containers. Empty: the first of these programs that is installed."""
    network: bool = False
    """Whether commands have the node's network. Otherwise they have a loopback of their own."""
    wall_s: Annotated[float, POSITIVE] = 20.0
    """Time limit of a command, in seconds."""
    memory_mib: Annotated[int, AT_LEAST_ONE] = 1024
    """Maximum memory of all processes of a container, and of what the node holds for them, in MiB."""
    disk_mib: Annotated[int, AT_LEAST_ONE] = 512
    """Maximum size of the files that a container writes, in MiB. They are in memory."""
    files: Annotated[int, AT_LEAST_ONE] = 20000
    """Maximum number of files that a container makes or changes."""
    tasks: Annotated[int, AT_LEAST_ONE] = 64
    """Maximum number of processes and threads of a container."""
    cpus: Annotated[int, NOT_NEGATIVE] = 0
    """Maximum number of processors that a container's commands run on. 0: all processors of its worker
    process."""
    output_bytes: Annotated[int, AT_LEAST_ONE] = 100_000
    """Maximum bytes of a command's output. A command that writes more is ended."""
    ahead: Annotated[int, NOT_NEGATIVE] = 1
    """Number of containers of an image that each worker process starts ahead of their use."""
    reuse: Annotated[int, AT_LEAST_ONE] = 16
    """Number of trajectories for which the first process of a container is used. Files and processes never
    pass from one to the next."""


def read_container(value: Mapping[str, Any], *, key: str) -> dict[str, Any]:
    """Return all settings of a mapping with some of them. Raises ValueError, with the key, for a bad one."""
    known = {field.name: type(field.default) for field in fields(Container)}
    if not isinstance(value, Mapping) or not value.get("image"):
        raise ValueError(f"{key}={value!r:.80} must be a mapping with `image`, the path of an image.")
    for name, item in value.items():
        if name not in known:
            raise ValueError(f"{key}.{name} is unknown; the keys are {', '.join(known)}.")
        if type(item) is not known[name] and not (known[name] is float and type(item) is int):
            raise ValueError(f"{key}.{name}={item!r:.80} must be of type {known[name].__name__}.")
        if (limit := ranges_of(Container).get(name)) and not limit.accepts(item):
            raise ValueError(f"{key}.{name}={item!r} must be {limit.words}.")
    return asdict(Container(**value))
