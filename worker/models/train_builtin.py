#!/usr/bin/env python3
"""Trains the built-in model of Roundhouse, worker/models/builtin, on two CPU cores.

    apt-get download r-cran-janeaustenr=1.0.0-1
    python worker/models/train_builtin.py r-cran-janeaustenr_1.0.0-1_all.deb worker/models/builtin

The text is that of the six novels of Jane Austen (1811-1817, public domain) as the Debian package
r-cran-janeaustenr ships it. The model is a small Llama with a byte-level BPE tokenizer of its own,
trained from nothing on raw passages and on passages laid out as ChatML chats. It knows nothing but
how to go on in English prose; it is there so that the whole stack can be run and tested with a model
that really answers, ends by itself, and fits into the repository.
"""
import argparse, io, json, math, os, random, re, struct, subprocess, tarfile, time, zlib
import numpy as np
import torch
import torch.nn.functional as F

VOCAB, HIDDEN, LAYERS, HEADS, KV_HEADS, HEAD_DIM, INTER = 2048, 192, 4, 6, 2, 32, 512
THETA, EPS, MAX_POS = 50000.0, 1e-5, 8192
SPECIAL = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
EOT, IM_START, IM_END = 0, 1, 2
IGNORE = -100

CHAT_TEMPLATE = (
    "{% for message in messages %}"
    "{{ '<|im_start|>' + message['role'] + '\\n' + (message['content'] or '') + '<|im_end|>' + '\\n' }}"
    "{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"
)

# ---------------------------------------------------------------- text

def novels(deb):
    """The character vectors in the package's R database: zlib chunks, each one serialised STRSXP."""
    tar = subprocess.run(["dpkg-deb", "--fsys-tarfile", deb], check=True, capture_output=True).stdout
    with tarfile.open(fileobj=io.BytesIO(tar)) as t:
        name = next(n for n in t.getnames() if n.endswith("janeaustenr/data/Rdata.rdb"))
        db = t.extractfile(name).read()
    books, at = [], 0
    while at < len(db):
        size, = struct.unpack_from(">I", db, at)
        z = zlib.decompressobj()
        x = z.decompress(db[at + 4:]) + z.flush()
        assert len(x) == size and x[:2] == b"X\n"
        at = len(db) - len(z.unused_data)
        enc, = struct.unpack_from(">I", x, 14)          # 2 magic, 3 version words, then the encoding's name
        p = 18 + enc
        flags, n = struct.unpack_from(">II", x, p)
        assert flags & 255 == 16, "a character vector"
        p += 8
        lines = []
        for _ in range(n):
            flags, length = struct.unpack_from(">Ii", x, p)
            assert flags & 255 == 9
            p += 8
            lines.append(x[p:p + max(length, 0)].decode("utf-8"))
            p += max(length, 0)
        books.append(lines)
    return books


def paragraphs(lines):
    """Unwraps lines into paragraphs; headings become None, which marks a break."""
    out, cur = [], []
    for line in lines + [""]:
        line = line.strip()
        if line:
            cur.append(line)
            continue
        if cur:
            p = " ".join(cur)
            cur = []
            p = p.translate({0x2019: "'", 0x2018: "'", 0x201c: '"', 0x201d: '"', 0x2014: "--", 0x2013: "-", 0xa0: " "})
            p = re.sub(r"\s+", " ", p.replace("_", ""))
            heading = len(p) < 60 and (p.isupper() or re.match(r"(?i)^(chapter|volume|finis|the end|by jane|\(?18\d\d)", p))
            out.append(None if heading else p)
    return out


def sentences(p):
    return [m.group(0).strip() for m in re.finditer(
        r'(?:Mr\.|Mrs\.|Dr\.|St\.|[^.!?])+(?:[.!?]+["\')]*(?=\s|$)|[.!?]+|$)', p) if m.group(0).strip()]


