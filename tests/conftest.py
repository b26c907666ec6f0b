"""What holds for every test: one intra-op thread, the Hypothesis profiles, no leaked threads, skips that say why.

And GPUs, for tests that run on real ones and on played ones.
"""

import gc
import logging
import signal
import threading
from collections import Counter
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from hypothesis import Phase, settings

from autosched.errors import RealGPUsError
from autosched.simulated_gpus import Hardware, playing
from tests.simulated_gpus.libraries import Libraries

# A sum's last bits depend on how many threads share it, and "equal to the serial run, bit for bit"
# is our first law. It also keeps the two test processes from fighting for two cores.
torch.set_num_threads(1)

Hardware.libraries_of = Libraries

COSTLY = "frontends", "parallel"  # folders
KEPT = 5  # of so many variants of a test that are not slow, one

# pytest attaches its handlers to loggers that do not propagate. With a handler, this one records
# each fake tensor with its stack, which takes a tenth of the time of a capture.
logging.getLogger("torch.__trace").propagate = True

# Before an accelerator is used, each torch.manual_seed formats the stack for these kinds of them.
# That takes longer than a small graph takes to run.
for _kind in (torch.cuda, torch.mtia, torch.xpu):
    _kind.traceback = SimpleNamespace(format_stack=list)

# No deadline: how long an example takes depends on the neighbours. Quick runs repeat themselves;
# deep ones search.
settings.register_profile("quick", max_examples=15, deadline=None, derandomize=True)
settings.register_profile("deep", max_examples=1000, deadline=None, print_blob=True)
# for tests/test_mutants.py, where a failure is no riddle and need not be made small.
settings.register_profile(
    "unshrunk",
    settings.get_profile("quick"),
    max_examples=25,
    phases=[Phase.explicit, Phase.generate],
)
settings.load_profile("quick")


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(config, items):
    """Leave most variants of costly tests to ``make soak``, where all tests are run.

    Each captures models anew, which takes most of a run's time. Whoever names files gets all.
    """
    if {Path(arg).name for arg in config.args} != {*config.getini("testpaths")}:
        return
    seen = Counter()
    for item in items:
        if (
            item.path.parent.name in COSTLY
            and hasattr(item, "callspec")
            and not item.get_closest_marker("slow")
        ):
            test = item.nodeid.partition("[")[0]
            if seen[test] % KEPT:
                item.add_marker(pytest.mark.slow)
            seen[test] += 1


def pytest_collection_finish(session):
    """Keep the garbage collector from visiting what stays until the end, and from coming often.

    Without the first it takes a large part of the time, without the second a twelfth.
    """
    gc.collect()
    gc.freeze()
    gc.set_threshold(10_000, 20, 50)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_call():
    """Skip tests on simulated GPUs where there are real ones."""
    try:
        return (yield)
    except RealGPUsError as error:
        pytest.skip(str(error))


@pytest.hookimpl(wrapper=True)
def pytest_fixture_setup():
    """Skip them also where a fixture simulates GPUs."""
    try:
        return (yield)
    except RealGPUsError as error:
        pytest.skip(str(error))


def pytest_runtest_setup(item):
    """Skip what this computer cannot run."""
    count = torch.accelerator.device_count() if torch.accelerator.is_available() else 0
    for marker, needed in (("cuda", 1), ("multigpu", 2)):
        if item.get_closest_marker(marker) and count < needed:
            pytest.skip(
                f"accelerators needed: {needed}, found: {count}; where they are, run: pytest -m {marker}"
            )


def _gpus(request, count):
    if request.param == "real":
        yield None
        torch.accelerator.synchronize()
        return
    with playing(count, seed=1) as played:
        played.eagerness = 0.0
        yield played


@pytest.fixture(params=["played", pytest.param("real", marks=pytest.mark.cuda)])
def gpu(request):
    """One GPU: played, which runs nothing before it has to, or real, which is None."""
    yield from _gpus(request, 1)


@pytest.fixture(params=["played", pytest.param("real", marks=pytest.mark.multigpu)])
def two_gpus(request):
    """Two GPUs, as above."""
    yield from _gpus(request, 2)


@pytest.fixture(scope="module")
def interruptible():
    """Raise KeyboardInterrupt for SIGINT, which a process that a shell starts in its background ignores."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


@pytest.fixture
def forgotten():
    """Let a test begin and end with nothing that torch compiled."""
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


@pytest.fixture(autouse=True)
def no_thread_leaks():
    """Fail a test after which threads of ours are alive that were not there before it."""
    before = set(threading.enumerate())
    yield
    # The thread that tries the compiler ends by itself, and is awaited by what needs its result.
    leaked = [
        t.name
        for t in threading.enumerate()
        if t not in before and t.name.startswith("autosched") and t.name != "autosched-isa"
    ]
    assert not leaked, f"threads outlive the test: {leaked}; close() the schedule"
