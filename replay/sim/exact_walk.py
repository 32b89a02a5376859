"""RUNNING one by one, for steps in which a decoding request may go without its token.

That happens when a long prefill in front of it takes the whole budget, or when blocks are short
and the last of RUNNING is preempted. These steps cost as much as the scheduler's own.
"""

from typing import TYPE_CHECKING

from forebay.replay.sim.request import PREFILLING

if TYPE_CHECKING:
    from forebay.replay.sim.planning import Planner


def walk_running(books: "Planner", step: int, now: float, cap: int) -> int:
    """Give RUNNING its tokens of `step` in order, preempting from the end where blocks are short.

    Returns the budget that is left. Sums go to `books.work`, and who is late or starved is noted.
    """
    cohort, pool, work = books.cohort, books.pool, books.work
    block_size = books.block_size
    phase_now = step % block_size
    budget = books.limits.max_num_batched_tokens
    order = list(books.running)
    index = 0
    while index < len(order) and budget > 0:
        request = order[index]
        index += 1
        decodes = request.phase != PREFILLING
        if decodes:
            count = 1
            blocks = 1 if request.phase == phase_now else 0
        else:
            before = request.computed
            count = request.tokens - before
            if 0 < cap < count:
                count = cap
            count = min(count, budget)
            blocks = -(-(before + count) // block_size) - -(-before // block_size)
        while blocks > pool.free and order[-1] is not request:
            books.preempt(step, now)
            order.pop()
        if blocks > pool.free:
            books.preempt(step, now)
            order.pop()
            break
        if not decodes:
            books.compute(request, count)
        else:
            pool.allocate(blocks)
            work.tokens += 1
            work.sequences += 1
            work.sampled += 1
            work.decode_context += request.offset + step
            if request.gap_from >= 0:
                books.late.append(request)
        budget -= count
    books.starved = [one for one in order[index:] if one.phase != PREFILLING]
    for request in books.starved:
        books.hold_up(request, now)
        cohort.starve(request)
    return budget
