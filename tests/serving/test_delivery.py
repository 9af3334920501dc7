"""How results of compute threads get to the event loop, and how long everything waits for it."""

import asyncio
import threading
import time
from concurrent.futures import Future

import pytest
from serving_cases import run_async

from exitwise.serving.delivery import Delivery, LoopDelay


@run_async
async def test_results_of_a_batch_wake_the_loop_once() -> None:
    loop = asyncio.get_running_loop()
    delivery, woken = Delivery(loop), []
    wake = loop.call_soon_threadsafe
    loop.call_soon_threadsafe = lambda *call: (woken.append(1), wake(*call))[1]  # type: ignore[method-assign]
    sources: list[Future[int]] = [Future() for _ in range(20)]
    targets = [loop.create_future() for _ in sources]
    for source, target in zip(sources, targets, strict=True):
        delivery.connect(source, target)
    thread = threading.Thread(target=lambda: [source.set_result(k) for k, source in enumerate(sources)])
    thread.start()
    thread.join()  # the loop does not run meanwhile
    assert await asyncio.gather(*targets) == list(range(20))
    assert len(woken) == 1
    later: Future[int] = Future()
    target = loop.create_future()
    delivery.connect(later, target)
    later.set_result(7)
    assert (await target, len(woken)) == (7, 2)


@run_async
async def test_errors_and_cancelled_futures() -> None:
    loop = asyncio.get_running_loop()
    delivery = Delivery(loop)
    sources: list[Future[int]] = [Future() for _ in range(3)]
    targets = [loop.create_future() for _ in sources]
    for source, target in zip(sources, targets, strict=True):
        delivery.connect(source, target)
    targets[0].cancel()
    sources[0].set_result(1)
    sources[1].cancel()
    sources[2].set_exception(ValueError("no"))
    with pytest.raises(ValueError, match="no"):
        await targets[2]
    assert targets[0].cancelled()
    assert not targets[1].done()


@run_async
async def test_a_blocked_loop_has_a_delay_which_ends_with_the_requests() -> None:
    delay = LoopDelay()
    while delay.seconds < 0.005:
        delay.watch()
        time.sleep(0.05)
        await asyncio.sleep(0)
    while delay.seconds:  # nothing is watched any more
        await asyncio.sleep(0.01)
