"""Train a byte-level language model on the interpreter's own library, then let it write."""

import torch

import anyformer as af
from anyformer.task.text import Text

task = Text(length=128)
config = af.ModelConfig(
    vocab=task.vocab, dim=64, depth=2, heads=4, attention="local(32)", position="rope", max_length=1024
)
model = af.Transformer(config)
optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
steps = 40
for step in range(steps):
    batch = task.batch("train", step, size=16)
    loss = task.loss(model(batch.tokens), batch)
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    if step % 10 == 9:
        print(f"step {step + 1}: {loss.item():.2f} nats a byte")

prompt = torch.tensor([list(b"def ")])
written = model.eval().generate(prompt, max_new_tokens=60, temperature=0.8, top_k=20, seed=0)
print(bytes(written[0].tolist()).decode(errors="replace"))
