"""Methods and options of peft: those that are served equal one process, the others are refused by their name."""

from collections.abc import Callable
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from hf_burst.errors import UnsupportedModelError
from hf_burst.hf.admission import PEFT_METHODS, check_adapters
from hf_burst.hf.forward_pass import random_rates
from hf_burst.hf.parts.dropout import check_shared_dropout
from tests.hf.test_wrappers import gradients_of
from tests.support import models
from tests.support.ranks import RankPool

Ranks = Callable[[int], RankPool]
TARGETS = ["q_proj", "v_proj"]
PATTERNS = {"rank_pattern": {"q_proj": 4}, "alpha_pattern": {"v_proj": 3}}
BLOCKS = {"target_modules_bd_a": ["q_proj"], "target_modules_bd_b": ["v_proj"], "nblocks": 2}
ENDS = ["embed_tokens", "lm_head", "q_proj"]
# options beside `target_modules`, which are q_proj and v_proj if none are named
SERVED: dict[str, list[dict[str, Any]]] = {
    "BEFT": [{"target_modules": ["v_proj"]}],
    "BOFT": [{"boft_block_size": 4, "boft_n_butterfly_factor": 2}, {"boft_block_size": 0, "boft_block_num": 8}],
    "C3A": [{"block_size": 8, "block_size_pattern": {"q_proj": 16}}],
    "DEFT": [{"r": 2, "init_scale": 0.5, "alpha": 4}, {"r": 2, "decomposition_method": "qr"}, {"r": 2, "para": True}],
    "DELORA": [{"r": 2, "delora_lambda": 7, "rank_pattern": {"q_proj": 4}, "lambda_pattern": {"v_proj": 3}}],
    "FOURIERFT": [
        {"n_frequency": 10, "scaling": 50.0, "random_loc_seed": 3, "n_frequency_pattern": {"q_proj": 5}},
    ],
    "FROD": [
        {
            "projection_prng_key": 3,
            "save_projection": False,
            "sparse_rate": 0.1,
            "regularization_alpha": 0.01,
            "progressbar": False,
        }
    ],
    "GLORA": [
        {"r": 2},
        {"config_A_B": "vector", "config_C": "vector", "config_D_E": "vector"},
        {"config_A_B": "constant", "config_C": "none", "config_D_E": "none"},
    ],
    "GRALORA": [{"r": 4, "alpha": 8}, {"r": 4, "hybrid_r": 2, "gralora_k": 4}],
    "HIRA": [{"r": 2, "rank_pattern": {"q_proj": 4}}, {"r": 2, "target_modules": ENDS}],
    "HRA": [{"r": 4}, {"r": 4, "apply_GS": True}],
    "IA3": [
        {"target_modules": ["k_proj", "down_proj"], "feedforward_modules": ["down_proj"], "init_ia3_weights": False},
    ],
    "LN_TUNING": [{"target_modules": None}],
    "LOHA": [{"r": 2, "alpha": 4, **PATTERNS}],
    "LOKR": [{"r": 2, "alpha": 4, **PATTERNS}, {"r": 2, "decompose_both": True, "decompose_factor": 4}],
    "LORA": [
        *({"init_lora_weights": way} for way in ("gaussian", "pissa", "pissa_niter_4", "olora", "orthogonal", "mica")),
        {"init_lora_weights": "mica", "target_modules": ENDS[::2]},
        {"init_lora_weights": "eva"},  # whose weights somebody reads from data, before or after
        {"use_rslora": True, "lora_alpha": 4, **PATTERNS},
        {"use_dora": True, "bias": "all"},
        {"use_dora": True, "target_modules": ENDS[::2]},
        {"lora_bias": True, "bias": "lora_only"},
        {"use_bdlora": BLOCKS},
        {"kasa_config": {"beta": 1e-3}},
        {"velora_config": {"num_groups": 4, "scale": 2.0, "init_type": "random"}},
        {"target_modules": ENDS},
        {"target_modules": ENDS, "ensure_weight_tying": True},
        {"trainable_token_indices": [1, 5, 9]},
        {"trainable_token_indices": [1, 5, 9], "ensure_weight_tying": True},
        {"modules_to_save": ["embed_tokens", "lm_head", "norm"]},
        {"target_modules": ["up_proj"], "modules_to_save": ["self_attn"]},
        {"layers_to_transform": [1], "layers_pattern": "layers"},
        {"layer_replication": [(0, 2), (1, 2)]},
        {"target_modules": [], "target_parameters": ["mlp.gate_proj.weight", "q_proj.weight"]},
    ],
    "MISS": [{"r": 2}, {"r": 4, "init_weights": "bat"}, {"r": 4, "mini_r": 2, "init_weights": "mini"}],
    "OFT": [
        {"r": 0, "oft_block_size": 4, "coft": True, "eps": 0.1},
        {"r": 8, "oft_block_size": 0, "block_share": True, "use_cayley_neumann": False},
        {"r": 0, "oft_block_size": 4, "num_cayley_neumann_terms": 3},
    ],
    "OSF": [{"effective_rank": 8, "rank_pattern": {"q_proj": 4}}],
    "PEANUT": [{"r": 4}, {"r": 4, "depth": 2, "act_fn": "gelu", "scaling": 0.5}],
    "PSOFT": [
        {"r": 4, "psoft_alpha": 8},
        {"r": 4, "psoft_svd": "lowrank", "psoft_svd_lowrank_niter": 4, "random_seed": 1, "psoft_orth": False},
        {"r": 4, "use_cayley_neumann": True, "num_cayley_neumann_terms": 3, "cayley_neumann_eps": 0.1},
        {"r": 4, "ab_svd_init": "pissa_init", "psoft_mag_a": False, "psoft_mag_b": False},
    ],
    "RANDLORA": [
        {"r": 4, "projection_prng_key": 3, "randlora_alpha": 10, "save_projection": False},
        {"r": 4, "sparse": True},
        {"r": 4, "very_sparse": True},
    ],
    "ROAD": [{"group_size": 4, "variant": f"road_{variant}"} for variant in (1, 2, 4)],
    "SUPERTUNING": [
        {"r": 2, "lora_alpha": 4},
        {"sparsity": 0.9, "select_top": False, "save_precomputed_indices": False},
    ],
    "TINYLORA": [
        {"r": 2, "u": 8, "projection_seed": 3, "save_projection": False, "init_v_bound": 0.1},
        {"weight_tying": 0.5},
    ],
    "TRAINABLE_TOKENS": [{"token_indices": [1, 5, 9], "target_modules": None}],
    "UNILORA": [{"r": 2, "proj_seed": 3, "theta_d_length": 16, "init_theta_d_bound": 0.1, "save_indices": True}],
    "VBLORA": [
        {"r": 2, "num_vectors": 12, "vector_length": 8, "topk": 3, "init_vector_bank_bound": 0.1},
        {"r": 2, "num_vectors": 12, "vector_length": 8, "init_logits_std": 0.2, "save_only_topk_weights": True},
    ],
    "VERA": [{"r": 4, "projection_prng_key": 3, "save_projection": False, "d_initial": 0.2}],
    "WAVEFT": [
        {"n_frequency": 10, "scaling": 5.0, "wavelet_family": "db2", "n_frequency_pattern": {"q_proj": 5}},
        {"n_frequency": 10, "use_idwt": False, "random_loc_seed": 3, "proportional_parameters": True},
    ],
}
XLORA: list[dict[str, Any]] = [
    {"enable_softmax": False, "use_trainable_adapters": True, "layerwise_scalings": True},
    {"top_k_lora": 1, "enable_softmax_topk": True, "softmax_temperature": 2.0, "use_trainable_adapters": True},
    {"enable_softmax": False, "xlora_depth": 2, "xlora_size": 16, "scaling_pass_value": 0.5},
    {"use_trainable_adapters": True, "global_scaling_weight": 2.0},
]
# how weights begin; and what all adapters of X-LoRA have
UNCOMPARED = {"loftq_config", "eva_config", "corda_config", "lora_ga_config", "runtime_config", "target_svd_config"}
UNCOMPARED |= {"hidden_size", "adapters"}


