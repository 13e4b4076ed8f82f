"""Follows a worker's cache events with libzmq, as a router that speaks to vLLM does, and checks them.

    python zmq_subscriber.py HTTP PUBLISH REPLAY      e.g. http://127.0.0.1:8001 tcp://127.0.0.1:5557 tcp://127.0.0.1:5558

Needs pyzmq and msgpack, and a worker started with --kv-events-endpoint, --kv-events-replay-endpoint and --kv-events-topic kv.
Prints what it found; any difference is an AssertionError.
"""

import json
import sys
import urllib.request

import msgpack
import zmq

LIMIT_MS = 60_000  # no wait is longer
TOPIC = b"kv"


def post(url, body):
    request = urllib.request.Request(url, json.dumps(body).encode(), {"content-type": "application/json"})
    with urllib.request.urlopen(request, timeout=60) as answer:
        return json.load(answer)


def receive(socket):
    """The frames of one message, in time."""
    assert socket.poll(LIMIT_MS), "nothing came"
    return socket.recv_multipart()


def batch(frames):
    topic, number, payload = frames
    assert topic == TOPIC, topic
    _, events, rank = msgpack.unpackb(payload)
    assert rank is None
    return int.from_bytes(number, "big"), events


def followed(subscriber, kind):
    """Batches up to and including the first with an event of this kind."""
    batches = []
    while not any(event["type"] == kind for _, events in batches for event in events):
        batches.append(batch(receive(subscriber)))
    return batches


def replayed(context, endpoint, first):
    """All batches from number `first` on, as the replay socket gives them out again."""
    socket = context.socket(zmq.DEALER)  # REQ would take one answer only
    socket.connect(endpoint)
    socket.send_multipart([b"", first.to_bytes(8, "big")])
    batches = []
    while True:
        frames = receive(socket)
        if int.from_bytes(frames[-2], "big", signed=True) == -1:  # the end
            return batches
        batches.append((int.from_bytes(frames[-2], "big"), msgpack.unpackb(frames[-1])[1]))


def main(http, publish, replay):
    context = zmq.Context()
    subscriber = context.socket(zmq.SUB)
    subscriber.setsockopt(zmq.SUBSCRIBE, TOPIC)
    monitor = subscriber.get_monitor_socket(zmq.EVENT_HANDSHAKE_SUCCEEDED)
    subscriber.connect(publish)
    assert monitor.poll(LIMIT_MS), "no handshake"
    prompt = list(range(300, 400))
    # The subscription may come after the first events: what is missed is asked for again below.
    seen = []
    while not seen:
        post(f"{http}/flush_cache", {})
        post(f"{http}/v1/completions", {"prompt": prompt, "max_tokens": 1})
        if subscriber.poll(1_000):
            seen = followed(subscriber, "BlockStored")
    post(f"{http}/flush_cache", {})
    seen += followed(subscriber, "AllBlocksCleared")
    numbers = [number for number, _ in seen]
    assert numbers == list(range(numbers[0], numbers[0] + len(numbers))), numbers
    stored = [event for _, events in seen for event in events if event["type"] == "BlockStored"]
    size = stored[0]["block_size"]
    whole = len(prompt) // size
    assert stored[0]["parent_block_hash"] is None and stored[0]["token_ids"] == prompt[: whole * size]
    assert len(stored[0]["block_hashes"]) == whole
    again = [entry for entry in replayed(context, replay, 0) if entry[0] in numbers]
    assert again == seen, "the replay says the same"
    print(f"libzmq {zmq.zmq_version()}, pyzmq {zmq.__version__}: {len(seen)} batches followed, numbers {numbers[0]} to "
          f"{numbers[-1]}, {whole} blocks of {size} stored and cleared; {len(again)} batches replayed alike")


if __name__ == "__main__":
    main(*sys.argv[1:])
