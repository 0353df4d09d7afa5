import pytest
import torch

from autoshard.runtime.engine.ids.messages import (
    BufferSizes,
    Flag,
    Message,
    Received,
    header_size,
    message_size,
    packed,
)

LENGTHS = torch.tensor([2, 0, 1], dtype=torch.int32)


def message(*ids, dtype=torch.int64):
    return Message(LENGTHS, (2,), (torch.tensor(ids[:3], dtype=dtype), torch.tensor(ids[3:], dtype=dtype)))


def read(numbers, header, dtype):
    lengths_NB = numbers[:3].view(1, 3)
    counts = (int(lengths_NB.sum()), int(numbers[3]))
    return Received(lengths_NB, counts, Flag(int(numbers[4])), numbers[header:].view(dtype))


@pytest.mark.parametrize(("dtype", "first"), [(torch.int32, (1 << 31) - 1), (torch.int64, 1 << 40)])
@pytest.mark.parametrize("room", [0, 3, 5, 9])
def test_ids_come_with_the_lengths_or_after_them(room, dtype, first):
    sent = message(first, 7, 8, 9, 10, dtype=dtype)
    packs, sizes = packed([sent, sent], [5, room], Flag.MORE)
    header = header_size(len(LENGTHS) + len(sent.numbers))
    assert sizes == [message_size(header, 5, dtype), message_size(header, room, dtype)]
    assert header % 2 == 0
    came = read(packs[sizes[0] :], header, dtype)
    assert came.flag is Flag.MORE
    assert came.counts == (3, 2)
    assert torch.equal(came.lengths_NB[0], LENGTHS)
    assert torch.cat([came.ids_L, sent.rest(room)]).tolist() == [first, 7, 8, 9, 10]
    assert len(came.ids_L) == min(room, came.num_ids)


def test_both_ends_of_a_message_know_its_room():
    here, there = BufferSizes(2), BufferSizes(2)
    for num_ids in [100, 90, 400, 0, 0, 30]:
        here.adapt([5, num_ids], [5, 70])
        there.adapt([70, 1], [num_ids, 1])
        assert here.sent[1] == there.received[0]
        assert here.received[1] == there.sent[0]
        assert here.sent[1] >= num_ids


def test_rooms_grow_at_once_and_shrink_slowly():
    rooms = BufferSizes(1)
    assert rooms.flag([message(1, 2, 3, 4, 5)]) is Flag.MORE
    rooms.adapt([5], [5])
    assert rooms.flag([message(1, 2, 3, 4, 5)]) is Flag.WHOLE
    rooms.adapt([100_000], [5])
    large = rooms.sent[0]
    rooms.adapt([10], [5])
    assert large // 2 < rooms.sent[0] < large
    for _ in range(200):
        rooms.adapt([10], [5])
    assert rooms.sent[0] < 100
