"""Explain the makespan of a schedule, and suggest improvements.

Facts are read from a timeline, predicted or measured. Advice is a change whose gain is simulated by
the same ``simulate``, one change at a time with everything else unchanged; gains do not add up.
Nothing is changed and nothing runs.

Advice that moves tasks which the user distributed over devices is listed last, since there may be a
reason for that distribution. Advice about tasks bound to one of several devices, while others are
idle, may be listed first.

==========  ==================================================================================
case        a schedule and its prediction, with variants for what-if questions
causes      what each task and each copy waited for, and why
facts       the critical path, idle times by cause, slack
choice      why a task runs where and when it does
spills      values that limited memory forces to be copied again
transfers   advice: page-locked memory, streams for copies
homes       advice: inputs that could stay on accelerators
work        advice: tasks too small for their launch, reads on the host
places      advice: other placements, more devices, fewer
advice      a remedy and its predicted makespan
report      the explanation of a whole schedule, as ``explain`` returns it
writing     the text of an explanation
words       times, amounts and lists as text
==========  ==================================================================================

To add a remedy, write a function that yields ``Remedy`` with the predicted makespan, and call it in
``report.explain``.
"""

from autosched.explanation.advice import Advice
from autosched.explanation.case import Case
from autosched.explanation.choice import TaskExplanation, explain_task
from autosched.explanation.report import Explanation, explain

__all__ = ["Advice", "Case", "Explanation", "TaskExplanation", "explain", "explain_task"]
