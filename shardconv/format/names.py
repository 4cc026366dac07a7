"""Every file and folder name of the format, and of what stands around it."""

from __future__ import annotations

import re
from pathlib import Path

MODEL_INDEX = "model_index.json"  # of a pipeline
CONFIG_NAME = "config.json"  # of a component
WEIGHTS_STEM = "diffusion_pytorch_model"
WEIGHTS_STEMS = (WEIGHTS_STEM, "model")  # of diffusers' and of transformers' components
MANIFEST_NAME = "shardconv.json"  # of a converted set
REPLICATED_FILE = "replicated.safetensors"  # of a converted set
LORA_FILE = "pytorch_lora_weights.safetensors"
PICKLE_SUFFIXES = (".bin", ".pt", ".pth", ".ckpt", ".pkl")
JOURNAL_NAME = "progress.jsonl"  # what a folder under construction says about itself

_SET_FOLDER = re.compile(r"tp([1-9][0-9]{0,5})")
_RANK_FILE = re.compile(r"rank-\d{5,}-of-\d{5,}\.safetensors")


def set_folder_name(tp: int) -> str:
    """Sets of several degrees stand side by side in one component folder."""
    return f"tp{tp}"


def degree_of(name: str) -> int | None:
    """The tp degree of a set's folder, as `set_folder_name` names it; None for any other name, such as tp04."""
    found = _SET_FOLDER.fullmatch(name)
    return int(found[1]) if found else None


def is_set_file(name: str) -> bool:
    """Whether a file name is one that a set consists of."""
    return name in (MANIFEST_NAME, REPLICATED_FILE) or bool(_RANK_FILE.fullmatch(name))


def is_hidden(name: str) -> bool:
    """Whether a file is one that systems and editors leave beside others (`.DS_Store`, `.nfs0001`, `.x.swp`): it is no
    part of a set, and nobody's fault."""
    return name.startswith(".")


def unfinished_name(tp: int) -> str:
    """The file in an output folder that says that the pipeline for this tp degree is not complete in it."""
    return f".{set_folder_name(tp)}.unfinished"


def unfinished_degree(name: str) -> int | None:
    """The tp degree that a file of that name speaks of; None for any other file."""
    return degree_of(name.removeprefix(".").removesuffix(".unfinished")) if name.endswith(".unfinished") else None


def partial_folder(folder: Path) -> Path:
    """Where `folder` is written before it gets its name."""
    return folder.with_name(f".{folder.name}.partial")


def degree_wanted(name: str) -> int | None:
    """The tp degree that the folder of a set, finished or not, is for."""
    is_partial = name.startswith(".") and name.endswith(".partial")
    return degree_of(name[1 : -len(".partial")] if is_partial else name)


def aside_folder(folder: Path) -> Path:
    """Where `folder` goes while another one takes its place on a system that cannot exchange two."""
    return folder.with_name(f".{folder.name}.shardconv-old")


def rank_file_name(rank: int, tp: int) -> str:
    """Never matches diffusers' own weight pattern, which its `save_pretrained` cleans up."""
    return f"rank-{rank:05d}-of-{tp:05d}.safetensors"
