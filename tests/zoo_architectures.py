"""Architectures as people use them: those of `transformers`, reduced and with random weights, and hand-made ones.

Each `Architecture` is a `zoo.Case` whose maps are not listed: they are looked for. Models are float64, in eval mode and seeded;
an output picks at most a few numbers of each example, so that whole Jacobians are cheap. `transformers` is imported when a model
of it is built, never before.
"""

from __future__ import annotations

import importlib.util
import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import zoo
from zoo import Batch, Result, classes, gaussian, normal, tokens

HAS_TRANSFORMERS = importlib.util.find_spec("transformers") is not None
VOCABULARY, LENGTH = 13, 5


@dataclass(frozen=True)
class Architecture(zoo.Case):
    """A case of the zoo, where it comes from, and how rows of fused matrices belong together."""

    origin: str = "hand-made"
    refused: str = ""  # words of the error with which the whole model is refused
    tolerance: float = 1e-8  # larger where the model itself computes in float32
    heads: int = 1  # rows of a fused projection lie as [heads, (q, k, v), d]
    order: str = "qkv"  # of the three

    def misplaced(self, name: str, index: Tensor, size: int) -> str | None:
        """What is wrong with the rows that a map named ``.q``, ``.k`` or ``.v`` takes of a parameter of this size."""
        d_out, d_in = index.shape[-2:]
        if name[-2:] not in (".q", ".k", ".v") or index.numel() == size:  # no part of anything
            return None
        rows = torch.arange(3 * d_out).reshape(self.heads, 3, -1)[:, self.order.index(name[-1])].flatten()
        taken = index[:, 0] // d_in if index[0, 1] == index[0, 0] + 1 else index[:, 0] % (3 * d_out)  # kept by rows, by columns
        return None if torch.equal(taken.sort().values, rows) else f"{name} has rows {taken.tolist()} instead of {rows.tolist()}"


# ------------------------------------------------------------------------------------------------------------ building


def awake(factory: Callable[[], nn.Module], gain: float = 1.0) -> Callable[..., nn.Module]:
    """`zoo.seeded`, and no matrix is constant: tables that start at zero would have no correlation."""
    seeded = zoo.seeded(factory, gain)

    def build(seed: int = 0) -> nn.Module:
        model = seeded(seed)
        draw = torch.Generator().manual_seed(4321 + seed)
        with torch.no_grad():
            for p in model.parameters():
                if p.ndim > 1 and p.numel() > 1 and p.std() < 1e-3:
                    p.add_(0.3 * torch.randn(p.shape, generator=draw, dtype=p.dtype))
        return model

    return build


def from_config(model: str, config: str, **settings: Any) -> Callable[[], nn.Module]:
    """A factory of a class of `transformers`, from a small configuration."""

    def factory() -> nn.Module:
        import transformers

        return getattr(transformers, model)(getattr(transformers, config)(**settings))

    return factory


def text(n: int, length: int = LENGTH) -> tuple[dict[str, Tensor], Tensor]:
    """{"input_ids": ids[n,T]} without special tokens, y[n]."""
    return {"input_ids": torch.stack([tokens(i, length, 3, VOCABULARY) for i in range(n)])}, classes(n, 3)


def next_tokens(n: int) -> tuple[dict[str, Tensor], Tensor]:
    """Texts, and at every position the token that follows: more outputs than kernels take one by one."""
    ids = text(n, LENGTH + 1)[0]["input_ids"]
    return {"input_ids": ids[:, :-1].contiguous()}, ids[:, 1:].contiguous()


def padded_text(n: int) -> tuple[dict[str, Tensor], Tensor]:
    """The same with up to two tokens of padding behind, and the mask that says so."""
    x, y = text(n)
    mask = (torch.arange(LENGTH)[None] < LENGTH - classes(n, 3)[:, None]).long()
    return {"input_ids": torch.where(mask > 0, x["input_ids"], 1), "attention_mask": mask}, y


def pixels(channels: int = 2, size: int = 8) -> Batch:
    """{"pixel_values": x[n,c,size,size]}, y[n]."""

    def batch(n: int) -> tuple[dict[str, Tensor], Tensor]:
        x, y = gaussian(channels, size, size)(n)
        return {"pixel_values": x}, y

    return batch


def waves(length: int) -> Batch:
    """{"input_values": x[n,length]}, y[n]."""

    def batch(n: int) -> tuple[dict[str, Tensor], Tensor]:
        x, y = gaussian(length)(n)
        return {"input_values": x}, y

    return batch


def two_segments(n: int) -> tuple[dict[str, Tensor], Tensor]:
    """Texts of two sentences."""
    x, y = text(n, 8)
    return {**x, "token_type_ids": (torch.arange(8) > 3).long().repeat(n, 1)}, y


def some_global(n: int) -> tuple[dict[str, Tensor], Tensor]:
    """Texts whose first token sees all others."""
    x, y = text(n)
    return {**x, "global_attention_mask": (torch.arange(LENGTH) == 0).long().repeat(n, 1)}, y


def two_texts(n: int) -> tuple[dict[str, Tensor], Tensor]:
    """What an encoder and a decoder read."""
    return {"input_ids": torch.stack([tokens(i, LENGTH, 3, VOCABULARY) for i in range(n)]),
            "decoder_input_ids": torch.stack([tokens(i, 4, 3, VOCABULARY, stream=1) for i in range(n)])}, classes(n, 3)


def last_token(result: Result) -> Tensor:
    """Three logits of the last token; not of special ones, whose embeddings may be zero."""
    return result["logits"][:, -1, 3:6]


def mean_state(result: Result) -> Tensor:
    """Three numbers of the mean over positions of the last states."""
    return result["last_hidden_state"].mean(1)[:, :3]


def class_logits(result: Result) -> Tensor:
    """Logits of a classifier."""
    return result["logits"]


CASES: list[Architecture] = []


def _hugging(name: str, model: str, config: str, batch: Batch, output: Callable[[Any], Tensor], gain: float = 1.0,
             refused: str = "", tolerance: float = 1e-8, heads: int = 1, order: str = "qkv", **settings: Any) -> None:
    CASES.append(Architecture(name, awake(from_config(model, config, **settings), gain), batch, output=output,
                              origin="transformers", refused=refused, tolerance=tolerance, heads=heads, order=order))


# -------------------------------------------------------------------------------------- transformers: language models

_GPT = {"vocab_size": VOCABULARY, "n_positions": 8, "n_embd": 8, "n_layer": 2, "n_head": 2, "initializer_range": 0.4,
        "use_cache": False, "bos_token_id": 0, "eos_token_id": 0, "pad_token_id": 1}
_LLAMA = {"vocab_size": VOCABULARY, "hidden_size": 8, "intermediate_size": 12, "num_hidden_layers": 2, "num_attention_heads": 2,
          "num_key_value_heads": 1, "max_position_embeddings": 16, "initializer_range": 0.4, "use_cache": False,
          "bos_token_id": 0, "eos_token_id": 0, "pad_token_id": 1}
_BERT = {"vocab_size": VOCABULARY, "hidden_size": 8, "intermediate_size": 12, "num_hidden_layers": 2, "num_attention_heads": 2,
         "max_position_embeddings": 12, "initializer_range": 0.4, "num_labels": 3, "pad_token_id": 1}

