"""Compare methods on your own text from Python, as `anyformer compare` does from the shell."""

import sys
import tempfile
from pathlib import Path

from rich.console import Console

from anyformer.compare import report
from anyformer.compare.run import Listener, Request, compare
from anyformer.compare.trial import Sizes


def main(text: Path, out: Path) -> None:
    request = Request(
        pairs=(("softmax", "rope"), ("local(16)", "rope"), ("linear", "rope")),
        tasks=(f"text(data=['{text}'], length=64, score=32)",),
        sizes=Sizes(dim=32, depth=1, heads=2, tokens=1024),
        steps=10,
        items=8,
        threads=1,
    )
    compare(request, out, Listener())
    Console(width=140).print(report.write(out).table())


if __name__ == "__main__":  # every trial is a process, which imports this file
    with tempfile.TemporaryDirectory() as folder:
        data = Path(folder) / "text.txt"
        data.write_text(Path(sys.modules["tempfile"].__file__ or "").read_text() * 4)
        main(data, Path(folder) / "run")
