"""What is asked of transformers' models: the names under which folders hold their weights, their config, tied weights.

transformers knows, per family, how a folder's tensors become a model's weights (``conversion_mapping.py`` and
``core_model_loading.py``, which it does not document). Its rules are asked for names here, never for values. Tried with
transformers 5.24: a new release of it is this one file to look at.
"""

import copy
import re

import torch

from hyper_parallel.checkpoint.values import plain_name
from hyper_parallel.huggingface.assembly import chunk, concatenate, missing_members, stack, stored, transpose
from hyper_parallel.platform.torch.materialise import materialise

__all__ = ["Assembly", "aliases", "assemble", "check", "materialise", "named_as", "remember", "write_config"]


class Assembly:
    """How a folder's tensors make up a model's weights.

    Attributes:
        weights: an ``Assembled`` by the name of each weight that the folder has.
        problems: (weight, what keeps it from being made, in words).
        unexpected: names of the folder that the model has no weight for.
        used: the rules of transformers that applied.
    """

    def __init__(self):
        self.weights, self.problems, self.unexpected, self.used = {}, [], [], []


def check(model) -> None:
    """Raise TypeError for something else than a model of transformers, ValueError for one with adapters."""
    try:
        from transformers import PreTrainedModel
    except ImportError as error:
        raise TypeError(
            "load_pretrained and save_pretrained take models of transformers, which is not installed: "
            "pip install hyper_parallel[huggingface]"
        ) from error
    if not isinstance(model, PreTrainedModel):
        raise TypeError(
            f"expected a PreTrainedModel of transformers, got {type(model).__qualname__}; hyper_parallel.checkpoint "
            "saves and loads any other module"
        )
    adapters = [name for name, _ in model.named_parameters() if ".lora_" in f".{name}"]
    if adapters:
        raise ValueError(
            f"the model has adapters ({adapters[0]} and {len(adapters) - 1} more), which no such folder holds: load "
            "before adding them; before saving, merge_adapters(model), or save them alone by save_adapters "
            "(hyper_parallel.lora)"
        )


def aliases(model) -> dict[str, str]:
    """All names of parameters and persistent buffers, to the name that stands for their tensor: its first."""
    first, found = {}, {}
    named = [*model.named_parameters(remove_duplicate=False)]
    for path, child in model.named_modules():
        for name, buffer in child.named_buffers(recurse=False):
            if name not in child._non_persistent_buffers_set:
                named.append((f"{path}.{name}" if path else name, buffer))
    for name, tensor in named:
        name = plain_name(name)
        found[name] = first.setdefault(id(tensor), name)
    return found


def assemble(model, shapes, tensors) -> Assembly:
    """How the tensors of a folder make up the weights of a model.

    Args:
        shapes: of the weights by all of their names. tensors: shapes of the folder's tensors by name.
    """
    from transformers.conversion_mapping import get_model_conversion_mapping
    from transformers.core_model_loading import WeightConverter, WeightRenaming, dot_natural_key, rename_source_key

    rules = get_model_conversion_mapping(model)
    renamings = [rule for rule in rules if isinstance(rule, WeightRenaming)]
    converters = [rule for rule in rules if isinstance(rule, WeightConverter)]
    of_pattern = {pattern: converter for converter in converters for pattern in converter.source_patterns}
    found, groups, ignored = Assembly(), {}, _ignored(model)
    for name in sorted(tensors, key=dot_natural_key):
        target, pattern = rename_source_key(name, renamings, converters, model.base_model_prefix, shapes)
        if target not in shapes and name in shapes:
            target, pattern = name, None
        if target in shapes:
            groups.setdefault(target, {}).setdefault(pattern, []).append(name)
        elif not any(re.search(expression, target) for expression in ignored):
            found.unexpected.append(name)
    for target, by_pattern in groups.items():
        names = [name for members in by_pattern.values() for name in members]
        if None in by_pattern and len(names) > 1:
            found.problems.append((target, f"{target}: is in the folder more than once, as {' and '.join(names[:3])}"))
        elif None in by_pattern:
            found.weights[target] = stored(names[0], tensors[names[0]])
        else:
            _convert(found, of_pattern[next(iter(by_pattern))], target, by_pattern, shapes, tensors)
    found.used = [rule for rule in rules if rule.was_used()]
    return found


