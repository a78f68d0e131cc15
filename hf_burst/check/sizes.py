"""Config entries that are sizes, and their small values for a tiny model."""

import re
from typing import Any

LAYER_COUNTS = (
    *("num_hidden_layers", "num_layers", "n_layer", "n_layers", "decoder_layers", "num_decoder_layers"),
    *("layers", "depth", "encoder_layers"),
)
LAYER_LISTS = re.compile(r"layer|_ids$|idx|indices|indexes")  # lists of layers, by their indices
STEPS = re.compile(r"_(step|interval|freq|frequency|period|pattern)$|every_n_|(kv|key_value)_heads$|per_tok$")
VOCABULARY, LAYERS, WINDOW, POSITIONS = 67, 4, 7, 128
EXTENDED = 20  # pretraining length that scaled RoPE extends: shorter than a batch
POSITION_COUNTS = ("max_position_embeddings", "n_positions", "n_ctx", "max_seq_len", "max_target_positions")
HEAD_COUNTS = (
    *("num_attention_heads", "num_heads", "n_head", "n_heads", "attention_heads", "decoder_attention_heads"),
    "encoder_attention_heads",
)
_AT_MOST = {"num_experts_per_tok", "moe_topk", "moe_k", "top_k_experts", "moe_top_k", "type_vocab_size", "n_group"} | {
    *("mamba_n_groups", "mamba_ngroups", "n_groups", "n_mamba_heads", "num_experts_per_token", "num_expert_group"),
}
# small sizes, and the attributes of configs that get them, in every family; hidden sizes of recurrent layers become 64
_NAMES = {
    1: "n_shared_experts num_shared_experts moe_num_shared_experts bos_token_id topk_group first_k_dense_replace "
    "num_dense_layers",
    2: "num_key_value_heads max_window_layers eos_token_id swa_num_key_value_heads kv_n_heads zero_expert_num "
    "num_kv_shared_layers num_layers_per_stack mamba_dt_rank time_step_rank linear_num_heads linear_num_key_heads",
    4: "num_decoder_attention_heads num_experts num_local_experts n_routed_experts moe_num_experts qk_rope_head_dim "
    "swa_num_attention_heads num_attention_heads_per_layer rotary_dim mamba_n_heads mamba_num_heads "
    "linear_num_value_heads adapter_rank",
    6: "v_head_dim hidden_size_per_layer_input linear_value_head_dim",
    8: "head_dim qk_nope_head_dim dim_head global_head_dim swa_head_dim kv_channels attention_head_size floor_scale "
    "laurel_rank mamba_d_state ssm_state_size state_size mamba_chunk_size chunk_size block_size linear_head_dim "
    "linear_key_head_dim",
    12: "q_lora_rank kv_lora_rank qk_head_dim",
    16: "mamba_d_head mamba_head_dim attention_head_dim router_hidden_size",
    24: "moe_intermediate_size shared_expert_intermediate_size shared_intermediate_size expert_ffn_hidden_size "
    "moe_shared_expert_intermediate_size",
    32: "hidden_size d_model n_embd emb_dim embedding_size dim embed_dim out_hidden_size text_hidden_size output_dim "
    "image_token_embed_dim projection_dim adapter_in_dim adapter_input_size adapter_out_dim word_embed_proj_dim "
    "prediction_head_size mamba_headdim lru_width",
    48: "intermediate_size ffn_dim decoder_ffn_dim dff hidden_dim encoder_ffn_dim projector_hidden_size d_inner dim_ff "
    "ffn_hidden_size intermediate_size_mlp",
    64: "mamba_d_ssm attention_hidden_size",
    VOCABULARY: "vocab_size vocab_size_per_layer_input",
    VOCABULARY - 1: "mask_token_id sep_token_id cls_token_id",
    WINDOW: "sliding_window sliding_window_size attention_chunk_size",
    2 * WINDOW: "local_attention",
    EXTENDED: "original_max_position_embeddings",
    0: "pad_token_id",
}
SIZES: dict[str, int] = {
    **dict.fromkeys((*LAYER_COUNTS, *HEAD_COUNTS), 4),
    **dict.fromkeys(POSITION_COUNTS, POSITIONS),
    **dict.fromkeys(_AT_MOST, 2),
    **{name: size for size, names in _NAMES.items() for name in names.split()},
}
_WINDOW = re.compile(r"window(?!.*layers)|att\w*_chunk")  # under any name
_NO_TEXT = re.compile(r"(image|video|vision|audio|sound|speech|media)\w*_token_(id|index)$")


def small_size(key: str, value: Any) -> Any:
    """Returns a small value for an entry that is a size; other values stay."""
    if isinstance(value, list) and key.endswith("token_id") and value:  # several end-of-sequence tokens
        return SIZES.get(key, VOCABULARY - 1)
    if isinstance(value, float) and ("drop" in key or "jitter" in key):
        return 0.0
    if isinstance(value, float) and key in ("partial_rotary_factor", "rotary_pct"):
        return max(2, round(4 * value)) / 4  # of heads of 8
    if type(value) is not int or (value <= 0 and not key.endswith("token_id")):
        return value
    if key.endswith("_offset"):
        return min(value, 1)
    if STEPS.search(key) and "heads" not in key:
        return min(value, 2)
    if _NO_TEXT.search(key):
        return max(value, VOCABULARY)  # a batch of text must not contain image tokens
    size = SIZES.get(key, WINDOW if _WINDOW.search(key) else value)
    return min(value, size) if key in _AT_MOST else size
