"""What we use of torch that it does not promise, or names otherwise in other versions."""

from __future__ import annotations

from typing import Any

import pytest
import ranks
import torch
import torch.distributed as dist
from contracts import Name, found
from torch import nn

AGREEMENT, RING = "loader/group/agreement.py", "loader/transfer/ring.py"
RANKS, READ, SKELETON = "loader/group/ranks.py", "loader/transfer/read.py", "shardconv/libraries/skeleton.py"
DOOR = "shardconv/libraries/torch_private.py"
NAMES = [
    Name("torch.distributed.distributed_c10d._world.pg_map", DOOR),
    Name("torch.distributed.DistError", AGREEMENT),
    *(Name(f"torch.distributed.Store.{name}", AGREEMENT) for name in ("add", "check", "compare_set", "get", "set")),
    Name("torch.ops._c10d_functional.all_reduce", DOOR, ("input", "reduce_op", "group_name")),
    Name("torch.ops._c10d_functional.all_reduce_", DOOR, ("input", "reduce_op", "group_name")),
    Name("torch.ops._c10d_functional.wait_tensor", DOOR, ("tensor",)),
    Name("torch.nn.Conv2d._conv_forward", DOOR, ("input", "weight", "bias")),
    Name("torch.compiler.is_compiling", DOOR),
    Name("torch.nn.Module.register_parameter", DOOR, ("name", "param")),
    Name("torch.set_default_dtype", SKELETON),
    Name("torch.accelerator.is_available", RANKS),
    Name("torch.accelerator.device_count", RANKS),
    Name("torch.accelerator.set_device_index", RANKS),
    Name("torch.accelerator.set_stream", RING),
    Name("torch.accelerator.synchronize", READ),
    Name("torch.Stream.record_event", RING),
    Name("torch.Event.synchronize", RING),
    Name("torch.utils.hooks.RemovableHandle", "loader/inputs.py"),
]


@pytest.mark.parametrize("name", NAMES, ids=str)
def test_each_name_stands(name: Name) -> None:
    """The name is there, takes what we pass, and is used where the table says."""
    name.check()


def test_every_name_of_a_parameter_goes_through_register_parameter(monkeypatch: pytest.MonkeyPatch) -> None:
    """Skeletons (shardconv/libraries/torch_private.py) see every parameter of a module by replacing this one method."""
    seen = []
    register = nn.Module.register_parameter
    monkeypatch.setattr(
        nn.Module, "register_parameter", lambda module, name, param: (seen.append(name), register(module, name, param))
    )
    layers = nn.ModuleList([nn.Linear(2, 2), nn.Conv2d(2, 2, 1), nn.RMSNorm(2), nn.LayerNorm(2), nn.Embedding(2, 2)])
    expected = [name.rpartition(".")[2] for name, _ in layers.named_parameters()]
    assert sorted(seen) == sorted(expected), "nn.Module.register_parameter: parameters no longer go through it"
    seen.clear()
    layers[0].extra = nn.Parameter(torch.zeros(2))
    assert seen == ["extra"], "nn.Module.__setattr__ no longer calls register_parameter"


def test_what_a_module_holds_is_in_three_dicts() -> None:
    """`_parameters`, `_buffers` and `_modules` hold what a module has, None included, and writing there is seen: plans,
    loader/layers/attach.py and loader/parallel.py read and write them."""
    module = nn.Module()
    module.register_buffer("table", torch.zeros(1))
    module.child, module.weight = nn.Linear(1, 1, bias=False), nn.Parameter(torch.zeros(1))
    for name, held in (("_parameters", {"weight"}), ("_buffers", {"table"}), ("_modules", {"child"})):
        assert vars(module)[name].keys() == held, f"nn.Module.{name} no longer holds what it did"
    assert module.child._parameters["bias"] is None, "nn.Module._parameters: a bias left out is no None any more"
    module._parameters["weight"] = other = nn.Parameter(torch.ones(1))
    module._buffers["table"] = table = torch.ones(1)
    assert module.weight is other, "nn.Module._parameters: writing there is not seen any more"
    assert module.table is table, "nn.Module._buffers: writing there is not seen any more"


@pytest.mark.parametrize("layer", [nn.Linear(2, 2), nn.Conv2d(2, 2, 1), nn.RMSNorm(2), nn.LayerNorm(2)], ids=str)
def test_a_layer_may_become_of_another_class(layer: nn.Module) -> None:
    """loader/layers/linear.py and norms.py turn layers into ours by `__class__` and `__dict__`; parameters stay."""
    held, kind = dict(layer.named_parameters()), type(layer)
    layer.__class__ = type("Ours", (kind,), {"forward": lambda self, x: self.group_name})
    layer.__dict__.update(group_name="g")
    assert layer(torch.zeros(1)) == "g", f"{kind.__name__}.__class__ and __dict__ cannot be changed any more"
    assert all(dict(layer.named_parameters())[name] is held[name] for name in held)


@pytest.mark.slow
def test_a_compiled_model_tells_itself() -> None:
    """loader/layers/refusals.py knows what torch.compile wrapped by `_orig_mod`."""
    layer = nn.Linear(1, 1)
    assert getattr(torch.compile(layer), "_orig_mod", None) is layer, "torch.compile(model)._orig_mod is gone"


def store_and_sum() -> tuple[Any, ...]:
    """What one rank finds of the store that its group stands on, and of a sum in place."""
    group, partial = dist.group.WORLD, torch.ones(2) * (1 + dist.get_rank())
    store = found("torch.distributed.distributed_c10d._world", AGREEMENT).pg_map[group][1]
    store.set(f"contract {dist.get_rank()}", "here")
    reduced = torch.ops._c10d_functional.all_reduce_(partial, "sum", group.group_name)
    summed = torch.ops._c10d_functional.wait_tensor(reduced)
    found_of_other = store.get(f"contract {1 - dist.get_rank()}").decode()
    return found_of_other, store.check(["contract nobody"]), summed.tolist(), summed.data_ptr() == partial.data_ptr()


@pytest.mark.slow
def test_a_group_s_store_and_its_sums() -> None:
    """The store of a group is one that all its ranks see, and `all_reduce_` sums in place, by the group's name."""
    for told in ranks.values(store_and_sum):
        assert told == ("here", False, [3.0, 3.0], True), "distributed_c10d._world.pg_map or _c10d_functional changed"