_hugging("gpt2", "GPT2LMHeadModel", "GPT2Config", text, last_token, **_GPT)
_hugging("gpt2_every_logit", "GPT2LMHeadModel", "GPT2Config", next_tokens, class_logits, **{**_GPT, "n_layer": 1})
_hugging("gpt_neo", "GPTNeoForCausalLM", "GPTNeoConfig", text, last_token, vocab_size=VOCABULARY, hidden_size=8, num_layers=2,
         num_heads=2, attention_types=[[["global", "local"], 1]], max_position_embeddings=8, window_size=2,
         initializer_range=0.4, use_cache=False, bos_token_id=0, eos_token_id=0)
_hugging("gpt_neox", "GPTNeoXForCausalLM", "GPTNeoXConfig", text, last_token, heads=2,
         **{k: v for k, v in _LLAMA.items() if k != "num_key_value_heads"})
_hugging("gpt_bigcode", "GPTBigCodeForCausalLM", "GPTBigCodeConfig", text, last_token, multi_query=True, **_GPT)
_hugging("gpt_bigcode_heads", "GPTBigCodeForCausalLM", "GPTBigCodeConfig", text, last_token, heads=2,
         multi_query=False, **_GPT)
_hugging("gptj", "GPTJForCausalLM", "GPTJConfig", text, last_token, rotary_dim=2, **_GPT)
_hugging("codegen", "CodeGenForCausalLM", "CodeGenConfig", text, last_token, heads=4, order="qvk", rotary_dim=2,
         **{**_GPT, "n_head": 4})
_hugging("bloom", "BloomForCausalLM", "BloomConfig", text, last_token, heads=2, vocab_size=VOCABULARY, hidden_size=8, n_layer=2,
         n_head=2, initializer_range=0.4, use_cache=False, bos_token_id=0, eos_token_id=0)
_hugging("mpt", "MptForCausalLM", "MptConfig", text, last_token, vocab_size=VOCABULARY, d_model=8, n_layers=2, n_heads=2,
         max_seq_len=8, initializer_range=0.4, use_cache=False)
_hugging("opt", "OPTForCausalLM", "OPTConfig", text, last_token, vocab_size=VOCABULARY, hidden_size=8, ffn_dim=12,
         num_hidden_layers=2, num_attention_heads=2, max_position_embeddings=8, word_embed_proj_dim=8, init_std=0.4,
         use_cache=False, bos_token_id=0, eos_token_id=0, pad_token_id=1)
_hugging("llama", "LlamaForCausalLM", "LlamaConfig", text, last_token, **_LLAMA)
_hugging("mistral", "MistralForCausalLM", "MistralConfig", text, last_token, sliding_window=3, **_LLAMA)
_hugging("mixtral", "MixtralForCausalLM", "MixtralConfig", text, last_token, num_local_experts=3, num_experts_per_tok=2,
         experts_implementation="eager", **_LLAMA)
_hugging("qwen2", "Qwen2ForCausalLM", "Qwen2Config", text, last_token, **_LLAMA)
_hugging("qwen2_moe", "Qwen2MoeForCausalLM", "Qwen2MoeConfig", text, last_token, num_experts=3, num_experts_per_tok=2,
         moe_intermediate_size=6, shared_expert_intermediate_size=6, experts_implementation="eager", **_LLAMA)
_hugging("qwen3", "Qwen3ForCausalLM", "Qwen3Config", text, last_token, head_dim=4, **_LLAMA)
_hugging("gemma", "GemmaForCausalLM", "GemmaConfig", text, last_token, head_dim=4, **_LLAMA)
_hugging("gemma2", "Gemma2ForCausalLM", "Gemma2Config", text, last_token, head_dim=4, query_pre_attn_scalar=4, sliding_window=3,
         **_LLAMA)
_hugging("falcon", "FalconForCausalLM", "FalconConfig", text, last_token, multi_query=True, parallel_attn=True, bias=False,
         **{k: v for k, v in _LLAMA.items() if k not in ("num_key_value_heads", "intermediate_size")}, ffn_hidden_size=12)
_hugging("phi", "PhiForCausalLM", "PhiConfig", text, last_token, **_LLAMA)
_hugging("phi3", "Phi3ForCausalLM", "Phi3Config", text, last_token, original_max_position_embeddings=16, **_LLAMA)
_hugging("stablelm", "StableLmForCausalLM", "StableLmConfig", text, last_token, **_LLAMA)
_hugging("olmo2", "Olmo2ForCausalLM", "Olmo2Config", text, last_token, **_LLAMA)
_hugging("cohere", "CohereForCausalLM", "CohereConfig", text, last_token, **_LLAMA)
_hugging("granite", "GraniteForCausalLM", "GraniteConfig", text, last_token, **_LLAMA)
_hugging("mamba", "MambaForCausalLM", "MambaConfig", text, last_token, tolerance=1e-5, vocab_size=VOCABULARY, hidden_size=8,
         state_size=3, num_hidden_layers=2, conv_kernel=2, expand=2, time_step_rank=2, initializer_range=0.4, use_cache=False,
         bos_token_id=0, eos_token_id=0, pad_token_id=1)
_hugging("mamba2", "Mamba2ForCausalLM", "Mamba2Config", text, last_token, tolerance=1e-5, vocab_size=VOCABULARY,
         hidden_size=8, state_size=4, num_hidden_layers=1, conv_kernel=2, expand=2, head_dim=4, num_heads=4, n_groups=1,
         chunk_size=4, initializer_range=0.4, use_cache=False, bos_token_id=0, eos_token_id=0, pad_token_id=1)
_hugging("rwkv", "RwkvForCausalLM", "RwkvConfig", text, last_token, vocab_size=VOCABULARY, context_length=8, hidden_size=8,
         attention_hidden_size=8, intermediate_size=12, num_hidden_layers=2, use_cache=False, bos_token_id=0, eos_token_id=0)
_hugging("xlnet", "XLNetForSequenceClassification", "XLNetConfig", two_segments, class_logits, vocab_size=VOCABULARY, d_model=8,
         n_layer=2, n_head=2, d_inner=12, num_labels=3, initializer_range=0.4, bos_token_id=0, eos_token_id=0, pad_token_id=1)

# ---------------------------------------------------------------------------------- transformers: encoders and decoders

_hugging("t5", "T5ForConditionalGeneration", "T5Config", two_texts, last_token, vocab_size=VOCABULARY, d_model=8, d_kv=4, d_ff=12,
         num_layers=1, num_decoder_layers=1, num_heads=2, relative_attention_num_buckets=4, relative_attention_max_distance=6,
         use_cache=False, decoder_start_token_id=0, pad_token_id=0, gain=2.0)
_hugging("bart", "BartForConditionalGeneration", "BartConfig", two_texts, last_token, vocab_size=VOCABULARY, d_model=8,
         encoder_layers=1, decoder_layers=1, encoder_attention_heads=2, decoder_attention_heads=2, encoder_ffn_dim=12,
         decoder_ffn_dim=12, max_position_embeddings=8, init_std=0.4, use_cache=False, bos_token_id=0, eos_token_id=2,
         pad_token_id=1, decoder_start_token_id=2, forced_eos_token_id=2)


