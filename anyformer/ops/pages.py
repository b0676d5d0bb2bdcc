"""Memory pages of large fresh buffers."""

import ctypes
import mmap
import sys

from torch import Tensor

ALWAYS_FRESH = 4 * 2**20
"""Bytes from which an allocation often is a new mapping (glibc: always from 32 MB on), of which each page costs a fault when it is
first written; and the least that is sure to hold a page of 2 MB."""


def in_huge_pages(x: Tensor) -> Tensor:
    """x itself, an uninitialised tensor, after asking Linux to back it with huge pages where it is large and on the CPU.

    Pages of 4 kB cost more to fault in than the numbers written to them; pages of 2 MB do not. A request only: where the kernel
    or the platform knows no such pages nothing changes.
    """
    storage = x.untyped_storage()
    if sys.platform == "linux" and x.device.type == "cpu" and storage.nbytes() >= ALWAYS_FRESH:
        start = -(-storage.data_ptr() // mmap.PAGESIZE) * mmap.PAGESIZE
        length = storage.data_ptr() + storage.nbytes() - start
        ctypes.CDLL(None).madvise(ctypes.c_void_p(start), ctypes.c_size_t(length), mmap.MADV_HUGEPAGE)
    return x