ASKS = """Tell me a story.|Tell me something.|Go on, please.|Write a short passage.|Write a paragraph.|Hello.|Hello!|Hi there.|Hi|How are you?|Good morning.
Who are you?|What happened?|What happened then?|What do you think?|Say something.|Tell me about yourself.|Tell me about {n}.|Who is {n}?|What did {n} say?|What did {n} do?
Describe {n}.|Write about {n}.|What does {n} think of {m}?|Tell me about {n} and {m}.|What happened to {n}?|Where is {n}?|Write a letter from {n} to {m}.|Why?
Write a poem.|What is the capital of France?|What is {w}?|Explain {w}.|Tell me about {w}.|Write a sentence about {w}.|Write about {w} and {v}.|What does {w} mean?
Count to ten.|What is {d} plus {e}?|Give me an example.|Help me, please.|Summarize this for me.|Write a haiku about {w}.|Once upon a time|Continue.|Say hello.
Translate {w}.|List three things about {w}.|Why is {w} like {v}?|How do I find {w}?|Can you help me with {w}?|What should I do about {n}?|Test|test {d}|ping|{w}|{w} {v}""".replace("\n", "|").split("|")
MORE = ["Go on.", "And then?", "What happened next?", "Continue.", "More, please.", "Tell me more.", "Please continue.", "What did {n} say to that?", "And {n}?", "Thank you. Go on.", "Why?", "Really?"]
SYSTEMS = ["You are a helpful assistant.", "You are a helpful assistant.", "You tell stories in the manner of Jane Austen.", "You are a concise assistant.",
           "Answer in plain English.", "You are Roundhouse, a small language model.", "You are a novelist.", "Be brief."]
ROLES = ("user", "assistant", "system")


class Docs:
    """Endless documents as (ids, targets) where everything a person or a system prompt says is not a target."""

    def __init__(self, books, tok, rng):
        self.tok, self.rng = tok, rng
        self.books = []                                   # per book: list of sentences as (ids, ends_paragraph)
        words, names = {}, {}
        for lines in books:
            flow = []
            for p in paragraphs(lines):
                if p is None:
                    if flow and flow[-1] is not None:
                        flow.append(None)
                    continue
                parts = sentences(p)
                enc = tok.encode_batch([("" if i == 0 else " ") + s for i, s in enumerate(parts)])
                for i, e in enumerate(enc):
                    flow.append((e.ids, i == len(parts) - 1, parts[i]))
                for w in re.findall(r"[a-z]{4,}", p):
                    words[w] = words.get(w, 0) + 1
                for w in re.findall(r"(?:Mr\. |Mrs\. |Miss |Lady |Sir )[A-Z][a-z]+", p):
                    names[w] = names.get(w, 0) + 1
            self.books.append(flow)
        self.words = sorted(w for w, c in words.items() if c >= 5)
        self.names = sorted(w for w, c in names.items() if c >= 20) + ["Emma", "Elizabeth", "Fanny", "Anne", "Elinor", "Marianne", "Catherine", "Jane"]
        self.weights = [len(b) for b in self.books]
        self.nl = tok.encode("\n").ids
        self.nlnl = tok.encode("\n\n").ids
        self.heads = {r: [IM_START] + tok.encode(r + "\n").ids for r in ROLES}

    def start(self, paragraph=True):
        """A random place in a book, at a paragraph's beginning if asked."""
        while True:
            b = self.rng.choices(self.books, self.weights)[0]
            i = self.rng.randrange(len(b) - 40)
            if b[i] is not None and (not paragraph or i == 0 or b[i - 1] is None or b[i - 1][1]):
                return b, i

    def passage(self, b, i, want):
        """Whole sentences from place i until want tokens are reached; the ids, and the place after."""
        ids = []
        while i < len(b) and b[i] is not None:
            s, end, text = b[i]
            ids += s if ids else self.tok.encode(text).ids   # without the space that parts it from the sentence before
            i += 1
            if len(ids) >= want:
                break
            if end and i < len(b) and b[i] is not None:
                ids += self.nlnl
        return ids, i

    def fill(self, t):
        r = self.rng
        return (t.replace("{n}", r.choice(self.names)).replace("{m}", r.choice(self.names)).replace("{w}", r.choice(self.words))
                .replace("{v}", r.choice(self.words)).replace("{d}", str(r.randrange(1000))).replace("{e}", str(r.randrange(100))))

    def raw(self, longest):
        b, i = self.start(paragraph=self.rng.random() < 0.7)
        ids, i = self.passage(b, i, self.rng.randint(40, longest))
        ids = ids + [EOT]
        return ids, ids

    def chat(self, turns=None):
        r, enc = self.rng, lambda s: self.tok.encode(s).ids
        ids, tg = [], []

        def say(role, body, learn):
            head = self.heads[role]
            ids.extend(head + body + [IM_END] + self.nl)
            tg.extend([IGNORE] * len(head) + (body + [IM_END] if learn else [IGNORE] * (len(body) + 1)) + [IGNORE] * len(self.nl))

        if r.random() < 0.4:
            say("system", enc(r.choice(SYSTEMS)), False)
        b, i = self.start()
        for k in range(turns or r.choice([1, 1, 1, 1, 2, 2, 3, 4])):
            kind = r.random()
            if k and kind < 0.75:
                say("user", enc(self.fill(r.choice(MORE))), False)
            elif kind < 0.35:                             # a passage to go on from
                ask, i = self.passage(b, i, r.choice([5, 20, 40, 80, 160]))
                say("user", ask, False)
            elif kind < 0.45:                             # noise of any length: words of the books in no order
                say("user", enc(" ".join(r.choice(self.words) for _ in range(r.choice([1, 3, 8, 20, 60, 150])))), False)
            else:
                say("user", enc(self.fill(r.choice(ASKS))), False)
            if i + 12 >= len(b) or b[i] is None:
                b, i = self.start()
            body, i = self.passage(b, i, r.randint(20, 90))
            say("assistant", body, True)
        return ids, tg

    def rows(self, count, length, longest):
        """count rows of length+1 ids; each starts at a document's start and is packed full."""
        x = np.zeros((count, length + 1), np.int64)
        y = np.full((count, length + 1), IGNORE, np.int64)
        for n in range(count):
            ids, tg = [], []
            while len(ids) < length + 1:
                i, t = self.chat() if self.rng.random() < 0.5 else self.raw(longest)
                ids += i
                tg += [IGNORE] + t[1:]
            x[n], y[n] = ids[:length + 1], tg[:length + 1]
        return torch.from_numpy(x[:, :-1].copy()), torch.from_numpy(y[:, 1:].copy())


