"""Small random models of many architectures, with inputs for each, built from configurations without a download.

To add an architecture, add its class to a line of :data:`ZOO`, with the options that :data:`SMALL` does not have.
"""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import torch

from symbiosis.errors import UnknownNameError

SMALL: dict[str, Any] = {
    **dict.fromkeys(("vocab_size", "max_position_embeddings", "n_positions", "max_seq_len"), 64),
    **dict.fromkeys(("hidden_size", "d_model", "n_embd", "word_embed_proj_dim", "embedding_size"), 32),
    **dict.fromkeys(("intermediate_size", "hidden_dim", "ffn_dim", "ffn_hidden_size", "d_ff", "n_inner"), 48),
    **dict.fromkeys(("encoder_ffn_dim", "decoder_ffn_dim"), 48),
    **dict.fromkeys(("moe_intermediate_size", "shared_expert_intermediate_size"), 24),
    **dict.fromkeys(("num_hidden_layers", "n_layer", "n_layers", "num_layers", "num_decoder_layers"), 2),
    **dict.fromkeys(("encoder_layers", "decoder_layers", "num_key_value_heads", "num_experts_per_tok", "moe_k"), 2),
    **dict.fromkeys(("num_attention_heads", "n_head", "n_heads", "num_heads", "time_step_rank"), 4),
    **dict.fromkeys(("encoder_attention_heads", "decoder_attention_heads"), 4),
    **dict.fromkeys(("num_local_experts", "num_experts", "n_routed_experts", "moe_num_experts"), 4),
    **dict.fromkeys(("head_dim", "d_kv", "state_size", "patch_size"), 8),
    **dict.fromkeys(("n_group", "topk_group"), 1),
    **dict.fromkeys(("initializer_range", "init_std"), 0.1),  # with the usual 0.02, attention is nearly uniform
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "decoder_start_token_id": 0,
    "image_size": 16,
    "num_channels": 3,
}
"""Options that a configuration gets if it has them."""
_LATENT = {
    "kv_lora_rank": 16,
    "q_lora_rank": 16,
    "qk_rope_head_dim": 8,
    "qk_nope_head_dim": 8,
    "v_head_dim": 8,
    "num_key_value_heads": 4,
    "first_k_dense_replace": 0,
}
"""Attention by latent vectors (DeepSeek), and experts in every block."""
_MAMBA2 = {"mamba_n_heads": 4, "mamba_d_head": 16, "mamba_n_groups": 1, "mamba_d_state": 8, "mamba_expand": 2}
_DELTA = {
    "num_hidden_layers": 4,
    "linear_key_head_dim": 8,
    "linear_value_head_dim": 8,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 2,
}
"""Gated delta rule in three of four blocks (Qwen3-Next)."""
_IMAGE = {
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "image_size": 16,
    "patch_size": 8,
    "initializer_range": 0.1,
}
_WAVE = {
    "conv_dim": [32, 32],
    "conv_stride": [4, 4],
    "conv_kernel": [8, 4],
    "num_feat_extract_layers": 2,
    "num_conv_pos_embeddings": 8,
    "num_conv_pos_embedding_groups": 2,
    "mask_time_prob": 0.0,
    "initializer_range": 0.02,  # with larger weights, rounding in fp32 moves CTC's gradients by more than 1e-5
}
_IMAGE_TOKEN = 60


def _seeing(vision_type: str, text_type: str, **options: Any) -> dict[str, Any]:
    """Return options of a model that reads images and text."""
    words = {name: SMALL[name] for name in ("vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers")}
    words |= {name: SMALL[name] for name in ("num_attention_heads", "num_key_value_heads", "max_position_embeddings")}
    words["initializer_range"] = SMALL["initializer_range"]
    return {
        "vision_config": {"model_type": vision_type, "projection_dim": 32, **_IMAGE, **options.pop("vision", {})},
        "text_config": {"model_type": text_type, "pad_token_id": 0, **words, **options.pop("text", {})},
        "image_token_id": _IMAGE_TOKEN,
        **options,
    }


