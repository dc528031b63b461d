"""Sums of compressed buckets over all ranks, the residuals that they leave, and when these are
committed."""

from __future__ import annotations

import pytest
import torch
from shoal_common.errors import ConfigurationError, CorruptDataError, PreconditionError
from shoal_worker.compression import CompressedReduction, compressor_class, compressor_names
from shoal_worker.compression.powersgd import PowerSGDCompressor
from shoal_worker.compression.sign import SignCompressor
from shoal_worker.compression.sparse import RandomKCompressor, TopKCompressor

from tests.unit.compression.lockstep import World, finish, reduce_together, reductions

NAMES = compressor_names()
WITH_FEEDBACK = ["topk", "randomk", "sign", "powersgd"]
SHAPES = [(40, 50), (7,), (30, 10, 3), (1,)]
NUMEL = 2908


def gradients(world: int, numel: int = NUMEL, seed: int = 0) -> list[torch.Tensor]:
    return [
        torch.randn(numel, generator=torch.Generator().manual_seed(100 * seed + rank)) / world
        for rank in range(world)
    ]


def made(name: str, **settings):
    return compressor_class(name)(
        **({"ratio": 0.05} if name in ("topk", "randomk") else {}) | settings
    )


def shapes_of(name: str, numel: int = NUMEL):
    return SHAPES if numel == NUMEL and name == "powersgd" else None


@pytest.mark.parametrize("world", [2, 3, 5])
@pytest.mark.parametrize("numel", [1, 3, 257, NUMEL, 9000])
@pytest.mark.parametrize("name", NAMES)
def test_every_rank_ends_with_the_same_bits_and_sent_the_bytes_of_the_formula(name, numel, world):
    compressor = made(name)
    ranks = reductions(compressor, world)
    for step in range(2):
        results, sent = reduce_together(
            ranks, gradients(world, numel, step), step=step, shapes=shapes_of(name, numel)
        )
        assert all(torch.equal(results[0], other) for other in results[1:])
        expected = compressor.wire_bytes(numel, world, shapes_of(name, numel))
        assert all(expected - 2 < rank.sent <= expected for rank in sent.ranks)
        assert ranks[0].wire_bytes(numel, world, shapes_of(name, numel)) == expected


def test_bytes_per_element_match_the_table():
    """The bytes per element equal those of the documented table, for one 64 MiB bucket over 4
    ranks. An uncompressed all-reduce sends 6 bytes per element."""
    numel = 16 << 20
    shapes = [(4096, 4096)]
    found = {
        name: round(compressor_class(name)().wire_bytes(numel, 4, shapes) / numel, 4)
        for name in NAMES
    }
    assert found == {
        "fp16": 3.0,
        "bf16": 3.0,
        "int8": 1.5234,
        "topk": 0.1802,
        "randomk": 0.06,
        "sign": 0.1934,
        "powersgd": 0.0117,
    }


@pytest.mark.parametrize(
    ("name", "tolerance"), [("fp16", 2**-10), ("bf16", 2**-7), ("int8", 2 / 127)]
)
def test_error_of_a_sum_is_the_rounding_of_the_parts_and_of_the_sum(name, tolerance):
    parts = gradients(4)
    results, _ = reduce_together(reductions(made(name), 4), parts)
    exact = torch.stack(parts).double().sum(0)
    largest = max(float(part.abs().max()) for part in parts)
    assert (results[0].double() - exact).abs().max() <= tolerance * (
        4 * largest + float(exact.abs().max())
    ) / 2


def test_half_precision_sums_are_computed_in_float32():
    """Sums of half-precision values are exact to the fraction. bfloat16 would lose the fraction of
    64 values of 1 + 1/128 at the first sum above 2."""
    world = 64
    results, _ = reduce_together(
        reductions(made("bf16"), world), [torch.full((256,), 1 + 1 / 128) for _ in range(world)]
    )
    assert torch.equal(results[0], torch.full((256,), 64.5))


