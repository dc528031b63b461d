"""A partition applies each push completely and once per sequence number, or not at all."""

from __future__ import annotations

from contextlib import ExitStack
from datetime import timedelta

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from shoal_common.errors import (
    CorruptDataError,
    InvalidRequestError,
    PreconditionError,
    UnavailableError,
)
from shoal_common.formats import codecs
from shoal_ps_server.shard.reading import Copies, EncodedValues, Reading
from shoal_ps_server.shard.shard import Shard


def test_the_first_values_win(make) -> None:
    shard = make.shard(values=torch.ones(6))
    again = shard.initialize(make.upload(torch.zeros(6), sequence=0, base_version=0))
    assert (again.duplicate, again.version) == (True, 1)
    assert make.values(shard).tolist() == [1.0] * 6


def test_a_push_raises_the_version_and_reports_its_staleness(make) -> None:
    shard = make.shard()
    assert shard.push(make.upload(torch.ones(6), member="a")).version == 2
    late = shard.push(make.upload(torch.ones(6), member="b", base_version=1))
    assert (late.version, late.staleness, late.duplicate) == (3, 1, False)
    assert make.values(shard)[0] == -1.0


def test_a_repeated_push_is_acknowledged_and_not_applied(make) -> None:
    shard = make.shard()
    push = make.upload(torch.ones(6))
    shard.push(push)
    again = shard.push(push)
    assert (again.duplicate, again.version) == (True, 2)
    assert make.values(shard)[0] == -0.5
    summary = shard.summary("a")
    assert (summary.pushes_applied, summary.pushes_deduplicated, summary.sequences) == (
        1,
        1,
        {0: 1},
    )


def test_batch_pushed_by_a_dead_member_is_not_applied_again_by_its_next_holder(make) -> None:
    specs = make.spec(0), make.spec(1)
    shard = make.shard(*specs)
    # it died before it pushed to partition 1
    shard.push(make.upload(torch.ones(6), specs[0], member="dead", batch=7))
    there = shard.push(make.upload(torch.ones(6), specs[0], member="heir", batch=7))
    missing = shard.push(make.upload(torch.ones(6), specs[1], member="heir", batch=7))
    assert [(each.duplicate, each.version) for each in (there, missing)] == [(True, 2), (False, 2)]
    assert shard.summary("heir").sequences == {0: 1, 1: 1}
    assert not shard.push(
        make.upload(torch.ones(6), specs[0], member="heir", sequence=2, base_version=2, batch=8)
    ).duplicate


def test_repeated_old_push_does_not_hide_the_newer_batch(make) -> None:
    shard = make.shard()
    first = make.upload(torch.ones(6), batch=7)
    shard.push(first)
    shard.push(make.upload(torch.ones(6), sequence=2, base_version=2, batch=8))
    assert shard.push(first).duplicate
    assert shard.push(make.upload(torch.ones(6), member="heir", batch=8)).duplicate


@pytest.mark.parametrize(
    ("upload", "reason"),
    [
        ({"sequence": 3}, "SEQUENCE_GAP"),
        ({"base_version": 9}, "BASE_VERSION_AHEAD"),
        ({"digest": 1}, "CHECKSUM_MISMATCH"),
        ({"values": [0, 1, float("nan"), 3, 4, 5]}, "GRADIENT_NOT_FINITE"),
        ({"values": [0, 1, 2, 3, 4, float("-inf")]}, "GRADIENT_NOT_FINITE"),
    ],
)
def test_a_refused_push_changes_nothing_and_its_number_stays_free(make, upload, reason) -> None:
    shard = make.shard()
    values = upload.pop("values", torch.ones(6))
    with pytest.raises((PreconditionError, CorruptDataError, InvalidRequestError)) as caught:
        shard.push(make.upload(values, **upload))
    assert caught.value.reason == reason
    assert "'weight'" in str(caught.value)
    assert make.values(shard).tolist() == [0.0] * 6
    assert shard.summary("a").sequences == {}
    assert shard.push(make.upload(torch.ones(6))).version == 2


