"""Start Ray with a head and three nodes on this machine, until Ctrl-C: ``python examples/placement/ray/nodes.py``.

On machines of your own you run ``ray start --head`` on the first one, and ``ray start --address FIRST:6379`` on the
others.
"""

from __future__ import annotations

import os
import signal
from pathlib import Path

from ray.cluster_utils import Cluster


def main() -> None:
    (Path(os.environ.get("RAY_TMPDIR", "/tmp")) / "ray").mkdir(exist_ok=True)  # Ray expects it
    cluster = Cluster(initialize_head=True, head_node_args={"num_cpus": 0, "include_dashboard": True})
    for number in (1, 2, 3):
        cluster.add_node(num_cpus=2, node_name=f"node-{number}")
    print(f"Ray is at {cluster.address}", flush=True)
    signal.sigwait({signal.SIGINT, signal.SIGTERM})
    cluster.shutdown()


if __name__ == "__main__":
    main()