@pytest.mark.parametrize("name", WITH_FEEDBACK)
def test_every_residual_is_eventually_sent(name):
    """Received sums and residuals add up to all gradients."""
    ranks, given, received = (
        reductions(made(name), 3),
        torch.zeros(NUMEL).double(),
        torch.zeros(NUMEL).double(),
    )
    for step in range(6):
        parts = gradients(3, seed=step)
        results, _ = reduce_together(ranks, parts, step=step, shapes=shapes_of(name))
        given += torch.stack(parts).double().sum(0)
        received += results[0].double()
    owed = sum(owed_by(rank) for rank in ranks)
    assert owed.abs().max() > 0.1
    torch.testing.assert_close(received + owed, given, rtol=0, atol=1e-5)


def owed_by(rank: CompressedReduction, numel: int = NUMEL) -> torch.Tensor:
    total = torch.zeros(numel).double()
    for name, tensor in rank.state_dict().items():
        slot, _, start = name.partition("/")[2].partition("@")
        at = int(start) if slot == "owned" else 0
        total[at : at + tensor.numel()] += tensor.double()
    return total


@pytest.mark.parametrize("name", ["fp16", "bf16", "int8"])
def test_unbiased_compressors_keep_no_state_by_default(name):
    ranks = reductions(made(name), 2)
    reduce_together(ranks, gradients(2))
    assert ranks[0].state_dict() == {}
    ranks = reductions(made(name, error_feedback=True), 2)
    reduce_together(ranks, gradients(2))
    assert ranks[0].state_dict().keys() == {"0/residual", "0/owned@0"}


def test_powersgd_is_exact_for_vectors_and_for_sums_of_its_rank():
    left, right = torch.randn(40, 2), torch.randn(2, 50)
    parts = [
        torch.cat([(share * left @ right).view(-1), torch.full((8,), share)])
        for share in (0.5, 0.2, 0.3)
    ]
    results, _ = reduce_together(
        reductions(PowerSGDCompressor(rank=2), 3), parts, shapes=[(40, 50), (8,)]
    )
    torch.testing.assert_close(results[0], torch.stack(parts).sum(0), rtol=1e-3, atol=1e-3)


def test_powersgd_with_a_warm_start_converges_to_a_constant_gradient():
    """With a warm start and without error feedback, powersgd approaches the best approximation of a
    constant matrix within a few steps."""
    matrix = torch.randn(60, 60, generator=torch.Generator().manual_seed(1))
    values = torch.linalg.svdvals(matrix)
    best = float(values[4:].square().sum())
    left = {}
    for warm in (True, False):
        ranks = reductions(PowerSGDCompressor(warm_start=warm, error_feedback=False), 2)
        for step in range(30):
            results, _ = reduce_together(
                ranks, [matrix.view(-1) / 2] * 2, step=step, shapes=[(60, 60)]
            )
        left[warm] = float((results[0].view(60, 60) - matrix).square().sum())
    assert left[True] < 1.01 * best
    assert left[False] > 1.1 * best


# --- lost steps


@pytest.mark.parametrize("name", NAMES)
def test_a_redo_gives_the_same_bits(name):
    ranks = reductions(made(name), 3)
    reduce_together(ranks, gradients(3), step=0, shapes=shapes_of(name))
    attempts = []
    for _ in range(2):
        results, _ = reduce_together(
            ranks, gradients(3, seed=1), step=1, shapes=shapes_of(name), commit=False
        )
        attempts.append(results[0])
        for rank in ranks:
            rank.rollback()
    assert torch.equal(*attempts)
    results, _ = reduce_together(ranks, gradients(3, seed=2), step=2, shapes=shapes_of(name))
    continued = reductions(made(name), 3)
    reduce_together(continued, gradients(3), step=0, shapes=shapes_of(name))
    expected, _ = reduce_together(continued, gradients(3, seed=2), step=2, shapes=shapes_of(name))
    assert torch.equal(results[0], expected[0])


