"""The numpy reference against facts that can be derived without it: hand computation and exact identities."""

import math
from typing import Any

import numpy as np
import pytest

from tests.native import models, reference
from tests.native.reference import Array, Reference
from tinyloop_serve.native.tensors import BF16, Tensor

TOKENS = [5, 17, 42, 5, 60, 0, 33, 8]
Tensors = dict[str, Tensor]


def exact(config: dict[str, Any], tensors: Tensors, tokens: list[int] = TOKENS, loops: int = 1) -> Array:
    """Logits without the cache's rounding."""
    return reference.logits(config, tensors, tokens, loops, kv_fp16=False)


def random(config: dict[str, Any], seed: int = 11) -> dict[str, Any]:
    return reference.random_model(config, seed)


@pytest.fixture(params=models.FAMILY)
def family(request: pytest.FixtureRequest) -> dict[str, Any]:
    return models.FAMILY[request.param]


def test_two_tokens_by_hand() -> None:
    """A layer of width 2, one head, one hidden unit, in scalar arithmetic."""
    config = models.config(
        vocab_size=2, d_model=2, n_heads=1, n_kv_heads=1, head_dim=2, d_ffn=1, n_core=1, norm_eps=0.25
    )
    tensors: dict[str, Any] = {
        "embed.weight": [[1.0, 2.0], [3.0, -1.0]],
        "core.0.attn_norm.weight": [0.5, 2.0],
        "core.0.wq.weight": [[1.0, 0.0], [0.0, 1.0]],
        "core.0.wk.weight": [[0.0, 1.0], [1.0, 0.0]],
        "core.0.wv.weight": [[1.0, 1.0], [1.0, -1.0]],
        "core.0.wo.weight": [[2.0, 0.0], [1.0, 1.0]],
        "core.0.ffn_norm.weight": [1.0, 1.0],
        "core.0.w_gate.weight": [[1.0, -1.0]],
        "core.0.w_up.weight": [[0.5, 0.5]],
        "core.0.w_down.weight": [[3.0], [-2.0]],
        "final_norm.weight": [1.0, 0.5],
        "head.weight": [[1.0, 0.0], [1.0, 1.0]],
    }

    def norm(a: float, b: float) -> tuple[float, float]:
        size = math.sqrt((a * a + b * b) / 2 + 0.25)
        return a / size, b / size

    a0, b0 = norm(1.0, 2.0)
    a1, b1 = norm(3.0, -1.0)
    a0, b0, a1, b1 = 0.5 * a0, 2.0 * b0, 0.5 * a1, 2.0 * b1
    cos, sin = math.cos(1.0), math.sin(1.0)  # position 1, pair 0: angle 1
    q1 = (a1 * cos - b1 * sin, b1 * cos + a1 * sin)
    k0, k1 = (b0, a0), (b1 * cos - a1 * sin, a1 * cos + b1 * sin)
    s0 = math.exp((q1[0] * k0[0] + q1[1] * k0[1]) / math.sqrt(2.0))
    s1 = math.exp((q1[0] * k1[0] + q1[1] * k1[1]) / math.sqrt(2.0))
    v0, v1 = (a0 + b0, a0 - b0), (a1 + b1, a1 - b1)
    mixed = [(s0 * x + s1 * y) / (s0 + s1) for x, y in zip(v0, v1, strict=True)]
    x, y = 3.0 + 2.0 * mixed[0], -1.0 + mixed[0] + mixed[1]
    a, b = norm(x, y)
    gate = a - b
    hidden = gate / (1.0 + math.exp(-gate)) * (0.5 * a + 0.5 * b)
    a, b = norm(x + 3.0 * hidden, y - 2.0 * hidden)
    expected = [a, a + 0.5 * b]

    got = exact(config, {name: np.array(value) for name, value in tensors.items()}, [0, 1])
    np.testing.assert_allclose(got[1], expected, rtol=1e-13)


@pytest.mark.parametrize("loops", [1, 3])
def test_no_position_sees_a_later_one(family: dict[str, Any], loops: int) -> None:
    tensors = random(family)
    whole = exact(family, tensors, TOKENS, loops)
    np.testing.assert_allclose(exact(family, tensors, TOKENS[:3], loops), whole[:3], rtol=0, atol=1e-12)
    changed = exact(family, tensors, TOKENS[:4] + [1, 2, 3, 4], loops)
    np.testing.assert_allclose(changed[:4], whole[:4], rtol=0, atol=1e-12)
    assert np.abs(changed[4:] - whole[4:]).min(axis=1).max() > 1e-3