def config_of(method: str, options: dict[str, Any]) -> Any:
    from peft.mapping import PEFT_TYPE_TO_CONFIG_MAPPING

    kind = PEFT_TYPE_TO_CONFIG_MAPPING[method]
    ranks = {"r": 2} if method == "LORA" else {}
    return kind(**{"target_modules": TARGETS, "task_type": "CAUSAL_LM", **ranks, **options})


def test_every_option_that_is_admitted_was_compared() -> None:
    compared = {method: {name for options in every for name in options} for method, every in SERVED.items()}
    compared["XLORA"] = {name for options in XLORA for name in options}
    assert set(compared) == set(PEFT_METHODS)
    for method, options in PEFT_METHODS.items():
        missing = {name for name in {*options} - compared[method] - UNCOMPARED if "dropout" not in name}
        assert missing <= {"r"}, method


def compare(size: int, make: Callable[[], nn.Module]) -> None:
    """An adapted model that is patched beside one that is not; what it has learned makes each weight matter."""
    batch, losses, gradients = models.make_batch("right"), [], []
    for patched in (False, True):
        adapted = make().train()
        if patched:
            models.patch(adapted)
        torch.manual_seed(4)
        for parameter in adapted.parameters():
            if parameter.requires_grad:
                parameter.data += 0.05 * torch.randn_like(parameter)
        loss = adapted(**batch).loss if patched else models.plain_loss(adapted, batch)
        loss.backward()
        losses.append(loss.detach())
        gradients.append(gradients_of(adapted, size if patched else 1))
    torch.testing.assert_close(losses[1], losses[0], rtol=1e-5, atol=1e-6)
    assert gradients[0].keys() == gradients[1].keys() != set()
    for name, gradient in gradients[0].items():
        assert gradient.isfinite().all(), name
        assert (gradients[1][name] - gradient).norm() <= 1e-5 * gradient.norm() + 1e-7, name
    assert max(gradient.norm() for gradient in gradients[0].values()) > 1e-5


