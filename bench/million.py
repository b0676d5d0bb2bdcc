"""One layer, local window and a global token, over a million tokens: seconds and the highest resident memory.

python -m bench.million --threads 2
"""

import argparse
import resource
import time

import torch

import anyformer as af


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokens", type=int, default=2**20)
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    layer = af.MultiHead(256, 4, attention="Local(256) | Global([0])", max_length=arguments.tokens)
    x = torch.randn(1, arguments.tokens, 256, requires_grad=True)
    started = time.perf_counter()
    out = layer(x)
    middle = time.perf_counter()
    out.sum().backward()
    ended = time.perf_counter()
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20
    print(f"{arguments.tokens} tokens, dim 256, 4 heads, {arguments.threads} threads")
    print(f"forward {middle - started:.1f} s, backward {ended - middle:.1f} s, highest resident memory {peak:.2f} GiB")


if __name__ == "__main__":
    main()
