"""Deliberate bugs: each is planted in a copy of the package, and a test there must fail.

    python tests/mutants.py              plant each, run the test that should catch it, print a table
    python tests/mutants.py --all        run all tests that are not slow against each, print which fail
    python tests/mutants.py --list       print what there is

Names of mutants, or parts of them, choose some.
"""

from __future__ import annotations

import argparse
import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).resolve().parent.parent
SECONDS = 120.0  # a test that takes longer has caught nothing


@dataclass(frozen=True)
class Mutant:
    """A bug: text that stands once in a module, what comes in its place, and the test that must see it."""

    name: str
    module: str
    old: str
    new: str
    caught_by: str


class Outcome(NamedTuple):
    """The tests that failed, the first one first, and how long it took."""

    failed: list[str]
    seconds: float


def mutated(mutant: Mutant) -> str:
    """Return the module's source with the bug in it."""
    source = (ROOT / mutant.module).read_text(encoding="utf-8")
    count = source.count(mutant.old)
    assert count == 1, (
        f"mutant {mutant.name!r} replaces text that must stand once in {mutant.module}, and stands there {count} times:"
        f"\n{mutant.old}\nIf the code has moved, let tests/mutants.py follow it."
    )
    return source.replace(mutant.old, mutant.new)


def run(mutant: Mutant, everything: bool = False) -> Outcome:
    """Plant a bug in a copy of the repository, and run its test there, or all."""
    with tempfile.TemporaryDirectory() as folder:
        copy = Path(folder) / "copy"
        shutil.copytree(
            ROOT, copy, ignore=shutil.ignore_patterns(".*", "__pycache__", "*.egg-info")
        )
        (copy / mutant.module).write_text(mutated(mutant), encoding="utf-8")
        start = time.perf_counter()
        one = ["-x", "--hypothesis-profile=unshrunk", mutant.caught_by]
        tests = ["tests", "--ignore=tests/test_mutants.py"] if everything else one
        failed = _failures(copy, tests, 20 * SECONDS if everything else SECONDS)
        return Outcome(failed, time.perf_counter() - start)


def _failures(folder: Path, tests: Iterable[str], seconds: float) -> list[str]:
    """Return the names of the tests that fail in a folder; none if they take too long."""
    options = ["-q", "-p", "no:cacheprovider", "-m", "not slow", "-rf"]
    try:
        ended = subprocess.run(
            [sys.executable, "-m", "pytest", *options, *tests],
            cwd=folder,  # which comes first on the path, so the copy is imported
            # Inductor takes from its cache what correct code has compiled, and so would hide a bug.
            env={
                **os.environ,
                "PYTHONDONTWRITEBYTECODE": "1",
                "TORCHINDUCTOR_CACHE_DIR": str(folder.parent / "cache"),
            },
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=seconds,
            check=False,
        )
    except subprocess.TimeoutExpired:
        return []
    return list(dict.fromkeys(re.findall(r"^FAILED (\S+?\.py::\w+)", ended.stdout, re.MULTILINE)))


HEADER = "| deliberate bug | in | caught by | seconds |\n| --- | --- | --- | --: |"


def row(mutant: Mutant, outcome: Outcome) -> str:
    """Return a line of the table, which is Markdown."""
    caught = (
        ", ".join(f"`{test.removeprefix('tests/')}`" for test in outcome.failed) or "**nothing**"
    )
    module = mutant.module.removeprefix("autosched/")
    return f"| {mutant.name} | `{module}` | {caught} | {outcome.seconds:.0f} |"