def test_where_layers_stand_does_not_matter_at_one_loop() -> None:
    """A plain Llama may be written as core layers, or as prelude, core and coda."""
    plain = models.config(n_core=4)
    split = models.config(n_prelude=1, n_core=2, n_coda=1)
    tensors = random(plain)
    moved = {"core.0.": "prelude.0.", "core.1.": "core.0.", "core.2.": "core.1.", "core.3.": "coda.0."}
    renamed = {moved.get(name[:7], name[:7]) + name[7:]: tensor for name, tensor in tensors.items()}
    assert np.array_equal(exact(plain, tensors), exact(split, renamed))


@pytest.mark.parametrize("norm", ["pre", "sandwich", "post", "pre_post"])
def test_loops_without_injection_are_repeated_layers(norm: str) -> None:
    looped = models.config(n_core=2, norm=norm)
    unrolled = models.config(n_core=6, norm=norm)
    tensors = random(looped)
    copied = {name: tensor for name, tensor in tensors.items() if not name.startswith("core.")}
    for i in range(6):
        layer = f"core.{i % 2}."
        copied |= {name.replace(layer, f"core.{i}."): t for name, t in tensors.items() if layer in name}
    assert np.array_equal(exact(looped, tensors, loops=3), exact(unrolled, copied))


def test_grouped_heads_are_repeated_heads() -> None:
    grouped = models.config(n_kv_heads=2, qk_bias=True, v_bias=True, qk_norm=True)
    full = models.config(n_kv_heads=4, qk_bias=True, v_bias=True, qk_norm=True)
    tensors = random(grouped)
    repeated = dict(tensors)
    for name, tensor in tensors.items():
        if name.endswith(("wk.weight", "wv.weight", "k_bias", "v_bias")):
            heads = tensor.reshape(2, 6, -1)
            repeated[name] = heads.repeat(2, axis=0).reshape(24, *tensor.shape[1:])
    np.testing.assert_allclose(exact(full, repeated), exact(grouped, tensors), rtol=0, atol=1e-12)


def test_the_rope_layouts_differ_by_a_reordering_of_rows() -> None:
    half = models.config(qk_bias=True, qk_norm=True)
    tensors = random(half)
    order = np.array([0, 3, 1, 4, 2, 5])  # pair (i, i + 3) becomes neighbours
    moved = dict(tensors)
    for name, tensor in tensors.items():
        if name.endswith(("wq.weight", "wk.weight", "q_bias", "k_bias", "q_norm.weight", "k_norm.weight")):
            moved[name] = tensor.reshape(-1, 6, *tensor.shape[1:])[:, order].reshape(tensor.shape)
    np.testing.assert_allclose(
        exact(half | {"rope": "interleaved"}, moved), exact(half, tensors), rtol=0, atol=1e-12
    )


@pytest.mark.parametrize("layout", ["half", "interleaved"])
def test_rope_keeps_lengths_and_depends_on_distance_alone(layout: str) -> None:
    model = Reference(models.config(rope=layout), {})
    vector = np.random.default_rng(1).standard_normal(6)
    turned = model.rope(np.tile(vector, (9, 1, 1)))[:, 0]
    np.testing.assert_allclose(np.linalg.norm(turned, axis=1), np.linalg.norm(vector))
    products = turned @ turned.T
    for distance in range(9):
        diagonal = np.diagonal(products, distance)
        np.testing.assert_allclose(diagonal, diagonal[0])
    assert abs(products[0, 1] - products[0, 0]) > 1e-3


def test_attention_without_queries_is_the_mean_of_the_values() -> None:
    config = models.config(n_core=1, n_kv_heads=4)
    tensors = random(config)
    tensors["core.0.wq.weight"] = np.zeros_like(tensors["core.0.wq.weight"])
    model = Reference(config, tensors, kv_fp16=False)
    x = np.random.default_rng(2).standard_normal((5, 24))
    values = x @ model.weights["core.0.wv.weight"].T
    means = np.cumsum(values, axis=0) / np.arange(1, 6)[:, None]
    np.testing.assert_allclose(model.attention("core.0", x), means @ model.weights["core.0.wo.weight"].T)


def test_a_value_bias_passes_attention_unchanged() -> None:
    config = models.config(n_core=1, v_bias=True)
    tensors = random(config)
    model = Reference(config, tensors, kv_fp16=False)
    bias = model.weights["core.0.v_bias"].copy()
    x = np.random.default_rng(3).standard_normal((5, 24))
    with_bias = model.attention("core.0", x)
    model.weights["core.0.v_bias"][:] = 0.0
    added = bias.reshape(2, 6).repeat(2, axis=0).reshape(24) @ model.weights["core.0.wo.weight"].T
    np.testing.assert_allclose(with_bias - model.attention("core.0", x), np.tile(added, (5, 1)), atol=1e-12)


