#!/usr/bin/env python3
"""What the clients of Anthropic and OpenAI put together of a stream whose engine is killed in the middle.

    bench/apart/engines.sh thoughts DIR                                   # or bench/apart/sglang.sh thoughts DIR, for messages
    router --port 30710 --workers 127.0.0.1:18501,127.0.0.1:18502 &       # 18801 and 18802
    bench/apart/clients.py http://127.0.0.1:30710 DIR messages|responses [SECONDS]

Prints what came. The engine is killed so many seconds after its answer began: OpenAI's client reads slower than engines write. Start the engines anew before the next one. Needs the packages anthropic and openai.
"""

import os
import signal
import sys
import threading

TEXT = "And the sea? " * 20
TOKENS = 1500


def messages(url):
    import anthropic

    client = anthropic.Anthropic(base_url=url, api_key="none", max_retries=0)
    call = {"type": "tool_use", "id": "t1", "name": "look", "input": {"at": "sky"}}
    result = {"type": "tool_result", "tool_use_id": "t1", "content": "blue"}
    schema = {"type": "object", "properties": {"at": {"type": "string"}}}
    with client.messages.stream(
        model="tiny",
        max_tokens=TOKENS,
        system="Be brief.",
        thinking={"type": "disabled"},
        tools=[{"name": "look", "description": "Looks.", "input_schema": schema}],
        messages=[
            {"role": "user", "content": "Look at the sky."},
            {"role": "assistant", "content": [{"type": "text", "text": "I look."}, call]},
            {"role": "user", "content": [result, {"type": "text", "text": TEXT}]},
        ],
        extra_body={"temperature": 0},
    ) as stream:
        yield stream.response.headers["x-router-worker"]
        yield from stream.text_stream
        whole = stream.get_final_message()
    print(f"{whole.stop_reason}, {len(whole.content)} block(s), {whole.usage.input_tokens} tokens in, {whole.usage.output_tokens} out")


def responses(url):
    import openai

    client = openai.OpenAI(base_url=url + "/v1", api_key="none", max_retries=0)
    asked = {"model": "tiny", "input": TEXT, "instructions": "Be brief.", "max_output_tokens": TOKENS, "temperature": 0, "reasoning": {"effort": "none"}}
    # With its first event the client builds what it reads events by, for seconds, in which nothing else of this process runs.
    with client.responses.stream(**asked | {"max_output_tokens": 1}) as stream:
        stream.until_done()
    with client.responses.stream(**asked) as stream:
        yield stream._response.headers["x-router-worker"]
        yield from (event.delta for event in stream if event.type == "response.output_text.delta")
        whole = stream.get_final_response()
    print(f"{whole.status}, {len(whole.output)} item(s), {whole.usage.input_tokens} tokens in, {whole.usage.output_tokens} out")


def main():
    url, folder, which, *seconds = sys.argv[1:]
    pieces = {"messages": messages, "responses": responses}[which](url)
    name = "one" if next(pieces) == "w0" else "two"
    name = f"thinks-{name}" if os.path.exists(f"{folder}/thinks-{name}.pid") else name
    for after in seconds:
        group = int(open(f"{folder}/{name}.pid").read())
        threading.Timer(float(after), os.killpg, (group, signal.SIGKILL)).start()
    print(f"{sum(1 for _ in pieces)} pieces of text")


if __name__ == "__main__":
    main()
