"""The head sizes of all classes of Transformers by their default configs, and the kernel that serves them on GPUs."""

from collections import defaultdict
from typing import Any

import pytest
import torch
import transformers
from huggingface_hub.errors import StrictDataclassError

from hf_burst.errors import KernelError
from hf_burst.kernels import Band, KernelRequest, Scores, explain_kernels, torch_efficient
from hf_burst.kernels.ffpa import FfpaKernel
from hf_burst.kernels.torch_efficient import TorchEfficientKernel
from tests.kernels.test_kernels import (  # noqa: F401
    LIBRARIES,
    Shape,
    all_installed,
    by_kernel,
    calling,
    hopper,
    installed,
    make_tensors,
)
from tests.support import flash_libraries
from tests.support.oracle import relative_error
from tests.support.tiny_models import class_names

# kernels on Hopper, Ampere and Ada, where the packages that kernels know are installed
FLASH = {(9, 0): "flash_attn_4", (8, 0): "flash_attn_2", (8, 9): "flash_attn_2"}
WIDE = {(9, 0): "ffpa", (8, 0): "torch_efficient", (8, 9): "torch_efficient"}
# head sizes of q and k and of v, and whether scores are soft-capped: a class that has them, and its kernels
TABLE = {
    (21, 21, False): ("ReformerForMaskedLM", FLASH),
    (64, 64, False): ("BertForMaskedLM", FLASH),
    (80, 80, False): ("StableLmForCausalLM", FLASH),
    (96, 64, False): ("MiniCPM3ForCausalLM", FLASH),
    (96, 96, False): ("Phi3ForCausalLM", FLASH),
    (128, 128, False): ("LlamaForCausalLM", FLASH),
    (144, 144, False): ("Dots1ForCausalLM", FLASH),
    (192, 128, False): ("DeepseekV3ForCausalLM", FLASH),
    (192, 192, False): ("MiMoV2FlashForCausalLM", FLASH),
    (232, 232, False): ("ZambaForCausalLM", FLASH),
    (256, 256, False): ("Qwen3_5ForCausalLM", FLASH),
    (256, 256, True): ("Gemma2ForCausalLM", FLASH),
    (512, 512, False): ("Gemma4ForCausalLM", WIDE),
}


def heads_of(config: dict[str, Any]) -> set[tuple[int, int, bool]]:
    """The head sizes of a config that names them, of its layers that differ too."""
    capped = bool(config.get("attn_logit_softcapping"))
    if config.get("qk_nope_head_dim") is not None:
        return {(config["qk_nope_head_dim"] + config["qk_rope_head_dim"], config["v_head_dim"], capped)}
    layers = (layer.get("head_dim") for layer in (config.get("per_layer_config") or {}).values())
    width, heads = config.get("hidden_size"), config.get("num_attention_heads")
    own = config.get("head_dim") or (isinstance(heads, int) and heads and width and width // heads)
    return {(size, size, capped) for size in (own, *layers) if size}


def served(*heads: Any) -> list[str]:
    size, value_size, capped = heads
    explained = explain_kernels(KernelRequest("cuda", torch.bfloat16, size, value_size, softcap=capped))
    return [name for name, refusal in explained if refusal is None]


def test_the_table_has_every_head_size_of_transformers():
    found = defaultdict(set)
    for name in class_names():
        try:
            config = getattr(transformers, name).config_class().get_text_config(decoder=True)
        except StrictDataclassError:  # Gemma 4 for assistants has no default of its own
            continue
        for heads in heads_of(config.to_dict()):
            found[heads].add(name)
    unusual = {heads for heads in found if heads[0] < 64}  # of default configs that nobody trains
    assert set(found) - unusual <= set(TABLE)
    assert all(name in found[heads] for heads, (name, _) in TABLE.items() if hasattr(transformers, name))


@pytest.mark.parametrize("gpu", FLASH)
@pytest.mark.parametrize("heads", TABLE)
def test_kernels_of_the_table(monkeypatch, hopper, all_installed, gpu, heads):  # noqa: F811
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: gpu)
    assert served(*heads)[0] == TABLE[heads][1][gpu]


@pytest.mark.parametrize("gpu", FLASH)
def test_torch_alone_serves_all_but_capped_scores(monkeypatch, hopper, installed, gpu):  # noqa: F811
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: gpu)
    for module, _ in LIBRARIES.values():
        installed(module, None)
    slow = {heads for heads in TABLE if served(*heads) == ["reference"]}
    assert slow == {(256, 256, True)}


@pytest.mark.parametrize("window", [0, 3, 40])
@pytest.mark.parametrize(("rows", "columns"), [(61, 61), (61, 20), (20, 61)])
def test_windows_of_wide_heads_in_small_blocks(monkeypatch, window, rows, columns):
    """Blocks of which some see all columns, and some need no mask, equal the tile in one."""
    kernel = calling(flash_libraries.Aten(), TorchEfficientKernel())
    band = Band(columns - rows if rows < columns else 0, columns - rows + window if rows < columns else window)
    tensors = make_tensors(Shape(rows, columns, band), torch.bfloat16, 16)
    whole = by_kernel(kernel, tensors, band)
    assert len(list(kernel.pieces(band, tensors.q, tensors.k))) == 1
    monkeypatch.setattr(torch_efficient, "_MASK_SIZE", 200)
    pieces = list(kernel.pieces(band, tensors.q, tensors.k))
    assert len(pieces) > 2
    assert all(piece.band.high is None or piece.height * piece.width <= max(200, piece.width) for piece in pieces)
    for name, got in by_kernel(kernel, tensors, band).items():
        assert relative_error(got, whole[name].double()) <= 1e-2, name


def test_a_causal_square_that_ffpa_cannot_count_is_refused():
    q, k = (torch.empty(1, 1, 1, 512, dtype=torch.bfloat16).expand(1, 2**20, 1, 512) for _ in range(2))
    with pytest.raises(KernelError, match=r"less than 1,048,576 keys of 512 elements, not of 1,048,576\. Set"):
        FfpaKernel().forward(q, k, k, Band(low=0), Scores(1.0))
