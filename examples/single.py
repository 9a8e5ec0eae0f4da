"""Lowest latency: one stream, read as it comes and cancelled when there is enough of it.

Needs `tinyloop up --profile single`.
"""

from tinyloop_serve.deploy.endpoints import default_endpoint
from tinyloop_serve.protocol.client import Client

with Client(default_endpoint()) as client:
    text = ""
    with client.stream("And it came to pass in those days, that", max_tokens=400, ignore_eos=True) as stream:
        for chunk in stream:
            text += chunk.text
            print(chunk.text, end="", flush=True)
            if len(text.split()) >= 30:
                stream.cancel()
        stats = stream.result().stats
    first_ms = stats.queue_ms + stats.first_token_ms
    print(f"\n-- {stats.generated_tokens} tokens, the first after {first_ms:.0f} ms")
