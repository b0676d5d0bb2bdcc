"""From one head to another, with every weight accounted for."""

from dataclasses import replace

import pytest
import torch
from tiny_models import ids, model, rough, same

import anyformer as af
from anyformer.errors import IncompatibleError, SpecError
from anyformer.model.transformer import Transformer

TABLE = "head.decoder.position.table.weight"


def pretrained(**changes: object) -> Transformer:
    return model(**{"head": "enhanced_mlm", "position": "deberta(span=8)", "depth": 3, **changes})


def other(source: Transformer, **changes: object) -> Transformer:
    return rough(Transformer(replace(source.config, **changes)), seed=5).eval()


def test_fine_tuning_uses_every_weight_but_the_absolute_table(tmp_path):
    source = pretrained()
    source.save_pretrained(tmp_path)
    tuned = other(source, head="mlm", seed=9)
    report = af.warm_start(tuned, tmp_path)
    assert report.dropped == (TABLE,)
    assert report.fresh == ()
    assert set(report.used) == set(source.state_dict()) - {TABLE}
    assert str(report) == f"used {len(report.used)}; dropped {TABLE}; fresh none"
    with torch.no_grad():
        source.get_parameter(TABLE).zero_()
    once = other(source, head="enhanced_mlm(passes=1)")
    af.warm_start(once, source)
    same(tuned(ids(2, 7)), once(ids(2, 7)))


def test_a_classifier_starts_from_the_body():
    source = pretrained()
    tuned = other(source, head="classifier", outputs=3)
    before = tuned.head.out.weight.clone()
    report = af.warm_start(tuned, source)
    assert report.fresh == ("head.out.weight", "head.out.bias")
    assert set(report.dropped) == {name for name in source.state_dict() if name.startswith("head.")}
    assert torch.equal(tuned.head.out.weight, before)
    plain = other(source, head="mlm")
    af.warm_start(plain, source)
    assert torch.equal(tuned.encode(ids(2, 7)), plain.encode(ids(2, 7)))
    same_kind = other(tuned, head="classifier", outputs=3)
    assert af.warm_start(same_kind, tuned).fresh == ()
    wider = other(tuned, head="classifier", outputs=4)
    assert af.warm_start(wider, tuned).fresh == ("head.out.weight", "head.out.bias")


def test_as_many_classes_as_tokens_are_no_tokens():
    source = pretrained(head="lm", causal=False)
    tuned = other(source, head="classifier", outputs=source.config.vocab)
    assert "head.out.weight" in af.warm_start(tuned, source).fresh


def test_pre_training_can_go_on_from_a_plain_model():
    source = pretrained(head="mlm")
    report = af.warm_start(other(source, head="enhanced_mlm"), source)
    assert report.fresh == (TABLE,)
    assert report.dropped == ()


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"heads": 2, "kv_heads": None}, "heads=2 against 4; kv_heads=None against 2"),
        ({"position": "shaw"}, r"position='shaw' against 'deberta\(span=8\)'"),
        ({"position": "learned"}, "position='learned' against"),
        ({"causal": True}, "is_causal=True against False"),
    ],
)
def test_other_bodies_are_refused(changes, message):
    source = pretrained()
    with pytest.raises(SpecError, match=f"differ in their heads alone, got {message}.*dataclasses.replace"):
        af.warm_start(other(source, head="mlm", **changes), source)


def test_tables_of_another_length_are_refused():
    source = pretrained(position="learned")
    with pytest.raises(SpecError, match="got max_length=16 against 32"):
        af.warm_start(other(source, head="mlm", max_length=16), source)


def test_a_head_with_a_table_is_not_extended():
    source = pretrained(position="rope")
    with pytest.raises(
        IncompatibleError, match=r"head's learned \(head.decoder.position\) ends at max_length and ntk does not"
    ):
        af.extend(source, to=64, method="ntk")
    plain = other(source, head="mlm")
    af.warm_start(plain, source)
    assert af.extend(plain, to=64, method="ntk").config.max_length == 64


@pytest.mark.plain
def test_only_models_are_started():
    source = pretrained()
    with pytest.raises(SpecError, match="warm_start: expected a Transformer to be given weights, got Linear"):
        af.warm_start(torch.nn.Linear(2, 2), source)
    with pytest.raises(SpecError, match="expected a pre-trained Transformer or the folder it was saved to, got int"):
        af.warm_start(other(source, head="mlm"), 3)