def test_error_names_the_first_non_finite_value(make) -> None:
    spec = make.spec(7, tensor="head", offset=100)
    shard = make.shard(spec)
    with pytest.raises(
        InvalidRequestError, match=r"partition 7 .*2 of 6 values .* element 103 of tensor 'head'"
    ):
        shard.push(make.upload([0, 0, 0, float("inf"), 0, float("nan")], spec))


def test_finite_values_whose_sum_overflows_are_accepted(make) -> None:
    shard = make.shard(optimizer=make.sgd(lr=0.0))
    assert shard.push(make.upload([3e38] * 6)).version == 2


def test_infinities_of_both_signs_do_not_cancel_out(make) -> None:
    with pytest.raises(InvalidRequestError):
        make.shard().push(make.upload([float("inf"), float("-inf"), 0, 0, 0, 0]))


def test_first_values_must_be_finite_too(make) -> None:
    shard = Shard()
    shard.adopt(make.layout())
    with pytest.raises(InvalidRequestError):
        shard.initialize(make.upload([float("nan")] * 6, sequence=0, base_version=0))
    assert shard.summary().versions == {0: 0}


def test_a_push_needs_values_and_an_optimizer(make) -> None:
    shard = Shard()
    shard.adopt(make.layout())
    with pytest.raises(PreconditionError) as caught:
        shard.push(make.upload(torch.ones(6)))
    assert caught.value.reason == "OPTIMIZER_UNCONFIGURED"
    shard.configure(make.sgd())
    with pytest.raises(PreconditionError) as caught:
        shard.push(make.upload(torch.ones(6)))
    assert caught.value.reason == "PARTITION_UNINITIALIZED"


def test_a_partition_without_elements_can_be_pushed_and_read(make) -> None:
    spec = make.spec(length=0)
    shard = make.shard(spec)
    assert shard.push(make.upload([], spec)).version == 2
    with shard.reading(0) as reading:
        assert (reading.version, reading.remaining, bytes(reading.take(10))) == (2, 0, b"")


def test_reading_shows_the_values_of_its_start_despite_later_pushes(make) -> None:
    shard = make.shard()
    with shard.reading(0) as early:
        first = bytes(early.take(8))
        shard.push(make.upload(torch.ones(6)))
        with shard.reading(0) as late:
            shard.push(make.upload(torch.ones(6), sequence=2, base_version=2))
            assert (early.version, late.version, shard.version(0)) == (1, 2, 3)
            assert first + bytes(early.take(100)) == bytes(24)
            assert (
                torch.frombuffer(bytearray(late.take(100)), dtype=torch.float32).tolist()
                == [-0.5] * 6
            )
    assert make.values(shard)[0] == -1.0


def test_slow_readers_of_one_version_share_one_copy(make) -> None:
    shard = make.shard()
    with ExitStack() as stack:
        readings = [stack.enter_context(shard.reading(0)) for _ in range(60)]
        for reading in readings:
            reading.take(4)
        shard.push(make.upload(torch.ones(6)))
        assert len({id(reading.rest.obj) for reading in readings}) == 1
        assert all(bytes(reading.take(100)) == bytes(20) for reading in readings)


def test_oldest_readers_are_ended_when_their_copies_become_too_many() -> None:
    values, copies = torch.zeros(6), Copies(limit=48)
    readings = []
    for version in (1, 2, 3):
        readings.append(Reading(values, version=version))
        copies.detach(values, readings[-1:])
        values += 1
    with pytest.raises(UnavailableError, match="pull again") as caught:
        readings[0].take(24)
    assert caught.value.reason == "PULL_TOO_SLOW"
    assert caught.value.retry_after == timedelta(seconds=1)
    for reading in readings[1:]:
        assert (
            torch.frombuffer(bytearray(reading.take(24)), dtype=torch.float32).tolist()
            == [reading.version - 1.0] * 6
        )
    # Both have read everything, so they no longer count.
    copies.detach(values, [fourth := Reading(values, version=4)])
    copies.detach(values, [fifth := Reading(values, version=5)])
    assert fourth.take(24).nbytes == fifth.take(24).nbytes == 24


