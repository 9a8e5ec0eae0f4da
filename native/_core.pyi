"""The compiled core. Shapes in parentheses, times in milliseconds. Every refusal is a class of
native/errors.py.
"""

import os
from collections.abc import Callable, Sequence
from typing import Any, Literal, Protocol

import numpy as np
import numpy.typing as npt

class GrammarState(Protocol):
    """One lane's state; see grammar.py."""

    def allowed(self, words: memoryview) -> None:
        """Sets bit id % 32 of little-endian u32 word id // 32 for every token that may come next."""
    def accept(self, token: int) -> None: ...
    def finished(self) -> bool: ...

class GrammarLike(Protocol):
    @property
    def vocab_size(self) -> int: ...
    def start(self) -> GrammarState: ...

class GenerateConfig:
    """How to generate. Values are checked when a call uses them, all before any work is done.

    loops: core iterations per token, 0 = the artifact's default. temperature: 0 = greedy. top_k: 0 = off.
    seed: 0 .. 2**64-1; the draw for a position depends on (seed, position) alone. stop_sequences: token
    sequences; generation ends after the first that the output ends in. speculative: `generate` and
    `generate_stream` speculate where the mode matrix allows it, with the same tokens. None of cache_mode,
    exit_threshold, speculative: TINYLOOP_CACHE_MODE, TINYLOOP_EARLY_EXIT, TINYLOOP_SPECULATIVE, else "fp16",
    0 (off), False; a bad value of one of these raises ConfigError.
    """

    def __init__(
        self,
        *,
        loops: int = 0,
        max_tokens: int = 128,
        temperature: float = 0.0,
        top_k: int = 0,
        top_p: float = 1.0,
        min_p: float = 0.0,
        repetition_penalty: float = 1.0,
        seed: int = 0,
        stop_sequences: Sequence[Sequence[int]] = (),
        grammar: GrammarLike | None = None,
        cache_mode: str | None = None,
        cache_window: int = 0,
        beam_size: int = 1,
        length_penalty: float = 1.0,
        exit_threshold: float | None = None,
        ignore_eos: bool = False,
        speculative: bool | None = None,
    ) -> None: ...
    @property
    def loops(self) -> int: ...
    @property
    def max_tokens(self) -> int: ...
    @property
    def temperature(self) -> float: ...
    @property
    def top_k(self) -> int: ...
    @property
    def top_p(self) -> float: ...
    @property
    def min_p(self) -> float: ...
    @property
    def repetition_penalty(self) -> float: ...
    @property
    def seed(self) -> int: ...
    @property
    def stop_sequences(self) -> list[list[int]]: ...
    @property
    def cache_mode(self) -> str: ...
    @property
    def cache_window(self) -> int: ...
    @property
    def beam_size(self) -> int: ...
    @property
    def length_penalty(self) -> float: ...
    @property
    def exit_threshold(self) -> float: ...
    @property
    def speculative(self) -> bool: ...
    @property
    def ignore_eos(self) -> bool: ...

class SpeculativeConfig:
    """Drafting with few loops, verified with many.

    verify_loops: 0 = the request's loops. draft_ahead: rows of each verification, 1 to 32: the last token and
    up to draft_ahead - 1 drafts. draft_margin: drafting stops where the draft's best logit leads the next by
    less. branches: of the draft tree at its first token (`generate_tree_speculative` only).
    """

    def __init__(
        self,
        *,
        draft_loops: int = 2,
        verify_loops: int = 0,
        draft_ahead: int = 4,
        draft_margin: float = 0.0,
        branches: int = 2,
    ) -> None: ...
    @property
    def draft_loops(self) -> int: ...
    @property
    def verify_loops(self) -> int: ...
    @property
    def draft_ahead(self) -> int: ...
    @property
    def draft_margin(self) -> float: ...
    @property
    def branches(self) -> int: ...

class PrefixCache:
    """The cache of a prompt's first tokens, made by Model.create_prefix_cache."""

    def close(self) -> None: ...
    @property
    def tokens(self) -> list[int]: ...
    @property
    def bytes(self) -> int: ...

class PrefixPool:
    """Prefixes of one model's prompts: the longest that matches wins, the least recently used is evicted."""

    def __init__(self, capacity: int) -> None:
        """capacity: how many prefixes it holds. Raises ConfigError below 1."""
    def register_prefix(
        self, model: Model, tokens: Sequence[int], n_loops: int = 0, cache_mode: str | None = None
    ) -> None:
        """Runs the tokens at n_loops (0 = default) and keeps their cache."""
    def close(self) -> None: ...
    def __len__(self) -> int: ...
    @property
    def bytes(self) -> int: ...

