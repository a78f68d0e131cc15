"""What would go past the functions that patching puts in place: an error that names it, or seen when a pass begins."""

import copy
import gc
import types
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn import functional
from transformers import AttentionInterface, AttentionMaskInterface, LlamaForCausalLM
from transformers.integrations.flash_attention import flash_attention_forward
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import sdpa_mask
from transformers.models.llama import modeling_llama
from transformers.models.llama.modeling_llama import LlamaAttention, LlamaMLP, LlamaRMSNorm
from transformers.models.qwen3_5.modeling_qwen3_5 import Qwen3_5GatedDeltaNet

import hf_burst
from hf_burst.check.tiny import Double
from hf_burst.errors import ConfigError, RankMismatchError, UnsupportedModelError
from hf_burst.hf.attention import ARRIVED
from tests.support import models
from tests.support.ranks import RankPool
from tests.support.trainers import lora_config

Ranks = Callable[[int], RankPool]
Change = Callable[[Any], Any]


def run(ranks: Ranks, size: int, function: Callable[..., Any], *arguments: Any) -> None:
    if size == 1:
        function(0, 1, *arguments)
    else:
        ranks(size).run(function, *arguments)


def fused_forward(self: Any, input_ids: Any = None, labels: Any = None, **kwargs: Any) -> Any:
    """As packages with a fused cross-entropy do: the loss of hidden states and weights."""
    hidden = self.model(input_ids=input_ids, **kwargs).last_hidden_state
    logits = hidden @ self.lm_head.weight.T
    loss = None
    if labels is not None:
        loss = functional.cross_entropy(logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten())
    return modeling_llama.CausalLMOutputWithPast(loss=loss, logits=logits)


def sdpa_forward(
    self: Any, hidden_states: Any, position_embeddings: Any = None, attention_mask: Any = None, **kwargs: Any
) -> Any:
    """As patches of rotary positions and of windows do: attention of the tokens that are here."""
    heads = (*hidden_states.shape[:-1], -1, self.head_dim)
    q, k, v = (layer(hidden_states).view(heads).transpose(1, 2) for layer in (self.q_proj, self.k_proj, self.v_proj))
    q, k = modeling_llama.apply_rotary_pos_emb(q, k, *position_embeddings)
    out = functional.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
    return self.o_proj(out.transpose(1, 2).flatten(2)), None


def deaf_layer(self: Any, hidden_states: Any, position_embeddings: Any = None, **kwargs: Any) -> Any:
    """A layer that hands on neither the mask nor what it is given by name."""
    attended, _ = self.self_attn(self.input_layernorm(hidden_states), position_embeddings, None)
    hidden_states = hidden_states + attended
    return hidden_states + self.mlp(self.post_attention_layernorm(hidden_states))


class OwnAttention(nn.Module):
    """A class of the user's, which attends by itself."""

    def __init__(self, like: Any) -> None:
        super().__init__()
        self.q_proj, self.k_proj, self.v_proj, self.o_proj = like.q_proj, like.k_proj, like.v_proj, like.o_proj
        self.head_dim = like.head_dim

    forward = sdpa_forward


@contextmanager
def class_forward(kind: Any, forward: Any) -> Iterator[None]:
    with mock.patch.object(kind, "forward", forward):
        yield


def refuse_losses(rank: int, size: int, on_class: bool, patch_first: bool, training: bool) -> None:
    model = models.make_model("llama").train(training)
    batch = models.make_batch("plain")
    if patch_first:
        models.patch(model)
        model(**batch)
    with class_forward(LlamaForCausalLM, fused_forward if on_class else LlamaForCausalLM.forward):
        if not on_class:
            model.forward = types.MethodType(fused_forward, model)
        if on_class and not patch_first:
            with pytest.raises(UnsupportedModelError, match="LlamaForCausalLM computes its loss by itself"):
                models.patch(model)
            return
        if not patch_first:
            models.patch(model)
        with pytest.raises(ConfigError, match=r"did not compute its loss .*bypassed\.fused_forward.*Switch fused"):
            model(**batch)
        model(input_ids=batch["input_ids"])  # without labels it computes what it should
    vars(model).pop("forward", None)
    model(**batch)