class Entry(NamedTuple):
    """How to build a model, and what it reads."""

    reads: str
    """``text``; ``pairs`` of texts; ``class``, ``tokens`` or ``answer``: texts with other labels; ``masked`` texts;
    ``features``: texts without labels; ``image``; ``wave`` or ``mel``: speech; ``image and text``."""
    options: Mapping[str, Any]


def _lines(reads: str, lines: Mapping[str, Mapping[str, Any]]) -> dict[str, Entry]:
    return {name: Entry(reads, options) for names, options in lines.items() for name in names.split()}


ZOO: dict[str, Entry] = {
    **_lines(
        "text",
        {
            "LlamaForCausalLM MistralForCausalLM Qwen2ForCausalLM Qwen3ForCausalLM GemmaForCausalLM Gemma2ForCausalLM "
            "Gemma3ForCausalLM PhiForCausalLM Phi3ForCausalLM GPT2LMHeadModel GPTNeoXForCausalLM GPTBigCodeForCausalLM "
            "OPTForCausalLM BloomForCausalLM FalconForCausalLM MptForCausalLM CohereForCausalLM Cohere2ForCausalLM "
            "OlmoForCausalLM Olmo2ForCausalLM Olmo3ForCausalLM GraniteForCausalLM StableLmForCausalLM "
            "Starcoder2ForCausalLM NemotronForCausalLM Glm4ForCausalLM SmolLM3ForCausalLM Exaone4ForCausalLM "
            "Ernie4_5ForCausalLM ApertusForCausalLM ArceeForCausalLM MinistralForCausalLM SeedOssForCausalLM "
            "DiffLlamaForCausalLM BitNetForCausalLM PersimmonForCausalLM XGLMForCausalLM BioGptForCausalLM "
            "HunYuanDenseV1ForCausalLM HeliumForCausalLM": {},
            "GPTJForCausalLM CodeGenForCausalLM": {"rotary_dim": 4},
            "GPTNeoForCausalLM": {"attention_types": [[["global", "local"], 1]], "window_size": 8},
            # Mixtures of experts
            "MixtralForCausalLM OlmoeForCausalLM GptOssForCausalLM GraniteMoeForCausalLM Qwen2MoeForCausalLM "
            "Qwen3MoeForCausalLM PhimoeForCausalLM FlexOlmoForCausalLM JetMoeForCausalLM MiniMaxM2ForCausalLM "
            "HunYuanMoEV1ForCausalLM Cohere2MoeForCausalLM": {},
            "DeepseekV2ForCausalLM DeepseekV3ForCausalLM Glm4MoeForCausalLM": _LATENT,
            "LongcatFlashForCausalLM": {
                **_LATENT,
                "zero_expert_num": 2,
                "expert_ffn_hidden_size": 24,
                "moe_topk": 2,
                "num_layers": 1,
            },
            "Ernie4_5_MoeForCausalLM": {"moe_layer_start_index": 0},
            "MiniMaxForCausalLM": {"block_size": 16},
            "Llama4ForCausalLM": {"intermediate_size_mlp": 48, "num_experts_per_tok": 1},
            "DbrxForCausalLM": {
                "attn_config": {"kv_n_heads": 2, "rope_theta": 1e4, "clip_qkv": 8},
                "ffn_config": {"ffn_hidden_size": 48, "moe_num_experts": 4, "moe_top_k": 2},
            },
            # State-space models and hybrids
            "MambaForCausalLM FalconMambaForCausalLM": {},
            "Mamba2ForCausalLM": {"num_heads": 8, "n_groups": 1},
            "RwkvForCausalLM": {"attention_hidden_size": 32},
            "FalconH1ForCausalLM": {**_MAMBA2, "mamba_d_ssm": 64},
            "BambaForCausalLM": {**_MAMBA2, "attn_layer_indices": [1]},
            "JambaForCausalLM": {
                "num_hidden_layers": 4,
                "attn_layer_period": 2,
                "attn_layer_offset": 1,
                "use_mamba_kernels": False,
                "expert_layer_period": 2,
                "expert_layer_offset": 1,
                "mamba_d_state": 8,
                "mamba_dt_rank": 4,
            },
            "RecurrentGemmaForCausalLM": {"num_hidden_layers": 3, "lru_width": 32, "attention_window_size": 16},
            "Lfm2ForCausalLM": {"layer_types": ["conv", "full_attention"]},
            "Qwen3NextForCausalLM Qwen3_5ForCausalLM": _DELTA,
        },
    ),
    **_lines(
        "pairs",
        {
            "T5ForConditionalGeneration MT5ForConditionalGeneration LongT5ForConditionalGeneration": {
                "decoder_start_token_id": 0
            },
            "BartForConditionalGeneration PegasusForConditionalGeneration MBartForConditionalGeneration "
            "MarianMTModel": {},
        },
    ),
    **_lines(
        "class",
        {
            "BertForSequenceClassification RobertaForSequenceClassification XLMRobertaForSequenceClassification "
            "DistilBertForSequenceClassification ElectraForSequenceClassification AlbertForSequenceClassification "
            "DebertaV2ForSequenceClassification ModernBertForSequenceClassification LlamaForSequenceClassification "
            "GPT2ForSequenceClassification": {},
        },
    ),
    **_lines("tokens", {"BertForTokenClassification": {}}),
    **_lines("answer", {"BertForQuestionAnswering": {}}),
    **_lines(
        "image",
        {
            "ViTForImageClassification DeiTForImageClassification Dinov2ForImageClassification "
            "BeitForImageClassification": {},
            "SiglipForImageClassification": {"vision_config": _IMAGE},
            "ConvNextForImageClassification": {"hidden_sizes": [16, 32], "depths": [1, 1], "num_stages": 2},
        },
    ),
    **_lines(
        "wave",
        {
            "Wav2Vec2ForCTC HubertForCTC": _WAVE,
            # With its usual buckets, the order of sums in plain PEFT moves gradients of its gates by more than 1e-5.
            "WavLMForCTC": {**_WAVE, "num_buckets": 32, "max_bucket_distance": 64},
        },
    ),
    **_lines(
        "mel",
        {
            "WhisperForConditionalGeneration": {
                "num_mel_bins": 16,
                "max_source_positions": 20,
                "max_target_positions": 64,
            }
        },
    ),
    **_lines(
        "image and text",
        {
            "LlavaForConditionalGeneration": _seeing("clip_vision_model", "llama"),
            "VipLlavaForConditionalGeneration": _seeing("clip_vision_model", "llama", vision_feature_layers=[-1, -2]),
            "PaliGemmaForConditionalGeneration": _seeing(
                "siglip_vision_model", "gemma", text={"head_dim": 8}, projection_dim=32, hidden_size=32
            ),
            "Gemma3ForConditionalGeneration": _seeing(
                "siglip_vision_model", "gemma3_text", text={"head_dim": 8}, mm_tokens_per_image=4
            ),
            "Idefics3ForConditionalGeneration": _seeing("idefics3_vision", "llama", scale_factor=1),
            "SmolVLMForConditionalGeneration": _seeing("smolvlm_vision", "llama", scale_factor=1),
            "Mistral3ForConditionalGeneration": _seeing(
                "pixtral", "mistral", text={"head_dim": 8}, vision={"head_dim": 8}, spatial_merge_size=1
            ),
        },
    ),
}
"""Architectures by the name of their class in transformers."""

