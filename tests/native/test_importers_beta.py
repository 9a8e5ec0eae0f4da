"""beta, the gain of the core: the number in the artifact is the one that its definition gives."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tokenizers import Tokenizer
from tokenizers import models as token_models

from tests.native import models, reference
from tests.vectors import looped_checkpoints
from tinyloop_serve.native.artifact import complete_config
from tinyloop_serve.native.importers import beta
from tinyloop_serve.native.importers.convert import convert

LOOPED = {name: config for name, config in models.FAMILY.items() if config["loops"] > 1}


@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
@pytest.mark.parametrize("name", LOOPED)
def test_beta_is_the_median_growth_of_the_states_step(name: str, dtype: str) -> None:
    config = LOOPED[name]
    tensors = reference.random_model(config, seed=3, dtype=dtype)
    model = reference.Reference(config, tensors, kv_fp16=False)
    ratios = []
    for prompt in beta.prompts(model.config, ""):
        e = model.prelude(prompt)
        states = [model.after_loops(e, loops) for loops in range(config["loops"] + 1)]
        steps = [np.linalg.norm(b - a, axis=1) for a, b in zip(states, states[1:], strict=False)]
        ratios += [after / before for before, after in zip(steps, steps[1:], strict=False)]
    measured = beta.measure_beta(config, tensors)
    assert measured == pytest.approx(float(np.median(ratios)), rel=1e-3)


def test_a_model_of_one_loop_has_none() -> None:
    config = models.FAMILY["llama"]
    assert beta.measure_beta(config, reference.random_model(config, seed=3)) is None


def test_a_state_that_never_moves_has_none() -> None:
    config = models.config(loops=4)
    tensors = reference.random_model(config, seed=3)
    silent = {
        name: np.zeros_like(tensor) if name.endswith(("wo.weight", "w_down.weight")) else tensor
        for name, tensor in tensors.items()
    }
    assert beta.measure_beta(config, silent) is None


def test_texts_are_used_where_there_is_a_tokenizer() -> None:
    vocab = {"<unk>": 0, "The": 1, "river": 2}
    text = Tokenizer(token_models.WordLevel(vocab, unk_token="<unk>")).to_str()
    config: dict[str, Any] = models.config(loops=4, bos_id=5, add_bos=True)
    found = beta.prompts(complete_config(config), text)
    assert len(found) == len(beta.TEXTS) and all(prompt[0] == 5 for prompt in found)


def test_a_larger_model_is_measured_on_fewer_tokens() -> None:
    small = complete_config(models.config(loops=4))
    large = complete_config(
        models.config(
            d_model=5280,
            n_heads=55,
            n_kv_heads=55,
            head_dim=96,
            d_ffn=17920,
            n_core=4,
            max_loops=32,
            loops=32,
        )
    )
    lengths = [max(map(len, beta.prompts(config, ""))) for config in (small, large)]
    assert lengths[0] == beta.MAX_TOKENS and beta.MIN_TOKENS <= lengths[1] <= 16


def test_it_is_stored_at_conversion_unless_unwanted(tmp_path: Path) -> None:
    config, _ = looped_checkpoints.MODELS["ouro"]
    source = looped_checkpoints.write_folder(tmp_path / "hf", config, looped_checkpoints.tensors("ouro"))
    measured = convert(source, tmp_path / "t")["beta"]
    assert isinstance(measured, float) and 0.1 < measured < 2
    assert convert(source, tmp_path / "t", measure_beta=False)["beta"] is None
