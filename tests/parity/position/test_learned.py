"""Learned positions against the embeddings of BERT, GPT-2, RoBERTa, OPT and BART."""

import pytest
import torch
from torch import nn
from transformers import BertConfig, GPT2Config, RobertaConfig
from transformers.models.bart.modeling_bart import BartLearnedPositionalEmbedding
from transformers.models.bert.modeling_bert import BertEmbeddings
from transformers.models.gpt2.modeling_gpt2 import GPT2Model
from transformers.models.opt.modeling_opt import OPTLearnedPositionalEmbedding
from transformers.models.roberta.modeling_roberta import RobertaEmbeddings

import anyformer as af

SIZES = {"vocab_size": 17, "hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 8}


def agree(ours: torch.Tensor, theirs: torch.Tensor) -> None:
    torch.testing.assert_close(ours, theirs, rtol=2e-6, atol=2e-6)


def randomised(module: nn.Module) -> nn.Module:
    for parameter in module.parameters():
        nn.init.normal_(parameter)
    return module.eval()


def test_bert() -> None:
    theirs = randomised(BertEmbeddings(BertConfig(**SIZES, max_position_embeddings=12)))
    position = af.build_position("learned", af.Site(16, 2, max_length=12))
    position.table.load_state_dict(theirs.position_embeddings.state_dict())
    tokens, probe = torch.randint(17, (2, 9)), torch.randn(2, 9, 16)
    words = theirs.word_embeddings.weight[tokens] + theirs.token_type_embeddings.weight[0]
    ours = theirs.LayerNorm(position.embed(words, torch.arange(9)[None], tokens))
    agree(ours, theirs(tokens))
    (ours * probe).sum().backward()
    (theirs(tokens) * probe).sum().backward()
    agree(position.table.weight.grad, theirs.position_embeddings.weight.grad)


def test_gpt2() -> None:
    config = GPT2Config(vocab_size=17, n_embd=16, n_layer=1, n_head=2, n_positions=12, embd_pdrop=0.0)
    theirs = randomised(GPT2Model(config))
    position = af.build_position("learned", af.Site(16, 2, max_length=12, causal=True))
    position.table.load_state_dict(theirs.wpe.state_dict())
    tokens, probe = torch.randint(17, (2, 12)), torch.randn(2, 12, 16)
    ours = position.embed(theirs.wte.weight[tokens], torch.arange(12)[None], tokens)
    first = theirs(tokens, output_hidden_states=True).hidden_states[0]
    agree(ours, first)
    (ours * probe).sum().backward()
    (first * probe).sum().backward()
    agree(position.table.weight.grad, theirs.wpe.weight.grad)


def test_roberta_starts_at_row_two_and_does_not_count_padding() -> None:
    theirs = randomised(RobertaEmbeddings(RobertaConfig(**SIZES, max_position_embeddings=14, pad_token_id=1)))
    position = af.build_position("learned(offset=2)", af.Site(16, 2, max_length=12))
    position.table.load_state_dict(theirs.position_embeddings.state_dict())
    tokens = torch.randint(2, 17, (3, 9))
    tokens[0, :4] = tokens[1, 6:] = 1
    real = tokens != 1
    places = (real.cumsum(1) - 1).clamp(min=0)
    words = theirs.word_embeddings.weight[tokens] + theirs.token_type_embeddings.weight[0]
    ours = theirs.LayerNorm(position.embed(words, places, tokens))[real]
    agree(ours, theirs(tokens)[real])
    probe = torch.randn_like(ours)
    (ours * probe).sum().backward()
    (theirs(tokens)[real] * probe).sum().backward()
    agree(position.table.weight.grad, theirs.position_embeddings.weight.grad)


@pytest.mark.parametrize("peer", [OPTLearnedPositionalEmbedding, BartLearnedPositionalEmbedding])
def test_opt_and_bart_start_at_row_two(peer: type[nn.Embedding]) -> None:
    theirs = randomised(peer(12, 16))
    position = af.build_position("learned(offset=2)", af.Site(16, 2, max_length=12))
    position.table.load_state_dict({"weight": theirs.weight})
    real = torch.ones(1, 9, dtype=torch.int64)
    rows = theirs(real, 0)
    agree(position.code(torch.arange(9)[None]), rows)
