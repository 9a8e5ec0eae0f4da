"""What a local fleet is to be: its parts and where they are, the flags of each replica that follow, and
whether the machine has the memory. This file must not know processes.
"""

from __future__ import annotations

import contextlib
import os
from dataclasses import dataclass

from tinyloop_serve.deploy import processors
from tinyloop_serve.deploy.placement import placed


@dataclass(frozen=True)
class Plan:
    model: str  # path of the artifact
    endpoint: str  # that clients connect to
    replicas: int = 2
    threads: int = 0  # per replica; 0 = the cores divided among them
    max_seq_len: int = 0  # 0 = the model's
    weights: str = "auto"  # what the replicas hold matrices in
    affinity: str = "none"  # processors that replicas divide: "auto" (ours), "none" or a list
    log: str = ""  # file for the dispatcher's journal, a JSON line per request; "" = nowhere
    config: str = ""  # TOML file for the dispatcher; "" = its defaults
    replica_flags: tuple[str, ...] = ()  # more flags for every replica
    devices: tuple[str, ...] = ()  # of the replicas, in turn; () = as replica_flags say

    def threads_each(self) -> int:
        cpus = processors.named_cpus(self.affinity) or sorted(os.sched_getaffinity(0))
        return self.threads or max(1, len(cpus) // self.replicas)


def replica_options(plan: Plan) -> list[list[str]]:
    """The flags of each replica that say what it does, and where."""
    threads = plan.threads_each()
    alike = ["--model", plan.model, "--threads", str(threads)]
    alike += ["--max-seq-len", str(plan.max_seq_len), "--weights", plan.weights]
    shares = processors.divide(plan.affinity, plan.replicas, threads)
    places = [each.flags for each in placed(plan.replicas, plan.devices)] if plan.devices else []
    return [
        [*alike, "--affinity", share, *plan.replica_flags, *(places[n] if places else [])]
        for n, share in enumerate(shares)
    ]


def lacking_memory(plan: Plan, available: int | None = None) -> str:
    """ "" if the replicas' weights fit the memory that is free now, else the arithmetic; held in another type
    than the file's, they are the replicas' to judge. `available`: bytes, None = ask the machine."""
    if plan.weights != "auto":
        return ""
    import psutil  # not before it is needed

    from tinyloop_serve.native.artifact_file import mapped_bytes
    from tinyloop_serve.native.errors import ArtifactError

    if plan.devices:  # each replica counts its device's memory itself
        return ""
    with contextlib.suppress(OSError):  # a model that is not there or not one is the replicas' to report
        shared = 0
        with contextlib.suppress(ArtifactError):
            shared = mapped_bytes(plan.model)
        each = os.path.getsize(plan.model) - shared
        free = psutil.virtual_memory().available if available is None else available
        needed = plan.replicas * each + shared
        if needed > free:
            weights = f"{plan.replicas} replicas x {each >> 20} MiB of weights + {shared >> 20} MiB shared"
            return f"{weights} = {needed >> 20} MiB, but {free >> 20} MiB of memory are free"
    return ""