@pytest.mark.parametrize("size", [1, 2])
def test_a_forward_that_computes_the_loss_by_itself_is_an_error(ranks: Ranks, size: int) -> None:
    for on_class, patch_first, training in [(True, True, True), (True, False, True), (False, True, False)]:
        run(ranks, size, refuse_losses, on_class, patch_first, training)
    run(ranks, size, refuse_losses, False, False, True)


def refuse_on_one_rank(rank: int, size: int) -> None:
    """What only one rank replaced stops all of them before the model runs."""
    batch = models.make_batch("plain")
    model = models.patch(models.make_model("llama"))
    if rank == 1:
        model.forward = types.MethodType(fused_forward, model)
    with pytest.raises(RankMismatchError, match=r"forward of the model: rank 0 has .*, rank 1 has .*fused_forward"):
        model(**batch)
    vars(model).pop("forward", None)
    if rank == 0:
        model.model.layers[1].self_attn.forward = types.MethodType(sdpa_forward, model.model.layers[1].self_attn)
    with pytest.raises(RankMismatchError, match=r"forward of attention: rank 0 has .*sdpa_forward"):
        model(**batch)


def test_what_one_rank_replaced_is_an_error_on_all(ranks: Ranks) -> None:
    ranks(2).run(refuse_on_one_rank)


def replace_class(model: Any) -> Any:
    return class_forward(LlamaAttention, sdpa_forward)


def replace_one(model: Any) -> Any:
    attention = model.model.layers[1].self_attn
    return mock.patch.object(attention, "forward", types.MethodType(sdpa_forward, attention))


def replace_module(model: Any) -> Any:
    layer = model.model.layers[1]
    return mock.patch.dict(layer._modules, self_attn=OwnAttention(layer.self_attn))


def refuse_attention(rank: int, size: int, change: Change, how: str) -> None:
    model = models.make_model("llama").train()
    batch = models.make_batch("plain")
    if how != "changed, then patched":
        models.patch(model)(**batch)
    if how == "checkpointed":
        model.gradient_checkpointing_enable({"use_reentrant": True})
    called = torch.compile(model, backend="eager") if how == "compiled" else model
    with change(model):
        if how == "changed, then patched":
            models.patch(model)
        with pytest.raises(ConfigError, match="Attention was passed by"):
            called(**batch)
        with pytest.raises(ConfigError, match="Attention was passed by"):
            copy.deepcopy(model)(**batch)
    loss = model(**batch).loss
    torch.testing.assert_close(loss, models.plain_loss(models.make_model("llama"), batch))
    hf_burst.unpatch_model(model)
    assert not any(ARRIVED in vars(module) for module in model.modules())


@pytest.mark.parametrize(
    ("change", "size"),
    [
        *((replace_class, 1), (replace_one, 2)),
        *(pytest.param(*case, marks=pytest.mark.full) for case in ((replace_class, 2), (replace_one, 1))),
        *(pytest.param(replace_module, size, marks=pytest.mark.full) for size in (1, 2)),
    ],
)
def test_attention_that_does_not_arrive_is_an_error(ranks: Ranks, size: int, change: Change) -> None:
    ways = ["patched, then changed", "changed, then patched", "checkpointed"]
    for how in ways + (["compiled"] if size == 1 else []):
        run(ranks, size, refuse_attention, change, how)


def own_attention(*args: Any, **kwargs: Any) -> Any:
    return sdpa_attention_forward(*args, **kwargs)


def own_mask(*args: Any, **kwargs: Any) -> Any:
    return sdpa_mask(*args, **kwargs)


