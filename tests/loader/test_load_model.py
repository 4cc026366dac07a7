"""What `load_model` and `parallelize` hand back: tensors, buffers, memory, dtypes, ties and refusals."""

from __future__ import annotations

import gc
import re
import sys
import types
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest import mock

import diffusers
import pytest
import ranks
import small_sets
import torch
import torch.distributed as dist
from diffusers.configuration_utils import ConfigMixin, register_to_config
from safetensors.torch import load_file, save_file
from torch import nn

import loader
import shardconv
from shardconv.format.manifest import Manifest
from shardconv.plans.catalogue import small_models

SMALL = small_sets.planned(*small_models.NAMES)
ALL = small_sets.NAMES
BF16 = torch.bfloat16
MB = 1 << 20


def cls_of(name: str) -> Any:
    return type(small_sets.build(name))


def pretrained(name: str, dtype: torch.dtype | None = None) -> Any:
    """The unsharded model as diffusers loads it."""
    return cls_of(name).from_pretrained(small_sets.source(name), torch_dtype=dtype)


def tables_of(model: nn.Module) -> dict[str, torch.Tensor]:
    """Tensors of a model that no checkpoint holds: non-persistent buffers and plain attributes."""
    stored = set(model.state_dict())
    tables = {name: buffer for name, buffer in model.named_buffers() if name not in stored}
    for path, module in model.named_modules():
        plain = {key: value for key, value in vars(module).items() if isinstance(value, torch.Tensor)}
        tables |= {f"{path}.{key}": value for key, value in plain.items()}
    return tables


# --- tensors ---


def describe(path: Path, dtype: torch.dtype | None) -> dict[str, Any]:
    """Facts about a loaded model that every rank must show."""
    model = loader.load_model(path, device="cpu", dtype=dtype)
    tensors = {**dict(model.named_parameters()), **dict(model.named_buffers()), **tables_of(model)}
    return {
        "meta": [name for name, tensor in tensors.items() if tensor.is_meta],
        "training": [name for name, module in model.named_modules() if module.training],
        "requires_grad": [name for name, parameter in model.named_parameters() if parameter.requires_grad],
        "plain": all(type(parameter) is nn.Parameter for parameter in model.parameters()),
        "storages": {n: (p.untyped_storage().nbytes(), p.nbytes) for n, p in model.named_parameters()},
        "contiguous": all(parameter.is_contiguous() for parameter in model.parameters()),
        "tables": tables_of(model),
        "state_dict": list(model.state_dict()),
        "dtypes": {name: parameter.dtype for name, parameter in model.named_parameters()},
        "config": dict(model.config),
    }


@pytest.mark.slow
@pytest.mark.parametrize("dtype", [None, BF16], ids=["stored", "bf16"])
@pytest.mark.parametrize("name", ALL)
def test_a_loaded_model_is_whole_and_ready_for_inference(name, dtype):
    """Nothing on meta, eval mode, no gradients, plain tensors that own exactly their bytes, diffusers' own names."""
    unsharded = pretrained(name, dtype or torch.float32)
    for facts in ranks.values(describe, small_sets.converted(name, 2), dtype):
        assert (facts["meta"], facts["training"], facts["requires_grad"]) == ([], [], [])
        assert facts["plain"]
        assert facts["contiguous"]
        assert {owned - own for owned, own in facts["storages"].values()} == {0}
        assert facts["state_dict"] == list(unsharded.state_dict())
        assert facts["dtypes"] == {key: value.dtype for key, value in unsharded.named_parameters()}
        differing = {key for key, value in facts["config"].items() if unsharded.config.get(key) != value}
        assert differing == {"_name_or_path"}


@pytest.mark.slow
@pytest.mark.parametrize("dtype", [torch.float32, BF16])
@pytest.mark.parametrize("name", small_sets.planned("qwenimage", "qwenimage21"))
def test_tables_equal_those_of_from_pretrained(name, dtype):
    """Rope tables that no file holds (a complex buffer, plain attributes) are those of `from_pretrained`, dtype too."""
    expected = tables_of(pretrained(name, dtype))
    assert expected
    for facts in ranks.values(describe, small_sets.converted(name, 2), dtype):
        assert set(facts["tables"]) == set(expected)
        for key, table in expected.items():
            assert facts["tables"][key].dtype is table.dtype
            assert torch.equal(facts["tables"][key], table)


