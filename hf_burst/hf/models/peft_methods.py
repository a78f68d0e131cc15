"""Which adapters of peft are served: methods and options that were compared with one process, over several ranks."""

from collections.abc import Iterator, Mapping
from dataclasses import MISSING, fields
from types import MappingProxyType
from typing import Any

from torch import nn

from ...errors import UnsupportedModelError

# what a method adapts, how its weights begin, and what its config says of itself
_EVERYWHERE = frozenset(
    {
        *("auto_mapping", "base_model_name_or_path", "inference_mode", "peft_type", "peft_version", "revision"),
        *("task_type", "target_modules", "exclude_modules", "modules_to_save", "layers_to_transform", "layers_pattern"),
        *("bias", "fan_in_fan_out", "init_weights"),
    }
)
# Methods whose layers treat each token by itself, with the other options that they were compared with. Those that draw
# a mask for all tokens alike (module_dropout) are refused in training, see parts/dropout.py. An option that is missing
# keeps something of the batch (aLoRA), draws weights (MonteCLoRA), or was not compared.
PEFT_METHODS: Mapping[str, frozenset[str]] = MappingProxyType(
    {
        method: frozenset(options.split())
        for method, options in {
            "BEFT": "",
            "BOFT": "boft_block_size boft_block_num boft_n_butterfly_factor boft_dropout",
            "C3A": "block_size block_size_pattern",
            "DEFT": "r decomposition_method init_scale alpha para deft_dropout",
            "DELORA": "r delora_lambda module_dropout rank_pattern lambda_pattern",
            "FOURIERFT": "n_frequency scaling random_loc_seed n_frequency_pattern",
            "FROD": "projection_prng_key save_projection frod_dropout sparse_rate regularization_alpha progressbar",
            "GLORA": "r config_A_B config_C config_D_E",
            "GRALORA": "r hybrid_r alpha gralora_dropout gralora_k",
            "HIRA": "r hira_dropout rank_pattern",
            "HRA": "r apply_GS",
            "IA3": "feedforward_modules init_ia3_weights",
            "LN_TUNING": "",
            "LOHA": "r alpha rank_pattern alpha_pattern rank_dropout module_dropout",
            "LOKR": "r alpha rank_pattern alpha_pattern rank_dropout rank_dropout_scale module_dropout decompose_both "
            "decompose_factor",
            "LORA": "r lora_alpha lora_dropout use_rslora rank_pattern alpha_pattern lora_bias init_lora_weights "
            "loftq_config eva_config corda_config lora_ga_config runtime_config use_dora use_bdlora kasa_config "
            "velora_config trainable_token_indices target_parameters layer_replication ensure_weight_tying",
            "MISS": "r miss_dropout mini_r",
            "OFT": "r oft_block_size module_dropout coft eps block_share use_cayley_neumann num_cayley_neumann_terms",
            "OSF": "effective_rank rank_pattern target_svd_config",
            "PEANUT": "r depth act_fn scaling",
            "PSOFT": "r psoft_alpha psoft_dropout ab_svd_init psoft_svd psoft_svd_lowrank_niter random_seed psoft_orth "
            "psoft_mag_a psoft_mag_b use_cayley_neumann num_cayley_neumann_terms cayley_neumann_eps",
            "RANDLORA": "r projection_prng_key save_projection sparse very_sparse randlora_dropout randlora_alpha",
            "ROAD": "variant group_size",
            "SUPERTUNING": "sparsity select_top r lora_alpha lora_dropout save_precomputed_indices",
            "TINYLORA": "r u weight_tying projection_seed save_projection init_v_bound tinylora_dropout",
            "TRAINABLE_TOKENS": "token_indices",
            "UNILORA": "r proj_seed theta_d_length unilora_dropout init_theta_d_bound save_indices",
            "VBLORA": "r num_vectors vector_length topk save_only_topk_weights vblora_dropout init_vector_bank_bound "
            "init_logits_std",
            "VERA": "r projection_prng_key save_projection vera_dropout d_initial",
            "WAVEFT": "n_frequency scaling wavelet_family use_idwt random_loc_seed n_frequency_pattern "
            "proportional_parameters",
            "XLORA": "hidden_size adapters enable_softmax enable_softmax_topk layerwise_scalings xlora_depth "
            "xlora_size xlora_dropout_p use_trainable_adapters softmax_temperature top_k_lora scaling_pass_value "
            "global_scaling_weight",
        }.items()
    }
)
# options that are configs of their own: what has to be said in them. Other projections of VeLoRA are means of the batch
_WITHIN = {"velora_config": ("init_type", "random")}
_NOT_EXACT = "which has not been found exact where every rank holds a part of the tokens"


def check_adapters(model: nn.Module) -> None:
    """Raises for adapters of peft that are not served exactly; whether the model was patched before or after.

    Raises:
        UnsupportedModelError: With the method, or the option of it, that is not served.
    """
    for name, config in getattr(model, "peft_config", {}).items():
        method = getattr(config.peft_type, "value", config.peft_type)
        if method not in PEFT_METHODS:
            raise UnsupportedModelError(
                f"The adapter {name!r} is of the peft method {method}, {_NOT_EXACT}. Served are "
                f"{', '.join(sorted(PEFT_METHODS))}."
            )
        for option, value, default in _changed(config):
            if option not in _EVERYWHERE | PEFT_METHODS[method]:
                raise UnsupportedModelError(
                    f"The adapter {name!r} of the peft method {method} sets {option}={value!r}, {_NOT_EXACT}. Leave it "
                    f"at {default!r}."
                )
            within, needed = _WITHIN.get(option, ("", None))
            if within and getattr(value, within) != needed:
                raise UnsupportedModelError(
                    f"The adapter {name!r} of the peft method {method} sets {option} with "
                    f"{within}={getattr(value, within)!r}, {_NOT_EXACT}. Set {within}={needed!r} there, or leave out "
                    f"{option}."
                )


def _changed(config: Any) -> Iterator[tuple[str, Any, Any]]:
    """The options of a config that are not as by default: name, value and default."""
    for option in fields(config):
        default = option.default if option.default_factory is MISSING else option.default_factory()
        value = getattr(config, option.name)
        if value != default and (value or default):  # an empty list is as good as none
            yield option.name, value, default