def test_a_mask_of_the_users_is_not_replaced() -> None:
    with mock.patch.dict(AttentionMaskInterface._global_mapping):
        AttentionMaskInterface.register("sdpa", own_mask)
        with pytest.raises(UnsupportedModelError, match=r"by 'sdpa', which is .*test_bypassed\.own_mask"):
            models.patch(models.make_model("llama"))


@pytest.mark.parametrize("name", ["mine", "sdpa", "eager"])
def test_a_function_of_the_users_is_not_replaced(name: str) -> None:
    with mock.patch.dict(AttentionInterface._global_mapping):
        model = models.make_model("llama")
        if name == "eager":
            patched = mock.patch.object(modeling_llama, "eager_attention_forward", own_attention)
        else:
            AttentionInterface.register(name, own_attention)
            patched = mock.patch.object(modeling_llama, "ALL_ATTENTION_FUNCTIONS", AttentionInterface())
        with patched:
            model.set_attn_implementation(name)
            with pytest.raises(UnsupportedModelError, match=rf"by '{name}', which is .*test_bypassed\.own_attention"):
                models.patch(model)
        assert model.config._attn_implementation == name
        assert not model._forward_hooks


def test_functions_of_transformers_are_replaced() -> None:
    with mock.patch.dict(AttentionInterface._global_mapping):
        AttentionInterface.register("some/flash-kernel", flash_attention_forward)  # as kernels of the hub are
        for name in ("eager", "sdpa", "flex_attention", "paged|eager", "some/flash-kernel"):
            model = models.make_model("llama")
            model.config._attn_implementation_internal = name
            models.patch(model)


def refuse_flags(rank: int, size: int) -> None:
    batch = models.make_batch("plain")
    for name, flag, words in (("llama", False, "causal"), ("bert", True, "not causal")):
        model = models.patch(models.make_model(name))
        model(**batch)
        modules = [module for module in model.modules() if hasattr(module, "is_causal")]
        modules[-1].is_causal = flag
        with pytest.raises(UnsupportedModelError, match=rf"\.is_causal is {flag}, and the mask .* is {words}\."):
            model(**batch)
        modules[-1].is_causal = not flag
        model(**batch)


@pytest.mark.parametrize("size", [1, 2])
def test_a_flag_that_the_mask_contradicts_is_refused(ranks: Ranks, size: int) -> None:
    run(ranks, size, refuse_flags)


def fused_model(self: Any, input_ids: Any = None, **kwargs: Any) -> Any:
    """A decoder that is computed from its weights."""
    hidden = self.embed_tokens(input_ids)
    for layer in self.layers:
        attention = layer.self_attn
        hidden = hidden + attention.o_proj(attention.q_proj(hidden).cumsum(1))
    return modeling_llama.BaseModelOutputWithPast(last_hidden_state=hidden)


def refuse_decoder(rank: int, size: int) -> None:
    model = models.patch(models.make_model("llama"))
    with class_forward(type(model.model), fused_model), pytest.raises(ConfigError, match=r"by tests.*fused_model, so"):
        model(**models.make_batch("plain"))


@pytest.mark.parametrize("size", [1, 2])
def test_a_decoder_without_its_attention_is_an_error(ranks: Ranks, size: int) -> None:
    run(ranks, size, refuse_decoder)


# state that is taken anew when a pass begins


def exchange_rotary(model: Any) -> None:
    scaled = models.llama_with({"rope_type": "dynamic", "factor": 4.0}, max_position_embeddings=16)
    model.model.rotary_emb = scaled.model.rotary_emb.double()


def scale_rotary(model: Any) -> None:
    rotary = model.model.rotary_emb
    rotary.rope_type, rotary.max_seq_len_cached, rotary.original_max_seq_len = "dynamic", 16, 16
    rotary.rope_init_fn = modeling_llama.ROPE_INIT_FUNCTIONS["dynamic"]
    rotary.config.max_position_embeddings = 16
    rotary.config.rope_parameters = {"rope_type": "dynamic", "factor": 4.0, "rope_theta": 1e4}


