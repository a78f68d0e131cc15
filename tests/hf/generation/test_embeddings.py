"""Embeddings of rows whose tokens lie on 1 to 4 ranks, with a contrastive loss, beside one process."""

from collections.abc import Callable
from itertools import pairwise
from typing import Any

import pytest
import torch
from accelerate import Accelerator
from peft import LoraConfig, LoraModel, get_peft_model
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.nn import functional
from transformers import DataCollatorWithFlattening

import hf_burst
from hf_burst.check.compare import Double
from hf_burst.errors import BatchError, ConfigError, RankMismatchError
from tests.sizing.test_towers import made, with_images
from tests.support import models
from tests.support.gradients import Result, assert_equal
from tests.support.ranks import RankError, RankPool
from tests.support.tiny_models import tiny_model

Ranks = Callable[[int], RankPool]
Batch = dict[str, torch.Tensor]
MODELS = ("LlamaModel", "MistralModel", "Qwen3_5TextModel", "ModernBertModel", "BertModel")
HEADED = (
    *("LlamaForCausalLM", "Qwen3_5ForCausalLM", "MixtralForCausalLM", "BertForMaskedLM"),
    *("Qwen3ForSequenceClassification", "BertForSequenceClassification", "LlamaForTokenClassification"),
    *("LlamaForCausalLM lora", "LlamaForSequenceClassification lora"),
)
ELSEWHERE = {
    HEADED[0],
    HEADED[3],
    *HEADED[4::2],
}  # also tested with sharded batches, through wrappers or by another head
POOLINGS = ("first", "last", "mean")
PADDINGS = {"plain": None, "padded": [(0, 23), (0, 1), (4, 18)], "left": [(0, 23), (22, 23), (9, 23)]}
PACKINGS = {"packed": [[5, 1, 14, 3]], "packed rows": [[5, 18], [10, 1, 12], [23]]}


def make(name: str) -> Any:
    kind, _, adapted = name.partition(" ")
    torch.set_default_dtype(torch.float64)
    try:
        model = tiny_model(kind)
        if not adapted:
            return model
        task = "CAUSAL_LM" if kind.endswith("CausalLM") else "SEQ_CLS"
        return get_peft_model(model, LoraConfig(task_type=task, init_lora_weights=False, target_modules="all-linear"))
    finally:
        torch.set_default_dtype(torch.float32)


def rows(kind: str) -> Batch:
    """Three texts of up to 23 tokens, padded or not, or several packed into each row."""
    ids = torch.randint(5, 40, (3, 23), generator=torch.Generator().manual_seed(1))
    if kind in PACKINGS:
        sizes = PACKINGS[kind]
        positions = [torch.cat([torch.arange(size) for size in row]) for row in sizes]
        return {"input_ids": ids[: len(sizes)], "position_ids": torch.stack(positions)}
    if PADDINGS[kind] is None:
        return {"input_ids": ids}
    mask = torch.zeros_like(ids)
    for row, (start, stop) in enumerate(PADDINGS[kind]):
        mask[row, start:stop] = 1
    return {"input_ids": ids, "attention_mask": mask}


def alone(model: Any, batch: Batch, pooling: str) -> torch.Tensor:
    """Pooled by hand from the states of the decoder or encoder, row by row, or document by document."""
    model = getattr(model, "base_model", model)
    model = model.model.base_model if isinstance(model, LoraModel) else model
    options = {"use_cache": False} if "Bert" not in type(model).__name__ else {}
    if "position_ids" in batch:
        starts = [
            (batch["position_ids"][row] == 0).nonzero().flatten().tolist() for row in range(len(batch["input_ids"]))
        ]
        bounds = [pairwise([*row, 23]) for row in starts]
        documents = [ids[a:b][None] for ids, row in zip(batch["input_ids"], bounds, strict=True) for a, b in row]
        texts = [model(input_ids=document, **options).last_hidden_state[0] for document in documents]
    else:
        states, mask = model(**batch, **options).last_hidden_state, batch.get("attention_mask")
        texts = (
            list(states) if mask is None else [state[shown.bool()] for state, shown in zip(states, mask, strict=True)]
        )
    return torch.stack([{"first": text[0], "last": text[-1], "mean": text.mean(0)}[pooling] for text in texts])


