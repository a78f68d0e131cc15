"""Experts in 4 bits: quantized while a model is loaded, and over ranks as in one process."""

from collections.abc import Callable
from pathlib import Path
from unittest import mock

import pytest
import torch
import torch.distributed as dist
import transformers
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor
from transformers import AutoConfig, AutoModelForCausalLM, BitsAndBytesConfig, PreTrainedModel
from transformers.distributed import DistributedConfig

import hf_burst
from hf_burst.errors import ConfigError, UnsupportedModelError
from hf_burst.hf.generation import step_graphs
from hf_burst.hf.models.experts_4bit import Experts4bitQuantizer
from hf_burst.hf.parts import shared_beginnings, tiles
from hf_burst.hf.view import ModelView
from tests.support import models
from tests.support.ranks import RankError, RankPool
from tests.support.tiny_models import overrides_of, tiny_config

Ranks = Callable[[int], RankPool]
Saved = Callable[[str], Path]
bitsandbytes = pytest.importorskip("bitsandbytes")
SIZES = {"hidden_size": 64, "moe_intermediate_size": 64, "intermediate_size": 64}  # blocks of 64 weights have a scale
FAMILIES = ("Qwen3Moe", "Qwen3_5Moe", "Mixtral", "GptOss", "Glm4Moe", "DeepseekV3", "JetMoe", "LongcatFlash", "Inkling")


def make_model(family: str) -> PreTrainedModel:
    torch.manual_seed(0)
    model_class = getattr(transformers, f"{family}ForCausalLM")
    model = model_class(tiny_config(model_class.config_class, overrides_of(model_class.__name__, model_class) | SIZES))
    for parameter in model.parameters():
        if parameter.ndim > 1:  # so that tokens choose different experts, by a margin
            torch.nn.init.normal_(parameter, std=0.15)
    return model


def experts_of(model: PreTrainedModel) -> list[tuple[torch.nn.Module, str]]:
    """The modules that hold experts in 4 bits, and the names of these weights."""
    quantized = [module for module in model.modules() if hasattr(module, "parametrizations")]
    return [(module, name) for module in quantized for name in module.parametrizations]


def written_out(model: PreTrainedModel) -> PreTrainedModel:
    """The same model with its experts in full, as they are read."""
    for module, name in experts_of(model):
        torch.nn.utils.parametrize.remove_parametrizations(module, name)
    return model


def adapted(model: PreTrainedModel) -> torch.nn.Module:
    from peft import LoraConfig, get_peft_model

    targets = ["q_proj", "v_proj", "q_b_proj", "kv_b_proj"]
    found = [name for name in targets if any(path.endswith(name) for path, _ in model.named_modules())]
    torch.manual_seed(1)
    return get_peft_model(model, LoraConfig(r=4, target_modules=found, init_lora_weights=False))


@pytest.fixture
def saved(tmp_path: Path) -> Saved:
    """Saves models of a family."""

    def save(family: str) -> Path:
        make_model(family).save_pretrained(tmp_path / family)
        return tmp_path / family

    return save


def load(folder: Path) -> PreTrainedModel:
    """A model with experts in 4 bits. Linear layers stay as they are: bitsandbytes takes no small ones on CPUs."""
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(folder))
    linear = [path for path, module in model.named_modules() if isinstance(module, torch.nn.Linear)]
    config = hf_burst.Experts4bitConfig(llm_int8_skip_modules=linear)
    return AutoModelForCausalLM.from_pretrained(folder, quantization_config=config, dtype=torch.float32)


@pytest.mark.parametrize(
    "family", [pytest.param(n, marks=[pytest.mark.full] * (n in ("Mixtral", "Qwen3Moe", "Glm4Moe"))) for n in FAMILIES]
)
def test_all_experts_are_quantized_and_read_as_a_layer_needs_them(
    family: str, saved: Saved, caplog: pytest.LogCaptureFixture
) -> None:
    whole = [
        weight.numel() for weight in make_model(family).parameters() if weight.ndim == 3 and min(weight.shape[1:]) > 1
    ]
    model = load(saved(family))
    assert "in 4 bits" not in caplog.text, "nothing is left"
    assert "no experts" not in caplog.text
    found = experts_of(model)
    assert len(found) == len(whole)
    held = sum(module.parametrizations[name].original.nbytes for module, name in found)
    assert held == sum(whole) / 2
    assert all(not module.parametrizations[name].original.requires_grad for module, name in found)
    batch = models.make_batch("plain")
    with torch.no_grad():
        quantized = model(batch["input_ids"]).logits
        assert torch.equal(quantized, written_out(model)(batch["input_ids"]).logits)


