"""A model on disk: a folder of config.json and model.safetensors. Nothing is pickled, and no half-written file is left behind.

A tensor that several layers share is stored once, under the first of its names.
"""

import os
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TypeVar

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from anyformer.errors import SpecError

CONFIG, WEIGHTS = "config.json", "model.safetensors"
Model = TypeVar("Model", bound=nn.Module)


def owners(model: nn.Module) -> dict[str, str]:
    """Every name of the state dict, with the first name of the same tensor."""
    first: dict[int, str] = {}
    state = model.state_dict(keep_vars=True)
    return {name: first.setdefault(id(tensor), name) for name, tensor in state.items()}


def write(folder: Path, config: str, model: nn.Module, is_config: Callable[[str], bool]) -> None:
    """Write the configuration and the weights of a model; at every moment the folder holds a whole model or lacks its weights.

    Args:
        config: the JSON of its configuration.
        is_config: whether a text is such JSON, so that another program's config.json is never overwritten.

    Raises:
        SpecError: the folder is a file, cannot be made or written to, or holds a config.json of something else; or the weights are
            on the meta device.
    """
    names = owners(model)
    tensors = {name: tensor for name, tensor in model.state_dict().items() if names[name] == name}
    if any(tensor.is_meta for tensor in tensors.values()):
        raise SpecError(
            "save_pretrained: the model is on the meta device and has no weights; load or initialise them first"
        )
    if folder.exists() and not folder.is_dir():
        raise SpecError(f"save_pretrained: expected a folder, got the file {folder}")
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise SpecError(
            f"save_pretrained: cannot make the folder {folder}: {error.strerror}; give one you may write to"
        ) from None
    old = _text(folder / CONFIG) if (folder / CONFIG).exists() else None
    if old is not None and not is_config(old):
        raise SpecError(
            f"save_pretrained: {folder / CONFIG} belongs to something else and is not overwritten; choose another folder"
        )
    try:
        weights = _draft(folder / WEIGHTS, lambda path: save_file(_packed(tensors), path, metadata={"format": "pt"}))
    except SafetensorError as error:
        raise SpecError(
            f"save_pretrained: cannot write into {folder}: {error}; give a folder you may write to"
        ) from None
    try:
        if old != config:
            (folder / WEIGHTS).unlink(missing_ok=True)  # never the old weights under the new configuration
            draft = _draft(folder / CONFIG, lambda path: path.write_text(config, encoding="utf-8"))
            os.replace(draft, folder / CONFIG)
        os.replace(weights, folder / WEIGHTS)
    finally:
        weights.unlink(missing_ok=True)


def load(folder: Path, build: Callable[[str], Model], device: torch.device | str, dtype: torch.dtype | None) -> Model:
    """The model that `write` wrote, in eval mode.

    Args:
        build: makes a model of the JSON of its configuration.

    Raises:
        FileNotFoundError: the folder or one of its two files is missing.
        SpecError: a file is of another version or damaged, or the two do not fit.
    """
    config = read_config(folder)
    with torch.device("meta"):
        model = build(config)
    model.load_state_dict(read_weights(folder, model), assign=True)
    return model.to(device=device, dtype=dtype).eval()


def read_config(folder: Path) -> str:
    """The text of a folder's config.json.

    Raises:
        FileNotFoundError: there is no such folder or file.
    """
    if not folder.is_dir():
        raise FileNotFoundError(f"from_pretrained: there is no folder {folder}; save_pretrained makes one")
    return _text(_present(folder, CONFIG))


def read_weights(folder: Path, model: nn.Module) -> dict[str, Tensor]:
    """The state dict for `model` from a folder's weights, each shared tensor under all its names.

    Raises:
        FileNotFoundError: there is no such file.
        SpecError: the file is no safetensors file, or its names or shapes are not those of the model.
    """
    path = _present(folder, WEIGHTS)
    try:
        found = load_file(path)
    except SafetensorError as error:
        raise SpecError(f"{path} is no whole safetensors file: {error}") from None
    names, shapes = owners(model), {name: tuple(each.shape) for name, each in model.state_dict().items()}
    _match(path, found, {name: shapes[name] for name in dict.fromkeys(names.values())})
    return {name: found[owner].clone() for name, owner in names.items()}  # the file stays mapped behind a loaded tensor


def _match(path: Path, found: Mapping[str, Tensor], expected: Mapping[str, tuple[int, ...]]) -> None:
    missing = [name for name in expected if name not in found]
    extra = [name for name in found if name not in expected]
    other = [
        f"{name} has shape {list(found[name].shape)}, expected {list(shape)}"
        for name, shape in expected.items()
        if name in found and tuple(found[name].shape) != shape
    ]
    faults = [
        f"{what} {_some(which)}" for what, which in (("it lacks", missing), ("it also holds", extra)) if which
    ] + other[:3]
    if faults:
        raise SpecError(f"{path} does not fit {CONFIG} beside it: {'; '.join(faults)}")


def _some(names: list[str]) -> str:
    return ", ".join(names[:3]) + (f" and {len(names) - 3} more" if len(names) > 3 else "")


def _packed(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    return {name: tensor.detach().contiguous() for name, tensor in tensors.items()}


def _draft(path: Path, fill: Callable[[Path], object]) -> Path:
    """A complete file beside `path`, on disk, ready to be renamed to it."""
    draft = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        fill(draft)
        with draft.open("rb") as file:
            os.fsync(file.fileno())
    except BaseException:
        draft.unlink(missing_ok=True)
        raise
    return draft


def _present(folder: Path, name: str) -> Path:
    if not (folder / name).is_file():
        raise FileNotFoundError(
            f"from_pretrained: {folder} holds no {name}; save_pretrained writes {CONFIG} and {WEIGHTS}"
        )
    return folder / name


def _text(path: Path) -> str:
    return path.read_text(encoding="utf-8", errors="replace")
