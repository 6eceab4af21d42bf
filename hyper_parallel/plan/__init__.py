"""Which dp x ep x tp, which style, which recompute, which memory, for a model on a cluster. Imports no framework.

    from hyper_parallel.plan import Request, make_plans, read_cluster, read_config

    request = Request(read_config("config.json"), read_cluster("atlas-a2"), ranks=64, tokens=2**20, sequence=4096)
    best = make_plans(request)[0]

``python -m hyper_parallel.plan --help`` says the same on the command line; docs/planner.md what is behind it.
"""

from hyper_parallel.plan.cluster import Cluster, Link, preset_names, read_cluster
from hyper_parallel.plan.config import ConfigError, read_config
from hyper_parallel.plan.explain import explain
from hyper_parallel.plan.imbalance import Imbalance, read_load, zipf_load
from hyper_parallel.plan.layer import STYLES, Collective, MoELayer
from hyper_parallel.plan.memory import OPTIMIZERS, RECOMPUTE, Memory
from hyper_parallel.plan.model import Attention, Model
from hyper_parallel.plan.search import Plan, Request, make_plans, plan

__all__ = [
    "Attention",
    "Cluster",
    "Collective",
    "ConfigError",
    "Imbalance",
    "Link",
    "Memory",
    "Model",
    "MoELayer",
    "OPTIMIZERS",
    "Plan",
    "RECOMPUTE",
    "Request",
    "STYLES",
    "explain",
    "make_plans",
    "plan",
    "preset_names",
    "read_cluster",
    "read_config",
    "read_load",
    "zipf_load",
]
