"""Losses of single tokens over ranks equal those of one process."""

from collections.abc import Callable
from typing import Any
from unittest import mock

import pytest
import torch
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

import hf_burst
from hf_burst.errors import BatchError, ConfigError
from hf_burst.layers.loss import token_divergences
from tests.support import models
from tests.support.gradients import Result, assert_equal
from tests.support.ranks import RankError, RankPool

Batch = dict[str, torch.Tensor]
Ranks = Callable[[int], RankPool]


def losses_of(rank: int, size: int, name: str, batch: Batch) -> torch.Tensor:
    """The losses of all tokens by the patched model, whose loss of the same batch must be their mean."""
    model = hf_burst.patch_model(models.make_model(name, torch.float64)).eval()
    asked = batch if models.is_masked(model) else {**batch, "use_cache": True}  # which is for generation alone
    losses = hf_burst.token_losses(model, asked).detach()
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


@pytest.mark.parametrize(
    ("name", "kind", "size"),
    [
        pytest.param(*case, size, marks=[pytest.mark.full] * (size != always))
        for *case, always in (
            *(("llama", "plain", 2), ("llama", "packed", 3), ("qwen2", "left", 3)),
            *(("gpt2", "right", 1), ("modernbert", "right", 3)),
        )
        for size in (1, 2, 3, 4)
    ],
)
def test_losses_of_tokens_equal_one_process(ranks: Ranks, name: str, kind: str, size: int) -> None:
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
    return max(scored), losses.detach()


def test_few_tokens_are_scored_at_a_time(ranks: Ranks) -> None:
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


def test_what_token_losses_refuses(ranks: Ranks) -> None:
    model, batch = models.make_model("llama").eval(), models.make_batch("plain")
    with pytest.raises(ConfigError, match="takes a patched model"):
        hf_burst.token_losses(model, batch)
    hf_burst.patch_model(model)
    with pytest.raises(BatchError, match="The labels are missing"):
        hf_burst.token_losses(model, {"input_ids": batch["input_ids"]})
    with pytest.raises(BatchError, match="labels holds 61"):
        hf_burst.token_losses(model, {**batch, "labels": torch.full_like(batch["labels"], 61)})
    with pytest.raises(BatchError, match="one for every label"):
        hf_burst.token_losses(model, batch, torch.ones(2, 36))
    assert model(**batch).logits is not None, "the next call is an ordinary one"
    with pytest.raises(RankError, match="content"):
        ranks(2).run(wrong_labels)


def weights_of(batch: Batch) -> torch.Tensor:
    generator = torch.Generator().manual_seed(3)
    return torch.rand(batch["input_ids"].shape, generator=generator, dtype=torch.float64)


