"""Any attention x any position encoding, compared honestly on quality, speed and memory.

Names resolve on first use, so that importing the package costs little more than importing torch.
"""

from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from anyformer.classify.cnn import CNNClassifier as CNNClassifier
    from anyformer.classify.fasttext import FastTextClassifier as FastTextClassifier
    from anyformer.classify.lstm import LSTMClassifier as LSTMClassifier
    from anyformer.classify.transformer import TransformerClassifier as TransformerClassifier
    from anyformer.context import Context as Context
    from anyformer.context import LayerCache as LayerCache
    from anyformer.errors import IncompatibleError as IncompatibleError
    from anyformer.errors import SpecError as SpecError
    from anyformer.errors import TaskError as TaskError
    from anyformer.forms import Form as Form
    from anyformer.forms import Verdict as Verdict
    from anyformer.functional import attend as attend
    from anyformer.functional import attend_with_lse as attend_with_lse
    from anyformer.model.build import MultiHead as MultiHead
    from anyformer.model.build import build_attention as build_attention
    from anyformer.model.build import build_mixer as build_mixer
    from anyformer.model.build import build_position as build_position
    from anyformer.model.build import check as check
    from anyformer.model.config import ModelConfig as ModelConfig
    from anyformer.model.extend import carried as carried
    from anyformer.model.extend import extend as extend
    from anyformer.model.transfer import WarmStart as WarmStart
    from anyformer.model.transfer import warm_start as warm_start
    from anyformer.model.transformer import Transformer as Transformer
    from anyformer.model.vit import Vit as Vit
    from anyformer.model.vit_config import VitConfig as VitConfig
    from anyformer.pattern.leaves import Block as Block
    from anyformer.pattern.leaves import Causal as Causal
    from anyformer.pattern.leaves import Columns as Columns
    from anyformer.pattern.leaves import Dilated as Dilated
    from anyformer.pattern.leaves import Flagged as Flagged
    from anyformer.pattern.leaves import Full as Full
    from anyformer.pattern.leaves import Global as Global
    from anyformer.pattern.leaves import Local as Local
    from anyformer.pattern.leaves import PerHead as PerHead
    from anyformer.pattern.leaves import PerLayer as PerLayer
    from anyformer.pattern.leaves import Random as Random
    from anyformer.pattern.leaves import RandomBlocks as RandomBlocks
    from anyformer.pattern.leaves import Strided as Strided
    from anyformer.registry import describe as describe
    from anyformer.registry import list_methods as list_methods
    from anyformer.registry import register as register
    from anyformer.side import grid as grid
    from anyformer.site import Site as Site
    from anyformer.spec import Spec as Spec

__version__ = "0.1.0.dev0"

_HOMES = {
    "anyformer.classify.cnn": ("CNNClassifier",),
    "anyformer.classify.fasttext": ("FastTextClassifier",),
    "anyformer.classify.lstm": ("LSTMClassifier",),
    "anyformer.classify.transformer": ("TransformerClassifier",),
    "anyformer.context": ("Context", "LayerCache"),
    "anyformer.errors": ("IncompatibleError", "SpecError", "TaskError"),
    "anyformer.forms": ("Form", "Verdict"),
    "anyformer.functional": ("attend", "attend_with_lse"),
    "anyformer.model.build": ("MultiHead", "build_attention", "build_mixer", "build_position", "check"),
    "anyformer.model.config": ("ModelConfig",),
    "anyformer.model.extend": ("carried", "extend"),
    "anyformer.model.transfer": ("WarmStart", "warm_start"),
    "anyformer.model.transformer": ("Transformer",),
    "anyformer.model.vit": ("Vit",),
    "anyformer.model.vit_config": ("VitConfig",),
    "anyformer.pattern.leaves": (
        "Block",
        "Causal",
        "Columns",
        "Dilated",
        "Flagged",
        "Full",
        "Global",
        "Local",
        "PerHead",
        "PerLayer",
        "Random",
        "RandomBlocks",
        "Strided",
    ),
    "anyformer.registry": ("describe", "list_methods", "register"),
    "anyformer.side": ("grid",),
    "anyformer.site": ("Site",),
    "anyformer.spec": ("Spec",),
}
_HOME = {name: home for home, names in _HOMES.items() for name in names}

__all__ = sorted(_HOME)


def __getattr__(name: str) -> object:
    if name not in _HOME:
        raise AttributeError(f"module 'anyformer' has no attribute {name!r}; it has {', '.join(__all__)}")
    value = getattr(import_module(_HOME[name]), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