def speech(n: int) -> tuple[dict[str, Tensor], Tensor]:
    """Spectrograms and the tokens so far."""
    return {"input_features": torch.stack([normal(i, 4, 12) for i in range(n)]),
            "decoder_input_ids": torch.stack([tokens(i, 4, 3, VOCABULARY) for i in range(n)])}, classes(n, 3)


_hugging("whisper", "WhisperForConditionalGeneration", "WhisperConfig", speech, last_token, vocab_size=VOCABULARY, num_mel_bins=4,
         d_model=8, encoder_layers=1, decoder_layers=1, encoder_attention_heads=2, decoder_attention_heads=2, encoder_ffn_dim=12,
         decoder_ffn_dim=12, max_source_positions=6, max_target_positions=6, init_std=0.4, use_cache=False, bos_token_id=0,
         eos_token_id=2, pad_token_id=1, decoder_start_token_id=2, suppress_tokens=None, begin_suppress_tokens=None)
for _name, _model, _config, _more in (
        ("bert", "BertForSequenceClassification", "BertConfig", {}),
        ("roberta", "RobertaForSequenceClassification", "RobertaConfig", {"type_vocab_size": 2}),
        ("electra", "ElectraForSequenceClassification", "ElectraConfig", {"embedding_size": 6}),
        ("deberta", "DebertaForSequenceClassification", "DebertaConfig",
         {"relative_attention": True, "pos_att_type": ["c2p", "p2c"], "max_relative_positions": 4, "type_vocab_size": 2}),
        ("deberta_v2", "DebertaV2ForSequenceClassification", "DebertaV2Config",
         {"relative_attention": True, "pos_att_type": ["c2p", "p2c"], "max_relative_positions": 4, "position_buckets": 4,
          "norm_rel_ebd": "layer_norm", "share_att_key": True, "type_vocab_size": 0}),
        ("mpnet", "MPNetForSequenceClassification", "MPNetConfig", {}),
        ("nystromformer", "NystromformerForSequenceClassification", "NystromformerConfig",
         {"num_landmarks": 5, "segment_means_seq_len": 5, "conv_kernel_size": 3}),
        ("squeezebert", "SqueezeBertForSequenceClassification", "SqueezeBertConfig",
         {"embedding_size": 8, "q_groups": 2, "k_groups": 2, "v_groups": 2, "intermediate_groups": 2, "output_groups": 2}),
        ("convbert", "ConvBertForSequenceClassification", "ConvBertConfig",
         {"embedding_size": 8, "head_ratio": 1, "conv_kernel_size": 3, "num_groups": 1}),
        ("roformer", "RoFormerForSequenceClassification", "RoFormerConfig", {"embedding_size": 6})):
    _hugging(_name, _model, _config, padded_text if _name not in ("nystromformer",) else text, class_logits, **{**_BERT, **_more})
_hugging("albert", "AlbertForSequenceClassification", "AlbertConfig", padded_text, class_logits, embedding_size=6, **_BERT)
_hugging("distilbert", "DistilBertForSequenceClassification", "DistilBertConfig", padded_text, class_logits,
         vocab_size=VOCABULARY, dim=8, hidden_dim=12, n_layers=2, n_heads=2, max_position_embeddings=8, num_labels=3,
         initializer_range=0.4, pad_token_id=1)
_hugging("fnet", "FNetForSequenceClassification", "FNetConfig", text, class_logits, **{
    k: v for k, v in _BERT.items() if k != "num_attention_heads"})
_hugging("longformer", "LongformerForTokenClassification", "LongformerConfig", some_global, lambda r: r["logits"].mean(1),
         attention_window=4, **{**_BERT, "max_position_embeddings": 16})
_hugging("big_bird", "BigBirdModel", "BigBirdConfig", text, lambda r: r["pooler_output"][:, :3] + mean_state(r),
         attention_type="original_full", block_size=2, sep_token_id=2, **_BERT)
_hugging("funnel", "FunnelBaseModel", "FunnelConfig", two_segments, mean_state, vocab_size=VOCABULARY,
         block_sizes=[1, 1], num_decoder_layers=1, d_model=8, n_head=2, d_head=4, d_inner=12,
         initializer_range=0.4, pad_token_id=1)
_hugging("xlm", "XLMForSequenceClassification", "XLMConfig", text, class_logits, vocab_size=VOCABULARY, emb_dim=8, n_layers=2,
         n_heads=2, max_position_embeddings=8, num_labels=3, embed_init_std=0.4, init_std=0.4, pad_index=1, pad_token_id=1)


def byte_text(n: int) -> tuple[dict[str, Tensor], Tensor]:
    """What a perceiver calls `inputs`."""
    x, y = text(n)
    return {"inputs": x["input_ids"]}, y


_hugging("perceiver", "PerceiverForSequenceClassification", "PerceiverConfig", byte_text, class_logits, num_latents=4,
         d_latents=8, d_model=6, num_blocks=1, num_self_attends_per_block=1, num_self_attention_heads=2,
         num_cross_attention_heads=1, vocab_size=VOCABULARY, max_position_embeddings=LENGTH, num_labels=3, initializer_range=0.4)

# -------------------------------------------------------------------------------------------------- transformers: images

_VIT = {"hidden_size": 8, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 12, "image_size": 8,
        "patch_size": 4, "num_channels": 2, "num_labels": 3, "initializer_range": 0.4}
_hugging("vit", "ViTForImageClassification", "ViTConfig", pixels(), class_logits, **_VIT)
_hugging("deit", "DeiTForImageClassification", "DeiTConfig", pixels(), class_logits, **_VIT)
_hugging("beit", "BeitForImageClassification", "BeitConfig", pixels(), class_logits, use_relative_position_bias=True, **_VIT)
_hugging("dinov2", "Dinov2ForImageClassification", "Dinov2Config", pixels(), class_logits, mlp_ratio=2, **_VIT)
_SWIN = {"image_size": 8, "patch_size": 1, "num_channels": 2, "embed_dim": 4, "depths": [1, 2], "num_heads": [1, 2],
         "window_size": 4, "mlp_ratio": 2.0, "num_labels": 3, "initializer_range": 0.4}
_hugging("swin", "SwinForImageClassification", "SwinConfig", pixels(), class_logits, **_SWIN)
_hugging("swinv2", "Swinv2ForImageClassification", "Swinv2Config", pixels(), class_logits, **_SWIN)
_hugging("convnext", "ConvNextForImageClassification", "ConvNextConfig", pixels(), class_logits, num_channels=2, patch_size=2,
         num_stages=2, hidden_sizes=[4, 6], depths=[1, 1], num_labels=3, initializer_range=0.4, layer_scale_init_value=0.5)
_hugging("convnextv2", "ConvNextV2ForImageClassification", "ConvNextV2Config", pixels(), class_logits, num_channels=2,
         patch_size=2, num_stages=2, hidden_sizes=[4, 6], depths=[1, 1], num_labels=3, initializer_range=0.4)
_hugging("resnet", "ResNetForImageClassification", "ResNetConfig", pixels(), class_logits, gain=1.5, num_channels=2,
         embedding_size=4, hidden_sizes=[4, 8], depths=[1, 1], layer_type="bottleneck", num_labels=3)