def result(model: Any, embed: Callable[..., torch.Tensor], batch: Batch, pooling: str) -> Result:
    """A contrastive loss of the texts, the embeddings, and all gradients."""
    with Double():
        vectors = embed(model, batch, pooling)
        near = functional.normalize(vectors, dim=-1)
        loss = functional.cross_entropy(near @ near.flip(0).T / 0.1, torch.arange(len(near)))
        loss.backward()
    gradients = {name: weight.grad for name, weight in model.named_parameters() if weight.grad is not None}
    return loss.item(), {"embeddings": vectors.detach(), **gradients}


def over_ranks(rank: int, size: int, name: str, batch: Batch, pooling: str, sharded: bool = False) -> Result:
    batch = hf_burst.shard_batch(batch, causal="Bert" not in name) if sharded else batch
    model = models.patch(make(name))
    head = model.get_output_embeddings() if "lora" not in name else None
    if head is not None:
        head.register_forward_hook(lambda *_: pytest.fail("the head ran"))
    return result(model, hf_burst.embeddings, batch, pooling)


def compare(ranks: Ranks, name: str, size: int, kind: str, pooling: str, sharded: bool = False) -> None:
    batch = rows(kind)
    expected = result(make(name), alone, batch, pooling)
    assert_equal(ranks(size).run(over_ranks, name, batch, pooling, sharded), expected, 1e-10)


@pytest.mark.parametrize(
    ("name", "size"),
    [
        pytest.param(name, size, marks=[pytest.mark.full] * (size != always))
        for name, always in zip(MODELS, (3, 1, 1, 3, 1), strict=True)
        for size in (1, 2, 3, 4)
    ],
)
def test_embeddings_and_gradients_equal_one_process(ranks: Ranks, name: str, size: int) -> None:
    """Of Llama all products; of the others each pooling and each kind of batch."""
    kinds = ("plain", "padded", "packed rows")
    for place, pooling in enumerate(POOLINGS):
        for kind in kinds if name == "LlamaModel" else kinds[place : place + 1]:
            compare(ranks, name, size, kind, pooling)


@pytest.mark.parametrize("size", [pytest.param(1, marks=pytest.mark.full), 2, pytest.param(3, marks=pytest.mark.full)])
@pytest.mark.parametrize("name", [pytest.param(n, marks=[pytest.mark.full] * (n in ELSEWHERE)) for n in HEADED])
def test_heads_are_left_out(ranks: Ranks, name: str, size: int) -> None:
    for kind, pooling in (("left", "mean"), ("padded", "last"), ("packed", "first"), ("packed rows", "mean")):
        if "Bert" not in name or kind != "left":  # an encoder of learned positions
            compare(ranks, name, size, kind, pooling)


@pytest.mark.parametrize(
    ("name", "size"),
    [
        pytest.param(name, size, marks=[pytest.mark.full] * (size != always))
        for name, always in (
            *(("LlamaModel", 1), ("Qwen3_5ForCausalLM", 3), ("BertModel", 3), ("BertForSequenceClassification", 1)),
            *(("Qwen3ForSequenceClassification", 3), ("LlamaForCausalLM lora", 1)),
        )
        for size in (1, 2, 3)
    ],
)
def test_shards_and_their_documents(ranks: Ranks, name: str, size: int) -> None:
    for kind, pooling in (("plain", "last"), ("padded", "mean"), ("packed", "last"), ("packed rows", "mean")):
        compare(ranks, name, size, kind, pooling, sharded=True)


def collated(rank: int, size: int) -> Result:
    """Labelled samples of a collator that flattens them, and shards."""
    ids = rows("packed")["input_ids"][0].split(PACKINGS["packed"][0])
    collator = hf_burst.BurstCollator(DataCollatorWithFlattening(return_flash_attn_kwargs=True))
    return result(
        models.patch(make("LlamaForCausalLM")),
        hf_burst.embeddings,
        collator([{"input_ids": each.tolist()} for each in ids]),
        "mean",
    )


def test_batches_of_a_collator(ranks: Ranks) -> None:
    expected = result(make("LlamaForCausalLM"), alone, rows("packed"), "mean")
    assert_equal(ranks(2).run(collated), expected, 1e-10)


