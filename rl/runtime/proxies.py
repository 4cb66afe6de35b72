"""Keep HTTP proxies out of the job's own traffic.

Compute nodes often reach the internet through `http_proxy`. Clients of an agents' endpoint, of Prometheus or
of a tool server beside the run would use this proxy too, even for requests to loopback and to nodes of the
job.
"""

import os
import platform
from collections.abc import Mapping

from rl.runtime.ranks import Ranks, expand_hostlist

LOOPBACKS = ("localhost", "127.0.0.1", "::1")


def without_proxies(ranks: Ranks, address: str, environ: Mapping[str, str] | None = None) -> dict[str, str]:
    """Return the variables that exempt the job's hosts, added to the present exemptions; {} without a proxy.

    address: this host's address in the job's network. Worker processes inherit the variables.
    """
    env = os.environ if environ is None else environ
    if not any(env.get(name) for name in env if name.lower() in ("http_proxy", "https_proxy", "all_proxy")):
        return {}
    nodes = expand_hostlist(env.get("SLURM_STEP_NODELIST") or env.get("SLURM_JOB_NODELIST", ""))
    given = [host for name in ("no_proxy", "NO_PROXY") for host in env.get(name, "").split(",")]
    own = [*LOOPBACKS, platform.node(), ranks.master_addr, address, *nodes]
    text = ",".join(dict.fromkeys(host.strip() for host in (*given, *own) if host.strip()))
    return {"no_proxy": text, "NO_PROXY": text}  # programs read one or the other