_hugging("regnet", "RegNetForImageClassification", "RegNetConfig", pixels(), class_logits, gain=1.5, num_channels=2,
         embedding_size=4, hidden_sizes=[4, 8], depths=[1, 1], groups_width=2, layer_type="y", num_labels=3)
_hugging("mobilenet_v2", "MobileNetV2ForImageClassification", "MobileNetV2Config", pixels(), class_logits, gain=2.0,
         num_channels=2, image_size=8, depth_multiplier=0.1, depth_divisible_by=2, min_depth=2, expand_ratio=2, num_labels=3,
         hidden_act="tanh", finegrained_output=False)
_hugging("segformer", "SegformerForImageClassification", "SegformerConfig", pixels(2, 16), class_logits, num_channels=2,
         num_encoder_blocks=2, depths=[1, 1], sr_ratios=[2, 1], hidden_sizes=[4, 6], patch_sizes=[3, 3], strides=[4, 2],
         num_attention_heads=[1, 2], mlp_ratios=[2, 2], num_labels=3, initializer_range=0.4)
_hugging("poolformer", "PoolFormerForImageClassification", "PoolFormerConfig", pixels(2, 16), class_logits, num_channels=2,
         num_encoder_blocks=2, depths=[1, 1], hidden_sizes=[4, 6], patch_sizes=[3, 3], strides=[4, 2], padding=[1, 1],
         mlp_ratio=2.0, num_labels=3, initializer_range=0.4, layer_scale_init_value=0.5)
_hugging("pvt", "PvtForImageClassification", "PvtConfig", pixels(2, 16), class_logits, image_size=16, num_channels=2,
         num_encoder_blocks=2, depths=[1, 1], sequence_reduction_ratios=[2, 1], hidden_sizes=[4, 6], patch_sizes=[4, 2],
         strides=[4, 2], num_attention_heads=[1, 2], mlp_ratios=[2, 2], num_labels=3, initializer_range=0.4)
_hugging("focalnet", "FocalNetForImageClassification", "FocalNetConfig", pixels(), class_logits, image_size=8, patch_size=2,
         num_channels=2, embed_dim=4, hidden_sizes=[4, 8], depths=[1, 1], focal_levels=[2, 1], focal_windows=[3, 3],
         mlp_ratio=2.0, num_labels=3, initializer_range=0.4)

_TOWERS = {"text_config": {"vocab_size": VOCABULARY, "hidden_size": 8, "intermediate_size": 12, "num_hidden_layers": 1,
                           "num_attention_heads": 2, "max_position_embeddings": 8, "initializer_range": 0.4,
                           "initializer_factor": 3.0, "pad_token_id": 1, "bos_token_id": 0, "eos_token_id": 12},
           "vision_config": {"hidden_size": 8, "intermediate_size": 12, "num_hidden_layers": 1, "num_attention_heads": 2,
                             "image_size": 8, "patch_size": 4, "num_channels": 2, "initializer_range": 0.4,
                             "initializer_factor": 3.0}, "projection_dim": 6}


def captions(n: int) -> tuple[dict[str, Tensor], Tensor]:
    """Texts and images."""
    return {**text(n)[0], **pixels()(n)[0]}, classes(n, 3)


_hugging("clip_contrastive", "CLIPModel", "CLIPConfig", captions, lambda r: r["logits_per_image"], 
         refused=r"^\w*(Mixing|Probe|Capture|Selection)Error: .*example", **_TOWERS)
_hugging("clip_text", "CLIPTextModelWithProjection", "CLIPTextConfig", text, lambda r: r["text_embeds"][:, :3], projection_dim=6,
         **_TOWERS["text_config"])
_hugging("clip_vision", "CLIPVisionModelWithProjection", "CLIPVisionConfig", pixels(), lambda r: r["image_embeds"][:, :3],
         projection_dim=6, **_TOWERS["vision_config"])
_hugging("clip_pairs", "CLIPModel", "CLIPConfig", captions, lambda r: r["text_embeds"][:, :3] * r["image_embeds"][:, 3:],
         **_TOWERS)

# --------------------------------------------------------------------------------------------- transformers: sound, time

_WAV = {"vocab_size": VOCABULARY, "hidden_size": 8, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 12,
        "conv_dim": [4, 4], "conv_stride": [3, 2], "conv_kernel": [4, 3], "num_feat_extract_layers": 2,
        "num_conv_pos_embeddings": 3, "num_conv_pos_embedding_groups": 2, "classifier_proj_size": 6, "num_labels": 3,
        "initializer_range": 0.4, "apply_spec_augment": False}
_hugging("wav2vec2", "Wav2Vec2ForSequenceClassification", "Wav2Vec2Config", waves(40), class_logits, feat_extract_norm="layer",
         do_stable_layer_norm=True, **_WAV)
_hugging("hubert", "HubertForSequenceClassification", "HubertConfig", waves(40), class_logits, **_WAV)
_hugging("wavlm", "WavLMForSequenceClassification", "WavLMConfig", waves(40), class_logits, num_buckets=4, max_bucket_distance=8,
         **_WAV)
_hugging("ast", "ASTForAudioClassification", "ASTConfig", lambda n: ({"input_values": gaussian(8, 6)(n)[0]}, classes(n, 3)),
         class_logits, hidden_size=8, num_hidden_layers=1, num_attention_heads=2, intermediate_size=12, patch_size=4,
         frequency_stride=2, time_stride=2, max_length=8, num_mel_bins=6, num_labels=3, initializer_range=0.4)


def series(n: int) -> tuple[dict[str, Tensor], Tensor]:
    """Past values, their times, and the times to predict."""
    past, time, future, later = (torch.stack([normal(i, *shape, stream=j) for i in range(n)])
                                 for j, shape in enumerate([(9,), (9, 2), (3,), (3, 2)]))
    return {"past_values": past, "past_time_features": time, "past_observed_mask": torch.ones_like(past), "future_values": future,
            "future_time_features": later, "static_categorical_features": classes(n, 3)[:, None]}, classes(n, 3)


_hugging("time_series", "TimeSeriesTransformerModel", "TimeSeriesTransformerConfig", series, mean_state, prediction_length=3,
         context_length=6, lags_sequence=[1, 2, 3], num_time_features=2, num_static_categorical_features=1, cardinality=[3],
         embedding_dimension=[2], d_model=8, encoder_layers=1, decoder_layers=1, encoder_attention_heads=2,
         decoder_attention_heads=2, encoder_ffn_dim=12, decoder_ffn_dim=12, init_std=0.4, use_cache=False)
_hugging("informer", "InformerModel", "InformerConfig", series, mean_state, prediction_length=3, context_length=6,
         lags_sequence=[1, 2, 3], num_time_features=2, num_static_categorical_features=1, cardinality=[3],
         embedding_dimension=[2], d_model=8, encoder_layers=1, decoder_layers=1, encoder_attention_heads=2,
         decoder_attention_heads=2, encoder_ffn_dim=12, decoder_ffn_dim=12, init_std=0.4, use_cache=False,
         attention_type="full", distil=False)


def channels(n: int) -> tuple[dict[str, Tensor], Tensor]:
    """Series of two channels."""
    return {"past_values": gaussian(8, 2)(n)[0]}, classes(n, 3)


