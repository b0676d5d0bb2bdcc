import dataclasses
import json

import pytest
from tiny_models import config

from anyformer.errors import SpecError
from anyformer.model.config import ModelConfig
from anyformer.spec import Spec


def test_specs_are_kept_in_their_canonical_text():
    made = ModelConfig(attention=" local( 128 ) ", position=Spec("rope", (), (("base", 10000.0),)))
    assert made.attention == "softmax(pattern=Local(128))"
    assert made.position == "rope"
    assert made == ModelConfig(attention="softmax(pattern=Local(128))", position=("rope",))
    assert hash(made) == hash(ModelConfig(attention="local(128)"))


def test_tuples_are_repeated_over_the_depth():
    made = config(depth=5, attention=("softmax", "local(4)"), position=("rope", "none", "alibi"))
    assert made.layers == (
        ("softmax", "rope"),
        ("softmax(pattern=Local(4))", "none"),
        ("softmax", "alibi"),
        ("softmax(pattern=Local(4))", "rope"),
        ("softmax", "none"),
    )


@pytest.mark.parametrize(
    ("head", "causal", "expected"), [("lm", None, True), ("mlm", None, False), ("mlm", True, True)]
)
def test_direction_follows_the_head_unless_given(head, causal, expected):
    assert config(head=head, causal=causal).is_causal is expected


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"attention": ("softmax", "local(4) | Global([0])"), "position": ("rope(base=5e5)", "none"), "causal": False},
        {"head": "classifier", "outputs": 3, "norm": "layer", "feed_forward": "gelu", "dropout": 0.25, "head_dim": 8},
    ],
)
def test_json_reads_back_to_an_equal_value(changes):
    made = config(**changes)
    assert ModelConfig.from_json(made.to_json()) == made
    assert json.loads(made.to_json())["version"] == 1


def test_a_changed_copy_is_checked_again():
    assert dataclasses.replace(config(), seed=3).seed == 3
    with pytest.raises(SpecError, match=r"vocab=0: expected greater than or equal to 1"):
        dataclasses.replace(config(), vocab=0)


def test_changed_lists_what_is_not_the_default():
    assert ModelConfig(dim=128, attention="local(4)").changed() == {
        "dim": 128,
        "attention": "softmax(pattern=Local(4))",
    }


def test_all_faults_come_in_one_message():
    with pytest.raises(SpecError) as error:
        ModelConfig(dim=10, heads=3, attention=("sofmax", "local(-1)"), position="roppe", head="classifier")
    for part in (
        "attention: there is no attention named 'sofmax'; did you mean 'softmax'",
        "attention: softmax(pattern=local(-1)):",
        "position: there is no position named 'roppe'; did you mean 'rope'",
        "dim=10 is not a multiple of heads=3",
        "outputs=None: a classifier needs its number of classes, for example outputs=10",
    ):
        assert part in str(error.value)


@pytest.mark.plain
def test_all_wrong_types_and_ranges_come_in_one_message():
    with pytest.raises(SpecError) as error:
        ModelConfig(dim="x", depth=0, head="ml", dropout=1.0, causal="yes", attention=3, seed=-1, kv_heads=0)
    for part in (
        "dim='x': expected a valid integer",
        "depth=0: expected greater than or equal to 1",
        "head: there is no head named 'ml'; did you mean 'mlm' or 'lm'?",
        "dropout=1.0: expected less than 1",
        "causal='yes': expected a valid boolean",
        "attention=3: expected",
        "seed=-1: expected greater than or equal to 0",
        "kv_heads=0: expected greater than or equal to 1",
    ):
        assert part in str(error.value)


@pytest.mark.parametrize(("specs", "count"), [((), 0), (("softmax", "local(1)", "local(2)"), 3)])
def test_more_or_fewer_specs_than_blocks_are_refused(specs, count):
    with pytest.raises(
        SpecError, match=rf"attention: expected one spec, or a tuple of 1 to depth=2 of them, got {count}"
    ):
        config(attention=specs)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("{", "expected the JSON of a ModelConfig, got '{'"),
        ("[]", 'expected JSON with "format": "anyformer-model"'),
        ('{"model_type": "bert"}', 'expected JSON with "format": "anyformer-model"'),
        ('{"format": "anyformer-model", "version": 9}', "expected version 1 of anyformer-model, got 9"),
        (
            '{"format": "anyformer-model", "version": 1, "dims": 3, "zz": 1}',
            r"ModelConfig has no field 'dims' \(did you mean 'dim'\?\), 'zz'; it has: vocab, dim",
        ),
        ('{"format": "anyformer-model", "version": 1, "dim": 0}', "dim=0: expected greater than or equal to 1"),
    ],
)
def test_a_text_that_is_no_configuration_is_refused(text, message):
    with pytest.raises(SpecError, match=message):
        ModelConfig.from_json(text)