@pytest.mark.parametrize("name", small_sets.planned("qwenimage", "qwenimage21"))
def test_tables_of_a_bf16_set_are_those_of_a_bf16_model(name):
    """A set stored in bf16, loaded without a dtype, has the tables of `from_pretrained(torch_dtype=bfloat16)`."""
    expected = tables_of(pretrained(name, BF16))
    found = tables_of(loader.load_model(small_sets.converted(name, 1, dtype="bf16"), device="cpu"))
    assert {key: value.dtype for key, value in found.items()} == {key: value.dtype for key, value in expected.items()}
    assert all(torch.equal(found[key], expected[key]) for key in expected)


def parameters_of(path: Path) -> dict[str, torch.Tensor]:
    return {key: value.detach().clone() for key, value in loader.load_model(path, device="cpu").named_parameters()}


@pytest.mark.slow
@pytest.mark.parametrize("name", ["flux2", "minimax"])
def test_slices_put_together_are_the_checkpoint(name):
    """By the cuts of the manifest, the ranks' parameters together are the source's, bit for bit."""
    tp = 4
    manifest = Manifest.read(small_sets.converted(name, tp) / f"tp{tp}")
    held = ranks.values(parameters_of, small_sets.converted(name, tp), n=tp)
    whole = load_file(next(small_sets.source(name).glob("*.safetensors")))
    for tensor in manifest.tensors:
        if tensor.cut is None:
            assert all(torch.equal(each[tensor.name], whole[tensor.name]) for each in held)
            continue
        rebuilt = torch.empty(tensor.shape)
        for rank in range(tp):
            position = 0
            for start, end in tensor.cut.ranges(rank, tp):
                part = held[rank][tensor.name].narrow(tensor.cut.dim, position, end - start)
                rebuilt.narrow(tensor.cut.dim, start, end - start).copy_(part)
                position += end - start
        assert torch.equal(rebuilt, whole[tensor.name])


# --- memory and files ---


def own_memory() -> int:
    """Bytes of memory that are this process's own and no page of a file."""
    return _kb(Path("/proc/self/status").read_text(), "RssAnon:") << 10


def mapped_memory(folder: Path) -> dict[str, int]:
    """Name of each file below `folder` that is mapped -> bytes of it that have been touched."""
    found: dict[str, int] = {}
    for block in re.split(r"\n(?=[0-9a-f]+-[0-9a-f]+ )", Path("/proc/self/smaps").read_text()):
        path = block.splitlines()[0].split(maxsplit=5)[-1]
        if path.startswith(str(folder)):
            found[Path(path).name] = found.get(Path(path).name, 0) + (_kb(block, "Rss:") << 10)
    return found


def _kb(text: str, label: str) -> int:
    return next(int(line.split()[1]) for line in text.splitlines() if line.startswith(label))