_hugging("patchtst", "PatchTSTForClassification", "PatchTSTConfig", channels, lambda r: r["prediction_logits"],
         num_input_channels=2, context_length=8, patch_length=4, patch_stride=2, num_hidden_layers=1, d_model=8,
         num_attention_heads=2, ffn_dim=12, num_targets=3, init_std=0.4, use_cls_token=True)
_hugging("patchtsmixer", "PatchTSMixerForTimeSeriesClassification", "PatchTSMixerConfig", channels,
         lambda r: r["prediction_outputs"], num_input_channels=2, context_length=8, patch_length=4, patch_stride=2, num_layers=1,
         d_model=6, num_targets=3, mode="mix_channel", gated_attn=True, init_std=0.4)


def decisions(n: int) -> tuple[dict[str, Tensor], Tensor]:
    """States, actions and what is still to be gained."""
    states, actions, gains = (torch.stack([normal(i, 3, d, stream=d) for i in range(n)]) for d in (4, 2, 1))
    return {"states": states, "actions": actions, "returns_to_go": gains, "timesteps": torch.arange(3).repeat(n, 1),
            "attention_mask": torch.ones(n, 3, dtype=torch.long)}, classes(n, 2)


_hugging("decision", "DecisionTransformerModel", "DecisionTransformerConfig", decisions,
         lambda r: r["action_preds"][:, -1] + r["state_preds"][:, -1].unflatten(1, (2, 2)).sum(2),
         state_dim=4, act_dim=2, hidden_size=8, max_ep_len=6, n_layer=1, n_head=2, n_positions=16, initializer_range=0.4,
         use_cache=False)

# ---------------------------------------------------------------------------------------------------- made by hand