def odds_ratio(losses: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    """The loss of ORPO (arXiv 2403.07691, equation 6), row 0 chosen and row 1 rejected."""
    chosen, rejected = -losses.sum(1) / (labels[:, 1:] != -100).sum(1)
    odds = (chosen - rejected) - (torch.log1p(-chosen.exp()) - torch.log1p(-rejected.exp()))
    return -chosen - 0.1 * torch.nn.functional.logsigmoid(odds)


def distance(student: torch.Tensor, teacher: torch.Tensor, labels: torch.Tensor, kind: str, top_k: int | None) -> Any:
    """The sum of divergences at a temperature of 2, written apart from the package; logits of all tokens."""
    if top_k is not None:
        chosen = teacher.argsort(-1, descending=True)[..., :top_k]
        student, teacher = student.gather(-1, chosen), teacher.gather(-1, chosen)
    own, other = torch.softmax(student / 2, -1), torch.softmax(teacher / 2, -1)
    pairs = {
        "forward_kl": [(1.0, other, own)],
        "reverse_kl": [(1.0, own, other)],
        "jsd": [(0.3, other, 0.3 * other + 0.7 * own), (0.7, own, 0.3 * other + 0.7 * own)],
    }
    terms = (share * (first * (first.log() - second.log())).sum(-1) for share, first, second in pairs[kind])
    return (sum(terms) * (labels != -100)).sum()


def loss_by(what: str, model: Any, batch: Batch, teacher: Any = None, shard: bool = False) -> torch.Tensor:
    """A loss of one's own by hf_burst."""
    given = hf_burst.shard_batch(batch) if shard else batch
    if what == "weighted":
        return hf_burst.token_losses(model, given, weights_of(batch)).sum() / 3
    if what == "orpo":
        return odds_ratio(hf_burst.token_losses(model, given), batch["labels"])
    kind, _, top_k = what.partition(" ")
    return hf_burst.token_divergences(model, teacher, given, kind, int(top_k) if top_k else None, 2.0, 0.3).sum()


def expected_loss(what: str, model: Any, batch: Batch, teacher: Any) -> torch.Tensor:
    """The same in one process, by all logits."""
    labels = models.shifted(batch["labels"])
    logits = models.plain_logits(model, batch)
    losses = torch.nn.functional.cross_entropy(logits.transpose(1, 2), labels, reduction="none")
    losses = torch.cat([torch.zeros(len(losses), 1), losses[:, :-1]], dim=1)
    if what == "weighted":
        return (losses * weights_of(batch)).sum() / 3
    if what == "orpo":
        return odds_ratio(losses, batch["labels"])
    kind, _, top_k = what.partition(" ")
    known = models.plain_logits(teacher, batch).detach()
    return distance(logits, known, labels, kind, int(top_k) if top_k else None)


def batch_of(kind: str) -> Batch:
    """A batch of two rows; of `"alike"` ones that have 40 tokens in common, of which one counts in one row alone."""
    batch = models.make_batch("right" if kind == "alike" else kind, 59)
    if kind == "alike":
        for name in ("input_ids", "labels"):
            batch[name][1, :40] = batch[name][0, :40]
        batch["labels"][1, 20] = -100
    return batch


class Width(TorchDispatchMode):
    """The most tokens of which any tensor, in the forward and the backward pass, has a value for every word."""

    def __init__(self, hidden: int) -> None:
        super().__init__()
        self.hidden, self.most = hidden, 0

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        found = function(*args, **(kwargs or {}))
        for tensor in tree_leaves(found):
            if isinstance(tensor, torch.Tensor) and models.VOCABULARY in tensor.shape and not tensor.is_meta:
                others = tensor.numel() // models.VOCABULARY
                self.most = max(self.most, 0 if others == self.hidden else others)  # but for weights
        return found


def gradients_of(rank: int, size: int, what: str, kind: str, shard: bool) -> Result:
    """A loss of one's own and its gradients; 7 tokens are scored at a time, and what rows share is computed once."""
    batch, share = batch_of(kind), hf_burst.BurstConfig(share_prefixes=True)
    model = models.patch(models.make_model("llama", torch.float64), share)
    teacher = models.patch(models.make_model("llama", torch.float64, seed=5), share)
    tokens = models.counted(model)
    few = mock.patch("hf_burst.layers.linear_loss._LOGITS", 7 * models.VOCABULARY)
    with few, Width(model.config.hidden_size) as width:
        loss = loss_by(what, model, batch, teacher, shard)
        loss.sum().backward()
    assert 0 < width.most <= 7, "no tensor as wide as the vocabulary holds all tokens of a rank"
    assert (size * tokens[0] <= 80) == (kind in ("alike", "packed")), "of 118 tokens, or 59 that are packed"
    assert all(parameter.grad is None for parameter in teacher.parameters())
    return loss.sum().item(), {name: weight.grad for name, weight in model.named_parameters()}


@pytest.mark.parametrize(
    ("what", "kind", "shard", "size"),
    [
        pytest.param(*case, size, marks=[pytest.mark.full] * (size != always))
        for *case, always in (
            ("weighted", "packed", False, 3),
            ("weighted", "right", True, 2),
            ("orpo", "left", False, 3),
            ("orpo", "plain", True, 1),
            ("forward_kl", "plain", True, 3),
            ("forward_kl 5", "right", False, 1),
            ("reverse_kl", "left", False, 3),
            ("jsd", "right", True, 2),
            ("jsd 5", "packed", False, 3),
            ("weighted", "alike", False, 1),
            ("orpo", "alike", False, 2),
            ("forward_kl", "alike", False, 1),
        )
        for size in (1, 2, 3, 4)
    ],
)
def test_losses_of_ones_own_equal_one_process(ranks: Ranks, what: str, kind: str, shard: bool, size: int) -> None:
    batch, model = batch_of(kind), models.make_model("llama", torch.float64)
    expected = expected_loss(what, model, batch, models.make_model("llama", torch.float64, seed=5))
    expected.sum().backward()
    wanted = expected.sum().item(), {name: weight.grad for name, weight in model.named_parameters()}
    assert_equal(ranks(size).run(gradients_of, what, kind, shard), wanted)


def other_weights(rank: int, size: int) -> None:
    batch, model = models.make_batch("plain"), models.patch(models.make_model("llama"))
    hf_burst.token_losses(model, batch, weights_of(batch) + rank)


def test_what_losses_of_ones_own_refuse(ranks: Ranks) -> None:
    model, batch = hf_burst.patch_model(models.make_model("llama")), models.make_batch("plain")
    with pytest.raises(RankError, match="weights of tokens"):
        ranks(2).run(other_weights)
    with pytest.raises(ConfigError, match="takes a patched model"):
        hf_burst.token_divergences(model, models.make_model("llama"), batch)
    small = hf_burst.patch_model(models.llama_with({"rope_type": "default"}, vocab_size=50))
    with pytest.raises(ConfigError, match="vocabularies of model and teacher differ: 61 and 50"):
        hf_burst.token_divergences(model, small, batch)
    with pytest.raises(ConfigError, match="kind='js'"):
        hf_burst.token_divergences(model, model, batch, kind="js")
    with pytest.raises(ConfigError, match="top_k=0"):
        hf_burst.token_divergences(model, model, batch, top_k=0)
    with pytest.raises(ConfigError, match="beta=1"):
        hf_burst.token_divergences(model, model, batch, "jsd", beta=1)
    with pytest.raises(BatchError, match="not finite"):
        hf_burst.token_losses(model, batch, torch.full(batch["labels"].shape, float("nan")))


def test_texts_that_a_collator_joined_have_no_losses_of_their_own() -> None:
    model, share = hf_burst.patch_model(models.make_model("llama")), hf_burst.BurstConfig(share_prefixes=True)
    batch = batch_of("alike")
    batch["labels"][1, :45] = -100
    with pytest.raises(BatchError, match="joined when it was sharded"):
        hf_burst.token_losses(model, hf_burst.shard_batch(batch, config=share))


def test_a_teacher_that_shares_no_beginnings_is_refused() -> None:
    model, teacher = (
        hf_burst.patch_model(models.make_model("llama"), hf_burst.BurstConfig(share_prefixes=share))
        for share in (True, False)
    )
    with pytest.raises(BatchError, match="share other beginnings"):
        hf_burst.token_divergences(model, teacher, batch_of("alike"))


def test_a_teacher_keeps_what_evaluates_and_what_trains() -> None:
    model, teacher = (hf_burst.patch_model(models.make_model("llama").train()) for _ in range(2))
    teacher.model.layers[0].eval()
    before = [module.training for module in teacher.modules()]
    hf_burst.token_divergences(model, teacher, models.make_batch("plain"))
    assert [module.training for module in teacher.modules()] == before


@pytest.mark.parametrize("kind", ["forward_kl", "reverse_kl", "jsd"])
def test_words_that_both_models_never_say_add_nothing(kind: str) -> None:
    own, other = torch.randn(2, 5, 7, dtype=torch.float64)
    own.requires_grad_()
    targets, never = torch.zeros(5, dtype=torch.long), torch.full((5, 2), -torch.inf)
    found = []
    for logits, known in ((own, other), (torch.cat([own, never], -1), torch.cat([other, never], -1))):
        divergences = token_divergences(logits, known, targets, kind, None, 1.0)
        found.append((divergences, torch.autograd.grad(divergences.sum(), own)[0]))
    for one, same in zip(*found, strict=True):
        torch.testing.assert_close(one, same)


def wrap(model: Any, how: str, size: int) -> Any:
    """The model in a data-parallel wrapper, which averages gradients."""
    if how == "ddp":
        return torch.nn.parallel.DistributedDataParallel(model)
    mesh = init_device_mesh("cpu", (size,))
    for layer in model.model.layers:
        fully_shard(layer, mesh=mesh, reshard_after_forward=True)
    if how == "fsdp2 alone":
        fully_shard(model.lm_head, mesh=mesh)
    if how == "fsdp2 tail":  # as accelerate has it
        fully_shard([model.model.norm, model.lm_head], mesh=mesh, reshard_after_forward=False)
    return fully_shard(model, mesh=mesh, reshard_after_forward=True)


def whole_gradients(model: Any) -> dict[str, torch.Tensor]:
    found = {name: weight.grad for name, weight in model.named_parameters()}
    return {name: grad.full_tensor() if isinstance(grad, DTensor) else grad for name, grad in found.items()}


def wrapped(rank: int, size: int, how: str) -> Result:
    """A loss of one's own through a data-parallel wrapper."""
    batch, model = models.make_batch("right", 61), models.patch(models.make_model("llama", torch.float64).train())
    loss = odds_ratio(hf_burst.token_losses(wrap(model, how, size), batch), batch["labels"]).sum()
    loss.backward()
    return loss.item(), whole_gradients(model)


@pytest.mark.parametrize("how", ["ddp", "fsdp2", "fsdp2 tail"])
def test_losses_of_ones_own_through_wrappers(ranks: Ranks, how: str) -> None:
    batch, model = models.make_batch("right", 61), models.make_model("llama", torch.float64)
    expected = expected_loss("orpo", model, batch, None).sum()
    expected.backward()
    wanted = expected.item(), {name: weight.grad for name, weight in model.named_parameters()}
    assert_equal(ranks(2).run(wrapped, how), wanted)


def test_a_head_that_fsdp2_shards_alone_is_refused(ranks: Ranks) -> None:
    with pytest.raises(RankError, match="sharded the head again"):
        ranks(2).run(wrapped, "fsdp2 alone")
