"""How another package's method becomes calls: as a function of queries, keys and values, as a layer, or as one without its maps."""

from collections.abc import Callable, Sequence

from torch import Tensor, nn

from anyformer.compare.bench_calls import Calls, Inputs, calls_of
from anyformer.compare.bench_record import Setting

Attend = Callable[[Tensor, Tensor, Tensor], Tensor]


def projected(
    setting: Setting,
    length: int,
    inputs: Inputs,
    attend: Attend,
    *,
    modules: Sequence[nn.Module] = (),
    shared: bool = False,
) -> Calls:
    """A function of q, k and v: as it is, or between linear maps as a layer.

    Args:
        modules: what holds its weights.
        shared: whether queries are their own keys, so that there is no map of keys and k is q.
    """
    weights = [weight for each in modules for weight in each.parameters()]
    if setting.what == "attention":
        q, k, v = inputs.heads(length)
        k = q if shared else k
        leaves = (q, v) if shared else (q, k, v)
        return calls_of(lambda: (attend(q, k, v),), (*leaves, *weights), inputs, modules)
    x = inputs.hidden(length)
    count = 2 if shared else 3
    maps = nn.ModuleList(nn.Linear(setting.dim, setting.dim) for _ in range(count + 1)).to(inputs.dtype)

    def layer() -> tuple[Tensor]:
        heads = [each(x).unflatten(-1, (setting.heads, -1)).transpose(1, 2) for each in maps[:count]]
        out = attend(heads[0], heads[0] if shared else heads[1], heads[-1])
        return (maps[count](out.transpose(1, 2).flatten(2)),)

    return calls_of(layer, (x, *maps.parameters(), *weights), inputs, (maps, *modules))


def without_maps(
    setting: Setting,
    inputs: Inputs,
    attend: Callable[[], Tensor],
    layer: nn.Module,
    maps: Sequence[nn.Module],
    x: Tensor,
    *,
    first: nn.Module | None = None,
    complete: bool = False,
) -> Calls:
    """A layer that projects by itself: with an output map as a whole layer, without any map as attention.

    Args:
        maps: its linear maps of all tokens.  first: that of the first token only.
        complete: whether it maps its output too, so that no output map is added.
    """
    if setting.what == "layer":
        output = nn.Identity() if complete else nn.Linear(setting.dim, setting.dim).to(inputs.dtype)
        leaves = (x, *layer.parameters(), *output.parameters())
        return calls_of(lambda: (output(attend()),), leaves, inputs, (layer, output))

    def bare() -> tuple[Tensor, ...]:
        mapped = tuple(each(x) for each in maps)
        return mapped if first is None else (*mapped, first(x[:, :1]))

    weights = [weight for each in (*maps, *([] if first is None else [first])) for weight in each.parameters()]
    less = calls_of(bare, (x, *weights), inputs)
    return calls_of(lambda: (attend(),), (x, *layer.parameters()), inputs, (layer,), less)


def whole(inputs: Inputs, layer: nn.Module, mix: Callable[[], Tensor], x: Tensor) -> Calls:
    """A layer that is timed as a whole only."""
    return calls_of(lambda: (mix(),), (x, *layer.parameters()), inputs, (layer.to(inputs.dtype),))
