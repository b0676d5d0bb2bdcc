"""Where a module is built: the frozen facts that every constructor gets first."""

from dataclasses import dataclass, replace

from anyformer.errors import SpecError


@dataclass(frozen=True, init=False)
class Site:
    """The place a module is built for.

    Args:
        dim: width of the model (channels of x).
        heads: number of query heads.
        causal: whether a token may look at earlier tokens only.
        max_length: longest sequence in tokens; fixed sizes (tables, projections, cluster counts) come from it.
        kv_heads: number of key and value heads, a divisor of `heads`; None: `heads`.
        head_dim: width of one head; None: `dim / heads`.
        layer: index of the layer in its stack, from 0.
        depth: number of layers of the stack.
        seed: root of every random structure built here (with layer, head and row).

    Raises:
        SpecError: a size below 1, heads that do not divide dim, kv_heads that do not divide heads.
    """

    dim: int
    heads: int
    causal: bool
    max_length: int
    kv_heads: int
    head_dim: int
    layer: int
    depth: int
    seed: int

    def __init__(
        self,
        dim: int,
        heads: int,
        *,
        causal: bool = False,
        max_length: int = 2048,
        kv_heads: int | None = None,
        head_dim: int | None = None,
        layer: int = 0,
        depth: int = 1,
        seed: int = 0,
    ) -> None:
        sizes = {"dim": dim, "heads": heads, "max_length": max_length, "depth": depth}
        sizes |= {name: size for name, size in (("kv_heads", kv_heads), ("head_dim", head_dim)) if size is not None}
        faults = [
            f"expected {name} to be a whole number of at least {least}, got {size!r}"
            for name, size, least in (*((name, size, 1) for name, size in sizes.items()), ("layer", layer, 0))
            if not _whole(size) or size < least
        ]
        if not _whole(seed):
            faults.append(f"expected seed to be a whole number, got {seed!r}")
        if not faults and head_dim is None and dim % heads:
            faults.append(
                f"dim={dim} is not a multiple of heads={heads}; choose heads that divide it, or give head_dim"
            )
        if not faults and kv_heads is not None and heads % kv_heads:
            faults.append(f"kv_heads={kv_heads} must divide heads={heads}")
        if faults:
            raise SpecError("Site: " + "; ".join(faults))
        resolved = sizes | {
            "causal": causal,
            "kv_heads": heads if kv_heads is None else kv_heads,
            "head_dim": dim // heads if head_dim is None else head_dim,
            "layer": layer,
            "seed": seed,
        }
        for name, value in resolved.items():
            object.__setattr__(self, name, value)

    @property
    def groups(self) -> int:
        """Query heads that share one key and value head; query head h uses key head h // groups."""
        return self.heads // self.kv_heads

    def at_layer(self, layer: int) -> "Site":
        """The same site one or more layers up."""
        return replace(self, layer=layer)


def _whole(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)
