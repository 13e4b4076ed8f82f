"""What a worker on this GPU serves of a model of 8e9 random numbers, in Llama-3.1-8B's shape: prompts alone, one answer alone, 64 answers.

    python3 bench/gpu/serve.py WORKER [DIRECTORY] [SWITCH..]   one line of JSON each; DIRECTORY (default: a new one in /dev/shm) takes 16 GB

SWITCHes go to the worker. Answers are noise, and take as long as a model's: greedy, to their last token. Needs Python alone.
"""
import asyncio
import json
import os
import pathlib
import random
import re
import shutil
import signal
import statistics
import struct
import subprocess
import sys
import tempfile
import time

SHAPE = {"hidden_size": 4096, "intermediate_size": 14336, "num_hidden_layers": 32, "num_attention_heads": 32, "num_key_value_heads": 8,
         "head_dim": 128, "vocab_size": 128256}
if os.environ.get("SHAPES") == "small":
    SHAPE = {"hidden_size": 128, "intermediate_size": 256, "num_hidden_layers": 2, "num_attention_heads": 2, "num_key_value_heads": 1,
             "head_dim": 64, "vocab_size": 2048}
SMALL = SHAPE["vocab_size"] == 2048
PROMPT, ANSWER, TOGETHER, PROMPT_OF_MANY = (16, 3, 2, 8) if SMALL else (8192, 128, 64, 512)
CONFIG = {"architectures": ["LlamaForCausalLM"], "model_type": "llama", "hidden_act": "silu", "rms_norm_eps": 1e-5, "rope_theta": 500000.0,
          "max_position_embeddings": 131072, "tie_word_embeddings": False, "torch_dtype": "bfloat16", "bos_token_id": 0, "eos_token_id": 2, **SHAPE}
BUILTIN = pathlib.Path(__file__).resolve().parents[2] / "worker/models/builtin"


def tensors():
    """(name, shape) of the model's."""
    width, inner, heads = SHAPE["hidden_size"], SHAPE["intermediate_size"], SHAPE["head_dim"]
    queries, keys = SHAPE["num_attention_heads"] * heads, SHAPE["num_key_value_heads"] * heads
    yield "model.embed_tokens.weight", (SHAPE["vocab_size"], width)
    for layer in range(SHAPE["num_hidden_layers"]):
        at = f"model.layers.{layer}."
        yield at + "input_layernorm.weight", (width,)
        for name, rows in (("q", queries), ("k", keys), ("v", keys)):
            yield f"{at}self_attn.{name}_proj.weight", (rows, width)
        yield at + "self_attn.o_proj.weight", (width, queries)
        yield at + "post_attention_layernorm.weight", (width,)
        yield at + "mlp.gate_proj.weight", (inner, width)
        yield at + "mlp.up_proj.weight", (inner, width)
        yield at + "mlp.down_proj.weight", (width, inner)
    yield "model.norm.weight", (width,)
    yield "lm_head.weight", (SHAPE["vocab_size"], width)


def write_model(directory):
    """The numbers of a block of 32 MiB over and over, each tensor from another place of it: as hard to multiply as others."""
    draw = random.Random(1)
    # bf16 of 2^-7 to 2^-4, of either sign.
    block = b"".join(struct.pack("<H", draw.getrandbits(1) << 15 | (120 + draw.getrandbits(1)) << 7 | draw.getrandbits(7)) for _ in range(1 << 16)) * 512
    ones = struct.pack("<H", 0x3f80)
    header, end = {}, 0
    for name, shape in tensors():
        size = 2 * shape[0] * (shape[1] if len(shape) > 1 else 1)
        header[name] = {"dtype": "BF16", "shape": shape, "data_offsets": [end, end + size]}
        end += size
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    with open(directory / "model.safetensors", "wb") as file:
        file.write(struct.pack("<Q", len(text)) + text)
        for name, shape in tensors():
            left, place = 2 * shape[0] * (shape[1] if len(shape) > 1 else 1), 2 * draw.randrange(1 << 20)
            if len(shape) == 1:
                file.write(ones * shape[0])
                continue
            while left:
                part = memoryview(block)[place:place + left]
                file.write(part)
                left, place = left - len(part), 0
    (directory / "config.json").write_text(json.dumps(CONFIG))
    tokenizer = json.loads((BUILTIN / "tokenizer.json").read_text())
    vocabulary = tokenizer["model"]["vocab"]
    for token in range(len(vocabulary), SHAPE["vocab_size"]):
        vocabulary[f"word{token}"] = token
    (directory / "tokenizer.json").write_text(json.dumps(tokenizer))
    for name in ("tokenizer_config.json", "generation_config.json"):
        shutil.copy(BUILTIN / name, directory / name)


