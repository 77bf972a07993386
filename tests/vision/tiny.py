"""A tiny random Qwen2.5-VL with its tokenizer and image processor, in Hugging Face format; and pictures for it."""

from __future__ import annotations

import io
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image as Pillow
from tokenizers import AddedToken
from transformers import AutoConfig, AutoModelForImageTextToText, PreTrainedModel
from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil

from agentrl.quickstart.tiny_policy import CHAT_TEMPLATE, PLAIN_ENGLISH, train_tokenizer
from agentrl.trajectory.picture import Picture
from tests.model.families import DELTA

VISION_TOKENS = ("<|vision_start|>", "<|vision_end|>", "<|image_pad|>", "<|video_pad|>")
WRITTEN = """\
{%- macro written(content) %}
    {%- if content is string %}{{- content }}
    {%- else %}
        {%- for part in content %}
            {{- part['text'] if part['type'] == 'text' else '<|vision_start|><|image_pad|><|vision_end|>' }}
        {%- endfor %}
    {%- endif %}
{%- endmacro %}
"""
TEMPLATE = WRITTEN + CHAT_TEMPLATE.replace("+ message['content'] +", "+ written(message['content']) +")


def make_model(family: str, vocab_size: int, head_dim: int = 8, **token_ids: Any) -> PreTrainedModel:
    """A random model of a family of Qwen's vision-language models, with weights large enough that it attends."""
    width = 4 * head_dim
    text: dict[str, Any] = {
        "vocab_size": vocab_size,
        "hidden_size": width,
        "intermediate_size": 48,
        "num_hidden_layers": 3,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "max_position_embeddings": 1024,
        "rope_parameters": {
            "rope_type": "default",
            "rope_theta": 10000.0,
            "mrope_section": [head_dim // 4, head_dim // 8, head_dim // 8],
        },
        "pad_token_id": None,
        "bos_token_id": None,
        "eos_token_id": None,
    }
    vision: dict[str, Any] = {"depth": 2, "patch_size": 4, "spatial_merge_size": 2, "temporal_patch_size": 2}
    sizes: dict[str, dict[str, Any]] = {
        "qwen2_vl": {"embed_dim": 16, "hidden_size": width, "num_heads": 2, "mlp_ratio": 2},
        "qwen2_5_vl": {
            "hidden_size": 16,
            "out_hidden_size": width,
            "num_heads": 2,
            "intermediate_size": 24,
            "window_size": 16,
            "fullatt_block_indexes": [1],
        },
        "qwen3_vl": {
            "hidden_size": 16,
            "out_hidden_size": width,
            "num_heads": 2,
            "intermediate_size": 24,
            "num_position_embeddings": 64,
            "deepstack_visual_indexes": [0, 1],
        },
        "qwen3_5": {
            "hidden_size": 16,
            "out_hidden_size": width,
            "num_heads": 2,
            "intermediate_size": 24,
            "num_position_embeddings": 64,
        },
    }
    vision |= sizes[family]
    if family == "qwen3_vl":
        text |= {"head_dim": head_dim}
        text["rope_parameters"] |= {"mrope_interleaved": True}
    if family == "qwen3_5":
        text |= DELTA | {
            "head_dim": head_dim,
            "layer_types": ["linear_attention", "linear_attention", "full_attention"],
        }
        text["rope_parameters"] |= {"mrope_interleaved": True, "partial_rotary_factor": 1.0}
    config = AutoConfig.for_model(family, text_config=text, vision_config=vision, **token_ids)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model: PreTrainedModel = AutoModelForImageTextToText.from_config(config, dtype=torch.float32)
        with torch.no_grad():
            for weight in model.parameters():
                if weight.ndim >= 2:
                    weight.normal_(0.0, 0.15)
    return model.eval()


def make_tiny_vision_policy(directory: Path, head_dim: int = 8) -> Path:
    """Write the model; images of at most 16 tokens, each of 8 by 8 pixels."""
    tokenizer = train_tokenizer(PLAIN_ENGLISH, 400)
    tokenizer.add_tokens([AddedToken(text, normalized=False, special=True) for text in VISION_TOKENS])
    tokenizer.chat_template = TEMPLATE
    start, end, image, video = (tokenizer.convert_tokens_to_ids(text) for text in VISION_TOKENS)
    model = make_model(
        "qwen2_5_vl",
        len(tokenizer),
        head_dim,
        vision_start_token_id=start,
        vision_end_token_id=end,
        image_token_id=image,
        video_token_id=video,
    )
    model.save_pretrained(directory)
    tokenizer.save_pretrained(directory)
    Qwen2VLImageProcessorPil(
        patch_size=4, merge_size=2, temporal_patch_size=2, min_pixels=4 * 64, max_pixels=16 * 64
    ).save_pretrained(directory)
    return directory


def picture(seed: int, width: int = 24, height: int = 16) -> Picture:
    """A PNG of noise; of these sizes it has width * height / 64 tokens."""
    return Picture(encoded(seed, width, height))


def encoded(seed: int, width: int = 24, height: int = 16, kind: str = "PNG") -> bytes:
    pixels = np.random.default_rng(seed).integers(0, 256, (height, width, 3), dtype=np.uint8)
    file = io.BytesIO()
    Pillow.fromarray(pixels).save(file, kind)
    return file.getvalue()
