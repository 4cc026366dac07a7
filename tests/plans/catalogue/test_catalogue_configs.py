"""Every class of the catalogue by every config that changes a layout: equal to the unsharded model, or refused by name.

Ordinarily the first config of each structure is run, under the class's own plan. `SHARDCONV_SWEEP=all` runs every
config, lean and under auto-rows too, in about ten minutes.
"""

from __future__ import annotations

import functools
import os
import re
from pathlib import Path
from typing import Any

import diffusers
import pytest
import ranks
import torch

import shardconv
from shardconv.errors import PlanError
from shardconv.format.plan import Rule, Style
from shardconv.plans.catalogue import ENTRIES, cases
from shardconv.plans.choice import class_plan
from shardconv.plans.resolve import resolve

pytestmark = [
    pytest.mark.filterwarnings("ignore:flex_attention called without torch.compile"),
    pytest.mark.filterwarnings("ignore:In CPU autocast"),
]

ALL = os.environ.get("SHARDCONV_SWEEP") == "all"
TOLERANCE = 1e-5  # of the largest output, fp32
NAMES = sorted(ENTRIES.keys() & set(dir(diffusers)))
COMPARED = 180  # configs at least that diffusers 0.42.1 runs unsharded and that differ in structure

# What cannot be sharded, by a key that makes it so.
REFUSED = {
    ("EasyAnimateTransformer3DModel", "mmdit_layers"): "a block without text layers of its own hands attention output",
    ("MotifVideoTransformer3DModel", "enable_text_cross_attention_single"): "single blocks with text cross-attention",
}


@functools.cache
def outcomes() -> dict[tuple[str, str, int, str], float | str]:
    """What ranks found of each config: the largest difference, or why there is none."""
    import sweep_ranks

    ways = ("own", "lean", "auto-rows") if ALL else ("own",)
    shares = ranks.values(sweep_ranks.sweep, NAMES, ways, ALL, group=False, timeout=3600 if ALL else 300)
    return shares[0] | shares[1]


def is_right(name: str, changed: str, tp: int, way: str, outcome: float | str) -> bool:
    """Whether the output is the unsharded one, or the config is refused for a reason that holds."""
    if isinstance(outcome, float):
        return outcome <= TOLERANCE
    known = (said for (cls, key), said in REFUSED.items() if cls == name and key in changed)
    if way != "auto-rows" and any(said in outcome for said in known):
        return True
    # every number that is said not to be divisible is none that the degree divides
    counts = re.findall(r"(?:: |is |\[.*\], block \d+ is )(\d+)(?: heads)?, not divisible by tp degree", outcome)
    return outcome.startswith("refused: ") and bool(counts) and all(int(count) % tp for count in counts)


@pytest.mark.slow
@pytest.mark.parametrize("tp", [2, 4])
def test_every_config_is_equal_or_refused(tp: int) -> None:
    """Sharded as the model that the config builds asks for, the output is the unsharded one; or a sentence says why the
    config cannot be sharded. None is quietly wrong, and none refused for another reason."""
    wrong = {key: outcome for key, outcome in outcomes().items() if key[2] == tp and not is_right(*key, outcome)}
    assert wrong == {}
    assert len({key[:2] for key in outcomes()}) >= COMPARED


def build(name: str, **changed: Any) -> Any:
    """The small case of a class with some keys changed."""
    return cases.build(name, {**cases.CASES[name].config, **changed})


class Interleaved(torch.nn.Module):
    """A gated activation as diffusers has none: gate and up take turns, so that halves would pair the wrong ones."""

    def __init__(self, features: int, given: int) -> None:
        super().__init__()
        self.proj = torch.nn.Linear(features, given)


def test_a_feed_forward_that_no_test_has_proved_is_refused() -> None:
    """An activation that the catalogue does not know is refused by name, whatever it gives, and so is a known one that
    gives another number of parts."""
    model = build("PixArtTransformer2DModel")
    features, taken = 32, 128
    known = type(model.transformer_blocks[1].ff.net[0])
    for activation, given in ((Interleaved, 2 * taken), (Interleaved, taken), (known, 3 * taken)):
        model.transformer_blocks[1].ff.net[0] = activation(features, given)
        with pytest.raises(PlanError, match=rf"blocks.1.ff.net.0.proj: {activation.__name__} gives {given} features"):
            class_plan(model)


def test_a_plan_file_does_not_get_round_a_refusal() -> None:
    """The plan of another config of the class, given for one that cannot have it, is refused with the same reason; a
    plan that leaves the part whole is taken."""
    name = "MotifVideoTransformer3DModel"
    plan = class_plan(build(name))
    model = build(name, enable_text_cross_attention_single=True)
    with pytest.raises(
        PlanError, match=r"single_transformer_blocks.0: single blocks with text cross-attention feed it"
    ):
        resolve(model, plan, 2)
    assert resolve(model, {key: rule for key, rule in plan.items() if not key.startswith("single_")}, 2).warnings == ()


def test_a_norm_that_states_no_width_is_judged_by_its_class() -> None:
    """Sana normalizes queries and keys before it splits heads: a plan that leaves such a norm out is refused, although
    the norm has neither weight nor width. Elsewhere nobody can tell, and a plan that has it across heads is refused."""
    model = build("SanaTransformer2DModel", qk_norm="l2")
    plan = class_plan(model)
    norms = {key for key, rule in plan.items() if rule.style is Style.NORM_ACROSS_HEADS}
    assert norms == {f"transformer_blocks.*.attn{i}.norm_{x}" for i in (1, 2) for x in "qk"}
    with pytest.raises(PlanError, match=r"attn1.norm_q: a norm across all heads of a sharded projection"):
        resolve(model, {key: rule for key, rule in plan.items() if key not in norms}, 2)
    sd3 = build("SD3Transformer2DModel")
    sd3.transformer_blocks[0].attn.norm_q = type(model.transformer_blocks[0].attn1.norm_q)()
    rule = {"transformer_blocks.0.attn.norm_q": Rule(Style.NORM_ACROSS_HEADS)}
    with pytest.raises(PlanError, match=r"attn.norm_q: does not say how wide it is"):
        resolve(sd3, {**class_plan(sd3), **rule}, 2)


@pytest.mark.slow
def test_a_set_of_another_config_s_plan_says_so_when_it_is_loaded(tmp_path: Path) -> None:
    """A set that was converted while the class's plan held for one config only still loads, with a warning on every
    rank that names the fused layer."""
    import catalogue_ranks

    name = "LTXVideoTransformer3DModel"
    plan = class_plan(build(name))
    build(name, activation_fn="geglu").save_pretrained(tmp_path / "in")
    with pytest.warns(shardconv.ShardconvWarning, match="fused layer"):
        shardconv.convert(tmp_path / "in", tmp_path / "old", tp=2, plan=plan)
    shardconv.convert(tmp_path / "in", tmp_path / "new", tp=2)
    for told in ranks.values(catalogue_ranks.warnings_of_loading, tmp_path / "old"):
        assert any("ff.net.0.proj: a fused layer cut as colwise" in text for text in told)
    assert ranks.values(catalogue_ranks.warnings_of_loading, tmp_path / "new") == [[], []]