async def ask(port, prompt, answer):
    """(seconds to the first token, seconds between tokens) of a stream."""
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    body = json.dumps({"prompt": prompt, "max_tokens": answer, "temperature": 0, "stream": True, "ignore_eos": True, "stream_options": {"include_usage": True}}).encode()
    begun = time.perf_counter()
    writer.write(b"POST /v1/completions HTTP/1.1\r\nHost: w\r\nContent-Type: application/json\r\nContent-Length: %d\r\nConnection: close\r\n\r\n" % len(body) + body)
    times, first, last, told = [], b"", b"", 0
    async for line in reader:
        first, last = first or line, line.strip() or last
        if line.startswith(b"data: {"):
            event = json.loads(line[6:])
            told = (event.get("usage") or {}).get("completion_tokens", told)
            # The last is an event of its own, but where a token's text is none, or a part of a character, it is all that there is.
            if event.get("choices") and not (event["choices"][0].get("finish_reason") and times):
                times.append(time.perf_counter())
    writer.close()
    if b" 200 " not in first or told != answer:
        sys.exit(f"serve.py: the worker said {first} and, after {told} of {answer} tokens, {last}")
    return times[0] - begun, [later - earlier for earlier, later in zip(times, times[1:])], times[-1] - begun


def prompt(length):
    return [random.randrange(3, 2048) for _ in range(length)]


def tell(what, **numbers):
    print(json.dumps({"name": "serve", "what": what, **{name: round(number, 3) for name, number in numbers.items()}}), flush=True)


async def measure(port):
    await ask(port, prompt(16), 4)
    for length in (PROMPT // 8, PROMPT):
        await ask(port, prompt(length), 1)
        seconds = statistics.median([(await ask(port, prompt(length), 1))[0] for _ in range(5)])
        tell(f"a prompt of {length} tokens, alone, median of 5", ttft_ms=seconds * 1e3, prompt_tokens_per_second=length / seconds)
    _, gaps, _ = await ask(port, prompt(PROMPT_OF_MANY), ANSWER)
    tell(f"an answer of {ANSWER} tokens after {PROMPT_OF_MANY}, alone", median_ms_between_tokens=statistics.median(gaps) * 1e3)
    begun = time.perf_counter()
    answers = await asyncio.gather(*(ask(port, prompt(PROMPT_OF_MANY), ANSWER) for _ in range(TOGETHER)))
    seconds = time.perf_counter() - begun
    gaps = [gap for _, gaps, _ in answers for gap in gaps]
    tell(f"{TOGETHER} answers of {ANSWER} tokens after {PROMPT_OF_MANY} each, together", median_ms_between_tokens=statistics.median(gaps) * 1e3,
         median_ttft_ms=statistics.median(first for first, _, _ in answers) * 1e3, answer_tokens_per_second=TOGETHER * ANSWER / seconds)


def main():
    if len(sys.argv) < 2:
        sys.exit(__doc__.strip())
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # so that what was written goes
    made = None if len(sys.argv) > 2 and not sys.argv[2].startswith("-") else tempfile.mkdtemp(dir="/dev/shm")
    directory, switches = (pathlib.Path(made), sys.argv[2:]) if made else (pathlib.Path(sys.argv[2]), sys.argv[3:])
    try:
        if not (directory / "model.safetensors").exists():
            begun = time.perf_counter()
            directory.mkdir(parents=True, exist_ok=True)
            write_model(directory)
            tell("the model, written", seconds=time.perf_counter() - begun)
        serve(directory, switches)
    finally:
        if made:
            shutil.rmtree(made)


def serve(directory, switches):
    begun = time.perf_counter()
    of_size = {} if SMALL else {"--kv-memory": "48GiB", "--context-length": "16384", "--max-tokens-per-step": "8192"}
    limits = [word for switch, value in of_size.items() if switch not in switches for word in (switch, value)]
    worker = subprocess.Popen([sys.argv[1], "--model", str(directory), "--port", "0", *limits, *switches], stdout=subprocess.PIPE, text=True)
    try:
        said = []
        for line in worker.stdout:
            said.append(line.strip())
            if "http://127.0.0.1:" in line:
                break
        else:
            sys.exit("serve.py: the worker ended: " + " ".join(said))
        port, described = re.search(r"http://127\.0\.0\.1:(\d+): (.*)", line).groups()
        tell(f"the worker, started: {described}", seconds=time.perf_counter() - begun)
        asyncio.run(measure(int(port)))
    finally:
        worker.terminate()
        try:
            worker.communicate(timeout=60)
        except subprocess.TimeoutExpired:
            worker.kill()


if __name__ == "__main__":
    main()
