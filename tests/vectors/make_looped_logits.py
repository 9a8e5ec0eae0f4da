"""Makes `<model>_logits.json`: what each family's own reference code says about the tiny checkpoints.

    python -m tests.vectors.make_looped_logits llama mistral qwen2 qwen3
    python -m tests.vectors.make_looped_logits huginn --reference raven_modeling_minimal.py --origin "<where
    from>" python -m tests.vectors.make_looped_logits ouro --reference modeling_ouro.py --origin ...
    python -m tests.vectors.make_looped_logits nanbeige nanbeige_normed_once --reference modeling_nanbeige.py
    ...

Needs torch and transformers (the reference code of Ouro, Huginn and Nanbeige: 4.56.2). The reference files
are not part of this project: get them, pass their path. Their configuration classes are replaced by a plain
one
that holds the keys of config.json and, for Nanbeige, its options' defaults.

The logits are float64: the reference file is loaded with "float32" read as "float64" and `.float()` as
`.double()`, because these models compute norms, softmax and rotations in fp32 whatever their dtype is. The
file as it is, in fp32, is run too; how far the two are apart is written down and must be small.
"""

import argparse
import hashlib
import importlib.util
import json
import re
import sys
import types
from pathlib import Path
from typing import Any

import numpy as np
import torch
import transformers

from tests.vectors import looped_checkpoints

Array = np.ndarray[Any, np.dtype[np.float64]]

HERE = Path(__file__).parent
CLASSES = {
    "llama": "LlamaForCausalLM",
    "mistral": "MistralForCausalLM",
    "qwen2": "Qwen2ForCausalLM",
    "qwen3": "Qwen3ForCausalLM",
    "ouro": "OuroForCausalLM",
    "huginn_raven": "RavenForCausalLM",
    "nanbeige": "NanbeigeForCausalLM",
}
CONFIG_MODULES = {
    "ouro": ("configuration_ouro", "OuroConfig"),
    "huginn_raven": ("raven_config_minimal", "RavenConfig"),
    "nanbeige": ("configuration_nanbeige", "NanbeigeConfig"),
}
NANBEIGE_OFF: dict[str, Any] = {
    "mlp_bias": False,
    "qk_layernorm": False,
    "emb_neighbor_num": None,
    "emb_split_num": None,
    "ngram_vocab_size_ratio": None,
    "enable_double_loop_split": False,
    "loop_middle_layers": None,
    "loop_share_kv": False,
    "enable_hyper_connection": False,
    "enable_mhc": False,
    "num_residual_streams": 4,
    "enable_depth_attention": False,
}


class PlainConfig(transformers.PretrainedConfig):  # type: ignore[misc]
    """Every key an attribute."""

    def __init__(self, **keys: Any) -> None:
        tied = keys.pop("tie_word_embeddings", False)
        super().__init__(tie_word_embeddings=tied, **keys)
        for key, value in keys.items():
            setattr(self, key, value)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("models", nargs="+", choices=list(looped_checkpoints.MODELS))
    parser.add_argument("--reference", type=Path, help="the family's modeling file, if not in transformers")
    parser.add_argument("--origin", default="", help="where that file is from, for the provenance")
    flags = parser.parse_args()
    torch.set_grad_enabled(False)
    for name in flags.models:
        kind = looped_checkpoints.MODELS[name][0]["model_type"]
        path = flags.reference or installed(kind)
        golden = make(name, path, flags.origin or f"transformers {transformers.__version__}, {path.name}")
        text = json.dumps(golden, indent=1)
        text = re.sub(r"\[\s+([-\d][^\[\]]*?)\s+\]", lambda row: "[" + " ".join(row[1].split()) + "]", text)
        (HERE / f"{name}_logits.json").write_text(text + "\n")
        print(name, golden["provenance"])


def make(name: str, path: Path, origin: str) -> dict[str, Any]:
    loop_counts = looped_checkpoints.MODELS[name][1]
    exact = {loops: logits(name, path, loops, torch.float64) for loops in loop_counts}
    plain = {loops: logits(name, path, loops, torch.float32) for loops in loop_counts}
    apart = max(float(np.abs(exact[loops] - plain[loops]).max()) for loops in loop_counts)
    assert apart < 2e-5, f"the float64 reading of {path.name} is another model: {apart}"
    golden: dict[str, Any] = {
        "provenance": {
            "origin": origin,
            "sha256": hashlib.sha256(path.read_bytes()).hexdigest(),
            "generator": "tests/vectors/make_looped_logits.py",
            "torch": torch.__version__,
            "transformers": transformers.__version__,
            "unmodified_fp32_is_off_by": float(f"{apart:.2g}"),
        },
        "checkpoint_sha256": looped_checkpoints.digest(looped_checkpoints.tensors(name)),
        "tokens": looped_checkpoints.TOKENS,
        "logits": {str(loops): rounded(exact[loops]) for loops in loop_counts},
    }
    if name == "ouro":  # the exit gate's output after every loop, (loops, tokens)
        model = reference(name, path, max(loop_counts), torch.float64)
        _, _, gates = model.model(torch.tensor([looped_checkpoints.TOKENS]), use_cache=False)
        golden["gate"] = rounded(torch.stack([gate[0, :, 0] for gate in gates]).numpy())
    return golden


