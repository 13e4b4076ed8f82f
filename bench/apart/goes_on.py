#!/usr/bin/env python3
"""A stream of a real engine that is killed in the middle of it: whether another one goes on with it.

    bench/apart/engines.sh events DIR
    router --port 30710 --workers 127.0.0.1:18201,127.0.0.1:18202 &
    bench/apart/goes_on.py http://127.0.0.1:30710 DIR chat|completions engine|core|hangs

After a hundred pieces of the answer the engine that writes it gets SIGKILL: all of it, or its core alone, which its server then says in the stream. With
`hangs` the core gets SIGSTOP, and its server goes on to answer probes; such an engine ends with `kill -9` of its group.
Prints what the client saw. Start the engines anew before the next one. Needs nothing but Python.

With `engines.sh thoughts DIR`, and workers 18501 and 18502, `thought` in place of `chat`: the engine is killed within a thought, which is said to end
where a model of random weights comes to it, so that the answer follows (BIAS is how much it wants to); and `tools`, the same with a tool that might be
called, which goes on behind the thought alone.

SGLang's engines (`sglang.sh start DIR`, `sglang.sh thoughts DIR`; 18801 and 18802) are taken for either where they are in that folder.

`messages`, `messages-thought` and `messages-tools`, with the engines of `thoughts`: the same in Anthropic's words, within the answer, within a thought (which goes on for as
long as the answer may be), and within an answer in which tools might be called. `responses` and `responses-tools`: the same as one of OpenAI's responses.

With `engines.sh renders DIR`, and workers 18701 and 18702, `renders` in place of `chat`: engines that write a turn's end behind a message that has only begun, whatever they
are told. KILL_AFTER=0 kills nobody, and shows how many tokens the prompt has where nothing went wrong.
"""

import json
import os
import signal
import subprocess
import sys
import time
import urllib.request

KILL_AFTER = int(os.environ.get("KILL_AFTER", "100"))
TOKENS = 300
PARTS = ("text", "content", "reasoning", "reasoning_content", "tool_calls", "thinking", "partial_json")
END_OF_THOUGHT = 151668


def request(kind):
    text = "Tell me about the sky and the sea. " * 20
    if kind.startswith("messages"):
        body = {"model": "tiny", "max_tokens": TOKENS, "temperature": 0, "stream": True, "system": [{"type": "text", "text": "Be brief."}]}
        body |= {"messages": [{"role": "user", "content": [{"type": "text", "text": text}]}]}
        body |= {"thinking": {"type": "adaptive" if kind == "messages-thought" else "disabled"}}
        if kind == "messages-tools":
            body |= {"tools": [{"name": "look", "description": "Looks.", "input_schema": {"type": "object", "properties": {}}}]}
        return "/v1/messages", body
    if kind.startswith("responses"):
        body = {"model": "tiny", "max_output_tokens": TOKENS, "temperature": 0, "stream": True, "instructions": "Be brief.", "input": text, "reasoning": {"effort": "none"}}
        if kind == "responses-tools":
            body |= {"tools": [{"type": "function", "name": "look", "description": "Looks.", "parameters": {"type": "object", "properties": {}}}]}
        return "/v1/responses", body
    body = {"model": "tiny", "max_tokens": TOKENS, "temperature": 0, "ignore_eos": True, "stream": True, "stream_options": {"include_usage": True}}
    if kind != "completions":
        body |= {"messages": [{"role": "user", "content": text}]}
        if kind in ("thought", "tools"):
            body |= {"logit_bias": {str(END_OF_THOUGHT): float(os.environ.get("BIAS", "0"))}}
        if kind == "tools":
            body |= {"tools": [{"type": "function", "function": {"name": "look", "parameters": {"type": "object", "properties": {}}}}]}
        return "/v1/chat/completions", body
    return "/v1/completions", {**body, "prompt": text}


def told_by(event):
    """Pieces of the answer in an event, by their names."""
    if event.get("type") == "content_block_delta":
        return [{name: text for name, text in event["delta"].items() if name in ("text", "thinking", "partial_json")}]
    if event.get("type", "").endswith("_text.delta"):
        return [{"thinking" if "reasoning" in event["type"] else "text": event["delta"]}]
    return [{"text": choice.get("text"), **choice.get("delta", {})} for choice in event.get("choices", [])]


def kill(folder, name, what):
    group = int(open(f"{folder}/{name}.pid").read())
    if what == "engine":
        os.killpg(group, signal.SIGKILL)
        return
    for pid in subprocess.run(["pgrep", "-g", str(group), "-f", "EngineCore|sglang::scheduler"], capture_output=True, text=True).stdout.split():
        os.kill(int(pid), signal.SIGSTOP if what == "hangs" else signal.SIGKILL)


def main():
    url, folder, kind, what = sys.argv[1:]
    path, body = request(kind)
    ids, pieces, longest, last, said, parts = set(), 0, 0.0, time.monotonic(), {}, {}
    of_kind = {"thought": "thinks-", "tools": "thinks-", "renders": "renders-"}.get(kind, "thinks-" if kind.startswith(("messages", "responses")) else "")
    of_kind = of_kind if os.path.exists(f"{folder}/{of_kind}one.pid") else ""
    names = (of_kind + "one", of_kind + "two")
    call = urllib.request.Request(url + path, json.dumps(body).encode(), {"content-type": "application/json"})
    with urllib.request.urlopen(call, timeout=120) as reply:
        worker = reply.headers["x-router-worker"]
        for line in reply:
            data = line.strip().removeprefix(b"data: ")
            if not data or data == b"[DONE]":
                said |= {"done": True} if data else {}
                continue
            if data.startswith(b"event: "):
                continue
            event = json.loads(data)
            said |= {"done": True} if event.get("type") == "message_stop" else {}
            if event.get("type") == "response.completed":
                whole = event["response"]
                said |= {"done": True, "finish": whole["status"], "usage": whole["usage"], "items": [item["type"] for item in whole["output"]]}
            said |= {"finish": event["delta"]["stop_reason"]} if event.get("type") == "message_delta" else {}
            said |= {key: event[key] for key in ("error", "usage") if event.get(key)}
            ids |= {event.get("id", event.get("message", event.get("response", {})).get("id"))} - {None}
            for choice in event.get("choices", []):
                said |= {"finish": choice["finish_reason"]} if choice.get("finish_reason") else {}
            for told in told_by(event):
                for part in [part for part in PARTS if told.get(part)]:
                    parts[part] = parts.get(part, 0) + 1
                    pieces += 1
                    longest, last = max(longest, time.monotonic() - last), time.monotonic()
                    if pieces == KILL_AFTER:
                        kill(folder, names[int(worker[1:])], what)
    print(f"{kind}, {what} of {worker} killed: {pieces} pieces ({parts}) under {len(ids)} id(s), longest pause {longest * 1e3:.0f} ms, {said}")


if __name__ == "__main__":
    main()