def main() -> int:
    """Return how the command line ends: 1 if a bug survives."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "names", nargs="*", help="words of the mutants' names; default: all mutants"
    )
    parser.add_argument(
        "--all", action="store_true", help="run all tests that are not slow against each"
    )
    parser.add_argument("--list", action="store_true", help="print what there is")
    chosen = parser.parse_args()
    mutants = [
        mutant
        for mutant in MUTANTS
        if not chosen.names or any(name in mutant.name for name in chosen.names)
    ]
    if chosen.list:
        print("\n".join(f"{mutant.module}: {mutant.name}" for mutant in mutants))
        return 0
    print(HEADER)
    survived = False
    for mutant in mutants:
        outcome = run(mutant, chosen.all)
        print(row(mutant, outcome), flush=True)
        survived = survived or not outcome.failed
    return int(survived)


LOWERING = "autosched/lowering"
LAWS = "tests/laws/test_laws.py"
PERIODS = "tests/simulation/test_periods.py"
OBJECTIVE = "tests/scheduling/test_objective.py"
SERIAL = f"{LAWS}::test_law_1_a_scheduled_run_equals_the_serial_run_at_once"
INTERLEAVED = (
    f"{LAWS}::test_law_1_a_scheduled_run_equals_the_serial_run_in_every_legal_interleaving"
)
EMULATED = f"{LAWS}::test_law_1_a_scheduled_run_equals_the_serial_run_emulated"
TIMELINE = f"{LAWS}::test_law_5_threads_that_are_switched_between_any_two_steps_give_the_timeline_of_the_simulator"
LEFT = f"{LAWS}::test_law_7_a_run_ends_with_nothing_in_memory_but_what_is_kept"
NEEDLESS = f"{LAWS}::test_law_2_nothing_can_be_left_out"
REFERENCE = "tests/laws/test_necessary.py::test_verify_refuses_exactly_what_the_reference_refuses"
CLOCKS = "tests/laws/test_teeth.py::test_vector_clocks_know_what_happens_before_what_in_any_list"
LOOPS = "tests/laws/test_loops.py"
NCCL = "tests/gpu/test_nccl.py"
RANKS = "autosched/runtime/ranks"
FAILURES = "tests/runtime/ranks/test_failures.py"
CARRIED = f"{LOOPS}::test_every_loop_is_proved_and_needs_each_carried_wait"
TURNS = f"{LOOPS}::test_runs_in_any_interleaving_do_what_they_do_one_after_another"
LOOP_REFERENCE = f"{LOOPS}::test_verify_refuses_exactly_the_loops_that_the_reference_refuses"
GENERATED_LOOPS = (
    "tests/gpu/test_generated_loops.py"
    "::test_the_code_of_a_loop_does_what_runs_one_after_another_do_on_played_gpus"
)
ACCESSES = (
    "tests/graph/test_regions.py::test_accesses_order_what_conflicts_directly_or_through_others"
)
LISTING = "tests/policies/test_listing.py"
FLIGHT = "tests/runtime/in_flight"
PLANS = f"{LISTING}::test_a_plan_keeps_to_what_data_and_streams_allow"
FORGETFUL = f"{LISTING}::test_plans_that_forget_gaps_are_plans"
ISSUED = "tests/simulation/test_issuing.py"
PROMISED = f"{LISTING}::test_a_program_ends_when_its_plan_says_or_earlier"
RETURNED = f"{LISTING}::test_a_plan_ends_when_what_was_written_is_back"
TAILS = f"{LISTING}::test_no_plan_ends_before_the_best_that_follows_any_of_its_tasks"
WISHES = f"{LISTING}::test_copies_in_any_order_needless_or_impossible_ones_among_them_lower_to_a_program_that_verifies"

REPLAY = "autosched/runtime/replay"
CUDA_GRAPHS = f"{REPLAY}/cuda_graphs.py"
STATE = "tests/runtime/replay/test_recording_state.py"
RIVALS = "tests/benchmarks/test_gpu_benchmark.py"

MUTANTS = (
    Mutant(
        "a copy does not wait for the task that wrote what it copies",
        f"{LOWERING}/hazards.py",
        "        found = self._access(i, stream, source, region, False)\n",
        "        found = self._access(i, stream, source, region, False)[:1]\n",
        SERIAL,
    ),
    Mutant(
        "a write does not wait for readers",
        f"{LOWERING}/hazards.py",
        "        return [buffer.maker, *writers, *readers]",
        "        return [buffer.maker, *writers]",
        SERIAL,
    ),
    Mutant(
        "a copy home does not wait for readers of the caller's tensor",
        f"{LOWERING}/hazards.py",
        "            found += self._access(i, stream, target, region, True)\n",
        "            self._access(i, stream, target, region, True)\n",
        EMULATED,
    ),
    Mutant(
        "a reader of a view does not wait for the task that makes the view",
        "autosched/program/residency.py",
        "made.append(self._new(value, version, device, i, base))",
        "made.append(self._new(value, version, device, -1 if base else i, base))",
        SERIAL,
    ),
    Mutant(
        "after= is forgotten",
        f"{LOWERING}/hazards.py",
        'if d.kind == "order"]',
        'if d.kind == "never"]',
        "tests/laws/test_bugs.py::test_random_tasks_kept_no_order_where_the_second_also_wrote_what_the_first_read",
    ),
    Mutant(
        "memory is freed under the version of a view of it",
        "autosched/program/residency.py",
        "                changed.version = new\n",
        "                changed.block.version = new\n",
        "tests/lowering/test_lowering.py::test_memory_is_freed_under_the_version_of_the_value_that_owns_it",
    ),
    Mutant(
        "waits are asked for in the order of issue, not the latest first",
        f"{LOWERING}/events.py",
        "range(o.after_at[i + 1] - 1, o.after_at[i] - 1, -1)",
        "range(o.after_at[i], o.after_at[i + 1])",
        NEEDLESS,
    ),
    Mutant(
        "a record stands before the run it is for",
        f"{LOWERING}/events.py",
        'np.searchsorted(self.at, self.producers, side="right")',
        "np.searchsorted(self.at, self.producers)",
        SERIAL,
    ),
    Mutant(
        "a free waits for the last use alone",
        f"{LOWERING}/frees.py",
        "    for k in range(o.uses_at[block], o.uses_at[block + 1]):\n",
        "    for k in range(o.uses_at[block + 1] - 1, o.uses_at[block + 1]):\n",
        "tests/lowering/test_lowering.py::test_memory_goes_back_at_the_first_place_where_that_costs_no_wait",
    ),
    Mutant(
        "what is proved at once may be freed while it is used",
        "autosched/verification/functional.py",
        "        if not is_earlier(p, s, c, s.use[k], p.own[i]):\n            return False\n        k = s.earlier[k]",
        "        k = s.earlier[k]",
        "tests/verification/test_functional.py::test_what_is_proved_at_once_is_what_is_proved_step_by_step",
    ),
    Mutant(
        "what is lowered at once is copied where it is made, not where the policy says",
        f"{LOWERING}/functional.py",
        "np.minimum(after[self.copies], latest)",
        "-1",
        "tests/verification/test_functional.py::test_a_copy_goes_where_the_placement_says",
    ),
    Mutant(
        "a copy on two streams lets no memory of the second go",
        f"{LOWERING}/events.py",
        "        if also >= 0:\n            free_due(o, h, c, also, i)\n",
        "",
        "tests/lowering/test_lowering.py::test_memory_goes_back_at_the_first_place_where_that_costs_no_wait",
    ),
    Mutant(
        "an event right behind the last use is overlooked, and recorded again",
        f"{LOWERING}/ending.py",
        "bisect_left(records, (position,))",
        "bisect_left(records, (position + 1,))",
        "tests/lowering/test_lowering.py::test_no_two_events_are_recorded_at_one_moment",
    ),
    Mutant(
        "the copy home of what was written once is left out",
        f"{LOWERING}/copies.py",
        "        if last := graph.last_version(value.index):",
        "        if (last := graph.last_version(value.index)) > 1:",
        SERIAL,
    ),
    Mutant(
        "what was read from a file is spilled, and not read again",
        f"{LOWERING}/spill.py",
        "            is_storage(other) or all(",
        "            all(",
        "tests/lowering/test_storage.py::test_what_was_dropped_is_read_again_and_never_spilled",
    ),
    Mutant(
        "a file that changed since the graph was made is read nevertheless",
        "autosched/graph/files.py",
        "if size != self.size:",
        "if size < self.size:",
        "tests/graph/test_files.py::test_a_file_that_changed_is_noticed_and_may_come_back",
    ),
    Mutant(
        "streams are chosen by edges that others imply, too",
        f"{LOWERING}/streams.py",
        "            elif not reach[u] >> v - u & 1:",
        "            elif v not in reduced[u]:",
        "tests/lowering/test_lowering.py::test_waits_on_one_device_are_as_few_as_nimble_proves_possible",
    ),
    Mutant(
        "verify does not look at readers",
        "autosched/verification/verifier.py",
        "        for before in readers:",
        "        for before in ():",
        REFERENCE,
    ),
    Mutant(
        "verify lets a free race with those who only read",
        "autosched/verification/verifier.py",
        "        block.uses[self.own] = self.at\n\n    def _missing",
        "        if writes:\n            block.uses[self.own] = self.at\n\n    def _missing",
        REFERENCE,
    ),
    Mutant(
        "verify takes views to be there from the start",
        "autosched/verification/verifier.py",
        "(base, self.at)",
        "(base, _GIVEN)",
        REFERENCE,
    ),
    Mutant(
        "verify takes memory that was freed to be there",
        "autosched/verification/verifier.py",
        '        if block.freed:\n            self._fail("presence"',
        '        if block.freed and writes:\n            self._fail("presence"',
        REFERENCE,
    ),
    Mutant(
        "verify takes what a copy home overwrote to be there still",
        "autosched/verification/verifier.py",
        "            self._empty(block, copy)\n",
        "",
        "tests/verification/test_verify.py::test_a_program_that_breaks_a_law_of_writes_is_refused_and_told_why",
    ),
    Mutant(
        "verify takes views of overwritten memory to hold what they did",
        "autosched/verification/verifier.py",
        "self.graph.members(self.graph.value(copy.value).index):",
        "[self.graph.value(copy.value).index]:",
        "tests/verification/test_written_memory.py::test_what_is_copied_over_the_callers_memory_replaces_the_views_of_it",
    ),
    Mutant(
        "verify takes a copy of a view to change with its base",
        "autosched/verification/verifier.py",
        "if held is not None and held[0] not in written and not held[0].freed:",
        "if not self:",
        "tests/verification/test_written_memory.py::test_a_view_in_memory_of_its_own_does_not_change_with_its_base",
    ),
    Mutant(
        "verify does not ask whether a part was overwritten too early",
        "autosched/verification/verifier.py",
        ".index > task.index:",
        ".index < 0:",
        "tests/verification/test_verify.py"
        "::test_a_view_is_made_before_a_later_task_overwrites_its_memory",
    ),
    Mutant(
        "a wait does not pass on what its event was behind",
        "autosched/program/vector_clocks.py",
        "        clock = maximum(self.clock[own], seen)\n",
        "        clock = list(self.clock[own])\n",
        CLOCKS,
    ),
    Mutant(
        "an event forgets the last run or copy before it",
        "autosched/program/vector_clocks.py",
        "        return own, self.count[own], self.clock[own]\n\n    def wait_for",
        "        return own, self.count[own] - 1, self.clock[own]\n\n    def wait_for",
        CLOCKS,
    ),
    Mutant(
        "a copy orders only the first of its two streams",
        "autosched/program/vector_clocks.py",
        "            self.clock[own] = self.clock[also] = tuple(both)",
        "            self.clock[own] = tuple(both)",
        CLOCKS,
    ),
    Mutant(
        "of writes that came early only the next one is remembered",
        "autosched/program/residency.py",
        "        while version in early:",
        "        if version in early:",
        "tests/program/test_residency.py::test_a_value_has_the_first_version_whose_write_has_not_come",
    ),
    Mutant(
        "a value is said to be there though a part of it came early",
        "autosched/program/residency.py",
        "if self._early and (value, device) in self._early:",
        "if not self:",
        "tests/program/test_residency.py::test_a_value_has_the_first_version_whose_write_has_not_come",
    ),
    Mutant(
        "a write covers all parts that it overlaps",
        "autosched/graph/regions.py",
        "            if region.covers(other):",
        "            if region.overlaps(other):",
        ACCESSES,
    ),
    Mutant(
        "every other row and every third are taken to be apart",
        "autosched/graph/regions.py",
        "step = math.gcd(a[2], b[2])",
        "step = max(a[2], b[2])",
        "tests/graph/test_regions.py::test_these_may_overlap",
    ),
    Mutant(
        "a search for parts overlooks those that begin before",
        "autosched/graph/regions.py",
        "(low - self._longest[axis],)",
        "(low,)",
        "tests/graph/test_regions.py::test_an_index_finds_all_that_overlaps",
    ),
    Mutant(
        "a thread is let go before the event is recorded",
        "autosched/runtime/compiler.py",
        "tape.add(thread, i, backend.record(stream, event), *handshakes.record(event))",
        "tape.add(thread, i, *handshakes.record(event), backend.record(stream, event))",
        TIMELINE,
    ),
    Mutant(
        "of the threads that wait for an event only one does",
        "autosched/runtime/compiler.py",
        "and (event, thread) not in held\n",
        "and event not in self.waiting\n",
        INTERLEAVED,
    ),
    Mutant(
        "a copy does not hold up the second of its streams",
        "autosched/runtime/compiler.py",
        "        self.tape.add(others[0], i, arrived.release, done.acquire)",
        "        self.tape.add(others[0], i, arrived.release)",
        TIMELINE,
    ),
    Mutant(
        "a thread enters a stream once, and stays there",
        "autosched/runtime/compiler.py",
        "if current.get(thread) != streams:",
        "if thread not in current:",
        f"{LAWS}::test_law_8_what_is_put_on_streams_finds_them_entered_by_its_thread",
    ),
    Mutant(
        "tensors stay after a run",
        "autosched/runtime/execute.py",
        "    memory.clear()\n",
        "",
        "tests/runtime/test_execute.py::test_a_run_leaves_nothing_of_it_behind",
    ),
    Mutant(
        "a free that goes with its run leaves views behind",
        "autosched/runtime/compiler.py",
        "return slots[0] if len(slots) == 1 else 0",
        "return slots[0]",
        LEFT,
    ),
    Mutant(
        "a copy home leaves the caller's tensor as it was",
        "autosched/runtime/memory.py",
        "transfer(data[source], data[target] if copy.overwrite else None)",
        "transfer(data[source], None)",
        SERIAL,
    ),
    Mutant(
        "views stay when their memory goes",
        "autosched/runtime/memory.py",
        "self.freed[step.at] = self.sharing[slots[step.reads[0]]]",
        "self.freed[step.at] = [slots[step.reads[0]]]",
        LEFT,
    ),
    Mutant(
        "the first fault is overwritten by its echoes",
        "autosched/runtime/threads/thread_team.py",
        "            if not self.stopped or (interrupt and self.fault is not None and not self._interrupted):",
        "            if fault is not None:",
        "tests/runtime/test_faults.py::test_the_first_fault_is_told_of_and_not_what_fails_behind_it",
    ),
    Mutant(
        "the locks of a run that failed stay open",
        "autosched/runtime/threads/thread_team.py",
        "                lock.acquire(blocking=False)",
        "                pass",
        "tests/runtime/test_faults.py::test_a_lock_to_which_nobody_came_in_a_run_that_failed_is_locked_again",
    ),
    Mutant(
        "a thread goes on after another one's fault",
        "autosched/runtime/threads/draining.py",
        "            if run.stopped:\n                return\n            if not",
        "            if not",
        f"{LAWS}::test_law_6_a_failing_task_is_named_and_what_depends_on_it_does_not_run",
    ),
    Mutant(
        "what a task returns too late stays in memory",
        "autosched/runtime/threads/thread_team.py",
        "                    late()\n",
        "                    pass\n",
        "tests/runtime/test_faults.py::test_what_a_task_returns_after_it_was_let_go_goes_nowhere",
    ),
    Mutant(
        "a declared write excuses writes of other parts",
        "autosched/runtime/check.py",
        "other.root == root and other.region.overlaps(part) for",
        "other.root == root for",
        "tests/runtime/test_check.py::test_a_task_that_writes_another_part_than_it_declared_is_found_out",
    ),
    Mutant(
        "a task is accused of random numbers that one beside it drew",
        "autosched/runtime/check.py",
        "        suspects = [watch.task, *watch.concurrent]",
        "        suspects = [watch.task]",
        "tests/runtime/test_check.py::test_a_task_is_not_accused_of_random_numbers_that_one_beside_it_draws_and_declares",
    ),
    Mutant(
        "at the end a wait is left out that only a left out one implied",
        f"{LOWERING}/ending.py",
        "any(implied[other] >= implied[user] for",
        "any(user in implied[other] for",
        "tests/laws/test_bugs.py::test_at_the_end_no_wait_is_left_out_that_only_a_left_out_one_implied",
    ),
    Mutant(
        "what is kept together goes apart",
        "autosched/placement.py",
        "        for bond in graph.bonds(task) if graph.kept_together else ():\n            yield",
        "        for bond in ():\n            yield",
        "tests/test_placement.py::test_makers_and_writers_of_what_is_kept_together_share_a_device",
    ),
    Mutant(
        "code runs copies of the functions whose text it has",
        "autosched/runtime/inline.py",
        "        module.update(code.means)\n",
        "",
        "tests/runtime/test_inline.py::test_functions_keep_their_own_globals",
    ),
    Mutant(
        "lists among arguments are those of the run before",
        "autosched/runtime/memory.py",
        'if not isinstance(tree, tuple) and not hasattr(fn, "_schema"):',
        "if False:",
        "tests/runtime/test_execute.py::test_lists_and_dicts_among_arguments_are_fresh_in_every_run",
    ),
    Mutant(
        "a guard does not look at tensors",
        "autosched/frontends/guards.py",
        "        if grads is None:",
        "        grads = grads or {}\n        if False:",
        "tests/frontends/test_guards.py::test_what_is_baked_in_is_guarded",
    ),
    Mutant(
        "a guard that has seen a call takes any tensors for those of that call",
        "autosched/frontends/guards.py",
        "return grads if self._are_alike(given) else None",
        "return grads",
        "tests/frontends/test_unsuspected_changes.py::test_what_changes_unsuspected_is_noticed",
    ),
    Mutant(
        "a guard that has seen a call does not look for hooks",
        "autosched/frontends/guards.py",
        "without_grad=missing, bare=True)",
        "without_grad=missing, bare=False)",
        "tests/frontends/test_unsuspected_changes.py::test_a_hook_on_a_parameter_is_noticed",
    ),
    Mutant(
        "guards of torch do not look for gradients",
        "autosched/_lib/tensor_guards.py",
        "            if name in without_grad:",
        "            if False:",
        "tests/frontends/test_unsuspected_changes.py::test_a_gradient_from_elsewhere_is_noticed",
    ),
    Mutant(
        "compiled code does not compare strides",
        "autosched/_lib/tensor_check.cpp",
        "impl->strides() != c10::IntArrayRef(kind.strides)",
        "false",
        "tests/runtime/test_known.py::test_inputs_that_changed_are_not_recognized",
    ),
    Mutant(
        "compiled code takes sizes for fields that code of Python returns",
        "autosched/_lib/tensor_check.cpp",
        "!PyUnicode_Check(name) || !fields_of(impl).are_true()",
        "!PyUnicode_Check(name)",
        "tests/_lib/test_tensor_guards.py::test_tensors_of_any_kind_are_compared_or_refused",
    ),
    Mutant(
        "compilers that hang are killed without the processes that they started",
        "autosched/_lib/extension.py",
        "os.killpg(process.pid, signal.SIGKILL)",
        "process.kill()",
        "tests/_lib/test_tensor_guards.py::test_a_compiler_that_hangs_is_killed_with_its_processes",
    ),
    Mutant(
        "a thread that waits actively keeps the global lock",
        "autosched/_lib/adaptive_lock.cpp",
        """      Py_BEGIN_ALLOW_THREADS
      has_lock = acquired_actively(self->lock, active);
      if (has_lock) await_global_lock();
      Py_END_ALLOW_THREADS