def test_loading_quantizes_what_bitsandbytes_leaves(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """The weights lie one expert each in the checkpoint, and in bf16."""
    from bitsandbytes.functional import dequantize_4bit, quantize_4bit

    make_model("Qwen3Moe").to(torch.bfloat16).save_pretrained(tmp_path)
    linear = BitsAndBytesConfig(load_in_4bit=True, bnb_4bit_quant_type="nf4", bnb_4bit_use_double_quant=True)
    wanted = AutoModelForCausalLM.from_pretrained(tmp_path, quantization_config=linear, dtype=torch.float32)
    config = hf_burst.Experts4bitConfig().to_dict()  # a dict is taken, too
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path, quantization_config=config, dtype=torch.float32)
    assert [name for _, name in experts_of(loaded)] == ["gate_up_proj", "down_proj"] * loaded.config.num_hidden_layers
    ids = models.make_batch("plain")["input_ids"]
    with torch.no_grad():
        assert not torch.equal(loaded(ids).logits, wanted(ids).logits), "4 bits must be felt"
        for weight in wanted.parameters():
            if weight.ndim == 3:
                packed = quantize_4bit(weight, quant_type="nf4", compress_statistics=True)
                weight.copy_(dequantize_4bit(*packed))
        assert torch.equal(loaded(ids).logits, wanted(ids).logits)
    assert hf_burst.Experts4bitConfig.from_dict(config).to_dict() == config
    check_marks(loaded, tmp_path, caplog)


def check_marks(model: PreTrainedModel, folder: Path, caplog: pytest.LogCaptureFixture) -> None:
    """A model with experts in 4 bits is not cast and not saved, and moves with its scales. Its adapters are saved."""
    assert model.is_loaded_in_4bit
    caplog.clear()
    with pytest.raises(ValueError, match="not serializable"):
        model.save_pretrained(folder / "saved")
    assert "Save adapters, and merge them into the checkpoint in 16 bits." in caplog.text
    with pytest.raises(ConfigError, match="Experts in 4 bits are not dequantized: Transformers"):
        model.dequantize()
    for cast in (model.half, lambda: model.to(torch.bfloat16)):
        with pytest.raises(ValueError, match=r"quantized model|cast a bitsandbytes model"):
            cast()
    module, name = experts_of(model)[0]
    packed, dequantized = module.parametrizations[name].original, module.parametrizations[name][0]
    before = packed.clone()
    with_adapters = adapted(model)
    with pytest.raises(ConfigError, match=r"stored as torch\.float32, and is cast to torch\.bfloat16"):
        with_adapters.bfloat16()  # peft lets it pass
    assert torch.equal(packed.data.view(torch.uint8), before.data.view(torch.uint8))
    with_adapters.save_pretrained(folder / "adapters")
    assert {path.suffix for path in (folder / "adapters").iterdir()} == {".json", ".safetensors", ".md"}
    dequantized.to("meta")
    assert dequantized.state.absmax.is_meta
    assert dequantized.state.state2.absmax.is_meta