def test_promised_part_of_a_reading_stays_readable_when_the_rest_is_given_up() -> None:
    values, copies = torch.arange(6.0), Copies(limit=24)
    reading = Reading(values, version=1)
    expected = bytes(reading.rest)
    reading.promise(16)
    first = bytes(reading.take(4))
    copies.detach(values, [reading])
    values += 1
    copies.detach(values, [later := Reading(values, version=2)])  # one copy too many
    values += 1
    assert later.remaining == 24
    assert first + bytes(reading.take(12)) == expected[:16]
    assert reading.remaining
    with pytest.raises(UnavailableError) as caught:
        reading.take(1)
    assert caught.value.reason == "PULL_TOO_SLOW"
    with pytest.raises(UnavailableError):
        reading.promise(1)


def test_a_reading_without_a_push_copies_nothing(make) -> None:
    shard = make.shard()
    with shard.reading(0) as reading:
        assert not reading.take(4).readonly
        assert reading.rest.nbytes == reading.remaining == 20


def test_stored_bytes_count_values_and_optimizer_state(make) -> None:
    shard = make.shard(optimizer=make.sgd(momentum=0.9))
    assert shard.summary().stored_bytes == 24
    shard.push(make.upload(torch.ones(6)))
    assert shard.summary().stored_bytes == 48


def test_forgotten_member_starts_over(make) -> None:
    shard = make.shard()
    shard.push(make.upload(torch.ones(6)))
    shard.forget(["a", "never seen"])
    assert shard.summary("a").sequences == {}


@settings(max_examples=60, deadline=None)
@given(st.data())
def test_pieces_may_be_split_anywhere(make, data) -> None:
    dtype = data.draw(st.sampled_from(["float32", "float64", "float16", "bfloat16"]))
    spec = make.spec(length=data.draw(st.integers(1, 40)), dtype=dtype)
    cuts = data.draw(st.lists(st.integers(0, spec.nbytes), max_size=8))
    values = torch.randn(spec.length, generator=torch.Generator().manual_seed(1)).to(
        spec.element.torch
    )
    shard = Shard()
    shard.adopt(make.layout(spec))
    shard.initialize(make.upload(values, spec, sequence=0, base_version=0, cuts=cuts))
    assert torch.equal(make.values(shard), values)


@settings(max_examples=60, deadline=None)
@given(st.lists(st.tuples(st.sampled_from("abc"), st.integers(0, 2), st.booleans()), max_size=30))
def test_retries_and_losses_have_the_effect_of_each_push_once(make, attempts) -> None:
    """Repeated pushes, pushes with gaps in their numbers and damaged pushes do not change the
    result of applying each push once."""
    shard = make.shard(optimizer=make.sgd(lr=1.0))
    sent: dict[str, int] = {}
    for member, back, damaged in attempts:
        sequence = max(1, sent.get(member, 0) + 1 - back)
        upload = make.upload(
            torch.full((6,), float(sequence)),
            member=member,
            sequence=sequence,
            digest=1 if damaged else None,
        )
        is_new = sequence > sent.get(member, 0)
        if damaged and is_new:
            with pytest.raises(CorruptDataError):
                shard.push(upload)
            continue
        assert shard.push(upload).duplicate is not is_new
        sent[member] = max(sent.get(member, 0), sequence)
        with pytest.raises(PreconditionError):
            shard.push(make.upload(torch.ones(6), member=member, sequence=sent[member] + 2))
    applied = sum(sum(range(1, last + 1)) for last in sent.values())
    assert make.values(shard).tolist() == [-float(applied)] * 6
    assert shard.summary().versions == {0: 1 + sum(sent.values())}


# --- compressed values


def random(length: int) -> torch.Tensor:
    return torch.randn(length, generator=torch.Generator().manual_seed(1))


def decoded(payload: memoryview, codec: int, length: int) -> torch.Tensor:
    out = np.empty(length, np.float32)
    codecs.decode(codec, payload, out)
    return torch.from_numpy(out)


