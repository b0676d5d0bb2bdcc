"""The largest tensor that a call makes."""

from typing import Any

from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves


class Largest(TorchDispatchMode):
    """The most numbers that any tensor held that was made meanwhile, inside our own operators too, each counted once however often
    it is expanded.

    Attributes:
        most: so many.
        maker: the operator that made it.
    """

    def __init__(self) -> None:
        super().__init__()
        self.most, self.maker = 0, ""

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple = (), kwargs: dict[str, Any] | None = None) -> Any:
        if func.namespace == "anyformer":  # one node for others, and many tensors within
            with self:
                return func.function(*args, **(kwargs or {}))
        made = func(*args, **(kwargs or {}))
        for each in tree_leaves(made):
            if isinstance(each, Tensor):
                numbers = each.untyped_storage().nbytes() // max(each.element_size(), 1)
                if numbers > self.most:
                    self.most, self.maker = numbers, f"{func} {list(each.shape)}"
        return made