def test_query_and_key_biases_come_before_norm_and_rope() -> None:
    """Without wq and wk every query and key is its bias, so scores are those of two rotated constants."""
    config = models.config(n_core=1, n_heads=1, n_kv_heads=1, qk_bias=True, qk_norm=True)
    tensors = random(config)
    for which in ("wq", "wk"):
        tensors[f"core.0.{which}.weight"] = np.zeros_like(tensors[f"core.0.{which}.weight"])
    model = Reference(config, tensors, kv_fp16=False)
    w = model.weights

    def turned(which: str) -> Array:
        bias = w[f"core.0.{which}_bias"]
        normed = bias / np.sqrt(np.mean(bias**2) + 1e-5) * w[f"core.0.{which}_norm.weight"]
        pairs = normed[:3] + 1j * normed[3:]
        angles = np.outer(np.arange(4), 10000.0 ** (-np.arange(3) / 3))
        rotated = pairs * np.exp(1j * angles)
        return np.concatenate([rotated.real, rotated.imag], axis=1)

    x = np.random.default_rng(4).standard_normal((4, 24))
    powers = np.tril(np.exp(turned("q") @ turned("k").T / math.sqrt(6.0)))
    mixed = powers / powers.sum(axis=1, keepdims=True) @ (x @ w["core.0.wv.weight"].T)
    np.testing.assert_allclose(model.attention("core.0", x), mixed @ w["core.0.wo.weight"].T, atol=1e-12)


def _blocks(left: float, right: float) -> Array:
    return np.concatenate([left * np.eye(24), right * np.eye(24)], axis=1)


@pytest.mark.parametrize("loops", [1, 2, 5])
def test_concat_injection_contains_the_other_injections(loops: int) -> None:
    concat = models.config(n_prelude=1, injection="concat")
    tensors = random(concat)
    rest = {name: tensor for name, tensor in tensors.items() if name != "inject.weight"}

    def concat_logits(left: float, right: float) -> Array:
        return exact(concat, rest | {"inject.weight": _blocks(left, right)}, loops=loops)

    none = models.config(n_prelude=1)
    np.testing.assert_allclose(concat_logits(1, 0), exact(none, rest, loops=loops), atol=1e-12)
    add = models.config(n_prelude=1, injection="add")
    np.testing.assert_allclose(concat_logits(1, 1), exact(add, rest, loops=loops), atol=1e-12)
    # A state that is forgotten at the start of every loop: any loop count is one loop.
    np.testing.assert_allclose(concat_logits(0, 1), exact(none, rest, loops=1), atol=1e-12)


def test_the_first_loop_from_zeros_sees_the_injected_signal_alone() -> None:
    from_zeros = models.config(n_prelude=1, injection="add", start="zeros")
    tensors = random(from_zeros)
    none = models.config(n_prelude=1)
    assert np.array_equal(exact(from_zeros, tensors), exact(none, tensors))
    two = exact(from_zeros, tensors, loops=2)
    assert np.abs(two - exact(none, tensors, loops=2)).max() > 1e-2  # the second loop is injected too


def test_loop_norm_is_fed_back_and_core_norm_is_not() -> None:
    both = models.config(n_prelude=1, n_coda=1, loop_norm=True, core_norm=True)
    tensors = random(both)
    model = Reference(both, tensors, kv_fp16=False)
    e = model.prelude(TOKENS)
    x = e
    for _ in range(3):
        x = model.layer("core.1", model.layer("core.0", x))
        x = model.rms_norm(x, model.weights["loop_norm.weight"])
    np.testing.assert_allclose(model.after_loops(e, 3), x)
    x = model.layer("coda.0", model.rms_norm(x, model.weights["core_norm.weight"]))
    x = model.rms_norm(x, model.weights["final_norm.weight"])
    np.testing.assert_allclose(model.logits(TOKENS, 3), x @ model.weights["head.weight"].T)


def test_a_norm_of_a_norm_changes_nothing() -> None:
    once = models.config(loop_norm=True)
    twice = models.config(loop_norm=True, core_norm=True)
    tensors = random(twice) | {"loop_norm.weight": np.ones(24), "core_norm.weight": np.ones(24)}
    rest = {name: tensor for name, tensor in tensors.items() if name != "core_norm.weight"}
    np.testing.assert_allclose(exact(twice, tensors, loops=3), exact(once, rest, loops=3), atol=1e-4)


