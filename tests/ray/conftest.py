"""Clusters of several nodes on one machine, and the tiny checkpoints of the conversion tests."""

import os

import pytest
from module_files import load

os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
os.environ.setdefault("RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO", "0")  # else Ray warns of what it will do one day

kit = load("convert/conftest.py").kit


@pytest.fixture(scope="module")
def cluster():
    """A head without processors, where nothing runs, and two nodes of one processor each; a driver is connected."""
    import ray
    from ray.cluster_utils import Cluster

    made = Cluster(initialize_head=True, head_node_args={"num_cpus": 0, "object_store_memory": 80 * 2**20})
    made.workers = [made.add_node(num_cpus=1, object_store_memory=80 * 2**20) for _ in range(2)]
    ray.init(address=made.address, log_to_driver=False, logging_level="error")
    made.wait_for_nodes()
    yield made
    ray.shutdown()
    made.shutdown()
