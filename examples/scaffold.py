"""A shared beginning: it is computed once, and every request that begins with it starts behind it.

Needs `tinyloop up --profile scaffold`. The requests do not name the scaffold: the longest that fits is found.
One that begins otherwise is served all the same. `[replica] scaffold = [...]` holds scaffolds from the start.
"""

from tinyloop_serve.deploy.endpoints import default_endpoint
from tinyloop_serve.protocol.client import Client

SHARED = (
    "A small dictionary. Each entry has a word and its meaning, in a few plain words.\n"
    "brook: a small stream of water.\nswift: moving very fast.\nbake: to cook in an oven.\n"
)

with Client(default_endpoint()) as client:
    with client.create_scaffold(SHARED, loops=8, shared=True) as scaffold:
        print(f"the scaffold holds {scaffold.info.tokens} tokens, {scaffold.info.bytes >> 10} KiB")
        for prompt in (SHARED + "river:", SHARED + "gentle:", "In the beginning"):
            answer = client.generate(prompt, loops=8, max_tokens=24)
            stats = answer.stats
            print(f"{prompt.splitlines()[-1]} {answer.text.strip()[:50]}")
            print(f"-- {stats.prefix_tokens} of {stats.prompt_tokens} prompt tokens came from the scaffold")
