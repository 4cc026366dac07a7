"""From a diffusers model to one rank's part of it: runtime modules, local head counts, diffusers' own refusals."""

from __future__ import annotations

import os
import warnings
from collections.abc import Mapping, Sequence
from typing import Any

import torch
import xxhash
from torch import nn

from shardconv.errors import LoadError, PlanError, ShardconvWarning, UsageError
from shardconv.format.cut import Cut
from shardconv.format.plan import PlanChoice, Style
from shardconv.libraries.torch_private import buffers_held, parameters_held
from shardconv.plans.choice import other_plan, plan_of
from shardconv.plans.match import PlannedModule
from shardconv.plans.resolve import Resolution, resolve

from .group.agreement import agree, exchange, one_call
from .group.ranks import Ranks, ranks_of
from .inputs import compare_next_call
from .layers.attention import make_counts_local, slice_ropes, sum_outputs
from .layers.refusals import check_model, check_plain, mark_sharded
from .layers.registry import makers

_SAMPLE_NBYTES = 4096  # bytes at either end of a parameter by which ranks compare their models


def parallelize(
    model: nn.Module,
    tp: int | None = None,
    plan: Mapping[str, Any] | str | os.PathLike[str] | None = None,
    group: Any = None,
    *,
    lean: bool = False,
    check_inputs: bool = True,
) -> nn.Module:
    """Keep this rank's slices of a model in memory and wrap its modules, as `load_model` does. In place.

    Args:
        model: a diffusers model, the same weights on every rank.
        tp: the degree, if you want it checked; must be the size of the group.
        plan: a plan file, the map it would hold, or `"auto-rows"` as in `convert`; None takes the class's own.
        group: a process group or a one-dimensional device mesh; None for all processes.
        lean: also cut the modulation and embedder projections that the class's own plan leaves whole.
        check_inputs: have the first call compare its inputs across ranks, as `loader.check_inputs` does.

    Returns:
        `model`, in eval mode, its parameters without gradients.

    Raises:
        PlanError, UsageError, LoadError: before anything is changed, on every rank the same; among others when the
            ranks hold different weights, the model is already sharded, quantized, offloaded or has LoRA layers.
    """
    ranks = ranks_of(group)
    with one_call(ranks, "parallelize"):
        resolution = agree(ranks, lambda: _resolve(model, tp, PlanChoice.of(plan, lean), ranks))
        if len(set(exchange(ranks, lambda: _fingerprint(model, resolution)))) > 1:
            raise LoadError(
                f"{type(model).__name__}: the ranks hold different weights, configs or plans, so that their slices "
                "would not fit together; load the same checkpoint on every rank, or seed them alike, and give every "
                "rank one plan"
            )

        def change() -> None:
            if ranks.size > 1:
                _slice_parameters(model, resolution.cuts, ranks)
                apply(model, resolution, ranks)

        agree(ranks, change)
    if check_inputs:
        compare_next_call(model, ranks)
    for text in resolution.warnings:
        warnings.warn(text, ShardconvWarning, stacklevel=2)
    return model.eval().requires_grad_(False)


def _resolve(model: nn.Module, tp: int | None, choice: PlanChoice, ranks: Ranks) -> Resolution:
    if tp is not None and tp != ranks.size:
        raise UsageError(f"tp: expected the size of the group, {ranks.size}, found {tp}; leave tp out")
    check_model(model)
    check_plain(model)
    resolution = resolve(model, plan_of(model, choice, ranks.size), ranks.size, other_plan(model))
    check_layers(model, resolution.modules)
    return resolution


def _fingerprint(model: nn.Module, resolution: Resolution) -> str:
    """Tells two models and plans apart: by config, cuts, and both ends of every parameter and buffer."""
    held: Any = getattr(model, "config", {})
    items = (held if isinstance(held, Mapping) else held.to_dict()).items()
    config = {key: value for key, value in items if not key.startswith("_")}
    digest = xxhash.xxh3_128(repr((sorted(config.items()), resolution.modules)).encode())
    for name, parameter in [*model.named_parameters(), *model.named_buffers()]:
        flat = parameter.detach().reshape(-1)
        num = _SAMPLE_NBYTES // parameter.element_size()
        sample = torch.cat([flat[:num], flat[-num:]]).cpu().view(torch.uint8)
        digest.update(f"{name} {tuple(parameter.shape)} {parameter.dtype}".encode())
        digest.update(sample.numpy().data)
    return digest.hexdigest()


def take_slice(tensor: torch.Tensor, cut: Cut, rank: int, tp: int) -> torch.Tensor:
    """This rank's slice of a whole `tensor`, contiguous and with memory of its own."""
    parts = [tensor.narrow(cut.dim, start, end - start) for start, end in cut.ranges(rank, tp)]
    return torch.cat(parts, dim=cut.dim) if len(parts) > 1 else parts[0].clone(memory_format=torch.contiguous_format)


def _slice_parameters(model: nn.Module, cuts: Mapping[str, tuple[Any, Cut | None]], ranks: Ranks) -> None:
    sliced: dict[int, nn.Parameter] = {}  # by the whole one, so that tied parameters stay one
    done: set[tuple[int, str]] = set()  # a module that stands in two places is cut once
    for name, (_, cut) in cuts.items():
        if cut is None:
            continue
        owner, _, leaf = name.rpartition(".")
        module = model.get_submodule(owner)
        if (id(module), leaf) in done:
            continue
        done.add((id(module), leaf))
        if leaf in buffers_held(module):
            buffers_held(module)[leaf] = take_slice(module.get_buffer(leaf), cut, ranks.rank, ranks.size)
            continue
        whole = module.get_parameter(leaf)
        if id(whole) not in sliced:
            local = take_slice(whole.detach(), cut, ranks.rank, ranks.size)
            sliced[id(whole)] = nn.Parameter(local, requires_grad=False)
        parameters_held(module)[leaf] = sliced[id(whole)]


def check_layers(model: nn.Module, modules: Sequence[PlannedModule]) -> None:
    """Refuse layers whose forward is not one that we know: a runtime module would replace it."""
    for planned in modules:
        layer = model.get_submodule(planned.name)
        kind = type(layer)
        if not _runs_as_its_class(layer):
            raise PlanError(
                f"{planned.name}: its forward was replaced by another; shard the model first, then replace it"
            )
        known = makers(planned.style)
        if kind not in known:
            expected = ", ".join(f"{each.__module__}.{each.__name__}" for each in known)
            if nn.Linear in known:
                expected = "a plain nn.Linear"
            why = "" if planned.style is Style.NORM_ACROSS_HEADS else "; its forward is not known"
            raise PlanError(f"{planned.name}: expected {expected}, found {kind.__name__}{why}")


def _runs_as_its_class(module: nn.Module) -> bool:
    """Hooks that were taken off again leave a `forward` at the module that is its class's own."""
    forward = module.__dict__.get("forward")
    return forward is None or getattr(forward, "__func__", None) is type(module).forward


def apply(model: nn.Module, resolution: Resolution, ranks: Ranks) -> None:
    """Give a model whose parameters are this rank's its runtime modules and what else its class needs. In place."""
    colwise = [module.name for module in resolution.modules if module.style.is_colwise]
    make_counts_local(model, colwise, ranks)
    slice_ropes(model, colwise, ranks)
    sum_outputs(model, resolution.cuts, ranks)
    for planned in resolution.modules:
        layer = model.get_submodule(planned.name)
        layer.__dict__.pop("forward", None)  # would hide that of the runtime module
        makers(planned.style)[type(layer)](layer, planned, ranks)
    mark_sharded(model, ranks)
