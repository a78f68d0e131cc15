"""Bad input to a patched model: an error on every rank, before any communication of the model, and the pool goes on."""

import math
from collections.abc import Callable
from functools import partial
from typing import Any
from unittest import mock

import pytest
import torch
from accelerate import Accelerator, ParallelismConfig
from torch import nn
from torch.autograd import forward_ad
from torch.utils.checkpoint import checkpoint
from torch.utils.data import DataLoader
from transformers import DynamicCache

import hf_burst
from hf_burst.errors import (
    BatchError,
    BurstError,
    ConfigError,
    KernelError,
    RankMismatchError,
    UnsupportedModelError,
)
from hf_burst.hf.parts import head
from hf_burst.hf.patch import patch_under_check
from hf_burst.ranks.group import ContextGroup
from tests.support import models
from tests.support.ranks import RankError, RankPool, reset_accelerate
from tests.support.shared_memory import forget_resources
from tests.support.tiny_models import tiny_wrapper

Ranks = Callable[[int], RankPool]


def good(rank: int) -> dict[str, torch.Tensor]:
    return models.make_batch("plain", length=24)


def other_length(rank: int) -> dict[str, torch.Tensor]:
    return models.make_batch("plain", length=24 + 4 * rank)


def other_content(rank: int) -> dict[str, torch.Tensor]:
    return models.make_batch("plain", length=24, seed=rank)


def other_documents(rank: int) -> dict[str, torch.Tensor]:
    cut = 9 + rank
    return {**good(rank), "position_ids": torch.cat([torch.arange(cut), torch.arange(24 - cut)])[None]}


def no_labels_on_one_rank(rank: int) -> dict[str, torch.Tensor]:
    batch = good(rank)
    if rank:
        del batch["labels"]
    return batch


def empty(rank: int) -> dict[str, torch.Tensor]:
    return {key: value[:, :0] for key, value in good(rank).items()}


def empty_on_one_rank(rank: int) -> dict[str, torch.Tensor]:
    return empty(rank) if rank == 0 else good(rank)


def all_ignored(rank: int) -> dict[str, torch.Tensor]:
    return {**good(rank), "labels": torch.full_like(good(rank)["labels"], -100)}


def only_the_first_label(rank: int) -> dict[str, torch.Tensor]:
    batch = all_ignored(rank)
    batch["labels"][:, 0] = 5  # no token predicts it
    return batch


def mask_with_holes(rank: int) -> dict[str, torch.Tensor]:
    mask = torch.ones(2, 24, dtype=torch.long)
    mask[0, 5] = 0
    return {**good(rank), "attention_mask": mask}