def by_lengths(rank: int, size: int, keys: tuple[str, ...]) -> Result:
    """Documents by their lengths, beside labels that are not read."""
    bounds = torch.tensor([0, 5, 6, 20, 23])
    given = {"cu_seq_lens_q": bounds, "cu_seq_lens_k": bounds, "max_length_q": 14, "max_length_k": 14}
    numbers = {"seq_idx": torch.arange(4).repeat_interleave(bounds.diff())[None]}
    ids = rows("packed")["input_ids"]
    batch = {"input_ids": ids, "labels": ids, "num_items_in_batch": 22, **(given | numbers)}
    batch = {key: value for key, value in batch.items() if key not in (*given, *numbers) or key in keys}
    return result(models.patch(make("LlamaForCausalLM")), hf_burst.embeddings, batch, "last")


@pytest.mark.parametrize("keys", [("seq_idx",), ("cu_seq_lens_q", "cu_seq_lens_k", "max_length_q", "max_length_k")])
def test_documents_by_lengths_and_numbers(ranks: Ranks, keys: tuple[str, ...]) -> None:
    expected = result(make("LlamaForCausalLM"), alone, rows("packed"), "last")
    assert_equal(ranks(2).run(by_lengths, keys), expected, 1e-10)


def goes_on(rank: int, size: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Losses and logits of a model before and after it embedded texts, one of them in vain."""
    model, batch = models.patch(make("LlamaForCausalLM")), rows("plain")
    before = model(**batch, labels=batch["input_ids"]).loss.detach()
    assert "forward" not in vars(model)
    with pytest.raises(BatchError):
        hf_burst.embeddings(model, {**batch, "position_ids": torch.zeros(7, 7)})
    hf_burst.embeddings(model, batch)
    assert "forward" not in vars(model)
    return before, model(**batch, labels=batch["input_ids"]).loss.detach(), model.eval()(**batch).logits.detach()


def test_the_model_is_as_before(ranks: Ranks) -> None:
    for before, after, logits in ranks(2).run(goes_on):
        assert torch.equal(before, after)
        assert logits.shape == (3, 23, make("LlamaForCausalLM").config.vocab_size)


def in_mixed_precision(rank: int, size: int) -> tuple[torch.Tensor, torch.Tensor]:
    accelerator = Accelerator(mixed_precision="bf16", cpu=True)
    vectors = []
    for name in ("LlamaForCausalLM", "LlamaModel"):
        inner = make(name).float()
        if name == "LlamaModel":
            inner.load_state_dict(make("LlamaForCausalLM").float().model.state_dict())
        model = accelerator.prepare(models.patch(inner))
        with torch.no_grad():
            vectors.append(hf_burst.embeddings(model, rows("padded"), "mean"))
    return vectors[0], vectors[1]


def test_the_base_model_runs_in_the_precision_of_accelerate(ranks: Ranks) -> None:
    for headed, bare in ranks(2).run(in_mixed_precision):
        assert headed.dtype == torch.float32
        assert torch.equal(headed, bare)


def that_begin_alike(rank: int, size: int) -> Result:
    model = models.patch(make("LlamaForCausalLM"), hf_burst.BurstConfig(share_prefixes=True))
    return result(model, hf_burst.embeddings, {"input_ids": ALIKE["input_ids"]}, "mean")


def test_texts_that_begin_alike(ranks: Ranks) -> None:
    expected = result(make("LlamaForCausalLM"), alone, {"input_ids": ALIKE["input_ids"]}, "mean")
    assert_equal(ranks(2).run(that_begin_alike), expected, 1e-10)


def frugal(rank: int, size: int, name: str) -> Result:
    """With checkpoints, which wait on the host, and tiles; without what has fp32 computed in fp64."""
    memory = hf_burst.Memory(activation_offloading=1.0, layers_per_checkpoint=2, tiled_mlp=3)
    model = models.patch(make(name).train(), hf_burst.BurstConfig(memory=memory))
    model.gradient_checkpointing_enable()
    vectors = hf_burst.embeddings(model, rows("packed"), "mean")
    vectors.square().sum().backward()
    return vectors.square().sum().item(), {name: weight.grad for name, weight in model.named_parameters()}


@pytest.mark.parametrize("name", ["LlamaForCausalLM", "LlamaForSequenceClassification"])
def test_checkpoints_and_tiles(ranks: Ranks, name: str) -> None:
    model = make(name)
    loss = alone(model, rows("packed"), "mean").square().sum()
    loss.backward()
    gradients = {name: weight.grad for name, weight in model.named_parameters() if weight.grad is not None}
    found = [
        (own, {name: grad for name, grad in each.items() if grad is not None})
        for own, each in ranks(2).run(frugal, name)
    ]
    assert_equal(found, (loss.item(), gradients), 1e-6)  # norms in fp32


def of_images(rank: int, size: int) -> Result:
    return result(models.patch(seeing()[0]), hf_burst.embeddings, seeing()[1], "mean")


def seeing() -> tuple[Any, Batch]:
    """A model with a language-model head that sees, and a text with two images for two rows."""
    torch.manual_seed(0)
    model, batch = made("qwen")[0].double(), with_images([8, 16])
    texts = {key: value.repeat(2, *[1] * (value.ndim - 1)) for key, value in batch.items() if key != "labels"}
    texts["input_ids"][1, -20:] = 7
    return model, {key: value.double() if value.is_floating_point() else value for key, value in texts.items()}


def test_images_and_their_tower(ranks: Ranks) -> None:
    """Gradients of the tower, too."""

    def plain(model: Any, batch: Batch, pooling: str) -> torch.Tensor:
        found: torch.Tensor = model.model(**batch, use_cache=False).last_hidden_state.mean(1)
        return found

    expected = result(seeing()[0], plain, seeing()[1], "mean")
    assert any("visual" in name for name in expected[1])
    assert_equal(ranks(2).run(of_images), expected, 1e-10)


def test_sums_are_wide_under_autocast() -> None:
    model = models.patch(make("LlamaModel").float())
    with torch.no_grad(), torch.autocast("cpu", torch.bfloat16):
        found = hf_burst.embeddings(model, PLAIN, "mean")
        states = model(**PLAIN).last_hidden_state
    torch.testing.assert_close(found, states.float().mean(1))


def wrapped(rank: int, size: int, how: str, name: str, batch: Batch) -> Result:
    """Through a data-parallel wrapper, which averages gradients; the second of two steps."""
    plain = models.patch(make(name).train())
    if how == "ddp":
        headed = plain.base_model is not plain
        model: Any = torch.nn.parallel.DistributedDataParallel(plain, find_unused_parameters=headed)
    else:
        mesh = init_device_mesh("cpu", (size,))
        for layer in plain.base_model.layers:
            fully_shard(layer, mesh=mesh)
        model = fully_shard(plain, mesh=mesh)
    result(model, hf_burst.embeddings, batch, "mean")
    model.zero_grad()
    loss, found = result(model, hf_burst.embeddings, batch, "mean")
    whole = {name: value.full_tensor() if isinstance(value, DTensor) else value for name, value in found.items()}
    return loss, {name.removeprefix("module."): value for name, value in whole.items()}


@pytest.mark.parametrize(
    ("name", "how"),
    [
        *(("LlamaModel", "fsdp2"), ("LlamaForCausalLM", "fsdp2"), ("LlamaForSequenceClassification", "ddp")),
        *(pytest.param(name, "ddp", marks=pytest.mark.full) for name in ("LlamaModel", "LlamaForCausalLM")),
        pytest.param("LlamaForSequenceClassification", "fsdp2", marks=pytest.mark.full),
    ],
)
def test_through_wrappers(ranks: Ranks, how: str, name: str) -> None:
    batch = rows("padded")
    expected = result(make(name), alone, batch, "mean")
    assert_equal(ranks(2).run(wrapped, how, name, batch), expected)


def gathers(rank: int, size: int) -> list[int]:
    """The numbers that a rank sends, by message."""
    sent = list[int]()
    gather, reduce = torch.distributed.all_gather, torch.distributed.all_reduce
    model = models.patch(make("LlamaModel"))
    batch = {"input_ids": torch.arange(640).remainder(40)[None]}

    def noted(function: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any, **kwargs: Any) -> Any:
            sent.extend(value.numel() for value in args if isinstance(value, torch.Tensor))
            return function(*args, **kwargs)

        return call

    torch.distributed.all_gather, torch.distributed.all_reduce = noted(gather), noted(reduce)
    try:
        with torch.no_grad():
            hf_burst.embeddings(model, {**batch, "output_hidden_states": True})
            vectors = max(sent)
            sent.clear()
            model(**batch)
    finally:
        torch.distributed.all_gather, torch.distributed.all_reduce = gather, reduce
    return [vectors, max(sent)]


def test_hidden_states_are_not_gathered(ranks: Ranks) -> None:
    for vectors, states in ranks(2).run(gathers):
        assert states >= 320 * 32, "of the rank's tokens, where last_hidden_state is asked for"
        assert vectors < 320


def given(rank: int, size: int, name: str, batch: Batch, poolings: tuple[str, ...], shards: str) -> None:
    """Embeds a batch, or shards of it, of which ranks may hold others."""
    if shards == "of an encoder":
        batch = hf_burst.shard_batch(batch, causal=False)
    elif shards == "joined":
        batch = hf_burst.shard_batch(batch, config=hf_burst.BurstConfig(share_prefixes=True))
    elif shards == "unequal":
        batch = hf_burst.shard_batch({"input_ids": batch["input_ids"] + rank})
    elif shards == "on one rank":
        batch = hf_burst.shard_batch(batch) if rank else batch
    model = models.patch(make(name))
    if poolings[rank % len(poolings)] == "none":
        model(**batch)
    else:
        hf_burst.embeddings(model, batch, poolings[rank % len(poolings)])


EMPTY = {"input_ids": torch.ones(2, 8, dtype=torch.long), "attention_mask": torch.tensor([[1] * 8, [0] * 8])}
PLAIN = {"input_ids": torch.ones(1, 8, dtype=torch.long)}
ALIKE = {"input_ids": torch.arange(8).repeat(2, 1) + torch.tensor([[0] * 6 + [0] * 2, [0] * 6 + [1] * 2])}
NOTHING = {**PLAIN, "cu_seq_lens_q": torch.tensor([0, 3, 3, 8])}
BACK = {"input_ids": torch.ones(1, 8, dtype=torch.long), "position_ids": torch.arange(8).remainder(4)[None]}
HIDDEN = {**BACK, "attention_mask": torch.tensor([[1] * 7 + [0]])}


@pytest.mark.parametrize(
    ("name", "batch", "poolings", "shards", "error", "sentence"),
    [
        ("LlamaModel", EMPTY, ("mean",), "", BatchError, "attention_mask of row 1 "),
        ("LlamaForCausalLM", NOTHING, ("mean",), "", BatchError, "no tokens"),
        ("LlamaForCausalLM", HIDDEN, ("mean",), "", BatchError, "go back at token 4"),
        ("LlamaModel", PLAIN, ("max",), "", ConfigError, "pooling='max'; it is one of"),
        ("LlamaForCausalLM", PLAIN, ("max",), "", ConfigError, "pooling='max'; it is one of"),
        ("LlamaModel", PLAIN, (None,), "", ConfigError, "pooling='None'; it is one of"),
        ("LlamaModel", PLAIN, ("last", "max"), "", (ConfigError, RankMismatchError), "pooling='max'; it is one of"),
        ("LlamaForCausalLM", PLAIN, ("last", "mean"), "", RankMismatchError, "pooling of embeddings"),
        ("LlamaForCausalLM", PLAIN, ("last", "none"), "", RankMismatchError, "pooling of embeddings"),
        ("LlamaForSequenceClassification", PLAIN, ("last", "none"), "", RankMismatchError, "pooling of embeddings"),
        ("LlamaModel", PLAIN, ("last",), "of an encoder", BatchError, "causal=True"),
        ("LlamaForCausalLM", ALIKE, ("last",), "joined", BatchError, "share_prefixes=True"),
        ("LlamaForCausalLM", PLAIN, ("last",), "unequal", RankMismatchError, "content"),
        ("LlamaForCausalLM", PLAIN, ("last",), "on one rank", RankMismatchError, "sharded already"),
    ],
)
def test_what_is_refused(
    ranks: Ranks, name: str, batch: Batch, poolings: tuple[str, ...], shards: str, error: Any, sentence: str
) -> None:
    with pytest.raises(RankError) as caught:
        ranks(2).run(given, name, batch, poolings, shards)
    for problem in caught.value.errors:
        assert isinstance(problem, error)
        assert sentence in str(problem)


def test_a_model_that_is_not_patched() -> None:
    with pytest.raises(ConfigError, match="patch_model"):
        hf_burst.embeddings(make("LlamaModel"), PLAIN)
