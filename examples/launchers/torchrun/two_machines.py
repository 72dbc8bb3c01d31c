"""torchrun on two machines, tried on one: two network namespaces behind shaped links.

    python examples/launchers/torchrun/two_machines.py [SCRIPT [ARGUMENT ...]]

Needs Linux, root and iproute2. What is started in each namespace is what would be typed on each of
two real machines, with the address of the first and the name of the network interface between them.
"""

import os
import subprocess
import sys
from pathlib import Path

from offbeat_lab.launch.cluster import Cluster

SECONDS = 240  # for all of it
SCRIPT = str(Path(__file__).parents[2] / "train_selsync.py")


def bytes_sent(cluster: Cluster, node: int) -> int:
    """Return the bytes that a machine has sent over its link."""
    counter = f"/sys/class/net/{Cluster.interface}/statistics/tx_bytes"
    return int(subprocess.check_output(cluster.command(node, ["cat", counter])))


def main(script: list[str]) -> int:
    """Exit status of the first machine that failed, else 0."""
    environment = {**os.environ, "GLOO_SOCKET_IFNAME": Cluster.interface}
    torchrun = [sys.executable, "-m", "torch.distributed.run"]
    machines: list[subprocess.Popen[bytes]] = []
    with Cluster(2, 200e6) as cluster:
        try:
            for node in range(2):
                argv = [*torchrun, "--nnodes", "2", "--node-rank", str(node)]
                argv += ["--nproc-per-node", "1"]
                argv += ["--master-addr", "10.111.0.1", "--master-port", "29500", *script]
                machines.append(subprocess.Popen(cluster.command(node, argv), env=environment))
            codes = [one.wait(SECONDS) for one in machines]
            sent = [bytes_sent(cluster, node) for node in range(2)]
        finally:
            for one in machines:
                one.terminate()
            for one in machines:
                one.wait()
    print(f"over the links: {sent[0] / 1e6:.1f} MB and {sent[1] / 1e6:.1f} MB")
    return next(filter(None, codes), 0)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:] or [SCRIPT]))