def base_of(options: dict[str, Any]) -> Any:
    """A model whose embeddings are those of its head where adapters are to be tied alike."""
    from transformers import LlamaForCausalLM

    model = models.make_model("llama")
    if not options.get("ensure_weight_tying"):
        return model
    torch.manual_seed(0)
    model.config.tie_word_embeddings = True
    return LlamaForCausalLM(model.config)


def adapt(rank: int, size: int, method: str, options: dict[str, Any]) -> None:
    from peft import get_peft_model

    def make() -> Any:
        base = base_of(options)
        torch.manual_seed(3)
        return get_peft_model(base, config_of(method, options))

    compare(size, make)


@pytest.mark.parametrize(
    ("method", "options"),
    [
        pytest.param(
            method,
            options,
            id=" ".join([method, *map(str, options)]),
            marks=[pytest.mark.full] * (number > 0 and (method != "LORA" or "init_lora_weights" in options)),
        )
        for method, every in SERVED.items()
        for number, options in enumerate(every)
    ],
)
def test_methods_of_peft_are_exact(ranks: Ranks, method: str, options: dict[str, Any]) -> None:
    ranks(2).run(adapt, method, options)


def save_mixers(rank: int, size: int) -> None:
    from peft import get_peft_model

    settings = config_of("LORA", {"target_modules": ["q_proj"], "modules_to_save": ["linear_attn"]})
    compare(size, lambda: get_peft_model(models.make_model("qwen3_5"), settings))


def test_recurrent_modules_that_are_saved(ranks: Ranks) -> None:
    """peft has two of each, and calls one."""
    ranks(2).run(save_mixers)


def mix_adapters(rank: int, size: int, folder: str, options: dict[str, Any]) -> None:
    from peft import XLoraConfig, get_peft_model

    def make() -> Any:
        base = models.make_model("llama")
        base.config.use_cache = False
        torch.manual_seed(3)
        settings = {"hidden_size": 32, "xlora_dropout_p": 0.0, "task_type": "CAUSAL_LM", **options}
        return get_peft_model(base, XLoraConfig(adapters={name: f"{folder}/{name}" for name in "01"}, **settings))

    compare(size, make)


def test_a_mixture_of_adapters(ranks: Ranks, tmp_path: Path) -> None:
    from peft import LoraConfig, get_peft_model

    for index in range(2):
        torch.manual_seed(index)
        settings = LoraConfig(r=2, target_modules=TARGETS, init_lora_weights=False, task_type="CAUSAL_LM")
        get_peft_model(models.make_model("llama"), settings, str(index)).save_pretrained(str(tmp_path))
    for options in XLORA:
        ranks(2).run(mix_adapters, str(tmp_path), options)


