#!/usr/bin/env python3
"""Adapters of random weights for the model of model.py: `lora.py DIR COUNT` makes DIR/a0, DIR/a1, …"""

import json
import os
import sys

import torch
from safetensors.torch import save_file

RANK, HIDDEN, LAYERS = 8, 128, 2
# Rows of each projection: heads × head_dim.
ROWS = {"q_proj": 4 * 32, "v_proj": 2 * 32}

folder, count = sys.argv[1], int(sys.argv[2])
for number in range(count):
    torch.manual_seed(100 + number)
    tensors = {}
    for layer in range(LAYERS):
        for name, rows in ROWS.items():
            path = f"base_model.model.model.layers.{layer}.self_attn.{name}"
            tensors[f"{path}.lora_A.weight"] = torch.randn(RANK, HIDDEN).to(torch.bfloat16)
            tensors[f"{path}.lora_B.weight"] = (torch.randn(rows, RANK) * 0.2).to(torch.bfloat16)
    adapter = os.path.join(folder, f"a{number}")
    os.makedirs(adapter, exist_ok=True)
    save_file(tensors, os.path.join(adapter, "adapter_model.safetensors"))
    with open(os.path.join(adapter, "adapter_config.json"), "w") as file:
        config = {"peft_type": "LORA", "task_type": "CAUSAL_LM", "r": RANK, "lora_alpha": 16, "target_modules": list(ROWS), "bias": "none"}
        json.dump({**config, "base_model_name_or_path": "tiny"}, file)
