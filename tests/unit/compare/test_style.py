"""What a legend says of families."""

from anyformer.compare.style import branches


def test_a_legend_names_the_branches_that_occur() -> None:
    families = [("relative", "classic"), ("none",), ("other", "rotary"), ("relative", "t5"), ("relative", "classic")]
    assert branches(families) == {"relative": "relative (classic, t5)", "none": "none", "other": "other (rotary)"}