@pytest.mark.parametrize("dtype", ["float32", "float64"])
@pytest.mark.parametrize("length", [1, 255, 257, 1000])
@pytest.mark.parametrize("codec", codecs.FOR_VALUES)
def test_values_in_a_codec_are_rounded_to_the_nearest_representable_one(
    make, codec: int, length: int, dtype: str
) -> None:
    values = random(length).to(getattr(torch, dtype))
    shard = make.shard(make.spec(length=length, dtype=dtype), values=values)
    with shard.reading(0, codec) as reading:
        payload = bytes(reading.rest)
    assert len(payload) == codecs.payload_bytes(codec, length)
    found = decoded(memoryview(payload), codec, length)
    if codec == codecs.INT8:
        block = torch.arange(length) // codecs.INT8_BLOCK
        largest = torch.zeros(int(block[-1]) + 1).scatter_reduce(
            0, block, values.float().abs(), "amax"
        )[block]
        assert bool(((found - values.float()).abs() <= largest / 127 * 0.5001).all())
    else:
        halves = torch.float16 if codec == codecs.FLOAT16 else torch.bfloat16
        assert torch.equal(found, values.float().to(halves).float())
    with shard.reading(0, codec) as again:
        assert bytes(again.rest) == payload


def test_zeros_and_the_smallest_values_are_zero_in_int8(make) -> None:
    shard = make.shard(
        make.spec(length=300), values=torch.cat([torch.zeros(256), torch.full((44,), 1e-40)])
    )
    with shard.reading(0, codecs.INT8) as reading:
        assert not decoded(reading.rest, codecs.INT8, 300).any()


@pytest.mark.parametrize(("codec", "fits"), [(codecs.FLOAT16, 65519.0), (codecs.BFLOAT16, 3.39e38)])
def test_values_that_would_become_infinite_are_refused(make, codec: int, fits: float) -> None:
    with make.shard(values=torch.full((6,), -fits)).reading(0, codec) as reading:
        assert bool(decoded(reading.rest, codec, 6).isfinite().all())
    beyond = 65520.0 if codec == codecs.FLOAT16 else 3.4e38
    shard = make.shard(values=torch.full((6,), beyond))
    with (
        pytest.raises(PreconditionError, match="pull them with another codec") as refusal,
        shard.reading(0, codec),
    ):
        pass
    assert refusal.value.reason == "VALUES_TOO_LARGE"


def test_readers_of_one_version_share_its_compressed_values_and_later_ones_get_new_ones(
    make,
) -> None:
    shard = make.shard(values=torch.ones(6))
    with (
        shard.reading(0, codecs.BFLOAT16) as one,
        shard.reading(0, codecs.BFLOAT16) as two,
        shard.reading(0, codecs.FLOAT16) as other,
    ):
        address = [np.frombuffer(each.rest, np.uint8).ctypes.data for each in (one, two, other)]
        assert address[0] == address[1] != address[2]
        one.take(4)
        shard.push(make.upload([2.0] * 6))
        assert decoded(two.take(12), codecs.BFLOAT16, 6).tolist() == [1.0] * 6
        with shard.reading(0, codecs.BFLOAT16) as later:
            assert (later.version, two.version) == (2, 1)
            assert decoded(later.rest, codecs.BFLOAT16, 6).tolist() == [0.0] * 6
        assert one.remaining == 8


def test_compressed_values_count_as_copies_while_they_are_read() -> None:
    copies, readings = Copies(limit=24), []
    for version in (1, 2):
        encoded = EncodedValues(torch.zeros(12, dtype=torch.uint8))
        readings += [encoded.read(copies, version=version) for _ in range(2)]
    readings[3].take(12)
    third = EncodedValues(torch.zeros(12, dtype=torch.uint8)).read(copies, version=3)
    for ended in readings[:2]:
        with pytest.raises(UnavailableError, match="read too slowly"):
            ended.take(1)
    assert (readings[2].take(12).nbytes, third.take(12).nbytes) == (12, 12)
    fourth = EncodedValues(torch.zeros(24, dtype=torch.uint8)).read(copies, version=4)
    assert fourth.take(24).nbytes == 24  # data that was read completely is released