class ResumeHandle:
    """A prompt run at loops_used, with its states; made by Model.create_resume_handle, unchanged by use."""

    def close(self) -> None: ...
    @property
    def loops_used(self) -> int: ...
    @property
    def bytes(self) -> int: ...

class GenerateStats:
    """What one lane cost. first_token_ms counts from the start of the call, prefill_ms is the lane's own
    prefill.
    """

    @property
    def prefill_ms(self) -> float: ...
    @property
    def first_token_ms(self) -> float: ...
    @property
    def decode_ms(self) -> float: ...
    @property
    def stop_reason(self) -> Literal["eos", "stop_sequence", "max_tokens", "grammar", "cancelled"]: ...
    @property
    def prompt_tokens(self) -> int: ...
    @property
    def generated_tokens(self) -> int: ...
    @property
    def loops(self) -> int: ...
    @property
    def prefix_tokens(self) -> int: ...
    @property
    def loops_skipped(self) -> int: ...
    @property
    def drafted(self) -> int: ...
    @property
    def accepted(self) -> int: ...
    @property
    def mean_loops(self) -> float: ...
    @property
    def grammar_ms(self) -> float: ...
    @property
    def cache_bytes(self) -> int: ...
    def asdict(self) -> dict[str, Any]: ...

class Generation:
    """`tokens` has every sampled token, the EOS or the stop sequence's tokens included."""

    @property
    def tokens(self) -> list[int]: ...
    @property
    def stats(self) -> GenerateStats: ...
    @property
    def beams(self) -> list[tuple[list[int], float]]:
        """Beam search: (tokens, log-probability / length^length_penalty) per beam, best first; else empty."""

