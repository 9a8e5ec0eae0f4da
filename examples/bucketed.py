"""Most throughput: prompts of one shape, all asked at once; the dispatcher decodes them in batches.

Needs `tinyloop up --profile bucketed`. Requests share a batch, whoever asks them, when their loops, cache
mode and sampling are equal and their max_tokens lie in one band.
"""

from collections import Counter

from tinyloop_serve.deploy.endpoints import default_endpoint
from tinyloop_serve.protocol.client import Client

WORDS = ("river", "gentle", "walk", "stone", "bright", "carry", "house", "slow", "tree", "sing", "bread")

with Client(default_endpoint()) as client:
    prompts = [f"The definition of {word} is:" for word in WORDS]
    answers = client.batch(prompts, loops=4, max_tokens=32)
    for word, answer in zip(WORDS, answers, strict=True):
        print(f"{word:8}{answer.text.strip()[:60]}")
    sizes = Counter(answer.stats.batch_size for answer in answers)
    shown = ", ".join(f"{n} in {size}" for size, n in sorted(sizes.items()))
    print(f"-- requests by size of their batch: {shown}")
