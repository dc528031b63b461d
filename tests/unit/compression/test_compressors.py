"""Each compressor alone: the error bound in its docstring, its payload compared with the codec's
definition, and its random numbers."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from shoal_common.errors import ConfigurationError
from shoal_common.formats import codecs
from shoal_protos.v1 import parameter_server_pb2 as pb
from shoal_worker import scratch
from shoal_worker.compression import compressor_class, compressor_names, parse_compression
from shoal_worker.compression.base import KeyedRandom
from shoal_worker.compression.powersgd import PowerSGDCompressor, orthonormal
from shoal_worker.compression.quantized import Int8Compressor
from shoal_worker.compression.sign import SignCompressor
from shoal_worker.compression.sparse import RandomKCompressor, TopKCompressor

VECTORS = [name for name in compressor_names() if name != "powersgd"]
LENGTHS = st.one_of(
    st.integers(1, 600), st.sampled_from([1024, 2047, 65_536, 65_537, 131_073, 200_000])
)


def drawn(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def round_trip(compressor, tensor, **key):
    return compressor.decompress(compressor.compress(tensor, **key), tensor.shape)


def squared(tensor: torch.Tensor) -> float:
    return float(tensor.double().square().sum())


# --- bounds


@pytest.mark.parametrize(
    ("name", "relative", "floor"), [("fp16", 2**-11, 2**-25), ("bf16", 2**-8, 1e-38)]
)
def test_half_precision_is_off_by_one_rounding(name, relative, floor):
    values = drawn(5001) * torch.logspace(-6, 4, 5001)
    error = (round_trip(compressor_class(name)(), values) - values).abs()
    assert torch.all(error <= torch.clamp(values.abs() * relative, min=floor))
    assert error.max() > 0


@settings(max_examples=40)
@given(LENGTHS, st.integers(0, 3), st.sampled_from([1e-20, 1.0, 1e20]))
def test_int8_is_off_by_less_than_one_level_of_its_block(length, seed, size):
    values = drawn(length, seed=seed) * size
    error = (round_trip(Int8Compressor(seed=seed), values) - values).abs()
    for block, of_block in zip(values.split(256), error.split(256), strict=True):
        assert of_block.max() < block.abs().max() / 127 * (1 + 2**-16)


def test_int8_is_unbiased_and_its_variance_is_within_the_bound():
    values = drawn(256)
    level = float(values.abs().max()) / 127
    rounds = 2000
    seen = torch.stack([round_trip(Int8Compressor(), values, step=step) for step in range(rounds)])
    # Five standard deviations of the mean of that many values with variance level^2 / 4, for each
    # of 256 elements.
    assert (seen.mean(0) - values).abs().max() < 5 * level / 2 / rounds**0.5
    assert seen.var(0).max() <= level**2 / 4 * 1.01


@settings(max_examples=40)
@given(LENGTHS, st.integers(0, 3))
def test_sign_error_matches_its_lemma_exactly(length, seed):
    values = drawn(length, seed=seed)
    found = round_trip(SignCompressor(), values)
    for block, decoded in zip(values.split(1024), found.split(1024), strict=True):
        expected = squared(block) - float(block.double().abs().sum()) ** 2 / block.numel()
        assert squared(block - decoded) == pytest.approx(
            expected, rel=1e-4, abs=1e-6 * squared(block)
        )
        assert torch.equal(decoded < 0, block < 0)


@settings(max_examples=40)
@given(LENGTHS, st.integers(0, 3), st.sampled_from([0.001, 0.01, 0.3, 1.0]))
def test_topk_contracts_by_the_kept_share(length, seed, ratio):
    compressor, values = TopKCompressor(ratio=ratio), drawn(length, seed=seed)
    kept = compressor.kept(length)
    found = round_trip(compressor, values)
    assert int(found.count_nonzero()) == kept
    assert torch.equal(found[found != 0], values[found != 0])
    assert squared(values - found) <= (1 - kept / length) * squared(values) * (1 + 1e-6)
    assert float(found[found != 0].abs().min()) >= float(
        values[found == 0].abs().max() if kept < length else 0
    )


@pytest.mark.parametrize(
    "values",
    [
        torch.zeros(300_000),
        torch.ones(300_000),
        torch.cat([torch.zeros(299_990), torch.arange(1.0, 11)]),
        torch.cat([drawn(150_000), torch.zeros(150_000)]),
        torch.arange(300_000) % 4.0,
        torch.arange(300_000.0) * 1e-3,
        torch.where(torch.arange(300_000) % 4 == 0, 1.0, 1e-30),
        torch.where(torch.arange(300_000) % 4 == 1, 1.0, 0.0),
    ],
    ids=["zeros", "ones", "few", "half", "ties", "ramp", "seen", "unseen"],
)
def test_topk_finds_the_largest_when_a_sample_misleads(values):
    found = round_trip(TopKCompressor(ratio=0.01), values)
    best = torch.topk(values.abs(), 3000).values
    assert squared(found) == pytest.approx(squared(best), rel=1e-6)


def test_randomk_keeps_every_element_equally_often():
    values, rounds = torch.ones(40), 1500
    compressor = RandomKCompressor(ratio=0.25)
    kept = sum(round_trip(compressor, values, step=step) for step in range(rounds)) / rounds
    assert (kept - 0.25).abs().max() < 5 * (0.25 * 0.75 / rounds) ** 0.5


def test_randomk_without_error_feedback_is_unbiased():
    values, rounds = drawn(60), 2000
    compressor = RandomKCompressor(ratio=0.2, error_feedback=False)
    seen = torch.stack([round_trip(compressor, values, step=step) for step in range(rounds)])
    assert (seen.mean(0) - values).abs().max() < 5 * float(values.abs().max()) * 2 / rounds**0.5
    assert float((seen - values).double().square().sum(1).mean()) == pytest.approx(
        4 * squared(values), rel=0.05
    )


@settings(max_examples=40)
@given(st.integers(2, 60), st.integers(2, 60), st.integers(1, 5), st.integers(0, 3))
def test_powersgd_projects_and_is_exact_for_matrices_of_its_rank(rows, columns, rank, seed):
    compressor = PowerSGDCompressor(rank=rank, minimum_saving=1, seed=seed)
    matrix = drawn(rows, columns, seed=seed)
    found = round_trip(compressor, matrix)
    assert squared(matrix - found) <= squared(matrix) * (1 + 1e-5)
    low = drawn(rows, rank, seed=seed) @ drawn(rank, columns, seed=seed + 9)
    torch.testing.assert_close(round_trip(compressor, low), low, rtol=1e-3, atol=1e-3)


def test_powersgd_sends_small_tensors_unchanged():
    compressor = PowerSGDCompressor(rank=4)
    assert compressor.factor_sizes((1000,)) is None
    assert compressor.factor_sizes((10, 10)) is None
    assert compressor.factor_sizes((0, 100)) is None
    assert compressor.factor_sizes((8, 3, 3, 3)) is None
    assert compressor.factor_sizes((64, 16, 3, 3)) == (64, 144, 4)
    assert torch.equal(round_trip(compressor, drawn(10, 10)), drawn(10, 10))


def test_basis_of_zeros_and_of_dependent_columns_is_orthonormal():
    for matrix in (torch.zeros(7, 3), drawn(7, 1).repeat(1, 3), drawn(7, 3) * 1e-30):
        basis = orthonormal(matrix)
        torch.testing.assert_close(basis.t() @ basis, torch.eye(3), rtol=1e-5, atol=1e-5)


# --- payloads


@pytest.mark.parametrize("name", VECTORS)
@pytest.mark.parametrize("length", [1, 255, 257, 3000, 66_000, 200_001])
def test_a_server_decodes_with_numpy_what_torch_encoded(name, length):
    compressor, values = compressor_class(name)(), drawn(length)
    payload = compressor.compress(values, step=3, rank=1)
    assert payload.numel() == compressor.payload_bytes(values.shape)
    out = np.empty(length, np.float32)
    codecs.decode(compressor.codec, payload.numpy().data, out)
    np.testing.assert_allclose(out, compressor.decompress(payload, values.shape).numpy(), rtol=1e-6)


@pytest.mark.parametrize("name", ["fp16", "bf16", "topk"])
def test_torch_and_numpy_encode_to_the_same_bytes(name):
    compressor, values = compressor_class(name)(), drawn(70_000)
    kept = compressor.kept(70_000) if name == "topk" else 0
    assert bytes(compressor.compress(values).numpy()) == bytes(
        codecs.encode(compressor.codec, values.numpy(), kept=kept)
    )


def test_torch_and_numpy_pack_the_same_signs():
    values = drawn(5000)
    ours, theirs = (
        bytes(SignCompressor().compress(values).numpy()),
        bytes(codecs.encode(pb.CODEC_SIGN, values.numpy())),
    )
    np.testing.assert_allclose(
        np.frombuffer(ours, np.float32, 5), np.frombuffer(theirs, np.float32, 5), rtol=1e-6
    )
    assert ours[20:] == theirs[20:]


@pytest.mark.parametrize("name", VECTORS)
@pytest.mark.parametrize("alpha", [None, 1.0, -1.0])
def test_decompressed_gradients_can_be_added(name, alpha):
    compressor, values, before = compressor_class(name)(), drawn(3001), drawn(3001, seed=1)
    payload = compressor.compress(values)
    out = before.clone()
    compressor.decompress_into(payload, out, alpha=alpha)
    expected = compressor.decompress(payload, values.shape)
    torch.testing.assert_close(
        out, expected if alpha is None else before + alpha * expected, rtol=1e-5, atol=1e-5
    )


@pytest.mark.parametrize("name", compressor_names())
def test_equal_keys_give_equal_bits_and_the_input_is_unchanged(name):
    compressor, values = compressor_class(name)(seed=5), drawn(128, 64)
    once = compressor.compress(values, step=7, rank=2, bucket=1)
    assert torch.equal(once, compressor.compress(values, step=7, rank=2, bucket=1))
    assert torch.equal(values, drawn(128, 64))
    if name in ("int8", "randomk", "powersgd"):
        others = [{"step": 8}, {"rank": 3}, {"bucket": 2}]
        for changed in others:
            assert not torch.equal(
                once, compressor.compress(values, **{"step": 7, "rank": 2, "bucket": 1, **changed})
            )
        assert not torch.equal(
            once, compressor_class(name)(seed=6).compress(values, step=7, rank=2, bucket=1)
        )


def test_noise_is_uniform_and_leaves_torchs_generator_alone():
    torch.manual_seed(0)
    before = torch.random.get_rng_state()
    noise = KeyedRandom(1, 2, -1).noise16(200_001, torch.device("cpu")).double()
    assert noise.numel() == 200_001
    assert abs(float(noise.mean()) + 0.5) < 5 * 65536 / (12 * 200_001) ** 0.5
    assert (float(noise.min()), float(noise.max())) == (-32768, 32767)
    assert torch.equal(before, torch.random.get_rng_state())


@pytest.mark.parametrize("length", [1, 9, 1025, 5000, 140_000])
@pytest.mark.parametrize("name", VECTORS)
def test_general_operations_for_devices_give_the_same_result(monkeypatch, name, length):
    compressor, values = compressor_class(name)(), drawn(length)
    payload = compressor.compress(values)
    expected = compressor.decompress(payload, values.shape)
    monkeypatch.setattr(scratch, "in_host_memory", lambda device: False)
    torch.testing.assert_close(
        compressor.decompress(payload, values.shape), expected, rtol=1e-6, atol=0
    )
    again = compressor.compress(values)
    found = compressor.decompress(again, values.shape)
    if name == "int8":  # int8 draws other random numbers
        assert (found - values).abs().max() < values.abs().max() / 127 * 1.001
        assert torch.equal(again, compressor.compress(values))
    else:
        torch.testing.assert_close(found, expected, rtol=1e-6, atol=0)


# --- values that are not finite


@pytest.mark.parametrize("bad", [torch.nan, torch.inf, -torch.inf])
@pytest.mark.parametrize("name", compressor_names())
@pytest.mark.parametrize("size", [64, 320])
def test_non_finite_values_are_never_hidden(name, bad, size):
    for place in (0, 77, size * size - 1):
        values = drawn(size, size)
        values.view(-1)[place] = bad
        assert not round_trip(compressor_class(name)(), values).isfinite().all()


def test_float16_overflows_visibly_and_bfloat16_does_not():
    values = torch.tensor([1e30, -1e5, 1.0])
    assert torch.equal(
        round_trip(compressor_class("fp16")(), values), torch.tensor([torch.inf, -torch.inf, 1.0])
    )
    torch.testing.assert_close(
        round_trip(compressor_class("bf16")(), values), values, rtol=2**-8, atol=0
    )


# --- settings


def test_compression_is_a_name_a_mapping_or_a_compressor():
    assert parse_compression(None) is None
    assert parse_compression("int8") == Int8Compressor()
    assert parse_compression({"name": "topk", "ratio": 0.5, "seed": 3}) == TopKCompressor(
        ratio=0.5, seed=3
    )
    own = SignCompressor(error_feedback=False)
    assert parse_compression(own) is own
    assert [compressor_class(name).name for name in compressor_names()] == list(compressor_names())


def test_error_feedback_defaults_to_on_for_biased_compressors():
    on = {name for name in compressor_names() if compressor_class(name)().error_feedback}
    assert on == {"topk", "randomk", "sign", "powersgd"}


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (
            lambda: parse_compression("gzip"),
            "gradient_compression='gzip': expected one of fp16, bf16",
        ),
        (lambda: parse_compression({"ratio": 0.1}), "gradient_compression=None: expected one of"),
        (
            lambda: parse_compression({"name": "int8", "ratio": 0.1}),
            r"'int8' has no settings \['ratio'\]; its settings are: error_feedback, seed",
        ),
        (lambda: TopKCompressor(ratio=0), "topk: ratio=0; expected a fraction"),
        (lambda: RandomKCompressor(ratio=1.5), "randomk: ratio=1.5"),
        (lambda: TopKCompressor(ratio=float("nan")), "ratio=nan"),
        (lambda: PowerSGDCompressor(rank=0), "powersgd: rank=0"),
        (lambda: PowerSGDCompressor(minimum_saving=0.5), "minimum_saving=0.5"),
        (
            lambda: Int8Compressor().compress(torch.zeros(3, dtype=torch.float64)),
            "torch.float64 tensor of shape",
        ),
        (
            lambda: Int8Compressor().compress(torch.zeros(3, 4).t()),
            "expected float32 and contiguous",
        ),
    ],
)
def test_invalid_settings_are_refused(make, message):
    with pytest.raises(ConfigurationError, match=message):
        make()
