"""Checkpoint folders on disk: read whole or not at all, written whole or not at all."""

import json
import os
import pathlib
import shutil
import tempfile

import torch
from safetensors import safe_open
from safetensors.torch import save_file

from .config import CheckpointError

MASK_EMBEDDING = "mask_embedding.pt"  # a side file of some z-lab drafters: replaces the mask token's embedding


def read_checkpoint(path) -> tuple[dict, dict[str, torch.Tensor], torch.Tensor | None]:
    """config.json, tensors and the mask embedding ([H] or None) of a checkpoint folder.

    Raises:
        FileNotFoundError: there is no folder, config or safetensors file.
        CheckpointError: config.json or the index of shards is no such JSON, or a shard or the mask embedding is unreadable.
    """
    folder = pathlib.Path(path)
    if not folder.is_dir():
        raise FileNotFoundError(f"from_pretrained: path is {folder}, must be a folder with config.json and model.safetensors")
    if not (folder / "config.json").is_file():
        raise FileNotFoundError(f"from_pretrained: {folder} has no config.json, must have one")
    try:
        source = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    except ValueError as error:
        raise CheckpointError(f"config.json is not JSON ({error}), must be") from None
    tensors, twice = {}, None
    for name in _weight_files(folder):
        try:
            with safe_open(folder / name, "pt") as file:
                for key in file.keys():
                    twice = twice or (key if key in tensors else None)
                    tensors[key] = file.get_tensor(key)
        except Exception as error:  # safetensors raises its own, unexported kind for a damaged file
            raise CheckpointError(f"checkpoint: {name} can't be read ({error}), must be a whole safetensors file") from None
    if twice is not None:
        raise CheckpointError(f"checkpoint: tensor {twice} is in two files, must be in one")
    mask_embedding = None
    if (folder / MASK_EMBEDDING).is_file():
        try:
            mask_embedding = torch.load(folder / MASK_EMBEDDING, weights_only=True)
        except Exception as error:  # the unpickler raises whatever it stumbles over
            reason = (str(error).strip() or type(error).__name__).splitlines()[0]
            raise CheckpointError(f"{MASK_EMBEDDING} can't be read ({reason}), must be a tensor that torch.save wrote") from None
        if not isinstance(mask_embedding, torch.Tensor) or not mask_embedding.is_floating_point():
            kind = getattr(mask_embedding, "dtype", type(mask_embedding).__name__)
            raise CheckpointError(f"{MASK_EMBEDDING} holds {kind}, must hold a tensor of floats")
    return source, tensors, mask_embedding


def _weight_files(folder: pathlib.Path) -> list[str]:
    index = folder / "model.safetensors.index.json"
    if index.is_file():
        names = sorted(_shards(folder))
    else:
        names = ["model.safetensors"]
    for name in names:
        if not (folder / name).is_file():
            raise FileNotFoundError(f"from_pretrained: {folder} has no {name}, must have it (weights are read from safetensors alone)")
    return names


def check_folder(path, caller: str = "save_pretrained", name: str = "path") -> pathlib.Path:
    """The folder that ``path`` names, links followed, if a checkpoint may be written there.

    Raises:
        FileExistsError: it is a file, the current folder, or a folder that holds something other than a checkpoint.
    """
    folder = pathlib.Path(path).resolve()  # a link keeps pointing at the checkpoint: what it points to is replaced
    if folder.is_dir() and folder.samefile("."):
        raise FileExistsError(f"{caller}: {name} is {folder}, the current folder, must be another: a folder is replaced whole")
    if folder.exists() and not folder.is_dir():
        raise FileExistsError(f"{caller}: {name} is the file {folder}, must be a folder or new")
    if folder.is_dir() and any(folder.iterdir()) and not (folder / "config.json").is_file():
        raise FileExistsError(f"{caller}: {name} is {folder}, a folder that holds something else, must be a checkpoint, empty or new")
    return folder


def write_checkpoint(path, source: dict, tensors: dict[str, torch.Tensor], mask_embedding: torch.Tensor | None = None) -> None:
    """Write a checkpoint folder so that ``path`` is at every moment the old one, the new one or (for one rename) absent, never half of one.

    All is written to a temporary folder beside ``path`` that takes its name at the end. Files of an old checkpoint that aren't its
    config or weights (a README, a tokenizer) move along; the old folder is removed last.

    Raises:
        FileExistsError: ``path`` is a file, or a folder that holds something other than a checkpoint; nothing was written.
    """
    folder = check_folder(path)
    folder.parent.mkdir(parents=True, exist_ok=True)
    fresh = pathlib.Path(tempfile.mkdtemp(prefix=f".{folder.name}.new.", dir=folder.parent))
    try:
        if folder.is_dir():
            replaced = {"config.json", "model.safetensors", "model.safetensors.index.json", MASK_EMBEDDING, *_shards(folder)}
            for item in folder.iterdir():
                if item.name not in replaced:
                    (shutil.copytree if item.is_dir() else shutil.copy2)(item, fresh / item.name)
        (fresh / "config.json").write_text(json.dumps(source, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")
        # Clones: packed projections are views of one storage, which safetensors refuses.
        save_file({name: tensor.detach().cpu().clone() for name, tensor in tensors.items()}, fresh / "model.safetensors", {"format": "pt"})
        if mask_embedding is not None:
            torch.save(mask_embedding.detach().cpu().clone(), fresh / MASK_EMBEDDING)
        os.chmod(fresh, 0o755)
        _swap(fresh, folder)
    except BaseException:
        shutil.rmtree(fresh, ignore_errors=True)
        raise


def _swap(fresh: pathlib.Path, folder: pathlib.Path) -> None:
    if not folder.exists():
        os.rename(fresh, folder)
        return
    old = folder.parent / f"{fresh.name}.old"
    os.rename(folder, old)
    try:
        os.rename(fresh, folder)
    except BaseException:
        os.rename(old, folder)
        raise
    shutil.rmtree(old)


def _shards(folder: pathlib.Path) -> set[str]:
    index = folder / "model.safetensors.index.json"
    if not index.is_file():
        return set()
    try:
        shards = set(json.loads(index.read_text(encoding="utf-8"))["weight_map"].values())
    except (ValueError, TypeError, KeyError, AttributeError):
        shards = {None}
    if not all(isinstance(name, str) and pathlib.Path(name).name == name for name in shards):
        raise CheckpointError(f"checkpoint: {index.name} is damaged, must hold weight_map: the file of each tensor, in the same folder")
    return shards