class Wide(diffusers.ModelMixin, ConfigMixin):
    """Two large `Linear` layers and a large replicated one: 48 MB in all, 16 MB each."""

    _tp_plan = {"up": "colwise", "down": "rowwise"}  # noqa: RUF012 (as diffusers declares it)

    @register_to_config
    def __init__(self, width: int = 2048) -> None:
        super().__init__()
        self.up = nn.Linear(width, width, bias=False)
        self.down = nn.Linear(width, width, bias=False)
        self.whole = nn.Linear(width, width, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.whole(self.down(torch.relu(self.up(x))))


class Tied(diffusers.ModelMixin, ConfigMixin):
    """An output head tied to an embedding, and two planned layers tied to each other."""

    _tp_plan = {"up": "colwise", "up_too": "colwise", "down": "rowwise"}  # noqa: RUF012

    @register_to_config
    def __init__(self, width: int = 16) -> None:
        super().__init__()
        self.embed = nn.Embedding(10, width)
        self.up = nn.Linear(width, 32)
        self.up_too = nn.Linear(width, 32)
        self.down = nn.Linear(32, width)
        self.head = nn.Linear(width, 10, bias=False)
        self.up_too.weight = self.up.weight
        self.head.weight = self.embed.weight

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.embed(tokens)
        return self.head(self.down(self.up(x) * self.up_too(x)))


class Kept(diffusers.ModelMixin, ConfigMixin):
    """A layer that stays in fp32 whatever is asked for, and one whose name only contains the kept one's."""

    _tp_plan = {"up": "colwise", "down": "rowwise"}  # noqa: RUF012
    _keep_in_fp32_modules = ["norm", "down"]  # noqa: RUF012

    @register_to_config
    def __init__(self, width: int = 16) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.norm_too = nn.LayerNorm(width)
        self.up = nn.Linear(width, width)
        self.down = nn.Linear(width, width)
        self.register_buffer("steps", torch.arange(4))
        self.register_buffer("scale", torch.ones(width))


def random(cls: type[nn.Module], seed: int = 8) -> Any:
    model = cls().eval()
    small_models.randomize(model, seed)
    return model


class Tables(diffusers.ModelMixin, ConfigMixin):
    """Tables of the dtype that the model is built in, of a fixed one, and a stored one."""

    _tp_plan = {"up": "colwise", "down": "rowwise"}  # noqa: RUF012

    @register_to_config
    def __init__(self, width: int = 16) -> None:
        super().__init__()
        self.up = nn.Linear(width, width)
        self.down = nn.Linear(width, width)
        self.plain = torch.linspace(0, 1, width)
        self.register_buffer("angles", torch.linspace(0, 3, width), persistent=False)
        self.register_buffer("fixed", torch.linspace(0, 3, width, dtype=torch.float32), persistent=False)
        self.register_buffer("stored", torch.linspace(0, 5, width))


@pytest.fixture
def toy(tmp_path, monkeypatch) -> Callable[..., tuple[nn.Module, Path]]:
    """`toy(cls, tp)`: a random model of a class of this module, which diffusers gets to know, and its converted set."""

    def make(cls: type[nn.Module], tp: int, **options: Any) -> tuple[nn.Module, Path]:
        monkeypatch.setattr(diffusers, cls.__name__, cls, raising=False)
        model = random(cls)
        model.save_config(tmp_path / "source")
        held = {id(parameter): name for name, parameter in model.named_parameters()}  # of tied names the first
        stored = {name: tensor for name, tensor in model.state_dict(keep_vars=True).items()
                  if held.get(id(tensor), name) == name}  # fmt: skip
        save_file(stored, tmp_path / "source" / "diffusion_pytorch_model.safetensors", {"format": "pt"})
        shardconv.convert(tmp_path / "source", tmp_path / "out", tp=tp, **options)
        return model, tmp_path / "out"

    return make


def known(cls: type[nn.Module]) -> Any:
    """On a rank: makes diffusers know a class of this module."""
    return mock.patch.object(diffusers, cls.__name__, cls, create=True)


def load_wide(out: Path) -> dict[str, Any]:
    before = own_memory()
    with known(Wide), mock.patch("builtins.open", side_effect=open) as opened:
        model = loader.load_model(out, device="cpu")
    loaded, mapped = own_memory() - before, mapped_memory(out)
    with torch.inference_mode():
        model(torch.ones(4, 2048))
    return {
        "opened": {Path(call.args[0]).name for call in opened.call_args_list if str(out) in str(call.args[0])},
        "loaded": loaded,
        "mapped": mapped,
        "used": own_memory() - before,
        "touched": mapped_memory(out),
    }


@pytest.mark.slow
def test_a_rank_maps_its_own_files_and_copies_nothing(toy):
    """On the CPU a rank opens and maps its own file and the shared one, reads no weights and never copies them (G2)."""
    _, out = toy(Wide, 4)
    for rank, found in enumerate(ranks.values(load_wide, out, n=4)):
        own = {f"rank-{rank:05d}-of-00004.safetensors", "replicated.safetensors"}
        assert found["opened"] == set(found["mapped"]) == own
        assert max(found["mapped"].values()) <= MB  # touched by loading, of 24 MB
        assert sum(found["touched"].values()) >= 24 * MB  # by a forward pass: all of it
        assert max(found["loaded"], found["used"]) <= 8 * MB


def write_to_parameters(path: Path) -> bool:
    model = loader.load_model(path, device="cpu")
    for parameter in model.parameters():
        parameter.data.fill_(7)
    with torch.no_grad():
        next(model.parameters()).add_(1)
    return all(torch.all(parameter.data >= 7) for parameter in model.parameters())


@pytest.mark.slow
def test_writing_to_a_parameter_leaves_the_files_alone(tmp_path):
    """The mapping is private: in-place changes on one rank reach neither the file nor a later load."""
    out = small_sets.copied(small_sets.converted("qwenimage", 2), tmp_path / "out")
    before = {path: path.read_bytes() for path in out.rglob("*") if path.is_file()}
    assert ranks.values(write_to_parameters, out) == [True, True]
    assert {path: path.read_bytes() for path in out.rglob("*") if path.is_file()} == before


def test_a_set_replaced_while_loaded_leaves_the_loaded_model_alone(toy):
    """`--overwrite` swaps folders, so a model that mapped the old files keeps its weights."""
    _, out = toy(Kept, 1)
    model = loader.load_model(out, device="cpu")
    source = random(Kept, 9)
    source.save_pretrained(out.parent / "other")
    before = {key: value.clone() for key, value in model.state_dict().items()}
    shardconv.convert(out.parent / "other", out, tp=1, overwrite=True)
    assert all(torch.equal(value, before[key]) for key, value in model.state_dict().items())
    assert torch.equal(loader.load_model(out, device="cpu").up.weight, source.up.weight)


def load_and_drop(path: Path) -> bool:
    model = loader.load_model(path, device="cpu")
    alive = weakref.ref(model)
    gc.disable()
    del model
    return alive() is None


@pytest.mark.slow
def test_a_dropped_model_is_freed_at_once():
    """A sharded model is in no reference cycle, so that `del model` frees its memory without the collector."""
    plain = pretrained("qwenimage")
    alive = weakref.ref(plain)
    gc.collect()
    gc.disable()
    try:
        del plain
        assert alive() is None  # as diffusers' own models are
    finally:
        gc.enable()
    assert ranks.values(load_and_drop, small_sets.converted("qwenimage", 2)) == [True, True]


# --- where the set is ---


@pytest.mark.parametrize("where", ["component", "set", "subfolder", "str", "cwd-of-set", "cwd-of-component"])
def test_every_way_to_name_a_set_loads_it(where, monkeypatch):
    """The component folder, the set's own folder, an output folder with subfolder, as Path or str, also relative."""
    out = small_sets.converted("qwenimage", 1)
    monkeypatch.chdir(out / "tp1" if where == "cwd-of-set" else out)
    path, subfolder = {
        "component": (out, None),
        "set": (out / "tp1", None),
        "subfolder": (out.parent, out.name),
        "str": (str(out), None),
        "cwd-of-set": (".", None),
        "cwd-of-component": (".", None),
    }[where]
    model = loader.load_model(path, subfolder=subfolder, device="cpu")
    assert torch.equal(model.proj_out.weight, small_models.build("qwenimage").proj_out.weight)


def test_several_degrees_stand_side_by_side(tmp_path):
    """Of several sets in one folder the one for this group is taken."""
    out = tmp_path / "out"
    for tp in (1, 2, 4):
        shardconv.convert(small_sets.source("qwenimage"), out, tp=tp)
    assert loader.load_model(out, device="cpu").transformer_blocks[0].attn.to_q.weight.shape[0] == 128


# --- ties and dtypes ---


def load_tied(out: Path, tokens: torch.Tensor) -> dict[str, Any]:
    with known(Tied):
        return describe_tied(loader.load_model(out, device="cpu"), tokens)


def parallelize_tied(out: Path, tokens: torch.Tensor) -> dict[str, Any]:
    return describe_tied(loader.parallelize(random(Tied)), tokens)


def describe_tied(model: Any, tokens: torch.Tensor) -> dict[str, Any]:
    with torch.inference_mode():
        output = model(tokens)
    return {
        "head": model.head.weight is model.embed.weight,
        "planned": model.up.weight is model.up_too.weight,
        "shape": tuple(model.up.weight.shape),
        "output": output,
    }


@pytest.mark.slow
@pytest.mark.parametrize("way", ["load_model", "parallelize"])
def test_k1_tied_parameters_stay_tied(way, toy):
    """Names of one parameter are one parameter after loading, whole or cut, although one name only is stored (K1)."""
    model, out = toy(Tied, 2)
    aliases = Manifest.read(out / "tp2").aliases
    assert {frozenset(pair) for pair in aliases.items()} == {
        frozenset({"embed.weight", "head.weight"}),
        frozenset({"up.weight", "up_too.weight"}),
    }
    tokens = torch.arange(10).reshape(2, 5)
    with torch.inference_mode():
        expected = model(tokens)
    for found in ranks.values(load_tied if way == "load_model" else parallelize_tied, out, tokens):
        assert (found["head"], found["planned"], found["shape"]) == (True, True, (16, 16))
        assert small_sets.difference([found["output"]], [expected]) <= 1e-5


def load_kept(out: Path) -> dict[str, Any]:
    with known(Kept):
        model = loader.load_model(out, device="cpu", dtype=BF16)
    return {name: (tensor.dtype, tensor.clone()) for name, tensor in model.state_dict().items()}


@pytest.mark.slow
def test_d1_a_cast_leaves_fp32_modules_and_integers_alone(toy):
    """`dtype=` leaves `_keep_in_fp32_modules` (whole name parts) and integers as `from_pretrained` does (D1)."""
    _, out = toy(Kept, 2)
    expected = Kept.from_pretrained(out.parent / "source", torch_dtype=BF16).state_dict()
    assert {expected[name].dtype for name in ("norm.weight", "down.weight", "down.bias")} == {torch.float32}
    for found in ranks.values(load_kept, out):
        assert {name: dtype for name, (dtype, _) in found.items()} == {n: t.dtype for n, t in expected.items()}
        for name in ("norm.weight", "norm_too.bias", "down.bias", "steps", "scale"):
            assert torch.equal(found[name][1], expected[name])


def test_bare_float8_is_cast_on_loading(toy):
    """Weights stored as 8-bit floats without scales load in the dtype asked for, to what torch's cast gives, and the
    model runs; without one they stay as they are stored."""
    _, out = toy(Kept, 1)
    file = next((out.parent / "source").glob("*.safetensors"))
    stored = {name: tensor.to(torch.float8_e4m3fn) if tensor.is_floating_point() else tensor
              for name, tensor in load_file(file).items()}  # fmt: skip
    save_file(stored, file, {"format": "pt"})
    shardconv.convert(out.parent / "source", out.parent / "small", tp=1)
    loaded = loader.load_model(out.parent / "small", device="cpu", dtype=BF16)
    for name, tensor in loaded.state_dict().items():
        kept = name.split(".")[0] in ("norm", "down")
        expected = stored[name]
        if expected.is_floating_point():
            expected = expected.to(torch.float32 if kept else BF16)
        assert (tensor.dtype, torch.equal(tensor, expected)) == (expected.dtype, True), name
    plain = loader.load_model(out.parent / "small", device="cpu").state_dict()
    assert {name: tensor.dtype for name, tensor in plain.items()} == {name: t.dtype for name, t in stored.items()}


@pytest.mark.parametrize("way", ["cast", "stored"])
def test_tables_are_computed_in_the_dtype_of_the_model(way, toy):
    """Buffers whose dtype follows the one a model is built in are those of `from_pretrained`, cast or stored so."""
    _, out = toy(Tables, 1, **({"dtype": "bf16"} if way == "stored" else {}))
    loaded = loader.load_model(out, device="cpu", dtype=BF16 if way == "cast" else None)
    expected = Tables.from_pretrained(out.parent / "source", torch_dtype=BF16)
    assert expected.angles.dtype is expected.plain.dtype is BF16
    for name in ("plain", "angles", "fixed", "stored"):
        assert getattr(loaded, name).dtype is getattr(expected, name).dtype, name
        assert torch.equal(getattr(loaded, name), getattr(expected, name))


# --- torch.compile ---


def compile_block(path: Path, name: str) -> tuple[int, list[torch.Tensor], list[torch.Tensor]]:
    """Number of graphs when a whole block is compiled, and the model's output compiled and eager."""
    from torch._dynamo.testing import CompileCounterWithBackend

    model = loader.load_model(path, device="cpu")
    eager = small_sets.outputs(model, name)
    counter = CompileCounterWithBackend("aot_eager")  # as far as a compiler goes before it generates code
    block = model.transformer_blocks[0]
    block.forward = torch.compile(block.forward, fullgraph=True, backend=counter)
    compiled = small_sets.outputs(model, name)
    return counter.frame_count, compiled, eager


@pytest.mark.slow
@pytest.mark.parametrize("name", small_sets.planned("flux2", "qwenimage21"))
def test_a_block_compiles_as_one_graph(name):
    """A sharded block is traced by torch.compile without a break, collectives included, and gives the same."""
    for graphs, compiled, eager in ranks.values(compile_block, small_sets.converted(name, 2), name):
        assert graphs == 1
        assert small_sets.difference(compiled, eager) <= 1e-6


# --- what a sharded model refuses ---


def fake_peft() -> dict[str, types.ModuleType]:
    """The modules of peft that diffusers imports, with nothing behind them."""
    names = ("peft", "peft.tuners", "peft.tuners.tuners_utils", "peft.utils")
    modules = {name: types.ModuleType(name) for name in names}
    modules["peft"].inject_adapter_in_model = mock.Mock()
    modules["peft"].set_peft_model_state_dict = mock.Mock()
    modules["peft"].PeftConfig = types.SimpleNamespace
    modules["peft.tuners.tuners_utils"].BaseTunerLayer = type("BaseTunerLayer", (), {})
    return modules


def refusals_of(path: Path, target: Path) -> dict[str, tuple[str, str]]:
    """Method -> (exception, its text), for everything that must not be done to a sharded model."""
    from diffusers import TensorParallelConfig
    from diffusers.loaders import peft as diffusers_peft

    model = loader.load_model(path, device="cpu")
    calls: dict[str, Callable[[], Any]] = {
        "save_pretrained": lambda: model.save_pretrained(target),
        "enable_group_offload": lambda: model.enable_group_offload(torch.device("cpu"), offload_type="leaf_level"),
        "enable_parallelism": lambda: model.enable_parallelism(config=TensorParallelConfig(tp_degree=2)),
        "load_lora_adapter": lambda: model.load_lora_adapter({}, prefix=None),
        "add_adapter": lambda: model.add_adapter(types.SimpleNamespace()),
    }
    refusals = {}
    available = mock.patch.multiple(
        diffusers_peft, is_peft_available=lambda: True, check_peft_version=lambda min_version: None
    )
    with mock.patch.dict(sys.modules, fake_peft()), available:
        for name, call in calls.items():
            try:
                call()
            except Exception as error:  # the test says which are right
                refusals[name] = (type(error).__name__, str(error))
    return refusals


@pytest.mark.slow
@pytest.mark.parametrize(
    ("method", "kind"),
    [
        ("save_pretrained", "NotImplementedError"),
        ("enable_group_offload", "ValueError"),
        ("enable_parallelism", "RuntimeError"),
        ("load_lora_adapter", "ValueError"),
        ("add_adapter", "ValueError"),
    ],
)
def test_c14_f9_f13_diffusers_refusals_fire_and_name_the_way_out(method, kind, refusals):
    """Saving, offloading, sharding again and LoRA fail on a sharded model and say how to get an ordinary one."""
    for found in refusals:
        error, text = found[method]
        assert error == kind
        assert "arallel" in text  # "sharded with tensor parallelism", "Parallelism is already applied"
        assert "shardconv merge" in text


@pytest.fixture(scope="module")
def refusals(tmp_path_factory) -> list[dict[str, tuple[str, str]]]:
    target = tmp_path_factory.mktemp("refused") / "saved"
    found = ranks.values(refusals_of, small_sets.converted("flux", 2), target)
    assert not target.exists()
    return found


def save_in_one_line(path: Path, target: Path) -> None:
    loader.load_model(path, device="cpu").save_pretrained(target)


@pytest.mark.slow
def test_f13_a_refusal_does_not_need_the_model_any_more(tmp_path):
    """A method of a model that nobody else holds is refused in the same words: the model is gone before the call."""
    for outcome in ranks.run(save_in_one_line, small_sets.converted("qwenimage", 2), tmp_path / "saved"):
        assert outcome.error == "NotImplementedError", outcome.trace
        assert "shardconv merge" in outcome.text


# --- what `parallelize` refuses ---


def spoiled_by_lora(model: Any) -> None:
    layer = nn.Module()
    layer.base_layer = model.transformer_blocks[0].attn.to_q
    model.transformer_blocks[0].attn.to_q = layer


def spoiled_by_offloading(model: Any) -> None:
    model.enable_group_offload(torch.device("cpu"), offload_type="leaf_level")


def spoiled_by_accelerate(model: Any) -> None:
    import accelerate

    accelerate.cpu_offload(model, execution_device=torch.device("cpu"))


def spoiled_by_a_quantizer(model: Any) -> None:
    model.hf_quantizer = object()


def spoiled_by_meta(model: Any) -> None:
    model.to("meta")


def spoiled_by_another_linear(model: Any) -> None:
    class Own(nn.Linear):
        pass

    model.transformer_blocks[0].attn.to_q.__class__ = Own


def spoiled_by_parallelize(model: Any) -> None:
    loader.parallelize(model)


def spoiled_by_other_weights_on_rank_1(model: Any) -> None:
    if dist.get_rank() == 1:
        small_models.randomize(model, 99)


def spoiled_by_another_replica_on_rank_1(model: Any) -> None:
    if dist.get_rank() == 1:
        model.transformer_blocks[1].attn.norm_k.weight.data[0] += 1


def parallelize_spoiled(spoil: Callable[[Any], None], options: dict[str, Any]) -> None:
    model = small_models.build("qwenimage")
    spoil(model)
    before = {name: (type(module), id(module)) for name, module in model.named_modules()}
    shapes = {name: tuple(parameter.shape) for name, parameter in model.named_parameters()}
    try:
        loader.parallelize(model, **options)
    finally:
        assert before == {name: (type(module), id(module)) for name, module in model.named_modules()}
        assert shapes == {name: tuple(parameter.shape) for name, parameter in model.named_parameters()}


def nothing(model: Any) -> None:
    pass


@pytest.mark.slow
@pytest.mark.parametrize(
    ("spoil", "options", "text"),
    [
        (spoiled_by_parallelize, {}, "is sharded already; load it afresh"),
        (spoiled_by_lora, {}, "to_q is a LoRA layer; fuse or unload the adapter first (fuse_lora)"),
        (spoiled_by_offloading, {}, "carries an offload hook; load it without offloading"),
        (spoiled_by_accelerate, {}, "carries an offload hook; load it without offloading"),
        (spoiled_by_a_quantizer, {}, "is quantized, quantized weights cannot be cut; load it unquantized"),
        (spoiled_by_meta, {}, "is on the meta device; load the weights first"),
        (spoiled_by_another_linear, {}, "expected a plain nn.Linear, found Own"),
        (spoiled_by_other_weights_on_rank_1, {}, "the ranks hold different weights"),
        (spoiled_by_another_replica_on_rank_1, {}, "the ranks hold different weights"),
        (nothing, {"tp": 4}, "tp: expected the size of the group, 2, found 4; leave tp out"),
        (nothing, {"plan": {}}, "the plan is empty, so nothing would be sharded"),
        (nothing, {"plan": {"nowhere": "colwise"}}, "plan key 'nowhere': matches nothing"),
        (nothing, {"plan": "no/such/plan.json"}, "no/such/plan.json: cannot read the plan file"),
    ],
    ids=lambda value: getattr(value, "__name__", None),
)
def test_c14_f9_parallelize_refuses_and_leaves_the_model_alone(spoil, options, text):
    """A model that cannot be cut is refused with the same words on every rank, and nothing about it has changed."""
    outcome = ranks.same(ranks.run(parallelize_spoiled, spoil, options))
    assert outcome.error == "LoadError"
    assert text in outcome.text


def test_parallelize_for_one_rank_changes_nothing_but_the_mode():
    """Alone, `parallelize` checks the plan and returns the model, in eval mode and without gradients."""
    model = small_models.build("qwenimage").train()
    linears = sum(type(module) is nn.Linear for module in model.modules())
    assert loader.parallelize(model, tp=1) is model
    assert sum(type(module) is nn.Linear for module in model.modules()) == linears
    assert not model.training
    assert not any(parameter.requires_grad for parameter in model.parameters())
