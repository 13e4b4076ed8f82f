#!/usr/bin/env python3
"""A two-layer Qwen3 of random weights in a folder that has the tokenizer already: `model.py DIR`. Weights are large, so that what it says depends on the prompt."""

import sys

import torch
from transformers import Qwen3Config, Qwen3ForCausalLM

torch.manual_seed(7)
config = Qwen3Config(
    vocab_size=151669, hidden_size=128, intermediate_size=256, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2, head_dim=32,
    max_position_embeddings=8192, tie_word_embeddings=True, bos_token_id=151643, eos_token_id=151645,
)
model = Qwen3ForCausalLM(config)
with torch.no_grad():
    for name, weights in model.named_parameters():
        if weights.dim() == 2:
            weights.normal_(0, 0.5 if "embed" in name else 0.25)
model.to(torch.bfloat16).save_pretrained(sys.argv[1])