def enlarge_positions(model: Any) -> None:
    old = model.transformer.wpe
    model.transformer.wpe = nn.Embedding(1024, old.embedding_dim).double()
    with torch.no_grad():
        model.transformer.wpe.weight.copy_(torch.cat([old.weight.flip(0), old.weight]))


def enlarge_in_place(model: Any) -> None:
    table = model.transformer.wpe
    table.weight = nn.Parameter(torch.cat([table.weight.detach().flip(0), table.weight.detach()]))


def append_layer(model: Any) -> None:
    other = models.make_model("llama", torch.float64, seed=5)
    other.model.layers[1].self_attn.config = model.config
    model.model.layers.append(other.model.layers[1])
    model.config.num_hidden_layers = 3


def exchange_attention(model: Any) -> None:
    torch.manual_seed(7)
    model.model.layers[1].self_attn = LlamaAttention(model.config, 1).double()


def exchange_recurrent(model: Any) -> None:
    torch.manual_seed(7)
    model.model.layers[0].linear_attn = Qwen3_5GatedDeltaNet(model.config, 0).double()


def narrow_window(model: Any) -> None:
    model.config.sliding_window = 4


def resize_tokens(model: Any) -> None:
    torch.manual_seed(7)
    model.resize_token_embeddings(models.VOCABULARY + 8, mean_resizing=False)


CHANGES = {
    exchange_rotary: "llama",
    scale_rotary: "llama",
    enlarge_positions: "gpt2",
    enlarge_in_place: "gpt2",
    append_layer: "llama",
    exchange_attention: "llama",
    exchange_recurrent: "qwen3_5",
    narrow_window: "mistral",
    resize_tokens: "llama",
}


def compare(rank: int, size: int, model: Any, plain: Any, batch: dict[str, torch.Tensor]) -> None:
    """Loss and gradients of a patched model beside those of one in one process."""
    loss, wanted = model(**batch).loss, models.plain_loss(plain, batch)
    torch.testing.assert_close(loss, wanted, rtol=1e-8, atol=1e-8)
    loss.backward()
    wanted.backward()
    for ours, theirs in zip(model.parameters(), plain.parameters(), strict=True):
        if theirs.grad is None:
            continue
        gradient = ours.grad.full_tensor() if hasattr(ours.grad, "full_tensor") else ours.grad.clone()
        if size > 1 and gradient is not ours.grad and not hasattr(ours.grad, "full_tensor"):
            dist.all_reduce(gradient)
            gradient /= size
        torch.testing.assert_close(gradient, theirs.grad, rtol=1e-6, atol=1e-8)
    model.zero_grad()
    plain.zero_grad()


def change_between_passes(rank: int, size: int, change: Change, name: str) -> None:
    pair = [models.make_model(name, torch.float64).train() for _ in range(2)]
    batch = models.make_batch("plain", 41)
    model, plain = models.patch(pair[0]), pair[1]
    model(**batch).loss.backward()
    model.zero_grad()
    for each in pair:
        change(each)
    if change in (enlarge_positions, enlarge_in_place):
        batch = models.make_batch("plain", 530)
    with Double():  # recurrent layers compute in fp32 else
        compare(rank, size, model, plain, batch)


@pytest.mark.parametrize(
    ("change", "size"),
    [
        *((change, 2) for change in CHANGES),
        *(pytest.param(change, 1, marks=[pytest.mark.full] * (change is not append_layer)) for change in CHANGES),
    ],
)
def test_what_is_changed_after_patching_is_seen(ranks: Ranks, size: int, change: Change) -> None:
    run(ranks, size, change_between_passes, change, CHANGES[change])


def replaced_class(model: Any) -> Any:
    own = Qwen3_5GatedDeltaNet.forward

    def forward(self: Any, *args: Any, **kwargs: Any) -> Any:
        return own(self, *args, **kwargs)

    return class_forward(Qwen3_5GatedDeltaNet, forward)


