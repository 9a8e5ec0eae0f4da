"""Text prompts -> token ids, in one worker thread beside the loop, with the tokenizer.json that a replica
announced.

The package `tokenizers` is imported by the first text prompt, so that a fleet that is sent token ids needs
neither it nor its memory. It must not hold Python's lock while it works, or the loop would stand still for
the length of the longest text. Results are fetched by the loop after `wake` was called. No sockets here,
no requests, no policy.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable
from queue import SimpleQueue
from typing import Any

from tinyloop_serve.dispatcher.effects import Load, Tokenize
from tinyloop_serve.protocol.codec import tokens_to_bytes
from tinyloop_serve.protocol.errors import InvalidRequest, LimitExceeded, TinyLoopError, bad_field
from tinyloop_serve.protocol.limits import MAX_PROMPT_TOKENS

Result = tuple[int, bytes | TinyLoopError]  # key, u32 little-endian or why not


class Tokenizer:
    """`take` and `results` never block. Answers come in the order of the questions."""

    def __init__(self, wake: Callable[[], None]) -> None:
        """`wake` is called from the worker thread after each result."""
        self._wake = wake
        self._jobs: SimpleQueue[Load | Tokenize | None] = SimpleQueue()
        self._results: deque[Result] = deque()
        self._thread = threading.Thread(target=self._work, name="tokenizer", daemon=True)
        self._thread.start()

    def take(self, job: Load | Tokenize) -> None:
        self._jobs.put(job)

    def results(self) -> list[Result]:
        found = []
        while self._results:
            found.append(self._results.popleft())
        return found

    def close(self) -> None:
        """Returns at once; the thread ends after the job it is at."""
        self._jobs.put(None)

    def _work(self) -> None:
        load = Load("", -1)
        encoder: Any = None
        while (job := self._jobs.get()) is not None:
            if isinstance(job, Load):
                load, encoder = job, None
                continue
            try:
                encoder = encoder or _encoder(load.tokenizer)
                result: bytes | TinyLoopError = _encode(encoder, job.text, load.add_bos if job.bos else -1)
            except TinyLoopError as error:
                result = error
            except Exception as error:  # whatever the package raises for this text
                result = _no_text(f"the prompt could not be tokenised ({error})")
            self._results.append((job.key, result))
            self._wake()


def _encoder(tokenizer: str) -> Any:
    if not tokenizer:
        raise _no_text("the model has no tokenizer")
    try:
        from tokenizers import Tokenizer as Encoder
    except ImportError:
        raise _no_text("the dispatcher's environment lacks the package tokenizers") from None
    try:
        encoder = Encoder.from_str(tokenizer)
    except Exception as error:  # the package raises bare Exception
        raise _no_text(f"the model's tokenizer cannot be read ({error})") from None
    encoder.no_truncation()  # what the file says of lengths was for training: a prompt is never cut
    encoder.no_padding()
    return encoder


def _encode(encoder: Any, text: str, add_bos: int) -> bytes:
    (encoding,) = encoder.encode_batch_fast([text], add_special_tokens=False)  # without Python's lock
    if len(encoding) > MAX_PROMPT_TOKENS:  # before they are made into Python numbers, with it
        accepted = f"at most {MAX_PROMPT_TOKENS} tokens"
        raise bad_field("prompt_text", f"{len(encoding)} tokens", accepted, LimitExceeded)
    ids = encoding.ids
    return tokens_to_bytes([add_bos, *ids] if add_bos >= 0 else ids)


def _no_text(why: str) -> InvalidRequest:
    message = f"prompt_text: {why}; send token ids in prompt_tokens"
    return InvalidRequest(message, field="prompt_text", accepted="prompt_tokens")
