"""The OpenAI Python client against a running router: it streams, and raises its own exceptions for our errors."""
import sys

import openai

client = openai.OpenAI(base_url=sys.argv[1] + "/v1", api_key="unused", max_retries=0, timeout=60)
hello = [{"role": "user", "content": "Hello!"}]
assert [model.id for model in client.models.list()] == ["builtin"]

chunks = list(client.chat.completions.create(model="builtin", messages=hello, stream=True, temperature=0, max_tokens=40,
                                             stream_options={"include_usage": True}))
streamed = "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices)
whole = client.chat.completions.create(model="builtin", messages=hello, temperature=0, max_tokens=40)
assert streamed == whole.choices[0].message.content and len(streamed) > 20, streamed
assert chunks[-1].usage.completion_tokens == whole.usage.completion_tokens
assert client.completions.create(model="builtin", prompt="It is", max_tokens=5).choices[0].text

for expected, arguments in [
    (openai.NotFoundError, {"model": "other"}),
    (openai.BadRequestError, {"temperature": 9}),
    (openai.BadRequestError, {"messages": [{"role": "user", "content": "word " * 20_000}]}),
]:
    try:
        client.chat.completions.create(**({"model": "builtin", "messages": hello} | arguments))
    except expected as error:
        print(f"openai client: {type(error).__name__}: {error.body['message'][:100]}")
    else:
        sys.exit(f"no {expected.__name__} for {list(arguments)}")
print("openai client: good")