DROPOUTS = [
    (method, name)
    for method, options in PEFT_METHODS.items()
    for name in sorted(options)
    if "dropout" in name and "scale" not in name and method != "XLORA"  # whose classifier has layers of torch
]


@pytest.mark.parametrize(("method", "name"), DROPOUTS)
def test_each_token_has_a_mask_of_its_own(method: str, name: str) -> None:
    """Or the adapter is refused over several ranks: a mask for all tokens would differ between them."""
    from peft import get_peft_model

    batch, drawn = models.make_batch("plain"), list[torch.Size]()
    model = get_peft_model(models.make_model("llama"), config_of(method, SERVED[method][0] | {name: 0.5})).train()
    for module in model.modules():
        if type(module) is nn.Dropout:
            module.register_forward_pre_hook(lambda module, given: drawn.append(given[0].shape[:2]))
    try:
        check_shared_dropout(random_rates(model.modules()))
    except UnsupportedModelError as error:
        assert "drops layers or weights for a whole sequence" in str(error)  # noqa: PT017, since it need not be raised
        return
    models.plain_loss(model, batch)
    assert set(drawn) == {batch["input_ids"].shape}


# method, options, and what the error names
REFUSED: list[tuple[str, dict[str, Any], str]] = [
    ("ADALORA", {"init_r": 4, "target_r": 2, "total_step": 10}, "(?i)adalora"),  # which calls no hooks
    ("LILY", {}, "LILY is not served: it has not been found exact"),
    ("PVERA", {"r": 4}, "PVERA"),  # draws for each token, alike on all ranks
    ("SHIRA", {"r": 2}, "SHIRA"),  # draws which weights it trains
    ("ADAPTION_PROMPT", {"target_modules": None, "adapter_len": 3, "adapter_layers": 2}, "ADAPTION_PROMPT"),
    ("LORA", {"alora_invocation_tokens": [7, 8]}, r"LORA sets alora_invocation_tokens=\[7, 8\].*Leave it at None"),
    ("LORA", {"velora_config": {"num_groups": 4}}, "init_type='batch_average'.*Set init_type='random' there"),
    ("LORA", {"velora_config": {"init_type": "batch_average_once"}}, "init_type='batch_average_once'"),
    ("LORA", {"monteclora_config": {"num_samples": 2, "buffer_size": 4}}, "sets monteclora_config=Monte"),
    ("LORA", {"use_qalora": True, "qalora_group_size": 8}, "use_qalora=True.*Leave it at False"),
    ("FROD", {"runtime_offload_base_weight": True, "progressbar": False}, "runtime_offload_base_weight=True"),
]


def adapt_otherwise(rank: int, size: int, method: str, options: dict[str, Any], says: str) -> None:
    from peft import get_peft_model

    with pytest.raises(UnsupportedModelError, match=says):
        models.patch(get_peft_model(models.make_model("llama"), config_of(method, options)))
    if method == "ADAPTION_PROMPT":  # leaves no sign of itself in the model that it adapts
        return
    model = get_peft_model(models.patch(models.make_model("llama")), config_of(method, options)).train()
    with pytest.raises(UnsupportedModelError, match=says):
        model(**models.make_batch("right"))


@pytest.mark.parametrize(("method", "options", "says"), REFUSED, ids=lambda value: "" if value is None else None)
def test_others_are_refused(ranks: Ranks, method: str, options: dict[str, Any], says: str) -> None:
    ranks(2).run(adapt_otherwise, method, options, says)


def test_an_option_that_peft_does_not_have_yet() -> None:
    """Whatever a later version adds is refused as soon as somebody sets it."""
    from peft import LoraConfig

    @dataclass
    class Later(LoraConfig):  # type: ignore[misc]
        mixes_tokens: bool = False

    model: Any = nn.Module()
    model.peft_config = {"default": Later()}
    check_adapters(model)
    model.peft_config = {"default": Later(mixes_tokens=True)}
    with pytest.raises(UnsupportedModelError, match="'default' of the peft method LORA sets mixes_tokens=True"):
        check_adapters(model)
    assert {field.name for field in fields(Later)} - {"mixes_tokens"} >= {*PEFT_METHODS["LORA"]}
