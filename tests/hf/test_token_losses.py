"""Losses of single tokens over ranks equal those of one process."""

from collections.abc import Callable
from unittest import mock

import pytest
import torch

import hf_burst
from hf_burst.errors import BatchError, ConfigError
from tests.support import models
from tests.support.ranks import RankError, RankPool

Batch = dict[str, torch.Tensor]


def losses_of(rank: int, size: int, name: str, batch: Batch) -> torch.Tensor:
    """The losses of all tokens by the patched model, whose loss of the same batch must be their mean."""
    model = hf_burst.patch_model(models.make_model(name, torch.float64)).eval()
    asked = batch if models.is_masked(model) else {**batch, "use_cache": True}  # which is for generation alone
    losses = hf_burst.token_losses(model, asked)
    counted = batch["labels"] != -100 if models.is_masked(model) else models.shifted(batch["labels"]) != -100
    with torch.no_grad():
        torch.testing.assert_close(losses.sum() / counted.sum(), model(**batch).loss, rtol=1e-12, atol=0)
    return losses


def plain_losses(name: str, batch: Batch) -> torch.Tensor:
    """The same by one unpatched model, of all its logits."""
    model = models.make_model(name, torch.float64).eval()
    labels = batch["labels"] if models.is_masked(model) else models.shifted(batch["labels"])
    logits = models.plain_logits(model, batch).detach()
    losses = torch.nn.functional.cross_entropy(logits.transpose(1, 2), labels, reduction="none")
    return losses if models.is_masked(model) else torch.cat([torch.zeros(len(losses), 1), losses[:, :-1]], dim=1)


@pytest.mark.parametrize("size", [1, 2, 3, pytest.param(4, marks=pytest.mark.full)])
@pytest.mark.parametrize(
    ("name", "kind"),
    [("llama", "plain"), ("llama", "packed"), ("qwen2", "left"), ("gpt2", "right"), ("modernbert", "right")],
)
def test_losses_of_tokens_equal_one_process(ranks: Callable[[int], RankPool], name: str, kind: str, size: int) -> None:
    batch = models.make_batch(kind)
    expected = plain_losses(name, batch)
    for losses in ranks(size).run(losses_of, name, batch):
        assert losses.dtype == torch.float64
        torch.testing.assert_close(losses, expected, rtol=1e-10, atol=1e-10)


def peak_of_losses(rank: int, size: int) -> tuple[int, torch.Tensor]:
    """The most tokens that the head scored at once, where 7 fit into a part; and the losses."""
    model, scored = hf_burst.patch_model(models.make_model("llama")).eval(), []
    plain = torch.nn.Linear.forward

    def forward(module: torch.nn.Linear, hidden: torch.Tensor) -> torch.Tensor:
        if module is model.lm_head:
            scored.append(hidden.shape[:-1].numel())
        return plain(module, hidden)

    with (
        mock.patch("hf_burst.layers.linear_loss._LOGITS", 7 * models.VOCABULARY),
        mock.patch.object(torch.nn.Linear, "forward", forward),
    ):
        losses = hf_burst.token_losses(model, models.make_batch("plain", 101))
    return max(scored), losses


def test_few_tokens_are_scored_at_a_time(ranks: Callable[[int], RankPool]) -> None:
    batch = models.make_batch("plain", 101)
    model = models.make_model("llama").eval()
    logits = models.plain_logits(model, batch).detach()[:, :-1]
    expected = torch.nn.functional.cross_entropy(logits.transpose(1, 2), batch["labels"][:, 1:], reduction="none")
    for most, losses in ranks(2).run(peak_of_losses):
        assert most <= 7
        torch.testing.assert_close(losses[:, 1:], expected)


def wrong_labels(rank: int, size: int) -> None:
    model = hf_burst.patch_model(models.make_model("llama")).eval()
    batch = models.make_batch("plain")
    batch["labels"][0, 9] += rank
    hf_burst.token_losses(model, batch)


def test_what_token_losses_refuses(ranks: Callable[[int], RankPool]) -> None:
    model, batch = models.make_model("llama").eval(), models.make_batch("plain")
    with pytest.raises(ConfigError, match="takes a patched model"):
        hf_burst.token_losses(model, batch)
    hf_burst.patch_model(model)
    with pytest.raises(BatchError, match="The labels are missing"):
        hf_burst.token_losses(model, {"input_ids": batch["input_ids"]})
    with pytest.raises(BatchError, match="labels holds 61"):
        hf_burst.token_losses(model, {**batch, "labels": torch.full_like(batch["labels"], 61)})
    with pytest.raises(BatchError, match="full batches"):
        hf_burst.token_losses(model, hf_burst.shard_batch(batch))
    assert model(**batch).logits is not None, "the next call is an ordinary one"
    with pytest.raises(RankError, match="labels of tokens"):
        ranks(2).run(wrong_labels)
