"""Drafts that are refined from a resume handle against asking twice: by refinements per draft.

Sums of calls that are measured one by one: the handle at 4 loops, the draft and each refinement to 16 from
it; or the same answers from the prompt alone.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from crossings.rounds import interleaved, seconds_of
from crossings.section import Section, where
from tinyloop_serve.native import GenerateConfig, Model

DRAFT, REFINED = 4, 16
UPGRADES = (0, 1, 2, 4, 8)
PROMPTS = (64, 256, 448)
NEW = 32


def measure(path: Path, threads: int, rounds: int) -> Section:
    head = ("prompt", "a refinement saves", *(f"{count} refined" for count in UPGRADES))
    section = Section("tiers", head, [])
    with Model(path, threads=threads) as model:
        for length in PROMPTS:
            times = interleaved(f"tiers, {length} tokens", _cases(model, length), rounds)
            gains = [
                times.ratio(
                    ("cold draft", *["cold refined"] * count), ("handle", "draft", *["refined"] * count)
                )
                for count in UPGRADES
            ]
            saved = 1 - times.ratio("refined", "cold refined")
            cells = (f"{gain:.2f}x" for gain in gains)
            section.rows.append((f"{length} tokens", f"{saved:.0%}", *cells))
            points = [(float(count), gain) for count, gain in zip(UPGRADES, gains, strict=True)]
            section.data[str(length)] = {"saved": saved, **dict(points)}
            place = where(points, " refinements per draft")
            section.crossings.append(f"{length} prompt tokens: the handle pays {place}")
    return section


def _cases(model: Model, length: int) -> dict[str, Callable[[], float]]:
    prompt = [3 + 7 * i * i % 4000 for i in range(length)]
    handle = model.create_resume_handle(prompt, DRAFT)

    def config(loops: int) -> GenerateConfig:
        return GenerateConfig(loops=loops, max_tokens=NEW, ignore_eos=True)

    return {
        "cold draft": seconds_of(lambda: model.generate(prompt, config(DRAFT))),
        "cold refined": seconds_of(lambda: model.generate(prompt, config(REFINED))),
        "handle": seconds_of(lambda: model.create_resume_handle(prompt, DRAFT).close()),
        "draft": seconds_of(lambda: model.resume_generate(handle, DRAFT, config(DRAFT))),
        "refined": seconds_of(lambda: model.resume_generate(handle, REFINED, config(REFINED))),
    }