@pytest.mark.parametrize("name", WITH_FEEDBACK)
def test_abandoned_step_leaves_no_trace(name):
    ranks = reductions(made(name), 2)
    reduce_together(ranks, gradients(2), shapes=shapes_of(name))
    before = [{key: tensor.clone() for key, tensor in rank.state_dict().items()} for rank in ranks]
    world = World(2)
    for rank, bucket, backend in zip(ranks, gradients(2, seed=1), world.ranks, strict=True):
        rank.start(bucket, backend, index=0, step=1, shapes=shapes_of(name))
    for rank, state in zip(ranks, before, strict=True):
        rank.rollback()
        assert rank.state_dict().keys() == state.keys()
        assert all(torch.equal(tensor, state[key]) for key, tensor in rank.state_dict().items())


def test_bucket_reduced_twice_in_a_step_continues_from_its_first_reduction():
    compressor = made("topk")
    twice, apart = reductions(compressor, 2), reductions(compressor, 2)
    for number in range(2):
        one, _ = reduce_together(twice, gradients(2, seed=number), commit=False)
        other, _ = reduce_together(apart, gradients(2, seed=number))
        assert torch.equal(one[0], other[0])
    for rank in twice:
        rank.commit()
    assert torch.equal(twice[1].state_dict()["0/residual"], apart[1].state_dict()["0/residual"])


class _LostGroup:
    rank, world_size = 0, 2

    def all_gather(self, output, tensor, *, async_op):
        return self

    def wait(self):
        raise ConnectionError("lost")


def test_failed_reduction_reports_it_when_asked_again():
    reduction = CompressedReduction(made("topk")).start(
        torch.randn(100), _LostGroup(), index=0, step=0
    )
    with pytest.raises(ConnectionError):
        reduction.wait()
    with pytest.raises(PreconditionError, match="roll back"):
        reduction.wait()


# --- values that are not finite


@pytest.mark.parametrize("bad", [torch.nan, torch.inf])
@pytest.mark.parametrize("name", NAMES)
def test_non_finite_values_on_one_rank_are_seen_by_all_and_not_kept(name, bad):
    ranks = reductions(made(name), 3)
    reduce_together(ranks, gradients(3), step=0, shapes=shapes_of(name))
    before = [owed_by(rank) for rank in ranks]
    parts = gradients(3, seed=1)
    parts[1][1234] = bad
    results, _ = reduce_together(ranks, parts, step=1, shapes=shapes_of(name))
    assert not any(result.isfinite().all() for result in results)
    assert all(torch.equal(owed_by(rank), owed) for rank, owed in zip(ranks, before, strict=True))
    results, _ = reduce_together(ranks, gradients(3, seed=2), step=2, shapes=shapes_of(name))
    assert all(result.isfinite().all() for result in results)


def test_non_finite_part_is_not_kept_if_the_result_was_never_received():
    """A rank commits a step whose result it never saw, because its peers may have applied it, but
    keeps no NaN of its own part as a residual."""
    ranks = reductions(made("sign"), 2)
    world = World(2)
    for rank, backend in zip(ranks, world.ranks, strict=True):
        rank.start(torch.full((100,), torch.nan), backend, index=0, step=0)
        rank.commit()
        assert rank.state_dict() == {}


# --- membership


def test_leaving_rank_takes_only_its_own_residual():
    """The loss of rank 2 of 3 loses only that rank's residuals. The other ranks keep theirs,
    although the parts of sums are assigned differently."""
    ranks = reductions(made("sign"), 3)
    reduce_together(ranks, gradients(3))
    survivors = ranks[:2]
    owed = sum(owed_by(rank) for rank in survivors)
    parts = gradients(2, seed=1)
    results, _ = reduce_together(survivors, parts, step=1)
    left = sum(owed_by(rank) for rank in survivors)
    torch.testing.assert_close(
        results[0].double() + left, torch.stack(parts).double().sum(0) + owed, rtol=0, atol=1e-5
    )