def refuse_recurrent(rank: int, size: int) -> None:
    batch = models.make_batch("plain")
    model = models.patch(models.make_model("qwen3_5"))
    with replaced_class(model), pytest.raises(ConfigError, match=r"was replaced by tests\.hf\.models\.test_bypassed"):
        model(**batch)
    model(**batch)
    hf_burst.unpatch_model(model)
    with (
        replaced_class(model),
        pytest.raises(UnsupportedModelError, match=r"Qwen3_5GatedDeltaNet was replaced by tests\."),
    ):
        models.patch(model)


@pytest.mark.parametrize("size", [1, 2])
def test_a_recurrent_forward_that_was_replaced_is_an_error(ranks: Ranks, size: int) -> None:
    run(ranks, size, refuse_recurrent)


# what is as it should be


def liger_like(model: Any) -> None:
    """Other forwards for MLPs and norms."""
    for module in model.modules():
        if isinstance(module, LlamaMLP | LlamaRMSNorm):
            plain = module.forward
            module.forward = types.MethodType(lambda self, x, plain=plain: plain(x), module)


class Core(nn.Module):
    """Calls the attention function for the module around it."""

    is_causal, scaling, num_key_value_groups = True, 8**-0.5, 2

    def forward(self, config: Any, states: Any, mask: Any, **kwargs: Any) -> Any:
        attend = modeling_llama.ALL_ATTENTION_FUNCTIONS.get_interface(
            config._attn_implementation, modeling_llama.eager_attention_forward
        )
        return attend(self, *states, mask, dropout=0.0, scaling=self.scaling, **kwargs)[0]


class NestedAttention(OwnAttention):
    """A class of the user's that leaves it to a module inside."""

    def __init__(self, like: Any) -> None:
        super().__init__(like)
        self.config, self.core = like.config, Core()

    def forward(
        self, hidden_states: Any, position_embeddings: Any = None, attention_mask: Any = None, **kwargs: Any
    ) -> Any:
        heads = (*hidden_states.shape[:-1], -1, self.head_dim)
        q, k, v = (
            layer(hidden_states).view(heads).transpose(1, 2) for layer in (self.q_proj, self.k_proj, self.v_proj)
        )
        q, k = modeling_llama.apply_rotary_pos_emb(q, k, *position_embeddings)
        kwargs.pop("past_key_values", None)
        return self.o_proj(self.core(self.config, (q, k, v), attention_mask, **kwargs).flatten(2)), None


def nest_attention(model: Any) -> None:
    for layer in model.model.layers:
        layer.self_attn = NestedAttention(layer.self_attn)


def copy_model(model: Any) -> Any:
    return copy.deepcopy(model)


def share_attention(model: Any) -> None:
    first, second = model.model.layers
    second.self_attn = first.self_attn


def deafen_layer(model: Any) -> None:
    """Its attention reads the context."""
    layer = model.model.layers[1]
    layer.forward = types.MethodType(deaf_layer, layer)


def thin_layer(model: Any) -> None:
    """Its recurrent module reads the context, too."""
    layer = model.model.layers[0]
    layer.forward = types.MethodType(lambda self, x, **_: x + self.linear_attn(self.input_layernorm(x)), layer)


def skip_layers(model: Any) -> None:
    """A layer that is dropped, and one that drops its attention."""
    first, second = model.model.layers
    first.forward = types.MethodType(lambda self, hidden_states, *_, **__: hidden_states, first)
    second.self_attn.forward = types.MethodType(type(second.self_attn).forward, second.self_attn)


def checkpoint_layers(model: Any) -> None:
    model.gradient_checkpointing_enable({"use_reentrant": False})


def checkpoint_reentrant(model: Any) -> None:
    model.gradient_checkpointing_enable({"use_reentrant": True})
    model.enable_input_require_grads()


def compile_layers(model: Any) -> None:
    for layer in model.model.layers:
        layer.compile(backend="eager")