""",
        "    has_lock = acquired_actively(self->lock, active);\n",
        "tests/_lib/test_adaptive_lock.py::test_others_execute_python_while_a_thread_waits",
    ),
    Mutant(
        "a wait with a limit waits actively beyond it",
        "autosched/_lib/adaptive_lock.cpp",
        "is_limited ? std::min(self->active, Seconds(timeout)) : self->active",
        "self->active",
        "tests/_lib/test_adaptive_lock.py::test_a_wait_ends_in_time",
    ),
    Mutant(
        "inputs that were checked before may share memory with those that are written",
        "autosched/runtime/memory.py",
        "[name for name in self._names if name in self._used] if",
        "[] if",
        "tests/runtime/test_known.py::test_memory_that_is_shared_later_is_found_on_the_cpu",
    ),
    Mutant(
        "any object that says it is a tensor is read as one",
        "autosched/_lib/native_check.py",
        'sys.modules["torch"].Tensor not in type(item).__mro__',
        'not isinstance(item, sys.modules["torch"].Tensor)',
        "tests/_lib/test_tensor_guards.py::test_what_is_no_tensor_is_not_read",
    ),
    Mutant(
        "dicts that were written are taken for the same",
        "autosched/frontends/reachability.py",
        "        if versions != self._versions:\n",
        "        if False:\n",
        "tests/frontends/test_unsuspected_changes.py::test_what_changes_unsuspected_is_noticed",
    ),
    Mutant(
        "known inputs are recognized at other addresses",
        "autosched/runtime/known.py",
        "are_alike = recognizer(inputs, fixed)",
        "are_alike = recognizer(inputs)",
        "tests/runtime/test_known.py::test_inputs_that_changed_are_not_recognized",
    ),
    Mutant(
        "known inputs are recognized with other shapes and strides",
        "autosched/runtime/known.py",
        "        if not self._are_alike(inputs):",
        "        if False:",
        "tests/runtime/test_known.py::test_inputs_that_changed_are_not_recognized",
    ),
    Mutant(
        "inputs that move may share memory with those that stay",
        "autosched/runtime/known.py",
        "bisect_right(self._ends, first) == bisect_left(self._firsts, end)",
        "True",
        "tests/runtime/test_known.py::test_memory_that_is_shared_later_is_found_on_the_cpu",
    ),
    Mutant(
        "an operator is called by what returns something else",
        "autosched/frontends/public_functions.py",
        "if once.done and _same(result, once.result):",
        "if once.done:",
        "tests/frontends/test_public_functions.py::test_an_operator_is_spelled_as_people_do",
    ),
    Mutant(
        "a capture is used where a setting of an optimizer leads to another path",
        "autosched/frontends/settings.py",
        "                if all(evaluated(item, values) is result for item, result in conditions):\n",
        "                if True:\n",
        "tests/frontends/test_settings.py::test_each_branch_that_depends_on_a_setting_is_a_capture",
    ),
    Mutant(
        "torch computes constants of a trace with NaN for symbols",
        "autosched/_lib/fake_tensors.py",
        "        self._forget_constants((args, kwargs))\n",
        "",
        "tests/frontends/test_settings.py"
        "::test_a_number_is_not_computed_from_constants_of_the_trace",
    ),
    Mutant(
        "methods of a compiled module return the module that is not compiled",
        "autosched/frontends/modules.py",
        "        return self if result is self.fn else result\n",
        "        return result\n",
        "tests/frontends/test_modules.py::test_its_state_is_that_of_the_module",
    ),
    Mutant(
        "tensors that a step leaves in attributes are forgotten",
        "autosched/frontends/state.py",
        "                dict(self.modules[key].named_modules())[path].__dict__[name] = tensor\n",
        "                pass\n",
        "tests/frontends/test_ordinary.py::test_tensors_in_attributes_of_modules_are_state",
    ),
    Mutant(
        "a merged task forgets what had to come first",
        "autosched/coarsening/merging.py",
        'for task in tasks for d in task.dependencies if d.kind == "order"\n',
        "for task in tasks[:0] for d in task.dependencies\n",
        "tests/frontends/test_granularity.py::test_who_comes_after_a_view_comes_after_what_it_is_a_view_of",
    ),
    Mutant(
        "ranks start sums in the order in which gradients are there",
        "autosched/parallel/all_reduce.py",
        "after=list(islice(started, 1))",
        "after=list(islice(started, 0))",
        "tests/parallel/test_all_reduce_hosts.py"
        "::test_ranks_start_sums_in_one_order_and_wait_only_for_those_that_have_started",
    ),
    Mutant(
        "a sum over ranks is waited for that will never end",
        "autosched/runtime/ranks/reducing.py",
        "        self._ended.set()\n",
        "        pass\n",
        "tests/runtime/ranks/test_reducing.py"
        "::test_a_sum_that_gloo_never_ends_is_given_up_when_the_wire_is_lost",
    ),
    Mutant(
        "each share of a batch weighs the same",
        "autosched/parallel/training.py",
        "size / rows if self.averages else 1.0",
        "0.5 if self.averages else 1.0",
        "tests/parallel/test_data_parallel.py::test_uneven_batches_and_such_with_fewer_rows_than_devices",
    ),
    Mutant(
        "of micro-batches only the last one counts",
        "autosched/parallel/template.py",
        "graph.add(torch.Tensor.add_, total,",
        "graph.add(torch.Tensor.copy_, total,",
        "tests/parallel/test_data_parallel.py::test_gradients_of_micro_batches_are_added_up_before_they_are_summed",
    ),
    Mutant(
        "micro-batches do not find what those before them left",
        "autosched/parallel/step_graph.py",
        "        self.buffers[replica].update((name, one.output(name)) for name in template.places)\n",
        "",
        "tests/parallel/test_data_parallel.py::test_micro_batches_find_what_those_before_them_left",
    ),
    Mutant(
        "a replica does not see that the model was changed",
        "autosched/parallel/step.py",
        "return same and self.version == source._version",
        "return same",
        "tests/parallel/test_data_parallel.py::test_replicas_follow_what_is_changed_by_hand",
    ),
    Mutant(
        "replicas go on with buffers of their own",
        "autosched/parallel/step_graph.py",
        "        self._broadcast_buffers()\n",
        "",
        "tests/parallel/test_data_parallel.py::test_replicas_begin_each_step_with_the_buffers_of_the_first",
    ),
    Mutant(
        "gradients of weights are waited for where they are added up",
        "autosched/parallel/micro_batch.py",
        'if task.origin.phase == "backward" and not task.view]',
        "if not task.view]",
        "tests/parallel/test_pipeline.py::test_in_zero_bubble_gradients_of_weights_are_apart_in_all_micro_batches",
    ),
    Mutant(
        "what a forward changes is read again for backward",
        "autosched/parallel/rewrite.py",
        "is_fixed or reads_changed or ",
        "is_fixed or ",
        "tests/parallel/test_pipeline.py::test_unusual_models_are_trained_too",
    ),
    Mutant(
        "an included task forgets what had to come first",
        "autosched/graph/including.py",
        'for d in task.dependencies if d.kind == "order")',
        "for d in ())",
        "tests/graph/test_including.py::test_tasks_on_the_host_stay_there_and_the_order_of_tasks_too",
    ),
    Mutant(
        "a task is put into a gap that is too short",
        "autosched/policies/base/kernels.py",
        "        while begin < limit and begin + seconds > ends[gap]:",
        "        while begin < limit and begin > ends[gap]:",
        PLANS,
    ),
    Mutant(
        "a gap that is cut in two begins too early behind the cut",
        "autosched/policies/base/kernels.py",
        "        s.begins[base + gap + 1] = finish\n",
        "        s.begins[base + gap + 1] = start\n",
        PLANS,
    ),
    Mutant(
        "the gap at hand is not moved up when the earliest is forgotten",
        "autosched/policies/base/kernels.py",
        "            count = count - 1\n            gap = gap - 1\n",
        "            count = count - 1\n",
        FORGETFUL,
    ),
    Mutant(
        "copies into a device do not queue in plans",
        "autosched/policies/base/kernels.py",
        "begin = in_next\n",
        "begin = begin + 0.0\n",
        PROMISED,
    ),
    Mutant(
        "issuing a task keeps no thread busy in plans",
        "autosched/policies/base/kernels.py",
        "    if commit:\n        s.issued[0] = issued\n    return max(ready, issued)\n",
        "    return max(ready, issued)\n",
        PROMISED,
    ),
    Mutant(
        "a thread issues a wait before another has issued the record",
        "autosched/simulation/issuing.py",
        "clock = max(clock, self.issued[instruction.ago].get(instruction.event, 0.0))",
        "clock = max(clock, 0.0)",
        f"{ISSUED}::test_a_stream_that_waits_for_the_cpu_delays_no_other",
    ),
    Mutant(
        "one thread is taken to issue all even where some tasks may run on a CPU",
        "autosched/bounds/host.py",
        " and not possible[:, on_cpu].any():",
        ":",
        f"{ISSUED}::test_the_bound_knows_that_a_cpu_issues_nothing_and_that_streams_behind_it_have_threads",
    ),
    Mutant(
        "auto tries all streams alone",
        "autosched/policies/candidates.py",
        "        limits.append(most)\n",
        "        pass\n",
        f"{ISSUED}::test_many_small_kernels_take_no_less_than_issuing_them_and_auto_is_content_with_one_stream",
    ),
    Mutant(
        "what is written comes home in no time",
        "autosched/policies/base/kernels.py",
        "    return max(end, go_home(t, device, finish, s))\n",
        "    return end\n",
        RETURNED,
    ),
    Mutant(
        "what follows a task is taken to travel",
        "autosched/policies/base/rank_kernels.py",
        "max(table[base + p], min(far, column[p]))",
        "max(table[base + p], far)",
        TAILS,
    ),
    Mutant(
        "a task is moved in the list behind one that needs it",
        "autosched/policies/local_search/annealing.py",
        "w.position[w.after[i]] - 1)",
        "w.position[w.after[i]])",
        PLANS,
    ),
    Mutant(
        "a graph turned round keeps the numbers of its groups",
        "autosched/problem.py",
        "group=n - 1 - self.group[::-1]",
        "group=self.group",
        f"{LISTING}::test_turned_round_a_graph_has_the_same_groups",
    ),
    Mutant(
        "the best plan is put in the order of its starts whatever that does",
        "autosched/policies/local_search/annealer.py",
        "if sorted_by_start.makespan <= best.makespan:",
        "if True:",
        f"{LISTING}::test_the_best_keeps_its_order_where_that_of_its_starts_would_end_later",
    ),
    Mutant(
        "copies of a plan are told in the order in which they were planned",
        "autosched/policies/base/listing.py",
        "copies[by_begin], begins[by_begin]",
        "copies, begins",
        PLANS,
    ),
    Mutant(
        "a copy leaves before it is made if the placement says so",
        "autosched/lowering/copies.py",
        "before = max(self.made[use], min(after, self.current - 1)), rank",
        "before = min(after, self.current - 1), rank",
        f"{LISTING}::test_a_copy_leaves_after_it_is_made_whatever_the_placement_says",
    ),
    Mutant(
        "a copy leaves behind who needs it if the placement says so",
        "autosched/lowering/copies.py",
        "before = max(self.made[use], min(after, self.current - 1)), rank",
        "before = max(self.made[use], after), rank",
        "tests/lowering/test_lowering.py"
        "::test_a_copy_that_is_wished_for_after_its_reader_is_before_it",
    ),
    Mutant(
        "a receive tells nothing of sends",
        "autosched/lowering/events.py",
        "            wait_for(c, own, o.own[ended], h.position[ended], h.clocks, ended * c.width)",
        "            pass",
        "tests/laws/test_ranks.py::test_memory_that_was_sent_is_freed_when_the_answer_has_come",
    ),
    Mutant(
        "the end of a send tells of its receive",
        "autosched/program/vector_clocks.py",
        "        return sent, received\n",
        "        self.wait_for(sender, received)\n        return sent, received\n",
        "tests/laws/test_ranks.py::test_clocks_know_exactly_what_happens_before_what",
    ),
    Mutant(
        "over arrays the end of a send tells of its receive",
        "autosched/verification/functional.py",
        "    wait_for(c, other, own, s.position[i], c.clocks, own * c.width)",
        "    advance(c, own, other)",
        "tests/verification/test_ranks.py::test_a_sender_learns_nothing_of_its_receiver",
    ),
    Mutant(
        "a copy on the way leaves before its source has arrived",
        "autosched/lowering/copies.py",
        "place = max(before, self.copied.get((use, copy.source), (-1, -1)))",
        "place = before",
        "tests/lowering/test_ranks.py::test_a_copy_on_the_way_waits_for_a_late_one_to_its_source",
    ),
    Mutant(
        "tasks that nothing needs are tasks of their own between regions",
        "autosched/fusion/candidates.py",
        "if not task.reads and not graph.users[task.index]:",
        "if False:",
        "tests/fusion/test_candidates.py"
        "::test_a_task_that_nothing_needs_joins_the_region_before_it",
    ),
    Mutant(
        "a task runs again after another one has written what it reads",
        "autosched/fusion/candidates.py",
        "any(use.version != graph.last_version(use.value) for use in task.reads)",
        "False",
        "tests/fusion/test_candidates.py"
        "::test_a_task_is_not_run_again_if_its_results_or_its_place_would_change",
    ),
    Mutant(
        "the calling thread computes its stream with all intra-op threads",
        "autosched/runtime/backends/threads.py",
        "torch.set_num_threads(self._intra_op_threads)",
        "pass",
        "tests/runtime/backends/test_backends.py"
        "::test_threads_share_out_the_intra_op_threads_and_leave_the_callers_alone",
    ),
    Mutant(
        "autocast of the calling thread applies to its stream",
        "autosched/runtime/backends/threads.py",
        "if torch._C._is_any_autocast_enabled():",
        "if False:",
        "tests/runtime/backends/test_backends.py"
        "::test_a_mode_of_the_calling_thread_applies_to_no_stream",
    ),
    Mutant(
        "under a profiler the calling thread executes its stream",
        "autosched/runtime/execute.py",
        "            if None in tape.steps:",
        "            if False:",
        "tests/viz/test_perfetto.py::test_the_calling_threads_own_stream_is_seen_as_it_runs",
    ),
    Mutant(
        "what several ranks do alike is fused with what one of them does",
        "autosched/fusion/candidates.py",
        "if reason is None and task.name in graph.alike:",
        "if False:",
        "tests/fusion/test_fusing.py"
        "::test_a_task_that_cannot_be_fused_is_none_with_its_views_either",
    ),
    Mutant(
        "a task that is not fused is compiled with its views",
        "autosched/fusion/fusing.py",
        "if any(task.name in self.reasons for task in composite.tasks):",
        "if False:",
        "tests/fusion/test_fusing.py"
        "::test_a_task_that_cannot_be_fused_is_none_with_its_views_either",
    ),
    Mutant(
        "an emulated rank draws what another one has left",
        f"{RANKS}/generators.py",
        "torch.set_rng_state(self._states.get(rank, self._begin))",
        "pass",
        "tests/parallel/test_random_hosts.py::test_each_rank_draws_as_its_own_process_does_that_is_seeded_alike",
    ),
    Mutant(
        "tasks that share state may be on two ranks",
        "autosched/placement.py",
        "            yield first.setdefault(id(item), task.index), task.index",
        "            pass",
        "tests/laws/test_ranks.py::test_tasks_with_shared_state_are_on_one_rank",
    ),
    Mutant(
        "what a GPU reads arrives in memory that is not page-locked",
        f"{RANKS}/accelerators.py",
        "        pinned = (half.value, half.version) in self.onward\n",
        "        pinned = False\n",
        "tests/runtime/ranks/test_gpus.py"
        "::test_what_a_gpu_reads_arrives_in_the_same_page_locked_memory_in_every_run",
    ),
    Mutant(
        "NCCL is used between two devices on one GPU",
        "autosched/machine/sharing.py",
        "            if (host, gpu) in users:\n",
        "            if False:\n",
        "tests/machine/test_sharing.py"
        "::test_copies_go_by_way_of_the_hosts_where_nccl_cannot_be_used",
    ),
    Mutant(
        "several threads issue copies over NCCL",
        f"{RANKS}/accelerators.py",
        "            return _ISSUING if stream in self.streams else str(stream)\n",
        "            return str(stream)\n",
        f"{NCCL}::test_ranks_in_a_ring_send_and_receive_at_once",
    ),
    Mutant(
        "a GPU sends and receives over one communicator",
        f"{RANKS}/nccl.py",
        "Channel(number, ",
        "Channel(number // 2, ",
        f"{NCCL}::test_no_gpu_sends_and_receives_over_one_communicator",
    ),
    Mutant(
        "a communicator joins GPUs that exchange nothing",
        f"{RANKS}/nccl.py",
        "*(part for part in same if not part.isdisjoint(arc))",
        "*same",
        f"{NCCL}::test_no_gpu_sends_and_receives_over_one_communicator",
    ),
    Mutant(
        "a communicator that was made when the wire was lost is not aborted",
        f"{RANKS}/nccl.py",
        "                self._made[channel].abort()\n",
        "",
        f"{NCCL}::test_a_rank_that_fails_before_it_makes_communicators_keeps_no_other_waiting",
    ),
    Mutant(
        "a run over NCCL is on another wire than its copies between hosts",
        f"{RANKS}/accelerators.py",
        "self.direct.begin(self.exchanges.wire)",
        "self.direct.begin(self.session.wire())",
        f"{NCCL}::test_a_wire_that_is_lost_at_once_is_not_replaced_within_the_run",
    ),
    Mutant(
        "a group of torch keeps its own handling of errors",
        f"{RANKS}/nccl.py",
        "        with _set(_SETTINGS):\n",
        "        with _set({}):\n",
        "tests/gpu/test_nccl_groups.py::test_an_end_of_a_communicator_is_a_group_of_torch",
    ),
    Mutant(
        "a rank waits for communicators that nobody makes",
        f"{RANKS}/direct.py",
        "and not (errors or self.is_lost)",
        "and not errors",
        f"{NCCL}::test_a_rank_that_fails_before_it_makes_communicators_keeps_no_other_waiting",
    ),
    Mutant(
        "a process makes the communicators of its GPUs one after another",
        f"{RANKS}/direct.py",
        "            thread.start()\n",
        "            thread.run()\n",
        f"{NCCL}::test_two_gpus_of_a_process_may_be_in_one_communicator",
    ),
    Mutant(
        "a rank that cannot make communicators tells nobody",
        f"{RANKS}/direct.py",
        '            self.session.give_up("rank", why)\n            raise RankError',
        "            raise RankError",
        f"{NCCL}::test_a_rank_that_cannot_make_communicators_tells_the_others",
    ),
    Mutant(
        "a colour of NCCL does not say who sends",
        f"{RANKS}/wire.py",
        "    return 2 * bit + (source >> bit & 1)",
        "    return 2 * bit",
        "tests/runtime/ranks/test_wire.py::test_no_rank_sends_and_receives_in_one_colour",
    ),
    Mutant(
        "a rank waits for values of other shapes before it has sent what follows",
        f"{RANKS}/exchange.py",
        "            self.late = self._change(value)\n",
        "            self.started = self._change(value)\n",
        "tests/runtime/ranks/test_exchange.py::"
        "test_only_the_end_of_a_run_waits_for_values_of_other_shapes",
    ),
    Mutant(
        "the sender of a copy follows its receiver from run to run",
        "autosched/lowering/carried.py",
        "divided(instructions, ranks)",
        "divided(instructions, {})",
        "tests/laws/test_ranks.py::"
        "test_runs_in_flight_over_ranks_do_what_they_do_one_after_another",
    ),
    Mutant(
        "verify lets the sender of a copy follow its receiver from run to run",
        "autosched/verification/loops.py",
        "divided(program.instructions, dict(program.ranks))",
        "divided(program.instructions, {})",
        "tests/verification/test_ranks.py::"
        "test_a_sender_learns_nothing_from_its_receiver_from_run_to_run",
    ),
    Mutant(
        "copies of a stream do not keep their order from run to run",
        f"{RANKS}/exchange.py",
        "        earlier = () if before is None else before._by_stream[self.events[event]]\n",
        "        earlier = ()\n",
        "tests/runtime/ranks/test_exchange.py::test_copies_of_a_stream_end_in_the_order_of_runs",
    ),
    Mutant(
        "a wait for an earlier run leaves out copies that the run itself has waited for",
        f"{RANKS}/waits.py",
        "[*found.get(key, ()), *copies]",
        "found.get(key, copies)",
        "tests/runtime/ranks/test_exchange.py::"
        "test_a_wait_for_an_earlier_run_is_for_all_copies_before_its_record",
    ),
    Mutant(
        "runs of ranks that noticed a failure in different runs do not belong together",
        f"{RANKS}/session.py",
        "        if number < self._first:\n",
        "        if number < 0:\n",
        "tests/runtime/ranks/test_failures.py::test_a_run_that_one_rank_gave_up_fails_on_all",
    ),
    Mutant(
        "a receiver does not look at the mark of a value of another shape",
        f"{RANKS}/exchange.py",
        "            if self.is_moved or self.mark[0]:\n",
        "            if self.is_moved:\n",
        "tests/runtime/ranks/test_runs.py::test_shapes_vary_from_run_to_run",
    ),
    Mutant(
        "a run ends before values of other shapes have been sent",
        f"{RANKS}/exchange.py",
        "            end.attended(end.finish)\n",
        "            pass\n",
        "tests/runtime/ranks/test_exchange.py::"
        "test_only_the_end_of_a_run_waits_for_values_of_other_shapes",
    ),
    Mutant(
        "ranks make communicators in different orders",
        f"{RANKS}/nccl.py",
        "        for channel in dict.fromkeys(mine.values()):\n",
        "        for channel in [*dict.fromkeys(mine.values())][:: 1 - self.gpu % 2 * 2]:\n",
        f"{NCCL}::test_ranks_in_a_ring_send_and_receive_at_once",
    ),
    Mutant(
        "the first exchange of two ranks over NCCL is in a run",
        f"{RANKS}/nccl.py",
        "            source, target = arc\n",
        "            continue\n",
        f"{NCCL}::test_ranks_in_a_ring_send_and_receive_at_once",
    ),
    Mutant(
        "NCCL is called where another GPU is current",
        f"{RANKS}/direct.py",
        "with torch.accelerator.device_index(device.index):",
        "if True:",
        f"{NCCL}::test_ranks_in_a_ring_send_and_receive_at_once",
    ),
    Mutant(
        "no stream waits for a copy over NCCL",
        f"{RANKS}/direct.py",
        "            how(row, self.gpu).wait()\n",
        "            how(row, self.gpu)\n",
        f"{NCCL}::test_ranks_in_a_ring_send_and_receive_at_once",
    ),
    Mutant(
        "a row over NCCL may have another size than its receiver expects",
        f"{RANKS}/direct.py",
        "        elif self.known != signature(value):\n",
        "        elif False:\n",
        f"{NCCL}::test_a_sender_compares_shapes_before_it_sends",
    ),
    Mutant(
        "what NCCL leaves when it is aborted is taken for a result",
        f"{RANKS}/direct.py",
        "        if self.is_lost:\n            raise self.session.cause(pending)",
        "        if False:\n            raise self.session.cause(pending)",
        f"{NCCL}::test_a_task_that_raises_ends_the_run_of_all_ranks",
    ),
    Mutant(
        "a lost host is noticed no sooner than a process that is stopped",
        f"{RANKS}/session.py",
        "        with acknowledged(member.heartbeat):\n",
        "        with acknowledged(None):\n",
        f"{FAILURES}::test_the_connections_of_ranks_break_where_a_host_is_lost",
    ),
    Mutant(
        "ranks that connect do not look for processes that have ended",
        f"{RANKS}/session.py",
        "                if has_ended(process):\n",
        "                if False:\n",
        f"{FAILURES}::test_a_rank_that_is_killed_while_ranks_connect_is_named_on_all_others",
    ),
    Mutant(
        "a run that failed to connect is not counted on its rank",
        f"{RANKS}/session.py",
        "        finally:\n            self._runs = number + 1\n",
        "        finally:\n            pass\n        self._runs = number + 1\n",
        f"{FAILURES}::test_a_rank_that_cannot_connect_is_named_on_all_others_and_runs_go_on",
    ),
    Mutant(
        "runs of two schedules over ranks are under way at once",
        f"{RANKS}/session.py",
        "                last.wait(deadline)\n",
        "                pass\n",
        "tests/runtime/ranks/test_runs.py::test_runs_of_several_schedules_follow_each_other",
    ),
    Mutant(
        "ranks do not say what they execute when a run is late",
        f"{RANKS}/session.py",
        '        where = " and ".join(filter(None, (exchange.where() for exchange in exchanges)))\n',
        '        where = ""\n',
        f"{FAILURES}::test_the_task_of_a_late_run_is_named_on_all_ranks",
    ),
    Mutant(
        "a rival's graph is captured where it has a workspace",
        "benchmarks/gpu/contestants.py",
        "with _own_workspaces(), torch.cuda.graph(graph):",
        "with torch.cuda.graph(graph, stream=side):",
        f"{RIVALS}::test_the_graph_of_a_rival_outlives_the_workspaces_of_the_process",
    ),
    Mutant(
        "a handle of cuBLAS is created in a capture",
        CUDA_GRAPHS,
        "        torch.cuda.current_blas_handle()  # type: ignore[no-untyped-call]\n",
        "",
        f"{STATE}::test_a_thread_has_handles_before_it_records",
    ),
    Mutant(
        "a handle of cuDNN is created in a capture",
        CUDA_GRAPHS,
        "        torch.nn.functional.conv2d(one, one)",
        "        one",
        f"{STATE}::test_a_thread_has_handles_before_it_records",
    ),
    Mutant(
        "a graph that failed is gone, and asked about page-locked memory",
        CUDA_GRAPHS,
        "        _failed.append(graph)\n",
        "",
        f"{STATE}::test_after_a_failed_capture_page_locked_memory_is_allocated_in_captures",
    ),
    Mutant(
        "the pool of a failed capture is in use for good",
        CUDA_GRAPHS,
        "            torch._C._cuda_releasePool(device.index, pool)\n",
        "",
        f"{STATE}::test_the_memory_of_a_failed_capture_can_be_released",
    ),
    Mutant(
        "generators of a failed capture go on capturing",
        CUDA_GRAPHS,
        "_begun(torch.cuda.graph_pool_handle(), used).capture_end()",
        "_begun(torch.cuda.graph_pool_handle(), ()).capture_end()",
        f"{STATE}::test_generators_of_a_failed_capture_draw_again",
    ),
    Mutant(
        "a capture begins while other graphs read random state",
        CUDA_GRAPHS,
        "    torch.accelerator.synchronize(root.device)\n",
        "",
        f"{STATE}::test_a_recording_leaves_graphs_in_flight_their_random_numbers",
    ),
    Mutant(
        "cached memory is not released before a recording",
        CUDA_GRAPHS,
        "                torch.cuda.empty_cache()\n",
        "",
        f"{STATE}::test_a_recording_needs_no_memory_beside_what_ordinary_runs_have_cached",
    ),
    Mutant(
        "a run fails that does not fit while it is recorded",
        CUDA_GRAPHS,
        "isinstance(error, torch.OutOfMemoryError) or ",
        "",
        f"{STATE}::test_a_run_that_does_not_fit_while_it_is_recorded_is_an_ordinary_one",
    ),
    Mutant(
        "a recording keeps what its segments free",
        f"{REPLAY}/recording.py",
        "before[slot] = transform(self._recorder.borrowed, before[slot])",
        "pass",
        f"{STATE}::test_a_recording_keeps_no_memory_longer_than_the_program",
    ),
    Mutant(
        "recordings share a workspace",
        CUDA_GRAPHS,
        "with _current(root), _without_workspaces(), warnings.catch_warnings():",
        "with _current(root), warnings.catch_warnings():",
        f"{STATE}::test_recordings_do_not_share_a_workspace",
    ),
    Mutant(
        "other work takes the workspace of a recording",
        CUDA_GRAPHS,
        "    try:\n        yield\n    finally:\n        torch._C._cuda_clearCublasWorkspaces()\n",
        "    yield\n",
        f"{STATE}::test_other_work_does_not_use_the_workspace_of_a_recording",
    ),
    Mutant(
        "a recording takes a workspace of the ordinary pool",
        CUDA_GRAPHS,
        "    torch._C._cuda_clearCublasWorkspaces()\n    try:\n        yield\n    finally:",
        "    try:\n        yield\n    finally:",
        f"{STATE}::test_a_recording_has_no_workspace_of_the_ordinary_pool",
    ),
    Mutant(
        "generators are registered on whatever device is current",
        CUDA_GRAPHS,
        "    for generator in generators:\n        graph.register_generator_state(generator)\n",
        "    with torch.cuda.device(0):\n"
        "        [graph.register_generator_state(generator) for generator in generators]\n",
        f"{STATE}::test_generators_are_registered_on_the_device_of_the_recording",
    ),
    Mutant(
        "one interference ends recording for good",
        f"{REPLAY}/cache.py",
        "if not recording.may_succeed_later or self.failures == _ATTEMPTS:",
        "if recording.reason:",
        f"{STATE}::test_a_recording_that_another_thread_broke_is_tried_again",
    ),
    Mutant(
        "a stream that torch hands out again is taken for another",
        "autosched/runtime/backends/accelerator.py",
        "(stream := torch.Stream(device, priority=priority)) not in taken",
        "(stream := torch.Stream(device, priority=priority))",
        f"{STATE}::test_recording_streams_are_distinct_whoever_else_takes_streams",
    ),
    Mutant(
        "a call returns while page-locked memory of the caller is read",
        "autosched/runtime/backends/transfers.py",
        "            self.in_use.add(self.into)\n",
        "            pass\n",
        "tests/gpu/test_accelerator.py"
        "::test_a_call_waits_only_for_copies_that_read_the_callers_memory_later",
    ),
    Mutant(
        "a sleep that was too short is not calibrated again",
        "autosched/measurement/stopwatch.py",
        "        if not clean:\n            self._calibrate()\n",
        "",
        "tests/measurement/test_measurement.py"
        "::test_the_sleep_is_calibrated_again_when_it_was_too_short",
    ),
    Mutant(
        "generated code runs in two threads at once",
        "autosched/codegen/preamble.py",
        "        with lock:\n",
        "        if lock:\n",
        "tests/gpu/test_accelerator.py::test_generated_code_leaves_each_thread_its_current_stream",
    ),
    Mutant(
        "waits for the run before are asked for in the order of issue, not the latest first",
        f"{LOWERING}/carried.py",
        "sorted(others, reverse=True)",
        "sorted(others)",
        "tests/lowering/test_loops.py"
        "::test_one_wait_suffices_where_the_last_reader_comes_after_the_others",
    ),
    Mutant(
        "a copy home in the run before is no write",
        f"{LOWERING}/carried.py",
        "yield target, graph.values[target.value].region, True",
        "yield target, graph.values[target.value].region, False",
        CARRIED,
    ),
    Mutant(
        "runs do not take turns with shared state",
        f"{LOWERING}/carried.py",
        "found.setdefault(min(together), set()).add(max(together))",
        "pass",
        "tests/lowering/test_loops.py::test_the_first_task_with_shared_state_waits_for_the_last",
    ),
    Mutant(
        "verify does not look at readers of the run before",
        "autosched/verification/loops.py",
        "    return [*writers, *readers]",
        "    return writers",
        LOOP_REFERENCE,
    ),
    Mutant(
        "a wait for the run before is taken for one of the same run",
        "autosched/program/bit_clocks.py",
        "self._events_before if instruction.ago else self._events",
        "self._events",
        LOOP_REFERENCE,
    ),
    Mutant(
        "what is proved at once may rely on waits for the run before",
        "autosched/verification/functional.py",
        "        elif kind == WAIT:\n",
        "        else:\n",
        "tests/verification/test_functional.py::test_of_a_loop_it_proves_each_run_by_itself",
    ),
    Mutant(
        "a run begins before any of those in flight has ended, where the period is computed",
        "autosched/simulation/periods.py",
        "self.edges += [(self.end, 0, program.in_flight)]",
        "self.edges += []",
        f"{PERIODS}::test_stages_on_devices_overlap",
    ),
    Mutant(
        "a wait for an earlier run is predicted as one for this run",
        "autosched/simulation/simulate.py",
        "return events[wait.ago][wait.event]",
        "return events[0].get(wait.event, 0.0)",
        f"{PERIODS}::test_a_carried_wait_is_an_arrow_between_runs",
    ),
    Mutant(
        "the memory of one run alone is counted",
        "autosched/simulation/footprint.py",
        "nbytes + others * needs[name].each",
        "nbytes",
        f"{OBJECTIVE}::test_memory_reduces_the_runs_in_flight",
    ),
    Mutant(
        "data for all stages are copied to each directly",
        "autosched/policies/local_search/splitting.py",
        "if b > a + 1 and",
        "if b > a + 99 and",
        f"{OBJECTIVE}::test_data_for_all_stages_keep_none_waiting",
    ),
    Mutant(
        "what a unit makes is copied by its old stage after a move",
        "autosched/policies/local_search/stage_moves.py",
        "                    loads[3 * b + 1] += s.out[path]\n                    loads[3 * q + 2] += s.into[path]\n",
        "                    loads[3 * a + 1] += s.out[path]\n                    loads[3 * q + 2] += s.into[path]\n",
        "tests/policies/test_splitting.py::test_a_move_changes_loads_as_counting_them_anew_does",
    ),
    Mutant(
        "state on a device is not copied again after a write in place",
        "autosched/scheduling/resident_state.py",
        "            and self.version == source._version\n",
        "",
        "tests/scheduling/test_resident_state.py::test_only_what_was_changed_is_copied_again",
    ),
    Mutant(
        "a step of a fused optimizer leaves state on devices as it was",
        "autosched/scheduling/resident_state.py",
        "            copy.version = None\n",
        "            pass\n",
        "tests/scheduling/test_resident_state.py::test_a_change_is_seen_by_the_next_call",
    ),
    Mutant(
        "a view of a view of state stays where the policy placed it",
        "autosched/lowering/resident_state.py",
        "            views.append((task, bases[0] if bases else task))\n",
        "            views.append((task, task))\n",
        "tests/lowering/test_resident_state.py"
        "::test_law_a_step_with_shared_weights_equals_the_eager_one_for_each_placement",
    ),
    Mutant(
        "generated code of a loop lets memory go before its run has ended",
        "autosched/codegen/loops.py",
        "    return outputs, left, ends\n",
        "    return outputs, {}, ends\n",
        GENERATED_LOOPS,
    ),
    Mutant(
        "branches share the stream whose last task is earliest, however much it has to do",
        "autosched/lowering/streams.py",
        "key=lambda s: (free[s], last[s])",
        "key=last.__getitem__",
        "tests/lowering/test_lowering.py::test_branches_are_spread_evenly_over_too_few_streams",
    ),
    Mutant(
        "a forward over ranks leaves what a stage wrote in the model of its rank alone",
        "autosched/parallel/model.py",
        "                        state[name].copy_(made)\n",
        "                        pass\n",
        "tests/runtime/ranks/test_stages.py"
        "::test_a_forward_has_its_result_on_one_rank_and_new_state_on_all",
    ),
    Mutant(
        "factors are left to Inductor",
        "autosched/fusion/rewriting.py",
        "    aten.add: _add,\n",
        "",
        "tests/fusion/test_inductor.py::test_products_are_added_with_their_factors",
    ),
    Mutant(
        "what arguments had is read after it was written",
        "autosched/fusion/tracing.py",
        "return None not in found and not changed.isdisjoint(found)",
        "return False",
        "tests/fusion/test_tracing.py::test_arguments_exchange_values_as_in_eager_mode",
    ),
    Mutant(
        "numbers that are read from tensors are rounded to single precision",
        "autosched/fusion/rewriting.py",
        "    if isinstance(number, (float, torch.SymFloat)):\n        return torch.float64\n",
        "    if isinstance(number, (float, torch.SymFloat)):\n        return torch.float32\n",
        "tests/fusion/test_inductor.py"
        "::test_numbers_that_are_read_from_tensors_have_double_precision",
    ),
    Mutant(
        "kernels are never compared with operators",
        "autosched/fusion/region.py",
        "if self.compares and variant.is_due(given):",
        "if False:",
        "tests/fusion/test_comparison.py::test_some_runs_for_each_kind_of_arguments_are_compared",
    ),
    Mutant(
        "a number with a new sign is not compared",
        "autosched/fusion/region.py",
        " and signs in self._signs:",
        ":",
        "tests/fusion/test_comparison.py::test_a_number_with_a_new_sign_is_compared",
    ),
    Mutant(
        "what is written is judged by its size, and not by its change",
        "autosched/fusion/comparison.py",
        "_errors(made, 0.0 if before is None else before)",
        "_errors(made, 0.0)",
        "tests/fusion/test_comparison.py::test_what_is_written_is_judged_by_how_it_changes",
    ),
    Mutant(
        "candidates are timed on state that runs have changed",
        "autosched/fusion/timing.py",
        "        _restore(given, inputs)\n",
        "",
        "tests/fusion/test_timing.py::test_each_run_begins_with_the_same_state",
    ),
    Mutant(
        "regions are compared without room for copies",
        "autosched/fusion/fusing.py",
        "peak.get(device.name, 0.0) + more > device.nbytes",
        "peak.get(device.name, 0.0) > device.nbytes",
        "tests/fusion/test_fusing.py"
        "::test_regions_need_room_for_copies_of_what_they_write_and_return",
    ),
    Mutant(
        "a region takes two arguments for one, because they were one tensor when it was compiled",
        "autosched/fusion/tracing.py",
        "each if apart[id(each)] == i else each.detach() for",
        "each for",
        "tests/fusion/test_region.py"
        "::test_one_tensor_for_two_arguments_says_nothing_of_the_next_call",
    ),
    Mutant(
        "generated code of a loop waits for events of the same run",
        "autosched/codegen/step.py",
        "self.module.earlier[event] if ago else events[event]",
        "events[event]",
        "tests/gpu/test_generated_loops.py::test_each_wait_for_the_run_before_is_needed",
    ),
    Mutant(
        "a run does not wait for the run before, where other threads record",
        "autosched/runtime/in_flight/slots.py",
        "                if slot < self._waits[at].ago:\n",
        "                if True:\n",
        f"{FLIGHT}/test_serial.py::test_in_every_interleaving",
    ),
    Mutant(
        "a run begins while another one uses the memory of its input by another name",
        "autosched/runtime/in_flight/runs.py",
        "        if self._overlaps.exist(",
        "        if False and (",
        f"{FLIGHT}/test_runs.py::test_memory_that_comes_under_another_name_is_waited_for",
    ),
    Mutant(
        "what is to be called when a run has ended is not called",
        "autosched/runtime/in_flight/future.py",
        "        self._invoke_callbacks()",
        "        pass",
        f"{FLIGHT}/test_runs.py::test_whoever_waits_for_runs_under_way_is_told",
    ),
    Mutant(
        "runs go on with the state that one which failed has left",
        "autosched/runtime/threads/loop_runs.py",
        "        if self._carries and (",
        "        if not self._carries and (",
        f"{FLIGHT}/test_runs.py::test_runs_that_need_the_state_of_one_that_failed_are_cancelled",
    ),
    Mutant(
        "what a run leaves is released before the devices have finished it",
        "autosched/runtime/backends/accelerator.py",
        "                last.synchronize()\n",
        "                pass\n",
        "tests/gpu/test_in_flight.py::test_runs_in_flight_equal_serial_runs_on_played_gpus",
    ),
    Mutant(
        "a run does not wait for what the caller has issued",
        "autosched/runtime/backends/accelerator.py",
        "        return partial(self.streams[stream].wait_event, self.starts[self.streams[stream].device])\n",
        "        return super().adopting()\n",
        "tests/gpu/test_in_flight.py"
        "::test_inputs_made_on_the_callers_stream_are_waited_for_and_may_be_dropped",
    ),
    Mutant(
        "the memory that a run leaves is not overwritten",
        "autosched/runtime/in_flight/slots.py",
        "            self.memory.spoil(self._spoil)\n",
        "            pass\n",
        f"{FLIGHT}/test_runs.py::test_leftover_memory_is_overwritten_when_a_run_has_ended",
    ),
    Mutant(
        "regions are joined though the plan becomes longer",
        "autosched/fusion/joining.py",
        "if made.makespan <= plan.makespan * _ROUNDING:",
        "if made.makespan < math.inf:",
        "tests/fusion/test_joining.py::test_groups_are_steps_of_a_plan_that_is_not_longer",
    ),
    Mutant(
        "joining does not know what views depend on",
        "autosched/fusion/candidates.py",
        "        if task.name in numbers:\n",
        "        if task.name in numbers and not task.view:\n",
        "tests/fusion/test_candidates.py::test_joining_sees_dependencies_through_views",
    ),
)


if __name__ == "__main__":
    sys.exit(main())
