"""One prompt, two continuations: caches are values that can be copied, cropped and selected."""

import torch

import anyformer as af

model = af.Transformer(
    af.ModelConfig(vocab=64, dim=32, depth=2, heads=4, kv_heads=2, attention="linear", position="rope")
).eval()
prompts = torch.randint(64, (2, 10))
real = torch.ones(2, 10, dtype=torch.bool)
real[1, :4] = False  # the second prompt is shorter, padded on the left

cache = model.new_cache(2)
with torch.no_grad():
    model(prompts, attention_mask=real, cache=cache)
    for name, branch in (("first", cache.copy()), ("second", cache.copy())):
        mask, token = real, torch.full((2, 1), 1 if name == "first" else 2)
        for _ in range(3):
            mask = torch.cat([mask, torch.ones(2, 1, dtype=torch.bool)], dim=1)
            token = model(token, attention_mask=mask, cache=branch)[:, -1:].argmax(-1)
        print(name, token[:, 0].tolist(), f"{branch.length} tokens, {branch.nbytes} bytes")