class Model:
    """A loaded artifact. See `tinyloop_serve.native.Model`."""

    def __init__(
        self,
        path: str | os.PathLike[str],
        *,
        max_seq_len: int = 0,
        threads: int = 0,
        simd: str = "auto",
        prefill_chunk: int = 256,
        device: str = "cpu",
        weights: str = "auto",
        affinity: str = "none",
    ) -> None:
        """Maps, validates and packs the artifact.

        max_seq_len: positions, 0 = the artifact's. threads: 0 = TINYLOOP_THREADS, else all usable cores.
        simd: "auto" or one of simd_levels(). prefill_chunk: the most rows of one forward pass; it changes
        memory and speed, never bits. device: "cpu", or a plug-in's: "cuda" (its first device), "cuda:1"; see
        devices(). weights: what matrices are held in, "fp16", "bf16", "int8" or "int4" (embedding and head:
        int8); "auto" = TINYLOOP_WEIGHTS, else as the artifact has them. It changes tokens, always in the same
        way. affinity: the processors of the engine's own threads: "none"; "auto", one of this process's for
        each thread if there are enough; or a list such as "0,2-5", which also sets the default of threads.
        The calling thread is never moved: it counts as the first thread, whose processor is left to it.
        Raises ArtifactError, ConfigError, LimitError, BackendUnavailable, OutOfMemoryError.
        """

    def generate(self, prompt: Sequence[int], config: GenerateConfig) -> Generation:
        """All tokens at the end. Raises ConfigError, LimitError, ModelBusyError, ClosedError,
        OutOfMemoryError, BackendFailed.
        """

    def generate_stream(
        self, prompt: Sequence[int], config: GenerateConfig, on_token: Callable[[int, int], bool | None]
    ) -> Generation:
        """Calls on_token(token, position in the whole sequence) for every token; False cancels after that
        token.
        """

    def generate_batch(
        self,
        prompts: Sequence[Sequence[int]],
        config: GenerateConfig | Sequence[GenerateConfig],
        on_step: Callable[[list[int | None]], Sequence[int] | bool | None] | None = None,
    ) -> list[Generation]:
        """Static lockstep batch: per-lane prefill in turn, then one token per lane per step.

        config: one for all lanes or one per lane; lanes may differ in seed, max_tokens, stop_sequences,
        ignore_eos, else ModeError. on_step gets one entry per lane, None for a lane that has stopped; it
        returns None to go
        on, False to cancel all lanes, or the numbers of the lanes to cancel.
        """

    def generate_speculative(
        self,
        prompt: Sequence[int],
        speculative: SpeculativeConfig,
        config: GenerateConfig,
        on_token: Callable[[int, int], bool | None] | None = None,
    ) -> Generation:
        """The tokens of generate_stream at verify_loops, drafted with the model's own first loops (Leviathan
        et al., arXiv 2211.17192). Raises ModeError for what the mode matrix refuses."""

    def generate_tree_speculative(
        self,
        prompt: Sequence[int],
        speculative: SpeculativeConfig,
        config: GenerateConfig,
        on_token: Callable[[int, int], bool | None] | None = None,
    ) -> Generation:
        """The same over a small draft tree."""

    def create_prefix_cache(
        self,
        tokens: Sequence[int],
        n_loops: int = 0,
        cache_mode: str | None = None,
        exit_threshold: float | None = None,
    ) -> PrefixCache: ...
    def generate_from_prefix_cache(
        self,
        prefix: PrefixCache,
        suffix: Sequence[int],
        config: GenerateConfig,
        on_token: Callable[[int, int], bool | None] | None = None,
    ) -> Generation:
        """The prompt is the prefix's tokens and `suffix`. Bit-equal to a cold run. Raises ModeError when
        loops, cache_mode or exit_threshold are not the prefix's, or it belongs to another model."""

    def generate_with_pool(
        self,
        pool: PrefixPool,
        prompt: Sequence[int],
        config: GenerateConfig,
        on_token: Callable[[int, int], bool | None] | None = None,
    ) -> Generation: ...
    def create_resume_handle(
        self, prompt: Sequence[int], loops_used: int, cache_mode: str | None = None, cache_window: int = 0
    ) -> ResumeHandle: ...
    def resume_generate(
        self,
        handle: ResumeHandle,
        loops: int,
        config: GenerateConfig,
        on_token: Callable[[int, int], bool | None] | None = None,
    ) -> Generation:
        """Generates at `loops` >= loops_used without running the prompt's first loops_used iterations again.
        Bit-equal to a cold run at `loops`; config.loops is not used."""

    def logits(
        self, tokens: Sequence[int], loops: int = 0, cache_mode: str | None = None, cache_window: int = 0
    ) -> npt.NDArray[np.float32]:
        """(len(tokens), vocab_size) logits after each position."""

    def cache_bytes(
        self, tokens: int, cache_mode: str | None = None, loops: int = 0, cache_window: int = 0
    ) -> int:
        """Exactly what the cache of one lane of that many positions allocates."""

    def states_bytes(self, tokens: int) -> int:
        """What a ResumeHandle of that many tokens, or a draft, keeps beside its cache."""

    def close(self) -> None:
        """Frees the model once the call in progress, if any, has ended; later use raises ClosedError."""

    @property
    def metadata(self) -> dict[str, str]: ...
    @property
    def fingerprint(self) -> str:
        """Hex; a 128-bit hash of all bytes of the file, not cryptographic. Equal means equal tokens."""
    @property
    def parameters(self) -> int: ...
    @property
    def max_seq_len(self) -> int: ...
    @property
    def threads(self) -> int: ...
    @property
    def cpus(self) -> list[int]:
        """The processor of each thread, the calling one's first; empty without an affinity."""
    @property
    def device(self) -> str:
        """Device and level, such as "cpu/avx2" or "cuda:0/sm_90"."""
    @property
    def device_free_bytes(self) -> int:
        """Memory that the device has left; -1 when it computes in the host's."""
    @property
    def weights(self) -> str:
        """What matrices are held in: "fp16", "bf16", "fp32", "int8", "int4"; "mixed" when they differ."""
    @property
    def weight_bytes(self) -> int:
        """Memory held by packed weights and work space."""
    @property
    def step_counter(self) -> int:
        """Grows with every layer visit; any thread may read it at any time."""

def inspect_artifact(path: str | os.PathLike[str]) -> dict[str, Any]: ...
def devices() -> list[dict[str, Any]]:
    """The CPU, every device of the plug-ins found, and "cuda" with the reason where it is not there.

    name: what Model(device=...) takes; description; reason: why it cannot be used, "" when it can;
    total_bytes: the device's own memory, 0 when it computes in the host's.
    """

def simd_levels() -> list[str]:
    """The levels that this machine can run, best first; "portable" is always one."""