def _ignored(model):
    """Expressions for names that transformers passes over: of parts that its model does not have."""
    buffers = [name for name, _ in model.named_buffers()]
    found = list(model._keys_to_ignore_on_load_unexpected or ())
    found += [r"rotary_emb\.inv_freq"] if any(name.endswith("rotary_emb.inv_freq") for name in buffers) else []
    return found + ([r"(^|\.)position_ids$"] if any(name.endswith("position_ids") for name in buffers) else [])


def _convert(found, converter, target, by_pattern, shapes, tensors):
    """Apply the rule ``converter``: what it makes goes into ``found``."""
    first, *others = converter.target_patterns
    targets = [target, *(target.replace(first, other) for other in others)]
    absent = [
        (target, f"{target}: no tensor {pattern}") for pattern in converter.source_patterns if pattern not in by_pattern
    ]
    if absent:
        found.problems += absent
        return
    columns = [by_pattern[pattern] for pattern in converter.source_patterns]
    if type(converter.operations[0]).__name__ == "MergeModulelist":
        count = shapes[target][converter.operations[0].dim]
        gaps = [name for names in columns for name in missing_members(names, count)]
        if gaps:
            found.problems += [(target, f"{name}: missing") for name in gaps]
            return
    made = [[stored(name, tensors[name]) for name in names] for names in columns]
    try:
        for operation in converter.operations:
            made = _apply(operation, made, len(targets), shapes[target])
    except ValueError as error:
        found.problems.append((target, f"{target}: made of {columns[0][0]} and others: {error}"))
        return
    found.weights |= {name: part for name, (part,) in zip(targets, made)}


def _apply(operation, made, num_targets, shape):
    """One operation of transformers on tensors: a list per pattern."""
    kind = type(operation).__name__
    if kind == "MergeModulelist":
        return [[stack(parts, operation.dim)] for parts in made]
    if kind == "Concatenate":
        return [[concatenate([part for parts in made for part in parts], operation.dim)]]
    if kind == "Chunk" and len(made) == 1 and len(made[0]) == 1:
        return [[part] for part in chunk(made[0][0], num_targets, operation.dim)]
    if kind == "Transpose" and len(made) == 1 and len(made[0]) == 1:
        as_it_is = operation.check_dims and made[0][0].shape == tuple(shape)
        return made if as_it_is else [[transpose(made[0][0], operation.dim0, operation.dim1)]]
    raise ValueError(
        f"transformers converts it by {kind}, which is not done by byte ranges; save the model once by transformers: "
        "from_pretrained(...).save_pretrained(folder, save_original_format=False)"
    )


def remember(model, assembly: Assembly) -> None:
    """Let the model be saved under the names of the folder that it was loaded from, by transformers too."""
    model._weight_conversions = assembly.used


def named_as(model, shapes) -> tuple[dict[str, tuple[int, ...]], dict]:
    """The tensors in which a model is saved: those of its hub folder where they are boxes of its weights, else its own.

    Args:
        shapes: of its weights by name.

    Returns:
        Shapes of the tensors by name, and an ``Assembled`` by the name of each weight.
    """
    from transformers.core_model_loading import revert_weight_conversion

    on_meta = {name: torch.empty(shape, device="meta") for name, shape in shapes.items()}
    for candidate in (revert_weight_conversion(model, dict(on_meta)), on_meta):
        tensors = {name: tuple(tensor.shape) for name, tensor in candidate.items()}
        found = assemble(model, shapes, tensors)
        made = {name: weight.shape for name, weight in found.weights.items()}
        if not found.problems and not found.unexpected and made == shapes:
            return tensors, found.weights
    raise ValueError(
        f"{type(model).__name__}: the names of its folder are not known as parts of its weights; save it by "
        "hyper_parallel.checkpoint"
    )


def write_config(model, folder) -> None:
    """Write ``config.json`` and what belongs to it, as transformers does, from copies."""
    config = copy.deepcopy(model.config)
    config.dtype = str(model.dtype).removeprefix("torch.")
    config.architectures = [type(model).__name__.removeprefix("FSDP")]
    config.save_pretrained(folder)
    if model.can_generate():
        copy.deepcopy(model.generation_config).save_pretrained(folder)