def generate_between(model: Any) -> None:
    model.eval()
    model.generate(models.make_batch("plain")["input_ids"][:, :5], max_new_tokens=3, do_sample=False)
    model.train()


SERVED: list[tuple[Change, str]] = [
    *((change, "llama") for change in (liger_like, share_attention, skip_layers, nest_attention)),
    (deafen_layer, "llama"),
    (thin_layer, "qwen3_5"),
    *((change, "llama") for change in (generate_between, copy_model)),
    *((change, "llama") for change in (checkpoint_layers, checkpoint_reentrant, compile_layers)),
    (checkpoint_layers, "qwen3_5"),
    (checkpoint_layers, "zamba"),
]


def serve(rank: int, size: int, change: Change, name: str) -> None:
    pair = [models.make_model(name, torch.float64).train() for _ in range(2)]
    model, plain = models.patch(pair[0]), pair[1]
    model = change(model) or model
    if change in (liger_like, share_attention, skip_layers, nest_attention, deafen_layer, thin_layer):
        change(plain)
    for seed in range(2):
        compare(rank, size, model, plain, models.make_batch("plain", seed=seed))
    if change not in (compile_layers, nest_attention, deafen_layer):  # which would compile anew; which have no cache
        generate_between(model)
        compare(rank, size, model, plain, models.make_batch("plain", seed=2))


@pytest.mark.parametrize(
    ("change", "name", "size"),
    [
        pytest.param(
            change,
            name,
            size,
            marks=[pytest.mark.full] * (size == 1 or name == "zamba" or change in (copy_model, checkpoint_reentrant))
            + [pytest.mark.slow] * (change is compile_layers),
        )
        for change, name in SERVED
        for size in (1, 2)
    ],
    ids=lambda each: getattr(each, "__name__", each),
)
def test_nothing_is_said_of_what_arrives(ranks: Ranks, size: int, change: Change, name: str) -> None:
    run(ranks, size, serve, change, name)


@pytest.mark.parametrize("checkpoints", [False, True])
def test_the_check_leaves_nothing_in_graphs(checkpoints: bool) -> None:
    """All layers share one graph, which is not broken, also where they checkpoint."""
    graphs: list[Any] = []

    def backend(graph: Any, inputs: Any) -> Any:
        graphs.append(graph)
        return graph.forward

    torch._dynamo.reset()
    model = models.patch(models.make_model("llama", layers=4).train())
    if checkpoints:
        model.gradient_checkpointing_enable()
    for layer in model.model.layers:
        layer.compile(backend=backend, fullgraph=True)
    for seed in range(2):
        model(**models.make_batch("plain", seed=seed)).loss.backward()
    assert len(graphs) == 1


def serve_fsdp(rank: int, size: int) -> None:
    """Weights that are sharded, and adapters, both after patching."""
    from peft import get_peft_model

    batch = models.make_batch("plain")
    model, plain = (models.make_model("llama", torch.float64).train() for _ in range(2))
    models.patch(model)(**batch)
    mesh = init_device_mesh("cpu", (size,))
    for layer in model.model.layers:
        fully_shard(layer.self_attn, mesh=mesh)
        fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)
    compare(rank, size, model, plain, batch)
    model, plain = (models.make_model("llama", torch.float64).train() for _ in range(2))
    models.patch(model)(**batch)
    adapted = []
    for each in (model, plain):
        torch.manual_seed(7)
        adapted.append(get_peft_model(each, lora_config()).double())
    compare(rank, size, *adapted, batch)


def test_nothing_is_said_of_weights_that_are_sharded_and_adapters(ranks: Ranks) -> None:
    ranks(2).run(serve_fsdp)


def test_a_model_is_freed_when_it_is_let_go() -> None:
    model = models.patch(models.make_model("llama"))
    model(**models.make_batch("plain")).loss.backward()
    attention = weakref.ref(model.model.layers[0].self_attn)
    gc.collect()
    gc.disable()
    try:
        del model
        assert attention() is None
    finally:
        gc.enable()