class LSTMClassifier(nn.Module):
    """The last state of two layers of LSTM."""

    def __init__(self) -> None:
        super().__init__()
        self.lstm = nn.LSTM(3, 5, num_layers=2, batch_first=True)
        self.readout = nn.Linear(5, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.readout(self.lstm(x)[0][:, -1])


class GRUClassifier(nn.Module):
    """Tokens, a GRU with time first, and the last state."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCABULARY, 4)
        self.gru = nn.GRU(4, 5)
        self.readout = nn.Linear(5, 3)

    def forward(self, ids: Tensor) -> Tensor:
        return self.readout(self.gru(self.embed(ids).transpose(0, 1))[1][-1])


class Tagger(nn.Module):
    """A bidirectional LSTM names every word."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCABULARY, 4)
        self.lstm = nn.LSTM(4, 3, batch_first=True, bidirectional=True)
        self.readout = nn.Linear(6, 2)

    def forward(self, ids: Tensor) -> Tensor:
        return self.readout(self.lstm(self.embed(ids))[0])


class UNet(nn.Module):
    """Down, up by a transposed convolution, and across; the mean over pixels."""

    def __init__(self) -> None:
        super().__init__()
        self.enter, self.down = nn.Conv2d(2, 4, 3, padding=1), nn.Conv2d(4, 6, 3, stride=2, padding=1)
        self.up, self.leave = nn.ConvTranspose2d(6, 4, 2, stride=2), nn.Conv2d(8, 3, 3, padding=1)

    def forward(self, x: Tensor) -> Tensor:
        a = torch.tanh(self.enter(x))
        return torch.tanh(self.leave(torch.cat([a, torch.tanh(self.up(torch.tanh(self.down(a))))], 1))).mean((2, 3))


class Generator(nn.Module):
    """Noise to an image by transposed convolutions (DCGAN); four of its pixels."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(
            nn.ConvTranspose2d(5, 6, 2, bias=False), nn.BatchNorm2d(6), nn.ReLU(),
            nn.ConvTranspose2d(6, 4, 4, stride=2, padding=1, bias=False), nn.BatchNorm2d(4), nn.ReLU(),
            nn.ConvTranspose2d(4, 1, 3, stride=2, padding=1, output_padding=1), nn.Tanh())

    def forward(self, z: Tensor) -> Tensor:
        return self.layers(z[:, :, None, None])[:, 0, ::5, ::5].flatten(1)


class BilinearHead(nn.Module):
    """Two views meet in x^T A y."""

    def __init__(self) -> None:
        super().__init__()
        self.left, self.right, self.head = nn.Linear(3, 5), nn.Linear(4, 6), nn.Bilinear(5, 6, 3)

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        return self.head(torch.tanh(self.left(x)), torch.tanh(self.right(y)))


def two_views(n: int) -> tuple[tuple[Tensor, Tensor], Tensor]:
    """x[n,3] and y[n,4]."""
    return (gaussian(3)(n)[0], torch.stack([normal(i, 4, stream=7) for i in range(n)])), classes(n, 3)


class WordBag(nn.Module):
    """The mean of word vectors, summed up by nn.EmbeddingBag."""

    def __init__(self) -> None:
        super().__init__()
        self.bag, self.hidden, self.readout = nn.EmbeddingBag(VOCABULARY, 6, mode="mean"), nn.Linear(6, 5), nn.Linear(5, 3)

    def forward(self, ids: Tensor) -> Tensor:
        return self.readout(torch.tanh(self.hidden(torch.tanh(self.bag(ids)))))


class Mixer(nn.Module):
    """MLP-Mixer: one network over patches, one over channels."""

    def __init__(self, patches: int = 4, d: int = 6) -> None:
        super().__init__()
        self.stem = nn.Conv2d(2, d, 4, stride=4)
        self.norms = nn.ModuleList([nn.LayerNorm(d) for _ in range(3)])
        self.tokens = nn.Sequential(nn.Linear(patches, 5), nn.GELU(), nn.Linear(5, patches))
        self.channels = nn.Sequential(nn.Linear(d, 8), nn.GELU(), nn.Linear(8, d))
        self.readout = nn.Linear(d, 3)

    def forward(self, x: Tensor) -> Tensor:
        x = self.stem(x).flatten(2).transpose(1, 2)
        x = x + self.tokens(self.norms[0](x).transpose(1, 2)).transpose(1, 2)
        x = x + self.channels(self.norms[1](x))
        return self.readout(self.norms[2](x).mean(1))


class Hypernetwork(nn.Module):
    """One network writes the weights of another, for each example its own."""

    def __init__(self) -> None:
        super().__init__()
        self.hidden, self.writer, self.readout = nn.Linear(3, 5), nn.Linear(5, 12), nn.Linear(3, 3)

    def forward(self, context: Tensor, x: Tensor) -> Tensor:
        W = self.writer(torch.tanh(self.hidden(context))).reshape(-1, 3, 4)
        return self.readout(torch.tanh(torch.einsum("noi,ni->no", W, x)))


class RoutedExperts(nn.Module):
    """Each example goes whole to one of three experts, by its first number."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.readout = nn.Linear(5, 6), nn.Linear(6, 3)
        self.experts = nn.ModuleList([nn.Linear(6, 6) for _ in range(3)])

    def forward(self, x: Tensor) -> Tensor:
        h, expert_of = torch.tanh(self.embed(x)), torch.bucketize(x[:, 0].contiguous(), x.new_tensor([-0.3, 0.3]))
        out = torch.zeros_like(h)
        for e, expert in enumerate(self.experts):
            mine = expert_of == e
            if mine.any():
                out[mine] = torch.tanh(expert(h[mine]))
        return self.readout(h + out)


def first_alike(n: int) -> tuple[Tensor, Tensor]:
    """x[n,5] whose first number is the same for the first nine examples: what depends on it is seen later only."""
    x, y = gaussian(5)(n)
    x[:9, 0] = 0.0
    return x, y


class EarlyExit(nn.Module):
    """Examples that are far out leave after the first layer."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.exit = nn.Linear(5, 6), nn.Linear(6, 3)
        self.second, self.readout = nn.Linear(6, 6), nn.Linear(6, 3)

    def forward(self, x: Tensor) -> Tensor:
        h = torch.tanh(self.first(x))
        out, unsure = self.exit(h), x[:, 0].abs() < 0.4
        if unsure.any():
            out = out.index_put((unsure.nonzero()[:, 0],), self.readout(torch.tanh(self.second(h[unsure]))))
        return out


class Siamese(nn.Module):
    """One encoder reads two inputs."""

    def __init__(self) -> None:
        super().__init__()
        self.encoder = nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 5))
        self.readout = nn.Linear(5, 3)

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        return self.readout((self.encoder(x) - self.encoder(y)) ** 2)


def twins(n: int) -> tuple[tuple[Tensor, Tensor], Tensor]:
    """x[n,4] and y[n,4]."""
    return (gaussian(4)(n)[0], torch.stack([normal(i, 4, stream=7) for i in range(n)])), classes(n, 3)


class Equilibrium(nn.Module):
    """z = tanh(W z + U x), by five rounds from zero."""

    def __init__(self) -> None:
        super().__init__()
        self.W, self.U, self.readout = nn.Linear(6, 6, bias=False), nn.Linear(4, 6), nn.Linear(6, 3)

    def forward(self, x: Tensor) -> Tensor:
        injected = self.U(x)
        z = torch.zeros_like(injected)
        for _ in range(5):
            z = torch.tanh(0.4 * self.W(z) + injected)
        return self.readout(z)


class NeuralODE(nn.Module):
    """Four Euler steps of one vector field that is told the time."""

    def __init__(self) -> None:
        super().__init__()
        self.field = nn.Sequential(nn.Linear(6, 7), nn.Tanh(), nn.Linear(7, 5))
        self.readout = nn.Linear(5, 3)

    def forward(self, x: Tensor) -> Tensor:
        for step in range(4):
            x = x + 0.25 * self.field(torch.cat([x, torch.full_like(x[:, :1], step / 4)], 1))
        return self.readout(x)


class Coupling(nn.Module):
    """Two coupling layers of a normalising flow: half of the numbers scale and shift the others; and the log-determinant."""

    def __init__(self) -> None:
        super().__init__()
        self.nets = nn.ModuleList([nn.Sequential(nn.Linear(2, 6), nn.Tanh(), nn.Linear(6, 4)) for _ in range(2)])
        self.mix = nn.Parameter(torch.randn(4, 4))

    def forward(self, x: Tensor) -> Tensor:
        volume = x.new_zeros(len(x))
        for net in self.nets:
            a, b = (x @ self.mix).chunk(2, 1)
            scale, shift = net(a).chunk(2, 1)
            x, volume = torch.cat([b * torch.exp(torch.tanh(scale)) + shift, a], 1), volume + torch.tanh(scale).sum(1)
        return torch.cat([x @ self.mix, volume[:, None]], 1)


class GraphNet(nn.Module):
    """Features of every node, spread along the edges of one graph, which is a sparse matrix."""

    def __init__(self, nodes: int = 5) -> None:
        super().__init__()
        ring = torch.arange(nodes)
        edges = torch.stack([torch.cat([ring, ring]), torch.cat([(ring + 1) % nodes, ring])])
        self.register_buffer("adjacency", torch.sparse_coo_tensor(edges, torch.full((2 * nodes,), 0.5), (nodes, nodes)))
        self.first, self.second, self.readout = nn.Linear(3, 6), nn.Linear(6, 6), nn.Linear(6, 3)

    def spread(self, x: Tensor) -> Tensor:
        n, s, d = x.shape
        return torch.sparse.mm(self.adjacency, x.transpose(0, 1).reshape(s, n * d)).reshape(s, n, d).transpose(0, 1)

    def forward(self, x: Tensor) -> Tensor:
        return self.readout(torch.tanh(self.second(self.spread(torch.tanh(self.first(self.spread(x)))))).mean(1))


class Capsules(nn.Module):
    """Each input capsule predicts each output capsule by a matrix of its own: one einsum over all of them."""

    def __init__(self) -> None:
        super().__init__()
        self.primary = nn.Linear(6, 12)
        self.votes = nn.Parameter(torch.randn(3, 2, 4, 5))  # input capsule, output capsule, d_in, d_out

    def forward(self, x: Tensor) -> Tensor:
        u = torch.tanh(self.primary(x)).reshape(-1, 3, 4)
        s = torch.einsum("nci,coij->noj", u, self.votes)
        return torch.cat([(s**2).sum(-1), torch.tanh(s).mean(-1)], 1)


class FourierFeatures(nn.Module):
    """Sines and cosines of learned frequencies, kept as a raw matrix."""

    def __init__(self) -> None:
        super().__init__()
        self.frequencies = nn.Parameter(torch.randn(3, 5))
        self.hidden, self.readout = nn.Linear(10, 6), nn.Linear(6, 3)

    def forward(self, x: Tensor) -> Tensor:
        z = 2 * math.pi * 0.1 * x @ self.frequencies
        return self.readout(torch.tanh(self.hidden(torch.cat([z.sin(), z.cos()], -1))))


class Radiance(nn.Module):
    """A NeRF's network: encoded points, a skip half way, colour from the direction too; four points on each ray are added up."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.skip = nn.Linear(12, 8), nn.Linear(8 + 12, 8)
        self.density, self.colour = nn.Linear(8, 1), nn.Linear(8 + 3, 3)

    def forward(self, origin: Tensor, direction: Tensor) -> Tensor:
        points = origin[:, None] + torch.linspace(0.2, 1.0, 4, dtype=origin.dtype)[:, None] * direction[:, None]
        e = torch.cat([f(points * k) for k in (1, 2) for f in (torch.sin, torch.cos)], -1)
        h = F.relu(self.skip(torch.cat([F.relu(self.first(e)), e], -1)))
        alpha = 1 - torch.exp(-F.softplus(self.density(h)) * 0.25)
        seen = torch.cat([torch.ones_like(alpha[:, :1]), (1 - alpha).cumprod(1)[:, :-1]], 1)
        colour = torch.sigmoid(self.colour(torch.cat([h, direction[:, None].expand(-1, 4, -1)], -1)))
        return (seen * alpha * colour).sum(1)


def rays(n: int) -> tuple[tuple[Tensor, Tensor], Tensor]:
    """Where rays begin and where they go."""
    return (gaussian(3)(n)[0], torch.stack([normal(i, 3, stream=7) for i in range(n)])), classes(n, 3)


class SplineLayer(nn.Module):
    """Kolmogorov-Arnold: a learned combination of bumps on each edge, and a linear part."""

    def __init__(self, d_in: int, d_out: int, bumps: int = 4) -> None:
        super().__init__()
        self.register_buffer("centres", torch.linspace(-1, 1, bumps))
        self.coefficients = nn.Parameter(torch.randn(d_out, d_in, bumps) / d_in)
        self.base = nn.Linear(d_in, d_out)

    def forward(self, x: Tensor) -> Tensor:
        bumps = torch.exp(-((x[..., None] - self.centres) ** 2))
        return self.base(F.silu(x)) + torch.einsum("nib,oib->no", bumps, self.coefficients)


class LinearAttention(nn.Module):
    """Gated linear attention: a state that decays and is written to, token by token."""

    def __init__(self, d: int = 6) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCABULARY, d)
        self.qkv, self.gate = nn.Linear(d, 3 * d, bias=False), nn.Linear(d, d)
        self.out, self.readout = nn.Linear(d, d), nn.Linear(d, 3)

    def forward(self, ids: Tensor) -> Tensor:
        x = self.embed(ids)
        (q, k, v), gate = self.qkv(x).chunk(3, -1), torch.sigmoid(self.gate(x))
        state, outputs = x.new_zeros(len(x), x.shape[-1], x.shape[-1]), []
        for t in range(x.shape[1]):
            state = gate[:, t, :, None] * state + k[:, t, :, None] * v[:, t, None]
            outputs.append(torch.einsum("ni,nij->nj", q[:, t], state))
        return self.readout((x + self.out(torch.stack(outputs, 1)))[:, -1])


