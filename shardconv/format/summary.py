"""What a set weighs: bytes by style, by rank, and the share that every rank holds whole."""

from __future__ import annotations

from dataclasses import dataclass

from .dtypes import nbytes_of
from .manifest import Manifest
from .plan import REPLICATED


@dataclass(frozen=True, slots=True)
class StyleBytes:
    """The tensors of one style; those that stay whole are counted as replicated whatever their module's style."""

    style: str
    tensors: int
    nbytes: int  # of the whole tensors, before they are cut
    rank_nbytes: int  # of what one rank holds of them


@dataclass(frozen=True, slots=True)
class Summary:
    """Figures for a person who decides whether a degree is worth it."""

    styles: tuple[StyleBytes, ...]
    dtypes: dict[str, int]  # dtype -> number of tensors
    nbytes: int  # of all tensors, each once
    set_nbytes: int  # of all files of the set
    rank_nbytes: int  # of the tensors that one rank holds in memory
    replicated_nbytes: int  # of which every rank holds whole
    largest_replicated: tuple[tuple[str, int], ...]  # name, bytes

    @property
    def replicated_share(self) -> float:
        """Of all tensor bytes, 0 to 1."""
        return self.replicated_nbytes / self.nbytes if self.nbytes else 0.0


def summarize(manifest: Manifest) -> Summary:
    """The figures of a set, made or only planned."""
    tp = manifest.tp_degree
    rows: dict[str, list[int]] = {}
    dtypes: dict[str, int] = {}
    whole: list[tuple[str, int]] = []
    for tensor in manifest.tensors:
        nbytes, local = nbytes_of(tensor.dtype, tensor.shape), tensor.slice_nbytes(tp)
        style = tensor.style if tensor.cut else REPLICATED
        row = rows.setdefault(style, [0, 0, 0])
        for column, value in enumerate((1, nbytes, local)):
            row[column] += value
        dtypes[tensor.dtype] = dtypes.get(tensor.dtype, 0) + 1
        if not tensor.cut:
            whole.append((tensor.name, nbytes))
    styles = tuple(StyleBytes(style, *row) for style, row in sorted(rows.items(), key=lambda item: -item[1][1]))
    return Summary(
        styles=styles,
        dtypes=dict(sorted(dtypes.items())),
        nbytes=sum(style.nbytes for style in styles),
        set_nbytes=sum(file.nbytes for file in manifest.files),
        rank_nbytes=sum(style.rank_nbytes for style in styles),
        replicated_nbytes=sum(nbytes for _, nbytes in whole),
        largest_replicated=tuple(sorted(whole, key=lambda item: -item[1])[:3]),
    )


def human(nbytes: float) -> str:
    """Decimal units, as disks and the Hub count: 1.64 GB."""
    for unit in ("B", "kB", "MB", "GB"):
        text = f"{nbytes:.0f}" if unit == "B" or abs(nbytes) >= 99.95 else f"{nbytes:.3g}"
        if abs(float(text)) < 1000:  # as it is printed, or 999.6 MB would be 1000 MB
            return f"{text} {unit}"
        nbytes /= 1000
    return f"{nbytes:,.0f} TB" if abs(nbytes) >= 99.95 else f"{nbytes:.3g} TB"
