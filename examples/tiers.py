"""Quality tiers: a draft at few loops now, refined to more loops when somebody wants it.

Needs `tinyloop up --profile tiers`. The draft leaves the prompt's states behind in a handle; each refinement
starts from there, and computes only the loops that the draft left out.
"""

from tinyloop_serve.deploy.endpoints import default_endpoint
from tinyloop_serve.protocol.client import Client

with Client(default_endpoint()) as client:
    with client.draft("The definition of river (noun) is:", loops=4, max_tokens=24) as draft:
        print(f" 4 loops: {draft.completion.text.strip()}")
        for loops in (8, 16):
            better = draft.refine(loops=loops)
            print(f"{loops:2} loops: {better.text.strip()}")
            print(f"-- {better.stats.loops_skipped} loops of the prompt were not computed again")
