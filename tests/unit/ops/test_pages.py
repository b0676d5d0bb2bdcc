import torch

from anyformer.ops.pages import ALWAYS_FRESH, in_huge_pages


def test_the_tensor_itself_comes_back_and_holds_what_is_written():
    for size in (0, 10, ALWAYS_FRESH // 4, ALWAYS_FRESH // 4 + 12_345):
        x = torch.empty(size)
        assert in_huge_pages(x) is x
        x[-3:] = 7.0
        assert x[-3:].tolist() == [7.0] * min(size, 3)
    meta = torch.empty(ALWAYS_FRESH, device="meta")
    assert in_huge_pages(meta) is meta