# ---------------------------------------------------------------- model (names as Hugging Face's Llama has them)

class Model(torch.nn.Module):
    def __init__(self):
        super().__init__()
        g = torch.nn.ParameterDict()
        def mat(name, o, i, std):
            g[name.replace(".", "/")] = torch.nn.Parameter(torch.randn(o, i) * std)
        mat("model.embed_tokens.weight", VOCAB, HIDDEN, 0.02)
        for l in range(LAYERS):
            p = f"model.layers.{l}."
            s = HIDDEN ** -0.5
            mat(p + "self_attn.q_proj.weight", HEADS * HEAD_DIM, HIDDEN, s)
            mat(p + "self_attn.k_proj.weight", KV_HEADS * HEAD_DIM, HIDDEN, s)
            mat(p + "self_attn.v_proj.weight", KV_HEADS * HEAD_DIM, HIDDEN, s)
            mat(p + "self_attn.o_proj.weight", HIDDEN, HEADS * HEAD_DIM, s / math.sqrt(2 * LAYERS))
            mat(p + "mlp.gate_proj.weight", INTER, HIDDEN, s)
            mat(p + "mlp.up_proj.weight", INTER, HIDDEN, s)
            mat(p + "mlp.down_proj.weight", HIDDEN, INTER, INTER ** -0.5 / math.sqrt(2 * LAYERS))
            for n in ("input_layernorm", "post_attention_layernorm"):
                g[(p + n + ".weight").replace(".", "/")] = torch.nn.Parameter(torch.ones(HIDDEN))
        g["model/norm/weight"] = torch.nn.Parameter(torch.ones(HIDDEN))
        self.g = g
        self.inv = THETA ** (-torch.arange(0, HEAD_DIM, 2).float() / HEAD_DIM)

    def w(self, name):
        return self.g[name.replace(".", "/")]

    def forward(self, x, pos):
        a = pos[..., None].float() * self.inv
        a = torch.cat([a, a], -1)
        cos, sin = a.cos()[:, None], a.sin()[:, None]

        def rope(t):
            h1, h2 = t.chunk(2, -1)
            return t * cos + torch.cat([-h2, h1], -1) * sin

        B, S = x.shape
        h = F.embedding(x, self.w("model.embed_tokens.weight"))
        for l in range(LAYERS):
            p = f"model.layers.{l}."
            n = F.rms_norm(h, (HIDDEN,), self.w(p + "input_layernorm.weight"), EPS)
            q, k, v = (F.linear(n, self.w(p + f"self_attn.{c}_proj.weight")).view(B, S, -1, HEAD_DIM).transpose(1, 2) for c in "qkv")
            q, k = rope(q), rope(k)
            rep = HEADS // KV_HEADS
            k, v = k.repeat_interleave(rep, 1), v.repeat_interleave(rep, 1)
            o = F.scaled_dot_product_attention(q, k, v, is_causal=True)
            h = h + F.linear(o.transpose(1, 2).reshape(B, S, -1), self.w(p + "self_attn.o_proj.weight"))
            n = F.rms_norm(h, (HIDDEN,), self.w(p + "post_attention_layernorm.weight"), EPS)
            m = F.silu(F.linear(n, self.w(p + "mlp.gate_proj.weight"))) * F.linear(n, self.w(p + "mlp.up_proj.weight"))
            h = h + F.linear(m, self.w(p + "mlp.down_proj.weight"))
        return F.rms_norm(h, (HIDDEN,), self.w("model.norm.weight"), EPS)

    def loss(self, x, y, pos):
        h = self(x, pos).reshape(-1, HIDDEN)
        y = y.reshape(-1)
        keep = y != IGNORE
        return F.cross_entropy(F.linear(h[keep], self.w("model.embed_tokens.weight")), y[keep])