@pytest.mark.parametrize("name", NAMES)
def test_joining_rank_has_no_residual_and_agrees_with_the_others(name):
    ranks = reductions(made(name), 2)
    reduce_together(ranks, gradients(2), shapes=shapes_of(name))
    joiner = CompressedReduction(made(name))
    joiner.load_shared_state_dict(ranks[0].shared_state_dict())
    results, _ = reduce_together(
        [*ranks, joiner], gradients(3, seed=1), step=1, shapes=shapes_of(name)
    )
    assert all(torch.equal(results[0], other) for other in results)
    assert all(
        torch.equal(tensor, joiner.shared_state_dict()[key])
        for key, tensor in ranks[0].shared_state_dict().items()
    )


@pytest.mark.parametrize("name", NAMES)
def test_single_rank_compresses_nothing_and_applies_residuals(name):
    ranks = reductions(made(name), 2)
    reduce_together(ranks, gradients(2), shapes=shapes_of(name))
    alone, gradient = ranks[0], gradients(1, seed=1)[0]
    owed = owed_by(alone)
    paid = alone.start(gradient.clone(), None, index=0, step=1, shapes=shapes_of(name)).wait()
    torch.testing.assert_close(paid.double(), gradient.double() + owed, rtol=0, atol=1e-6)
    alone.commit()
    assert not owed_by(alone).any()
    again = alone.start(gradient.clone(), None, index=0, step=2).wait()
    assert torch.equal(again, gradient)


# --- state


@pytest.mark.parametrize("name", NAMES)
def test_saved_and_loaded_state_continues_bit_for_bit(name):
    ranks = reductions(made(name), 3)
    for step in range(3):
        reduce_together(ranks, gradients(3, seed=step), step=step, shapes=shapes_of(name))
    restored = reductions(made(name), 3)
    for new, old in zip(restored, ranks, strict=True):
        new.load_state_dict(old.state_dict())
        new.load_shared_state_dict(old.shared_state_dict())
    for step in range(3, 5):
        one, _ = reduce_together(ranks, gradients(3, seed=step), step=step, shapes=shapes_of(name))
        other, _ = reduce_together(
            restored, gradients(3, seed=step), step=step, shapes=shapes_of(name)
        )
        assert torch.equal(one[0], other[0])


@pytest.mark.parametrize("name", WITH_FEEDBACK)
def test_change_of_the_gradient_scale_between_steps_changes_nothing_else(name):
    plain, scaled = reductions(made(name), 2), reductions(made(name), 2)
    scale = 1.0
    for step in range(3):
        parts = gradients(2, seed=step)
        one, _ = reduce_together(plain, parts, step=step, shapes=shapes_of(name))
        other, _ = reduce_together(
            scaled, [part * scale for part in parts], step=step, shapes=shapes_of(name)
        )
        torch.testing.assert_close(other[0] / scale, one[0], rtol=1e-3, atol=1e-4)
        for rank in scaled:
            rank.rescale(0.5)
        scale *= 0.5


def test_foreign_state_is_refused_entirely():
    rank = reductions(made("sign"), 2)
    reduce_together(rank, gradients(2))
    before = rank[0].state_dict()
    for bad in (
        {"0/residual": torch.zeros(3), "0/other": torch.zeros(3)},
        {"x/residual": torch.zeros(3)},
        {"0/warm.0": torch.zeros(3)},
    ):
        with pytest.raises(CorruptDataError, match="named as in state_dict"):
            rank[0].load_state_dict(bad)
    with pytest.raises(CorruptDataError):
        rank[0].load_state_dict({"0/residual": torch.zeros(3, dtype=torch.int64)})
    assert rank[0].state_dict() == before


def test_bucket_of_a_new_size_has_no_residual():
    ranks = reductions(made("topk"), 2)
    reduce_together(ranks, gradients(2))
    fresh = reductions(made("topk"), 2)
    one, _ = reduce_together(ranks, gradients(2, 500))
    other, _ = reduce_together(fresh, gradients(2, 500))
    assert torch.equal(one[0], other[0])


# --- parts