GENERATING = ("text", "pairs", "mel", "image and text")
"""What models that generate texts read."""


def zoo_model(name: str, *, seed: int = 0, **overrides: Any) -> Any:
    """Return a small random model of the zoo, in evaluation mode. ``overrides`` are fields of its configuration.

    Raises:
        UnknownNameError: the zoo has no such model.
    """
    import transformers

    if name not in ZOO:
        raise UnknownNameError(f"the zoo has no model {name!r}; it has {', '.join(ZOO)}")
    model_class: Any = getattr(transformers, name)
    return random_model(model_class, _config(model_class.config_class, {**ZOO[name].options, **overrides}), seed=seed)


def random_model(model_class: Callable[[Any], Any], config: Any, *, seed: int = 0) -> Any:
    """Return a random model of a configuration, in evaluation mode."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = model_class(config)
        with torch.no_grad():
            for parameter_name, parameter in model.named_parameters():
                # transformers initializes biases and some projections with zeros, layer scales with nearly zero, and
                # some experts not at all.
                expert = parameter.ndim == 3 and "expert" in parameter_name
                if parameter_name.endswith("bias") or expert or parameter.abs().max() < 1e-3:
                    parameter.normal_(std=0.1)
    return model.eval()


def _config(config_class: Any, options: Mapping[str, Any]) -> Any:
    base = config_class()
    known = {*base.to_dict(), *base.attribute_map, *inspect.signature(config_class.__init__).parameters}
    composed = {"text_config", "vision_config"} & options.keys()
    small = {} if composed else {name: value for name, value in SMALL.items() if name in known}
    if "image_token_index" in known and "image_token_id" in options:
        small["image_token_index"] = options["image_token_id"]
    return config_class(**{**small, **options})


def zoo_inputs(model: Any, reads: str, number: int) -> dict[str, Any]:
    """Return arguments of a model with labels: batch ``number`` of two examples.

    Args:
        model: the model.
        reads: what it reads; see :class:`Entry`.
        number: seed of the batch.
    """
    generator = torch.Generator().manual_seed(number)
    vocabulary = min(getattr(model.config.get_text_config(), "vocab_size", None) or _IMAGE_TOKEN, _IMAGE_TOKEN)
    ids = torch.randint(3, vocabulary, (2, 9), generator=generator)
    if reads == "class":
        return {"input_ids": ids, "labels": torch.tensor([0, 1])}
    if reads == "tokens":
        return {"input_ids": ids, "labels": ids % 2}
    if reads == "answer":
        return {"input_ids": ids, "start_positions": torch.tensor([1, 2]), "end_positions": torch.tensor([3, 4])}
    if reads == "pairs":
        return {"input_ids": ids, "decoder_input_ids": ids[:, 1:7].clone(), "labels": ids[:, :6].clone()}
    if reads == "wave":
        samples = 25 * math.prod(model.config.conv_stride)
        return {"input_values": torch.randn(2, samples, generator=generator), "labels": ids[:, :4].clone()}
    if reads == "features":
        return {"input_ids": ids, "attention_mask": torch.ones_like(ids)}
    if reads == "mel":
        config = model.config
        sound = torch.randn(2, config.num_mel_bins, 2 * config.max_source_positions, generator=generator)
        return {"input_features": sound, "decoder_input_ids": ids[:, 1:7].clone(), "labels": ids[:, :6].clone()}
    if reads == "image":
        vision = getattr(model.config, "vision_config", model.config)
        size = getattr(vision, "image_size", 16)
        height, width = size if isinstance(size, list | tuple) else (size, size)
        image = torch.randn(2, vision.num_channels, height, width, generator=generator)
        return {"pixel_values": image, "labels": torch.tensor([0, 1])}
    image = torch.randn(2, 3, 16, 16, generator=generator)
    if reads == "image and text":
        ids = torch.cat([torch.full((2, 4), _IMAGE_TOKEN), ids], 1)
        several = type(model).__name__.startswith(("Idefics3", "SmolVLM"))
        found = {"input_ids": ids, "labels": ids, "pixel_values": image[:, None] if several else image}
        if type(model).__name__.startswith("Mistral3"):
            found["image_sizes"] = torch.tensor([[16, 16], [16, 16]])
        if type(model).__name__.startswith(("PaliGemma", "Gemma3")):
            found["token_type_ids"] = (ids == _IMAGE_TOKEN).long()
        return found
    return {"input_ids": ids, "attention_mask": torch.ones_like(ids), "labels": ids}
