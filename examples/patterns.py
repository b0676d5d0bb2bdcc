"""Patterns are values: join them, print them, count them, and attend along them."""

import torch

import anyformer as af

pattern = af.Local(64) | af.Global([0]) | af.Random(2, seed=0)
print(pattern, f"keeps {pattern.density(4096):.1%} of all pairs of 4096 tokens")
print((af.Local(3) & ~af.Global([0])).text(24, 24))

q, k, v = (torch.randn(1, 8, 4096, 64) for _ in range(3))
out = af.attend(q, k, v, pattern=pattern, position="alibi")
print(out.shape)

by_head = af.PerHead((af.Local(16), 4), (af.Strided(64) | af.Local(4), 4))
print(by_head, af.attend(q, k, v, pattern=by_head).shape)