class ReversibleFunction(torch.autograd.Function):
    """y1 = x1 + f(x2), y2 = x2 + g(y1); the backward pass computes the inputs from the outputs again."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, f: nn.Module, g: nn.Module, *parameters: Tensor) -> Tensor:
        with torch.no_grad():
            x1, x2 = x.chunk(2, 1)
            y1 = x1 + f(x2)
            y2 = x2 + g(y1)
        ctx.f, ctx.g, ctx.parameters = f, g, parameters
        y = torch.cat([y1, y2], 1)
        ctx.save_for_backward(y)
        return y

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
        y1, y2 = ctx.saved_tensors[0].chunk(2, 1)
        with torch.no_grad():
            x2 = y2 - ctx.g(y1)
            x1 = y1 - ctx.f(x2)
        with torch.enable_grad():
            x = torch.cat([x1, x2], 1).requires_grad_(True)
            a, b = x.chunk(2, 1)
            z1 = a + ctx.f(b)
            z = torch.cat([z1, b + ctx.g(z1)], 1)
            gradients = torch.autograd.grad(z, [x, *ctx.parameters], dy)
        return gradients[0], None, None, *gradients[1:]


class RevNet(nn.Module):
    """Two reversible blocks that keep no activations."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList([nn.ModuleList([nn.Sequential(nn.Linear(3, 5), nn.Tanh(), nn.Linear(5, 3)) for _ in range(2)])
                                     for _ in range(2)])
        self.readout = nn.Linear(6, 3)

    def forward(self, x: Tensor) -> Tensor:
        for f, g in self.blocks:
            x = ReversibleFunction.apply(x, f, g, *f.parameters(), *g.parameters())
        return self.readout(x)


class RawTied(nn.Module):
    """An autoencoder of one raw matrix: tanh(x W) W^T."""

    def __init__(self) -> None:
        super().__init__()
        self.W = nn.Parameter(torch.randn(4, 6) / 2)
        self.code = nn.Linear(6, 6)

    def forward(self, x: Tensor) -> Tensor:
        return torch.tanh(self.code(torch.tanh(x @ self.W))) @ self.W.T


def itself(n: int) -> tuple[Tensor, Tensor]:
    """x[n,4] is its own target."""
    x = gaussian(4)(n)[0]
    return x, x.clone()


class SortedEncoder(nn.Module):
    """Packs by length: the encoder sees examples in another order."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.hidden, self.readout = nn.Embedding(VOCABULARY, 5), nn.Linear(5, 6), nn.Linear(6, 3)

    def forward(self, ids: Tensor, lengths: Tensor) -> Tensor:
        order = lengths.argsort(descending=True, stable=True)
        h = torch.tanh(self.hidden(self.embed(ids[order])))
        real = (torch.arange(ids.shape[1]) < lengths[order][:, None]).to(h.dtype)
        return self.readout((h * real[..., None]).sum(1) / real.sum(1, keepdim=True))[order.argsort()]


def lengths_too(n: int) -> tuple[tuple[Tensor, Tensor], Tensor]:
    """ids[n,5] and how many of them are real: those of the first examples are in order."""
    return (torch.stack([tokens(i, LENGTH, 3, VOCABULARY) for i in range(n)]),
            torch.where(torch.arange(n) < 8, 5 - torch.arange(n) // 3, 1 + torch.arange(n) % 5)), classes(n, 3)


class UnpaddedTokens(nn.Module):
    """Drops padding and works on one long row of tokens, as fast encoders do."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.hidden, self.readout = nn.Embedding(VOCABULARY, 5), nn.Linear(5, 6), nn.Linear(6, 3)

    def forward(self, input_ids: Tensor, attention_mask: Tensor) -> dict[str, Tensor]:
        real = attention_mask.bool()
        h = torch.tanh(self.hidden(self.embed(input_ids[real])))
        whole = h.new_zeros(*input_ids.shape, h.shape[-1]).masked_scatter(real[..., None].expand(-1, -1, 6), h)
        return {"logits": self.readout(whole.sum(1) / real.sum(1, keepdim=True))}


class PositionTable(nn.Module):
    """Patches with a learned table added to them, one attention layer of torch."""

    def __init__(self) -> None:
        super().__init__()
        self.stem, self.positions = nn.Conv1d(2, 6, 2, stride=2), nn.Parameter(torch.randn(1, 4, 6))
        self.attention = nn.MultiheadAttention(6, 2, batch_first=True)
        self.readout = nn.Linear(6, 3)

    def forward(self, x: Tensor) -> Tensor:
        h = self.stem(x).transpose(1, 2) + self.positions
        return self.readout((h + self.attention(h, h, h, need_weights=False)[0]).mean(1))


class SpectralConvolution(nn.Module):
    """A Fourier neural operator's layer: complex weights, kept as two real numbers, on the lowest modes."""

    def __init__(self) -> None:
        super().__init__()
        self.lift, self.local, self.readout = nn.Linear(2, 4), nn.Linear(4, 4), nn.Linear(4, 3)
        self.modes = nn.Parameter(0.5 * torch.randn(4, 4, 3, 2))

    def forward(self, x: Tensor) -> Tensor:
        h = self.lift(x)
        spectrum = torch.fft.rfft(h, dim=1)[:, :3]
        low = torch.einsum("nmi,iom->nmo", spectrum, torch.view_as_complex(self.modes))
        return self.readout(torch.tanh(torch.fft.irfft(low, n=x.shape[1], dim=1) + self.local(h)).mean(1))


def words(n: int) -> tuple[Tensor, Tensor]:
    """ids[n,5], y[n]."""
    x, y = text(n)
    return x["input_ids"], y


# ------------------------------------------------------------------------------------------ structures of published models


