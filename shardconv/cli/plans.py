"""`shardconv plans`."""

from __future__ import annotations

import argparse
from collections.abc import Sequence

from ..commands.plans import Row, added_classes, encoder_classes, plan_of, released_models, rows
from ..errors import UsageError
from ..format.summary import human
from .output import report, report_json

NAME = "plans"
HELP = "list the classes that can be sharded, or print the plan of one"
DESCRIPTION = """List every class with a plan: the tp degrees up to 8 that it allows, what stays replicated and what a
rank holds at the largest degree, of a released model at 2 bytes a parameter. With CLASS print its plan as a plan file;
CLASS may be a component folder, the plan is the one for its config then."""
EXAMPLE = """example:
  $ shardconv plans
  $ shardconv plans WanTransformer3DModel              # a plan file: change it, then shardconv check ... --plan
  $ shardconv plans HiDream-I1-Full/transformer        # for the config in this folder
"""

LETTERS = {
    "local head counts": "H", "norms across heads": "N", "rope tables cut": "E", "bare parameters": "P",
    "convolutions": "K",
}  # fmt: skip
PAGE_HEAD = """# Classes

`shardconv plans --markdown` prints this page.

diffusers 0.42.1 has 75 transformer classes and gives four of them a `_tp_plan`. The catalogue adds {added}, and
{encoders} text encoders of transformers 5.24.0: {total} in all, each converted, loaded and run on 2 and on 4 CPU ranks
and equal to its unsharded model (fp32, within 1e-5 of the largest output; measured at most 1.6e-06), norms' weights and
biases randomised. What a config changes (activations, norms, optional layers) is read from the model that it builds,
and some 240 more configs that differ in structure are run likewise: equal, or refused by name.

Sizes are at 2 bytes a parameter, of a released model where one was typed in
([`released.py`](../shardconv/plans/catalogue/released.py), {released} models), else of the class's defaults. A rank's
bytes are at the largest degree listed; a dash says that `--lean` has nothing to add. [Plans](plans.md) says what
`--lean` does.

The last column says what the loader does beside sharding layers: **H** head counts become local, **N** norms across
heads (statistics are summed over ranks), **E** rope tables over all heads are cut, **P** bare parameters are cut
(experts: their output is summed), **K** convolutions are cut.

| class | tp degrees up to 8 | whole | replicated | a rank | replicated, `--lean` | a rank, `--lean` | needs |
|---|---|--:|--:|--:|--:|--:|---|
"""
PAGE_TAIL = """
SanaTransformer2DModel needs N as well where the config has `rms_norm_across_heads`.

In every denoiser these stay replicated: patch and token embeddings, `lm_head`; ConsisID's facial extractor,
Wan-Animate's face and motion encoders, HunyuanDiT's text pool.

## Left out

`--plan auto-rows` takes every one of these whose `Linear`s divide.

- SanaWMTransformer3DModel: gated-delta attention with per-head decay and gate parameters, fused projections, temporal
  convolutions and norms over the model width would each need a rule of their own; 2.7B, so auto-rows will do.
- StableAudioDiTModel, MiniMaxMusic3RVQDepthDecoder: about 1B parameters and below, they fit one GPU.
- DiTTransformer2DModel, Transformer2DModel, TransformerTemporalModel, PriorTransformer, T5FilmDecoder: old, small,
  mostly parts of other models.
- DreamLiteTransformer2DModel: a small U-shaped model built of Transformer2D blocks.
- RFD4ProteinaTransformer: protein structures, attention with a pair bias for each head.
- EasyAnimateTransformer3DModel with `mmdit_layers < num_layers` and MotifVideoTransformer3DModel with
  `enable_text_cross_attention_single`: refused by name, because a block hands its attention output on before the
  projection that would sum it.

[Development](development.md#a-class) says how to add a class."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The flags of this verb."""
    parser.add_argument(
        "model_class", nargs="?", metavar="CLASS", help="print the plan of this class, or of the model in this folder"
    )
    form = parser.add_mutually_exclusive_group()
    form.add_argument("--json", action="store_true", help="print one JSON document instead of text")
    form.add_argument("--markdown", action="store_true", help="print the list as the page docs/classes.md")


def run(args: argparse.Namespace) -> None:
    """List, or print one."""
    if args.model_class and args.markdown:
        raise UsageError("--markdown: prints the page of all classes; leave CLASS out")
    if args.model_class:
        report_json(plan_of(args.model_class))
    elif args.markdown:
        report(as_page(list(rows())))
    elif args.json:
        report_json([_as_json(row) for row in rows()])
    else:
        report(f"{'class':<40}{'degrees':<11}{'whole':>8}{'repl.':>6}{'rank':>8}{'--lean':>7}{'rank':>8}  needs")
        for row in rows():
            report(_as_text(row))


def _as_json(row: Row) -> dict[str, object]:
    return {
        "model_class": row.model_class,
        "degrees": list(row.degrees),
        "nbytes": row.nbytes,
        "rank_nbytes": row.rank_nbytes,
        "replicated_share": round(row.replicated_share, 4),
        "lean_rank_nbytes": row.lean_rank_nbytes,
        "lean_replicated_share": round(row.lean_replicated_share, 4),
        "needs": list(row.needs),
    }


def as_page(listed: Sequence[Row]) -> str:
    """The page docs/classes.md, in Markdown."""
    head = PAGE_HEAD.format(
        added=added_classes(), total=len(listed), encoders=encoder_classes(), released=released_models()
    )
    return head + "\n".join(map(as_cells, listed)) + "\n" + PAGE_TAIL


def as_cells(row: Row) -> str:
    """The line of that page for one class."""
    plain = [f"{row.replicated_share:.0%}", human(row.rank_nbytes)]
    lean = [f"{row.lean_replicated_share:.0%}", human(row.lean_rank_nbytes)]
    needs = " ".join(LETTERS[word] for word in row.needs) or "-"
    cells = [row.model_class, _degrees(row), human(row.nbytes), *plain, *(["-", "-"] if lean == plain else lean), needs]
    return f"| {' | '.join(cells)} |"


def _degrees(row: Row) -> str:
    return ",".join(str(tp) for tp in row.degrees if tp > 1)


def _as_text(row: Row) -> str:
    plain = f"{row.replicated_share:>6.0%}{human(row.rank_nbytes):>8}"
    lean = f"{row.lean_replicated_share:>7.0%}{human(row.lean_rank_nbytes):>8}"
    return f"{row.model_class:<40}{_degrees(row):<11}{human(row.nbytes):>8}{plain}{lean}  {', '.join(row.needs)}"
