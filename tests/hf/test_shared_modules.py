"""Two models that share modules: what is done to one leaves the other as it is."""

import torch
from transformers import Mamba2Config, Mamba2ForCausalLM

import hf_burst
from tests.support import models


def test_models_that_share_recurrent_layers_are_unpatched_one_by_one() -> None:
    sizes = {"hidden_size": 32, "num_heads": 8, "head_dim": 8, "state_size": 8, "n_groups": 2, "num_hidden_layers": 2}
    config = Mamba2Config(vocab_size=64, chunk_size=8, **sizes)
    one, other = Mamba2ForCausalLM(config), Mamba2ForCausalLM(config)
    other.backbone.layers = one.backbone.layers
    batch = models.make_batch("plain")
    batch = {name: batch[name] % 64 for name in ("input_ids", "labels")}
    wanted = models.plain_loss(other, batch)
    for model in (one, other):
        models.patch(model)(**batch)
    hf_burst.unpatch_model(one)
    for _ in range(2):
        torch.testing.assert_close(other(**batch).loss, wanted)