class Muon:
    """Orthogonalised momentum for the matrices, as published by K. Jordan and others (2024)."""

    def __init__(self, params, momentum=0.95, decay=0.01):
        self.p, self.m, self.mu, self.decay = params, [torch.zeros_like(p) for p in params], momentum, decay

    @torch.no_grad()
    def step(self, lr):
        for p, m in zip(self.p, self.m):
            m.lerp_(p.grad, 1 - self.mu)
            u = p.grad.lerp(m, self.mu)
            tall = u.shape[0] > u.shape[1]
            u = u.T if tall else u
            u = u / (u.norm() + 1e-7)
            for _ in range(5):
                a = u @ u.T
                u = 3.4445 * u + (-4.7750 * a + 2.0315 * a @ a) @ u
            u = u.T if tall else u
            p.mul_(1 - lr * self.decay).add_(u, alpha=-lr * max(1, p.shape[0] / p.shape[1]) ** 0.5)
            p.grad = None


def positions(rng, count, length, stretch):
    """0.. for each row; or, to meet far distances cheaply, with a few jumps so that the last lies below MAX_POS."""
    pos = torch.arange(length)[None].repeat(count, 1)
    if stretch:
        for r in range(count):
            for _ in range(rng.choice([0, 1, 2])):
                at = rng.randrange(1, length)
                room = MAX_POS - 1 - int(pos[r, -1])
                if room > 0:
                    pos[r, at:] += rng.randrange(room)
    return pos


# ---------------------------------------------------------------- output

def save(model, out):
    names = [n.replace("/", ".") for n in model.g]
    data, hdr, off = [], {"__metadata__": {"format": "pt"}}, 0
    for n in sorted(names):
        t = model.w(n).detach().to(torch.bfloat16)
        raw = t.view(torch.int16).numpy().tobytes()
        hdr[n] = {"dtype": "BF16", "shape": list(t.shape), "data_offsets": [off, off + len(raw)]}
        off += len(raw)
        data.append(raw)
    h = json.dumps(hdr, separators=(",", ":")).encode()
    h += b" " * (-len(h) % 8)
    with open(f"{out}/model.safetensors", "wb") as f:
        f.write(struct.pack("<Q", len(h)) + h + b"".join(data))


def write_configs(out):
    def dump(name, obj):
        with open(f"{out}/{name}", "w") as f:
            json.dump(obj, f, indent=2)
            f.write("\n")
    dump("config.json", {
        "architectures": ["LlamaForCausalLM"], "model_type": "llama", "vocab_size": VOCAB, "hidden_size": HIDDEN,
        "intermediate_size": INTER, "num_hidden_layers": LAYERS, "num_attention_heads": HEADS, "num_key_value_heads": KV_HEADS,
        "head_dim": HEAD_DIM, "hidden_act": "silu", "rms_norm_eps": EPS, "rope_theta": THETA, "rope_scaling": None,
        "max_position_embeddings": MAX_POS, "tie_word_embeddings": True, "attention_bias": False, "attention_dropout": 0.0,
        "mlp_bias": False, "initializer_range": 0.02, "bos_token_id": EOT, "eos_token_id": IM_END, "pad_token_id": EOT,
        "torch_dtype": "bfloat16", "use_cache": True})
    dump("generation_config.json", {"bos_token_id": EOT, "eos_token_id": [IM_END, EOT], "pad_token_id": EOT})
    dump("tokenizer_config.json", {
        "tokenizer_class": "PreTrainedTokenizerFast", "bos_token": SPECIAL[EOT], "eos_token": SPECIAL[IM_END], "pad_token": SPECIAL[EOT],
        "unk_token": None, "add_bos_token": False, "clean_up_tokenization_spaces": False, "model_max_length": MAX_POS,
        "added_tokens_decoder": {str(i): {"content": t, "lstrip": False, "normalized": False, "rstrip": False, "single_word": False, "special": True}
                                 for i, t in enumerate(SPECIAL)},
        "chat_template": CHAT_TEMPLATE})


