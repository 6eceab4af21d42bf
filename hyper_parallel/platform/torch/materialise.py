"""Memory for a model of transformers that was built on the meta device, and for nothing beside its own parts."""

import torch
import torch.distributed.tensor as dt
from torch import nn

__all__ = ["materialise"]


def materialise(model) -> None:
    """Give every tensor on the meta device memory on the device of the model's mesh, or torch's default device.

    Parameters and persistent buffers are not set. Buffers that no folder holds, such as rotary frequencies, get the
    values that transformers computes. Ties stay ties, and what was put on a parameter stays on it.

    Raises:
        ValueError: the default device is the meta device, or a buffer that nobody can compute; the model is unchanged.
    """
    device = _device(model)
    if device.type == "meta":
        raise ValueError("load_pretrained was called under torch.device('meta'); build the model there, load outside")
    _compute_buffers(model, device)
    made: dict[int, torch.Tensor] = {}
    for child in model.modules():
        for kind in (child._parameters, child._buffers):
            for name, tensor in kind.items():
                if tensor is not None and tensor.is_meta:
                    if id(tensor) not in made:
                        made[id(tensor)] = _with_memory(tensor, device)
                    kind[name] = made[id(tensor)]


def _device(model):
    meshes = {p.device_mesh.device_type for p in model.parameters() if isinstance(p, dt.DTensor)}
    return torch.device(meshes.pop()) if meshes else torch.get_default_device()


def _with_memory(tensor, device):
    local = tensor.detach()
    if isinstance(tensor, dt.DTensor):
        layout = {"shape": tensor.shape, "stride": tensor.stride(), "run_check": False}
        part = torch.empty_like(local.to_local(), device=device)
        made = dt.DTensor.from_local(part, tensor.device_mesh, tensor.placements, **layout)
    else:
        made = torch.empty_like(local, device=device)
    if isinstance(tensor, nn.Parameter):
        made = nn.Parameter(made, requires_grad=tensor.requires_grad)
    for name, value in tensor.__dict__.items():
        made.__dict__.setdefault(name, value)
    return made


def _compute_buffers(model, device):
    """Compute the buffers that are not part of state dicts; all of them or none."""
    owners = [(path, child) for path, child in model.named_modules() if _lacking(child)]
    lacking = [(f"{path}.{name}".lstrip("."), child, name) for path, child in owners for name in _lacking(child)]
    before = [child._buffers[name] for _, child, name in lacking]
    for (_, child, name), buffer in zip(lacking, before):
        child._buffers[name] = torch.empty_like(buffer, device=device)
    versions = [child._buffers[name]._version for _, child, name in lacking]
    try:
        with torch.no_grad():
            for path, child in owners:
                _model_around(model, path)._init_weights(child)
        left = [
            full for (full, child, name), version in zip(lacking, versions) if child._buffers[name]._version == version
        ]
        if left:
            raise ValueError(
                f"buffers {', '.join(left)} are on the meta device, no folder holds them, and _init_weights of the "
                "model does not compute them; make these modules outside torch.device('meta')"
            )
    except BaseException:
        for (_, child, name), buffer in zip(lacking, before):
            child._buffers[name] = buffer
        raise


def _lacking(module):
    """Names of the module's own buffers on the meta device that are not part of state dicts."""
    return [
        name
        for name, buffer in module._buffers.items()
        if buffer is not None and buffer.is_meta and name in module._non_persistent_buffers_set
    ]


def _model_around(model, path):
    """The innermost model of transformers that holds the module of this path: it knows how the module begins."""
    from transformers import PreTrainedModel

    parts = path.split(".") if path else []
    for length in range(len(parts), 0, -1):
        module = model.get_submodule(".".join(parts[:length]))
        if isinstance(module, PreTrainedModel):
            return module
    return model
