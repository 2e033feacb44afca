"""What ranks hold for one another: what the option allows, and the same for any number of microbatches; and when they
waited for one another."""

from __future__ import annotations

import pytest
import torch.distributed as dist

from slimpipe.mailbox import Mailbox
from slimpipe.program import Instruction
from tests.distributed.parity import Case, make_batch, make_schedule, run_step
from tests.distributed.test_memory import EXCHANGE, LAYERS_PER_STAGE, Setting


def measure_exchange(p: int, n: int, v: int, m: int, max_slices: int) -> dict[str, float]:
    """Runs on every rank: a step without and one with exchange."""
    setting = Setting(p, n, v, m, exchange=EXCHANGE | {"exchange_max_slices": max_slices})
    setting.step()
    alone = setting.schedule.metrics()
    most_sends = 0
    send = Mailbox.send

    def noted_send(self, *args):
        nonlocal most_sends
        send(self, *args)
        most_sends = max(most_sends, sum(buffer.nbytes for sends in self._sends.values() for _, buffer in sends))

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Mailbox, "send", noted_send)
        setting.step()
    record, program = setting.schedule.record, setting.schedule.program
    assert program.transfers
    row = 2 * 64 * 4  # bytes of K and V of one token in one layer, float32, and of their gradients
    setting.schedule.close()
    return {
        "units": record.peak_live_units - alone["peak_live_units"],
        "more": setting.schedule.metrics()["peak_live_bytes"] - alone["peak_live_bytes"],
        "carry": record.peak_carry_bytes - alone["carry_bytes"],
        "held": record.peak_held_bytes,
        "planned": program.peak_held_rows(setting.rank) * LAYERS_PER_STAGE * 2 * row,
        "bound": max_slices * (setting.seq_len // n) * v * LAYERS_PER_STAGE * 2 * row,
        "sends": most_sends,
    }


@pytest.mark.parametrize(("p", "n", "v"), [(2, 8, 1), (4, 8, 1), (3, 6, 2)])
def test_exchange_holds_what_its_option_allows(rank_pool, p: int, n: int, v: int) -> None:
    by_slices = {s: rank_pool(p).run(measure_exchange, p, n, v, 2, s, timeout=60) for s in (0, 1, 16)}
    for max_slices, results in by_slices.items():
        for rank, result in enumerate(results):
            what = f"rank {rank}, exchange_max_slices {max_slices}: {result}"
            assert result["units"] == 0, what
            assert result["carry"] <= 0, what
            assert result["held"] <= result["planned"] <= result["bound"], what
            assert 0 <= result["more"] <= result["held"], what
    assert all(result["held"] == 0 for result in by_slices[0])
    assert any(result["held"] for result in by_slices[1])
    held = [sum(result["held"] for result in results) for results in by_slices.values()]
    assert held == sorted(held)


def test_exchange_does_not_grow_with_microbatches(rank_pool) -> None:
    two, four, eight = (rank_pool(4).run(measure_exchange, 4, 8, 1, m, 16, timeout=100) for m in (2, 4, 8))
    for rank, (a, b, c) in enumerate(zip(two, four, eight, strict=True)):
        assert a["held"] == b["held"] == c["held"], f"rank {rank}: {a}, {b}, {c}"
        # With two microbatches the most is held for others when the own units are fewest.
        for name in ("more", "sends"):
            assert b[name] == c[name], f"rank {rank}, {name}: {b} with 4 microbatches, {c} with 8"


def timed_instructions(case: Case) -> tuple[list[tuple[Instruction, float, float]], list[Instruction], float]:
    """Runs on every rank: (instruction, seconds, of these waited) of a step with exchange; the program; all waiting."""
    schedule, _ = make_schedule(case, record_times=True, context_exchange="on", exchange_granularity=1)
    for _ in range(2):
        run_step(schedule, case, make_batch(case, 1))
    record, program = schedule.record, schedule.program
    schedule.close()
    times = [(time.instruction, time.end - time.start, time.waited) for time in record.times]
    return times, list(program.instructions[dist.get_rank()]), record.exchange_wait_seconds


def test_waiting_for_one_another_counts_as_waiting(rank_pool) -> None:
    results = rank_pool(3).run(timed_instructions, Case(p=3, n=3, m=1), timeout=60)
    for times, instructions, waited in results:
        assert [instruction for instruction, _, _ in times] == instructions
        assert all(0 <= its_wait <= seconds for _, seconds, its_wait in times)
        assert 0 < waited <= sum(its_wait for _, _, its_wait in times)
    assert any(instruction.op.name.startswith("HELP") for times, _, _ in results for instruction, _, _ in times)


def bytes_where_nothing_moves() -> list[int]:
    """Runs on every rank: live bytes at their peak, step by step, with a link too slow for any exchange."""
    rates = {"attention_flops": 1e15, "link_bandwidth": 1.0, "link_latency": 1.0}
    setting = Setting(2, 4, 1, 1, exchange={"context_exchange": "auto", **rates})
    peaks = []
    for _ in range(3):
        setting.step()
        peaks.append(setting.schedule.metrics()["peak_live_bytes"])
    assert not setting.schedule.program.transfers
    setting.schedule.close()
    return peaks


def test_what_moves_nothing_is_counted_once(rank_pool) -> None:
    for first, second, third in rank_pool(2).run(bytes_where_nothing_moves, timeout=60):
        assert first == second == third
