"""Explain the makespan of a schedule, and suggest improvements.

Facts are read from a timeline, predicted or measured. Advice is a change whose gain is simulated by
the same ``simulate``, one change at a time with everything else unchanged; gains do not add up.
Nothing is changed and nothing runs.

Advice that moves tasks which the user distributed over devices is listed last, since there may be a
reason for that distribution. Advice about tasks bound to one of several devices, while others are
idle, may be listed first.

===============  ===========================================================================
facts            what each task and copy waited for, and why; the critical path, idle times by cause, slack
what_if          a schedule and its prediction, with variants for what-if questions
advice           page-locked memory, values that are spilled, inputs that could stay on accelerators,
                 launches; other placements, more devices, fewer
report           explanations of a whole schedule and of a task, and their texts; the period of a loop
===============  ===========================================================================

To add a remedy, write a function that yields ``Advice`` with the predicted makespan and the changed
case, and call it in ``report.explain``.
"""

from autosched.explanation.report import Explanation, TaskExplanation, explain, explain_task
from autosched.explanation.what_if import Advice, Case

__all__ = ["Advice", "Case", "Explanation", "TaskExplanation", "explain", "explain_task"]