def test_norm_placements() -> None:
    """With attention and MLP silenced, what is left of a layer is its norms on the residual stream."""
    x = np.random.default_rng(5).standard_normal((3, 24))
    for norm, expected_norms in {"pre": 0, "sandwich": 0, "post": 2, "pre_post": 2}.items():
        config = models.config(norm=norm, n_core=1)
        tensors = random(config)
        for name in ("wo", "w_down"):
            tensors[f"core.0.{name}.weight"] = np.zeros_like(tensors[f"core.0.{name}.weight"])
        model = Reference(config, tensors, kv_fp16=False)
        expected = x
        if expected_norms:
            expected = model.rms_norm(expected, model.weights["core.0.attn_post_norm.weight"])
            expected = model.rms_norm(expected, model.weights["core.0.ffn_post_norm.weight"])
        np.testing.assert_allclose(model.layer("core.0", x), expected, err_msg=norm)


@pytest.mark.parametrize("norm", ["pre", "sandwich"])
def test_a_norm_before_attention_makes_it_blind_to_scale(norm: str) -> None:
    config = models.config(norm=norm, n_core=1, norm_eps=1e-12)
    tensors = random(config) | {"core.0.w_down.weight": np.zeros((24, 40))}
    model = Reference(config, tensors, kv_fp16=False)
    x = np.random.default_rng(6).standard_normal((4, 24))
    added = model.layer("core.0", x) - x
    np.testing.assert_allclose(model.layer("core.0", 1000.0 * x) - 1000.0 * x, added, atol=1e-9)
    assert np.abs(added).max() > 0.1


def test_a_sandwich_with_silent_outer_norms_is_no_layer_at_all() -> None:
    config = models.config(
        norm="sandwich", final_norm=False, tied_head=True, embed_scale=3.0, logit_scale=0.5
    )
    tensors = random(config)
    for name in tensors:
        if "post_norm" in name:
            tensors[name] = np.zeros(24)
    embed = tensors["embed.weight"].astype(np.float64)
    np.testing.assert_allclose(exact(config, tensors, loops=2), 0.5 * 3.0 * embed[TOKENS] @ embed.T)


def test_the_logit_scale_multiplies_the_logits() -> None:
    tensors = random(models.config())
    base = exact(models.config(), tensors)
    np.testing.assert_allclose(exact(models.config(logit_scale=-0.25), tensors), -0.25 * base)


def test_fp16_keys_and_values_change_little_and_only_by_rounding() -> None:
    config = models.config()
    tensors = random(config)
    difference = np.abs(reference.logits(config, tensors, TOKENS) - exact(config, tensors)).max()
    assert 0 < difference < 0.01
    model = Reference(config, tensors)
    assert model.kv_fp16
    # Values that fp16 holds exactly pass unchanged; keys at position 0 are not rotated.
    tensors["core.0.wv.weight"] = np.round(tensors["core.0.wv.weight"] * 4) / 4
    x = np.round(np.random.default_rng(7).standard_normal((1, 24)))
    rounded, plain = (Reference(config, tensors, kv_fp16=kv).attention("core.0", x) for kv in (True, False))
    assert np.array_equal(rounded, plain)


def test_greedy_feeds_back_its_own_tokens() -> None:
    config = models.FAMILY["everything"]
    tensors = random(config)
    tokens = reference.greedy(config, tensors, TOKENS[:3], 2, 4)
    sequence = TOKENS[:3]
    for token in tokens:
        assert int(np.argmax(reference.logits(config, tensors, sequence, 2)[-1])) == token
        sequence = [*sequence, token]


def test_random_models_are_repeatable_and_well_conditioned(family: dict[str, Any]) -> None:
    """No loop count blows a rounding error up, so that a comparison of engines says something."""
    tensors = random(family)
    again = random(family)
    assert all(np.array_equal(tensors[name], again[name]) for name in tensors)
    rng = np.random.default_rng(8)
    nudged = {
        name: t.astype(np.float64) * (1 + 1e-7 * rng.standard_normal(t.shape)) for name, t in tensors.items()
    }
    for loops in (1, 4, 16):
        logits = exact(family, tensors, loops=loops)
        assert 0.3 < logits.std() < 3.0
        assert np.abs(exact(family, nudged, loops=loops) - logits).max() < 1e-4


@pytest.mark.parametrize(("dtype", "error"), [("fp16", 2**-11), ("bf16", 2**-8)])
def test_random_models_come_in_every_dtype(dtype: str, error: float) -> None:
    config = models.config()
    full = random(config)
    for name, tensor in reference.random_model(config, 11, dtype).items():
        values = tensor.float32() if isinstance(tensor, BF16) else tensor.astype(np.float32)
        assert isinstance(tensor, BF16) == (dtype == "bf16")
        np.testing.assert_allclose(values, full[name], rtol=error, atol=1e-6)
