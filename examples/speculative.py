"""Faster decoding, the same tokens: few loops draft, the others verify several tokens at once.

Needs `tinyloop up --profile speculative`. Where the replica's own measurement says that it does not pay, or
is not done yet, the request is decoded plainly, and its stats say why.
"""

from tinyloop_serve.deploy.endpoints import default_endpoint
from tinyloop_serve.protocol.client import Client

PROMPT = "In the beginning God created"

with Client(default_endpoint()) as client:
    plain = client.generate(PROMPT, loops=8, max_tokens=64)
    asked = client.generate(PROMPT, loops=8, max_tokens=64, method="speculative")
    print(asked.text.strip())
    assert asked.tokens == plain.tokens
    stats = asked.stats
    if stats.method == "speculative":
        print(f"-- speculative: {stats.accepted} of {stats.drafted} drafted tokens were accepted")
    else:
        print(f"-- plain: {stats.method_reason}")
    print(f"-- {stats.decode_ms:.0f} ms of decoding, plain {plain.stats.decode_ms:.0f} ms; the same tokens")
