"""Turns a checkpoint into what the package ships: `demo.tinyloop` and its model card, README.md.

The card is the same in both: as JSON in the artifact's metadata, as Markdown beside it.
"""

import dataclasses
from pathlib import Path
from typing import Any

import numpy as np
import torch
from demo_model import evaluate
from demo_model.data import EOT
from demo_model.model import LoopConfig, LoopedLM
from tokenizers import Tokenizer

from tinyloop_serve.native import artifact

WORDNET_NOTICE = """\
This software and database is being provided to you, the LICENSEE, by Princeton University under the
following license. By obtaining, using and/or copying this software and database, you agree that you
have read, understood, and will comply with these terms and conditions.:

Permission to use, copy, modify and distribute this software and database and its documentation for
any purpose and without fee or royalty is hereby granted, provided that you agree to comply with the
following copyright notice and statements, including the disclaimer, and that the same appear on ALL
copies of the software, database and documentation, including modifications that you make for
internal use or for distribution.

WordNet 3.0 Copyright 2006 by Princeton University. All rights reserved.

THIS SOFTWARE AND DATABASE IS PROVIDED "AS IS" AND PRINCETON UNIVERSITY MAKES NO REPRESENTATIONS OR
WARRANTIES, EXPRESS OR IMPLIED. BY WAY OF EXAMPLE, BUT NOT LIMITATION, PRINCETON UNIVERSITY MAKES NO
REPRESENTATIONS OR WARRANTIES OF MERCHANTABILITY OR FITNESS FOR ANY PARTICULAR PURPOSE OR THAT THE
USE OF THE LICENSED SOFTWARE, DATABASE OR DOCUMENTATION WILL NOT INFRINGE ANY THIRD PARTY PATENTS,
COPYRIGHTS, TRADEMARKS OR OTHER RIGHTS.

The name of Princeton University or Princeton may not be used in advertising or publicity pertaining
to distribution of the software and/or database. Title to copyright in this software, database and
any associated documentation shall at all times remain with Princeton University and LICENSEE agrees
to preserve same."""

KJV_NOTICE = """\
The copyright of the King James text (1611) has expired. The electronic text is from the Bible
Retrieval System, Chip Chapin, Hewlett Packard Company; initial release September 5, 1989; last
updated April 26, 1993:
"This file is provided for unrestricted use provided that this legend is included on all tape media
and as a part of the software program in whole or part. Users may copy, modify or distribute this file
at will. -- Chip Chapin, September 4, 1989\""""

LIMITS = (
    "A demonstration of serving, not of knowledge. It writes readable English in two styles, dictionary"
    " entries and King James verses; its definitions are usually wrong.",
    "English only. Trained on windows of 256 and 512 tokens, so text beyond 512 tokens is outside what it has"
    " seen; 576 are accepted.",
    "Greedy text repeats itself; temperature 0.7 to 0.9 with min_p 0.05 reads better.",
    "Trained for 1 to 8 loops. Up to 16 are allowed and keep the state bounded, but are no better.",
)


def load(path: Path) -> tuple[LoopedLM, dict[str, Any]]:
    """The model of a checkpoint, rounded to fp16 as it ships, and the checkpoint's other entries."""
    state = torch.load(path, map_location="cpu")
    model = LoopedLM(LoopConfig(**state["config"]))
    model.load_state_dict(state["model"])
    evaluate.round_to_half(model)
    return model.eval(), state


def make_card(
    model: LoopedLM, tokenizer: Tokenizer, windows: np.ndarray, run: dict[str, Any]
) -> dict[str, Any]:
    """Everything the card says, as JSON-able values; `run` describes the training."""
    return {
        "name": "TinyLoop demo",
        "parameters": sum(p.numel() for p in model.parameters()),
        "architecture": dataclasses.asdict(model.config),
        "data": [
            {
                "name": "WordNet 3.0 glosses, examples and synonyms (Debian package wordnet-base)",
                "licence": "WordNet 3.0 licence (permissive)",
                "notice": WORDNET_NOTICE,
            },
            {
                "name": "The King James Bible (Debian package bible-kjv-text)",
                "licence": "public domain text; free use with the legend below",
                "notice": KJV_NOTICE,
            },
        ],
        "training": run,
        "evaluation": dataclasses.asdict(evaluate.measure(model, windows)),
        "samples": evaluate.samples(model, tokenizer),
        "limits": list(LIMITS),
    }