@pytest.mark.parametrize("name", [name for name in NAMES if name != "powersgd"])
def test_a_reduce_scatter_leaves_each_rank_its_part_of_the_sum(name):
    compressor = made(name, ratio=1.0) if name in ("topk", "randomk") else made(name)
    ranks, world, given, received = (
        reductions(compressor, 3),
        World(3),
        torch.zeros(900).double(),
        torch.zeros(900).double(),
    )
    for step in range(3):
        parts = gradients(3, 900, seed=step)
        outs = [torch.empty(300) for _ in ranks]
        started = [
            one.start_scatter(part, out, backend, index=0, step=step)
            for one, part, out, backend in zip(ranks, parts, outs, world.ranks, strict=True)
        ]
        assert finish(started)[1] is outs[1]
        for one in ranks:
            one.commit()
        given += torch.stack(parts).double().sum(0)
        received += torch.cat(outs).double()
    assert world.ranks[0].sent == 3 * ranks[0].scatter_wire_bytes(900, 3)
    owed = sum(owed_by(rank, 900) for rank in ranks)
    torch.testing.assert_close(
        received + owed, given, rtol=0, atol=0.1 if name in ("bf16", "int8") else 1e-3
    )


@pytest.mark.parametrize("dtype", [torch.float64, torch.float16, torch.bfloat16])
def test_buckets_of_other_dtypes_are_sent_as_float32(dtype):
    parts = [part.to(dtype) for part in gradients(2)]
    results, _ = reduce_together(reductions(made("bf16"), 2), parts)
    assert results[0].dtype is dtype
    torch.testing.assert_close(
        results[0].float(), torch.stack(parts).float().sum(0), rtol=0.02, atol=0.02
    )


def test_concurrent_buckets_do_not_interfere():
    compressor = SignCompressor()
    together, apart = reductions(compressor, 2), reductions(compressor, 2)
    for step in range(2):
        buckets = [gradients(2, 500 + index, seed=10 * step + index) for index in range(3)]
        world = World(2)
        started = [
            [
                one.start(buckets[index][rank].clone(), world.ranks[rank], index=index, step=step)
                for index in range(3)
            ]
            for rank, one in enumerate(together)
        ]
        while not all(one.done for row in started for one in row):
            for row in started:
                for one in row:
                    one.advance()
        for one in together:
            one.commit()
        for index in range(3):
            expected, _ = reduce_together(apart, buckets[index], step=step, index=index)
            assert torch.equal(started[1][index].wait(), expected[0])


@pytest.mark.parametrize(
    ("start", "message"),
    [
        (
            lambda one, rank: one.start(torch.zeros(4, dtype=torch.int64), rank, index=0, step=0),
            "bucket of torch.int64",
        ),
        (
            lambda one, rank: one.start(torch.zeros(4, 4).t(), rank, index=0, step=0),
            "not contiguous",
        ),
        (
            lambda one, rank: one.start(torch.zeros(9), rank, index=0, step=0, shapes=[(2, 4)]),
            "have 8 elements in total, but the bucket has 9",
        ),
        (
            lambda one, rank: one.start_scatter(
                torch.zeros(8), torch.zeros(4), rank, index=0, step=0
            ),
            "powersgd does not support reduce-scatter",
        ),
        (
            lambda one, rank: CompressedReduction(RandomKCompressor()).start_scatter(
                torch.zeros(9), torch.zeros(4), rank, index=0, step=0
            ),
            "9 elements into 4 on 2 ranks",
        ),
    ],
)
def test_buckets_that_cannot_be_reduced_are_refused(start, message):
    with pytest.raises(ConfigurationError, match=message):
        start(CompressedReduction(PowerSGDCompressor()), World(2).ranks[0])


def test_an_empty_bucket_stays_empty():
    results, world = reduce_together(reductions(TopKCompressor(), 2), [torch.empty(0)] * 2)
    assert results[0].numel() == 0
    assert world.ranks[0].sent == 0 == TopKCompressor().wire_bytes(0, 2)
