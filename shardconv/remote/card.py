"""The model card of a repo with sets: a new one, or our section in one that is there. Text in, text out."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from ..format.summary import human

BEGIN = "<!-- shardconv: begin -->"
END = "<!-- shardconv: end -->"
TAGS = ["shardconv", "tensor-parallel", "diffusers"]
_CARRIED = ("license", "license_name", "license_link", "language", "pipeline_tag")


@dataclass(frozen=True, slots=True)
class SetRow:
    """One set of the repo."""

    component: str  # "" at the root
    degree: int
    nbytes: int  # of its weight files
    rank_nbytes: int  # of what one rank fetches


def updated(card: str, section: str) -> str:
    """`card` with our section between its markers, added at the end where there are none."""
    if BEGIN in card and END in card:
        head, _, rest = card.partition(BEGIN)
        return head + section + rest.partition(END)[2]
    return f"{card.rstrip()}\n\n{section}\n"


def section(repo: str, rows: Sequence[SetRow], is_pipeline: bool) -> str:
    """What there is to fetch, and how to load it."""
    table = [
        f"| {row.component or '(root)'} | {row.degree} | {human(row.nbytes)} | {human(row.rank_nbytes)} |"
        for row in sorted(rows, key=lambda row: (row.component, row.degree))
    ]
    if is_pipeline:
        call = f'pipe = loader.load_pipeline("{repo}", dtype=torch.bfloat16)'
    else:
        component = rows[0].component
        inside = f', subfolder="{component}"' if component else ""
        call = f'model = loader.load_model("{repo}"{inside})'
    lines = [
        BEGIN,
        "## Pre-sharded for tensor parallelism",
        "",
        "Each rank downloads and loads its own file and the one that all ranks share, nothing else.",
        "",
        "| component | tp degree | all files | one rank |",
        "|---|---|---|---|",
        *table,
        "",
        "```python",
        "import loader, torch, torch.distributed as dist  # torchrun --nproc-per-node N",
        "",
        "dist.init_process_group()",
        call,
        "```",
        END,
    ]
    return "\n".join(lines)


def metadata(base_model: str | None, source: Mapping[str, Any]) -> dict[str, Any]:
    """Front matter of a new card; licence and gating are those of the source's card.

    The Hub has no relation for the same weights in another layout. "quantized" is where it lists other formats of a
    model; without a relation it would say "finetune", which is less true.
    """
    carried = {key: source[key] for key in source if key in _CARRIED or key.startswith("extra_gated_")}
    base = {"base_model": base_model, "base_model_relation": "quantized"} if base_model else {}
    return {"library_name": "shardconv", "tags": TAGS, **base, **carried}


def new(front_matter: str, repo: str, base_model: str | None, cast_to: str | None, section: str) -> str:
    """A whole card."""
    title = re.sub(r"[^/]*/", "", repo)
    of = f"[{base_model}](https://huggingface.co/{base_model})" if base_model else "a diffusers model"
    kind = f"its weights cast to {cast_to}" if cast_to else "the same weights, bit for bit"
    return (
        f"{front_matter}\n# {title}\n\n{of}, {kind}, cut for tensor parallelism by shardconv. `shardconv merge` puts "
        f"the parts back together.\n\n{section}\n"
    )