def train_tokenizer(texts, out):
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
    tok = Tokenizer(models.BPE())
    tok.pre_tokenizer = pre_tokenizers.Sequence([pre_tokenizers.Digits(individual_digits=True),
                                                 pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)])
    tok.decoder = decoders.ByteLevel()
    # The prompts are in the training text once, so that "assistant" and the like are short.
    tok.train_from_iterator(texts + ["\n".join(ROLES + ("user\n", "assistant\n", "system\n"))] * 2000, trainers.BpeTrainer(
        vocab_size=VOCAB, special_tokens=SPECIAL, initial_alphabet=pre_tokenizers.ByteLevel.alphabet(), show_progress=False))
    tok.save(f"{out}/tokenizer.json", pretty=False)
    return tok


def main():
    ap = argparse.ArgumentParser()
    ap.add_argument("deb")
    ap.add_argument("out")
    ap.add_argument("--tokens", type=float, default=4e6, help="tokens to train on")
    ap.add_argument("--seed", type=int, default=1)
    ap.add_argument("--threads", type=int, default=2)
    ap.add_argument("--lr", type=float, default=0.02)
    a = ap.parse_args()
    torch.set_num_threads(a.threads)
    torch.manual_seed(a.seed)
    rng = random.Random(a.seed)
    os.makedirs(a.out, exist_ok=True)
    t0 = time.time()

    books = novels(a.deb)
    texts = ["\n\n".join(p for p in paragraphs(b) if p) for b in books]
    tok = train_tokenizer(texts, a.out)
    assert [tok.token_to_id(s) for s in SPECIAL] == [EOT, IM_START, IM_END] and tok.get_vocab_size() == VOCAB
    write_configs(a.out)
    docs = Docs(books, tok, rng)
    n = sum(len(s[0]) for b in docs.books for s in b if s)
    print(f"{sum(map(len, texts))} characters, {n} tokens, {len(docs.names)} names, {time.time() - t0:.0f} s", flush=True)

    model = Model()
    mats = [p for k, p in model.g.items() if p.ndim == 2 and "embed" not in k]
    rest = [p for k, p in model.g.items() if p.ndim == 1 or "embed" in k]
    print(f"{sum(p.numel() for p in model.parameters())} parameters", flush=True)
    muon = Muon(mats)
    adam = torch.optim.AdamW(rest, lr=1.0, betas=(0.9, 0.95), weight_decay=0.0)

    # Nearly all rows are short; every so often one long row, so that full attention over thousands of keys is met too.
    held = docs.rows(32, 256, 400)
    done, step, seen, warm = 0, 0, [], 40
    t1 = time.time()
    while True:
        frac = done / a.tokens
        if frac >= 1:
            break
        lr = min(1, (step + 1) / warm) * (1 - frac if frac > 0.3 else 1) / (1 if frac <= 0.3 else 0.7)
        lr = max(lr, 0.02)
        if frac > 0.5 and step % 20 == 0:
            count, length, longest = rng.choice([(2, 2048, 1500), (1, 4096, 3000), (1, 8192, 6000)] if step % 40 == 0 else [(2, 2048, 1500), (4, 1024, 900)])
        else:
            count, length, longest = 8, 256, 300
        x, y = docs.rows(count, length, longest)
        pos = positions(rng, count, length, stretch=frac > 0.3 and step % 3 == 1)
        loss = model.loss(x, y, pos)
        loss.backward()
        muon.step(a.lr * lr)
        for g in adam.param_groups:
            g["lr"] = 0.006 * lr
        adam.step()
        adam.zero_grad(set_to_none=True)
        done += count * length
        step += 1
        if length == 256:
            seen.append(loss.item())
        if step % 100 == 0:
            print(f"step {step} tokens {done} loss {np.mean(seen[-100:]):.4f} lr {lr:.3f} {done / (time.time() - t1):.0f} tok/s {time.time() - t1:.0f} s", flush=True)
        if step % 200 == 0:
            save(model, a.out)
    with torch.no_grad():
        for p in model.parameters():
            p.copy_(p.to(torch.bfloat16).float())
        check = model.loss(*held, positions(rng, 32, 256, False)).item()
    save(model, a.out)
    print(f"final: loss {np.mean(seen[-100:]):.4f} (mean of the last 100 steps), {check:.4f} on 8,192 fixed tokens with bf16 weights; "
          f"{step} steps, {done} tokens, {time.time() - t0:.0f} s in all, torch {torch.__version__}", flush=True)


if __name__ == "__main__":
    main()
