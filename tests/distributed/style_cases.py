"""Styles that a user writes: the one of docs/adding_a_style.md, and what an overriding dispatch is given."""

import re
from pathlib import Path
from unittest import mock

import hyper_parallel as hp
from hyper_parallel.core.expert_parallel.exchange.rows import send_rows
from hyper_parallel.platform import get_platform
from tests.distributed import variant_cases
from tests.distributed.error_cases import nested_model
from tests.harness.setting import make_experts, mesh_for

PAGE = Path(__file__).resolve().parents[2] / "docs" / "adding_a_style.md"


def documented():
    """The names that the page's first block of code defines."""
    names = {"__name__": "adding_a_style"}
    exec(re.findall(r"^```python\n(.*?)^```", PAGE.read_text(encoding="utf-8"), re.S | re.M)[0], names)
    return names


def against_one_device(context, broken=False, **arguments):
    """The page's style; ``broken`` leaves out what other ranks' experts made of a token."""
    names = documented()
    style, exchange = names["GatherExpertTensorParallel"], names["GatherExchange"]
    combine = exchange.combine

    def only_mine(self, rows_RD, trip):
        return combine(self, rows_RD * (1.0 if self.places.ep_mesh.get_local_rank() == 0 else 0.0), trip)

    with (
        mock.patch.object(hp, "Documented", style, create=True),
        mock.patch.object(exchange, "combine", only_mine if broken else combine),
    ):
        return variant_cases.against_one_device(context, "Documented", **arguments)


def overriding_dispatch(context, problem):
    """The mesh that a style's own dispatch of bare experts is given, and what the style says inside a MoE layer."""
    seen = []

    class Mine(hp.ExpertTensorParallel):
        def _token_dispatch(self, mod, inputs, device_mesh):
            seen.append(device_mesh)
            return send_rows(get_platform(mod), *inputs, device_mesh)

    style = Mine()
    mesh = mesh_for(context, style, 2, 2)
    experts = style.apply(make_experts(context, problem), mesh)
    adapter, ep_rank = context.framework, mesh.get_local_rank("ep")
    experts(adapter.tensor(problem.x[ep_rank]), adapter.int_tensor(problem.counts[ep_rank]))
    (given,) = seen
    is_mesh = get_platform(experts).is_mesh(given)

    layer = variant_cases.make_layer(context, 2)
    hp.parallelize_module(layer, mesh, {"experts": style})
    try:
        layer(adapter.tensor(variant_cases.tokens_for(ep_rank, 4)))
    except TypeError as error:
        return is_mesh, tuple(given.mesh_dim_names), given.size(), str(error)
    return is_mesh, tuple(given.mesh_dim_names), given.size(), None


def named_errors(context):
    """What a wrong call of the second of several layers says."""
    model, style = nested_model(context), hp.ExpertTensorParallel()
    hp.parallelize_module(model, mesh_for(context, style, 2, 2), {"layers.*.experts": style})
    experts = dict(get_platform(model).named_modules(model))["layers.1.experts"]
    try:
        experts(context.framework.tensor([[1.0]]), context.framework.int_tensor([1] + [0] * 7))
    except ValueError as error:
        return str(error)
    return None