def mask_with_numbers(rank: int) -> dict[str, torch.Tensor]:
    return {**good(rank), "attention_mask": torch.arange(24).expand(2, -1) // 12 + torch.ones(2, 24).long()}


def mask_of_four_dimensions(rank: int) -> dict[str, torch.Tensor]:
    return {**good(rank), "attention_mask": torch.zeros(2, 1, 24, 24)}


def mask_that_hides_a_row(rank: int) -> dict[str, torch.Tensor]:
    return {**good(rank), "attention_mask": torch.tensor([[1], [0]]).expand(2, 24)}


def labels_on_padding(rank: int) -> dict[str, torch.Tensor]:
    mask = torch.ones(2, 24, dtype=torch.long)
    mask[1, 20:] = 0
    return {**good(rank), "attention_mask": mask}


def positions_of_another_shape(rank: int) -> dict[str, torch.Tensor]:
    return {**good(rank), "position_ids": torch.arange(20)[None]}


def labels_of_another_shape(rank: int) -> dict[str, torch.Tensor]:
    return {**good(rank), "labels": good(rank)["labels"][:, :-1]}


def unknown_token_values(rank: int) -> dict[str, torch.Tensor]:
    return {**good(rank), "token_weights": torch.ones(2, 24)}


def packed_lengths_that_do_not_fit(rank: int) -> dict[str, torch.Tensor]:
    return {key: value[:1] for key, value in good(rank).items()} | {"cu_seq_lens_q": torch.tensor([0, 10, 20])}


def weights_of_attention(rank: int) -> dict[str, Any]:
    return {**good(rank), "output_attentions": True}


def sharded_then_moved(rank: int) -> dict[str, Any]:
    shard = hf_burst.shard_batch(good(rank))
    return {**shard, "position_ids": shard["position_ids"] + 1}


def sharded_then_cut(rank: int) -> dict[str, Any]:
    return {
        key: value[:, :-1] if isinstance(value, torch.Tensor) else value
        for key, value in hf_burst.shard_batch(good(rank)).items()
    }


def sharded_otherwise_on_one_rank(rank: int) -> dict[str, Any]:
    chunking = "contiguous" if rank else "zigzag"
    return hf_burst.shard_batch(good(rank), config=hf_burst.BurstConfig(chunking=chunking))


def sharded_from_different_batches(rank: int) -> dict[str, Any]:
    return hf_burst.shard_batch(other_content(rank))


def sharded_by_hand(rank: int) -> dict[str, Any]:
    batch, rows = good(rank), slice(12 * rank, 12 * rank + 12)
    return {
        "input_ids": batch["input_ids"][:, rows],
        "position_ids": torch.arange(24)[rows].expand(2, -1),
        "shift_labels": models.shifted(batch["labels"])[:, rows],
    }


def sharded_without_positions(rank: int) -> dict[str, Any]:
    shard = hf_burst.shard_batch(good(rank))
    return {key: value for key, value in shard.items() if key != "position_ids"}


def sharded_with_a_mask(rank: int) -> dict[str, Any]:
    return {**hf_burst.shard_batch(good(rank)), "attention_mask": torch.ones(2, 12)}


def sharded_twice(rank: int) -> dict[str, Any]:
    return hf_burst.shard_batch(hf_burst.shard_batch(good(rank)))


def token_beyond_the_vocabulary(rank: int) -> dict[str, torch.Tensor]:
    batch = good(rank)
    batch["input_ids"][0, 20] = models.VOCABULARY  # in the shard of rank 0 alone
    return batch


def label_beyond_the_vocabulary(rank: int) -> dict[str, torch.Tensor]:
    batch = good(rank)
    batch["labels"][0, 21] = models.VOCABULARY
    return batch


def hidden_states_on_one_rank(rank: int) -> dict[str, Any]:
    return {**good(rank), "output_hidden_states": rank == 0}


def fused_head_on_one_rank(rank: int) -> dict[str, Any]:
    return {**good(rank), "fused_lm_head": rank == 0}


def router_logits_on_one_rank(rank: int) -> dict[str, Any]:
    return {**good(rank), "output_router_logits": True} if rank == 0 else good(rank)


def packed_by(lengths: list[int], rank: int) -> dict[str, torch.Tensor]:
    return {**{key: value[:1] for key, value in good(rank).items()}, "cu_seq_lens_q": torch.tensor(lengths)}


def lengths_that_fall(rank: int) -> dict[str, torch.Tensor]:
    return packed_by([0, 20, 10, 24], rank)


def no_lengths(rank: int) -> dict[str, torch.Tensor]:
    return packed_by([], rank)


def documents_beside_a_mask(rank: int) -> dict[str, torch.Tensor]:
    positions = torch.cat([torch.arange(10), torch.arange(14)]).expand(2, -1)
    return {**good(rank), "position_ids": positions, "attention_mask": torch.ones(2, 24, dtype=torch.int64)}


def items_on_one_rank(rank: int) -> dict[str, Any]:
    return {**good(rank), "num_items_in_batch": 7} if rank == 0 else good(rank)


def items_counted_by_each_rank(rank: int) -> dict[str, Any]:
    shard = hf_burst.shard_batch(good(rank))
    return {**shard, "num_items_in_batch": (shard["shift_labels"] != -100).sum()}


def no_items(rank: int) -> dict[str, Any]:
    return {**all_ignored(rank), "num_items_in_batch": torch.tensor(0)}


def sharded_without_its_labels(rank: int) -> dict[str, Any]:
    return {key: value for key, value in hf_burst.shard_batch(good(rank)).items() if key != "labels"}


def not_a_tensor_on_one_rank(rank: int) -> dict[str, Any]:
    return {**good(rank), "position_ids": "none"} if rank == 0 else good(rank)


CASES: dict[Callable[[int], dict[str, Any]], tuple[type[BurstError], str]] = {
    other_length: (RankMismatchError, "rank 0 has 2 x 24 tokens, rank 1 has 2 x 28 tokens"),
    other_content: (RankMismatchError, r"parallelism_config=hf_burst.BurstParallelismConfig\(burst_size=N\)"),
    other_documents: (RankMismatchError, "documents"),
    no_labels_on_one_rank: (RankMismatchError, "labels: rank 0 has True, rank 1 has False"),
    empty: (BatchError, r"input_ids is \(2, 0\)"),
    empty_on_one_rank: (BurstError, r"input_ids is \(2, 0\)"),
    all_ignored: (BatchError, "All labels of the batch are -100"),
    only_the_first_label: (BatchError, "All labels of the batch are -100"),
    mask_with_holes: (BatchError, "attention_mask of row 0 .* at the ends of a row"),
    mask_with_numbers: (BatchError, "mark tokens by 1, padding by 0"),
    mask_of_four_dimensions: (BatchError, r"\(2, 1, 24, 24\)"),
    mask_that_hides_a_row: (BatchError, "attention_mask of row 1 .*, with a token in each"),
    labels_on_padding: (BatchError, "4 tokens.*have labels|3 tokens.*have labels"),
    positions_of_another_shape: (BatchError, r"position_ids is \(1, 20\)"),
    labels_of_another_shape: (BatchError, r"labels is \(2, 23\)"),
    unknown_token_values: (BatchError, "token_weights.*looks like values of tokens"),
    packed_lengths_that_do_not_fit: (BatchError, "cu_seq_lens_q is .*must rise from 0 to 24"),
    weights_of_attention: (BatchError, "output_attentions"),
    sharded_then_moved: (BatchError, "position_ids of a sharded batch are others"),
    sharded_then_cut: (BatchError, "Leave shards as"),
    sharded_otherwise_on_one_rank: (RankMismatchError, "chunks: rank 0 has 4 .*, rank 1 has 2 "),
    sharded_from_different_batches: (RankMismatchError, "content"),
    sharded_by_hand: (BatchError, "shift_labels without the layout"),
    sharded_without_positions: (BatchError, "position_ids of a sharded batch is missing"),
    sharded_with_a_mask: (BatchError, "attention_mask"),
    sharded_twice: (BatchError, "Shard it once"),
    sharded_without_its_labels: (BatchError, "labels were taken out of a sharded batch"),
    token_beyond_the_vocabulary: (BurstError, "input_ids holds 61; this model takes 0 to 60"),
    label_beyond_the_vocabulary: (BurstError, "labels holds 61"),
    fused_head_on_one_rank: (RankMismatchError, "fused_lm_head: rank 0 has True, rank 1 has False"),
    router_logits_on_one_rank: (RankMismatchError, "router logits: rank 0 has True, rank 1 has None"),
    lengths_that_fall: (BatchError, "must rise from 0 to 24"),
    no_lengths: (BatchError, r"cu_seq_lens_q is \[\]"),
    documents_beside_a_mask: (BatchError, "row 0 go back at token 10 beside an attention_mask"),
    hidden_states_on_one_rank: (RankMismatchError, "hidden states: rank 0 has True"),
    items_on_one_rank: (
        RankMismatchError,
        r"\(labels of all ranks: .*\): rank 0 has 7.0, rank 1 has None",
    ),
    items_counted_by_each_rank: (RankMismatchError, "num_items_in_batch"),
    no_items: (BatchError, "All labels of the batch are -100"),
}


def train_on(rank: int, size: int, make: Callable[[int], dict[str, Any]]) -> float:
    model = models.patch(models.make_model("llama").train())
    model(**good(rank)).loss.backward()
    return float(model(**make(rank)).loss.detach())


@pytest.mark.parametrize("make", CASES, ids=lambda make: make.__name__)
def test_bad_batches_are_refused_on_every_rank(ranks: Ranks, make: Callable[[int], dict[str, Any]]) -> None:
    kind, message = CASES[make]
    with pytest.raises(RankError) as caught:
        ranks(2).run(train_on, make, timeout=60)
    for error in caught.value.errors:
        assert isinstance(error, kind), error
        assert pytest.RaisesExc(kind, match=message).matches(error), error
    assert len(set(ranks(2).run(train_on, good, timeout=60))) == 1


def test_any_exception_of_one_rank_reaches_all(ranks: Ranks) -> None:
    with pytest.raises(RankError) as caught:
        ranks(2).run(train_on, not_a_tensor_on_one_rank, timeout=60)
    own, other = caught.value.errors
    assert isinstance(own, AttributeError)
    assert isinstance(other, RankMismatchError)
    assert "Rank 0 of the group stopped" in str(other)


def give_tokens_twice(rank: int, size: int) -> None:
    model, batch = models.patch(models.make_model("llama").train()), good(rank)
    model(*([batch["input_ids"]] if rank == 0 else []), **batch)


def test_arguments_that_one_rank_gives_twice(ranks: Ranks) -> None:
    with pytest.raises(RankError) as caught:
        ranks(2).run(give_tokens_twice, timeout=60)
    own, other = caught.value.errors
    assert isinstance(own, TypeError)
    assert "multiple values for argument 'input_ids'" in str(own)
    assert isinstance(other, RankMismatchError)
    assert "Rank 0 of the group stopped" in str(other)


def plain_data_parallelism(rank: int, size: int) -> None:
    accelerator = Accelerator(cpu=True)
    model = models.patch(models.make_model("llama").train())
    rows = [{key: value[0] for key, value in models.make_batch("plain", 24, seed).items()} for seed in range(4)]
    wrapped, loader = accelerator.prepare(model, DataLoader(rows, batch_size=1))
    for batch in loader:
        wrapped(**batch)


def test_plain_data_parallelism_is_noticed_and_the_line_that_mends_it_is_said(ranks: Ranks) -> None:
    with pytest.raises(RankError) as caught:
        ranks(2).run(plain_data_parallelism)
    for error in caught.value.errors:
        assert isinstance(error, RankMismatchError)
        assert "parallelism_config=hf_burst.BurstParallelismConfig(burst_size=N)" in str(error)


def other_dtype(rank: int, size: int) -> None:
    model = models.make_model("llama", torch.float32 if rank else torch.float64)
    models.patch(model.train())(**good(rank))


def other_config(rank: int, size: int) -> None:
    config = hf_burst.BurstConfig(chunking="zigzag" if rank else "contiguous")
    models.patch(models.make_model("llama").train(), config)(**good(rank))


def other_mode(rank: int, size: int) -> None:
    models.patch(models.make_model("llama").train(rank == 0))(**good(rank))


def other_version(rank: int, size: int) -> None:
    with mock.patch("transformers.__version__", f"5.{rank}"):
        models.patch(models.make_model("llama").train())(**good(rank))


def other_outputs(rank: int, size: int, **asked: Any) -> None:
    """Rank 0 asks for them alone."""
    model = models.patch(models.make_model("llama").eval())
    model(good(rank)["input_ids"], **({} if rank else asked))


def dropout(rank: int, size: int) -> None:
    model = models.make_model("gpt2")
    model.config.attn_pdrop = 0.1
    models.patch(model.train())(**good(rank))


def missing_kernel(rank: int, size: int) -> None:
    config = hf_burst.BurstConfig(kernel="torch_flash")
    models.patch(models.make_model("llama").train(), config)(**good(rank))


def large_logits(rank: int, size: int) -> None:
    model = models.patch(models.make_model("llama").eval())
    with mock.patch.object(head, "LOGITS_LIMIT_GIB", 1e-9):
        assert model(**good(rank)).logits is None, "with labels the loss is all that is asked for"
        model(good(rank)["input_ids"])


def checkpoint_of_the_model(rank: int, size: int) -> None:
    model = models.patch(models.make_model("llama").train())
    checkpoint(model, **good(rank), use_reentrant=False)


def forward_derivatives(rank: int, size: int) -> None:
    model = models.patch(models.make_model("llama").train())
    batch = good(rank)
    embeddings = model.get_input_embeddings()(batch.pop("input_ids")).detach()
    with forward_ad.dual_level():
        model(inputs_embeds=embeddings, **batch)  # nothing is asked for
        model(inputs_embeds=forward_ad.make_dual(embeddings, torch.ones_like(embeddings)), **batch)


def transforms(rank: int, size: int, transform: str) -> None:
    model = models.patch(models.make_model("llama").train())
    batch = good(rank)
    embeddings = model.get_input_embeddings()(batch.pop("input_ids")).detach()

    def loss(inputs: torch.Tensor) -> torch.Tensor:
        return model(inputs_embeds=inputs, **batch).loss

    if transform == "jvp":
        torch.func.jvp(loss, (embeddings,), (torch.ones_like(embeddings),))
    else:
        getattr(torch.func, transform)(loss)(embeddings)


def decoder_by_itself(rank: int, size: int) -> None:
    """By the model, which generates, it is served, and with a cache."""
    model, ids = models.patch(models.make_model("llama").eval()), good(rank)["input_ids"]
    model.generate(ids, max_new_tokens=2, do_sample=False, pad_token_id=0)
    model(**good(rank)).loss.backward()
    with torch.no_grad():
        model.model(ids, use_cache=True, past_key_values=DynamicCache())
        model.model(ids)


def language_model_by_itself(rank: int, size: int) -> None:
    """What a wrapper hands to its language model, as well."""
    model = patch_under_check(tiny_wrapper("Gemma3ForConditionalGeneration"))
    model.model.language_model(good(rank)["input_ids"])


def learned_positions_run_out(rank: int, size: int) -> None:
    models.patch(models.make_model("gpt2").train())(**models.make_batch("plain", length=520))


def rows_that_do_not_exist(rank: int, size: int) -> None:
    models.patch(models.make_model("llama").eval())(good(rank)["input_ids"], logits_to_keep=torch.tensor([30]))


def batches_drift_apart(rank: int, size: int) -> None:
    """Contents are compared always, not in the first passes only: of one token, or of two that changed places."""
    model = models.patch(models.make_model("llama").train())
    for _ in range(20):
        model(**good(rank))
    batch = good(rank)
    if rank:
        batch["labels"][0, 7:9] = batch["labels"][0, 7:9].flip(0)
    model(**batch)


def gradients_on_one_rank(rank: int, size: int) -> None:
    with torch.set_grad_enabled(rank == 0):
        models.patch(models.make_model("llama").train())(**good(rank))


def negative_items(rank: int, size: int) -> None:
    models.patch(models.make_model("llama").train())(**good(rank), num_items_in_batch=-1)


def recurrent_layers_on_one_rank(rank: int, size: int) -> None:
    """The rank with them needs to know the machine before it cuts the batch."""
    forget_resources(ContextGroup.from_mesh(torch.distributed.group.WORLD))
    models.patch(models.make_model(("llama", "qwen3_5")[rank]).train())(**good(rank))


def shards_drift_apart(rank: int, size: int) -> None:
    model = models.patch(models.make_model("llama").train())
    for _ in range(20):
        model(**hf_burst.shard_batch(good(rank)))
    model(**sharded_from_different_batches(rank))


def mesh_that_does_not_fit(rank: int, size: int) -> None:
    Accelerator(cpu=True, parallelism_config=hf_burst.BurstParallelismConfig(burst_size=4))


def two_groups(rank: int, size: int) -> None:
    Accelerator(cpu=True, parallelism_config=hf_burst.BurstParallelismConfig(burst_size=1))
    model = models.patch(models.make_model("llama").train(), group=torch.distributed.group.WORLD)
    model(**good(rank))


@pytest.mark.parametrize(
    ("function", "kind", "message"),
    [
        (other_dtype, RankMismatchError, "dtype: rank 0 has torch.float64, rank 1 has torch.float32"),
        (other_config, RankMismatchError, r"BurstConfig: rank 0 has BurstConfig\(.*chunking='contiguous'"),
        (other_mode, RankMismatchError, "training: rank 0 has True, rank 1 has False"),
        (other_version, RankMismatchError, "transformers: rank 0 has 5.0, rank 1 has 5.1"),
        (partial(other_outputs, logits_to_keep=1), RankMismatchError, "logits to keep: rank 0 has .*rank 1 has None"),
        (partial(other_outputs, output_hidden_states=True), RankMismatchError, "hidden states: rank 0 has True"),
        (partial(other_outputs, fused_lm_head=True), RankMismatchError, "fused_lm_head: rank 0 has True"),
        (dropout, UnsupportedModelError, "config.attn_pdrop is 0.1"),
        (
            recurrent_layers_on_one_rank,
            RankMismatchError,
            "recurrent layers: rank 0 has none, rank 1 has 1 recurrent layer",
        ),
        (missing_kernel, KernelError, "torch_flash"),
        (large_logits, BatchError, "logits_to_keep"),
        (checkpoint_of_the_model, UnsupportedModelError, "given the whole model.*gradient_checkpointing_enable"),
        (forward_derivatives, NotImplementedError, "forward mode AD"),
        (partial(transforms, transform="grad"), UnsupportedModelError, "torch.func .*torch.autograd.grad"),
        (partial(transforms, transform="jvp"), UnsupportedModelError, "torch.func .*torch.autograd.grad"),
        (decoder_by_itself, UnsupportedModelError, "LlamaModel was called past the hooks.*2 ranks would hold whole"),
        (language_model_by_itself, UnsupportedModelError, "Gemma3TextModel was called past the hooks"),
        (learned_positions_run_out, BurstError, "position_ids holds 512; this model takes 0 to 511"),
        (rows_that_do_not_exist, BatchError, "logits_to_keep is .*24 tokens"),
        (batches_drift_apart, RankMismatchError, "content"),
        (shards_drift_apart, RankMismatchError, "content"),
        (gradients_on_one_rank, RankMismatchError, "gradients: rank 0 has True, rank 1 has False"),
        (negative_items, BatchError, "num_items_in_batch is -1"),
        (mesh_that_does_not_fit, ConfigError, "burst_size=4.*4 ranks, and 2 launched"),
        (two_groups, ConfigError, "Two groups are named"),
    ],
)
def test_bad_settings_are_refused_on_every_rank(
    ranks: Ranks, function: Callable[[int, int], None], kind: type[Exception], message: str
) -> None:
    with pytest.raises(RankError) as caught:
        ranks(2).run(function, timeout=60)
    for error in caught.value.errors:
        assert pytest.RaisesExc(kind, match=message).matches(error), error


def not_a_number(rank: int, size: int) -> None:
    model = models.make_model("llama").train()
    with torch.no_grad():
        model.model.layers[0].self_attn.v_proj.weight[0, 0] = math.nan
    models.patch(model)
    loss = model(**good(rank)).loss
    loss.backward()
    assert loss.isnan()
    assert model.lm_head.weight.grad.isnan().any()


def test_nan_passes_through(ranks: Ranks) -> None:
    ranks(2).run(not_a_number)


def test_settings_are_checked_where_they_are_made(monkeypatch: pytest.MonkeyPatch) -> None:
    for arguments, message in (
        ({"chunking": "spiral"}, "'spiral'.*'balanced', 'zigzag', 'contiguous'"),
        ({"schedule": "ring"}, "'auto', 'kv_ring', 'burst'"),
        ({"kernel": "flash"}, "'cpu_flash'"),
        ({"memory": "little"}, "'auto', 'manual', or an hf_burst.Memory"),
    ):
        with pytest.raises(ConfigError, match=message):
            hf_burst.BurstConfig(**arguments)
    with pytest.raises(ConfigError, match="no setting chunk; it has schedule"):
        hf_burst.BurstConfig.from_dict({"chunk": "zigzag"})
    for size in (0, -2, 1.5):
        with pytest.raises(ConfigError, match="burst_size"):
            hf_burst.BurstParallelismConfig(burst_size=size)
    with pytest.raises(ConfigError, match="cp_size=2"):
        hf_burst.BurstParallelismConfig(burst_size=2, cp_size=2)
    monkeypatch.setenv("HF_BURST_SIZE", "two")
    with pytest.raises(ConfigError, match="'two' is not a number"):
        hf_burst.BurstParallelismConfig.from_env()
    monkeypatch.setenv("HF_BURST_SIZE", "4")
    assert hf_burst.BurstParallelismConfig.from_env().burst_size == 4


def test_accelerates_own_context_parallelism_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    from accelerate.state import AcceleratorState

    config = ParallelismConfig(cp_size=2)
    monkeypatch.setattr(AcceleratorState, "_shared_state", {"parallelism_config": config})
    model = models.patch(models.make_model("llama").train())
    with pytest.raises(ConfigError, match="sharded twice"):
        model(**good(0))


def test_data_parallel_in_one_process_is_refused() -> None:
    model = models.patch(models.make_model("llama").train())
    model._is_replica = True  # as torch.nn.DataParallel marks its copies
    with pytest.raises(ConfigError, match="accelerate launch --multi_gpu --num_processes"):
        model(**good(0))


def test_a_single_process_in_the_place_of_several_is_told_of_the_launcher() -> None:
    """`accelerate launch --num_processes 2` starts one where accelerate's default config says so."""
    reset_accelerate()
    with pytest.raises(ConfigError, match=r"burst_size=2.* is 2 ranks, and 1 launched.* --multi_gpu"):
        Accelerator(cpu=True, parallelism_config=hf_burst.BurstParallelismConfig(burst_size=2))
    reset_accelerate()


def test_errors_are_value_errors() -> None:
    assert issubclass(BurstError, ValueError)
    assert not issubclass(nn.Module, BurstError)


def test_the_first_case_that_holds_is_refused() -> None:
    ConfigError.refuse((False, "no"), (0, "none"), ("", "empty"))
    with pytest.raises(ConfigError, match=r"^What: why\. Instead\.$"):
        ConfigError.refuse((None, "no"), (3, "What", "why", "Instead"), (True, "later"))


def run_other_integers(rank: int, size: int) -> None:
    """Integers of 32 bits before a batch is sharded, afterwards, and on one rank alone."""
    model = models.patch(models.make_model("llama"))
    batch = models.make_batch("packed", length=24)
    wanted = model(**hf_burst.shard_batch(batch)).loss
    short = {**batch, "position_ids": batch["position_ids"].int()}
    shard = hf_burst.shard_batch(short)
    assert torch.equal(model(**shard).loss, wanted)
    assert torch.equal(model(**{**shard, "position_ids": shard["position_ids"].long()}).loss, wanted)
    later = hf_burst.shard_batch(batch)
    assert torch.equal(model(**{**later, "position_ids": later["position_ids"].int()}).loss, wanted)
    assert torch.equal(model(**(short if rank else batch)).loss, wanted)


def test_positions_of_any_integers_are_the_same(ranks: Ranks) -> None:
    ranks(2).run(run_other_integers)