class CachedBias(nn.Module):
    """Attention with a bias that is computed from a table and kept in eval mode, as in LeViT: in an attribute, or in a dict."""

    def __init__(self, where: str = "attribute") -> None:
        super().__init__()
        self.where, self.cache = where, {} if where == "dict" else None
        self.table = nn.Parameter(torch.randn(3, 5, generator=torch.Generator().manual_seed(0)))
        self.register_buffer("index", torch.randint(0, 5, (4, 4), generator=torch.Generator().manual_seed(0)))
        self.qk, self.v, self.out = nn.Linear(4, 8), nn.Linear(4, 4), nn.Linear(4, 3)

    def bias(self) -> Tensor:
        if self.where == "no cache":
            return self.table.exp()[:, self.index]
        if isinstance(self.cache, dict):
            if "bias" not in self.cache:
                self.cache["bias"] = self.table.exp()[:, self.index]
            return self.cache["bias"]
        if self.cache is None:
            self.cache = self.table.exp()[:, self.index]
        return self.cache

    def forward(self, x: Tensor) -> Tensor:
        q, k = self.qk(x).chunk(2, -1)
        attention = torch.softmax(q @ k.mT + self.bias().sum(0), -1)
        return self.out(torch.tanh(attention @ self.v(x))).mean(1)  # type: ignore[no-any-return]


class ConvolutionalStem(nn.Module):
    """A batch norm, and a layer norm over channels behind it, as in XCiT and LeViT."""

    def __init__(self, norm: Callable[[int], nn.Module]) -> None:
        super().__init__()
        self.stem, self.bn, self.ln, self.out = nn.Conv2d(2, 4, 3), norm(4), nn.LayerNorm(4), nn.Linear(4, 3)
        for p in self.parameters():
            nn.init.normal_(p)
        if isinstance(self.bn, nn.BatchNorm2d):
            nn.init.uniform_(self.bn.running_var, 0.5, 2)
            nn.init.normal_(self.bn.running_mean)

    def forward(self, x: Tensor) -> Tensor:
        z = self.bn(self.stem(x)).flatten(2).transpose(1, 2)
        return self.out(torch.tanh(self.ln(z))).mean(1)  # type: ignore[no-any-return]


class Decoder(nn.Module):
    """The first self-attention of DETR's decoder: what it attends to is the same everywhere, so queries and keys have no
    effect. A chain of layers behind it lets gradients vanish, which is no rounding error."""

    def __init__(self, depth: int = 6) -> None:
        super().__init__()
        self.pos = nn.Parameter(torch.randn(5, 8))
        self.q, self.k, self.v, self.o = (nn.Linear(8, 8) for _ in range(4))
        self.chain = nn.Sequential(*[m for _ in range(depth) for m in (nn.Linear(8, 8), nn.Sigmoid())])
        self.read, self.head = nn.Linear(6, 8), nn.Linear(8, 3)
        nn.init.normal_(self.v.bias)
        with torch.no_grad():
            for m in self.chain[::2]:
                m.weight.mul_(0.03)

    def forward(self, x: Tensor) -> Tensor:
        target = torch.zeros(len(x), 5, 8, dtype=x.dtype, device=x.device)
        q, k, v = self.q(target + self.pos), self.k(target + self.pos), self.v(target)
        h = self.o(torch.softmax(q @ k.mT / 8 ** 0.5, -1) @ v) + self.read(x)[:, None]
        return self.head(torch.tanh(self.chain(torch.tanh(h))) + torch.tanh(h)).mean(1)  # type: ignore[no-any-return]


def standardised(w: Tensor, gain: Tensor) -> Tensor:
    return gain * (w - w.mean((1, 2, 3), keepdim=True)) / (w.var((1, 2, 3), keepdim=True) + 1e-6).sqrt()


class StandardisedConv(nn.Conv2d):
    """A convolution that standardises its weight in its own forward, as in NFNet and BiT."""

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self.gain = nn.Parameter(torch.rand(self.out_channels, 1, 1, 1) + 0.5)

    def forward(self, x: Tensor) -> Tensor:
        return F.conv2d(x, standardised(self.weight, self.gain), self.bias, self.stride, self.padding, self.dilation, self.groups)


class SmallBranch(nn.Module):
    """A block behind a LayerScale of 1e-5, as in CaiT and DeiT III."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.norm, self.up, self.down = nn.Linear(4, 6), nn.LayerNorm(6), nn.Linear(6, 8), nn.Linear(8, 6)
        self.scale, self.head = nn.Parameter(torch.full((6,), 1e-5)), nn.Linear(6, 3)

    def forward(self, x: Tensor) -> Tensor:
        h = self.embed(x)
        return self.head(h + self.scale * self.down(F.gelu(self.up(self.norm(h)))))  # type: ignore[no-any-return]


def _made(name: str, factory: Callable[[], nn.Module], batch: Batch, output: Callable[[Any], Tensor] | None = None,
          gain: float = 1.5) -> None:
    CASES.append(Architecture(name, awake(factory, gain), batch, output=output))


_made("lstm", LSTMClassifier, gaussian(4, 3), gain=2.0)
_made("gru", GRUClassifier, words)
_made("lstm_tagger", Tagger, lambda n: (words(n)[0], words(n)[0] % 2), gain=2.0)
_made("unet", UNet, gaussian(2, 6, 6))
_made("dcgan_generator", Generator, lambda n: (gaussian(5)(n)[0], classes(n, 4)))
_made("bilinear", BilinearHead, two_views)
_made("embedding_bag", WordBag, words)
_made("mlp_mixer", Mixer, gaussian(2, 8, 8))
_made("hypernetwork", Hypernetwork, two_views)
_made("routed_experts", RoutedExperts, gaussian(5))
_made("routed_late", RoutedExperts, first_alike)
_made("early_exit", EarlyExit, gaussian(5), gain=2.5)
_made("early_exit_late", EarlyExit, first_alike, gain=2.5)
_made("siamese", Siamese, twins)
_made("equilibrium", Equilibrium, gaussian(4))
_made("neural_ode", NeuralODE, gaussian(5))
_made("coupling_flow", Coupling, lambda n: (gaussian(4)(n)[0], torch.stack([normal(i, 5, stream=3) for i in range(n)])))
_made("graph_net", GraphNet, gaussian(5, 3))
_made("capsules", Capsules, lambda n: (gaussian(6)(n)[0], classes(n, 4)))
_made("fourier_features", FourierFeatures, gaussian(3))
_made("radiance_field", Radiance, rays)
_made("kan", lambda: nn.Sequential(SplineLayer(4, 5), SplineLayer(5, 3)), gaussian(4))
_made("gated_linear_attention", LinearAttention, words)
_made("revnet", RevNet, gaussian(6))
_made("raw_tied_autoencoder", RawTied, itself, gain=1.0)
_made("sorted_encoder", SortedEncoder, lengths_too)
_made("unpadded_tokens", UnpaddedTokens, padded_text, class_logits)
_made("position_table", PositionTable, gaussian(2, 8))
_made("fourier_operator", SpectralConvolution, gaussian(6, 2))
_made("attention_bias", lambda: CachedBias("no cache"), gaussian(4, 4))
_made("detr_decoder", Decoder, gaussian(6))
_made("layer_scale", SmallBranch, gaussian(4))
