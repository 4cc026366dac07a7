"""Released models by their real configurations, on the meta device: degrees, bytes, refusals that name the cause."""

from __future__ import annotations

import functools
from pathlib import Path
from typing import Any

import pytest

from shardconv.cli.plans import as_cells
from shardconv.commands.plans import row_of
from shardconv.errors import PlanError
from shardconv.libraries import skeleton as skeletons
from shardconv.libraries.choose import model_class
from shardconv.plans.catalogue.released import RELEASED
from shardconv.plans.choice import class_plan
from shardconv.plans.resolve import degrees_of, resolve

CLASSES = Path(__file__).parents[3] / "docs" / "classes.md"

# What divides the heads, the kv heads and the widths of each, worked out by hand.
DEGREES = {
    "FLUX.1-dev": [2, 3, 4, 6, 8], "FLUX.2-dev": [2, 3, 4, 6, 8], "Qwen-Image": [2, 3, 4, 6, 8],
    "Wan2.1-T2V-14B": [2, 4, 8], "Wan2.1-T2V-1.3B": [2, 4], "Wan2.1-I2V-14B": [2, 4, 8], "Wan2.2-TI2V-5B": [2, 4, 8],
    "Wan2.1-VACE-14B": [2, 4, 8], "Wan2.2-Animate-14B": [2, 4, 8], "SkyReels-V2-14B": [2, 4, 8],
    "HunyuanVideo": [2, 3, 4, 6, 8], "HunyuanVideo-1.5": [2, 4, 8], "HunyuanImage-2.1": [2, 4, 7],
    "HunyuanDiT-v1.2": [2, 4, 8], "LTX-Video-2B": [2, 4, 8], "LTX-Video-13B": [2, 4, 8], "LTX-2-19B": [2, 4, 8],
    "CogVideoX-5b": [2, 3, 4, 6, 8], "CogVideoX-2b": [2, 3, 5, 6], "CogView4-6B": [2, 4, 8],
    "stable-diffusion-3.5-large": [2], "stable-diffusion-3.5-medium": [2, 3, 4, 6, 8], "AuraFlow": [2, 4],
    "Chroma1-HD": [2, 3, 4, 6, 8], "Z-Image": [2, 5], "Lumina-Image-2.0": [2, 4, 8], "Lumina-Next-SFT": [2, 4, 8],
    "HiDream-I1-Full": [2, 4], "mochi-1-preview": [2, 4, 8], "Cosmos-1.0-14B": [2, 4, 5, 8], "Sana-1.6B": [2, 5],
    "PixArt-Sigma-XL": [2, 4, 8], "OmniGen-v1": [2, 4, 8], "EasyAnimateV5.1-12b": [2, 3, 4, 6, 8],
    "Latte-1": [2, 4, 8], "FLUX.1 T5-XXL": [2, 4, 8], "Wan UMT5-XXL": [2, 4, 8],
}  # fmt: skip


@functools.cache
def skeleton(name: str) -> Any:
    """The model without its weights."""
    released = RELEASED[name]
    return skeletons.skeleton(model_class(released.model_class), released.config)


pytestmark = pytest.mark.filterwarnings("ignore::FutureWarning")


@pytest.mark.slow
@pytest.mark.parametrize("name", RELEASED)
def test_degrees_and_sizes(name: str) -> None:
    """The config is the released one by its number of parameters; the degrees are those that divide everything; a rank
    holds its share of what is cut and all of the rest. docs/classes.md says so of the first model of each class."""
    model = skeleton(name)
    parameters = sum(parameter.numel() for parameter in model.parameters())
    assert parameters / 1e9 == pytest.approx(RELEASED[name].parameters, abs=0.006)
    assert degrees_of(model, class_plan(model), 8) == [1, *DEGREES[name]]
    row = row_of(model)
    assert row.nbytes == 2 * parameters
    whole = row.replicated_share * row.nbytes
    assert row.rank_nbytes == pytest.approx(whole + (row.nbytes - whole) / DEGREES[name][-1], rel=1e-6)
    if RELEASED[name] is next(each for each in RELEASED.values() if each.model_class == RELEASED[name].model_class):
        assert as_cells(row) in CLASSES.read_text(encoding="utf-8").splitlines()


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "tp", "said"),
    [
        ("stable-diffusion-3.5-large", 4, "config.json num_attention_heads: 38 heads, not divisible by tp degree 4"),
        ("Lumina-Image-2.0", 3, "config.json num_kv_heads: 8 heads, not divisible by tp degree 3"),
        ("Lumina-Next-SFT", 16, "config.json num_kv_heads: 8 heads, not divisible by tp degree 16"),
        ("Z-Image", 4, "noise_refiner.0.attention.heads: 30 heads, not divisible by tp degree 4"),
        ("Sana-1.6B", 7, "transformer_blocks.0.attn2.heads: 20 heads, not divisible by tp degree 7"),
        ("mochi-1-preview", 3, "transformer_blocks.0.ff.net.0.proj.weight: dim 0 is packed in blocks [8192, 8192], "
         "block 0 is 8192, not divisible by tp degree 3"),
    ],
)  # fmt: skip
def test_a_forbidden_degree_is_refused_by_name(name: str, tp: int, said: str) -> None:
    """Heads, kv heads, heads of one attention only, or a block: the message names what stands in the way."""
    model = skeleton(name)
    with pytest.raises(PlanError) as caught:
        resolve(model, class_plan(model), tp)
    allowed = ", ".join(map(str, degrees_of(model, class_plan(model))))
    assert any(issue.startswith(f"{said}; use {allowed}") for issue in caught.value.issues)


@pytest.mark.slow
@pytest.mark.parametrize(("name", "plain", "lean"), [("Qwen-Image", 17.1, 6.0), ("FLUX.1-dev", 8.7, 3.5)])
def test_lean_saves_what_it_promises(name: str, plain: float, lean: float) -> None:
    """At tp 8 and 2 bytes a parameter, in GB: what a rank holds with the class's own plan, and at most with `lean`."""
    row = row_of(skeleton(name))
    assert row.degrees[-1] == 8
    assert row.rank_nbytes / 1e9 == pytest.approx(plain, abs=0.05)
    assert row.lean_rank_nbytes / 1e9 <= lean


def test_there_are_enough_of_them() -> None:
    """Every released model has its degrees here, twenty at least."""
    assert set(DEGREES) == set(RELEASED)
    assert len(RELEASED) >= 20