def logits(name: str, path: Path, loops: int, dtype: torch.dtype) -> Array:
    model = reference(name, path, loops, dtype)
    tokens = torch.tensor([looped_checkpoints.TOKENS])
    if name == "huginn":
        out = model(tokens, num_steps=torch.tensor([loops]), init_scale=0.0)
    else:
        out = model(tokens, use_cache=False)
    result: Array = out.logits[0].double().numpy()
    return result


def rounded(values: Array) -> list[list[float]]:
    return [[float(f"{value:.12g}") for value in row] for row in values]


def reference(name: str, path: Path, loops: int, dtype: torch.dtype) -> Any:
    """The family's own model with the tiny checkpoint in it; the two must have the same names."""
    config = dict(looped_checkpoints.MODELS[name][0])
    kind = config["model_type"]
    module = load(path, kind, float64=dtype == torch.float64)
    model = getattr(module, CLASSES[kind])(reference_config(module, config, loops)).eval()
    if dtype == torch.float64:
        exact_rotations(model, config)
    model = model.to(dtype)
    missing, unexpected = model.load_state_dict(
        {key: torch.from_numpy(value).to(dtype) for key, value in looped_checkpoints.tensors(name).items()},
        strict=False,
    )
    tied = {"lm_head.weight"} if config["tie_word_embeddings"] else set()
    assert not unexpected and set(missing) <= tied | {"freqs_cis"}, (missing, unexpected)
    model.tie_weights()
    return model


def reference_config(module: types.ModuleType, config: dict[str, Any], loops: int) -> Any:
    kind = config["model_type"]
    if kind not in CONFIG_MODULES:
        made = getattr(transformers, CLASSES[kind].replace("ForCausalLM", "Config"))(**config)
        made._attn_implementation = "eager"
        return made
    if kind == "ouro":
        config["total_ut_steps"] = loops
    elif kind == "nanbeige":
        config = NANBEIGE_OFF | config | {"num_loops": loops, "loop_loss_weights": []}
    else:
        config |= {
            "num_attention_heads": config["n_heads"],
            "num_key_value_heads": config["n_heads"],
            "head_dim": config["n_embd"] // config["n_heads"],
            "effective_expected_depth": 27,
            "init_values": {"std": 1.0},
        }
    made = getattr(module, CONFIG_MODULES[kind][1])(**config)
    made._attn_implementation = "eager"
    return made


def load(path: Path, kind: str, *, float64: bool) -> types.ModuleType:
    """The reference file as a module of its own package, beside the plain configuration class it asks for."""
    source = path.read_text(encoding="utf-8")
    if float64:
        source = re.sub(r"torch\.float(32)?\b(?!64)", "torch.float64", source).replace(
            ".float()", ".double()"
        )
    package = f"reference_{kind}_{64 if float64 else 32}"
    if kind in CONFIG_MODULES:
        parent = types.ModuleType(package)
        parent.__path__ = []
        file, class_name = CONFIG_MODULES[kind]
        beside = types.ModuleType(f"{package}.{file}")
        setattr(beside, class_name, type(class_name, (PlainConfig,), {"model_type": kind}))
        sys.modules |= {package: parent, f"{package}.{file}": beside}
    else:
        package = f"transformers.models.{kind}"
    name = f"{package}.reference_{64 if float64 else 32}"
    spec = importlib.util.spec_from_loader(name, loader=None)
    assert spec is not None
    module = importlib.util.module_from_spec(spec)
    module.__dict__.update({"__package__": package, "__file__": str(path)})
    sys.modules[name] = module
    exec(compile(source, str(path), "exec"), module.__dict__)
    return module


def exact_rotations(model: torch.nn.Module, config: dict[str, Any]) -> None:
    """Rotary frequencies that transformers' shared code has rounded to fp32, in float64."""
    for part in model.modules():
        if isinstance(getattr(part, "inv_freq", None), torch.Tensor):
            half = config.get("head_dim", config["hidden_size"] // config["num_attention_heads"]) // 2
            exponents = -torch.arange(half, dtype=torch.float64) / half
            part.inv_freq = torch.tensor(float(config["rope_theta"]), dtype=torch.float64) ** exponents


def installed(kind: str) -> Path:
    return Path(transformers.__file__).parent / "models" / kind / f"modeling_{kind}.py"


if __name__ == "__main__":
    main()
