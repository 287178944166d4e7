"""Collectives of some ranks: threads and processes, ragged and empty tensors, lost peers."""

import random
import time

import pytest
import torch

from mllm_compile.compiler.errors import RunError
from mllm_compile.compiler.mesh import Mesh
from mllm_compile.runtime.groups import groups_of, members_of
from mllm_compile.runtime.launch import launch
from mllm_compile.runtime.local_transport import LocalTransport, run_threads
from mllm_compile.runtime.transport import PeerLostError
from tests import group_work


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("ranks", [(0,), (1, 0), (0, 1, 2), (3, 1, 0, 2)])
def test_collectives_between_threads(ranks: tuple[int, ...], seed: int) -> None:
    draw = random.Random(seed)

    def rank_main(transport: LocalTransport) -> group_work.Results | None:
        if transport.rank not in ranks:
            return None
        return group_work.run(transport.group(ranks), seed)

    results = run_threads(4, rank_main, delay=lambda: draw.random() * 1e-3)
    for place, rank in enumerate(ranks):
        found = results[rank]
        assert found is not None
        assert group_work.same(found, group_work.expected(place, len(ranks), seed))


def test_a_wrong_sum_would_show() -> None:
    right = group_work.expected(0, 3, 0)
    wrong = [[part + 1 for part in parts] for parts in right]
    assert group_work.same(right, right)
    assert not group_work.same(right, wrong)
    assert not group_work.same(right, wrong, exact=False)


@pytest.mark.parametrize("native", [False, True])
def test_collectives_between_processes(native: bool) -> None:
    """Overlapping groups, one with its ranks in another order; native sums in any order."""
    groups = [(0, 1, 2), (2, 0), (1, 2)]
    results = launch("tests.rank_targets:collectives", {"groups": groups, "native": native}, 3)
    for seed, ranks in enumerate(groups):
        for place, rank in enumerate(ranks):
            expected = group_work.expected(place, len(ranks), seed)
            assert group_work.same(results[rank][ranks], expected, exact=not native)
        for number, (kind, *_) in enumerate(group_work.calls(seed, len(ranks))):
            if kind in ("all_reduce", "max"):
                sums = [results[rank][ranks][number][0] for rank in ranks]
                assert all(torch.equal(total, sums[0]) for total in sums)


def test_collectives_do_not_disturb_transfers() -> None:
    """Receives and sends stay in their order, whatever collectives come between."""

    def rank_main(transport: LocalTransport) -> list[float]:
        other = 1 - transport.rank
        buffers = [torch.zeros(1) for _ in range(3)]
        handles = [transport.receive(buffer, other) for buffer in buffers]
        group = transport.group((0, 1))
        for number in range(3):
            group.all_reduce(torch.ones(2))
            handles.append(transport.send(torch.tensor([number + 10.0 * transport.rank]), other))
            group.all_gather(torch.ones(1), [[1], [1]])
        for handle in handles:
            handle.wait()
        return [float(buffer) for buffer in buffers]

    assert run_threads(2, rank_main) == [[10.0, 11.0, 12.0], [0.0, 1.0, 2.0]]


def test_a_collective_that_a_member_never_calls_is_a_deadlock() -> None:
    def rank_main(transport: LocalTransport) -> None:
        if transport.rank < 2:
            transport.group((0, 1, 2)).all_gather(torch.ones(2), [[2]] * 3)
        else:
            transport.receive(torch.zeros(1), 0).wait()

    said = r"deadlock: .*rank 1 waits to receive from rank 2 in all_gather of ranks 0, 1, 2"
    with pytest.raises(RunError, match=said):
        run_threads(3, rank_main)


def test_different_collectives_never_meet() -> None:
    def rank_main(transport: LocalTransport) -> None:
        group = transport.group((0, 1))
        if transport.rank == 0:
            group.all_gather(torch.ones(2), [[2], [2]])
        else:
            group.all_to_all([torch.ones(2), torch.ones(2)], [[2], [2]])

    said = r"deadlock: .*rank 0 .* in all_gather of ranks 0, 1.*rank 1 .* in all_to_all of ranks"
    with pytest.raises(RunError, match=said):
        run_threads(2, rank_main)


def test_a_shape_that_the_others_do_not_expect_is_refused() -> None:
    def rank_main(transport: LocalTransport) -> None:
        x = torch.ones(2 + transport.rank)
        transport.group((0, 1)).all_gather(x, [[2], [2]])

    with pytest.raises(RunError, match=r"transfer from rank 1 to 0: expected .*\[2\].*got .*\[3\]"):
        run_threads(2, rank_main)


def test_a_member_that_fails_ends_the_others() -> None:
    said: list[str] = []

    def rank_main(transport: LocalTransport) -> None:
        if transport.rank == 0:
            time.sleep(0.05)
            raise ValueError("broken")
        try:
            transport.group((0, 1)).all_reduce(torch.ones(4))
        except PeerLostError as error:
            said.append(str(error))
            raise

    with pytest.raises(ValueError, match="broken"):
        run_threads(2, rank_main)
    assert said == [
        "all_reduce of ranks 0, 1: stopped while it waited to receive from rank 0 in all_reduce of "
        "ranks 0, 1: broken"
    ]


def test_groups_along_the_axes_of_a_mesh() -> None:
    mesh = Mesh((4, 5, 6, 7, 0, 1, 2, 3), (2, 1, 2, 2))
    assert groups_of([mesh]) == {
        *((4, 6), (5, 7), (0, 2), (1, 3)),  # context
        *((4, 5), (6, 7), (0, 1), (2, 3)),  # tensor
    }

    def rank_main(transport: LocalTransport) -> dict[str, tuple[int, int, tuple[int, ...]]]:
        transport.connect(groups_of([mesh]))
        found = members_of(mesh, transport)
        return {name: (m.place, m.size, m.communicator.ranks) for name, m in found.items()}  # type: ignore[attr-defined]

    assert run_threads(8, rank_main)[6] == {"context": (1, 2, (4, 6)), "tensor": (0, 2, (6, 7))}