def test_what_is_left_in_16_bits_is_named(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    make_model("Qwen3Moe").save_pretrained(tmp_path)
    config = hf_burst.Experts4bitConfig(llm_int8_skip_modules=["lm_head", "model.layers.0"])
    model = AutoModelForCausalLM.from_pretrained(tmp_path, quantization_config=config)
    assert len(experts_of(model)) == 2 * (model.config.num_hidden_layers - 1)
    assert isinstance(model.model.layers[0].mlp.experts.gate_up_proj, torch.nn.Parameter)
    named = "these experts are not in 4 bits: model.layers.*.mlp.experts.down_proj, model.layers.*.mlp.experts.gate"
    assert named in caplog.text
    models.make_model("llama").save_pretrained(tmp_path)
    load(tmp_path)
    assert "LlamaForCausalLM has no experts in tensors of three dimensions" in caplog.text


def test_a_conversion_into_several_weights_quantizes_each() -> None:
    model = make_model("Qwen3Moe")
    quantizer = Experts4bitQuantizer(hf_burst.Experts4bitConfig(), pre_quantized=False)
    path, weights = "model.layers.0", {name: weight.detach() for name, weight in model.named_parameters()}
    quantizer.preprocess_model(model, device_map=None)
    names = [f"{path}.mlp.experts.down_proj", f"{path}.self_attn.q_proj.weight", f"{path}.input_layernorm.weight"]
    found = quantizer.get_quantize_ops().convert({name: [weights[name]] for name in names}, model=model)
    assert [type(found[name]).__name__ for name in names] == ["Params4bit", "Params4bit", "Tensor"]
    assert found[names[0]].quant_state.shape == weights[names[0]].shape
    model = make_model("Qwen3Moe")
    model.config.distributed_config = DistributedConfig(tp_size=2)
    with pytest.raises(ConfigError, match="experts of Qwen3MoeForCausalLM lie on several ranks"):
        quantizer.preprocess_model(model, device_map=None)


def compare(rank: int, size: int, folder: Path, kind: str, tile: int, checkpointing: bool) -> None:
    batch = models.make_batch(kind)
    plain = adapted(load(folder)).train()
    wanted = models.plain_loss(plain, batch)
    wanted.backward()
    model = adapted(load(folder)).train()
    models.patch(model, models.config_of(tiled_mlp=tile))
    if checkpointing:
        model.gradient_checkpointing_enable()
        model.enable_input_require_grads()
    loss = model(**batch).loss
    loss.backward()
    torch.testing.assert_close(loss, wanted, rtol=1e-6, atol=1e-6)
    for own, other in zip(model.parameters(), plain.parameters(), strict=True):
        assert (own.grad is None) == (other.grad is None)
        if own.grad is not None:
            dist.all_reduce(own.grad)
            torch.testing.assert_close(own.grad / size, other.grad, rtol=2e-5, atol=2e-6)
    assert not torch.nn.utils.parametrize._cache, "no experts are kept after a pass"
    assert not torch.nn.utils.parametrize._cache_enabled


@pytest.mark.parametrize(
    ("size", "family", "kind", "tile", "checkpointing"),
    [
        (2, "Qwen3Moe", "packed", 0, True),
        (3, "GptOss", "left", 5, False),
        pytest.param(2, "Qwen3_5Moe", "plain", 0, True, marks=pytest.mark.full),
        pytest.param(1, "Mixtral", "right", 7, True, marks=pytest.mark.full),
        pytest.param(4, "Glm4Moe", "packed", 5, True, marks=pytest.mark.full),
        pytest.param(2, "DeepseekV3", "right", 0, False, marks=pytest.mark.full),
    ],
)
def test_loss_and_gradients_equal_one_process(
    ranks: Ranks, saved: Saved, size: int, family: str, kind: str, tile: int, checkpointing: bool
) -> None:
    ranks(size).run(compare, saved(family), kind, tile, checkpointing)


@pytest.mark.parametrize("family", [pytest.param("Qwen3Moe", marks=pytest.mark.full), "Mixtral", "DeepseekV3"])
def test_blocks_of_experts_are_tiled_as_a_whole(saved: Saved, family: str, caplog: pytest.LogCaptureFixture) -> None:
    batch, folder = models.make_batch("plain"), saved(family)
    plain, model = adapted(load(folder)).train(), adapted(load(folder)).train()
    wanted = models.plain_loss(plain, batch)
    wanted.backward()
    assert not shared_beginnings._hooked(ModelView(model)), "texts that begin alike are joined, too"
    hf_burst.patch_model(model, hf_burst.BurstConfig(memory=hf_burst.Memory(tiled_mlp=7)))
    with caplog.at_level("INFO"), mock.patch.object(tiles, "tiled", wraps=tiles.tiled) as called:
        loss = model(**batch).loss
    assert "not computed in tiles" not in caplog.text
    blocks = [type(call.args[0]).__name__ for call in called.call_args_list]
    assert len(blocks) == model.config.num_hidden_layers
    assert not any("Experts" in name for name in blocks)
    loss.backward()
    torch.testing.assert_close(loss, wanted, rtol=1e-6, atol=1e-6)
    for own, other in zip(model.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(own.grad, other.grad, rtol=2e-5, atol=2e-6)


def load_all(folder: Path) -> PreTrainedModel:
    """A model with linear layers in 4 bits, too, in a dtype that FSDP2 shards."""
    options = {"bnb_4bit_quant_storage": torch.float32, "bnb_4bit_compute_dtype": torch.float32}
    config = hf_burst.Experts4bitConfig(**options)
    return AutoModelForCausalLM.from_pretrained(folder, quantization_config=config, dtype=torch.float32)


def compare_sharded(rank: int, size: int, folder: Path, linear: bool) -> None:
    batch, loaded = models.make_batch("packed"), load_all if linear else load
    plain = adapted(loaded(folder)).train()
    wanted = models.plain_loss(plain, batch)
    wanted.backward()
    model = adapted(loaded(folder)).train()
    models.patch(model)
    mesh = init_device_mesh("cpu", (size,))
    for layer in model.get_base_model().model.layers:
        fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)
    held = [module.parametrizations[name].original for module, name in experts_of(model)]
    linears = [module for module in model.modules() if type(module).__name__ == "Linear4bit"]
    assert bool(linears) == linear
    for weight in [*held, *(module.weight for module in linears)]:
        assert isinstance(weight, DTensor)
        assert weight.to_local().numel() <= -(-weight.shape[0] // size) * weight[0].numel()
    loss = model(**batch).loss
    loss.backward()
    torch.testing.assert_close(loss, wanted, rtol=1e-6, atol=1e-6)
    for own, other in zip(model.parameters(), plain.parameters(), strict=True):
        assert (own.grad is None) == (other.grad is None)
        if other.grad is not None:
            torch.testing.assert_close(own.grad.full_tensor(), other.grad, rtol=2e-5, atol=2e-6)
    whole = get_model_state_dict(model, options=StateDictOptions(full_state_dict=True))
    expected = plain.state_dict()
    if rank == 0 and not linear:  # of linear layers, one process has scales, too
        assert whole.keys() == expected.keys()
        for name, value in whole.items():  # as bytes, since bits of 4-bit numbers can be those of NaN
            assert torch.equal(value.data.view(torch.uint8), expected[name].data.view(torch.uint8))
    learning = get_model_state_dict(model, options=StateDictOptions(ignore_frozen_params=True))
    assert learning.keys() == {name for name in expected if "lora" in name}


@pytest.mark.parametrize(
    ("size", "family", "linear"),
    [
        (2, "Qwen3Moe", False),
        (3, "Qwen3Moe", True),
        (2, "Qwen3", True),
        *(
            pytest.param(*case, marks=pytest.mark.full)
            for case in ((1, "Qwen3", True), (3, "Qwen3", True), (1, "Qwen3Moe", True), (3, "GptOss", False))
        ),
    ],
)
def test_fsdp2_shards_weights_of_4_bits(ranks: Ranks, saved: Saved, size: int, family: str, linear: bool) -> None:
    ranks(size).run(compare_sharded, saved(family), linear)


def cast_what_is_stored(rank: int, size: int, folder: Path) -> None:
    model = adapted(load(folder)).train()
    models.patch(model)
    options = {"mesh": init_device_mesh("cpu", (size,)), "mp_policy": MixedPrecisionPolicy(torch.bfloat16)}
    for layer in model.get_base_model().model.layers:
        fully_shard(layer, **options)
    fully_shard(model, **options)
    model(**models.make_batch("plain"))


def test_weights_of_4_bits_that_fsdp2_would_cast_are_refused(ranks: Ranks, saved: Saved) -> None:
    with pytest.raises(RankError) as caught:
        ranks(2).run(cast_what_is_stored, saved("Qwen3Moe"))
    for error in caught.value.errors:
        assert isinstance(error, ConfigError)
        assert "stored as torch.float32, and is cast to torch.bfloat16" in str(error)


def test_what_cannot_be_quantized_is_refused() -> None:
    quantizer = Experts4bitQuantizer(hf_burst.Experts4bitConfig(), pre_quantized=False)
    with torch.device("meta"):
        large = transformers.Qwen3MoeForCausalLM(transformers.Qwen3MoeConfig(num_experts=1024, num_hidden_layers=1))
    with pytest.raises(ConfigError, match="a tensor of 3,221,225,472 weights: bitsandbytes counts them in 32 bits"):
        quantizer.preprocess_model(large, device_map=None)
    with pytest.raises(ConfigError, match="Experts4bitConfig has load_in_4bit=False"):
        hf_burst.Experts4bitConfig(load_in_4bit=False)
    with pytest.raises(ConfigError, match="bnb_4bit_quant_type is 'int4': it can be 'nf4' or 'fp4'"):
        hf_burst.Experts4bitConfig(bnb_4bit_quant_type="int4")


@pytest.mark.filterwarnings("ignore:target_parameters")
def test_adapters_of_experts_in_4_bits_are_refused(saved: Saved) -> None:
    """peft 0.21 finds no such weight."""
    from peft import LoraConfig, get_peft_model

    config = LoraConfig(r=4, target_modules=["q_proj"], target_parameters=["mlp.experts.gate_up_proj"])
    model = get_peft_model(load(saved("Qwen3Moe")), config)
    with pytest.raises(UnsupportedModelError, match=r"experts in 4 bits, and target_parameters=\['mlp.experts"):
        hf_burst.patch_model(model)


def test_steps_with_experts_in_4_bits_are_not_recorded(monkeypatch: pytest.MonkeyPatch, saved: Saved) -> None:
    """Nobody has tried it on a GPU, and each step dequantizes them all."""
    monkeypatch.setattr(step_graphs.CudaGraphs, "device_type", "cpu")
    assert step_graphs._obstacle(load(saved("Qwen3Moe"))) == "experts are in 4 bits"