def markdown(card: dict[str, Any]) -> str:
    """The card as README.md."""
    run, measured, shape = card["training"], card["evaluation"], card["architecture"]
    rows = "\n".join(
        f"| {loops} | {loss:.4f} | {np.exp(loss):.2f} | "
        + (f"{100 * measured['agreement'][f'{loops} vs 8']:.1f} % |" if loops != 8 else "(itself) |")
        for loops, loss in measured["losses"].items()
    )
    texts = "\n".join(
        f"- {s['loops']} loops, temperature {s['temperature']:g}: {' / '.join(s['text'].splitlines())}"
        for s in card["samples"]
    )
    notices = "\n\n".join(f"**{d['name']}**: {d['licence']}.\n\n{quote(d['notice'])}" for d in card["data"])
    return f"""# The demo model, `demo.tinyloop`

A looped language model small enough to ship with the package: {card["parameters"]:,} parameters in fp16.

- tokenizer: byte-level BPE, {shape["vocab_size"]} tokens; `<|endoftext|>` begins and ends every document
- layers: {shape["n_prelude"]} prelude, {shape["n_core"]} core (run `loops` times), {shape["n_coda"]} coda
- width {shape["d_model"]}, {shape["n_heads"]} heads of {shape["head_dim"]}, SwiGLU {shape["d_ffn"]}
- sandwich norms, concat injection from a zero state, a norm after every loop, tied head
- context {shape["max_seq_len"]} tokens; {shape["loops"]} loops by default, up to {shape["max_loops"]}

This file and the artifact's `card` metadata are written by `scripts/train_demo.py export`.

## Quality

Over {measured["tokens"]:,} tokens of held-out documents in windows of 256; fp16 weights, fp32 arithmetic.
Agreement: how often the most likely next token is the one that 8 loops choose.

| loops | loss (nats/token) | perplexity | agreement with 8 loops |
|---|---|---|---|
{rows}

beta, the gain of the core map: **{measured["beta"]:.3f}** (median over tokens and loops of
|h(t+1)-h(t)| / |h(t)-h(t-1)|; by loop: {", ".join(f"{b:.2f}" for b in measured["beta_by_loop"])}).
At most 1 means that the state settles.

## Samples

Up to 40 tokens after the prompt; temperature 0 is greedy; "/" is a line break.

{texts}

## Limits

{chr(10).join(f"- {limit}" for limit in card["limits"])}

## Training

```
{run["commands"]}
```

{run["steps"]:,} steps on {run["tokens"]:,} tokens (the training documents have {run["training_tokens"]:,}),
in {run["minutes"]:.0f} minutes on {run["hardware"]}. Such a time-budgeted run depends on the
machine's speed; one with `--steps N --minutes inf` is determined by its seed. The recipe is in
`scripts/train_demo.py`: random loop counts, truncated back-propagation, losses at two depths,
self-distillation, Muon.

{run["note"]}

## Data and licences

{notices}
"""


def quote(text: str) -> str:
    return "\n".join(f"> {line}".rstrip() for line in text.splitlines())


def export(folder: Path, model: LoopedLM, tokenizer: Tokenizer, card: dict[str, Any]) -> None:
    """Write `demo.tinyloop` and README.md into `folder`."""
    folder.mkdir(parents=True, exist_ok=True)
    tensors = {name: tensor.half().numpy() for name, tensor in model.state_dict().items()}
    config = model.config.artifact_config(tokenizer.token_to_id(EOT), round(card["evaluation"]["beta"], 4))
    artifact.write(folder / "demo.tinyloop", config, tensors, tokenizer=tokenizer.to_str(), card=card)
    (folder / "README.md").write_text(markdown(card), encoding="utf-8")
